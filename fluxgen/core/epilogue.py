"""What is done to the sum of a GEMM before it is rounded and stored: see docs/adr/0023.

It runs where the sum is final: in the GEMM of an op that gathers, in the reduction of one that
reduces (``epilogue/finish.cuh`` on the device).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluxgen.core.errors import UsageError

__all__ = ["Epilogue", "Operand"]


class Operand(str, enum.Enum):
    """What an epilogue reads beside the sum, by its place in the ABI's array (``abi.h``)."""

    BIAS = "bias"
    """(n,): added to each row."""
    RESIDUAL = "residual"
    """As D: added last."""


@dataclass(frozen=True, order=True)
class Epilogue:
    """``none``, or the names of what is added, in the order in which that happens.

    Attributes:
        operands: what it reads, each once, as :class:`Operand` orders them.
    """

    operands: tuple[Operand, ...] = ()

    def __post_init__(self) -> None:
        if self.operands != tuple(each for each in Operand if each in self.operands):
            raise UsageError(
                f"epilogue: expected each operand once, in the order of "
                f"{', '.join(each.value for each in Operand)}; found {self.key!r}"
            )

    @property
    def key(self) -> str:
        """``none``, ``bias``, ``bias+residual``: its text in keys, records and names."""
        return "+".join(each.value for each in self.operands) or "none"

    @classmethod
    def parse(cls, text: str) -> Epilogue:
        """Read a key.

        Raises:
            UsageError: it names something that no epilogue reads, or in another order.
        """
        names = [] if text == "none" else text.split("+")
        try:
            operands = tuple(Operand(name) for name in names)
        except ValueError:
            raise UsageError(
                f"epilogue: expected none, or {', '.join(each.value for each in Operand)} joined "
                f"by +; found {text!r}"
            ) from None
        return cls(operands)

    def columns(self, n: int) -> int:
        """Columns of D, of ``n`` of the product."""
        return n

    def apply(self, total: Any, given: Mapping[Operand, Any]) -> Any:
        """The reference, before rounding: of ``total`` (m, n) and operands that broadcast to it."""
        for operand in self.operands:
            total = total + given[operand]
        return total


NONE = Epilogue()
