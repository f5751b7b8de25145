"""Gradients against the unsharded computation, exactly."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fluxgen.runtime.ops import all_gather_matmul, matmul_reduce_scatter
from tests.dist.numbers import integers, same

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

SHAPES = (((12,), 0), ((12, 2), 0), ((2, 12), 1))
WORLDS = ("w1", "w2", "w3", "w4", "even", "reversed")


def leaf(t):
    return t.clone().requires_grad_()


def _gather(groups, rank, name, save_gathered):
    if name not in groups:
        return
    group = groups[name]
    world, me = group.size(), dist.get_rank(group)
    for lead, dim in SHAPES:
        x = leaf(integers(1, *lead, 6))
        w = [[leaf(integers(10 + 5 * q + i, n, 6)) for i, n in enumerate((3, 2))] for q in
             range(world)]  # fmt: skip
        b = [leaf(integers(50 + q, 3)) for q in range(world)]
        c = [[integers(60 + 5 * q + i, *lead, n) for i, n in enumerate((3, 2))] for q in
             range(world)]  # fmt: skip
        d = [integers(90 + q, *lead, 6) for q in range(world)]
        for q in range(world):
            loss = ((x @ w[q][0].T + b[q]) * c[q][0]).sum() + (x @ w[q][1].T * c[q][1]).sum()
            (loss + (x * d[q]).sum()).backward()
        mine = leaf(x.detach().chunk(world, dim)[me])
        weights, bias = [leaf(t.detach()) for t in w[me]], leaf(b[me].detach())
        ys, gathered = all_gather_matmul(
            mine,
            weights,
            [bias, None],
            group=group,
            gather_dim=dim,
            return_gathered=True,
            save_gathered=save_gathered,
        )
        loss = sum((y * part).sum() for y, part in zip(ys, c[me], strict=True))
        (loss + (gathered * d[me]).sum()).backward()
        same(mine.grad, x.grad.chunk(world, dim)[me])
        for got, want in zip(weights, w[me], strict=True):
            same(got.grad, want.grad)
        same(bias.grad, b[me].grad)
        # One weight, and only what is asked for.
        x.grad = w[me][0].grad = None
        for q in range(world):
            ((x @ w[q][0].T) * c[q][0]).sum().backward()
        for train_x, train_w in ((True, False), (False, True)):
            mine = x.detach().chunk(world, dim)[me].clone().requires_grad_(train_x)
            weight = w[me][0].detach().clone().requires_grad_(train_w)
            y = all_gather_matmul(
                mine, weight, group=group, gather_dim=dim, save_gathered=save_gathered
            )
            (y * c[me][0]).sum().backward()
            if train_x:
                same(mine.grad, x.grad.chunk(world, dim)[me])
                assert weight.grad is None
            else:
                same(weight.grad, (c[me][0].flatten(0, -2).T @ x.detach().flatten(0, -2)))
                assert mine.grad is None
        # One of two outputs unused; only the gathered one used.
        mine, weights = leaf(x.detach().chunk(world, dim)[me]), [leaf(t) for t in weights]
        ys = all_gather_matmul(mine, [t.detach() for t in weights], group=group, gather_dim=dim)
        (ys[0] * c[me][0]).sum().backward()
        same(mine.grad, x.grad.chunk(world, dim)[me])
        mine.grad = None
        _, gathered = all_gather_matmul(
            mine, weights[0], group=group, gather_dim=dim, return_gathered=True
        )
        (gathered * d[me]).sum().backward()
        same(mine.grad, sum(d).chunk(world, dim)[me])


@pytest.mark.parametrize("save_gathered", [False, True])
@pytest.mark.parametrize("name", WORLDS)
def test_all_gather_matmul(ranks, name, save_gathered):
    ranks(_gather, name, save_gathered)


def _scatter(groups, rank, name, reduce_op, bias_mode):
    if name not in groups:
        return
    group = groups[name]
    world, me = group.size(), dist.get_rank(group)
    divisor = world if reduce_op == "avg" else 1
    for lead, dim in SHAPES:
        # Multiples of 12 keep an average over 1 to 4 ranks exact.
        x = [leaf(12 * integers(1 + q, *lead, 6, dtype=torch.float64)) for q in range(world)]
        w = [leaf(integers(10 + q, 3, 6, dtype=torch.float64)) for q in range(world)]
        bias = leaf(integers(30, 3, dtype=torch.float64))
        c = 12 * integers(40, *lead, 3, dtype=torch.float64)
        total = sum(a @ b.T for a, b in zip(x, w, strict=True))
        y = (total + bias) / divisor if bias_mode == "partial" else total / divisor + bias
        (y * c).sum().backward()
        xs, ws, b = leaf(x[me].detach()), leaf(w[me].detach()), leaf(bias.detach())
        owns = bias_mode == "replicated" or me == 0
        got = matmul_reduce_scatter(
            xs,
            ws,
            b if owns else None,
            group=group,
            scatter_dim=dim,
            reduce_op=reduce_op,
            bias_mode=bias_mode,
        )
        part = y.detach().chunk(world, dim)[me]
        torch.testing.assert_close(got.detach(), part, rtol=1e-15, atol=0)
        (got * c.chunk(world, dim)[me]).sum().backward()
        for mine, want in ((xs, x[me]), (ws, w[me]), *(((b, bias),) if owns else ())):
            torch.testing.assert_close(mine.grad, want.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
@pytest.mark.parametrize("bias_mode", ["replicated", "partial"])
@pytest.mark.parametrize("name", WORLDS)
def test_matmul_reduce_scatter(ranks, name, reduce_op, bias_mode):  # E05
    ranks(_scatter, name, reduce_op, bias_mode)
