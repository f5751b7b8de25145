"""Element types of the operands: one row for each."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from fluxgen.core.errors import UsageError


@dataclass(frozen=True)
class DTypeSpec:
    """One row of the table of types.

    Attributes:
        bits: of one element. cutlass: the C++ type (``cutlass/numeric_types.h``).
        torch_name: the attribute of ``torch`` that names the same type. aliases: other names.
    """

    bits: int
    cutlass: str
    torch_name: str
    aliases: tuple[str, ...] = ()


class DType(str, enum.Enum):
    """An element type, by the name users type; in ``abi.h`` the same in capitals."""

    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return _SPECS[self].bits // 8

    @property
    def cutlass(self) -> str:
        """The C++ type in CUTLASS."""
        return _SPECS[self].cutlass

    @property
    def torch_name(self) -> str:
        """The attribute of ``torch`` that names the same type."""
        return _SPECS[self].torch_name

    @classmethod
    def parse(cls, text: str) -> DType:
        """Read a dtype from text: ``bf16``, ``bfloat16``, ``fp16``, ``float16``, ``half``.

        Raises:
            UsageError: for any other text.
        """
        key = str(text).strip().lower().removeprefix("torch.")
        for dtype, spec in _SPECS.items():
            if key in (dtype.value, spec.torch_name, *spec.aliases):
                return dtype
        raise UsageError(
            f"dtype: expected one of {', '.join(dtype.value for dtype in cls)}; found {text!r}. "
            "fp32 and integer types have no fused kernel; cast, or use the unfused path."
        )


_SPECS = {
    DType.BF16: DTypeSpec(16, "cutlass::bfloat16_t", "bfloat16"),
    DType.FP16: DTypeSpec(16, "cutlass::half_t", "float16", ("half", "f16")),
}
