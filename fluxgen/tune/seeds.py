"""Kernels that NVIDIA's matmul heuristics would pick, if that optional package is installed."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from fluxgen.core.config import KernelConfig
from fluxgen.core.dtypes import DType
from fluxgen.core.problem import Problem
from fluxgen.core.topology import Topology

_log = logging.getLogger("fluxgen.tune")

# Presets by the package's own names (enum NvMatmulHeuristicsNvidiaGpu).
_GPUS = {
    "h100-sxm": "H100_SXM",
    "h100-pcie": "H100_PCIE",
    "h100-nvl": "H100_NVL",
    "h20": "H20_SXM",
    "h200": "H200_SXM",
}


def heuristic_tiles(problem: Problem, topology: Topology, count: int = 4) -> list[tuple[int, ...]]:
    """(tile_m, tile_n, tile_k, cluster_m, cluster_n) that the package proposes, best first.

    The rank-batched GEMM is asked for: m/tp x n x k in tp batches. Empty without the package, for
    a GPU it does not know, or when it fails: seeds are a hint, never a condition.
    """
    try:
        api: Any = importlib.import_module("nvMatmulHeuristics")
    except ImportError:
        return []
    try:
        gpu = getattr(api.NvMatmulHeuristicsNvidiaGpu, _GPUS.get(topology.gpu.name, ""), None)
        if gpu is None:
            return []
        heuristics = api.NvMatmulHeuristicsInterface(
            api.NvMatmulHeuristicsTarget.CUTLASS3,
            precision="TST" if problem.signature.dtype is DType.BF16 else "HSH",
            flags=api.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
        )
        hardware = heuristics.createHardwareDescriptor()
        heuristics.setHardwarePredefinedGpu(hardware, gpu)
        layout = api.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR
        # Without an explicitly loaded discovery set the answers are those of a generic kernel.
        if not heuristics.loadInternalDiscoverySet(layout, hardware):
            return []
        asked = heuristics.makeNvMatmulHeuristicsProblem(
            problem.m_local, problem.n, problem.k, layout, problem.tp
        )
        found = heuristics.get(asked, count, hardware)
        kernels = [entry["kernel"] for entry in sorted(found, key=lambda e: e["runtime"])]
        names = ("cta_tile_m", "cta_tile_n", "cta_tile_k", "cluster_m", "cluster_n")
        return [tuple(int(getattr(kernel, name)) for name in names) for kernel in kernels]
    except Exception as error:  # a foreign binary package: whatever it raises, go on without it
        _log.warning("nvMatmulHeuristics: ignored: %s", error)
        return []


def seed_kernels(
    problem: Problem, topology: Topology, legal: tuple[KernelConfig, ...], count: int = 4
) -> tuple[KernelConfig, ...]:
    """Those of ``legal`` that have a proposed tile and cluster, in the proposals' order."""
    return tuple(
        kernel
        for tile in heuristic_tiles(problem, topology, count)
        for kernel in legal
        if (kernel.tile_m, kernel.tile_n, kernel.tile_k, kernel.cluster_m, kernel.cluster_n) == tile
    )
