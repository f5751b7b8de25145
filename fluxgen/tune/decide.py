"""One decision for all ranks: ranks that chose each for itself would dead-lock."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.errors import UsageError

Candidate = tuple[KernelConfig, RunConfig] | None
"""A fused configuration, or None for the unfused baseline."""


def order(candidate: Candidate) -> tuple[int, tuple[KernelConfig, RunConfig] | tuple[()]]:
    """Sort key of candidates: the baseline first, then by kernel and run configuration."""
    return (0, ()) if candidate is None else (1, candidate)


def decide(per_rank: Sequence[Mapping[Candidate, float]]) -> tuple[Candidate, float]:
    """The candidate whose slowest rank is fastest, and that rank's time in microseconds.

    Every rank gets the same answer from the same measurements, in whatever order ranks or
    candidates come: ties go to the baseline, then to the smaller configuration. A candidate that
    a rank lacks, or whose time there is not finite, is out.

    Raises:
        UsageError: no rank, or no candidate that every rank has timed.
    """
    common = set(per_rank[0]) if per_rank else set()
    for times in per_rank[1:]:
        common &= set(times)
    slowest = {candidate: max(times[candidate] for times in per_rank) for candidate in common}
    finite = [
        candidate
        for candidate, worst in slowest.items()
        if all(math.isfinite(times[candidate]) for times in per_rank) and worst >= 0
    ]
    if not finite:
        raise UsageError(
            f"decide: expected a candidate that all {len(per_rank)} ranks have timed; found none"
        )
    winner = min(finite, key=lambda candidate: (slowest[candidate], order(candidate)))
    return winner, slowest[winner]
