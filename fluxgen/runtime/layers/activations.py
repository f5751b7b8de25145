"""Activations by name, as the epilogues of GEMMs name them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from fluxgen.core.errors import UsageError

__all__ = ["ACTIVATIONS", "activation_of"]

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}
"""``relu2`` is the square of relu (Nemotron), ``gelu`` the one by erf, ``quick_gelu`` CLIP's."""


def activation_of(name: str | None) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function of a name; None for None.

    Raises:
        UsageError: there is none such.
    """
    if name is None:
        return None
    if name not in ACTIVATIONS:
        raise UsageError(
            f"activation: expected one of {', '.join(ACTIVATIONS)}, or None; found {name!r}"
        )
    return ACTIVATIONS[name]
