"""What happens when in one call: tiles, chunks, waits and the exposed tail, simulated.

Every slot of the persistent kernel takes each S-th cluster of the walk; a cluster takes as long as
the model of :mod:`fluxgen.predict` says of a wave, and waits for the chunks that it reads. The link
is that of the prediction: copies one after the other, stores as a queue of finished slabs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Transport
from fluxgen.core.problem import Problem
from fluxgen.core.topology import Topology
from fluxgen.predict import constants as c
from fluxgen.predict import predict, predict_baseline
from fluxgen.predict.gemm import Grid
from fluxgen.predict.link import copy_arrivals, copy_us, sm_copy_us, store_rate, transfer_us
from fluxgen.predict.overlap import fused_gemm
from fluxgen.predict.simulate import Span, Task, Timeline, simulate

LINK, REDUCE, LIBRARY = "link", "reduction", "library"
"""Tracks beside the slots."""


def walk(grid: Grid, panel: int) -> Iterator[tuple[int, int]]:
    """(first, last) visited slab of each cluster, in the order of ``tile_order.cuh``."""
    visit = 0
    for slabs in grid.groups:
        rows = slabs * grid.rows
        cluster_rows = -(-rows // grid.cluster_m)
        width = min(panel or grid.columns, grid.columns)
        for column in range(0, grid.columns, width):
            for row in range(cluster_rows):
                first = row * grid.cluster_m
                last = min(first + grid.cluster_m, rows) - 1
                for _ in range(min(width, grid.columns - column)):
                    yield visit + first // grid.rows, visit + last // grid.rows
        visit += slabs


def unfused_timeline(problem: Problem, topology: Topology) -> Timeline:
    """The collective and the library's GEMM, one after the other, as predicted."""
    found = predict_baseline(problem, topology)
    parts = [(LINK, "collective", "copy", found.comm_us), (LIBRARY, "GEMM", "gemm", found.gemm_us)]
    first, second = parts if problem.op.gathers else reversed(parts)
    timeline = simulate([Task(*first), Task(*second, after=(0,))])
    return replace(timeline, gemm_us=found.gemm_us)


def fused_timeline(
    problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
) -> Timeline:
    """A fused call of one rank.

    Raises:
        UsageError: nothing to compute, or tp is not the topology's world.
    """
    predict(problem, topology, kernel, run)  # its checks
    gemm = fused_gemm(problem, topology, kernel, run)
    grid = gemm.grid
    tile_us = (gemm.time_us - gemm.once_us) / grid.waves
    gathers = problem.op.gathers and problem.tp > 1
    spans: list[Span] = []
    arrived: dict[tuple[int, int], float] = {}
    shares = run.shares if run.chunk_axis is ChunkAxis.K else (1.0,)
    if gathers:
        arrived = _arrivals(problem, topology, run, spans)
    free = [c.LAUNCH_US] * grid.slots
    ended: list[tuple[float, int]] = []
    for i, (first, last) in enumerate(walk(grid, run.panel)):
        slot = i % grid.slots
        track, now = f"slot {slot}", free[slot]
        for chunk, share in enumerate(shares):  # a slab that comes whole is chunk 0
            need = max(
                (arrived.get((source, chunk), 0.0) for source in _sources(first, last, run.span)),
                default=0.0,
            )
            if need > now:
                spans.append(Span(track, f"waits for slab {last}", "wait", now, need))
                now = need
            name = f"tile of slab {last}" + (f", part {chunk}" if len(shares) > 1 else "")
            spans.append(Span(track, name, "tile", now, now + tile_us * share))
            now += tile_us * share
        free[slot] = now
        ended.append((now, last))
    end = max(free) + gemm.once_us
    if problem.op.scatters and problem.tp > 1:
        end = _drain(problem, topology, run, ended, end, spans)
    return Timeline(tuple(spans), end, gemm.time_us)


def _sources(first: int, last: int, span: int) -> range:
    return range(first * span, (last + 1) * span)


def _arrivals(
    problem: Problem, topology: Topology, run: RunConfig, spans: list[Span]
) -> dict[tuple[int, int], float]:
    """When each (source, part of K) is there; a slab cut in rows counts when all of it is."""
    slab = problem.m_local * problem.k * problem.signature.dtype.bytes
    by_k = run.chunk_axis is ChunkAxis.K
    arrived: dict[tuple[int, int], float] = {}
    if run.transport is Transport.SM_COPY:
        end = sm_copy_us(problem, topology)
        spans.append(Span(LINK, "copies by SMs", "copy", 0.0, end))
        return {(source, 0): end for source in range(problem.tp)}
    before = topology.latency_us
    for source, chunk, at in copy_arrivals(slab, run, topology, run.shares):
        spans.append(Span(LINK, f"slab {source}, chunk {chunk}", "copy", before, at))
        key = (source, chunk if by_k else 0)
        arrived[key] = max(arrived.get(key, 0.0), at)
        before = at
    return arrived


def _drain(
    problem: Problem, topology: Topology, run: RunConfig, ended: list[tuple[float, int]],
    end: float, spans: list[Span],
) -> float:  # fmt: skip
    """gemm_rs: tiles leave as they are finished, or chunks by copies, one after the other; then the
    reduction."""
    own = problem.tp // run.span - 1  # visited last, it stays here
    leaving = sorted((at, visit) for at, visit in ended if run.span > 1 or visit != own)
    rate, cost = store_rate(topology, run.transport), 0.0
    if run.transport is Transport.COPY_ENGINE_DRAIN:
        leaving, cost = _chunks(leaving, run.chunks), copy_us(topology)
    each = transfer_us(problem.comm_bytes, topology, rate) / max(1, len(leaving)) + cost
    began, free, first, last = None, 0.0, 0, 0
    for at, visit in leaving:
        if began is not None and at > free:
            spans.append(Span(LINK, _stores(first, last), "copy", began, free))
            began = None
        if began is None:
            began, free, first = at, at, visit
        free, last = free + each, visit
    if began is not None:
        spans.append(Span(LINK, _stores(first, last), "copy", began, free))
    begin = max(end, free + topology.latency_us)
    moved = problem.signature.out_dtype.bytes * problem.n * (problem.m + problem.m_local)
    took = c.REDUCE_US + moved / (topology.gpu.mem_gbs * c.REDUCE_RATE * 1e3)
    spans.append(Span(REDUCE, "reduction", "reduce", begin, begin + took))
    return begin + took


def _chunks(tiles: list[tuple[float, int]], chunks: int) -> list[tuple[float, int]]:
    """When each chunk of each slab is whole, from when its tiles have ended."""
    out = []
    for slab in dict.fromkeys(visit for _, visit in tiles):
        times = [at for at, visit in tiles if visit == slab]
        parts = range(1, chunks + 1)
        out += [(times[max(0, len(times) * part // chunks - 1)], slab) for part in parts]
    return sorted(out)


def _stores(first: int, last: int) -> str:
    return f"stores of slab {first}" if first == last else f"stores of slabs {first} to {last}"


def perfetto(named: dict[str, Timeline]) -> dict[str, object]:
    """Trace events as Perfetto reads them: a process a call, a thread a track."""
    events: list[dict[str, object]] = []
    for pid, (name, timeline) in enumerate(named.items(), 1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        tracks = sorted({span.track for span in timeline.spans}, key=track_order)
        for tid, track in enumerate(tracks, 1):
            about = {"ph": "M", "pid": pid, "tid": tid}
            events.append({**about, "name": "thread_name", "args": {"name": track}})
            events.append({**about, "name": "thread_sort_index", "args": {"sort_index": tid}})
            events += [
                {
                    "ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": tid,
                    "ts": round(span.begin_us, 3), "dur": round(span.end_us - span.begin_us, 3),
                }
                for span in timeline.spans if span.track == track
            ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def track_order(track: str) -> tuple[int, int, str]:
    """The link first, then slots by number, then the rest."""
    if track == LINK:
        return 0, 0, track
    kind, _, number = track.partition(" ")
    return (1, int(number), track) if kind == "slot" else (2, 0, track)
