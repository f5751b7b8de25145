"""Layers for PyTorch models; importing this module imports Torch, ``import fluxgen`` does not."""

from fluxgen.runtime.layers.blocks import (
    GatedColumnParallelLinear,
    ParallelAttentionProjections,
    ParallelMLP,
)
from fluxgen.runtime.layers.checkpoint import (
    full_state_dict,
    load_sharded_optimizer_state_dict,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)
from fluxgen.runtime.layers.nn import ColumnParallelLinear, RowParallelLinear
from fluxgen.runtime.layers.shards import Part

__all__ = [
    "ColumnParallelLinear",
    "GatedColumnParallelLinear",
    "ParallelAttentionProjections",
    "ParallelMLP",
    "Part",
    "RowParallelLinear",
    "full_state_dict",
    "load_sharded_optimizer_state_dict",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
]
