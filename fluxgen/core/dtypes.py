"""Element types of the operands."""

from __future__ import annotations

import enum

from fluxgen.core.errors import UsageError


class DType(str, enum.Enum):
    """An element type, by the name users type."""

    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def bytes(self) -> int:
        """Size of one element in bytes."""
        return 2

    @property
    def cutlass(self) -> str:
        """The C++ type in CUTLASS (``cutlass/numeric_types.h``)."""
        return {"bf16": "cutlass::bfloat16_t", "fp16": "cutlass::half_t"}[self.value]

    @property
    def torch_name(self) -> str:
        """The attribute of ``torch`` that names the same type."""
        return {"bf16": "bfloat16", "fp16": "float16"}[self.value]

    @classmethod
    def parse(cls, text: str) -> DType:
        """Read a dtype from text: ``bf16``, ``bfloat16``, ``fp16``, ``float16``, ``half``.

        Raises:
            UsageError: for any other text.
        """
        key = str(text).strip().lower().removeprefix("torch.")
        aliases = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "f16": "fp16"}
        key = aliases.get(key, key)
        try:
            return cls(key)
        except ValueError:
            raise UsageError(
                f"dtype: expected one of bf16, fp16; found {text!r}. "
                "fp32 and integer types have no fused kernel; cast, or use the unfused path."
            ) from None
