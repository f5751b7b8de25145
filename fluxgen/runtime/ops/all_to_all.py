"""The ops around an all-to-all: ``matmul_all_to_all`` and ``all_to_all_matmul``.

Rows of dim 0 go to the ranks as ``torch.distributed.all_to_all_single`` sends them: after the
matmul (the combine of experts' results, one side of Ulysses attention) or before it. Custom ops as
those of :mod:`fluxgen.runtime.ops.call`; each is the other's backward.

Without split sizes every rank sends equal parts, and the fused path is that of ``gemm_rs`` without
its sum, or of ``ag_gemm`` with a part of x for each peer, where the database names one. Split sizes
are a rank's own and may change at each call; calls with them run unfused, and each of them is
compared between ranks before anything is sent (:mod:`fluxgen.runtime.ops.splits`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fluxgen.core.errors import UsageError
from fluxgen.core.op import Op
from fluxgen.runtime.ops import fallback, functional
from fluxgen.runtime.ops.autocast import any_autocast, cast
from fluxgen.runtime.ops.call import is_plain_call, known_call, remember, rows
from fluxgen.runtime.ops.checks import check_bias, check_tangents, check_weight, check_x
from fluxgen.runtime.ops.splits import compare_splits, tell_refused
from fluxgen.runtime.session import dispatch
from fluxgen.runtime.session.dispatch import Call, Cause, Decision
from fluxgen.runtime.session.groups import state_of
from fluxgen.runtime.session.launches import layout_of
from fluxgen.runtime.session.membership import Group, group_of, rank_of, resolve

__all__ = ["all_to_all_matmul", "matmul_all_to_all"]

_Sizes = Sequence[int] | None


def matmul_all_to_all(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group,
    output_split_sizes: _Sizes = None,
    input_split_sizes: _Sizes = None,
) -> torch.Tensor:
    """``all_to_all(x @ w.T + bias)``: each rank gets its rows of every rank's product.

    Args:
        x: (S, ..., K). w: (N, K) in any strides, this rank's own; N is the same on every rank.
        bias: (N,), this rank's own.
        group: whose ranks exchange.
        output_split_sizes: rows that come from each rank. input_split_sizes: rows of dim 0 that
            go to each, which sum to S. Both as in ``torch.distributed.all_to_all_single``: None
            for equal parts, given on all ranks or on none. Rank j's ``output_split_sizes[i]`` is
            rank i's ``input_split_sizes[j]``.

    Returns:
        y of (sum of output_split_sizes, ..., N), the ranks' rows in their order.

    Raises:
        UsageError: (a ValueError) an argument does not fit; names it, with values.
        AgreementError: (a ValueError) on every rank, before anything is sent: split sizes that do
            not fit each other, or that some ranks have not given; and as ``all_gather_matmul``.
        UnsupportedError, CaptureError, CommTimeout: as ``all_gather_matmul``.
    """
    return _call(
        Op.GEMM_A2A, _products_impl, "matmul_all_to_all", x, w, bias, group,
        output_split_sizes, input_split_sizes,
    )  # fmt: skip


def all_to_all_matmul(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: Group,
    output_split_sizes: _Sizes = None,
    input_split_sizes: _Sizes = None,
) -> torch.Tensor:
    """``all_to_all(x) @ w.T + bias``: each rank multiplies the rows that the others send it.

    Args:
        x: (S, ..., K); K is the same on every rank. w: (N, K) in any strides, this rank's own.
        bias: (N,), this rank's own.
        group, output_split_sizes, input_split_sizes: as of :func:`matmul_all_to_all`.

    Returns:
        y of (sum of output_split_sizes, ..., N).

    Raises:
        As :func:`matmul_all_to_all`.
    """
    return _call(
        Op.A2A_GEMM, _exchanged_impl, "all_to_all_matmul", x, w, bias, group,
        output_split_sizes, input_split_sizes,
    )  # fmt: skip


def _call(
    op: Op, impl: Any, name: str, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None,
    group: Group, outs: _Sizes, ins: _Sizes,
) -> torch.Tensor:  # fmt: skip
    if any_autocast():
        x, w, bias = cast(x, w, bias)
    state = key = None
    if outs is None and ins is None:
        state, key, run = known_call(group, x, w, (bias,), name)
        if run is not None:
            known: torch.Tensor = run(x, w, bias, False) if op.gathers else run(x, w, None)
            return known
    group_name, tp = group_of(group)
    check_x(x)
    check_weight("w", w, x)
    check_bias("bias", bias, w)
    check_tangents(x, w, bias)
    try:
        sizes = _split_sizes(x, outs, ins, tp, rank_of(group_name))
    except UsageError:
        if not torch.compiler.is_compiling() and not x.is_meta:
            given = outs is not None or ins is not None
            tell_refused(resolve(group_name), op.value, x, given, _describing(op, x, w, bias, tp))
        raise
    tensors = (t for t in (x, w, bias) if t is not None)
    call = impl if is_plain_call(*tensors) else partial(functional.call, name)
    out: torch.Tensor = call(x, w, bias, *sizes, group_name, tp)
    if state is not None and key not in state.fast:
        remember(state, key, x, w, _key(op, x, w, _own_bias(op, bias)))
    return out


def _own_bias(op: Op, bias: torch.Tensor | None) -> str:
    """The bias as all ranks have it: one behind which rows are sent may be some ranks' only."""
    return "partial" if bias is not None and op is Op.GEMM_A2A else "none"


def _describing(
    op: Op, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, tp: int
) -> Callable[[], Call]:
    return lambda: Call(
        op, x.shape[:-1].numel(), (w.shape[0],), w.shape[1], x.dtype, x.device, tp,
        (layout_of(w),), 0, tuple(x.shape[:-1]), _own_bias(op, bias),
    )  # fmt: skip


def _key(op: Op, x: torch.Tensor, w: torch.Tensor, own: str) -> tuple[Any, ...]:
    """What tells agreed calls apart."""
    return (op, x.shape, w.shape, w.stride(), x.dtype, x.device, own)


def _split_sizes(
    x: torch.Tensor, outs: _Sizes, ins: _Sizes, tp: int, rank: int
) -> tuple[list[int] | None, list[int] | None]:
    """Both lists, or None for equal parts.

    Raises:
        UsageError: they do not fit.
    """
    size = x.shape[0]
    for name, sizes in (("output_split_sizes", outs), ("input_split_sizes", ins)):
        if sizes is None:
            if size % tp:
                raise UsageError(
                    f"{name}: None means equal parts; found {size} rows in dim 0 of x on {tp} "
                    "ranks. Give both lists of sizes"
                )
            continue
        if (
            not isinstance(sizes, (list, tuple))
            or len(sizes) != tp
            or any(
                isinstance(s, bool) or not isinstance(s, (int, torch.SymInt)) or s < 0
                for s in sizes
            )
        ):
            raise UsageError(
                f"{name}: expected {tp} non-negative integers, one for each rank; found {sizes!r}"
            )
    if ins is not None and sum(ins) != size:
        raise UsageError(
            f"input_split_sizes: expected a sum of {size}, the rows in dim 0 of x; found "
            f"{list(ins)}, a sum of {sum(ins)}"
        )
    if outs is None and ins is None:
        return None, None
    equal = [size // tp] * tp
    outs, ins = list(outs or equal), list(ins or equal)
    if outs[rank] != ins[rank]:
        raise UsageError(
            f"output_split_sizes: expected {ins[rank]} for rank {rank}, this one, as in "
            f"input_split_sizes; found {outs[rank]}"
        )
    return outs, ins


def _decided(
    op: Op, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, outs: _Sizes, ins: _Sizes,
    group: Any, tp: int,
) -> Any:  # fmt: skip
    """What launches a fused call, or None."""
    describe = _describing(op, x, w, bias, tp)
    compare_splits(group, op.value, x, outs, ins, describe)
    if outs is not None:
        reason = "split sizes are given: fused calls send equal parts"
        dispatch.note(Decision("unfused", reason, describe().key, Cause.UNEVEN))
        return None
    entry = state_of(group).entry(_key(op, x, w, _own_bias(op, bias)), describe)
    if entry.run is None:
        dispatch.note(entry.decision)
    return entry.run


def _products_impl(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    outs: list[int] | None,
    ins: list[int] | None,
    group: str,
    tp: int,
) -> torch.Tensor:
    process_group = resolve(group)
    run = _decided(Op.GEMM_A2A, x, w, bias, outs, ins, process_group, tp)
    if run is not None:
        out: torch.Tensor = run(x, w, None)
        return out
    return fallback.all_to_all(fallback.linear(x, w, bias), process_group, outs, ins)


def _exchanged_impl(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    outs: list[int] | None,
    ins: list[int] | None,
    group: str,
    tp: int,
) -> torch.Tensor:
    process_group = resolve(group)
    run = _decided(Op.A2A_GEMM, x, w, bias, outs, ins, process_group, tp)
    if run is not None:
        out: torch.Tensor = run(x, (w,), (bias,), False)[0]
        return out
    return fallback.linear(fallback.all_to_all(x, process_group, outs, ins), w, bias).contiguous()


def _fake(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    outs: Any,
    ins: Any,
    group: str,
    tp: int,
) -> torch.Tensor:
    size = x.shape[0] if outs is None else sum(outs)
    return x.new_empty([size, *x.shape[1:-1], w.shape[0]])


def _exchange_impl(
    x: torch.Tensor,
    after: torch.Tensor | None,
    outs: list[int] | None,
    ins: list[int] | None,
    group: str,
    tp: int,
) -> torch.Tensor:
    del after  # only to be computed before: all ranks must exchange in one order
    return fallback.all_to_all(x, resolve(group), outs, ins)


def _exchange_fake(
    x: torch.Tensor, after: torch.Tensor | None, outs: Any, ins: Any, group: str, tp: int
) -> torch.Tensor:
    return x.new_empty([x.shape[0] if outs is None else sum(outs), *x.shape[1:]])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, _, outs, ins, group, tp = inputs
    ctx.save_for_backward(x, w)
    ctx.call = (ins, outs, group, tp)  # back the way it came


def _products_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
    dx = dw = db = None
    if needs_w or needs_b:  # what comes back is needed itself
        back = functional.call("all_to_all", grad, None, *ctx.call)
        dx = back @ w if needs_x else None
        dw = rows(back).t() @ rows(x) if needs_w else None
        db = rows(back).sum(0) if needs_b else None
    elif needs_x:
        dx = functional.call("all_to_all_matmul", grad, w.t(), None, *ctx.call)
    return dx, dw, db, None, None, None, None


def _exchanged_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
    dx = functional.call("matmul_all_to_all", grad, w.t(), None, *ctx.call) if needs_x else None
    dw = None
    if needs_w:
        ins, outs, group, tp = ctx.call
        after = grad if dx is None else dx
        dw = rows(grad).t() @ rows(functional.call("all_to_all", x, after, outs, ins, group, tp))
    return dx, dw, rows(grad).sum(0) if needs_b else None, None, None, None, None


def _exchange_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, outs, ins, group, tp = inputs
    ctx.call = (ins, outs, group, tp)


def _exchange_backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    back = functional.call("all_to_all", grad, None, *ctx.call) if ctx.needs_input_grad[0] else None
    return back, None, None, None, None, None


# The exchange alone, for backward: an op, so that what is compiled need not look into it.
_exchange_op = torch.library.custom_op(
    "fluxgen::all_to_all",
    _exchange_impl,
    mutates_args=(),
    schema="(Tensor x, Tensor? after, SymInt[]? outs, SymInt[]? ins, str group, int tp) -> Tensor",
)
_exchange_op.register_fake(_exchange_fake)
functional.register("all_to_all", _exchange_op, _exchange_setup, _exchange_backward)

_SCHEMA = (
    "(Tensor x, Tensor w, Tensor? bias, SymInt[]? outs, SymInt[]? ins, str group, int tp) -> Tensor"
)
for _name, _impl, _backward in (
    ("matmul_all_to_all", _products_impl, _products_backward),
    ("all_to_all_matmul", _exchanged_impl, _exchanged_backward),
):
    _op = torch.library.custom_op(f"fluxgen::{_name}", _impl, mutates_args=(), schema=_SCHEMA)
    _op.register_fake(_fake)
    functional.register(_name, _op, _setup, _backward)
