"""The search for the best kernels and run-time knobs, with Optuna and without a GPU if need be.

``search.tune`` is the entry; Optuna is imported only when it is called.
"""

from fluxgen.tune.compiled import CompiledKernels
from fluxgen.tune.decide import decide
from fluxgen.tune.evaluators import (
    Evaluator,
    Measurement,
    PredictEvaluator,
    Recorder,
    ReplayEvaluator,
    can_measure,
    make_evaluator,
    resolve,
)
from fluxgen.tune.search import TuneResult, default_storage, searches, tune

__all__ = [
    "CompiledKernels",
    "Evaluator",
    "Measurement",
    "PredictEvaluator",
    "Recorder",
    "ReplayEvaluator",
    "TuneResult",
    "can_measure",
    "decide",
    "default_storage",
    "make_evaluator",
    "resolve",
    "searches",
    "tune",
]
