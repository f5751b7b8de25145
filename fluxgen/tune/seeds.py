"""Kernels that NVIDIA's matmul heuristics would pick, if that optional package is installed."""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from collections.abc import Iterable, Sequence

from fluxgen.core.config import KernelConfig
from fluxgen.core.problem import Problem
from fluxgen.core.topology import Topology

_log = logging.getLogger("fluxgen.tune")

Tile = tuple[int, ...]
"""(tile_m, tile_n, tile_k, cluster_m, cluster_n)."""

TIMEOUT_S = 60.0

# Presets by the package's own names (enum NvMatmulHeuristicsNvidiaGpu).
_GPUS = {
    "h100-sxm": "H100_SXM",
    "h100-pcie": "H100_PCIE",
    "h100-nvl": "H100_NVL",
    "h20": "H20_SXM",
    "h200": "H200_SXM",
}


def heuristic_tiles(
    problems: Sequence[Problem], topology: Topology, count: int = 2
) -> dict[Problem, list[Tile]]:
    """What the package proposes for each problem, best first.

    The rank-batched GEMM is asked for: m/tp x n x k in tp batches. Empty without the package, for
    a GPU it does not know, or when it fails: seeds are a hint, never a condition.
    """
    gpu = _GPUS.get(topology.gpu.name)
    if not problems or gpu is None or importlib.util.find_spec("nvMatmulHeuristics") is None:
        return {}
    shapes = [[p.m_local, p.n, p.k, p.tp] for p in problems]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "fluxgen.tune.heuristics_worker"],
            input=json.dumps({"gpu": gpu, "count": count, "shapes": shapes}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=True,
        )
        answers = json.loads(done.stdout)
        return {
            problem: [tuple(map(int, tile)) for tile in tiles]
            for problem, tiles in zip(problems, answers, strict=True)
        }
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        _log.warning("nvMatmulHeuristics: ignored: %s", error)
        return {}


def seed_kernels(tiles: Iterable[Tile], legal: Sequence[KernelConfig]) -> tuple[KernelConfig, ...]:
    """Those of ``legal`` that have a proposed tile and cluster, in the proposals' order."""
    return tuple(
        kernel
        for tile in tiles
        for kernel in legal
        if (kernel.tile_m, kernel.tile_n, kernel.tile_k, kernel.cluster_m, kernel.cluster_n) == tile
    )
