"""``all_gather_matmul``: the input side of a column-parallel layer.

With W ranks, G the gathered activations (shapes: ``fallback``)::

    y_i  = G w_i.T + b_i                               G  = AG(x)
    dx   = RS(sum_i dy_i w_i) + RS(dG)                 one matmul_reduce_scatter
    dw_i = dy_i.T G,  db_i = sum of dy_i over rows     G kept, or gathered again
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fluxgen.core.errors import UsageError
from fluxgen.core.op import Op
from fluxgen.runtime.ops import fallback, functional
from fluxgen.runtime.ops.autocast import any_autocast, cast
from fluxgen.runtime.ops.call import is_plain_call, known_call, remember, rows
from fluxgen.runtime.ops.checks import (
    check_bias,
    check_dim,
    check_tangents,
    check_weight,
    check_x,
    listed,
)
from fluxgen.runtime.ops.fallback import equal_parts, split_sizes
from fluxgen.runtime.session import dispatch
from fluxgen.runtime.session.dispatch import Call
from fluxgen.runtime.session.groups import state_of
from fluxgen.runtime.session.launches import layout_of
from fluxgen.runtime.session.membership import Group, group_of, rank_of, resolve

__all__ = ["all_gather_matmul"]


def all_gather_matmul(
    x: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    *,
    group: Group,
    gather_dim: int = 0,
    gather_size: int | None = None,
    return_gathered: bool = False,
    save_gathered: bool = False,
) -> Any:
    """``gather(x) @ w.T + bias``: the input side of a column-parallel layer.

    Args:
        x: (S/W, ..., K): this rank's part along ``gather_dim``.
        w: (N, K) in any strides, ``.t()`` of a (K, N) included; or several that share the gather.
            N may differ between ranks.
        bias: (N,), this rank's own, for its own columns; for several weights one (or None) each.
        group: whose ranks hold the parts, in the group's order.
        gather_dim: any dim of x but the last; negative counts from the end.
        gather_size: S. Needed only where W does not divide it: a rank's part is then that of
            :func:`split_sizes`. None where all parts are equally long.
        return_gathered: also return the gathered x, (S, ..., K).
        save_gathered: keep the gathered x for the backward of w, W times the memory, in place of
            gathering it again.

    Returns:
        y of (S, ..., N), a list of them for several weights; with ``return_gathered``, a pair of
        that and the gathered x.

    Raises:
        UsageError: (a ValueError) an argument does not fit; names it, with values.
        AgreementError: (a ValueError) other ranks make another call, or none; names them.
        UnsupportedError: under ``dispatch.strict()``, with the reason.
        CaptureError: the first call of this kind, inside a CUDA graph capture.
        CommTimeout: an earlier call of this group waited for a rank past its deadline.
    """
    if any_autocast():
        x, w, bias = cast(x, w, bias)
    state, key, run = known_call(group, x, w, (bias,), gather_dim, gather_size, return_gathered)
    if run is not None:
        return run(x, w, bias, return_gathered)
    single = isinstance(w, torch.Tensor)
    weights: list[Any] = [w] if single else listed("w", w)
    biases: list[Any]
    if bias is None or isinstance(bias, torch.Tensor):
        biases = [None] * len(weights) if bias is None else [bias]
    else:
        biases = listed("bias", bias)
    name, tp = group_of(group)
    check_x(x)
    dim = check_dim("gather_dim", gather_dim, x)
    if not weights:
        raise UsageError("w: expected at least one weight; found an empty list")
    if len(biases) != len(weights):
        raise UsageError(
            f"bias: expected one, or None, for each of {len(weights)} weights; found {len(biases)}"
        )
    for index, (weight, b) in enumerate(zip(weights, biases, strict=True)):
        check_weight("w" if single else f"w[{index}]", weight, x)
        check_bias("bias" if single else f"bias[{index}]", b, weight)
    check_tangents(x, *weights, *biases)
    size = _check_gather_size(x, dim, gather_size, name, tp)
    keep = save_gathered and torch.is_grad_enabled() and any(t.requires_grad for t in weights)
    given = [b for b in biases if b is not None]
    direct = is_plain_call(x, *weights, *given)
    outs = (_gather_impl if direct else partial(functional.call, "all_gather_matmul"))(
        x,
        weights,
        given,
        [b is not None for b in biases],
        name,
        tp,
        dim,
        size,
        return_gathered or keep,
    )
    if state is not None and key not in state.fast:
        slow_key = (Op.AG_GEMM, *_gather_key(x, weights, dim, size, return_gathered))
        remember(state, key, x, weights[0], slow_key)
    y = outs[0] if single else list(outs[: len(weights)])
    return (y, outs[-1]) if return_gathered else y


def _gather_key(
    x: torch.Tensor, w: Sequence[torch.Tensor], dim: int, size: int, return_gathered: bool
) -> tuple[Any, ...]:
    """What tells agreed calls apart: nothing that may differ between ranks but the weights."""
    weights = [(weight.shape, weight.stride()) for weight in w]
    return (x.shape, dim, size, x.dtype, x.device, return_gathered, *weights)


def _check_gather_size(x: torch.Tensor, dim: int, size: int | None, name: str, tp: int) -> int:
    if size is None:
        whole: int = x.shape[dim] * tp
        return whole
    if isinstance(size, bool) or not isinstance(size, (int, torch.SymInt)) or size < 0:
        raise UsageError(f"gather_size: expected a non-negative integer, or None; found {size!r}")
    sizes = split_sizes(size, tp)
    if x.shape[dim] != sizes[rank_of(name)]:
        raise UsageError(
            f"x: expected {sizes[rank_of(name)]} in dim {dim}, this rank's part of gather_size="
            f"{size} (the ranks hold {sizes}); found {tuple(x.shape)}"
        )
    return size


# A list of weights may be empty, which leaves the gather alone. `size` is the whole length of the
# gathered dim.


def _gather_impl(
    x: torch.Tensor,
    w: list[torch.Tensor],
    bias: list[torch.Tensor],
    has_bias: list[bool],
    group: str,
    tp: int,
    gather_dim: int,
    size: int,
    return_gathered: bool,
) -> list[torch.Tensor]:
    process_group = resolve(group)
    given = iter(bias)
    biases = [next(given) if has else None for has in has_bias]
    if w:
        state = state_of(process_group)
        key = (Op.AG_GEMM, *_gather_key(x, w, gather_dim, size, return_gathered))

        def describe() -> Call:
            sizes = list(x.shape[:-1])
            sizes[gather_dim] = size
            return Call(
                Op.AG_GEMM, math.prod(sizes), tuple(weight.shape[0] for weight in w), x.shape[-1],
                x.dtype, x.device, tp, tuple(map(layout_of, w)), gather_dim, tuple(sizes),
                return_gathered=return_gathered,
            )  # fmt: skip

        entry = state.entry(key, describe)
        if entry.run is not None:
            return list(entry.run(x, w, biases, return_gathered))
        dispatch.note(entry.decision)
    outs, gathered = fallback.all_gather_matmul(x, w, biases, process_group, gather_dim, size)
    # A custom op may not return its input, nor a stride that its fake does not have.
    outs = [out.contiguous() for out in outs]
    if return_gathered:
        outs.append(gathered.clone(memory_format=torch.contiguous_format)
                    if gathered is x else gathered.contiguous())  # fmt: skip
    return outs


def _gather_fake(
    x: torch.Tensor,
    w: list[torch.Tensor],
    bias: list[torch.Tensor],
    has_bias: list[bool],
    group: str,
    tp: int,
    gather_dim: int,
    size: int,
    return_gathered: bool,
) -> list[torch.Tensor]:
    shape = list(x.shape)
    shape[gather_dim] = size
    outs = [x.new_empty([*shape[:-1], weight.shape[0]]) for weight in w]
    return [*outs, x.new_empty(shape)] if return_gathered else outs


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


_gather_op = torch.library.custom_op(
    "fluxgen::all_gather_matmul",
    _gather_impl,
    mutates_args=(),
    schema="(Tensor x, Tensor[] w, Tensor[] bias, bool[] has_bias, str group, int tp, "
    "int gather_dim, SymInt size, bool return_gathered) -> Tensor[]",
)
_gather_op.register_fake(_gather_fake)
functional.register("all_gather_matmul", _gather_op, _gather_setup, _gather_backward)
