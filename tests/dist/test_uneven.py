"""Rows that the ranks do not divide: 10 on 4 ranks are 3, 3, 2 and 2; nothing is lost."""

from __future__ import annotations

import pytest
import torch

from fluxgen.runtime.ops import all_gather_matmul, matmul_reduce_scatter
from fluxgen.runtime.ops.fallback import split_sizes
from tests.dist.numbers import integers, same

pytestmark = [pytest.mark.dist]

SIZES = [1, 2, 3, 5, 7, 10, 1023]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [0, *SIZES])
def test_sizes_are_those_of_tensor_split(size, world):
    assert split_sizes(size, world) == [len(p) for p in torch.arange(size).tensor_split(world)]


def _forward(groups, rank, name):
    group = groups.get(name)
    if group is None:
        return None
    world, me = group.size(), group.rank()
    kept = []
    for size in SIZES:  # A01, A03
        x, w, bias = integers(size, size, 6), integers(2, 5, 6), integers(3, 5)
        mine = x.tensor_split(world)[me]
        y, gathered = all_gather_matmul(
            mine, w, bias, group=group, gather_size=size, return_gathered=True
        )
        same(gathered, x)
        same(y, x @ w.T + bias)
        xs = [integers(100 + q, size, 6) for q in range(world)]
        total = sum(a @ w.T for a in xs)
        y = matmul_reduce_scatter(xs[me], w, bias, group=group)
        same(y, total.tensor_split(world)[me] + bias)
        kept.append(len(y))
        y = matmul_reduce_scatter(xs[me], w, group=group, reduce_op="avg")
        same(y, (total / world).tensor_split(world)[me])
    batch = integers(4, 2, 5, 6)
    mine = batch.tensor_split(world, 1)[me]
    y = all_gather_matmul(mine, w, group=group, gather_dim=1, gather_size=5)
    same(y, batch @ w.T)
    y = matmul_reduce_scatter(batch, w, group=group, scatter_dim=1)
    same(y, (batch @ w.T * world).tensor_split(world, 1)[me])
    return kept


@pytest.mark.parametrize("name", ["w1", "w2", "w3", "w4"])
def test_every_row_is_there_once(ranks, name):
    results = [r for r in ranks(_forward, name) if r is not None]
    assert [sum(rows) for rows in zip(*results, strict=True)] == SIZES


def _backward(groups, rank, compiled):
    """Gradients of a column- and a row-parallel layer are those of the unsharded ones."""
    group, world, size = groups["w4"], 4, 10
    x, dy = integers(1, size, 6), [integers(20 + q, size, 5) for q in range(world)]
    w = [integers(10 + q, 5, 6) for q in range(world)]

    def gather(x, w):
        return all_gather_matmul(x, w, group=group, gather_size=size, return_gathered=True)

    def scatter(x, w, bias):
        return matmul_reduce_scatter(x, w, bias, group=group)

    if compiled:
        gather, scatter = (torch.compile(f, backend="aot_eager", fullgraph=True)
                           for f in (gather, scatter))  # fmt: skip
    mine = x.tensor_split(world)[rank].clone().requires_grad_()
    mw = w[rank].clone().requires_grad_()
    dg = [integers(40 + q, size, 6) for q in range(world)]
    y, gathered = gather(mine, mw)
    torch.autograd.backward([y, gathered], [dy[rank], dg[rank]])
    total = sum(g @ c + d for g, c, d in zip(dy, w, dg, strict=True))
    same(mine.grad, total.tensor_split(world)[rank])
    same(mw.grad, dy[rank].T @ x)

    xs = [integers(30 + q, size, 6) for q in range(world)]
    a, mw = xs[rank].clone().requires_grad_(), w[rank].clone().requires_grad_()
    bias = integers(50, 5).requires_grad_()
    g = integers(60, size, 5)
    y = scatter(a, mw, bias)
    y.backward(g.tensor_split(world)[rank].clone())
    same(a.grad, g @ w[rank])
    same(mw.grad, g.T @ xs[rank])
    same(bias.grad, g.sum(0))


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients(ranks, compiled):
    ranks(_backward, compiled)


def _layers(groups, rank):
    """A block of both layers over 10 rows is the unsharded block."""
    from torch import nn

    from fluxgen.nn import ColumnParallelLinear, RowParallelLinear

    group, world = groups["w4"], 4
    torch.manual_seed(0)
    up, down = nn.Linear(6, 8).double(), nn.Linear(8, 6).double()
    x = torch.randn(10, 6, dtype=torch.float64)
    first = ColumnParallelLinear.from_linear(up, group=group)
    second = RowParallelLinear.from_linear(down, group=group)
    y = second(torch.relu(first(x.tensor_split(world)[rank], gather_size=10)))
    torch.testing.assert_close(y, down(torch.relu(up(x))).tensor_split(world)[rank])


def test_layers(ranks):
    ranks(_layers)
