"""Hopper's persistent kernels: the constraints of ``sm90_gemm.cuh``, each with its reason."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from fluxgen.core.config import KernelConfig, RunConfig, Schedule
from fluxgen.core.problem import Problem
from fluxgen.core.topology import Gpu
from fluxgen.kernels.slabs import SlabFamily

TILE_M = (64, 128, 256)
TILE_N = (64, 96, 128, 144, 160, 192, 224, 256)
TILE_K = (64, 128)
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
MIN_STAGES = 3
"""Fewer stages cannot hide the latency of a TMA load behind one MMA."""
MAX_STAGES = 12
MAX_SPAN_ACCUMULATORS = 160
"""Accumulator registers above which gemm_rs is compiled without ``span`` (it would spill)."""
EXTENDED_MMA_N = (144, 160, 224)
"""Columns whose wgmma CUTLASS has only with its extended shapes (``mma_sm90.hpp``)."""


def stage_bytes(kernel: KernelConfig, element: int = 2) -> int:
    """Shared memory of one pipeline stage: one tile of A and one of B."""
    return (kernel.tile_m + kernel.tile_n) * kernel.tile_k * element


def epilogue_tile(kernel: KernelConfig) -> tuple[int, int]:
    """The subtile (M, N) that the epilogue moves through shared memory at a time."""
    rows = 64 if kernel.tile_m == 64 or kernel.schedule is Schedule.PINGPONG else 128
    return rows, math.gcd(kernel.tile_n, 32)


def epilogue_bytes(kernel: KernelConfig, element: int = 2) -> int:
    """Shared memory of the epilogue: at most two store stages of one subtile each."""
    tile_m, tile_n = epilogue_tile(kernel)
    subtiles = (kernel.tile_m // tile_m) * (kernel.tile_n // tile_n)
    return min(2, subtiles) * tile_m * tile_n * element


def stage_count(kernel: KernelConfig, smem_kb: int) -> int:
    """Pipeline stages that fit beside the epilogue and 1 KiB of barriers."""
    if kernel.stages:
        return kernel.stages
    return (smem_kb * 1024 - epilogue_bytes(kernel) - 1024) // stage_bytes(kernel)


def accumulator_registers(kernel: KernelConfig) -> int:
    """Accumulator registers of one MMA thread (fp32)."""
    threads = 256 if kernel.schedule is Schedule.COOPERATIVE else 128
    return kernel.tile_m * kernel.tile_n // threads


class Sm90(SlabFamily):
    """Warp-specialised kernels over TMA and wgmma, ping-pong or cooperative."""

    archs = ("sm90",)
    schedules = (Schedule.PINGPONG, Schedule.COOPERATIVE)
    header = "sm90.cuh"

    def kernels(self) -> Iterator[KernelConfig]:
        """All combinations of the knobs, with automatic stages."""
        for tile_m, tile_n, tile_k, cluster, schedule in product(
            TILE_M, TILE_N, TILE_K, CLUSTERS, self.schedules
        ):
            yield KernelConfig(tile_m, tile_n, tile_k, *cluster, schedule)

    def why_illegal_kernel(self, gpu: Gpu, kernel: KernelConfig, b_layout: str) -> str | None:
        """Why the compiler or the chip refuses it."""
        del b_layout
        for name, value, valid in (
            ("tile_m", kernel.tile_m, TILE_M),
            ("tile_n", kernel.tile_n, TILE_N),
            ("tile_k", kernel.tile_k, TILE_K),
        ):
            if value not in valid:
                return f"{name} {value} is not one of {valid}"
        if (kernel.cluster_m, kernel.cluster_n) not in CLUSTERS:
            return f"cluster {kernel.cluster_m}x{kernel.cluster_n} is not one of {CLUSTERS}"
        if kernel.schedule is Schedule.COOPERATIVE and kernel.tile_m < 128:
            return (
                f"cooperative splits tile_m over two warpgroups of 64 rows; {kernel.tile_m} < 128"
            )
        if accumulator_registers(kernel) > 208:
            return (
                f"accumulators take {accumulator_registers(kernel)} of a thread's 240 registers: "
                "over 208 spills"
            )
        if kernel.stages and not MIN_STAGES <= kernel.stages <= MAX_STAGES:
            return f"stages {kernel.stages} is outside {MIN_STAGES}..{MAX_STAGES}"
        fits = stage_count(replace(kernel, stages=0), gpu.smem_kb)
        if max(kernel.stages, MIN_STAGES) > fits:
            return (
                f"{max(kernel.stages, MIN_STAGES)} stages of {stage_bytes(kernel)} bytes do not "
                f"fit {gpu.smem_kb} KiB of shared memory ({fits} do)"
            )
        return None

    def why_illegal_span(
        self, problem: Problem, kernel: KernelConfig, run: RunConfig
    ) -> str | None:
        """A reducing kernel spans slabs by subtiles of its epilogue."""
        rows = problem.m_local
        if run.span > 1 and problem.op.scatters:
            unit = epilogue_tile(kernel)[0]
            if accumulator_registers(kernel) > MAX_SPAN_ACCUMULATORS:
                return f"span {run.span}: the subtile loop of gemm_rs spills on {kernel.name}"
            if rows * run.span != kernel.tile_m or rows % unit:
                return (
                    f"span {run.span} with slabs of {rows} rows: gemm_rs needs span slabs to be "
                    f"one tile of {kernel.tile_m} rows, each a multiple of {unit}, in one chunk"
                )
        return None

    def before(self, kernel: KernelConfig) -> list[str]:
        """Shapes of wgmma that CUTLASS leaves out unless asked."""
        if kernel.tile_n not in EXTENDED_MMA_N:
            return []
        return [
            f"// wgmma of n = {kernel.tile_n}: without it CUTLASS builds the tile from n = 32, at "
            "0.6 of the speed.",
            "// Only where it is needed: it makes a compile twice as long.",
            "#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED",
        ]

    def knobs(self, kernel: KernelConfig) -> list[str]:
        """The cluster and the schedule."""
        cooperative = "true" if kernel.schedule is Schedule.COOPERATIVE else "false"
        return [
            f"static constexpr int kClusterM = {kernel.cluster_m}, kClusterN = {kernel.cluster_n};",
            f"static constexpr bool kCooperative = {cooperative};",
        ]

    def described(self, kernel: KernelConfig) -> dict[str, Any]:
        """Cooperative or not."""
        cooperative = kernel.schedule is Schedule.COOPERATIVE
        return {"cooperative": cooperative, "warps": 0, "flat": False}
