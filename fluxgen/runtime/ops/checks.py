"""What the ops take: one error for each argument that does not fit, before anything is sent.

They look at this rank's arguments alone, so ranks that make the same wrong call get the same error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from fluxgen.core.errors import UnsupportedError, UsageError

__all__ = [
    "DTYPES", "check_bias", "check_dim", "check_like", "check_tangents", "check_tensor",
    "check_weight", "check_x", "listed",
]  # fmt: skip

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""What the ops take, whatever path runs."""


def listed(name: str, given: Any) -> list[Any]:
    """A list of what was given, which must be one of tensors."""
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise UsageError(f"{name}: expected a tensor or a list of tensors; found {_shown(given)}")
    return list(given)


def check_tensor(name: str, given: object) -> None:
    """A dense tensor of this rank alone."""
    if not isinstance(given, torch.Tensor):
        raise UsageError(f"{name}: expected a tensor; found {_shown(given)}")
    if type(given) not in _PLAIN and any(c.__name__ == "DTensor" for c in type(given).__mro__):
        raise UsageError(
            f"{name}: expected this rank's own tensor; found a DTensor of "
            f"{tuple(given.placements)}. Pass {name}.to_local()"
        )
    if given.is_nested:
        raise UsageError(
            f"{name}: expected a dense tensor; found a nested one. Pass its values, or pad it"
        )
    if given.layout is not torch.strided:
        raise UsageError(
            f"{name}: expected a dense tensor; found one of {given.layout}. Pass {name}.to_dense()"
        )
    if given.is_quantized:
        raise UsageError(
            f"{name}: expected one of {_names()}; found a quantized tensor of {given.dtype}. Pass "
            f"{name}.dequantize()"
        )


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _shown(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_tangents(*tensors: torch.Tensor | None) -> None:
    """The ops' autograd is reverse-mode, and torch would drop a tangent without a word."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for t in tensors:
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise UnsupportedError(
                "forward-mode differentiation: expected tensors without tangents; found one of "
                f"{tuple(t.shape)}. Use the reverse mode, or the unpacked primal"
            )


def check_x(x: torch.Tensor) -> None:
    """(rows, ..., K) of an element type that the ops take."""
    check_tensor("x", x)
    if x.dim() < 2 or x.dtype not in DTYPES:
        raise UsageError(
            f"x: expected (rows, ..., K) of {_names()}; found {tuple(x.shape)} of {x.dtype}"
        )


def check_dim(name: str, dim: int, x: torch.Tensor) -> int:
    """A dim of x but the last, from its start."""
    last = x.dim() - 1
    if isinstance(dim, bool) or not isinstance(dim, (int, torch.SymInt)):
        raise UsageError(
            f"{name}: expected an integer, a dim from 0 to {last - 1} of x {tuple(x.shape)}; found "
            f"{dim!r}"
        )
    found = dim + x.dim() if dim < 0 else dim
    if not 0 <= found < last:
        raise UsageError(
            f"{name}: expected a dim from 0 to {last - 1} of x {tuple(x.shape)}; found {dim}. The "
            "last dim is the matmul's own and cannot be cut here"
        )
    return found


def check_weight(name: str, w: torch.Tensor, x: torch.Tensor) -> None:
    """(N, K), with the K, element type and device of x."""
    check_tensor(name, w)
    if w.dim() != 2 or w.shape[1] != x.shape[-1]:
        raise UsageError(
            f"{name}: expected (N, K) with K = {x.shape[-1]}, the last dim of x "
            f"{tuple(x.shape)}; found {tuple(w.shape)}. Pass a (K, N) weight as w.t()"
        )
    check_like(name, w, x)


def check_bias(name: str, bias: torch.Tensor | None, w: torch.Tensor) -> None:
    """(N,) of its weight, or None."""
    if bias is None:
        return
    check_tensor(name, bias)
    if bias.dim() != 1 or bias.shape[0] != w.shape[0]:
        raise UsageError(
            f"{name}: expected ({w.shape[0]},), the N of its weight {tuple(w.shape)}; found "
            f"{tuple(bias.shape)}"
        )
    check_like(name, bias, w)


def check_like(name: str, tensor: torch.Tensor, x: torch.Tensor) -> None:
    """The element type and device of x."""
    if tensor.dtype != x.dtype or tensor.device != x.device:
        raise UsageError(
            f"{name}: expected {x.dtype} on {x.device}, as its operands; found {tensor.dtype} on "
            f"{tensor.device}"
        )


def _names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
