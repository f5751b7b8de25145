"""Times of the fused ops: a record's where there is one, else predicted, else none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fluxgen.codegen.space import why_illegal
from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.op import Op
from fluxgen.core.problem import MAX_WORLD, Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.db.lookup import Lookup
from fluxgen.kernels.transports import default_transport
from fluxgen.planning.cluster import Cluster
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
    _shares: dict[Problem, float | None] = field(default_factory=dict)

    def share(self, gathers: bool, m: int, n: int, k: int, tp: int, kn: bool) -> float | None:
        """Time of a fused op over that of its unfused path, or None: there is none, or no faster.

        A share, as a step's GPU is warmer than one on which a record was taken.

        Args:
            gathers: ag_gemm, else gemm_rs. m: tokens of all ranks. n, k: of the local GEMM.
            kn: the weight is (k, n), as a backward reads it.
        """
        if tp > min(self.cluster.node, MAX_WORLD):
            return None
        signature = Signature.of(Op.AG_GEMM if gathers else Op.GEMM_RS)
        problem = Problem(replace(signature, b_layout="kn" if kn else "nk"), m, n, k, tp)
        self._asked.add(problem)
        if self.mode == "off":
            return None
        if problem not in self._shares:
            self._shares[problem] = self._found(problem)
        return self._shares[problem]

    def asked_by(self, layers: Callable[[], None]) -> tuple[tuple[Problem, str], ...]:
        """Problems that are posed while ``layers`` runs, with where the times come from; empty for
        one whose unfused path is as fast."""
        self._asked.clear()
        layers()
        used = {p: self.sources.get(p, "") for p in sorted(self._asked)}
        return tuple(
            (p, "" if self._shares.get(p) is None else source) for p, source in used.items()
        )

    def _found(self, problem: Problem) -> float | None:
        topology = self.cluster.topology(problem.tp)
        if self.mode == "records" and self.lookup is not None:
            found = self.lookup(problem, topology)
            record = found.record
            if record is not None:
                self.sources[problem] = f"{record.provenance.value}, m={record.problem.m}"
                return None if record.is_baseline else record.time_us / record.baseline_us
        self.sources[problem] = "predicted"
        return self._predicted(problem, topology)

    def _predicted(self, problem: Problem, topology: Topology) -> float | None:
        transport = default_transport(problem.signature, topology.link)
        whole = predict_baseline(problem, topology).time_us
        found, best = None, 1.0
        for kernel in _TILES:
            for groups in ((problem.tp,), (1, problem.tp - 1)):
                order = groups if problem.op.gathers else groups[::-1]
                run = RunConfig(order, 4, transport=transport)
                if why_illegal(problem, topology, kernel, run) is None:
                    share = predict(problem, topology, kernel, run).time_us / whole
                    if share < best:
                        best = found = share
        return found
