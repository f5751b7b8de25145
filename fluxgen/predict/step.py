"""A whole layer (or model): the sum of its fused ops, with and without fusion."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fluxgen.core.problem import Problem, check_int
from fluxgen.core.record import Record
from fluxgen.core.topology import Topology
from fluxgen.predict.overlap import predict, predict_baseline


@dataclass(frozen=True)
class StepPrediction:
    """Time of a layer's GEMMs and their communication, microseconds.

    Attributes:
        fused_us: with each op's record (its own time where it has one). unfused_us: without.
        rows: per op (problem, count, fused microseconds, unfused microseconds), of one call each.
    """

    fused_us: float
    unfused_us: float
    rows: tuple[tuple[Problem, int, float, float], ...]

    @property
    def speedup(self) -> float:
        """Unfused over fused time."""
        return self.unfused_us / self.fused_us if self.fused_us > 0 else 1.0


def predict_step(
    topology: Topology, ops: Iterable[tuple[Problem, int, Record | None]]
) -> StepPrediction:
    """Add up a layer.

    Args:
        topology: where it runs.
        ops: (problem, how often it occurs, its record or None for the unfused path). A record's
            own times are used, whatever their provenance; only an op without a record, or with
            one without a time, is predicted. Ops with m = 0 take no time.

    Raises:
        UsageError: a negative count, or a problem whose tp is not the topology's world.
    """
    rows = []
    for problem, count, record in ops:
        check_int("count", count, 0)
        if problem.m == 0 or problem.k == 0:
            rows.append((problem, count, 0.0, 0.0))
            continue
        unfused = record.baseline_us if record is not None else 0.0
        if unfused <= 0:
            unfused = predict_baseline(problem, topology).time_us
        fused = record.time_us if record is not None else 0.0
        if fused <= 0:
            fused = unfused
            if record is not None and record.kernel is not None and record.run is not None:
                fused = predict(problem, topology, record.kernel, record.run).time_us
        rows.append((problem, count, fused, unfused))
    return StepPrediction(
        fused_us=sum(count * fused for _, count, fused, _ in rows),
        unfused_us=sum(count * unfused for _, count, _, unfused in rows),
        rows=tuple(rows),
    )
