"""What an evaluator is asked, and what it answers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.problem import Problem
from fluxgen.core.record import Baseline, Provenance
from fluxgen.core.topology import Topology

__all__ = ["Case", "Evaluator", "Measurement", "versions_of"]


@dataclass(frozen=True)
class Case:
    """What is timed: ``kernel`` with ``run``; both None: the unfused baseline, candidate 0."""

    problem: Problem
    topology: Topology
    kernel: KernelConfig | None
    run: RunConfig | None


@dataclass(frozen=True)
class Measurement:
    """One evaluated candidate.

    Attributes:
        time_us: of the candidate, the slowest rank's, microseconds; infinite if not ``ok``.
        baseline_us: of the unfused path, taken together with it (interleaved on a device).
        provenance: how both figures were obtained.
        ok: whether the candidate built, ran and gave right results. reason: why not, one line.
        kernel_failed: whether it was the kernel that failed (e.g. did not build), so that no other
            run-time configuration of it need be tried.
        spread: how well ``time_us`` is known: half of its confidence interval, over it.
    """

    time_us: float
    baseline_us: float
    provenance: Provenance
    ok: bool = True
    reason: str = ""
    kernel_failed: bool = False
    spread: float = 0.0

    @classmethod
    def failure(
        cls, provenance: Provenance, reason: str, *, kernel_failed: bool = False
    ) -> Measurement:
        """A candidate that failed for ``reason``."""
        return cls(math.inf, math.inf, provenance, False, reason, kernel_failed)


class Evaluator(ABC):
    """Times candidates. Implementations must return the same verdict for all ranks.

    Attributes:
        kind: short name without spaces; studies of different kinds are kept apart. It holds
            whatever makes old times incomparable, such as a model version.
        provenance: of every measurement.
    """

    kind: str
    provenance: Provenance

    @abstractmethod
    def method(self, topology: Topology) -> str:
        """How figures are obtained, for ``Environment.method``."""

    @abstractmethod
    def baseline(self, problem: Problem, topology: Topology) -> Baseline | None:
        """Which unfused path the problem's candidate 0 is; None: not known."""

    @abstractmethod
    def measure(self, case: Case) -> Measurement:
        """Time one candidate; one that fails is returned with ``ok=False``.

        Raises:
            MachineError: the machine is broken; nothing is said about the candidate.
        """

    def evaluate(
        self,
        problem: Problem,
        topology: Topology,
        kernel: KernelConfig | None,
        run: RunConfig | None,
    ) -> Measurement:
        """:meth:`measure` of a :class:`Case`."""
        return self.measure(Case(problem, topology, kernel, run))


def versions_of(evaluator: Evaluator) -> dict[str, str]:
    """``driver`` and ``cuda`` of an evaluator that has them, for a record's ``Environment``.

    Models and recordings have none: unknown versions are empty, never invented.
    """
    return dict(getattr(evaluator, "versions", {}))
