"""Ampere's persistent kernels: the constraints of ``sm80_collectives.cuh``, with reasons."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from fluxgen.core.config import KernelConfig, Schedule
from fluxgen.core.topology import Gpu
from fluxgen.kernels.slabs import SlabFamily

TILE_M = (64, 128, 256)
TILE_N = (64, 96, 128, 192, 256)
TILE_K = (32, 64)
STAGES = (3, 4, 5)
WARPS = {Schedule.MULTISTAGE_4: 4, Schedule.MULTISTAGE_8: 8}
MAX_ACCUMULATORS = 128
"""Accumulators of a thread: with 128, sm80's 255 registers hold all without a spill (nvcc 13.0)."""


def warp_grid(kernel: KernelConfig) -> tuple[int, int]:
    """Warps along M and N: as square as can be, the longer side of eight along the longer tile."""
    if WARPS[kernel.schedule] == 4:
        return 2, 2
    return (4, 2) if kernel.tile_m > kernel.tile_n else (2, 4)


def shared_bytes(kernel: KernelConfig, element: int = 2) -> int:
    """Dynamic shared memory of a block: the stages, or the finished tile, whichever is more."""
    stages = kernel.stages * (kernel.tile_m + kernel.tile_n) * kernel.tile_k
    return max(stages, kernel.tile_m * kernel.tile_n) * element


class Sm80(SlabFamily):
    """Kernels over cp.async and mma.sync, of four warps or of eight."""

    archs = ("sm80", "sm86", "sm89")
    schedules = tuple(WARPS)
    header = "sm80.cuh"

    def kernels(self) -> Iterator[KernelConfig]:
        """All combinations of the knobs; most are legal."""
        for tile_m, tile_n, tile_k, schedule, stages in product(
            TILE_M, TILE_N, TILE_K, WARPS, STAGES
        ):
            yield KernelConfig(tile_m, tile_n, tile_k, 1, 1, schedule, stages)

    def why_illegal_kernel(self, gpu: Gpu, kernel: KernelConfig, b_layout: str) -> str | None:
        """Why the compiler or the chip refuses it; a B of (k, n) is loaded along n."""
        smem_kb, transposed = gpu.smem_kb, b_layout == "kn"
        for name, value, valid_values in (
            ("tile_m", kernel.tile_m, TILE_M),
            ("tile_n", kernel.tile_n, TILE_N),
            ("tile_k", kernel.tile_k, TILE_K),
            ("stages", kernel.stages, STAGES),
        ):
            if value not in valid_values:
                return f"{name} {value} is not one of {valid_values}"
        if (kernel.cluster_m, kernel.cluster_n) != (1, 1):
            return f"cluster {kernel.cluster_m}x{kernel.cluster_n}: sm80 has no clusters; use 1x1"
        warps = WARPS[kernel.schedule]
        accumulators = kernel.tile_m * kernel.tile_n // (32 * warps)
        if accumulators > MAX_ACCUMULATORS:
            return f"{accumulators} accumulators a thread: over {MAX_ACCUMULATORS} spill"
        rows, columns = warp_grid(kernel)
        if kernel.tile_m % (16 * rows) or kernel.tile_n % (16 * columns):
            return (
                f"tile {kernel.tile_m}x{kernel.tile_n} is not whole 16x16 pieces of "
                f"{rows}x{columns} warps"
            )
        along_k = 32 * warps // (min(kernel.tile_k, 64) // 8)  # rows that all threads load at once
        if kernel.tile_m % along_k or (not transposed and kernel.tile_n % along_k):
            return (
                f"tile {kernel.tile_m}x{kernel.tile_n}: the loads of {warps} warps take {along_k} "
                "rows"
            )
        along_n = 32 * warps // ((64 if kernel.tile_n % 64 == 0 else 32) // 8)
        if transposed and kernel.tile_k % along_n:
            return (
                f"tile_k {kernel.tile_k}: the loads of {warps} warps take {along_n} rows of (k, n)"
            )
        if shared_bytes(kernel) > smem_kb * 1024:
            return (
                f"{kernel.stages} stages take {shared_bytes(kernel)} bytes of shared memory, a "
                f"block has {smem_kb} KiB"
            )
        return None

    def knobs(self, kernel: KernelConfig) -> list[str]:
        """The grid of warps."""
        warps_m, warps_n = warp_grid(kernel)
        return [f"static constexpr int kWarpsM = {warps_m}, kWarpsN = {warps_n};"]

    def described(self, kernel: KernelConfig) -> dict[str, Any]:
        """The number of warps."""
        return {"cooperative": False, "warps": WARPS[kernel.schedule], "flat": False}
