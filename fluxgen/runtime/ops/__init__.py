"""The ops for PyTorch: one file for each, and what they share."""

from fluxgen.runtime.ops.all_gather import all_gather_matmul
from fluxgen.runtime.ops.all_reduce import matmul_all_reduce, matmul_of_replicated
from fluxgen.runtime.ops.all_to_all import all_to_all_matmul, matmul_all_to_all
from fluxgen.runtime.ops.reduce_scatter import matmul_reduce_scatter

__all__ = [
    "all_gather_matmul",
    "all_to_all_matmul",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_of_replicated",
    "matmul_reduce_scatter",
]
