"""When the flags of an imitated link are due: pure functions, no GPU.

Copies come one after the other, in the order of the copy-engine transport; each takes its bytes at
the link's rate and ``COPY_US`` for itself. Stores of a gemm_rs are a queue of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Transport
from fluxgen.core.problem import Problem
from fluxgen.core.topology import Topology
from fluxgen.predict.link import copy_arrivals, copy_order, store_rate, transfer_us
from fluxgen.runtime.workspace import chunk_size


@dataclass(frozen=True)
class ChunkTime:
    """One chunk of a slab. ``visit`` 1 is the first remote slab in the order of the walk."""

    visit: int
    chunk: int
    us: float


def chunk_sizes(problem: Problem, kernel: KernelConfig, run: RunConfig) -> list[float]:
    """Share of the slab that each of its chunks is, in order; they sum to 1."""
    by_k = run.chunk_axis is ChunkAxis.K
    extent = problem.k if by_k else problem.m_local
    size = chunk_size(problem, kernel, run) or extent
    ends = [size]
    while ends[-1] < extent:
        ends.append(2 * ends[-1] if by_k else ends[-1] + size)
    ends[-1] = extent
    return [(end - begin) / extent for begin, end in pairwise([0, *ends])]


def arrivals(
    problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
) -> list[ChunkTime]:
    """ag_gemm: when each remote chunk has been copied, without the link's latency.

    With the SM copy all of them arrive with the last: the kernel that copies ends before the GEMM.
    """
    slab = problem.m_local * problem.k * problem.signature.dtype.bytes
    shares = chunk_sizes(problem, kernel, run)
    if run.transport is Transport.SM_COPY:
        whole = transfer_us(problem.comm_bytes, topology)
        order = copy_order(run, len(shares), problem.tp)
        return [ChunkTime(visit, chunk, whole) for visit, chunk, _ in order]
    at_once = replace(topology, latency_us=0.0)
    return [ChunkTime(*arrival) for arrival in copy_arrivals(slab, run, at_once, shares)]


def departures(
    problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
) -> list[ChunkTime]:
    """gemm_rs: the link's time for each chunk that this rank sends."""
    slab = problem.m_local * problem.n * problem.signature.out_dtype.bytes
    rate = store_rate(topology, run.transport)
    return [
        ChunkTime(visit, chunk, transfer_us(slab * share, topology, rate))
        for visit in range(1, problem.tp)
        for chunk, share in enumerate(chunk_sizes(problem, kernel, run))
    ]


def wave_us(problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig) -> float:
    """gemm_rs: the link's time for one wave of tiles, all of which end at once."""
    tile = kernel.tile_m * kernel.tile_n * problem.signature.out_dtype.bytes
    size = (run.sms or topology.gpu.sm_count) * tile
    return transfer_us(size, topology, store_rate(topology, run.transport))


def unfused_us(problem: Problem, topology: Topology) -> float:
    """The unfused collective at its best: its bytes at the link's rate, and one latency."""
    if problem.tp == 1:
        return 0.0
    return topology.latency_us + transfer_us(problem.comm_bytes, topology)
