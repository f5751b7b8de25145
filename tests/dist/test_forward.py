"""Forward against one process, exactly: worlds, subgroups, shapes, strides, biases."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist

from fluxgen.runtime.ops import all_gather_matmul, matmul_reduce_scatter
from tests.dist.numbers import integers, same
from tests.dist.pool import GROUPS

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

SHAPES = (((12,), 0), ((12, 5), 0), ((5, 12), 1), ((2, 12, 3), -3 + 1), ((12, 1), -3))
"""Leading sizes of x, and the dim that is cut (a negative one counts K as -1)."""


KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters


def _forward(groups, rank, name):
    if name not in groups:
        return None
    group = groups[name]
    world, me = group.size(), dist.get_rank(group)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for lead, dim in SHAPES if dtype is torch.float32 else SHAPES[:2]:
            dim = dim if dim >= 0 or len(lead) == 2 else dim - 1
            cut = dim % (len(lead) + 1)
            x = integers(1, *lead, 7, dtype=dtype)
            w = [integers(10 + q, 5, 7, dtype=dtype) for q in range(world)]
            b = [integers(20 + q, 5, dtype=dtype) for q in range(world)]
            mine = x.chunk(world, cut)[me]
            y, gathered = all_gather_matmul(
                mine, w[me], b[me], group=group, gather_dim=dim, return_gathered=True
            )
            same(gathered, x)
            same(y, x @ w[me].T + b[me])
            xs = [integers(30 + q, *lead, 7, dtype=dtype) for q in range(world)]
            bias = integers(40, 5, dtype=dtype)
            total = sum(xq.double() @ wq.double().T for xq, wq in zip(xs, w, strict=True))
            part = total.chunk(world, cut)[me].to(dtype)
            # Sums of small integers are exact in every dtype here, in any order.
            y = matmul_reduce_scatter(xs[me], w[me], group=group.group_name, scatter_dim=dim)
            same(y, part)
            y = matmul_reduce_scatter(xs[me], w[me], bias, group=group, scatter_dim=dim)
            same(y, part + bias)
            y = matmul_reduce_scatter(
                xs[me], w[me], bias, group=group, scatter_dim=dim, reduce_op="avg"
            )
            same(y, part / world + bias)
    return dist.get_process_group_ranks(group), me


@pytest.mark.parametrize("name", sorted(GROUPS))
def test_worlds_and_subgroups(ranks, name):  # F01, F11, G13, D11
    results = ranks(_forward, name)
    for rank, result in enumerate(results):
        assert (result is not None) == (rank in GROUPS[name])
        if result is not None:
            order, me = result
            assert order[me] == rank
            assert name != "reversed" or not KEEPS_ORDER or order == [1, 0]


def _several(groups, rank):
    group = groups["w4"]
    x = integers(1, 8, 6)
    w = [integers(10 * rank + i, n, 6) for i, n in enumerate((4, 2, 1))]
    b = [integers(5, 4), None, integers(6, 1)]
    mine = x.chunk(4)[rank]
    ys = all_gather_matmul(mine, w, group=group)
    for y, weight in zip(ys, w, strict=True):
        same(y, x @ weight.T)
    ys, gathered = all_gather_matmul(mine, w, b, group=group, return_gathered=True)
    same(gathered, x)
    for y, weight, bias in zip(ys, w, b, strict=True):
        same(y, x @ weight.T if bias is None else x @ weight.T + bias)
    # N may differ between ranks, K of a reduction too.
    w = [integers(10 + q, 3 + q, 6) for q in range(4)][rank]
    same(all_gather_matmul(mine, w, group=group), x @ w.T)
    xs, ws = ([integers(s + q, 8 if s else 5, 2 + q) for q in range(4)] for s in (50, 0))
    total = sum(a @ b.T for a, b in zip(xs, ws, strict=True))
    same(matmul_reduce_scatter(xs[rank], ws[rank], group=group), total.chunk(4)[rank])


def test_several_weights_share_one_gather_and_uneven_sizes(ranks):
    ranks(_several)


def _strided(groups, rank):
    group = groups["w2"] if rank < 2 else groups["w4"]
    if rank >= 2:
        return
    x, w = integers(1, 8, 6), integers(2, 4, 6)
    total = [integers(30 + q, 8, 6) for q in range(2)]
    flat = torch.empty(1 + 4 * 6 + 1)
    inputs = {
        "transposed": lambda t: t.T.contiguous().T,
        "padded rows": lambda t: torch.nn.functional.pad(t, (0, 3))[:, :6],
        "misaligned": lambda t: flat[1 : 1 + t.numel()].view(t.shape).copy_(t),
        "every other row": lambda t: t.repeat_interleave(2, 0)[::2],
    }
    for strided in inputs.values():
        mine = strided(x.chunk(2)[rank].contiguous())
        same(all_gather_matmul(mine, w, group=group), x @ w.T)
        same(all_gather_matmul(x.chunk(2)[rank], strided(w), group=group), x @ w.T)
    for name in ("transposed", "padded rows", "every other row"):
        strided = inputs[name]
        y = matmul_reduce_scatter(strided(total[rank]), strided(w), group=group)
        same(y, ((total[0] + total[1]) @ w.T).chunk(2)[rank])
    kn = w.T.contiguous()
    same(all_gather_matmul(x.chunk(2)[rank], kn.t(), group=group), x @ w.T)
    row = integers(3, 1, 6)
    y = all_gather_matmul(row.expand(4, 6), w, group=group)
    same(y, (row @ w.T).expand(8, 4).contiguous())
    bias = integers(4, 1).expand(4)
    y = matmul_reduce_scatter(row.expand(8, 6), w, bias, group=group)
    same(y, (2 * (row @ w.T) + bias).expand(4, 4).contiguous())


def test_strided_expanded_and_misaligned_operands(ranks):  # D01, D03, D05, A07, A17
    ranks(_strided)


def _empty(groups, rank):
    group = groups["w4"]
    w, bias = integers(1, 5, 6), integers(2, 5)
    for lead in ((0,), (0, 3)):
        x = torch.empty(*lead, 6, requires_grad=True)
        weight = w.clone().requires_grad_()
        y = all_gather_matmul(x, weight, bias, group=group)
        assert y.shape == (*lead, 5)
        y.sum().backward()
        assert x.grad.shape == x.shape
        same(weight.grad, torch.zeros_like(w))
        x = torch.empty(*lead, 6, requires_grad=True)
        weight = w.clone().requires_grad_()
        y = matmul_reduce_scatter(x, weight, bias, group=group)
        assert y.shape == (*lead, 5)
        y.sum().backward()
        same(weight.grad, torch.zeros_like(w))
    # K = 0 multiplies nothing; a bias is still there.
    y = all_gather_matmul(torch.empty(2, 0), torch.empty(5, 0), bias, group=group)
    same(y, bias.expand(8, 5).contiguous())
    y = matmul_reduce_scatter(torch.empty(8, 0), torch.empty(5, 0), bias, group=group)
    same(y, bias.expand(2, 5).contiguous())
    # Still in step with the other ranks.
    x = integers(3, 8, 6)
    same(all_gather_matmul(x.chunk(4)[rank], w, group=group), x @ w.T)


def test_no_tokens_and_no_k(ranks):  # B01, B05
    ranks(_empty)


def _bias(groups, rank):
    group = groups["w4"]
    x = [integers(30 + q, 8, 4) for q in range(4)]
    w = [integers(10 + q, 3, 4) for q in range(4)]
    bias = torch.tensor([100.0, 200.0, 300.0])
    total = sum(a @ b.T for a, b in zip(x, w, strict=True)).chunk(4)[rank]
    args = x[rank], w[rank]
    same(matmul_reduce_scatter(*args, bias, group=group), total + bias)
    for owner in (0, 3):
        mine = bias if rank == owner else None
        y = matmul_reduce_scatter(*args, mine, group=group, bias_mode="partial")
        same(y, total + bias)
    y = matmul_reduce_scatter(*args, bias, group=group, bias_mode="partial")
    same(y, total + 4 * bias)
    mine = 4 * bias if rank == 0 else None
    y = matmul_reduce_scatter(*args, mine, group=group, bias_mode="partial", reduce_op="avg")
    same(y, total / 4 + bias)


def test_bias_counts_once(ranks):  # E03
    ranks(_bias)
