"""What flat sm90 kernels may be: the constraints of ``sm90_flat.cuh``, each with its reason.

A flat kernel tiles the rows of all ranks as one, for the few tokens of decoding: its ``tile_m`` are
tokens, on the side of wgmma that may be short, and K may be split over the blocks of a cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fluxgen.core.config import KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.problem import Problem, ceil_div

TILE_M = (16, 32, 64, 128)
TILE_N = (64, 128, 192, 256)
TILE_K = (64, 128)
SPLITS = (1, 2, 4, 8)
"""Parts of K: blocks of a cluster, of which any Hopper GPU holds eight."""
MAX_TOKENS = 256
"""Rows of all ranks above which tiles of one rank's slab are the better ones: at 512 flat kernels
took 1.78 times cuBLAS (H200, data present, 2026-12-03), those of one rank's slab 1.01 to 1.20."""
MAX_PACKET_TOKENS = 64
"""Rows above which packets, at twice the bytes, are not tried: what they save is one flag's way."""
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


def why_illegal_kernel(kernel: KernelConfig, smem_kb: int) -> str | None:
    """Why ``kernel`` cannot be compiled, or run with ``smem_kb`` KiB a block; None if it can."""
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


def why_illegal(problem: Problem, kernel: KernelConfig, run: RunConfig) -> str | None:
    """Why a flat ``kernel`` with ``run`` cannot compute ``problem``, or None.

    What no kernel can take is :func:`fluxgen.codegen.space.why_illegal`'s.
    """
    if problem.m > MAX_TOKENS:
        return f"m={problem.m}: flat kernels are for at most {MAX_TOKENS} tokens"
    if kernel.tile_m > TILE_M[0] and kernel.tile_m >= 2 * problem.m:
        return f"tiles of {kernel.tile_m} tokens are at least half padding for m={problem.m}"
    if run.span != problem.tp or run.groups not in ((), (problem.tp,)) or run.panel or run.sms:
        return (
            f"span {run.span}, groups {run.groups}, panel {run.panel}, sms {run.sms}: a flat "
            f"kernel tiles all {problem.tp} slabs as one, in one order, on all SMs"
        )
    if run.chunks != 1:
        return f"chunks {run.chunks}: a flat kernel has whole slabs"
    if run.transport is Transport.COPY_ENGINE_DRAIN:
        return "transport copy_engine_drain: a flat kernel stores to the owners; use peer_store"
    if run.transport.packed and problem.m > MAX_PACKET_TOKENS:
        return (
            f"transport {run.transport.value} with m={problem.m}: packets are twice the bytes, for "
            f"at most {MAX_PACKET_TOKENS} tokens; use one that raises flags"
        )
    steps = ceil_div(problem.k, kernel.tile_k)
    if run.split not in SPLITS or run.split > steps:
        return f"split {run.split} is not one of {SPLITS}, or more than the {steps} tiles of k"
    return None


def kernels() -> Iterator[KernelConfig]:
    """All combinations of the knobs, in a fixed order."""
    for tile_m, tile_n, tile_k in product(TILE_M, TILE_N, TILE_K):
        yield KernelConfig(tile_m, tile_n, tile_k, 1, 1, Schedule.FLAT)
