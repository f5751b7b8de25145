"""``matmul_reduce_scatter``: the output side of a row-parallel layer.

With W ranks, P the partial product (shapes: ``fallback``)::

    y  = RS(P) + b,  P = x w.T
    dx = AG(dy) w                                    one all_gather_matmul
    dw = AG(dy).T x,  db = sum of AG(dy) over rows   the same gather

``avg`` divides what passes through RS by W. The gradient of a replicated bias counts every rank's
rows, so it is that of the unsharded layer, equal on all ranks: it must not be reduced once more.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fluxgen.core.errors import UsageError
from fluxgen.core.op import Op
from fluxgen.runtime.ops import fallback, functional
from fluxgen.runtime.ops.autocast import any_autocast, cast
from fluxgen.runtime.ops.call import is_plain_call, known_call, remember, rows
from fluxgen.runtime.ops.checks import check_bias, check_dim, check_tangents, check_weight, check_x
from fluxgen.runtime.ops.fallback import split_sizes
from fluxgen.runtime.session import dispatch
from fluxgen.runtime.session.dispatch import Call
from fluxgen.runtime.session.groups import state_of
from fluxgen.runtime.session.launches import layout_of
from fluxgen.runtime.session.membership import Group, group_of, rank_of, resolve

__all__ = ["matmul_reduce_scatter"]

REDUCE_OPS = ("sum", "avg")
_BIAS_MODES = ("replicated", "partial")


def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group,
    scatter_dim: int = 0,
    reduce_op: str = "sum",
    bias_mode: str = "replicated",
) -> Any:
    """``scatter(reduce(x @ w.T)) + bias``: the output side of a row-parallel layer.

    Args:
        x: (S, ..., K), all rows with this rank's part of K. K may differ between ranks.
        w: (N, K) in any strides, this rank's part of K.
        bias: (N,). group: whose ranks add up; each keeps the part of its rank in the group.
        scatter_dim: any dim of x but the last. Where W does not divide S, a rank keeps as many
            rows as :func:`split_sizes` says.
        reduce_op: ``sum`` or ``avg``.
        bias_mode: ``replicated``: every rank passes the same bias, it is added once, after the
            reduction (also for ``avg``). ``partial``: a rank's bias is part of its own product
            and is reduced with it, so that a bias which one rank alone passes counts once.

    Returns:
        y of (S/W, ..., N), this rank's part.

    Raises:
        UsageError: (a ValueError) an argument does not fit; names it, with values. Before
            anything is sent, except that differences between ranks (a replicated bias that some
            lack) are found by comparing, the first time that this call is made.
        UnsupportedError, CaptureError, CommTimeout: as :func:`all_gather_matmul`.
    """
    if any_autocast():
        x, w, bias = cast(x, w, bias)
    state, key, run = known_call(group, x, w, (bias,), scatter_dim, reduce_op, bias_mode)
    if run is not None:
        return run(x, w, bias)
    name, tp = group_of(group)
    check_x(x)
    dim = check_dim("scatter_dim", scatter_dim, x)
    check_weight("w", w, x)
    check_bias("bias", bias, w)
    if reduce_op not in REDUCE_OPS:
        raise UsageError(f"reduce_op: expected one of {REDUCE_OPS}; found {reduce_op!r}")
    if bias_mode not in _BIAS_MODES:
        raise UsageError(f"bias_mode: expected one of {_BIAS_MODES}; found {bias_mode!r}")
    check_tangents(x, w, bias)
    part = x.shape[dim] // tp
    if x.shape[dim] % tp:
        part = split_sizes(x.shape[dim], tp)[rank_of(name)]
    direct = is_plain_call(*((x, w) if bias is None else (x, w, bias)))
    out = (_scatter_impl if direct else partial(functional.call, "matmul_reduce_scatter"))(
        x, w, bias, name, tp, dim, part, reduce_op, bias_mode
    )
    if state is not None and key not in state.fast:
        slow_key = (Op.GEMM_RS, *_scatter_key(x, w, bias, dim, reduce_op, bias_mode))
        remember(state, key, x, w, slow_key)
    return out


def _scatter_key(
    x: torch.Tensor, w: torch.Tensor, bias: Any, dim: int, reduce_op: str, bias_mode: str
) -> tuple[Any, ...]:
    """As :func:`_gather_key`."""
    kind = _bias_kind(bias, bias_mode)
    return (x.shape, w.shape, w.stride(), dim, x.dtype, x.device, kind, reduce_op)


def _bias_kind(bias: torch.Tensor | None, bias_mode: str) -> str:
    """The bias as all ranks have it: a partial one may be some ranks' only."""
    return bias_mode if bias_mode == "partial" or bias is not None else "none"


# `part` is this rank's length of the scattered dim.


def _scatter_impl(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: str,
    tp: int,
    scatter_dim: int,
    part: int,
    reduce_op: str,
    bias_mode: str,
) -> torch.Tensor:
    del part  # for the fake
    process_group = resolve(group)
    state = state_of(process_group)
    key = (Op.GEMM_RS, *_scatter_key(x, w, bias, scatter_dim, reduce_op, bias_mode))

    def describe() -> Call:
        return Call(
            Op.GEMM_RS, x.shape[:-1].numel(), (w.shape[0],), w.shape[1], x.dtype, x.device, tp,
            (layout_of(w),), scatter_dim, tuple(x.shape[:-1]),
            _bias_kind(bias, bias_mode), reduce_op,
        )  # fmt: skip

    entry = state.entry(key, describe)
    if entry.run is not None:
        out: torch.Tensor = entry.run(x, w, bias)
        return out
    dispatch.note(entry.decision)
    return fallback.matmul_reduce_scatter(
        x, w, bias, process_group, scatter_dim, reduce_op, bias_mode
    ).contiguous()


def _scatter_fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: str,
    tp: int,
    scatter_dim: int,
    part: int,
    reduce_op: str,
    bias_mode: str,
) -> torch.Tensor:
    shape = list(x.shape)
    shape[scatter_dim] = part
    shape[-1] = w.shape[0]
    return x.new_empty(shape)


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


_scatter_op = torch.library.custom_op(
    "fluxgen::matmul_reduce_scatter",
    _scatter_impl,
    mutates_args=(),
    schema="(Tensor x, Tensor w, Tensor? bias, str group, int tp, int scatter_dim, "
    "SymInt part, str reduce_op, str bias_mode) -> Tensor",
)
_scatter_op.register_fake(_scatter_fake)
functional.register("matmul_reduce_scatter", _scatter_op, _scatter_setup, _scatter_backward)
