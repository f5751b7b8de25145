"""Operands under ``torch.autocast``, cast as those of ``torch.nn.functional.linear`` are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["any_autocast", "cast"]

any_autocast = torch._C._is_any_autocast_enabled
"""Whether any device type has autocast on: cheap, to be asked at every call."""


def cast(*operands: Any) -> tuple[Any, ...]:
    """Each tensor, or list of tensors, in the type that autocast has for the first one's device.

    As for ``linear``: floating-point tensors but those of fp64 are cast, on a device type that
    autocast is on for, and gradients come back in the tensors' own types. What is no tensor stays
    what it is, for the checks to refuse.
    """
    first = operands[0]
    if not isinstance(first, torch.Tensor):
        return operands
    kind = first.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)
    return tuple(_cast(operand, kind, dtype) for operand in operands)


def _cast(operand: Any, kind: str, dtype: torch.dtype) -> Any:
    if isinstance(operand, torch.Tensor):
        eligible = operand.is_floating_point() and operand.dtype != torch.float64
        return operand.to(dtype) if eligible and operand.device.type == kind else operand
    if isinstance(operand, Sequence) and not isinstance(operand, (str, bytes)):
        return [_cast(each, kind, dtype) for each in operand]
    return operand
