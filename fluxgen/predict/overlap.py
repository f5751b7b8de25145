"""The timeline of one fused op: which tile waits for which chunk, and what stays exposed.

A persistent kernel gives slot s the clusters s, s + S, s + 2 S, ... of the walk. So if the first
cluster that needs a chunk is number i of T, and the chunk arrives at time a, the slot that owns
it cannot end before ``a + wave * ceil((T - i) / S)``, and no other slot that needs the chunk ends
later. The kernel's time is the maximum over all chunks: no simulation is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Transport
from fluxgen.core.errors import UsageError
from fluxgen.core.problem import Problem, ceil_div
from fluxgen.core.record import Baseline
from fluxgen.core.topology import LinkKind, Topology
from fluxgen.kernels.registry import family_of
from fluxgen.predict import constants as c
from fluxgen.predict.gemm import GemmTime, Grid, flat_gemm_time, gemm_time, library_gemm_us
from fluxgen.predict.link import (
    copy_arrivals,
    copy_us,
    crossing,
    nccl_us,
    one_shot_us,
    sm_copy_us,
    store_rate,
    transfer_us,
)


@dataclass(frozen=True)
class Prediction:
    """Predicted times of one call, microseconds.

    Attributes:
        time_us: the whole call.
        gemm_us: the GEMM alone, with all its data present.
        comm_us: the communication alone.
        exposed_us: what the call takes beyond its GEMM.
        reduce_us: gemm_rs: the reduction pass (part of ``exposed_us``).
        waves: waves of the persistent kernel (0: not modelled, the library's GEMM).
        padding: share of the computed tiles that lies outside the problem, 0 to 1.
        baseline: which unfused path it is; None: a fused kernel.
    """

    time_us: float
    gemm_us: float
    comm_us: float
    exposed_us: float
    reduce_us: float = 0.0
    waves: int = 0
    padding: float = 0.0
    baseline: Baseline | None = None


def predict(
    problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
) -> Prediction:
    """Time of ``problem`` by the fused ``kernel`` with ``run``; legality is the caller's matter.

    Raises:
        UsageError: nothing to compute (m or k is 0), or tp is not the topology's world.
    """
    _check(problem, topology)
    gemm = fused_gemm(problem, topology, kernel, run)
    fixed = c.LAUNCH_US + (c.FUSED_FIXED_US if problem.tp > 1 else 0.0)
    reduce_us = 0.0
    if problem.op.gathers:
        body, comm = _gather_timeline(problem, topology, gemm, kernel, run)
    else:
        body, comm, reduce_us = _scatter_timeline(problem, topology, gemm, run)
    time_us = body + fixed
    grid = gemm.grid
    area = grid.total * kernel.tile_m * kernel.cluster_m * kernel.tile_n * kernel.cluster_n
    return Prediction(
        time_us=time_us,
        gemm_us=gemm.time_us,
        comm_us=comm,
        exposed_us=time_us - gemm.time_us,
        reduce_us=reduce_us,
        waves=grid.waves,
        padding=1 - problem.m * problem.n / area,
    )


def fused_gemm(
    problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
) -> GemmTime:
    """The GEMM of a fused call with all its data present; its slabs are those of ``run.span``."""
    span, element = run.span, problem.signature.dtype.bytes
    signal_us = c.SIGNAL_US if problem.op.scatters and problem.tp > 1 else 0.0
    family = family_of(topology.gpu.arch, kernel.schedule)
    if family is not None and family.whole:
        return flat_gemm_time(
            problem.m, problem.n, problem.k, run.split, family.step_depth(kernel), kernel,
            topology.gpu, element, signal_us,
        )  # fmt: skip
    groups = run.groups if span == 1 else tuple(ranks // span for ranks in run.groups)
    return gemm_time(
        problem.m_local * span, problem.n, problem.k, problem.tp // span, groups, run.panel, kernel,
        topology.gpu, run.sms, element, signal_us,
    )  # fmt: skip


def predict_baseline(problem: Problem, topology: Topology) -> Prediction:
    """Time of the unfused path: the library's GEMM, then the better of two collectives.

    They are NCCL's and, of a gemm_ar or gemm_rs over NVLink, a one-shot all-reduce.

    Raises:
        UsageError: nothing to compute (m or k is 0), or tp is not the topology's world.
    """
    _check(problem, topology)
    element = problem.signature.dtype.bytes
    gemm = library_gemm_us(problem.m, problem.n, problem.k, topology.gpu, element)
    baseline, comm = Baseline.NCCL, nccl_us(problem.comm_bytes, topology)
    if problem.op.reduces:
        partial = problem.m * problem.n * problem.signature.out_dtype.bytes
        one_shot = one_shot_us(partial, topology)
        if one_shot < comm:
            baseline, comm = Baseline.ONE_SHOT, one_shot
    return Prediction(gemm + comm, gemm, comm, comm, baseline=baseline)


def _check(problem: Problem, topology: Topology) -> None:
    if problem.m == 0 or problem.k == 0:
        raise UsageError(
            f"predict: expected a problem with m and k above 0; found m={problem.m}, "
            f"k={problem.k}: nothing is computed for it"
        )
    if problem.tp != topology.world:
        raise UsageError(
            f"predict: expected tp to be the topology's world; found tp={problem.tp} and "
            f"{topology.key}"
        )


def first_need(grid: Grid, panel: int, visit: int, row: int) -> int:
    """Position in the walk of the first cluster that touches ``row`` of the ``visit``-th slab.

    Args:
        row: row of tiles inside the slab.
    """
    group, cluster_row = _place(grid, visit, row)
    width = min(panel or grid.columns, grid.columns)
    return grid.starts[group] * grid.columns + cluster_row * width


def last_touch(grid: Grid, panel: int, visit: int, row: int) -> int:
    """The same of the last one: in the last panel of the slab's group."""
    group, cluster_row = _place(grid, visit, row)
    width = _last_width(grid, panel)
    rows = grid.starts[group + 1] - grid.starts[group]
    before = grid.starts[group] * grid.columns + (grid.columns - width) * rows
    return before + cluster_row * width + width - 1


def _place(grid: Grid, visit: int, row: int) -> tuple[int, int]:
    """The arrival group of a slab, and the row of clusters in it that has a row of its tiles."""
    group = begin = 0
    while visit >= begin + grid.groups[group]:
        begin += grid.groups[group]
        group += 1
    return group, ((visit - begin) * grid.rows + row) // grid.cluster_m


def _last_width(grid: Grid, panel: int) -> int:
    width = min(panel or grid.columns, grid.columns)
    return grid.columns - (grid.columns - 1) // width * width


def _gather_timeline(
    problem: Problem, topology: Topology, gemm: GemmTime, kernel: KernelConfig, run: RunConfig
) -> tuple[float, float]:
    """(kernel, communication) of ag_gemm, microseconds after the launch.

    Sources come in the order of the walk. With a span, the own slab holds other sources
    too, which come first; a tile that touches several sources waits for the last of them.
    """
    if problem.tp == 1:
        return gemm.time_us, 0.0
    grid, end = gemm.grid, gemm.time_us
    rows = problem.m_local
    if run.transport is Transport.SM_COPY:
        comm = sm_copy_us(problem, topology)
        return end + comm, comm
    slab = rows * problem.k * problem.signature.dtype.bytes
    arrivals = copy_arrivals(slab, run, topology, run.shares)
    by_k = run.chunk_axis is ChunkAxis.K
    before = [0.0, *accumulate(run.shares)]
    for source, chunk, arrival in arrivals:
        visit, place = divmod(source, run.span)
        begin = place * rows if by_k else place * rows + chunk * rows // run.chunks
        position = first_need(grid, run.panel, visit, begin // kernel.tile_m)
        done = before[chunk] if by_k else 0.0  # of the tile, computed before the wait
        end = max(end, arrival + gemm.rest_us(position, done))
    return end, arrivals[-1][2]


def _scatter_timeline(
    problem: Problem, topology: Topology, gemm: GemmTime, run: RunConfig
) -> tuple[float, float, float]:
    """(whole, communication, reduction) of gemm_rs and gemm_ar, microseconds after the launch.

    Remote slabs are visited first, the own slab last, so that its tiles hide the last stores. The
    link is a queue that is fed one wave of tiles at a time at a constant rate, so it ends by the
    bound of its first or of its last wave.
    """
    if problem.tp == 1:
        return gemm.time_us, 0.0, 0.0
    grid = gemm.grid
    rate = store_rate(topology, run.transport)
    out_bytes = problem.signature.out_dtype.bytes * problem.n * run.transport.bytes_each
    # What a rank gets of each, and reduces.
    rows = problem.m if run.transport.in_one_shot else problem.m_local
    scattered = (problem.tp - 1) * rows * out_bytes
    comm = transfer_us(scattered, topology, rate) * crossing(topology)
    remote = grid.total
    if grid.groups[-1] == run.span == 1:
        remote = grid.starts[-2] * grid.columns
    elif run.span == 1:  # a tile of several owners always has a remote one
        remote -= grid.rows // grid.cluster_m * _last_width(grid, run.panel)
    body = gemm.time_us - gemm.once_us
    if topology.link is LinkKind.HOST:  # the own slab's inbox is there, too
        remote, comm = grid.total, comm * problem.tp / (problem.tp - 1)
    if run.transport is Transport.COPY_ENGINE_DRAIN:
        comm, sent = _drained(problem, topology, gemm, run)
    else:
        waves = ceil_div(remote, grid.slots)
        burst = comm * (1 - (waves - 1) * grid.slots / remote)
        sent = topology.latency_us + max(
            gemm.wave_us + comm, gemm.wave_us * waves + burst, body * remote / grid.total
        )
    read = problem.tp * rows * out_bytes
    moved = read + (rows * out_bytes if problem.op.reduces else read)
    if run.transport.packed:  # they are emptied as they are read
        moved += read
    stream_us = moved / (topology.gpu.mem_gbs * c.REDUCE_RATE * 1e3)
    fixed = c.SCATTER_FIXED_US + c.LAUNCH_US
    if topology.link is LinkKind.HOST:  # read back over PCIe, once all has been stored
        stream_us = max(stream_us, transfer_us(read, topology))
        reduce_us = c.REDUCE_US + stream_us
        shared = _second_shot_us(problem, topology, run)
        return max(gemm.time_us, sent) + reduce_us + fixed + shared, comm, reduce_us
    reduce_us = c.REDUCE_US + stream_us
    # The reduction follows the GEMM in stream order and walks chunks as they arrive.
    tail = c.REDUCE_US + stream_us / run.chunks
    finish = max(gemm.time_us + reduce_us, sent + tail) + fixed
    return finish + _second_shot_us(problem, topology, run), comm, reduce_us


def _second_shot_us(problem: Problem, topology: Topology, run: RunConfig) -> float:
    """gemm_ar in two shots: the reduced rows travel to every peer, and a kernel collects them."""
    if not problem.op.shares or run.transport.in_one_shot:
        return 0.0
    row_bytes = problem.signature.out_dtype.bytes * problem.n
    sent = transfer_us((problem.tp - 1) * problem.m_local * row_bytes, topology)
    collected = 2 * problem.m * row_bytes / (topology.gpu.mem_gbs * c.REDUCE_RATE * 1e3)
    return topology.latency_us + sent + collected + c.LAUNCH_US


def _drained(
    problem: Problem, topology: Topology, gemm: GemmTime, run: RunConfig
) -> tuple[float, float]:
    """(copies alone, when the last chunk has been copied), microseconds after the launch.

    A chunk is copied once the last cluster that touches it has ended, and those before it are out.
    """
    grid, each = gemm.grid, copy_us(topology)
    slab = problem.m_local * problem.n * problem.signature.out_dtype.bytes
    piece = transfer_us(slab / run.chunks, topology) * crossing(topology) + each
    body, free = gemm.time_us - gemm.once_us, 0.0
    for owner in range(problem.tp - 1):
        visit, place = divmod(owner, run.span)
        for chunk in range(run.chunks):
            tiles = ceil_div((place * run.chunks + chunk + 1) * grid.rows, run.span * run.chunks)
            position = last_touch(grid, run.panel, visit, tiles - 1)
            ready = max(
                gemm.wave_us * (position // grid.slots + 1), body * (position + 1) / grid.total
            )
            free = max(free, ready) + piece
    return piece * run.chunks * (problem.tp - 1), free + topology.latency_us
