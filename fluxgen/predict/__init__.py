"""Time without a GPU: an analytic model of the fused kernels and of the unfused path.

``gemm`` knows tiles, waves and memory traffic; ``link`` when bytes arrive; ``overlap`` puts both
on one timeline; ``simulate`` runs tasks on streams. A prediction takes well under 200
microseconds, so that thousands of candidates can be ranked before one is compiled. All figures are
predictions: what they were fitted to stands in ``constants``.
"""

from fluxgen.predict.overlap import Prediction, predict, predict_baseline

__all__ = ["Prediction", "predict", "predict_baseline"]
