"""Hopper's flat kernels: the constraints of ``sm90_flat.cuh``, each with its reason.

Their ``tile_m`` are tokens, on the side of wgmma that may be short, and K may be split over the
blocks of a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fluxgen.core.config import KernelConfig, RunConfig, Schedule
from fluxgen.core.problem import Problem, ceil_div
from fluxgen.core.topology import Gpu
from fluxgen.kernels.flat import SPLITS, FlatFamily

TILE_M = (16, 32, 64, 128)
TILE_N = (64, 128, 192, 256)
TILE_K = (64, 128)
MAX_TILE = 64 * 256
"""Elements of a tile 256 wide: its four warpgroups have 96 registers a thread (nvcc 13.0 spilled at
128 x 256)."""
MIN_STAGES = 3
MAX_STAGES = 16


PASS_TOKENS = 32
"""Tokens whose parts the blocks of a cluster exchange at a time."""


def part_bytes(kernel: KernelConfig) -> int:
    """Shared memory of a block's part of some tokens, in fp32, four columns of padding to a row."""
    return min(kernel.tile_m, PASS_TOKENS) * (kernel.tile_n + 4) * 4


def stage_bytes(kernel: KernelConfig, element: int = 2) -> int:
    """Shared memory of one pipeline stage."""
    return (kernel.tile_m + kernel.tile_n) * kernel.tile_k * element


def stage_count(kernel: KernelConfig, smem_kb: int) -> int:
    """Pipeline stages that fit beside the part and 2 KiB of barriers."""
    if kernel.stages:
        return kernel.stages
    fit = (smem_kb * 1024 - part_bytes(kernel) - 2048) // stage_bytes(kernel)
    return min(fit, MAX_STAGES)


class Sm90Flat(FlatFamily):
    """Kernels over TMA and wgmma with swapped operands, K over the blocks of a cluster."""

    archs = ("sm90",)
    schedules = (Schedule.FLAT,)
    header = "sm90_flat.cuh"

    def kernels(self) -> Iterator[KernelConfig]:
        """All combinations of the knobs, with automatic stages."""
        for tile_m, tile_n, tile_k in product(TILE_M, TILE_N, TILE_K):
            yield KernelConfig(tile_m, tile_n, tile_k, 1, 1, Schedule.FLAT)

    def why_illegal_kernel(self, gpu: Gpu, kernel: KernelConfig, b_layout: str) -> str | None:
        """Why the compiler or the chip refuses it."""
        del b_layout
        smem_kb = gpu.smem_kb
        for name, value, valid in (
            ("tile_m", kernel.tile_m, TILE_M),
            ("tile_n", kernel.tile_n, TILE_N),
            ("tile_k", kernel.tile_k, TILE_K),
        ):
            if value not in valid:
                return f"{name} {value} of a flat kernel is not one of {valid}"
        if (kernel.cluster_m, kernel.cluster_n) != (1, 1):
            return (
                f"cluster {kernel.cluster_m}x{kernel.cluster_n}: a flat kernel's clusters are the "
                "parts of K, set at run time; use 1x1"
            )
        if kernel.tile_n == 256 and kernel.tile_m * kernel.tile_n > MAX_TILE:
            return f"tile {kernel.tile_m}x{kernel.tile_n}: accumulators of four warpgroups spill"
        if kernel.stages and not MIN_STAGES <= kernel.stages <= MAX_STAGES:
            return f"stages {kernel.stages} is outside {MIN_STAGES}..{MAX_STAGES}"
        stages = max(stage_count(kernel, smem_kb), MIN_STAGES)
        held = stages * stage_bytes(kernel) + part_bytes(kernel) + 2048
        if held > smem_kb * 1024:
            return f"{stages} stages take {held} bytes of shared memory, a block has {smem_kb} KiB"
        return None

    def why_illegal_split(
        self, problem: Problem, kernel: KernelConfig, run: RunConfig
    ) -> str | None:
        """Parts of K are blocks of a cluster, each with a tile of K at least."""
        steps = ceil_div(problem.k, kernel.tile_k)
        if run.split not in SPLITS or run.split > steps:
            return f"split {run.split} is not one of {SPLITS}, or more than the {steps} tiles of k"
        return None
