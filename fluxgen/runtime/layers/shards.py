"""How a full weight is cut between ranks: whole, or part by part where several are fused in one.

A fused weight holds several projections one below the other. Each is cut for itself, so that a rank
holds its share of every one. With two ranks, and three that hold two of four q heads and one of one
kv head between them, of which the ranks that share a head each hold a copy::

    [gate; up]     rank 0: gate 0, up 0           [q; k; v]   rank 0: q 0, q 1, k 0, v 0
    gate 0 gate 1  rank 1: gate 1, up 1           4 q, 1 kv   rank 1: q 2, q 3, k 0, v 0
    up 0   up 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

from fluxgen.core.errors import ShardingError, UsageError
from fluxgen.core.problem import MAX_WORLD

__all__ = ["Cut", "Part", "Parts", "Piece", "ShardedLayer", "sum_over_copies"]


@dataclass(frozen=True)
class Part:
    """One projection of a fused weight.

    Attributes:
        size: its rows (columns, where a weight is cut along its inputs).
        heads: of how many equal units that stay whole it consists, such as attention heads. With
            more ranks than heads, each head is held by ``ranks / heads`` ranks in a row. None: rows
            may be cut anywhere, and no rank holds a copy of another's.
    """

    size: int
    heads: int | None = None

    def copies(self, tp: int) -> int:
        """How many ranks of ``tp`` hold the same rows; 0 if the part cannot be cut so."""
        units = self.size if self.heads is None else self.heads
        if units % tp == 0:
            return 1
        return tp // units if self.heads is not None and tp % units == 0 else 0


Parts: TypeAlias = "Sequence[int | Part]"
"""Sizes of parts, or parts."""


@dataclass(frozen=True)
class Piece:
    """What one rank holds of one part.

    Attributes:
        start: its place in the full weight. local: its place in the rank's own. size: its length.
        copies: ranks that hold the same. leader: the first of those.
    """

    start: int
    local: int
    size: int
    copies: int = 1
    leader: int = 0


@dataclass(frozen=True)
class Cut:
    """One dim of a full weight, cut for one rank.

    Attributes:
        parts: in the order of the full weight. tp: ranks. rank: whose.
    """

    parts: tuple[Part, ...]
    tp: int
    rank: int

    @classmethod
    def of(cls, what: str, size: int, parts: Parts | None, tp: int, rank: int, copied: bool) -> Cut:
        """Check the parts of a dim.

        Args:
            what: names the dim in errors. size: its length. parts: None for a single one.
            copied: whether ranks may hold copies of a head.

        Raises:
            UsageError: not parts, or not of ``size`` in all.
            ShardingError: the ranks do not divide each part; lists the group sizes that do.
        """
        checked = (Part(size),) if parts is None else _checked(what, size, parts)
        if not _fits(checked, tp, copied):
            valid = [str(n) for n in range(1, MAX_WORLD + 1) if _fits(checked, n, copied)]
            of = str(size) if parts is None else f"each part of {_listed(checked)}"
            raise ShardingError(
                f"{what}: {tp} ranks do not divide {of}; sizes of the group that do: "
                f"{', '.join(valid) or 'none'}"
            )
        return cls(checked, tp, rank)

    @property
    def size(self) -> int:
        """Of the full dim."""
        return sum(part.size for part in self.parts)

    @property
    def local_size(self) -> int:
        """Of this rank's."""
        return sum(piece.size for piece in self.pieces)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What this rank holds of each part, in order."""
        return self.pieces_of(self.rank)

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """What another rank holds."""
        found, begin, local = [], 0, 0
        for part in self.parts:
            copies = part.copies(self.tp)
            size = part.size * copies // self.tp
            leader = rank // copies * copies
            found.append(Piece(begin + rank // copies * size, local, size, copies, leader))
            begin, local = begin + part.size, local + size
        return tuple(found)

    @property
    def copied(self) -> tuple[Piece, ...]:
        """Those pieces that other ranks hold too."""
        return tuple(piece for piece in self.pieces if piece.copies > 1)

    def take(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a full tensor, along ``dim``: a view if there is one part only."""
        taken = [full.narrow(dim, piece.start, piece.size) for piece in self.pieces]
        return taken[0] if len(taken) == 1 else torch.cat(taken, dim)

    def join(self, locals_: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """The full tensor of all ranks' own."""
        first = locals_[0]
        shape = list(first.shape)
        shape[dim] = self.size
        full = first.new_empty(shape)
        for rank, local in enumerate(locals_):
            for piece in self.pieces_of(rank):
                source = local.narrow(dim, piece.local, piece.size)
                full.narrow(dim, piece.start, piece.size).copy_(source)
        return full


def _checked(what: str, size: int, parts: Parts) -> tuple[Part, ...]:
    given = list(parts) if isinstance(parts, (list, tuple)) else []
    found = [part if isinstance(part, Part) else Part(part) for part in given]
    for part in found:
        for number in (part.size, 1 if part.heads is None else part.heads):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                found = []
                break
    if not found:
        raise UsageError(
            f"parts: expected a list of positive sizes, or of fluxgen.nn.Part; found {parts!r}"
        )
    for part in found:
        if part.heads is not None and part.size % part.heads:
            raise UsageError(
                f"parts: expected a size that its {part.heads} heads divide; found {part.size}"
            )
    if sum(part.size for part in found) != size:
        raise UsageError(
            f"parts: expected sizes whose sum is {what}={size}; found {_listed(tuple(found))}, "
            f"whose sum is {sum(part.size for part in found)}"
        )
    return tuple(found)


def _fits(parts: tuple[Part, ...], tp: int, copied: bool) -> bool:
    return all(1 <= part.copies(tp) <= (tp if copied else 1) for part in parts)


def _listed(parts: tuple[Part, ...]) -> str:
    sizes = (
        str(part.size) if part.heads is None else f"{part.size} in {part.heads} heads"
        for part in parts
    )
    return f"({', '.join(sizes)})"


class ShardedLayer(torch.nn.Module):  # type: ignore[misc]  # torch is untyped to mypy here
    """A layer whose parameters are parts of full ones: what checkpoints ask of it.

    Attributes:
        cut: how the full weight is cut for this rank. group_name, tp: of the ranks that share it.
    """

    cut: Cut
    group_name: str
    tp: int

    def cut_dim_of(self, name: str) -> int | None:
        """The dim of the full ``weight`` or ``bias`` that is cut; None: each rank holds all."""
        raise NotImplementedError

    def full_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the unsharded layer's ``weight`` or ``bias``."""
        raise NotImplementedError


def sum_over_copies(parameter: torch.Tensor, cut: Cut, group: str) -> torch.Tensor:
    """The parameter itself, whose gradient is summed over the ranks that hold the same rows.

    Each of them sees a part of what depends on a copied head. All add in the same order, so the
    copies stay equal, bit for bit, and are trained as the head of the unsharded layer is.
    """
    if not cut.copied or not torch.is_grad_enabled() or not parameter.requires_grad:
        return parameter
    pieces = [(piece.local, piece.size, piece.leader, piece.copies) for piece in cut.copied]
    summed: torch.Tensor = _SumOverCopies.apply(parameter, pieces, cut.tp, group)
    return summed


class _SumOverCopies(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped to mypy here
    """The identity; backward communicates."""

    @staticmethod
    def forward(
        parameter: torch.Tensor, pieces: list[tuple[int, int, int, int]], tp: int, group: str
    ) -> torch.Tensor:
        return parameter.view_as(parameter)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, *ctx.call = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        pieces, tp, group = ctx.call
        mine = torch.cat([grad.narrow(0, local, size) for local, size, *_ in pieces])
        every = torch.ops._c10d_functional.all_gather_into_tensor(mine.contiguous(), tp, group)
        every = torch.ops._c10d_functional.wait_tensor(every)
        of_rank = every.view(tp, *mine.shape)
        out, begin = grad.clone(), 0
        for local, size, leader, copies in pieces:
            shares = of_rank[leader : leader + copies, begin : begin + size]
            total = shares.sum(0, dtype=_accumulates(grad.dtype)).to(grad.dtype)
            out.narrow(0, local, size).copy_(total)
            begin += size
        return out, None, None, None


def _accumulates(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
