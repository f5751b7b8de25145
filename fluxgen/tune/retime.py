"""Records timed again: does what the database says still hold on this machine?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fluxgen.core.problem import check_int
from fluxgen.core.record import Record
from fluxgen.core.topology import Topology
from fluxgen.tune.compiled import CompiledKernels
from fluxgen.tune.evaluators.evaluator import Case, Evaluator

TOLERANCE = 0.02
"""A fused kernel that now takes this much longer than the unfused path is a wrong record."""


@dataclass(frozen=True)
class Retimed:
    """One record, timed again.

    Attributes:
        record: which. time_us, baseline_us: now; infinite where it failed.
        reason: what is wrong with the record, or None.
    """

    record: Record
    time_us: float
    baseline_us: float
    reason: str | None


def sample(records: Sequence[Record], count: int) -> list[Record]:
    """At most ``count`` fused records, spread evenly over all of them.

    Raises:
        UsageError: count below 1.
    """
    check_int("sample", count, 1)
    fused = [record for record in records if record.kernel is not None]
    if len(fused) <= count:
        return fused
    return [fused[i * len(fused) // count] for i in range(count)]


def retime(
    records: Iterable[Record],
    topology: Topology,
    evaluator: Evaluator,
    compiled: CompiledKernels | None = None,
) -> list[Retimed]:
    """Time each fused record beside the unfused path.

    Args:
        records: of ``topology``. compiled: compiles their kernels, if need be.

    Raises:
        MachineError: the evaluator cannot go on.
    """
    wanted = list(records)
    if compiled is not None:
        compiled.expect((r.problem.signature, r.kernel) for r in wanted if r.kernel is not None)
    out = []
    for record in wanted:
        assert record.kernel is not None
        reason = None
        if compiled is not None:
            reason = compiled.wait(record.problem.signature, record.kernel)
        if reason:
            out.append(Retimed(record, float("inf"), float("inf"), reason))
            continue
        found = evaluator.measure(Case(record.problem, topology, record.kernel, record.run))
        if not found.ok:
            reason = found.reason
        elif found.time_us > (1 + TOLERANCE) * found.baseline_us:
            reason = (
                f"slower than the unfused path: {found.time_us:.1f} us, unfused "
                f"{found.baseline_us:.1f} us"
            )
        out.append(Retimed(record, found.time_us, found.baseline_us, reason))
    return out
