"""What is refused, on every rank; what PyTorch asks of an op; explain and strict."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from fluxgen.runtime.ops import (
    all_gather,
    all_gather_matmul,
    fallback,
    matmul_reduce_scatter,
    reduce_scatter,
)
from fluxgen.runtime.ops.all_reduce import matmul_all_reduce, matmul_of_replicated
from fluxgen.runtime.ops.all_to_all import all_to_all_matmul, matmul_all_to_all
from fluxgen.runtime.session import dispatch
from fluxgen.runtime.session.groups import reset, state_of
from tests.dist.numbers import integers, raised, same

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


def _errors(groups, rank):
    group = groups["w4"]
    x, w = torch.ones(8, 6), torch.ones(5, 6)

    def gather(*args, **kwargs):
        return raised(lambda: all_gather_matmul(*args, **{"group": group, **kwargs}))

    def scatter(*args, **kwargs):
        return raised(lambda: matmul_reduce_scatter(*args, **{"group": group, **kwargs}))

    found = {
        "wrong k": (gather(x, torch.ones(5, 7)), ("w:", "K = 6", "(5, 7)")),
        "kn weight": (scatter(x, torch.ones(6, 5)), ("w:", "(6, 5)", "w.t()")),
        "second": (gather(x, [w, torch.ones(5, 5)]), ("w[1]:", "(5, 5)")),
        "no weight": (gather(x, []), ("w:", "empty")),
        "dtype": (gather(x, w.bfloat16()), ("w:", "float32", "bfloat16")),
        "bias dtype": (scatter(x, w, torch.ones(5).half()), ("bias:", "float16")),
        "bias (1, N)": (scatter(x, w, torch.ones(1, 5)), ("bias:", "(5,)", "(1, 5)")),
        "bias N": (gather(x, w, torch.ones(6)), ("bias:", "(5,)", "(6,)")),
        "biases": (gather(x, [w, w], [None]), ("bias:", "2 weights", "found 1")),
        "one bias": (gather(x, [w, w], torch.ones(5)), ("bias:", "2 weights")),
        "rows": (gather(x, w, gather_size=10), ("x:", "gather_size=10", "[3, 3, 2, 2]", "(8, 6)")),
        "size": (gather(x, w, gather_size=-1), ("gather_size:", "found -1")),
        "last dim": (scatter(x, w, scatter_dim=1), ("scatter_dim:", "0 to 0", "found 1")),
        "dim": (gather(x, w, gather_dim=-3), ("gather_dim:", "found -3")),
        "1-D": (gather(torch.ones(6), w), ("x:", "(6,)")),
        "integers": (gather(x.int(), w.int()), ("x:", "torch.int32")),
        "device": (gather(x, w.to("meta")), ("w:", "cpu", "meta")),
        "reduce_op": (scatter(x, w, reduce_op="max"), ("reduce_op:", "sum", "'max'")),
        "bias_mode": (scatter(x, w, bias_mode="rank0"), ("bias_mode:", "partial", "'rank0'")),
        "group name": (gather(x, w, group="none such"), ("group:", "none such")),
        "no tensor": (gather([1.0], w), ("x:", "[1.0]")),
        "no w": (gather(x, None), ("w:", "None")),
        "number": (scatter(x, w, 1.0), ("bias:", "1.0")),
        "no group": (gather(x, w, group=None), ("group:", "None")),
    }
    for name, ((kind, text), parts) in found.items():
        assert kind == "UsageError", (name, kind, text)
        assert all(part in text for part in parts), (name, text)
    if rank != 0:
        alien = dist.GroupMember.NON_GROUP_MEMBER
        assert raised(lambda: all_gather_matmul(x, w, group=alien))[0] == "UsageError"
    # Nothing was sent: the next call is in step.
    x = integers(1, 8, 6)
    same(all_gather_matmul(x.chunk(4)[rank], w, group=group), x @ w.T)


def test_errors_on_every_rank_before_anything_is_sent(ranks):  # A01, A03, D11, E13
    ranks(_errors)


def _differences(groups, rank):
    group = groups["w4"]
    x, w, bias = torch.ones(8, 6), torch.ones(37, 6), torch.ones(37)
    calls = (
        lambda: matmul_reduce_scatter(x, w, bias if rank == 0 else None, group=group),
        lambda: matmul_reduce_scatter(torch.ones(8 + 4 * (rank == 2), 6), w, group=group),
        lambda: all_gather_matmul(torch.ones(2 + (rank == 1), 41), torch.ones(3, 41), group=group),
        lambda: all_gather_matmul(
            torch.ones(2, 43).to(torch.float16 if rank == 3 else torch.float32),
            torch.ones(3, 43).to(torch.float16 if rank == 3 else torch.float32),
            group=group,
        ),
    )
    found = [raised(call) for call in calls]
    same(matmul_reduce_scatter(x, w, bias, group=group), torch.full((2, 37), 25.0))
    return found


def test_ranks_that_differ_are_named_on_every_rank(ranks):
    results = ranks(_differences)
    assert all(result == results[0] for result in results)
    expected = (
        ("bias replicated", "bias none", "bias_mode='partial'"),
        ("rank 2: ", "leading sizes [12]"),
        ("rank 1: ", "leading sizes [12]"),
        ("rank 3: dtype torch.float16", "rank 0: dtype torch.float32"),
    )
    for (kind, text), parts in zip(results[0], expected, strict=True):
        assert kind == "AgreementError"
        assert all(part in text for part in parts), text


def _opcheck(groups, rank):
    group = groups["w2"] if rank < 2 else None
    if group is None:
        return
    name = group.group_name
    gather = torch.ops.fluxgen.all_gather_matmul.default
    scatter = torch.ops.fluxgen.matmul_reduce_scatter.default

    def t(*shape, grad=True):
        return torch.randn(*shape, requires_grad=grad)

    samples = [
        (gather, (t(4, 6), [t(5, 6)], [], [False], name, 2, 0, 8, False)),
        (gather, (t(2, 4, 6), [t(5, 6), t(3, 6)], [t(3)], [False, True], name, 2, 1, 8, True)),
        (gather, (t(4, 3, 6, grad=False), [], [], [], name, 2, 0, 8, True)),
        (gather, (t(3 - rank, 6), [t(5, 6)], [], [False], name, 2, 0, 5, True)),
        (scatter, (t(4, 6), t(5, 6), None, name, 2, 0, 2, "sum", "replicated")),
        (scatter, (t(3, 4, 6), t(6, 5).t().detach(), t(5), name, 2, 1, 2, "avg", "partial")),
        (scatter, (t(5, 6), t(5, 6), None, name, 2, 0, 3 - rank, "sum", "replicated")),
    ]
    for op, args in samples:
        results = torch.library.opcheck(op, args)
        assert set(results.values()) == {"SUCCESS"}, results


def test_opcheck(ranks):  # G13
    ranks(_opcheck)


def _compile(groups, rank, backend, dynamic):
    group = groups["w4"]
    w1, w2 = integers(1, 4, 6), integers(2, 6, 4)
    bias = integers(3, 6)

    def block(x, w1, w2, bias):
        a, b = all_gather_matmul(x, [w1, w1], group=group, save_gathered=True)
        return matmul_reduce_scatter(a.relu() * b, w2, bias, group=group)

    compiled = torch.compile(block, backend=backend, fullgraph=True, dynamic=dynamic)
    for lead in ((2,), (3,), (5,)) if dynamic else ((2,), (2, 3)):
        outs = []
        for run in (block, compiled):
            leaves = [t.clone().requires_grad_() for t in (integers(rank, *lead, 6), w1, w2, bias)]
            y = run(*leaves)
            y.square().sum().backward()
            outs.append([y.detach(), *(t.grad for t in leaves)])
        for got, want in zip(*outs, strict=True):
            same(got, want)


@pytest.mark.parametrize(("backend", "dynamic"), [("eager", None), ("aot_eager", True)])
def test_compiles_as_one_graph(ranks, backend, dynamic):
    ranks(_compile, backend, dynamic)


def _compile_checks(groups, rank):
    group = groups["w4"]
    compiled = torch.compile(
        lambda x, w: matmul_reduce_scatter(x, w, group=group), backend="eager", fullgraph=False
    )
    return raised(lambda: compiled(torch.ones(8, 6), torch.ones(5, 7)))


def test_a_compiled_call_is_refused_alike(ranks):
    for _, text in ranks(_compile_checks):
        assert "found (5, 7)" in text


def _strict(groups, rank):
    group = groups["w4"]
    x, w = torch.ones(8, 6, requires_grad=True), torch.ones(5, 6)
    with dispatch.explain() as seen:
        y = all_gather_matmul(x, w, group=group)
        y = all_gather_matmul(x, w, group=group)
        y.sum().backward()
    lines = str(seen).splitlines()
    assert len(seen.decisions) == 3
    assert lines == [
        "ag_gemm/float32/m32-n5-k6-tp4: unfused: no CUDA GPU: the tensors are on cpu (2x)",
        "gemm_rs/float32/m32-n6-k5-tp4/kn: unfused: no CUDA GPU: the tensors are on cpu (1x)",
    ]
    assert dispatch.explain().decisions[-1] == seen.decisions[-1]
    with dispatch.strict():
        for call in (
            lambda: all_gather_matmul(x, w, group=group),
            lambda: matmul_reduce_scatter(x, w, group=group),
        ):
            kind, text = raised(call)
            assert kind == "UnsupportedError"
            assert "no CUDA GPU" in text
        if rank == 0:
            all_gather_matmul(x, w, group=groups["w1"])
        assert all_gather_matmul(torch.ones(0, 6), w, group=group).shape == (0, 5)
    matmul_reduce_scatter(x, w, group=group)


def test_explain_and_strict(ranks):  # F19
    ranks(_strict)


def _direct(groups, rank):
    group = groups["w4"]
    calls = []
    kept = all_gather._gather_impl, reduce_scatter._scatter_impl

    def counted(real):
        return lambda *args: calls.append(real) or real(*args)

    all_gather._gather_impl, reduce_scatter._scatter_impl = map(counted, kept)
    try:
        x, w, bias = integers(1, 8, 6), torch.nn.Parameter(integers(2, 5, 6)), integers(3, 5)

        def run(x, w, bias):
            y = all_gather_matmul(x, [w], [bias], group=group, return_gathered=True)
            return y[0][0], y[1], matmul_reduce_scatter(x, w, bias, group=group)

        with torch.no_grad():
            plain = run(x, w, bias)
        assert len(calls) == 2
        for got, want in zip(run(x, w, bias), plain, strict=True):
            same(got.detach(), want)
        with torch.no_grad():
            with FlopCounterMode(display=False):
                run(x, w, bias)
            with FakeTensorMode() as mode:
                fakes = run(*map(mode.from_tensor, (x, w, bias)))
            assert [t.shape for t in fakes] == [t.shape for t in plain]
            make_fx(run)(x, w.detach(), bias)
            torch.compile(run, backend="eager", fullgraph=True)(x, w, bias)
        assert len(calls) == 2
    finally:
        all_gather._gather_impl, reduce_scatter._scatter_impl = kept


def test_plain_inference_skips_the_dispatcher_and_nothing_else_does(ranks):
    ranks(_direct)


def _contiguous(groups, rank):
    group = groups["w4"]
    kept = fallback.gather_into, fallback._reduce_into

    def checked(real):
        def call(out, rows, group):
            assert out.is_contiguous()
            assert rows.is_contiguous()
            return real(out, rows, group=group)

        return call

    fallback.gather_into, fallback._reduce_into = map(checked, kept)
    try:
        x, w = torch.ones(6, 4).t().requires_grad_(), torch.ones(5, 6)
        all_gather_matmul(x, w, group=group).sum().backward()
        x, w = torch.ones(6, 4, 3).transpose(0, 2), torch.ones(6, 5).t()
        all_gather_matmul(x, w, group=group, gather_dim=1)
        matmul_reduce_scatter(x, w, group=group, scatter_dim=1)
    finally:
        fallback.gather_into, fallback._reduce_into = kept


def test_collectives_get_contiguous_tensors(ranks):  # D03: NCCL reads strides wrong, gloo copes
    ranks(_contiguous)


def _agrees_once(groups, rank):
    """The comparisons made by each of several calls."""
    state = state_of(groups["w4"])
    x, w = torch.ones(2, 47), torch.ones(5, 47)
    counts = []
    all_gather_matmul(torch.ones(2, 3), torch.ones(5, 3), group=groups["w4"])  # they have met
    for call in (
        lambda: all_gather_matmul(x, w, group=groups["w4"]),
        lambda: all_gather_matmul(x, w, group=groups["w4"]),
        lambda: all_gather_matmul(x[:1], w, group=groups["w4"]),
        lambda: all_gather_matmul(x, w, group=groups["w4"]),
        lambda: matmul_reduce_scatter(torch.ones(8, 3), torch.ones(61, 3), group=groups["w4"]),
    ):
        before = state._ledger._count
        call()
        counts.append(state._ledger._count - before)
    return counts


def test_a_call_is_compared_once(ranks):
    assert ranks(_agrees_once) == [[1, 0, 1, 0, 1]] * 4


def _uneven(groups, rank):
    """Layers that do not divide evenly, where some ranks come upon a size again and others not."""
    group = groups["w3"] if rank < 3 else None
    if group is None:
        return
    x = torch.ones(2, 53)
    for sizes in ((34, 33, 33), (33, 33, 34), (33, 34, 34), (33, 33, 33)):
        y = all_gather_matmul(x, torch.ones(sizes[rank], 53), group=group)
        same(y, torch.full((6, sizes[rank]), 53.0))
    for sizes in ((34, 33, 33), (33, 33, 34), (33, 34, 34)):
        k = sizes[rank]
        y = matmul_reduce_scatter(torch.ones(6, k), torch.ones(7, k), group=group)
        same(y, torch.full((2, 7), float(sum(sizes))))


def test_uneven_layers_take_the_unfused_path_together(ranks):
    ranks(_uneven)


def _late(groups, rank):
    """Ranks that come after the deadline: the error is everybody's, and then all are in step."""
    group = groups["even"] if rank in (0, 2) else groups["odd"]
    state = state_of(group)
    w = torch.ones(3, 59)
    all_gather_matmul(torch.ones(2, 59), w, group=group)
    state._ledger.deadline_s = 1.0
    try:
        if rank in (2, 3):
            time.sleep(2.5)
        return raised(lambda: all_gather_matmul(torch.ones(4, 59), w, group=group))
    finally:
        state._ledger.deadline_s = 30.0
        for rows in (4, 5):
            y = all_gather_matmul(torch.ones(rows, 59), w, group=group)
            same(y, torch.full((2 * rows, 3), 59.0))


def test_a_rank_that_comes_too_late_is_named_on_every_rank(ranks):  # I07
    for kind, text in ranks(_late):
        assert kind == "AgreementError"
        assert "rank 1 of the group did not come" in text


def _first_meeting(groups, rank):
    """The same at a group's first call, and a reset that only some need."""
    group = groups["even"] if rank in (0, 2) else groups["odd"]
    w = torch.ones(3, 67)
    reset(group)
    state_of(group).timeout_s = 1.0
    if rank in (2, 3):
        time.sleep(2.0)
    # Whoever came first has given up by now, so the other waits in vain: both raise.
    found = raised(lambda: all_gather_matmul(torch.ones(2, 67), w, group=group))
    dist.barrier(group)
    state_of(group).timeout_s = 30.0
    for _ in range(2):
        same(all_gather_matmul(torch.ones(2, 67), w, group=group), torch.full((4, 3), 67.0))
        reset(group)  # new words each time: what lies in the store is not believed
    same(all_gather_matmul(torch.ones(2, 67), w, group=group), torch.full((4, 3), 67.0))
    return found


def test_a_first_meeting_that_fails_can_be_held_again(ranks):
    for kind, text in ranks(_first_meeting):
        assert kind == "AgreementError"
        assert "did not come to the group's first comparison" in text


def _autocast(groups, rank):
    """Operands are cast as those of linear; gradients come back in the operands' own types."""
    group = groups["w4"]
    x, w = integers(1, 2, 6).requires_grad_(), integers(2, 5, 6).requires_grad_()
    more = integers(3, 8, 5), integers(4, 3, 5)
    plain = all_gather_matmul(x.detach(), w.detach(), group=group)  # known when autocast begins
    calls = {
        "gather": lambda: all_gather_matmul(x, w, integers(5, 5), group=group),
        "gathers": lambda: all_gather_matmul(x, [w, w], group=group)[1],
        "scatter": lambda: matmul_reduce_scatter(*more, group=group),
        "reduce": lambda: matmul_all_reduce(*more, residual=integers(6, 8, 3), group=group),
        "replicated": lambda: matmul_of_replicated(*more, group=group),
        "to all": lambda: matmul_all_to_all(*more, group=group),
        "of all": lambda: all_to_all_matmul(*more, group=group),
        "no gradients": lambda: all_gather_matmul(x.detach(), w.detach(), group=group),
        "mixed": lambda: all_gather_matmul(x.detach().bfloat16(), w, group=group),
    }
    with torch.autocast("cpu", torch.bfloat16):
        outs = {name: call() for name, call in calls.items()}
        assert torch.nn.functional.linear(x, w).dtype == torch.bfloat16
        double = all_gather_matmul(x.detach().double(), w.detach().double(), group=group)
        fp64 = raised(lambda: all_gather_matmul(x.detach().double(), w, group=group))
    assert {name: y.dtype for name, y in outs.items()} == dict.fromkeys(outs, torch.bfloat16)
    assert double.dtype == torch.float64, "which autocast leaves alone"
    assert fp64[0] == "UsageError"
    same(outs["no gradients"], plain.bfloat16())
    outs["gather"].sum().backward()
    assert x.grad.dtype == w.grad.dtype == torch.float32
    want = sum(integers(2, 5, 6).sum(0) for _ in range(4))
    same(x.grad, want.expand(2, 6).contiguous())
    with torch.autocast("cuda", torch.bfloat16):
        assert calls["gather"]().dtype == torch.float32, "of another device type"
    assert (
        raised(lambda: all_gather_matmul(x.detach().bfloat16(), w, group=group))[0] == "UsageError"
    )


def test_autocast_casts_as_linear_does(ranks):
    ranks(_autocast)


def _autocast_compiled(groups, rank):
    group = groups["w4"]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(x, w):
        return all_gather_matmul(x, w, group=group)

    with torch.autocast("cpu", torch.bfloat16):
        y = compiled(integers(1, 2, 6), integers(2, 5, 6))
    assert y.dtype == torch.bfloat16


def test_autocast_compiles(ranks):
    ranks(_autocast_compiled)


def _dual(groups, rank):
    """A tangent is not dropped without a word."""
    import torch.autograd.forward_ad as forward_ad

    group = groups["w4"]
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2, 6), torch.ones(2, 6))
        return raised(lambda: all_gather_matmul(x, torch.ones(5, 6), group=group))[0]


def test_forward_mode_is_refused(ranks):
    assert set(ranks(_dual)) == {"UnsupportedError"}
