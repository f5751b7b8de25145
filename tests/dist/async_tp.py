"""Linear layers that call Torch's async-TP ops by name, forward and backward.

The pattern of calls is torchtitan's (``torchtitan/distributed/linear.py``, 2026): the gathered x is
kept as a slice of its columns, which backward gathers again transposed, so that the gradient of a
weight is one fused gather, too; of a row-parallel weight the gathered gradient is used twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class _Gathered(torch.autograd.Function):
    """``gather(x) @ w.T`` for each of one or two weights."""

    @staticmethod
    def forward(ctx: Any, group: Any, x: Any, *weights: Any) -> Any:
        ops = torch.ops.symm_mem
        name = group.group_name
        whole, outs = ops.fused_all_gather_matmul(x, [w.T for w in weights], 0, name)
        columns = whole.chunk(group.size(), dim=1)[dist.get_rank(group)].contiguous()
        ctx.save_for_backward(columns, *weights)
        ctx.name = name
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ops = torch.ops.symm_mem
        columns, *weights = ctx.saved_tensors
        grads = [g.contiguous() for g in grads]
        dx = ops.fused_matmul_reduce_scatter(
            torch.cat(grads, 1) if len(grads) > 1 else grads[0],
            torch.cat(weights, 0) if len(weights) > 1 else weights[0],
            "sum", 0, ctx.name,
        )  # fmt: skip
        _, dws = ops.fused_all_gather_matmul(columns.T.contiguous(), grads, 0, ctx.name)
        return None, dx, *(dw.T.contiguous() for dw in dws)


class _Scattered(torch.autograd.Function):
    """``scatter(x @ w.T)``."""

    @staticmethod
    def forward(ctx: Any, group: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        ctx.name = group.group_name
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.T, "sum", 0, ctx.name)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> Any:
        x, w = ctx.saved_tensors
        whole, (dx,) = torch.ops.symm_mem.fused_all_gather_matmul(dy.contiguous(), [w], 0, ctx.name)
        return None, dx, whole.T @ x


def check_layers(
    group: Any,
    make: Callable[..., Any],
    same: Callable[[Any, Any, str], None],
    rows: int,
    n: int,
    k: int,
) -> None:
    """Values and gradients of all layers, bit for bit.

    Args:
        make: ``make(seed, *shape)``: small integers, the same on every rank. same: compares.
        rows: of x on each rank. n: rows of each weight, on each rank. k: columns of x.
    """
    world, rank = group.size(), dist.get_rank(group)
    x = make(1, rows * world, k)
    ws = [[make(10 + 20 * i + r, n, k) for r in range(world)] for i in range(2)]
    dys = [[make(50 + 20 * i + r, rows * world, n) for r in range(world)] for i in range(2)]
    for count in (1, 2):
        mine = x.chunk(world)[rank].clone().requires_grad_()
        weights = [w[rank].clone().requires_grad_() for w in ws[:count]]
        ys = _Gathered.apply(group, mine, *weights)
        torch.autograd.backward(ys, [dy[rank] for dy in dys[:count]])
        for i, (y, w) in enumerate(zip(ys, weights, strict=True)):
            exact = x.double() @ ws[i][rank].double().T
            same(y.detach(), exact.to(x.dtype), f"{count} gathered, y {i}")
            dw = dys[i][rank].double().T @ x.double()
            same(w.grad, dw.to(x.dtype), f"{count} gathered, dw {i}")
        # Each rank's product is rounded before they are added, as the kernels round.
        partials = [
            sum(dys[i][r].double() @ ws[i][r].double() for i in range(count)).to(x.dtype)
            for r in range(world)
        ]
        dx = torch.stack([p.double() for p in partials]).sum(0).to(x.dtype)
        same(mine.grad, dx.chunk(world)[rank], f"{count} gathered, dx")
    xs = [make(90 + r, rows * world, k) for r in range(world)]
    dy = make(99, rows * world, n)
    mine, w = xs[rank].clone().requires_grad_(), ws[0][rank].clone().requires_grad_()
    y = _Scattered.apply(group, mine, w)
    y.backward(dy.chunk(world)[rank].clone())
    partials = [
        (a.double() @ b.double().T).to(x.dtype).double() for a, b in zip(xs, ws[0], strict=True)
    ]
    total = torch.stack(partials).sum(0).to(x.dtype)
    same(y.detach(), total.chunk(world)[rank], "scattered, y")
    same(mine.grad, (dy.double() @ ws[0][rank].double()).to(x.dtype), "scattered, dx")
    same(w.grad, (dy.double().T @ xs[rank].double()).to(x.dtype), "scattered, dw")
