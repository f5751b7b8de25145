"""The op of a row-parallel layer whose result every rank needs: ``matmul_all_reduce``.

A custom op (:mod:`fluxgen.runtime.ops.call`) with a fake kernel and autograd. Its fused path has
two shots: of the ``gemm_rs`` that the database names for these rows each rank reduces its part,
in fp32 and rank order, and the same kernel pushes it to every peer. Elsewhere the device library
multiplies and the group's all-reduce adds. Either way all ranks get the same bits.

What follows an all-reduce is the same computation on every rank, so the gradient that comes back
is, too: nothing is communicated in backward (``g`` of Megatron-LM's pair; its ``f`` is
:func:`matmul_of_replicated`).
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
from fluxgen.runtime.ops.checks import (
    check_bias,
    check_like,
    check_tangents,
    check_tensor,
    check_weight,
    check_x,
)
from fluxgen.runtime.session import dispatch
from fluxgen.runtime.session.dispatch import Call
from fluxgen.runtime.session.groups import state_of
from fluxgen.runtime.session.launches import layout_of
from fluxgen.runtime.session.membership import Group, group_of, resolve

__all__ = ["matmul_all_reduce", "matmul_of_replicated"]

_NAME = "gemm_ar"


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    group: Group,
) -> torch.Tensor:
    """``all_reduce(x @ w.T) + bias + residual``: a row-parallel layer without sequence parallelism.

    Args:
        x: (..., K), all rows with this rank's part of K. K may differ between ranks.
        w: (N, K) in any strides, this rank's part of K.
        bias: (N,), the same on every rank, or None on every rank: added once.
        residual: (..., N), the same on every rank, or None on every rank: added once, last.
        group: whose ranks add up.

    Returns:
        y of (..., N), with the same bits on all ranks.

    Raises:
        UsageError: (a ValueError) an argument does not fit; names it, with values.
        AgreementError: (a ValueError) other ranks make another call, or none; names them.
        UnsupportedError, CaptureError, CommTimeout: as ``all_gather_matmul``.
    """
    if any_autocast():
        x, w, bias, residual = cast(x, w, bias, residual)
    state, key, run = known_call(group, x, w, (bias, residual), _NAME)
    if run is not None:
        return run(x, w, bias, residual).view(*x.shape[:-1], w.shape[0])
    name, tp = group_of(group)
    check_x(x)
    check_weight("w", w, x)
    check_bias("bias", bias, w)
    if residual is not None:
        check_tensor("residual", residual)
        wanted = (*x.shape[:-1], w.shape[0])
        if tuple(residual.shape) != wanted:
            raise UsageError(
                f"residual: expected {wanted}, the shape of the result; found "
                f"{tuple(residual.shape)}"
            )
        check_like("residual", residual, x)
    check_tangents(x, w, bias, residual)
    direct = is_plain_call(*(t for t in (x, w, bias, residual) if t is not None))
    op = _reduce_impl if direct else partial(functional.call, "matmul_all_reduce")
    out: torch.Tensor = op(x, w, bias, residual, name, tp)
    if state is not None and key not in state.fast:
        remember(state, key, x, w, _reduce_key(x, w, bias, residual))
    return out


def matmul_of_replicated(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, *, group: Group
) -> torch.Tensor:
    """``x @ w.T + bias`` of an x that all ranks hold: a column-parallel layer without a gather.

    Forward sends nothing. In backward each rank knows the gradient of x by way of its own columns
    alone, so that is a :func:`matmul_all_reduce` of the gradient of y.

    Args:
        x: (..., K), the same on every rank. w: (N, K), this rank's rows. bias: (N,), for them.
        group: whose ranks hold the other columns.

    Raises:
        UsageError: (a ValueError) an argument does not fit; names it, with values.
    """
    if any_autocast():
        x, w, bias = cast(x, w, bias)
    name, tp = group_of(group)
    check_x(x)
    check_weight("w", w, x)
    check_bias("bias", bias, w)
    check_tangents(x, w, bias)
    out: torch.Tensor = _Replicated.apply(x, w, bias, name, tp)
    return out


class _Replicated(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped to mypy here
    """The matmul alone, with the backward that communicates."""

    @staticmethod
    def forward(
        x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: str, tp: int
    ) -> torch.Tensor:
        return fallback.linear(x, w, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, w, _, group, tp = inputs
        ctx.save_for_backward(x, w)
        ctx.call = (group, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        dx = None
        if needs_x:
            dx = functional.call("matmul_all_reduce", grad, w.t(), None, None, *ctx.call)
        dw, db = _own_gradients(grad, x, needs_w, needs_b)
        return dx, dw, db, None, None


def _reduce_key(x: torch.Tensor, w: torch.Tensor, *added: torch.Tensor | None) -> tuple[Any, ...]:
    """What tells agreed calls apart."""
    given = (t is not None for t in added)
    return (_NAME, x.shape, w.shape, w.stride(), x.dtype, x.device, *given)


def _reduce_impl(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    group: str,
    tp: int,
) -> torch.Tensor:
    process_group = resolve(group)

    def describe() -> Call:
        m = x.shape[:-1].numel()
        return Call(
            Op.GEMM_AR, m, (w.shape[0],), w.shape[1], x.dtype, x.device, tp, (layout_of(w),),
            0, (m,), "none" if bias is None else "replicated",
            residual=residual is not None,
        )  # fmt: skip

    entry = state_of(process_group).entry(_reduce_key(x, w, bias, residual), describe)
    if entry.run is not None:
        flat = x.reshape(-1, x.shape[-1])
        added = None if residual is None else residual.reshape(-1, residual.shape[-1])
        out: torch.Tensor = entry.run(flat, w, bias, added)
        return out.view(*x.shape[:-1], w.shape[0])
    dispatch.note(entry.decision)
    return fallback.matmul_all_reduce(x, w, bias, residual, process_group)


def _reduce_fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    group: str,
    tp: int,
) -> torch.Tensor:
    return x.new_empty([*x.shape[:-1], w.shape[0]])


def _reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, *_ = inputs
    ctx.save_for_backward(x, w)


def _reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_b, needs_residual = ctx.needs_input_grad[:4]
    dw, db = _own_gradients(grad, x, needs_w, needs_b)
    return grad @ w if needs_x else None, dw, db, grad if needs_residual else None, None, None


def _own_gradients(grad: Any, x: Any, needs_w: bool, needs_b: bool) -> tuple[Any, Any]:
    """Of this rank's weight and of the bias, from rows that every rank holds."""
    return (
        rows(grad).t() @ rows(x) if needs_w else None,
        rows(grad).sum(0) if needs_b else None,
    )


_reduce_op = torch.library.custom_op(
    "fluxgen::matmul_all_reduce",
    _reduce_impl,
    mutates_args=(),
    schema="(Tensor x, Tensor w, Tensor? bias, Tensor? residual, str group, int tp) -> Tensor",
)
_reduce_op.register_fake(_reduce_fake)
functional.register("matmul_all_reduce", _reduce_op, _reduce_setup, _reduce_backward)
