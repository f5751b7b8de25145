"""When the flags of an imitated link are due: pure functions, no GPU.

Copies come one after the other, in the order of the copy-engine transport; each takes its bytes at
the link's rate and ``COPY_US`` for itself. Stores of a gemm_rs leave in the order of its walk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Transport
from fluxgen.core.problem import Problem, ceil_div
from fluxgen.core.topology import Topology
from fluxgen.kernels.registry import with_schedule
from fluxgen.native.workspace import chunk_size
from fluxgen.predict.gemm import make_grid
from fluxgen.predict.link import copy_arrivals, copy_order, store_rate, transfer_us


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


@dataclass(frozen=True)
class Departure:
    """One chunk that a gemm_rs sends, in the order in which they are whole.

    Attributes:
        visit: as in :class:`ChunkTime`. busy_us: the link's time for what has left since the chunk
            before was whole. tail_us: for what may still be on its way when this one is.
    """

    visit: int
    chunk: int
    busy_us: float
    tail_us: float


def departures(
    problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
) -> list[Departure]:
    """gemm_rs: how the link sends what the GEMM stores, tile by tile in the order of its walk.

    Stores leave as they are made, whoever owns them: of slabs that end together most has left when
    the first of them is whole. Tiles of a wave end together: when a chunk is whole, what the wave
    of its last tile has stored until then is still to be sent.
    """
    rate = store_rate(topology, run.transport)
    if run.transport is Transport.PEER_BROADCAST:
        return _broadcast(problem, topology, rate)
    if with_schedule(kernel.schedule).whole:  # its tiles come column by column
        run = replace(run, panel=1)
    groups = run.groups or (problem.tp,)
    sms = run.sms or topology.gpu.sm_count
    slots = make_grid(problem.m_local * run.span, problem.n, groups, kernel, sms).slots
    slots = max(1, slots // run.split)
    ends, sent = _walk(problem, kernel, run)
    out, before_us = [], 0.0
    for visit, chunk, end in ends:
        sent_us = transfer_us(sent(end), topology, rate)
        earlier_us = transfer_us(sent((end - 1) // slots * slots), topology, rate)
        out.append(Departure(visit, chunk, sent_us - before_us, sent_us - earlier_us))
        before_us = sent_us
    return out


def _broadcast(problem: Problem, topology: Topology, rate: float) -> list[Departure]:
    """All peers' flags come at the end, with all rows of each still to be sent: of one wave."""
    whole = problem.m * problem.n * problem.signature.out_dtype.bytes
    busy_us = transfer_us(whole, topology, rate)
    return [Departure(visit, 0, busy_us, busy_us) for visit in range(1, problem.tp)]


def unhidden_us(
    problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
) -> float:
    """What the link takes of a call if nothing hides it: its latency, its bytes, copies' own time.

    An upper bound of what a call takes beyond the same call with its data present.
    """
    if problem.tp == 1:
        return 0.0
    if problem.op.gathers:
        return topology.latency_us + max(t.us for t in arrivals(problem, topology, kernel, run))
    rate, item = store_rate(topology, run.transport), problem.signature.out_dtype.bytes
    rows = problem.m if run.transport.in_one_shot else problem.m_local
    sent = (problem.tp - 1) * rows * problem.n * item * run.transport.bytes_each
    shots = 1 if not problem.op.shares or run.transport.in_one_shot else 2
    return shots * (topology.latency_us + transfer_us(sent, topology, rate))


def second_shot(problem: Problem, topology: Topology, run: RunConfig) -> list[Departure]:
    """gemm_ar in two shots: the reduced rows go to each peer, whose flags all come at the end.

    The reduction pushes faster than the link sends.
    """
    if not problem.op.shares or run.transport.in_one_shot:
        return []
    slab = problem.m_local * problem.n * problem.signature.out_dtype.bytes
    busy_us = transfer_us(slab, topology, store_rate(topology, run.transport))
    return [Departure(visit, 0, busy_us, busy_us) for visit in range(1, problem.tp)]


def _walk(
    problem: Problem, kernel: KernelConfig, run: RunConfig
) -> tuple[list[tuple[int, int, int]], Callable[[int], float]]:
    """((visit, chunk, clusters until the last that touches it) of each remote chunk in the order in
    which they end, remote bytes that so many clusters store). The walk is ``tile_order.cuh``'s."""
    tp, span, rows = problem.tp, run.span, problem.m_local
    size = chunk_size(problem, kernel, run) or rows
    item = problem.signature.out_dtype.bytes
    tiles = ceil_div(rows * span, kernel.tile_m)  # of ``span`` slabs
    columns = kernel.tile_n * kernel.cluster_n
    width = run.panel * columns if run.panel else problem.n
    ended: dict[tuple[int, int], int] = {}
    walked, stored, first = [0], [0.0], 0
    for ranks in run.groups or (tp,):
        slabs = range(first // span, (first + ranks) // span)
        first += ranks
        walk = [(slab, tile) for slab in slabs for tile in range(tiles)]
        for begin in range(0, problem.n, width):
            panel = min(width, problem.n - begin)
            for at in range(0, len(walk), kernel.cluster_m):
                end, sent = walked[-1] + ceil_div(panel, columns), stored[-1]
                for slab, tile in walk[at : at + kernel.cluster_m]:
                    top = tile * kernel.tile_m
                    bottom = min(top + kernel.tile_m, rows * span)
                    for place in range(top // rows, (bottom - 1) // rows + 1):
                        visit = _owner(slab, place, span, tp)
                        if visit:
                            low, high = max(top, place * rows), min(bottom, (place + 1) * rows)
                            sent += item * panel * (high - low)
                            chunk = (low - place * rows) // size if span == 1 else 0
                            ended[visit, chunk] = end
                walked.append(end)
                stored.append(sent)

    def sent_by(clusters: int) -> float:
        after = bisect_left(walked, clusters)
        if walked[after] == clusters:
            return stored[after]
        share = (clusters - walked[after - 1]) / (walked[after] - walked[after - 1])
        return stored[after - 1] + share * (stored[after] - stored[after - 1])

    ends = [(visit, chunk, end) for (visit, chunk), end in ended.items()]
    return sorted(ends, key=lambda e: (e[2], e[:2])), sent_by


def _owner(slab: int, place: int, span: int, tp: int) -> int:
    """Rank 0's owner at ``place`` in the ``slab``-th visited slab of ``span`` ranks; 0: its own."""
    return (slab * span + span + place) % tp


def unfused_us(problem: Problem, topology: Topology) -> float:
    """The unfused collective at its best: its bytes at the link's rate, and one latency.

    Of an all-reduce the better of two shots, with two latencies, and one, where each rank sends all
    that it has to all.
    """
    if problem.tp == 1:
        return 0.0
    in_two = transfer_us(problem.comm_bytes, topology)
    if not problem.op.shares:
        return topology.latency_us + in_two
    in_one = in_two * problem.tp / 2
    return topology.latency_us + min(in_one, topology.latency_us + in_two)
