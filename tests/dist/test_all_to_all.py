"""``matmul_all_to_all`` and ``all_to_all_matmul``, against the matmul and the exchange by hand."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import fluxgen
from fluxgen.runtime.ops import all_to_all  # registers the ops
from fluxgen.runtime.session.dispatch import Cause, explain, strict
from fluxgen.runtime.session.groups import reset, state_of
from tests.dist.host_library import Transport, host_library
from tests.dist.numbers import integers, raised, same
from tests.dist.pool import Pool

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


def _disagreements(groups, rank, name, op, after):
    """What each rank hears; and the next call, a right one, is in step."""
    group = groups.get(name)
    if group is None:
        return None
    world, me = group.size(), group.rank()
    call, w = getattr(fluxgen, op), integers(2, 3, 4)
    even = {"output_split_sizes": [2] * world, "input_split_sizes": [2] * world}
    x = integers(1, 2 * world, 4)
    if after:  # both kinds of call are known by then
        call(x, w, group=group)
        call(x, w, group=group, **even)
    more = {**even, "input_split_sizes": [3, 1] + [2] * (world - 2)} if me == world - 1 else even
    odd = [4, 1] if world == 2 else [2, 1, *[2] * (world - 3), 3]
    cases = {
        "one row more": (x, more),
        "on one rank only": (x, even if me == 0 else {}),
        "on all but one": (x, {} if me == 0 else even),
        "only outputs": (x, {"output_split_sizes": odd} if me == 1 else even),
        "only inputs, one": (x, {"input_split_sizes": [2] * world} if me == 0 else {}),
        "rows": (integers(1, 2 * world + (world if me == 1 else 0), 4), {}),
    }
    if world > 2:  # sizes that no rank can see to be wrong by itself
        swapped = [2] * world
        swapped[(me + 1) % world], swapped[(me + 2) % world] = 3, 1
        cases["all differ"] = (x, {**even, "input_split_sizes": swapped})
    found = {}
    for case, (rows, given) in cases.items():
        found[case] = raised(lambda r=rows, g=given: call(r, w, group=group, **g))
        same(call(x, w, group=group, **even), call(x, w, group=group))
    return me, found


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("op", ["matmul_all_to_all", "all_to_all_matmul"])
@pytest.mark.parametrize("name", ["w2", "w3", "w4", "reversed"])
def test_sizes_that_do_not_fit_are_an_error_on_every_rank(ranks, name, op, after):
    answers = [answer for answer in ranks(_disagreements, name, op, after) if answer]
    results = [found for _, found in sorted(answers, key=lambda answer: answer[0])]
    for case in results[0]:
        heard = [found[case] for found in results]
        texts = {text for kind, text in heard if kind == "AgreementError"}
        assert len(texts) == 1, (case, heard)
        assert {kind for kind, _ in heard} <= {"AgreementError", "UsageError"}, (case, heard)
        alone = [rank for rank, (kind, _) in enumerate(heard) if kind == "UsageError"]
        if alone:  # one that can see it by itself
            assert f"rank {alone[0]} was refused" in texts.pop()
        elif not after:
            assert case != "only outputs"
    if not after:
        return
    words = {
        "on one rank only": "rank 1: none",
        "on all but one": "rank 0: none",
        "rows": "numbers of rows in dim 0 of x",
    }
    for case, text in words.items():
        assert text in results[0][case][1], (case, results[0][case][1])


def _changing(groups, rank):
    """As experts' loads: new sizes at each call, on some ranks the same as before."""
    group = groups["w4"]
    for step in range(6):
        sizes = [[(i * j + step * (i == 2)) % 4 for j in range(4)] for i in range(4)]
        back = [sizes[i][rank] for i in range(4)]
        xs = [integers(step * 10 + q, sum(sizes[q]), 4) for q in range(4)]
        sent_sizes = {"output_split_sizes": back, "input_split_sizes": sizes[rank]}
        got = fluxgen.all_to_all_matmul(xs[rank], torch.eye(4), group=group, **sent_sizes)
        same(got, exchanged(xs, rank, sizes))


def test_sizes_that_change_at_every_call(ranks):
    ranks(_changing)


def _missing(groups, rank):
    """A rank that does not come is an error within the deadline, not a hang."""
    group = groups["w2"] if rank < 2 else None
    if group is None:
        return None
    state = state_of(group)
    x, w, sizes = integers(1, 4, 4), integers(2, 3, 4), [2, 2]
    given = {"output_split_sizes": sizes, "input_split_sizes": sizes}
    fluxgen.matmul_all_to_all(x, w, group=group, **given)
    if rank == 1:
        return None
    state.timeout_s = 0.5
    return raised(lambda: fluxgen.matmul_all_to_all(x, w, group=group, **given))


def test_a_rank_that_does_not_come_to_compare():
    alone = Pool({"w2": [0, 1]}, 2)
    try:
        kind, text = alone(_missing)[0]
    finally:
        alone.close()
    assert kind == "AgreementError"
    assert "within 0.5 s" in text


def _warm(groups, rank, name, transport):
    """A known call goes straight to its launches, and only that call does."""
    group = groups.get(name)
    if group is None:
        return
    world, me, n, k, part = group.size(), group.rank(), 40, 16, 8
    sizes = [[part] * world] * world
    with host_library(group, transport) as support, strict():
        for step in range(4):
            xs = [ints(100 * step + q, part * world, k) for q in range(world)]
            ws = [ints(100 * step + 50 + q, n, k) for q in range(world)]
            products = [(x.float() @ w.float().T).bfloat16() for x, w in zip(xs, ws, strict=True)]
            with mock.patch.object(
                all_to_all, "_split_sizes", wraps=all_to_all._split_sizes
            ) as slow:
                y = fluxgen.matmul_all_to_all(xs[me], ws[me], group=group)
                z = fluxgen.all_to_all_matmul(xs[me], ws[me], group=group)
            assert slow.call_count == (0 if step else 2)
            same(y, exchanged(products, me, sizes))
            same(z, (exchanged(xs, me, sizes).float() @ ws[me].float().T).bfloat16())
        bias = ints(7, n)
        for _ in range(2):
            got = fluxgen.all_to_all_matmul(xs[me], ws[me], bias, group=group)
            same(got, (z.float() + bias.float()).bfloat16())
        cube = [x.view(world, part, k) for x in xs]
        for _ in range(2):
            y = fluxgen.matmul_all_to_all(cube[me], ws[me], group=group)
            same(
                y, exchanged([p.view(world, part, n) for p in products], me, [[1] * world] * world)
            )
        wide = ints(10 + me, part * world, 2 * k)[:, :k].copy_(xs[me])
        for _ in range(2):
            same(fluxgen.all_to_all_matmul(wide, ws[me], group=group), z)
    assert {"pushes"} < set(support.calls)
    x = leaf(xs[me])
    with host_library(group, transport):  # gradients go by the op
        y = fluxgen.matmul_all_to_all(x, ws[me], group=group)
        y.float().sum().backward()
        assert x.grad is not None
        with torch.autocast("cpu", torch.float16):
            y = fluxgen.matmul_all_to_all(xs[me], ws[me], group=group)
        assert y.dtype == torch.float16
    reset(group)
    same(fluxgen.all_to_all_matmul(xs[me], ws[me], group=group), z)


@pytest.mark.parametrize("transport", [Transport.COPY_ENGINE_PUSH, Transport.COPY_ENGINE_PULL])
@pytest.mark.parametrize("name", ["w2", "w4"])
def test_a_warm_call_asks_nothing_again(ranks, name, transport):
    ranks(_warm, name, transport)


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
