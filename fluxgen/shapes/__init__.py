"""A model's ``config.json``, or its preset, to the GEMMs of a layer and their problems.

::

    reader (file -> object) -> architecture (object -> dimensions) -> sharding (which tp)
        -> gemms (local sizes) -> problems (distinct, with counts)
"""

from fluxgen.shapes.architecture import ModelDims, model_dims
from fluxgen.shapes.gemms import LayerGemm, ModelGemms, analyse, model_gemms
from fluxgen.shapes.presets import preset_names
from fluxgen.shapes.problems import ProblemSet, counted_problems, problems, summary
from fluxgen.shapes.reader import load_config
from fluxgen.shapes.sharding import MAX_TP, valid_tp

__all__ = [
    "MAX_TP",
    "LayerGemm",
    "ModelDims",
    "ModelGemms",
    "ProblemSet",
    "analyse",
    "counted_problems",
    "load_config",
    "model_dims",
    "model_gemms",
    "preset_names",
    "problems",
    "summary",
    "valid_tp",
]
