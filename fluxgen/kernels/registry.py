"""Which family a kernel belongs to."""

from __future__ import annotations

from functools import lru_cache

from fluxgen.core.config import Schedule
from fluxgen.kernels.family import Family
from fluxgen.kernels.sm80 import Sm80
from fluxgen.kernels.sm80_flat import Sm80Flat
from fluxgen.kernels.sm90 import Sm90
from fluxgen.kernels.sm90_flat import Sm90Flat

__all__ = ["ARCHS", "FAMILIES", "families", "family_of", "with_schedule"]

FAMILIES: tuple[Family, ...] = (Sm90(), Sm90Flat(), Sm80(), Sm80Flat())
"""All of them; of one architecture in the order in which a search meets their kernels."""

ARCHS = tuple(sorted({arch for family in FAMILIES for arch in family.archs}))
"""Architectures that kernels are generated for."""


@lru_cache(maxsize=64)
def families(arch: str) -> tuple[Family, ...]:
    """Those of an architecture; none of one that kernels are not generated for."""
    return tuple(family for family in FAMILIES if arch in family.archs)


@lru_cache(maxsize=256)
def family_of(arch: str, schedule: Schedule) -> Family | None:
    """The family of such kernels, or None: the architecture has no such schedule."""
    return next((f for f in families(arch) if schedule in f.schedules), None)


@lru_cache(maxsize=16)
def with_schedule(schedule: Schedule) -> Family:
    """Any family that has a schedule: all of them are alike in ``whole`` and ``described``."""
    return next(family for family in FAMILIES if schedule in family.schedules)
