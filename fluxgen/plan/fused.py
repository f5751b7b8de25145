"""Times of the fused ops: a record's where there is one, else predicted, else none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fluxgen.codegen.space import why_illegal
from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.db.lookup import Lookup
from fluxgen.kernels.transports import default_transport
from fluxgen.plan.cluster import Cluster
from fluxgen.predict import predict, predict_baseline

__all__ = ["MODES", "Fusion"]

MODES = ("records", "predict", "off")
"""Where times of fused ops come from; ``records`` predicts what has none."""

_TILES = (
    KernelConfig(128, 192, 64, 2, 1), KernelConfig(128, 256, 64, 2, 1),
    KernelConfig(128, 128, 64, 2, 1), KernelConfig(128, 96, 64, 2, 1),
    KernelConfig(64, 192, 64, 2, 1), KernelConfig(64, 128, 64, 2, 1),
)  # fmt: skip


@dataclass
class Fusion:
    """The fused ops of one cluster.

    Attributes:
        cluster: whose. mode: one of ``MODES``. lookup: of records.
        sources: where the time of each problem that was asked for came from.
    """

    cluster: Cluster
    mode: str = "off"
    lookup: Lookup | None = None
    sources: dict[Problem, str] = field(default_factory=dict)
    _asked: set[Problem] = field(default_factory=set)
    _times: dict[Problem, float | None] = field(default_factory=dict)

    def us(self, gathers: bool, m: int, n: int, k: int, tp: int, kn: bool) -> float | None:
        """Microseconds of a fused op, or None: there is none, or it would be slower.

        Args:
            gathers: ag_gemm, else gemm_rs. m: tokens of all ranks. n, k: of the local GEMM.
            kn: the weight is (k, n), as a backward reads it.
        """
        if self.mode == "off" or tp > self.cluster.node:
            return None
        signature = Signature.of(Op.AG_GEMM if gathers else Op.GEMM_RS)
        problem = Problem(replace(signature, b_layout="kn" if kn else "nk"), m, n, k, tp)
        self._asked.add(problem)
        if problem not in self._times:
            self._times[problem] = self._found(problem)
        return self._times[problem]

    def used_by(self, layers: Callable[[], None]) -> tuple[tuple[str, str], ...]:
        """Problems whose fused ops are used while ``layers`` runs, with where times come from."""
        self._asked.clear()
        layers()
        return tuple(
            (problem.key, self.sources[problem])
            for problem in sorted(self._asked)
            if self._times[problem] is not None
        )

    def _found(self, problem: Problem) -> float | None:
        topology = self.cluster.topology(problem.tp)
        if self.mode == "records" and self.lookup is not None:
            found = self.lookup(problem, topology)
            record = found.record
            if record is not None:
                scale = problem.m / record.problem.m
                self.sources[problem] = f"{record.provenance.value}, m={record.problem.m}"
                return None if record.is_baseline else record.time_us * scale
        self.sources[problem] = "predicted"
        return self._predicted(problem, topology)

    def _predicted(self, problem: Problem, topology: Topology) -> float | None:
        transport = default_transport(problem.signature, topology.link)
        best = predict_baseline(problem, topology).time_us
        found = None
        for kernel in _TILES:
            for groups in ((problem.tp,), (1, problem.tp - 1)):
                order = groups if problem.op.gathers else groups[::-1]
                run = RunConfig(order, 4, transport=transport)
                if why_illegal(problem, topology, kernel, run) is None:
                    us = predict(problem, topology, kernel, run).time_us
                    if us < best:
                        best = found = us
        return found
