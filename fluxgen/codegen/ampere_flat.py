"""What flat sm80 kernels may be: the constraints of ``sm80_flat.cuh``, each with its reason.

As :mod:`fluxgen.codegen.flat`, for a GPU without clusters: K is split over the eight warps of a
block, each with stages of its own, and ``tile_k`` is what one of them loads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fluxgen.core.config import SM80_FLAT_WARPS, KernelConfig, Schedule

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
    return SM80_FLAT_WARPS * max(stages, kernel.tile_m * (kernel.tile_n + 4) * 4)


def why_illegal(kernel: KernelConfig, smem_kb: int) -> str | None:
    """Why ``kernel`` cannot be compiled, or run with ``smem_kb`` KiB a block; None if it can."""
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
            f"{kernel.stages} stages of eight warps take {shared_bytes(kernel)} bytes of shared "
            f"memory, a block has {smem_kb} KiB"
        )
    return None


def kernels() -> Iterator[KernelConfig]:
    """All combinations of the knobs, in a fixed order; most are legal."""
    for tile_m, tile_n, tile_k, stages in product(TILE_M, TILE_N, TILE_K, STAGES):
        yield KernelConfig(tile_m, tile_n, tile_k, 1, 1, Schedule.FLAT, stages)
