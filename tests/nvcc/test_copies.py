"""The copies of a call as C queues them: in the model's order, each byte once, to its place."""

from __future__ import annotations

import ctypes as ct
import itertools
from collections import Counter
from dataclasses import replace

import pytest

from fluxgen.compiler.nvcc import Source
from fluxgen.compiler.store import Store
from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Transport
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.native import abi
from fluxgen.native.arguments import copy_args
from fluxgen.native.workspace import chunk_size, group_view, sizes
from fluxgen.predict.link import copy_order, crossing

pytestmark = pytest.mark.nvcc

TEXT = """
#include "fluxgen/support/copies.cuh"
extern "C" __attribute__((visibility("default"))) int64_t copies_of(fluxgen_copy_args const* args,
                                                                    int64_t* out) {
  int chunks = 0;
  if (fluxgen::check_copies(*args, &chunks, nullptr, 0) != FLUXGEN_OK) return -1;
  int const count = fluxgen::count_copies(*args, chunks);
  for (int i = 0; i < count; ++i) {
    fluxgen::SlabCopy const c = fluxgen::slab_copy(*args, chunks, i);
    int64_t const row[] = {c.peer, c.chunk, c.last, int64_t(c.awaited),
                           reinterpret_cast<int64_t>(c.to), reinterpret_cast<int64_t>(c.from),
                           int64_t(c.width), int64_t(c.rows), int64_t(c.to_pitch),
                           int64_t(c.from_pitch), c.awaited_chunk};
    for (int64_t value : row) *out++ = value;
  }
  return count;
}
"""
FIELDS = 11
BASE, X, GATHERED = 1 << 40, 1 << 44, 1 << 45
KERNEL = KernelConfig(128, 128, 64)


@pytest.fixture(scope="module")
def library(tmp_path_factory, toolchain):
    store = Store(tmp_path_factory.mktemp("store") / "s")
    built = store.build(Source.of("copies_sm90", TEXT, "sm90", abi=str(abi.ABI_VERSION)), toolchain)
    found = ct.CDLL(str(built.path))
    found.copies_of.restype = ct.c_int64
    return found


def copies(library, problem, run, rank, padding):
    parts = sizes(problem, *Transport)
    group = group_view(rank, [BASE * (peer + 1) for peer in range(problem.tp)], parts, 1.0, 0)
    args = copy_args(group, problem, KERNEL, run)
    args.gathered, args.x = GATHERED, X
    args.row_stride_bytes += padding
    out = (ct.c_int64 * (FIELDS * abi.MAX_WORLD * abi.MAX_CHUNKS))()
    count = library.copies_of(ct.byref(args), out)
    assert count >= 0
    rows = [tuple(out[i * FIELDS : (i + 1) * FIELDS]) for i in range(count)]
    return parts, args.row_stride_bytes, rows


RUNS = [
    RunConfig(groups, 0, axis, chunks, 0, transport)
    for groups, (axis, chunks), transport in itertools.product(
        [(), (1, 3), (2, 2), (1, 1, 2)],
        [(ChunkAxis.M, 1), (ChunkAxis.M, 2), (ChunkAxis.K, 2), (ChunkAxis.K, 4)],
        [Transport.COPY_ENGINE_PULL, Transport.COPY_ENGINE_PUSH],
    )
]


@pytest.mark.parametrize(
    "run", RUNS, ids=lambda r: f"{r.groups}-{r.chunk_axis}{r.chunks}-{r.transport}"
)
@pytest.mark.parametrize(("rows", "k", "padding"), [(256, 1024, 0), (129, 1000, 64)])
def test_every_byte_goes_to_its_place_once_in_the_models_order(library, run, rows, k, padding):
    world, rank = 4, 1
    problem = Problem(Signature.of("ag_gemm"), rows * world, 64, k, world)
    pushes = run.transport is Transport.COPY_ENGINE_PUSH
    padding = padding if pushes else 0  # what is pulled was staged without
    parts, stride, found = copies(library, problem, run, rank, padding)
    slab, width = rows * k * 2, k * 2
    step = -1 if pushes else 1  # pushed first to the rank whose next slab this is
    made = len({chunk for _, chunk, *_ in found})
    want = [(rank + step * v) % world for v, _, _ in copy_order(run, made, world)]
    assert [peer for peer, *_ in found] == want
    assert [c for _, c, *_ in found] == [c for _, c, _ in copy_order(run, made, world)]
    moved = {peer: set() for peer in range(world) if peer != rank}
    ready, ended = 0, set()
    for peer, chunk, last, awaited, to, source, piece, pieces, to_pitch, from_pitch, _ in found:
        ready |= awaited
        assert ready >> peer & 1, "its peer has been waited for"
        assert peer not in ended
        if last:
            ended.add(peer)
        matrix = BASE * (peer + 1) + parts.gathered_offset if pushes else GATHERED
        to_slab = matrix + (rank if pushes else peer) * slab
        from_slab = X if pushes else BASE * (peer + 1) + abi.DATA_OFFSET
        if pieces == 1 and piece > width:  # several rows in one
            assert stride == width or not pushes
        for i in range(pieces):
            at, behind = to - to_slab + i * to_pitch, source - from_slab + i * from_pitch
            assert 0 <= at <= slab - piece
            for row in range(at // width, (at + piece - 1) // width + 1):
                low, high = max(at, row * width), min(at + piece, (row + 1) * width)
                assert behind + low - at == row * (stride if pushes else width) + low - row * width
                part = (row, low - row * width, high - row * width)
                assert part not in moved[peer]
                moved[peer].add(part)
        assert chunk < abi.MAX_CHUNKS
    assert ended == set(moved)
    for parts_of in moved.values():
        by_row = {}
        for row, low, high in sorted(parts_of):
            assert by_row.get(row, 0) == low, "no hole, nothing twice"
            by_row[row] = high
        assert by_row == dict.fromkeys(range(rows), width)


@pytest.mark.parametrize(
    "run",
    [replace(r, transport=Transport.COPY_ENGINE_RING) for r in RUNS[::2]],
    ids=lambda r: f"{r.groups}-{r.chunk_axis}{r.chunks}",
)
@pytest.mark.parametrize(("rows", "k", "padding"), [(256, 1024, 0), (129, 1000, 64)])
def test_slabs_are_forwarded_as_the_rank_before_walks_them(library, run, rows, k, padding):
    """Own slab out of x, the others out of the matrix that they came into, to the same place."""
    world, rank = 4, 1
    problem = Problem(Signature.of("ag_gemm"), rows * world, 64, k, world)
    parts, stride, found = copies(library, problem, run, rank, padding)
    slab, width = rows * k * 2, k * 2
    made = len({chunk for _, chunk, *_ in found})
    order = copy_order(run, made, world)
    assert [(source, chunk) for source, chunk, *_ in found] == [
        ((rank - 1 + visit) % world, chunk) for visit, chunk, _ in order
    ]
    moved = dict.fromkeys(((rank + i) % world for i in range(world - 1)), 0)
    for i, (source, _, _, awaited, to, at, piece, pieces, to_pitch, pitch, _) in enumerate(found):
        own = source == rank
        assert awaited == (1 << source if i == 0 or not own else 0)
        to_slab = BASE * rank + parts.gathered_offset + source * slab  # of rank 0, the one before
        from_slab = X if own else BASE * (rank + 1) + parts.gathered_offset + source * slab
        row, column = divmod(to - to_slab, width)
        assert at - from_slab == row * (stride if own else width) + column
        if pieces > 1:
            assert (to_pitch, pitch) == (width, stride if own else width)
        moved[source] += piece * pieces
    assert set(moved.values()) == {slab}


class Machine:
    """Ranks on sockets: each rank sends and receives one copy at a time, and so does each direction
    of the link between two sockets. Copies are those that C queues; a rank's run one by one."""

    def __init__(self, library, problem, run, islands: int, gbs: float, socket_gbs: float):
        self.world, self.ring = problem.tp, run.transport is Transport.COPY_ENGINE_RING
        self.island = [rank * islands // self.world for rank in range(self.world)]
        self.gbs, self.socket_gbs = gbs, socket_gbs
        self.queues = [copies(library, problem, run, r, 0)[2] for r in range(self.world)]
        self.free: dict[object, float] = {}
        self.arrived: dict[tuple[int, int, int], float] = {}  # rank, slab, chunk
        self.bytes: Counter[tuple[int, int]] = Counter()  # rank, slab
        self.crossed: dict[tuple[int, int, int], list[int]] = {}  # slab, chunk, to which socket

    def ends(self, rank: int, slab: int) -> tuple[int, int]:
        """(from, to) of a copy."""
        return (rank, (rank - 1) % self.world) if self.ring else (slab, rank)

    def run(self, late: int | None = None) -> float:
        """Do all copies, always the one that can begin first; when the last has ended, in us.

        One rank may begin late, after all that the others can do without it.
        """
        at, now = [0] * self.world, [1e6 * (rank == late) for rank in range(self.world)]
        while any(i < len(q) for i, q in zip(at, self.queues, strict=True)):
            able = []
            for rank, queue in enumerate(self.queues):
                if at[rank] == len(queue):
                    continue
                slab, chunk, *_, width, pieces, _, _, needed = queue[at[rank]]
                sender, receiver = self.ends(rank, slab)
                crosses = self.island[sender] != self.island[receiver]
                used = [("out", sender), ("in", receiver)]
                used += [("socket", self.island[receiver])] * crosses
                begin = max(now[rank], *(self.free.get(resource, 0.0) for resource in used))
                if self.ring and slab != rank:
                    if (rank, slab, needed) not in self.arrived:
                        continue  # it has not come yet
                    begin = max(begin, self.arrived[rank, slab, needed])
                rate = min(self.gbs, self.socket_gbs) if crosses else self.gbs
                moved = width * pieces
                able.append((begin, rank, slab, chunk, moved, moved / rate / 1e3, used, crosses))
            assert able, "every rank waits for another: a deadlock"
            begin, rank, slab, chunk, moved, took, used, crosses = min(able, key=lambda c: c[:2])
            now[rank] = begin + took
            at[rank] += 1
            self.free.update(dict.fromkeys(used, now[rank]))
            receiver = self.ends(rank, slab)[1]
            self.bytes[receiver, slab] += moved
            if self.ring and slab != rank:
                assert self.bytes[receiver, slab] <= self.bytes[rank, slab], "sent before it came"
            self.arrived[receiver, slab, chunk] = now[rank]
            if crosses:
                self.crossed.setdefault((slab, chunk, self.island[receiver]), []).append(receiver)
        return max(now)


@pytest.mark.parametrize(
    "run",
    [
        RunConfig(chunks=2),
        RunConfig((1, 3, 4), 0, ChunkAxis.K, 2),
        RunConfig((1, 1, 6), 0, ChunkAxis.K, 3),
        RunConfig((), 0, ChunkAxis.K, 2),
    ],
)
@pytest.mark.parametrize(
    ("world", "islands"), [(2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4)]
)
def test_slabs_come_as_they_are_walked_over_any_sockets(library, run, world, islands):
    """All come, with no deadlock; round the ring each crosses to each socket once, which is faster.

    As much faster as the prediction says, or more: pulls also wait for each other's turns.
    """
    run = replace(run, groups=run.groups if world == 8 else ())
    problem = Problem(Signature.of("ag_gemm"), 256 * world, 64, 4096, world)
    took = {}
    for transport in (Transport.COPY_ENGINE_PULL, Transport.COPY_ENGINE_RING):
        moved = replace(run, transport=transport)
        machine = Machine(library, problem, moved, islands, 25.0, 40.0)
        took[transport] = machine.run()
        whole = {}
        for (rank, slab, _), at in machine.arrived.items():
            whole[rank, slab] = max(at, whole.get((rank, slab), 0.0))
        for rank in range(world):
            order = [(rank + visit) % world for visit in range(1, world)]
            times = [whole[rank, slab] for slab in order]
            assert times == sorted(times)
        if transport is Transport.COPY_ENGINE_RING:
            assert all(len(receivers) == 1 for receivers in machine.crossed.values())
    for late in range(world):
        Machine(library, problem, moved, islands, 25.0, 40.0).run(late)
    pull, ring = took[Transport.COPY_ENGINE_PULL], took[Transport.COPY_ENGINE_RING]
    slabs_us = problem.comm_bytes / 25e3
    if run.chunk_axis is ChunkAxis.M:
        assert ring == pytest.approx(slabs_us, rel=0.1 if world > 2 else 0.01)
    topology = replace(Topology.of("l20", "pcie", world, islands), bandwidth_gbs=25.0)
    assert pull >= 0.95 * crossing(topology) * slabs_us
    assert (pull > 1.2 * ring) == (islands > 1 and world > 2)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("rows", [128, 300, 513])
def test_a_gemm_rs_is_drained_chunk_by_chunk(library, rows, chunks):
    """Owner by owner in the order of the walk, each byte once, from the outbox to its place."""
    world, rank, n = 4, 1, 136
    problem = Problem(Signature.of("gemm_rs"), rows * world, n, 64, world)
    run = RunConfig((4,), chunks=chunks, transport=Transport.COPY_ENGINE_DRAIN)
    parts, _, found = copies(library, problem, run, rank, 0)
    slab, size = rows * n * 2, chunk_size(problem, KERNEL, run) or rows
    made = -(-rows // size)
    assert [(peer, chunk) for peer, chunk, *_ in found] == [
        ((rank + visit) % world, chunk) for visit in range(1, world) for chunk in range(made)
    ]
    inbox = parts.gathered_offset + parts.gathered
    for i, copy in enumerate(found):
        peer, chunk, last, awaited, to, source, piece, pieces, *_, needed = copy
        begin = chunk * size * n * 2
        assert pieces == 1
        assert piece == min(size * n * 2, slab - begin)
        assert to == BASE * (peer + 1) + inbox + rank * slab + begin
        assert source == BASE * (rank + 1) + inbox + parts.drained + peer * slab + begin
        assert (awaited, needed) == (1 << peer, chunk), "each copy waits for its chunk"
        assert last == (i == len(found) - 1)


def test_what_cannot_be_drained_is_refused(library):
    problem = Problem(Signature.of("gemm_rs"), 512, 128, 64, 4)
    run = RunConfig((4,), transport=Transport.COPY_ENGINE_DRAIN)
    group = abi.Group(world=4, rank=1, drained_bytes=512 * 128 * 2)
    for peer in range(4):
        group.peers[peer] = BASE * (peer + 1)
    out = (ct.c_int64 * (FIELDS * abi.MAX_WORLD * abi.MAX_CHUNKS))()
    args = copy_args(group, problem, KERNEL, run)
    assert library.copies_of(ct.byref(args), out) == 3
    for field, value in [("kind", 4), ("chunk_axis", 1), ("rows", 129), ("row_bytes", 250)]:
        args = copy_args(group, problem, KERNEL, run)
        setattr(args, field, value)
        assert library.copies_of(ct.byref(args), out) == -1, field


def test_alone_nothing_is_copied(library):
    problem = Problem(Signature.of("ag_gemm"), 128, 64, 256, 1)
    for run in (RunConfig(), RunConfig(transport=Transport.COPY_ENGINE_PUSH)):
        assert copies(library, problem, run, 0, 0)[2] == []
