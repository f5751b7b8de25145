"""``matmul_all_reduce`` and the layers without sequence parallelism, against the unsharded run."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import fluxgen
from fluxgen.nn import ColumnParallelLinear, RowParallelLinear
from fluxgen.runtime.ops.all_reduce import matmul_all_reduce, matmul_of_replicated
from fluxgen.runtime.session import dispatch
from tests.dist.numbers import integers, raised, same

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

WORLDS = ("w1", "w2", "w3", "w4", "even", "reversed")
LEADS = ((12,), (1,), (5, 3), (0,))  # decoding, rows that no rank count divides, no tokens


def leaf(t):
    return t.clone().requires_grad_()


def _exact(groups, rank, name, added):
    if name not in groups:
        return
    group = groups[name]
    world, me = group.size(), dist.get_rank(group)
    for lead in LEADS:
        x, w = leaf(integers(1, *lead, 4 * world)), leaf(integers(2, 3, 4 * world))
        bias = leaf(integers(3, 3)) if "bias" in added else None
        residual = leaf(integers(4, *lead, 3)) if "residual" in added else None
        grad = integers(5, *lead, 3)
        want = x @ w.T
        want = want if bias is None else want + bias
        want = want if residual is None else want + residual
        want.backward(grad)
        mine = [leaf(t.detach().chunk(world, -1)[me]) for t in (x, w)]
        both = [t if t is None else leaf(t.detach()) for t in (bias, residual)]
        got = fluxgen.matmul_all_reduce(*mine, *both, group=group)
        same(got.detach(), want.detach())
        got.backward(grad)
        for own, full in zip(mine, (x, w), strict=True):
            same(own.grad, full.grad.chunk(world, -1)[me])
        for own, full in zip(both, (bias, residual), strict=True):
            if own is not None:
                same(own.grad, full.grad)
        plain = [t if t is None else t.detach() for t in (*mine, *both)]
        kept = [t if t is None else t.clone() for t in plain]
        same(matmul_all_reduce(*plain, group=group.group_name), want.detach())
        for t, before in zip(plain, kept, strict=True):
            if t is not None:
                same(t, before)


@pytest.mark.parametrize("added", ["", "bias", "residual", "bias and residual"])
@pytest.mark.parametrize("name", WORLDS)
def test_values_and_gradients(ranks, name, added):
    ranks(_exact, name, added)


def _replicated(groups, rank, name):
    if name not in groups:
        return
    group = groups[name]
    world, me = group.size(), dist.get_rank(group)
    x, w, bias = leaf(integers(1, 5, 2, 6)), leaf(integers(2, 4 * world, 6)), integers(3, 4 * world)
    bias, grad = leaf(bias), integers(4, 5, 2, 4 * world)
    (x @ w.T + bias).backward(grad)
    mine, own, added = leaf(x.detach()), *(leaf(t.detach().chunk(world)[me]) for t in (w, bias))
    y = matmul_of_replicated(mine, own, added, group=group)
    same(y.detach(), (x @ w.T + bias).detach().chunk(world, -1)[me])
    y.backward(grad.chunk(world, -1)[me])
    same(mine.grad, x.grad)
    same(own.grad, w.grad.chunk(world)[me])
    same(added.grad, bias.grad.chunk(world)[me])


@pytest.mark.parametrize("name", WORLDS)
def test_the_gradient_of_what_all_ranks_hold_is_reduced(ranks, name):
    ranks(_replicated, name)


def _same_bits(groups, rank):
    group = groups["w4"]
    generator = torch.Generator().manual_seed(rank)
    x, w = (torch.randn(*s, generator=generator).bfloat16() for s in ((7, 64), (48, 64)))
    out = matmul_all_reduce(x, w, group=group)
    every = [torch.empty_like(out) for _ in range(4)]
    dist.all_gather(every, out, group=group)
    for other in every:
        assert torch.equal(other.view(torch.int16), out.view(torch.int16))


def test_all_ranks_get_the_same_bits(ranks):
    ranks(_same_bits)


def _errors(groups, rank):
    group = groups["w2"] if rank < 2 else None
    if group is None:
        return []
    x, w = torch.zeros(4, 6), torch.zeros(5, 6)
    calls = [
        lambda: matmul_all_reduce(x, w, residual=torch.zeros(4, 6), group=group),
        lambda: matmul_all_reduce(x, w, residual=torch.zeros(4, 5).half(), group=group),
        lambda: matmul_all_reduce(x, w, residual=3, group=group),
        lambda: matmul_all_reduce(x, w.t(), group=group),
        lambda: matmul_of_replicated(x, w, torch.zeros(6), group=group),
        lambda: RowParallelLinear(4, 4, group=group)(torch.zeros(4, 2), torch.zeros(4, 4)),
        lambda: ColumnParallelLinear(4, 4, group=group, sequence_parallel=False)(
            torch.zeros(4, 4), gather_size=8
        ),
        # Found by comparing:
        lambda: matmul_all_reduce(x, w, torch.zeros(5) if rank else None, group=group),
        lambda: matmul_all_reduce(x, w, residual=None if rank else torch.zeros(4, 5), group=group),
        lambda: matmul_all_reduce(torch.zeros(4 + rank, 6), w, group=group),
    ]
    return [raised(call) for call in calls]


def test_errors_name_what_was_wrong_on_every_rank(ranks):
    results = [each for each in ranks(_errors) if each]
    assert results[0][:7] == results[1][:7]
    wanted = [
        ("UsageError", ("residual: expected (4, 5)", "(4, 6)")),
        ("UsageError", ("residual: expected torch.float32", "float16")),
        ("UsageError", ("residual: expected a tensor", "3")),
        ("UsageError", ("w: expected (N, K) with K = 6", "(6, 5)")),
        ("UsageError", ("bias: expected (5,)", "(6,)")),
        ("UsageError", ("residual: expected (2, 4), the shape of this rank's", "(4, 4)")),
        ("UsageError", ("gather_size: expected None", "8")),
        ("AgreementError", ("all_reduce", "bias")),
        ("AgreementError", ("all_reduce", "residual")),
        ("AgreementError", ("all_reduce", "leading sizes")),
    ]
    for result in results:
        for (kind, text), (expected, parts) in zip(result, wanted, strict=True):
            assert kind == expected, text
            assert all(part in text for part in parts), text


def _contract(groups, rank):
    group = groups["w2"] if rank < 2 else None
    if group is None:
        return
    op, name = torch.ops.fluxgen.matmul_all_reduce.default, group.group_name

    def t(*shape):
        return torch.randn(*shape, requires_grad=True)

    for args in (
        (t(4, 6), t(5, 6), None, None, name, 2),
        (t(2, 3, 6), t(6, 5).t().detach(), t(5), t(2, 3, 5), name, 2),
    ):
        results = torch.library.opcheck(op, args)
        assert set(results.values()) == {"SUCCESS"}, results
    with dispatch.explain() as seen:
        matmul_all_reduce(torch.ones(3, 6), torch.ones(5, 6), group=group)
    assert [d.path for d in seen.decisions] == ["unfused"]
    assert seen.decisions[0].key.startswith("gemm_ar/float32/m3-n5-k6-tp2")


def test_opcheck_and_explain(ranks):
    ranks(_contract)


def _compile(groups, rank):
    group = groups["w4"]
    up, down, bias = integers(1, 4, 6), integers(2, 6, 4), integers(3, 6)

    def block(x, up, down, bias):
        hidden = matmul_of_replicated(x, up, group=group).relu()
        return matmul_all_reduce(hidden, down, bias, x, group=group)

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (2, 3, 5):
        outs = []
        for run in (block, compiled):
            leaves = [leaf(t) for t in (integers(7, rows, 6), up + rank, down - rank, bias)]
            y = run(*leaves)
            y.square().sum().backward()
            outs.append([y.detach(), *(t.grad for t in leaves)])
        for got, want in zip(*outs, strict=True):
            same(got, want)


def test_compiles_as_one_graph(ranks):
    ranks(_compile)


def _layers(groups, rank, name):
    if name not in groups:
        return
    group = groups[name]
    torch.manual_seed(0)
    full = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6))
    full = full.double()
    kwargs = {"group": group, "sequence_parallel": False}
    up = ColumnParallelLinear.from_linear(full[0], **kwargs)
    down = RowParallelLinear.from_linear(full[2], **kwargs)
    assert "sequence_parallel=False" in repr(up)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    mine = leaf(x.detach())
    want, got = x + full(x), down(up(mine).relu(), residual=mine)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    for y in (want, got):
        y.square().sum().backward()
    torch.testing.assert_close(mine.grad, x.grad, rtol=1e-12, atol=1e-12)
    for layer, whole in ((up, full[0]), (down, full[2])):
        for key, parameter in layer.named_parameters():
            torch.testing.assert_close(
                parameter.grad, layer.part(key, getattr(whole, key).grad), rtol=1e-12, atol=1e-12
            )


@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_layers_without_sequence_parallelism(ranks, name):
    ranks(_layers, name)
