"""The fused operations, and what each does around its GEMM: see docs/adr/0022.

Another module asks an op for a trait, never which op it is.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from fluxgen.core.config import Transport
from fluxgen.core.errors import UsageError

__all__ = ["Op", "OpSpec"]

_RS_TRANSPORTS = (Transport.PEER_STORE, Transport.COPY_ENGINE_DRAIN)


@dataclass(frozen=True)
class OpSpec:
    """One row of the table of ops.

    Attributes:
        collective: that it stands for, as ``torch.distributed`` names it.
        transports: that carry it.
        gathers: whether slabs of A come in before the GEMM; else slabs of D go out behind it.
        exchanges: whether each peer has, or gets, rows of its own (all-to-all).
        reduces: whether D is a sum over the ranks.
        shares: whether every rank gets all rows of D that it computes or reduces: ranks need not
            divide m evenly.
        gemm: the op whose GEMM it runs, by value: what comes before and what follows, and who
            sends which rows, is not compiled in. It is also the op whose records serve it.
        backward: the op of its input's gradient, by value; empty: nothing is communicated.
        alone: the op of the same layer without sequence parallelism, by value; empty: none.
    """

    collective: str
    transports: tuple[Transport, ...]
    gemm: str
    backward: str = ""
    alone: str = ""
    gathers: bool = False
    exchanges: bool = False
    reduces: bool = False
    shares: bool = False


class Op(str, enum.Enum):
    """The fused operations."""

    AG_GEMM = "ag_gemm"
    GEMM_RS = "gemm_rs"
    GEMM_AR = "gemm_ar"
    A2A_GEMM = "a2a_gemm"
    GEMM_A2A = "gemm_a2a"

    @property
    def spec(self) -> OpSpec:
        """Its row."""
        return _SPECS[self]

    @property
    def collective(self) -> str:
        """The collective that it stands for: ``all_gather``."""
        return _SPECS[self].collective

    @property
    def transports(self) -> tuple[Transport, ...]:
        """What carries it."""
        return _SPECS[self].transports

    @property
    def gathers(self) -> bool:
        """Whether slabs of A come in before the GEMM; else slabs of D go out behind it."""
        return _SPECS[self].gathers

    @property
    def scatters(self) -> bool:
        """Whether slabs of D go out behind the GEMM."""
        return not _SPECS[self].gathers

    @property
    def exchanges(self) -> bool:
        """Whether each peer has, or gets, rows of its own: an all-to-all."""
        return _SPECS[self].exchanges

    @property
    def reduces(self) -> bool:
        """Whether D is a sum over the ranks."""
        return _SPECS[self].reduces

    @property
    def shares(self) -> bool:
        """Whether every rank gets all the rows that are reduced; m need not be even."""
        return _SPECS[self].shares

    @property
    def replicates(self) -> bool:
        """Whether every rank comes to hold the rows of A of all ranks."""
        return _SPECS[self].gathers and not _SPECS[self].exchanges

    @property
    def compiled(self) -> Op:
        """The op whose GEMM it runs, and whose records serve it."""
        return Op(_SPECS[self].gemm)

    @property
    def backward(self) -> Op | None:
        """The op of its input's gradient, or None: a plain matmul."""
        backward = _SPECS[self].backward
        return Op(backward) if backward else None

    @property
    def alone(self) -> Op | None:
        """The op of the same layer without sequence parallelism, or None: it has no other."""
        alone = _SPECS[self].alone
        return Op(alone) if alone else None

    @classmethod
    def parse(cls, text: str) -> Op:
        """Read an op from text, with ``-`` or ``_``.

        Raises:
            UsageError: for an unknown op.
        """
        key = str(text).strip().lower().replace("-", "_")
        aliases = {"ag": "ag_gemm", "rs": "gemm_rs", "ar": "gemm_ar"}
        try:
            return cls(aliases.get(key, key))
        except ValueError:
            raise UsageError(
                f"op: expected one of {', '.join(o.value for o in cls)}; found {text!r}"
            ) from None


_SPECS = {
    Op.AG_GEMM: OpSpec(
        "all_gather",
        (
            Transport.COPY_ENGINE_PUSH, Transport.COPY_ENGINE_PULL, Transport.COPY_ENGINE_RING,
            Transport.SM_COPY,
        ),
        gemm="ag_gemm", backward="gemm_rs", gathers=True,
    ),
    Op.GEMM_RS: OpSpec(
        "reduce_scatter", (*_RS_TRANSPORTS, Transport.PEER_PACKETS),
        gemm="gemm_rs", backward="ag_gemm", alone="gemm_ar", reduces=True,
    ),
    Op.GEMM_AR: OpSpec(
        "all_reduce", (*_RS_TRANSPORTS, Transport.PEER_BROADCAST, Transport.BROADCAST_PACKETS),
        gemm="gemm_rs", reduces=True, shares=True,
    ),
    Op.A2A_GEMM: OpSpec(
        "all_to_all", (Transport.COPY_ENGINE_PUSH,),
        gemm="ag_gemm", backward="gemm_a2a", gathers=True, exchanges=True,
    ),
    Op.GEMM_A2A: OpSpec(
        "all_to_all", _RS_TRANSPORTS,
        gemm="gemm_rs", backward="a2a_gemm", exchanges=True,
    ),
}  # fmt: skip
