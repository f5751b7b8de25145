"""Persistent kernels, which tile the rows of one rank, or of ``span`` ranks, as a slab."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Transport
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, ceil_div
from fluxgen.core.topology import Topology
from fluxgen.kernels.family import Family, panel_limit
from fluxgen.kernels.transports import default_transport

MAX_CHUNKS = 16
"""Chunks per rank: the flag block of one source has so many entries (``protocol.cuh``)."""
K_CHUNK_UNIT = 128
"""K chunks end at multiples of this many elements: a multiple of every ``TILE_K``."""
K_CHUNKS = (2, 3, 4, 5)
"""Numbers of K chunks worth trying: the first is a half to a sixteenth of K."""

PANELS = (0, 1, 2, 4, 8, 16)
"""Panel widths worth trying, in clusters along n; 0: all."""


class SlabFamily(Family):
    """What all of them share."""

    whole = False

    def why_illegal_run(
        self, problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
    ) -> str | None:
        """What tiles of one rank's rows, or of ``span`` ranks', refuse."""
        world, rows = problem.tp, problem.m_local
        if run.split != 1:
            return f"split {run.split}: only flat kernels split k; use 1"
        if run.span < 1 or world % run.span or any(group % run.span for group in run.groups):
            return f"span {run.span} does not divide the {world} ranks and every group {run.groups}"
        if run.transport.in_one_shot or run.transport.packed:
            name = run.transport.value
            return f"transport {name}: only flat kernels do that; use peer_store"
        if run.span > 1 and problem.op.scatters and run.chunks > 1:
            return f"span {run.span}: {problem.op.value} then has one chunk, not {run.chunks}"
        reason = self.why_illegal_span(problem, kernel, run)
        if reason:
            return reason
        slab = rows * run.span
        if kernel.tile_m > 64 and kernel.tile_m >= 2 * slab:
            return (
                f"tiles of {kernel.tile_m} rows are at least half padding for slabs of {slab} rows"
            )
        columns = panel_limit(problem, kernel)
        if run.panel > columns:
            return f"panel {run.panel} is wider than the {columns} clusters along n"
        if not 1 <= run.chunks <= MAX_CHUNKS:
            return f"chunks {run.chunks} is outside 1..{MAX_CHUNKS}"
        if run.chunk_axis is ChunkAxis.K:
            if problem.op.scatters:
                return f"chunk axis k: an output slab has no k; {problem.op.value} cuts rows"
            if run.chunks > ceil_div(problem.k, K_CHUNK_UNIT):
                return f"{run.chunks} k chunks of at least {K_CHUNK_UNIT} do not fit k={problem.k}"
        elif run.chunks > 1 and ceil_div(rows, kernel.tile_m) < run.chunks:
            return f"{run.chunks} row chunks of {kernel.tile_m} rows do not fit m/tp = {rows}"
        cluster = kernel.cluster_m * kernel.cluster_n
        if run.sms and not cluster <= run.sms <= topology.gpu.sm_count:
            return f"sms {run.sms} is outside {cluster}..{topology.gpu.sm_count}"
        return None

    def why_illegal_span(
        self, problem: Problem, kernel: KernelConfig, run: RunConfig
    ) -> str | None:
        """Why a kernel cannot take slabs of several ranks, or None."""
        del problem, kernel, run
        return None

    def spans(self, problem: Problem, kernel: KernelConfig) -> tuple[int, ...]:
        """1, and the fewest ranks whose rows fill whole tiles."""
        if problem.m_local % kernel.tile_m == 0:
            return (1,)
        filled = (
            span
            for span in range(2, problem.tp + 1)
            if problem.tp % span == 0 and problem.m_local * span % kernel.tile_m == 0
        )
        return (1, *list(filled)[:1])

    def runs(
        self, problem: Problem, topology: Topology, kernel: KernelConfig
    ) -> Iterator[RunConfig]:
        """All of groups, panels, cuts and spans; and the other transports, which have few."""
        transport = default_transport(problem.signature, topology.link)
        groupings, spans = group_choices(problem.op, problem.tp), self.spans(problem, kernel)
        cuts = [(ChunkAxis.M, chunks) for chunks in (1, 2, 4, 8)]
        if problem.op.gathers:
            cuts += [(ChunkAxis.K, chunks) for chunks in K_CHUNKS]
        for groups, panel, (axis, chunks), span in product(groupings, PANELS, cuts, spans):
            yield RunConfig(groups, panel, axis, chunks, 0, transport, span)
        if problem.op.replicates:
            if topology.islands > 1:
                for groups, panel, (axis, chunks) in product(groupings, (0, 4), cuts):
                    yield RunConfig(groups, panel, axis, chunks, 0, Transport.COPY_ENGINE_RING)
            # The SM copy brings all slabs at once: neither an order nor chunks to choose.
            for panel, span in product(PANELS, spans):
                yield RunConfig((problem.tp,), panel, transport=Transport.SM_COPY, span=span)
        elif transport is not Transport.PEER_STORE:
            # Stores of the kernel too: for slabs so short that a copy costs more than its bytes.
            for groups in groupings:
                yield RunConfig(groups, transport=Transport.PEER_STORE)


def group_choices(op: Op, world: int) -> tuple[tuple[int, ...], ...]:
    """Arrival groupings worth trying: one group, small first (AG) or last (RS), rank-major."""
    doubling: list[int] = []
    left, size = world, 1
    while left > 0:
        take = min(size, left)
        doubling.append(take)
        left -= take
        size *= 2
    if len(doubling) > 1 and doubling[-1] < doubling[-2]:
        doubling[-2:] = [doubling[-2] + doubling[-1]]
    shapes: list[tuple[int, ...]] = [(world,)]
    if world > 1:
        shapes += [tuple(doubling), (1, world - 1)]
    if world > 2:
        shapes += [(1,) * world]
    if world > 4:  # the first wave's slabs in one group, that their K chunks come together
        half = world // 2
        shapes += [(1, half - 1, world - half), (1, 1, 2, world - 4)]
    if world > 3:
        shapes += [(world // 2, world - world // 2), (2,) * (world // 2) + (1,) * (world % 2)]
    if op.scatters:
        shapes = [shape[::-1] for shape in shapes]
    return tuple(dict.fromkeys(shapes))
