"""``matmul_all_to_all`` and ``all_to_all_matmul``, against the matmul and the exchange by hand."""

from __future__ import annotations

import pytest
import torch

import fluxgen
from fluxgen.runtime import all_to_all  # noqa: F401  registers the ops
from fluxgen.runtime.dispatch import Cause, explain, strict
from tests.dist.host_library import Transport, host_library
from tests.dist.numbers import integers, raised, same

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

WORLDS = ("w1", "w2", "w3", "w4", "reversed")
TRAILS = ((), (2,))


def leaf(t):
    return t.clone().requires_grad_()


def sent(i: int, j: int, even: bool) -> int:
    """Rows that rank i sends to rank j; none among them."""
    return 3 if even else (2 * i + 3 * j) % 5


def exchanged(parts, me, sizes):
    """What rank ``me`` gets of every rank's rows."""
    return torch.cat([part.split(sizes[q])[me] for q, part in enumerate(parts)])


def _values(groups, rank, name, op, even):
    if name not in groups:
        return
    group = groups[name]
    world, me = group.size(), group.rank()
    n, k = 5, 4
    sizes = [[sent(i, j, even) for j in range(world)] for i in range(world)]
    back = [[sizes[i][j] for i in range(world)] for j in range(world)]
    for trail in TRAILS:
        xs = [leaf(integers(10 + q, sum(sizes[q]), *trail, k)) for q in range(world)]
        ws = [leaf(integers(20 + q, n, k)) for q in range(world)]
        bs = [leaf(integers(30 + q, n)) for q in range(world)]
        grads = [integers(40 + q, sum(back[q]), *trail, n) for q in range(world)]
        if op == "matmul_all_to_all":
            products = [x @ w.T + b for x, w, b in zip(xs, ws, bs, strict=True)]
            wants = [exchanged(products, q, sizes) for q in range(world)]
        else:
            wants = [exchanged(xs, q, sizes) @ ws[q].T + bs[q] for q in range(world)]
        torch.autograd.backward(wants, grads)
        given = {} if even else {"output_split_sizes": back[me], "input_split_sizes": sizes[me]}
        call = getattr(fluxgen, op)
        mine = [leaf(t[me].detach()) for t in (xs, ws, bs)]
        got = call(*mine, group=group, **given)
        same(got.detach(), wants[me].detach())
        got.backward(grads[me])
        for own, full in zip(mine, (xs, ws, bs), strict=True):
            same(own.grad, full[me].grad)
        # Of x alone: the other op, with the weight transposed.
        x = leaf(xs[me].detach())
        got = call(x, ws[me].detach(), group=group.group_name, **given)
        same(got.detach(), (wants[me] - (exchanged([b.expand_as(p) for b, p in zip(
            bs, products, strict=True)], me, sizes) if op == "matmul_all_to_all" else bs[me])
        ).detach())  # fmt: skip
        got.backward(grads[me])
        same(x.grad, xs[me].grad)


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("op", ["matmul_all_to_all", "all_to_all_matmul"])
@pytest.mark.parametrize("name", WORLDS)
def test_values_and_gradients(ranks, name, op, even):
    ranks(_values, name, op, even)


def ints(seed, *shape):
    return integers(seed, *shape).bfloat16()


def _fused(groups, rank, name, transport):
    group = groups.get(name)
    if group is None:
        return
    world, me, n, k, part = group.size(), group.rank(), 40, 16, 8
    xs = [ints(10 + q, part * world, k) for q in range(world)]
    ws = [ints(20 + q, n, k) for q in range(world)]
    sizes = [[part] * world] * world
    products = [(x.float() @ w.float().T).bfloat16() for x, w in zip(xs, ws, strict=True)]
    with host_library(group, transport) as support, strict(), explain() as seen:
        for _ in range(3):
            y = fluxgen.matmul_all_to_all(xs[me], ws[me], group=group)
            same(y, exchanged(products, me, sizes))
            z = fluxgen.all_to_all_matmul(xs[me], ws[me], group=group)
            same(z, (exchanged(xs, me, sizes).float() @ ws[me].float().T).bfloat16())
            wide = ints(10 + me, part * world, 2 * k)[:, :k].copy_(xs[me])  # rows further apart
            same(fluxgen.all_to_all_matmul(wide, ws[me], group=group), z)
    how = "drains" if transport is Transport.COPY_ENGINE_PULL else "stores"
    assert support.calls == [f"exchanges, {how}", "pushes", "pushes"] * 3
    assert {d.cause for d in seen.decisions} == {Cause.FUSED}
    assert {d.key.partition("/")[0] for d in seen.decisions} == {"gemm_a2a", "a2a_gemm"}
    with host_library(group, transport), explain() as seen:
        given = {"output_split_sizes": [part] * world, "input_split_sizes": [part] * world}
        same(fluxgen.matmul_all_to_all(xs[me], ws[me], group=group, **given), y)
        bias = ints(1, n)
        same(fluxgen.matmul_all_to_all(xs[me], ws[me], bias, group=group),
             (y.float() + bias.float()).bfloat16())  # fmt: skip
    assert [d.path for d in seen.decisions] == ["unfused"] * 2


@pytest.mark.parametrize("transport", [Transport.COPY_ENGINE_PUSH, Transport.COPY_ENGINE_PULL])
@pytest.mark.parametrize("name", ["w2", "w3", "w4", "reversed"])
def test_equal_parts_are_fused(ranks, name, transport):
    ranks(_fused, name, transport)


def _refused(groups, rank):
    group = groups["w4"]
    x, w = integers(1, 8, 4), integers(2, 3, 4)
    for changes, words in [
        ({"x": integers(1, 9, 4)}, "equal parts; found 9 rows"),
        ({"input_split_sizes": [2, 2, 2]}, "expected 4 non-negative integers"),
        ({"input_split_sizes": [2, 2, 2, 3]}, "expected a sum of 8"),
        ({"output_split_sizes": [2, 2, 2, -1]}, "output_split_sizes: expected 4"),
        ({"output_split_sizes": 3}, "output_split_sizes: expected 4"),
        ({"output_split_sizes": [3, 3, 3, 3]}, f"expected 2 for rank {group.rank()}"),
        ({"w": integers(2, 3, 5)}, "w:"),
        ({"bias": integers(2, 4)}, "bias:"),
    ]:
        given = {"x": x, "w": w, "bias": None, **changes}
        for call in (fluxgen.matmul_all_to_all, fluxgen.all_to_all_matmul):
            found, text = raised(lambda c=call, g=given: c(**g, group=group))
            assert (found, words in text) == ("UsageError", True), text


def test_what_does_not_fit_is_refused_before_anything_is_sent(ranks):
    ranks(_refused)


def _compiled(groups, rank):
    group = groups["w4"]
    world, me = group.size(), group.rank()
    x, w = leaf(integers(me, 2 * world, 4)), leaf(integers(50 + me, 3, 4))

    name = group.group_name

    def both(x, w):
        y = fluxgen.matmul_all_to_all(x, w, group=name)
        return fluxgen.all_to_all_matmul(y, w.t(), group=name)

    want = both(x, w)
    want.sum().backward()
    kept = x.grad.clone(), w.grad.clone()
    x.grad = w.grad = None
    got = torch.compile(both, fullgraph=True, backend="aot_eager")(x, w)
    same(got.detach(), want.detach())
    got.sum().backward()
    same(x.grad, kept[0])
    same(w.grad, kept[1])


def test_compiled_without_a_break(ranks):
    ranks(_compiled)


def _opcheck(groups, rank):
    group = groups["w2"] if rank < 2 else None
    if group is None:
        return
    name = group.group_name

    def t(*shape, grad=True):
        return torch.randn(*shape, requires_grad=grad)

    mine, theirs = ([1, 3], [1, 2]) if rank == 0 else ([2, 4], [3, 4])
    for op in ("matmul_all_to_all", "all_to_all_matmul"):
        call = getattr(torch.ops.fluxgen, op).default
        for args in (
            (t(4, 6), t(5, 6), t(5), None, None, name, 2),
            (t(4, 3, 6), t(6, 5).t().detach(), None, None, None, name, 2),
            (t(sum(mine), 6), t(5, 6), t(5), theirs, mine, name, 2),
            (t(4, 6, grad=False), t(5, 6), None, None, None, name, 2),
        ):
            results = torch.library.opcheck(call, args)
            assert set(results.values()) == {"SUCCESS"}, results


def test_opcheck(ranks):
    ranks(_opcheck)


def _half(groups, rank, dtype):
    """16-bit types, weights and rows that are not contiguous."""
    group = groups.get("w3")
    if group is None:
        return
    me, world = group.rank(), group.size()
    xs = [integers(10 + q, 6, 2 * world).to(dtype).t() for q in range(world)]
    ws = [integers(20 + q, 6, 4).to(dtype).t() for q in range(world)]
    sizes = [[2] * world] * world
    products = [(x.float() @ w.float().T).to(dtype) for x, w in zip(xs, ws, strict=True)]
    same(fluxgen.matmul_all_to_all(xs[me], ws[me], group=group), exchanged(products, me, sizes))
    want = (exchanged(xs, me, sizes).float() @ ws[me].float().T).to(dtype)
    same(fluxgen.all_to_all_matmul(xs[me], ws[me], group=group), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_types_and_strides(ranks, dtype):
    ranks(_half, dtype)
