"""What is to be computed: the op, its operand types and its size.

Shape notation, everywhere in fluxgen: ``m`` is the *global* number of tokens, ``n`` and ``k`` are
those of the *local* GEMM.

* ``ag_gemm``: A (m/tp, k) is gathered to (m, k); B is (n, k); D is (m, n).
* ``gemm_rs``: A (m, k) times B (n, k) gives a partial (m, n), reduced to D (m/tp, n).
* ``gemm_ar``: the same, reduced to D (m, n) on every rank; tp need not divide m.
* ``a2a_gemm``: the j-th m/tp rows of A (m, k) go to rank j; what a rank gets is multiplied.
* ``gemm_a2a``: A (m, k) is multiplied; the j-th m/tp rows of the product go to rank j.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fluxgen.core.dtypes import DType
from fluxgen.core.epilogue import NONE, Epilogue
from fluxgen.core.errors import UsageError
from fluxgen.core.op import Op

MAX_DIM = 2**31 - 1
"""Largest m, n or k: TMA coordinates are 32-bit (strides and offsets are 64-bit)."""

MAX_WORLD = 16
"""Most ranks of one group: the peer table in the kernel's parameters has so many entries."""


@dataclass(frozen=True, order=True)
class Signature:
    """What makes two calls of the same shape different calls.

    Attributes:
        op: the fused operation.
        dtype: element type of A and B.
        out_dtype: element type of D.
        b_layout: ``"nk"`` (row-major (n, k), as ``nn.Linear`` keeps it) or ``"kn"``.
        epilogue: what is done to the sum before it is stored.
        scaling: scaling recipe of the operands, ``"none"`` for 16-bit types.
        return_gathered: whether the caller also wants the gathered A. It does not change the
            compiled kernel but may change the best configuration, so records tell it apart.
    """

    op: Op
    dtype: DType = DType.BF16
    out_dtype: DType = DType.BF16
    b_layout: str = "nk"
    epilogue: Epilogue = NONE
    scaling: str = "none"
    return_gathered: bool = False

    def __post_init__(self) -> None:
        for name, valid in (
            ("b_layout", ("nk", "kn")),
            ("scaling", ("none",)),
        ):
            if getattr(self, name) not in valid:
                raise UsageError(
                    f"{name}: expected one of {', '.join(valid)}; found {getattr(self, name)!r}"
                )

    @classmethod
    def of(cls, op: Op | str, dtype: DType | str = DType.BF16) -> Signature:
        """The plain signature of ``op`` with inputs and output of ``dtype``."""
        the_op = op if isinstance(op, Op) else Op.parse(op)
        the_dtype = dtype if isinstance(dtype, DType) else DType.parse(dtype)
        return cls(the_op, the_dtype, the_dtype)

    @property
    def compiled(self) -> Signature:
        """What of it is compiled into a GEMM: the one statement of that.

        Names of kernels, manifests and what a loaded library must say of itself follow from it.
        What comes before the GEMM and behind it is not part of one, nor is an epilogue of a sum
        that is final only in the reduction.
        """
        epilogue = self.epilogue if self.op.gathers else NONE
        return replace(self, op=self.op.compiled, epilogue=epilogue, return_gathered=False)

    @property
    def name(self) -> str:
        """The compiled part in a name: ``ag_gemm_bf16``, and what else is not as usual."""
        part = self.compiled
        usual = Signature.of(part.op, part.dtype)
        unusual = (
            (part.out_dtype.value, usual.out_dtype.value),
            (part.b_layout, usual.b_layout),
            (part.epilogue.key.replace("+", "_"), usual.epilogue.key),
            (part.scaling, usual.scaling),
        )
        words = [found for found, expected in unusual if found != expected]
        return "_".join((part.op.value, part.dtype.value, *words))

    @property
    def key(self) -> str:
        """Every field in one stable string: ``ag_gemm/bf16->bf16/nk/none/none/-``."""
        gathered = "gathered" if self.return_gathered else "-"
        return (
            f"{self.op.value}/{self.dtype.value}->{self.out_dtype.value}/{self.b_layout}/"
            f"{self.epilogue.key}/{self.scaling}/{gathered}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "op": self.op.value,
            "dtype": self.dtype.value,
            "out_dtype": self.out_dtype.value,
            "b_layout": self.b_layout,
            "epilogue": self.epilogue.key,
            "scaling": self.scaling,
            "return_gathered": self.return_gathered,
        }


def ceil_div(a: int, b: int) -> int:
    """The least integer not below a / b, for b > 0."""
    return -(-a // b)


def check_int(name: str, value: object, low: int, high: int = MAX_DIM) -> int:
    """Return ``value`` if it is an int (no bool, no float, no text) within [low, high].

    Raises:
        UsageError: naming the argument, the range and the value found.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name}: expected an integer from {low} to {high}; found {value!r}")
    return value


@dataclass(frozen=True, order=True)
class Problem:
    """One fused op at one size.

    Attributes:
        signature: op, types, layout and epilogue.
        m: global tokens (0 is valid: nothing to do). n, k: local GEMM sizes.
        tp: tensor-parallel ranks, 1 to ``MAX_WORLD``.
    """

    signature: Signature
    m: int
    n: int
    k: int
    tp: int

    def __post_init__(self) -> None:
        check_int("m", self.m, 0)
        check_int("n", self.n, 1)
        check_int("k", self.k, 0)
        check_int("tp", self.tp, 1, MAX_WORLD)

    @property
    def op(self) -> Op:
        """The fused operation."""
        return self.signature.op

    @property
    def rows_in(self) -> int:
        """Rows of A that a rank passes."""
        return self.m_local if self.op.replicates else self.m

    @property
    def rows_out(self) -> int:
        """Rows of D that a rank gets."""
        return self.m_local if self.op.reduces and not self.op.shares else self.m

    @property
    def m_local(self) -> int:
        """Rows of one rank's slab, rounded up when tp does not divide m."""
        return ceil_div(self.m, self.tp)

    @property
    def flops(self) -> float:
        """Floating-point operations of the local GEMM."""
        return 2.0 * self.m * self.n * self.k

    @property
    def comm_bytes(self) -> float:
        """Bytes one rank receives from others: (tp-1)/tp of A or of the partial D, and in an
        all-reduce then of D."""
        if self.op.gathers:
            whole = self.m * self.k * self.signature.dtype.bytes
        else:
            shots = 2 if self.op.shares else 1
            whole = shots * self.m * self.n * self.signature.out_dtype.bytes
        return whole * (self.tp - 1) / self.tp

    @property
    def key(self) -> str:
        """Stable text of everything that identifies this problem."""
        return f"{self.signature.key}/m{self.m}/n{self.n}/k{self.k}/tp{self.tp}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the signature's fields are inlined."""
        return {
            **self.signature.to_dict(),
            "m": self.m,
            "n": self.n,
            "k": self.k,
            "tp": self.tp,
        }
