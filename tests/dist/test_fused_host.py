"""The fused path's host side, without a GPU: what the ops hand to C, for every kind of call."""

from __future__ import annotations

import contextlib
import os
import weakref
from unittest import mock

import pytest
import torch

from fluxgen.core.config import Transport
from fluxgen.core.errors import KernelError
from fluxgen.machine.wiring import Wiring
from fluxgen.runtime.ops import all_gather_matmul, matmul_reduce_scatter
from fluxgen.runtime.ops.all_reduce import matmul_all_reduce
from fluxgen.runtime.session import fused
from fluxgen.runtime.session import groups as groups_module
from fluxgen.runtime.session.dispatch import Cause, explain, strict
from fluxgen.runtime.session.groups import reset, state_of
from tests.dist.host_library import Local, host_library
from tests.dist.numbers import integers, raised, same

pytestmark = [pytest.mark.dist]
BF16 = torch.bfloat16


def ints(seed, *shape):
    return integers(seed, *shape, dtype=BF16)


def scattered(partials, rank, scale=1.0, bias=None):
    total = sum(p.bfloat16().float() for p in partials) * scale
    total = total.chunk(len(partials))[rank]
    return (total if bias is None else total + bias.float()).bfloat16()


def _kinds(groups, rank, name, transport):
    group = groups.get(name)
    if group is None:
        return None
    world, me = group.size(), group.rank()
    rows, n, k = 24, 40, 16
    x, w, bias = ints(1, rows * world, k), ints(2 + me, n, k), ints(3, n)
    mine = x.chunk(world)[me].clone()
    want = (x.float() @ w.float().T).bfloat16()
    with host_library(group, transport) as support, strict(), explain() as seen:
        for _ in range(3):  # the second is compared with nobody, the third takes the fast path
            same(all_gather_matmul(mine, w, group=group), want)
            same(all_gather_matmul(mine, w, bias, group=group), want + bias)
        y, gathered = all_gather_matmul(mine, w, group=group, return_gathered=True)
        same(y, want)
        same(gathered, x)
        same(all_gather_matmul(mine, w.T.contiguous().T, group=group), want)
        padded = torch.full((rows, k + 8), float("nan")).to(BF16)
        padded[:, :k] = mine
        odd = torch.full((n, k + 1), float("nan")).to(BF16)
        odd[:, :k] = w
        shifted = torch.empty(rows * k + 1, dtype=BF16)[1:].view(rows, k).copy_(mine)
        same(all_gather_matmul(padded[:, :k], w, group=group), want)
        same(all_gather_matmul(mine, odd[:, :k], group=group), want)
        for _ in range(2):  # another address, the same strides
            same(all_gather_matmul(shifted, w, group=group), want)
            same(all_gather_matmul(mine, w, group=group), want)
        several = all_gather_matmul(mine, [w, w[:8], w[8:]], [None, bias[:8], None], group=group)
        for got, part, b in zip(several, (want, want[:, :8], want[:, 8:]),
                                (None, bias[:8], None), strict=True):  # fmt: skip
            same(got, part if b is None else part + b)
        batch = ints(4, 2, rows * world, k)
        y = all_gather_matmul(batch.chunk(world, 1)[me], w, group=group, gather_dim=1)
        same(y, (batch.float() @ w.float().T).bfloat16())

        xs = [ints(100 + q, rows * world, k) for q in range(world)]
        ws = [ints(200 + q, n, k) for q in range(world)]
        partials = [a.float() @ c.float().T for a, c in zip(xs, ws, strict=True)]
        for _ in range(3):
            same(matmul_reduce_scatter(xs[me], ws[me], group=group), scattered(partials, me))
            y = matmul_reduce_scatter(xs[me], ws[me], bias, group=group, reduce_op="avg")
            same(y, scattered(partials, me, 1 / world, bias))
        same(matmul_reduce_scatter(xs[me], ws[me].T.contiguous().T, group=group),
             scattered(partials, me))  # fmt: skip
        y = matmul_reduce_scatter(xs[me], ws[me], bias[::1], group=group)
        same(y, scattered(partials, me, 1.0, bias))
        cubes = [ints(300 + q, 2, rows * world, k) for q in range(world)]
        y = matmul_reduce_scatter(cubes[me], ws[me], group=group, scatter_dim=1)
        parts = [(a.float() @ c.float().T).transpose(0, 1).contiguous()
                 for a, c in zip(cubes, ws, strict=True)]  # fmt: skip
        same(y, scattered(parts, me).transpose(0, 1))
        # A larger call makes a larger workspace; what was called before goes on.
        before = weakref.ref(state_of(group).fused.workspace)
        big = ints(5, 96 * world, 64)
        same(all_gather_matmul(big.chunk(world)[me], ints(6, n, 64), group=group),
             (big.float() @ ints(6, n, 64).float().T).bfloat16())  # fmt: skip
        assert before() is None, "freed at once: later it could be inside a capture"
        same(all_gather_matmul(mine, w, group=group), want)
        same(matmul_reduce_scatter(xs[me], ws[me], group=group), scattered(partials, me))
    assert {d.cause for d in seen.decisions} == {Cause.FUSED}
    return set(support.calls)


@pytest.mark.parametrize("name", ["w2", "w3", "w4", "even", "reversed"])
@pytest.mark.parametrize(
    ("transport", "made"),
    [
        (Transport.COPY_ENGINE_PUSH, {"pushes", "pulls", "stores"}),  # what is returned is pulled
        (Transport.COPY_ENGINE_PULL, {"pulls", "drains"}),
        (Transport.SM_COPY, {"sm copy", "stores"}),
    ],
)
def test_what_c_is_handed(ranks, name, transport, made):  # A07, A17, D01, D05, D11, E03, F11
    for calls in ranks(_kinds, name, transport):
        assert calls in (None, made)


def _gradients(groups, rank):
    group, world, rows, n, k = groups["w4"], 4, 24, 40, 16
    x, w = ints(1, rows * world, k), [ints(10 + q, n, k) for q in range(world)]
    dy = [ints(20 + q, rows * world, n) for q in range(world)]
    mine, mw = x.chunk(world)[rank].clone().requires_grad_(), w[rank].clone().requires_grad_()
    with host_library(group), explain() as seen:
        all_gather_matmul(mine, mw, group=group).backward(dy[rank])
    assert [d.key.rpartition("tp4")[2] for d in seen.decisions] == ["", "/kn"]
    assert {d.cause for d in seen.decisions} == {Cause.FUSED}
    same(mine.grad, scattered([g.float() @ c.float() for g, c in zip(dy, w, strict=True)], rank))
    same(mw.grad, (dy[rank].float().T @ x.float()).bfloat16())


def test_the_backward_reads_the_weight_where_it_lies(ranks):
    ranks(_gradients)


def _all_reduced(groups, rank, name):
    group = groups.get(name)
    if group is None:
        return
    world, me, n, k = group.size(), group.rank(), 40, 16
    stores = Transport.COPY_ENGINE_PUSH
    with host_library(group, stores) as support, strict(), explain() as seen:
        for lead in ((8 * world,), (world, 16)):  # rows are cut across what leads them
            support.calls.clear()
            xs = [ints(100 + q, *lead, k) for q in range(world)]
            ws = [ints(200 + q, n, k) for q in range(world)]
            total = sum((a.float() @ c.float().T).bfloat16().float()
                        for a, c in zip(xs, ws, strict=True))  # fmt: skip
            bias, residual = ints(3, n), ints(4, *lead, n)
            for _ in range(3):
                same(matmul_all_reduce(xs[me], ws[me], group=group), total.bfloat16())
                y = matmul_all_reduce(xs[me], ws[me], bias, residual, group=group)
                same(y, (total + bias.float() + residual.float()).bfloat16())
                odd = ints(5, *lead, n + 1)[..., 1:].copy_(residual)  # rows that are not contiguous
                same(matmul_all_reduce(xs[me], ws[me], bias, odd, group=group), y)
            assert support.calls == ["shares, stores"] * 9
    assert {d.cause for d in seen.decisions} == {Cause.FUSED}
    assert {d.key.partition("/")[0] for d in seen.decisions} == {"gemm_ar"}
    with host_library(group), explain() as seen:  # rows that the ranks do not divide
        x, w = ints(1, 8 * world + 1, k), ints(2, n, k)
        same(matmul_all_reduce(x, w, group=group), (world * (x.float() @ w.float().T)).bfloat16())
    assert [d.path for d in seen.decisions] == ["unfused"]


def _all_reduced_in_one_shot(groups, rank, name, transport):
    group = groups.get(name)
    if group is None:
        return
    world, me, n, k = group.size(), group.rank(), 40, 16
    with host_library(group, transport) as support, strict(), explain() as seen:
        for m in (1, 2 * world + 1):  # rows that the ranks do not share evenly
            xs = [ints(100 + q, m, k) for q in range(world)]
            ws = [ints(200 + q, n, k) for q in range(world)]
            total = sum((a.float() @ c.float().T).bfloat16().float()
                        for a, c in zip(xs, ws, strict=True))  # fmt: skip
            bias, residual = ints(3, n), ints(4, m, n)
            for _ in range(2):
                same(matmul_all_reduce(xs[me], ws[me], group=group), total.bfloat16())
                y = matmul_all_reduce(xs[me], ws[me], bias, residual, group=group)
                same(y, (total + bias.float() + residual.float()).bfloat16())
        how = "one shot, packets" if transport.packed else "one shot"
        assert support.calls == [f"{how}, stores"] * 8
    assert {d.cause for d in seen.decisions} == {Cause.FUSED}


@pytest.mark.parametrize("name", ["w2", "w3", "w4"])
@pytest.mark.parametrize("transport", [Transport.PEER_BROADCAST, Transport.BROADCAST_PACKETS])
def test_an_all_reduce_of_few_rows_in_one_shot(ranks, name, transport):
    ranks(_all_reduced_in_one_shot, name, transport)


def _scattered_in_packets(groups, rank, name):
    group = groups.get(name)
    if group is None:
        return
    world, me, n, k = group.size(), group.rank(), 40, 16
    with host_library(group, Transport.PEER_PACKETS) as support, strict():
        xs = [ints(100 + q, 2 * world, k) for q in range(world)]
        ws = [ints(200 + q, n, k) for q in range(world)]
        total = sum((a.float() @ c.float().T).bfloat16().float()
                    for a, c in zip(xs, ws, strict=True))  # fmt: skip
        for _ in range(2):
            y = matmul_reduce_scatter(xs[me], ws[me], group=group)
            same(y, total.bfloat16().chunk(world)[me])
        assert support.calls == ["packets, stores"] * 2


@pytest.mark.parametrize("name", ["w2", "w3", "w4"])
def test_a_reduce_scatter_of_few_rows_in_packets(ranks, name):
    ranks(_scattered_in_packets, name)


@pytest.mark.parametrize("name", ["w2", "w3", "w4", "reversed"])
def test_an_all_reduce_is_a_fused_reduction_whose_rows_all_ranks_get(ranks, name):
    ranks(_all_reduced, name)


def _mixed(groups, rank):
    """Fused and unfused calls in turn, and ranks whose own sizes would decide otherwise."""
    group = groups["w4"]
    with host_library(group) as support, explain() as seen:
        for rows, n, k in [(24, 40, 16), (24, 36, 16), (24, 40, 12), (8, 8, 8), (0, 8, 8)]:
            x, w = ints(1, rows * 4, k), ints(2, n, k)
            same(all_gather_matmul(x[rank * rows : rank * rows + rows], w, group=group),
                 (x.float() @ w.float().T).bfloat16())  # fmt: skip
        causes = [d.cause for d in seen.decisions]
        n = (40, 40, 36, 40)[rank]  # one rank alone could not run a kernel
        x, w = ints(3, 8 * 4, 24), ints(4, n, 24)
        same(all_gather_matmul(x[rank * 8 : rank * 8 + 8], w, group=group),
             (x.float() @ w.float().T).bfloat16())  # fmt: skip
        last = seen.decisions[-1]
    fused_calls = [c for c in support.calls if c == "pulls"]
    return [c is Cause.FUSED for c in causes], len(fused_calls), last.path


def test_paths_mix_and_ranks_stay_together(ranks):
    results = ranks(_mixed)
    for fits, calls, last in results:
        assert fits == [True, False, False, True, False]
        assert calls == 2
        assert last == "unfused"


def _broken(groups, rank):
    """A timeout is raised at the next call and every one after it, until a reset by all."""
    group = groups["w4"]
    x, w = ints(1, 8, 16), ints(2, 8, 16)
    with host_library(group):
        all_gather_matmul(x, w, group=group)
        workspace = state_of(group).fused.workspace
        workspace.report.code = 1
        error = KernelError("ag_gemm: rank 0 waited")
        workspace.timeout = lambda: error
        found = [raised(lambda: all_gather_matmul(x, w, group=group)) for _ in range(2)]
        reset(group)
        same(all_gather_matmul(x, w, group=group), torch.cat([x] * 4) @ w.T)
    return found


def test_a_broken_group_stays_broken_until_reset(ranks):
    for found in ranks(_broken):
        assert found == [("KernelError", "ag_gemm: rank 0 waited")] * 2


def _no_memory(groups, rank, local, host):
    """Rank 2 has no symmetric memory, and rank 1 perhaps none in the host either."""
    group = groups["w4"]
    x, w = ints(1, 8, 16), ints(2, 8, 16)

    def refuse(*args):
        raise RuntimeError("peer access is not supported")

    class Host(Local):
        def __init__(self, *args):
            if rank == 1 and not host:
                raise OSError("no room")
            super().__init__(*args)

    with host_library(group), explain() as seen, mock.patch.object(fused, "HostPart", Host):
        reset(group)
        target = (fused, "SymmetricPart") if local else (Local, "join")
        broken = mock.patch.object(*target, refuse) if rank == 2 else contextlib.nullcontext()
        with broken:
            for _ in range(2):
                y = all_gather_matmul(x, w, group=group)
                same(y, torch.cat([x] * 4) @ w.T)
        decision = seen.decisions[0]
        hosted = not state_of(group).wiring.peers
    reset(group)
    return decision.cause, decision.reason, hosted


@pytest.mark.parametrize("local", [True, False])
def test_no_memory_that_ranks_share_is_a_fallback_for_all(ranks, local):  # F15
    for cause, reason, _ in ranks(_no_memory, local, False):
        assert cause is Cause.NO_PEERS
        assert "rank 2: RuntimeError: peer access is not supported" in reason
        assert "rank 1: OSError: no room" in reason


def test_without_symmetric_memory_ranks_meet_in_the_hosts(ranks):
    for cause, _, hosted in ranks(_no_memory, True, True):
        assert cause is Cause.FUSED
        assert hosted


def _disabled(groups, rank, where):
    """FLUXGEN_P2P_DISABLE on some ranks: a difference; on all: no symmetric memory is asked for."""
    group = groups["w4"]
    x, w = ints(1, 8, 16), ints(2, 8, 16)
    value = "1" if rank in where else "0"
    with host_library(group), mock.patch.dict(os.environ, FLUXGEN_P2P_DISABLE=value):
        reset(group)
        with (
            mock.patch.object(fused, "HostPart", Local),
            mock.patch.object(fused, "SymmetricPart", None),
        ):
            want = torch.cat([x] * 4) @ w.T
            found = raised(lambda: same(all_gather_matmul(x, w, group=group), want))
    reset(group)
    return found


def test_p2p_is_disabled_on_all_ranks_or_none(ranks):
    for error, text in ranks(_disabled, (1, 3)):
        assert error == "AgreementError"
        assert "FLUXGEN_P2P_DISABLE=1 is set on ranks [1, 3] only" in text
    assert ranks(_disabled, (0, 1, 2, 3)) == [("nothing", "")] * 4


def _hosts(groups, rank):
    """A group that spans hosts: unfused on all, with the hosts in the reason."""
    import socket
    from unittest import mock

    group = groups["w4"]
    x, w = ints(1, 8, 16), ints(2, 8, 16)
    with host_library(group), explain() as seen:
        reset(group)
        with mock.patch.object(socket, "gethostname", lambda: f"node{rank // 2}"):
            same(all_gather_matmul(x, w, group=group), torch.cat([x] * 4) @ w.T)
        decision = seen.decisions[0]
    reset(group)
    return decision.cause, decision.reason


def test_a_group_that_spans_hosts_is_not_fused(ranks):  # F13
    for cause, reason in ranks(_hosts):
        assert cause is Cause.NO_PEERS
        assert "the group spans hosts node0, node1" in reason


def _versions(groups, rank):
    from unittest import mock

    group = groups["w4"]
    x, w = ints(1, 8, 16), ints(2, 8, 16)
    with host_library(group):
        reset(group)
        with mock.patch.object(groups_module, "__version__", "9.9" if rank == 3 else "1.0"):
            found = raised(lambda: all_gather_matmul(x, w, group=group))
        reset(group)
        same(all_gather_matmul(x, w, group=group), torch.cat([x] * 4) @ w.T)
    reset(group)
    return found


def test_another_version_is_named_on_every_rank(ranks):
    for kind, text in ranks(_versions):
        assert kind == "AgreementError"
        assert "rank 0: {'version': '1.0'" in text
        assert "rank 3: {'version': '9.9'" in text


def _another_gpu(groups, rank, whose):
    group = groups["w2"] if rank < 2 else None
    if group is None:
        return None
    x, w = ints(1, 8, 16), ints(2, 8, 16)
    with host_library(group):
        all_gather_matmul(x, w, group=group)
        state = state_of(group)
        if rank in whose:
            state.fused.device = torch.device("meta")  # stands for the GPU of the calls before
        return raised(lambda: matmul_reduce_scatter(x, w, group=group))


@pytest.mark.parametrize(
    ("whose", "kind", "words"),
    [((0, 1), "UsageError", "A rank of a group uses one GPU"), ((1,), "AgreementError", "GPU")],
)
def test_a_second_gpu_is_refused_on_every_rank(ranks, whose, kind, words):
    for found in ranks(_another_gpu, whose)[:2]:
        assert found[0] == kind
        assert words in found[1]


def _sizes_in_turn(groups, rank):
    """I01, H03: one set of layers, any number of tokens in any order; nothing to reset."""
    group = groups["w2"] if rank < 2 else None
    if group is None:
        return None
    w = ints(2, 40, 16)
    with host_library(group) as support, strict():
        for tokens in (4096, 2, 778, 4096, 8192, 2):
            x = ints(tokens, tokens, 16)
            same(all_gather_matmul(x.chunk(2)[rank], w, group=group),
                 (x.float() @ w.float().T).bfloat16())  # fmt: skip
            same(matmul_reduce_scatter(x, w, group=group),
                 scattered([x.float() @ w.float().T] * 2, rank))  # fmt: skip
        stage = state_of(group).fused.workspace.sizes.stage
    return support.calls.count("drains"), stage


def test_any_number_of_tokens_in_any_order(ranks):
    results = ranks(_sizes_in_turn)
    assert results[:2] == [(6, 4096 * 16 * 2)] * 2


def _fp8(groups, rank):
    x, w = torch.ones(8, 16).to(torch.float8_e4m3fn), torch.ones(8, 16).to(torch.float8_e4m3fn)
    return [raised(lambda op=op: op(x, w, group=groups["w4"]))
            for op in (all_gather_matmul, matmul_reduce_scatter)]  # fmt: skip


def test_types_without_a_path_are_refused_with_the_types_that_have_one(ranks):  # E07, E11
    for found in ranks(_fp8):
        for kind, text in found:
            assert kind == "UsageError"
            assert "bfloat16, float16" in text
            assert "float8_e4m3fn" in text


def _foreign(groups, rank, difference):
    """One rank has another database: every rank is told what differs, and all stay in step."""
    from dataclasses import replace as change
    from unittest import mock

    from fluxgen.runtime.session import dispatch
    from tests.dist import host_library as library

    group = groups["w3"] if rank < 3 else None
    if group is None:
        return None
    x, w = ints(1, 8, 16), ints(2, 8, 16)

    def decide(call):
        made = library.decide(call)
        if rank != 2 or call.m != 24:
            return made
        if difference == "missing":
            return made.unfused(Cause.NO_RECORD, "nothing is tuned")
        if difference == "file":  # the same configuration, from another database
            return change(made, reason="exact: predicted record from elsewhere.sqlite3")
        other = change(made.winner.kernel, tile_n=128)
        return change(made, winner=change(made.winner, kernel=other))

    with host_library(group), mock.patch.object(dispatch, "decide", decide):
        reset(group)
        found = [raised(lambda: all_gather_matmul(x, w, group=group)) for _ in range(2)]
        y = all_gather_matmul(x[:4], w, group=group)
        same(y, torch.cat([x[:4]] * 3) @ w.T)
    reset(group)
    return found


def test_the_same_choice_from_another_database_is_no_difference(ranks):
    for found in ranks(_foreign, "file")[:3]:
        assert found == [("nothing", "")] * 2


@pytest.mark.parametrize("difference", ["kernel", "missing"])
def test_another_database_is_named_on_every_rank(ranks, difference):  # J01
    results = ranks(_foreign, difference)[:3]
    assert results[0] == results[1] == results[2]
    for kind, text in results[0]:
        assert kind == "AgreementError"
        assert "chose different paths for the same call" in text
        if difference == "kernel":
            assert "rank 0: kernel 64x96x64" in text
            assert "rank 2: kernel 64x128x64" in text
        else:
            assert "rank 2: path unfused, kernel none" in text
            assert "because nothing is tuned" in text


def _wired(groups, rank, answers, nodes, gpus):
    """What the ranks find out of their GPUs when they meet, one of them perhaps without NVML."""
    group = groups["w4"]
    x, w = ints(1, 8, 16), ints(2, 8, 16)
    with (
        host_library(group),
        mock.patch.object(groups_module, "_place", lambda _: (f"gpu{gpus[rank]}", nodes[rank])),
        mock.patch.object(groups_module, "nvlinked", lambda _: answers[rank]),
    ):
        reset(group)
        same(all_gather_matmul(x, w, group=group), torch.cat([x] * 4) @ w.T)
        wiring = state_of(group).wiring
    reset(group)
    return wiring


@pytest.mark.parametrize(
    ("answers", "nodes", "gpus", "want"),
    [
        ((True, True, True, True), (0, 0, 1, 1), (0, 1, 2, 3), Wiring(nvlink=True, islands=2)),
        ((False, False, False, False), (0, 0, 0, 0), (0, 1, 2, 3), Wiring(nvlink=False)),
        ((False, False, None, False), (0, 0, 1, 1), (4, 5, 6, 7), Wiring(islands=2)),
        ((None, None, None, None), (0, 0, 1, 1), (0, 0, 1, 1), Wiring()),
    ],
)
def test_the_ranks_know_alike_how_they_are_joined(ranks, answers, nodes, gpus, want):
    assert ranks(_wired, answers, nodes, gpus) == [want] * 4
