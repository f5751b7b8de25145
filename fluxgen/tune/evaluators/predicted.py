"""Times by the model of :mod:`fluxgen.predict`."""

from __future__ import annotations

from fluxgen.codegen.space import why_illegal
from fluxgen.core.problem import Problem
from fluxgen.core.record import Baseline, Provenance
from fluxgen.core.topology import Topology
from fluxgen.predict import predict, predict_baseline
from fluxgen.predict.constants import MODEL_VERSION
from fluxgen.tune.evaluators.evaluator import Case, Evaluator, Measurement

__all__ = ["PredictEvaluator"]


class PredictEvaluator(Evaluator):
    """The model of :mod:`fluxgen.predict`: needs no GPU, the same figure every time."""

    kind = f"predict{MODEL_VERSION}"
    provenance = Provenance.PREDICTED

    def method(self, topology: Topology) -> str:
        """The model's version and the link it assumes."""
        return (
            f"model {MODEL_VERSION}, {topology.link.value} {topology.bandwidth_gbs:g} GB/s, "
            f"{topology.latency_us:g} us"
        )

    def baseline(self, problem: Problem, topology: Topology) -> Baseline | None:
        """The better of NCCL's collective and a one-shot all-reduce, as predicted."""
        return predict_baseline(problem, topology).baseline

    def measure(self, case: Case) -> Measurement:
        """Predict one candidate; an illegal one fails with its reason.

        Raises:
            UsageError: m or k is 0, or tp is not the topology's world.
        """
        problem, topology, kernel, run = case.problem, case.topology, case.kernel, case.run
        baseline = predict_baseline(problem, topology).time_us
        if kernel is None or run is None:
            return Measurement(baseline, baseline, self.provenance)
        reason = why_illegal(problem, topology, kernel, run)
        if reason:
            return Measurement.failure(self.provenance, reason)
        time_us = predict(problem, topology, kernel, run).time_us
        return Measurement(time_us, baseline, self.provenance)
