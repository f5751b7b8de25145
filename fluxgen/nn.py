"""Layers for PyTorch models; importing this module imports Torch, ``import fluxgen`` does not."""

from fluxgen.runtime.nn import ColumnParallelLinear, RowParallelLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]
