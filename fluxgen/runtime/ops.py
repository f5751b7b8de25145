"""The ops for PyTorch: ``all_gather_matmul`` and ``matmul_reduce_scatter``.

Both are ``torch.library`` custom ops (``torch.ops.fluxgen.*``, the group by name as functional
collectives take it) with fake kernels and autograd, behind two functions that check arguments.
Checks look at this rank's arguments alone and come before anything is sent, so ranks that make
the same wrong call get the same error. Then :mod:`fluxgen.runtime.groups` has the ranks agree on a
path, once for each call; :mod:`fluxgen.runtime.runs` or :mod:`fluxgen.runtime.fallback` runs it,
and :func:`fluxgen.runtime.dispatch.explain` says which and why.

Every rank of the group must make the same calls in the same order, with tensors that require
gradients on all ranks or on none: backward communicates too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from fluxgen.core.errors import UsageError
from fluxgen.core.op import Op
from fluxgen.runtime import autograd, dispatch, fallback, functional
from fluxgen.runtime.autocast import any_autocast, cast
from fluxgen.runtime.checks import (
    check_bias,
    check_dim,
    check_tangents,
    check_weight,
    check_x,
    listed,
)
from fluxgen.runtime.dispatch import Call
from fluxgen.runtime.fallback import split_sizes
from fluxgen.runtime.groups import MAX_ENTRIES, GroupState, known_state, state_of
from fluxgen.runtime.membership import Group, group_of, member_of, rank_of, resolve
from fluxgen.runtime.runs import layout_of

__all__ = [
    "Group",
    "all_gather_matmul",
    "group_of",
    "is_plain_call",
    "matmul_reduce_scatter",
    "member_of",
    "rank_of",
    "resolve",
    "split_sizes",
]

REDUCE_OPS = ("sum", "avg")
_BIAS_MODES = ("replicated", "partial")


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


_PLAIN = (torch.Tensor, torch.nn.Parameter)

# Looked up once: a call asks for each of them.
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_transforms = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state


def _fast_state(group: Any) -> GroupState | None:
    """The state of a group that has made calls, outside of compilers and by no check."""
    if _is_compiling():
        return None
    if type(group) is str:
        try:
            group = resolve(group)
        except UsageError:
            return None  # the checks of the slow path say what is wrong
    found = known_state(group)
    if found is None and isinstance(group, (DeviceMesh, tuple)):
        try:
            return known_state(resolve(group_of(group)[0]))
        except UsageError:
            return None
    return found


def is_plain_call(*tensors: Any) -> bool:
    """Whether a call is plain eager inference, where the custom op's dispatch only costs time.

    It takes several times as long as a small matmul. Whoever wants to see the op (compilers,
    tracers, dispatch modes, tensor subclasses, function transforms, autograd) still gets it.
    """
    if _is_compiling():
        return False
    needs_grad = _is_grad_enabled()
    for t in tensors:
        if type(t) not in _PLAIN or (needs_grad and t.requires_grad) or t.is_meta:
            return False
    return (
        _dispatch_modes() == 0
        and _function_transforms() is None
        and _tracing() is None
        and forward_ad._current_level < 0
    )


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    """All that checks and decisions look at, and the strides; not the address."""
    return t.shape, t.stride(), t.dtype, t.get_device()


def known_call(
    group: Any, x: Any, w: Any, added: Sequence[Any], *rest: Any
) -> tuple[GroupState | None, Any, Callable[..., Any] | None]:
    """The launches of a plain call that was made before, if it has any that need no more checks.

    Args:
        added: the bias, or None, and whatever else may be. rest: what else tells calls apart.

    Returns:
        The group's state, the call's key there, and the launches; all None for another call, whose
        checks are still to come.
    """
    state = _fast_state(group)
    if state is None or not is_plain_call(x, w, *(t for t in added if t is not None)):
        return None, None, None
    try:
        key = (*_layout(x), *_layout(w), *(t if t is None else _layout(t) for t in added), *rest)
        return state, key, state.fast.get(key)
    except (
        TypeError,
        RuntimeError,
    ):  # not hashable, or not dense: the checks say what it should be
        return None, None, None


def remember(
    state: GroupState, key: Hashable, x: torch.Tensor, w: torch.Tensor, slow_key: Hashable
) -> None:
    """Let the next such call go straight to its launches, if it has any."""
    entry = state.find(slow_key)
    if entry is not None:
        if len(state.fast) >= MAX_ENTRIES:
            state.fast.clear()
        run = entry.run
        state.fast[key] = None if run is None else partial(run.fast, run.readable(x, w))


def _gather_key(
    x: torch.Tensor, w: Sequence[torch.Tensor], dim: int, size: int, return_gathered: bool
) -> tuple[Any, ...]:
    """What tells agreed calls apart: nothing that may differ between ranks but the weights."""
    weights = [(weight.shape, weight.stride()) for weight in w]
    return (x.shape, dim, size, x.dtype, x.device, return_gathered, *weights)


def _scatter_key(
    x: torch.Tensor, w: torch.Tensor, bias: Any, dim: int, reduce_op: str, bias_mode: str
) -> tuple[Any, ...]:
    """As :func:`_gather_key`."""
    kind = _bias_kind(bias, bias_mode)
    return (x.shape, w.shape, w.stride(), dim, x.dtype, x.device, kind, reduce_op)


def _bias_kind(bias: torch.Tensor | None, bias_mode: str) -> str:
    """The bias as all ranks have it: a partial one may be some ranks' only."""
    return bias_mode if bias_mode == "partial" or bias is not None else "none"


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


# The custom ops. They trust their arguments: the functions above have checked them, or autograd
# made them. A list of weights may be empty, which leaves the gather alone. `tp` is the size of
# `group`, `size` the whole length of the gathered dim and `part` this rank's of the scattered one,
# handed in so that fake kernels need no process group.


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


_gather_op = torch.library.custom_op(
    "fluxgen::all_gather_matmul",
    _gather_impl,
    mutates_args=(),
    schema="(Tensor x, Tensor[] w, Tensor[] bias, bool[] has_bias, str group, int tp, "
    "int gather_dim, SymInt size, bool return_gathered) -> Tensor[]",
)
_gather_op.register_fake(_gather_fake)
_scatter_op = torch.library.custom_op(
    "fluxgen::matmul_reduce_scatter",
    _scatter_impl,
    mutates_args=(),
    schema="(Tensor x, Tensor w, Tensor? bias, str group, int tp, int scatter_dim, "
    "SymInt part, str reduce_op, str bias_mode) -> Tensor",
)
_scatter_op.register_fake(_scatter_fake)
autograd.register(_gather_op, _scatter_op)
