"""Ampere's flat kernels: the constraints of ``sm80_flat.cuh``, each with its reason.

There are no clusters: K is split over the eight warps of a block, each with stages of its own, and
``tile_k`` is what one of them loads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fluxgen.core.config import KernelConfig, RunConfig, Schedule
from fluxgen.core.problem import Problem
from fluxgen.core.topology import Gpu
from fluxgen.kernels.flat import FlatFamily

WARPS = 8
"""Warps of a block, over which it splits K."""
TILE_M = (16, 32, 64)
TILE_N = (16, 32, 64)
TILE_K = (32, 64)
STAGES = (2, 3, 4, 6)
MAX_TILE = 32 * 64
"""Elements of a tile: each warp has sums of all of it, 64 registers a thread (nvcc 13.0: 204 in
all, no spill)."""


def shared_bytes(kernel: KernelConfig, element: int = 2) -> int:
    """Dynamic shared memory of a block: all warps' stages, or their sums, whichever is more."""
    stages = kernel.stages * (kernel.tile_m + kernel.tile_n) * kernel.tile_k * element
    return WARPS * max(stages, kernel.tile_m * (kernel.tile_n + 4) * 4)


class Sm80Flat(FlatFamily):
    """Kernels over cp.async and mma.sync, K over the warps of a block."""

    archs = ("sm80", "sm86", "sm89")
    schedules = (Schedule.FLAT,)
    header = "sm80_flat.cuh"

    def kernels(self) -> Iterator[KernelConfig]:
        """All combinations of the knobs; most are legal."""
        for tile_m, tile_n, tile_k, stages in product(TILE_M, TILE_N, TILE_K, STAGES):
            yield KernelConfig(tile_m, tile_n, tile_k, 1, 1, Schedule.FLAT, stages)

    def why_illegal_kernel(self, gpu: Gpu, kernel: KernelConfig, b_layout: str) -> str | None:
        """Why the compiler or the chip refuses it."""
        del b_layout
        smem_kb = gpu.smem_kb
        for name, value, valid in (
            ("tile_m", kernel.tile_m, TILE_M),
            ("tile_n", kernel.tile_n, TILE_N),
            ("tile_k", kernel.tile_k, TILE_K),
            ("stages", kernel.stages, STAGES),
        ):
            if value not in valid:
                return f"{name} {value} of a flat sm80 kernel is not one of {valid}"
        if (kernel.cluster_m, kernel.cluster_n) != (1, 1):
            return f"cluster {kernel.cluster_m}x{kernel.cluster_n}: sm80 has no clusters; use 1x1"
        if kernel.tile_m * kernel.tile_n > MAX_TILE:
            return (
                f"tile {kernel.tile_m}x{kernel.tile_n}: each warp has sums of all of it; over "
                f"{MAX_TILE} elements are too many registers"
            )
        if shared_bytes(kernel) > smem_kb * 1024:
            return (
                f"{kernel.stages} stages of eight warps take {shared_bytes(kernel)} bytes of "
                f"shared memory, a block has {smem_kb} KiB"
            )
        return None

    def why_illegal_split(
        self, problem: Problem, kernel: KernelConfig, run: RunConfig
    ) -> str | None:
        """The warps of a block are all the parts that there are."""
        del problem, kernel
        if run.split != 1:
            return f"split {run.split}: flat sm80 kernels split k over the warps of a block; use 1"
        return None

    def step_depth(self, kernel: KernelConfig) -> int:
        """One ``tile_k`` for each warp."""
        return kernel.tile_k * WARPS
