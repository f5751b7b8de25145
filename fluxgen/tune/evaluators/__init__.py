"""What a candidate's time is: predicted without a GPU, replayed from a file, or measured on one."""

from fluxgen.tune.evaluators.choice import can_measure, make_evaluator, resolve, torch_has_cuda
from fluxgen.tune.evaluators.evaluator import Case, Evaluator, Measurement, versions_of
from fluxgen.tune.evaluators.predicted import PredictEvaluator
from fluxgen.tune.evaluators.process import ProcessEvaluator
from fluxgen.tune.evaluators.replay import Recorder, ReplayEvaluator

__all__ = [
    "Case",
    "Evaluator",
    "Measurement",
    "PredictEvaluator",
    "ProcessEvaluator",
    "Recorder",
    "ReplayEvaluator",
    "can_measure",
    "make_evaluator",
    "resolve",
    "torch_has_cuda",
    "versions_of",
]
