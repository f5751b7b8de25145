"""What a call of any op has in common: whether it is plain, and the launches that it had before.

The ops are ``torch.library`` custom ops (``torch.ops.fluxgen.*``, the group by name as functional
collectives take it) with fake kernels and autograd, behind functions that check arguments. Checks
look at this rank's arguments alone and come before anything is sent, so ranks that make the same
wrong call get the same error. Then :mod:`fluxgen.runtime.session.groups` has the ranks agree on a
path, once for each call; :mod:`fluxgen.runtime.session.launches` or
:mod:`fluxgen.runtime.ops.fallback` runs it, and :func:`fluxgen.explain` says which and why.

The custom ops trust their arguments: the functions have checked them, or autograd made them. ``tp``
is the size of ``group``; it and the sizes of outputs are handed in so that fake kernels need no
process group.

Every rank of the group must make the same calls in the same order, with tensors that require
gradients on all ranks or on none: backward communicates too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh

from fluxgen.core.errors import UsageError
from fluxgen.runtime.session.groups import MAX_ENTRIES, GroupState, known_state
from fluxgen.runtime.session.membership import group_of, resolve

__all__ = ["is_plain_call", "known_call", "remember", "rows"]

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


def rows(x: Any) -> Any:
    """(..., N) as (rows, N)."""
    return x.flatten(0, -2)
