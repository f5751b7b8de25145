"""Small integers as operands: every order of summation gives the same bits."""

from __future__ import annotations

from typing import Any

import torch


def integers(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def same(got: Any, want: Any) -> None:
    assert got.shape == want.shape, (got.shape, want.shape)
    assert got.dtype == want.dtype
    assert torch.equal(got, want), (got - want).abs().max()


def raised(call: Any) -> tuple[str, str]:
    """The class and message of what ``call()`` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""
