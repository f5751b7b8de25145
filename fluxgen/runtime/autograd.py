"""Gradients of the ops: the backward of each is the other.

With W ranks, G the gathered activations and P the partial product (shapes: ``fallback``)::

    all_gather_matmul        y_i = G w_i.T + b_i           G  = AG(x)
        dx   = RS(sum_i dy_i w_i) + RS(dG)                 one matmul_reduce_scatter
        dw_i = dy_i.T G,  db_i = sum of dy_i over rows     G kept, or gathered again

    matmul_reduce_scatter    y = RS(P) + b,  P = x w.T
        dx   = AG(dy) w                                    one all_gather_matmul
        dw   = AG(dy).T x,  db = sum of AG(dy) over rows   the same gather

``avg`` divides what passes through RS by W. The gradient of a replicated bias counts every rank's
rows, so it is that of the unsharded layer, equal on all ranks: it must not be reduced once more.
"""

from __future__ import annotations

from typing import Any

import torch

from fluxgen.runtime import functional
from fluxgen.runtime.fallback import equal_parts

__all__ = ["register", "rows"]


def register(all_gather_matmul: Any, matmul_reduce_scatter: Any) -> None:
    """Give both custom ops their backward."""
    functional.register("all_gather_matmul", all_gather_matmul, _gather_setup, _gather_backward)
    functional.register(
        "matmul_reduce_scatter", matmul_reduce_scatter, _scatter_setup, _scatter_backward
    )


def _gather_setup(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, _, has_bias, group, tp, dim, size, return_gathered = inputs
    # Gradients of unused outputs stay None: a zero one would cost a matmul or a collective.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[-1] if return_gathered else x, *weights)
    ctx.call = (has_bias, group, tp, dim, size, x.shape[dim], return_gathered)


def _gather_backward(ctx: Any, grads: list[torch.Tensor | None]) -> tuple[Any, ...]:
    kept, *weights = ctx.saved_tensors
    has_bias, group, tp, dim, size, part, return_gathered = ctx.call
    needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
    used = [i for i in range(len(weights)) if grads[i] is not None]
    outs: list[Any] = [grads[i] for i in used]
    dx = None
    if needs_x and used:
        # One reduction for all weights: the sum over them is the K of a single matmul.
        grad = outs[0] if len(used) == 1 else torch.cat(outs, dim=-1)
        weight = weights[used[0]] if len(used) == 1 else torch.cat([weights[i] for i in used])
        dx = functional.call(
            "matmul_reduce_scatter",
            grad,
            weight.t(),
            None,
            group,
            tp,
            dim,
            part,
            "sum",
            "replicated",
        )
    if needs_x and return_gathered and grads[-1] is not None:
        direct = _reduce_scatter(grads[-1], group, tp, dim, part)
        dx = direct if dx is None else dx + direct
    dw: list[Any] = [None] * len(weights)
    if any(needs_w[i] for i in used):
        gathered = kept
        if not return_gathered:
            (gathered,) = functional.call(
                "all_gather_matmul", kept, [], [], [], group, tp, dim, size, True
            )
        for i, grad in zip(used, outs, strict=True):
            if needs_w[i]:
                dw[i] = rows(grad).t() @ rows(gathered)
    db: list[Any] = []
    for i, has in enumerate(has_bias):
        if has:
            grad = grads[i]
            needed = needs_b[len(db)] and grad is not None
            db.append(rows(grad).sum(0) if needed else None)
    return dx, dw, db, None, None, None, None, None, None


def _scatter_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, _, group, tp, dim, _, reduce_op, bias_mode = inputs
    ctx.save_for_backward(x, w)
    ctx.call = (group, tp, dim, tp if reduce_op == "avg" else 1, bias_mode)


def _scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    group, tp, dim, divisor, bias_mode = ctx.call
    needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
    dx = dw = db = None
    if needs_x or needs_w or needs_b:
        weights = [w.t()] if needs_x else []
        outs = functional.call(
            "all_gather_matmul",
            grad,
            weights,
            [],
            [False] * len(weights),
            group,
            tp,
            dim,
            x.shape[dim],
            bool(needs_w or needs_b),
        )
        if needs_x:
            dx = outs[0] if divisor == 1 else outs[0] / divisor
        if needs_w:
            dw = rows(outs[-1]).t() @ rows(x)
            dw = dw if divisor == 1 else dw / divisor
        if needs_b:
            db = rows(outs[-1]).sum(0)
            db = db if divisor == 1 or bias_mode == "replicated" else db / divisor
    return dx, dw, db, None, None, None, None, None, None


def rows(x: Any) -> Any:
    """(..., N) as (rows, N)."""
    return x.flatten(0, -2)


def _reduce_scatter(grad: Any, group: str, tp: int, dim: int, part: int) -> Any:
    """Sum of ``grad`` over ranks, this rank's ``part`` along ``dim``; traces.

    A functional collective; uneven parts are padded to the longest.
    """
    if tp == 1:
        return grad
    parts = equal_parts(grad.movedim(dim, 0), tp).contiguous()
    if parts.numel() == 0:
        return grad.new_zeros(grad.movedim(dim, 0)[:part].movedim(0, dim).shape)
    out = torch.ops._c10d_functional.reduce_scatter_tensor(parts, "sum", tp, group)
    return torch.ops._c10d_functional.wait_tensor(out)[:part].movedim(0, dim)
