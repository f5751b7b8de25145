"""The search space: which kernels may be compiled, which run-time knobs may be set on them.

Every constraint is stated once, in :func:`why_illegal_kernel` (what the compiler or the chip
refuses) or in :func:`why_illegal` (what a problem on a topology refuses), and its reason is the
text returned. ``None`` means legal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, product

from fluxgen.codegen import ampere, ampere_flat, flat
from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.problem import MAX_WORLD, Op, Problem, Signature, ceil_div
from fluxgen.core.topology import Gpu, LinkKind, Topology

TILE_M = (64, 128, 256)
TILE_N = (64, 96, 128, 144, 160, 192, 224, 256)
TILE_K = (64, 128)
CLUSTERS = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
MIN_STAGES = 3
"""Fewer stages cannot hide the latency of a TMA load behind one MMA."""
MAX_STAGES = 12
MAX_CHUNKS = 16
"""Chunks per rank: the flag block of one source has so many entries (``protocol.cuh``)."""
K_CHUNK_UNIT = 128
"""K chunks end at multiples of this many elements: a multiple of every ``TILE_K``."""
MAX_SPAN_ACCUMULATORS = 160
"""Accumulator registers above which gemm_rs is compiled without ``span`` (it would spill)."""
TMA_ALIGN = 8
"""16-bit elements in the 16 bytes that TMA strides and addresses must be multiples of."""


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


def why_illegal_kernel(signature: Signature, gpu: Gpu, kernel: KernelConfig) -> str | None:
    """Why ``kernel`` cannot be compiled for ``signature`` on ``gpu``, or None if it can."""
    if gpu.cc != 90 and not 80 <= gpu.cc < 90:
        return (
            f"{gpu.name} is {gpu.arch}: kernels are generated for sm80 to sm89 and for sm90; use "
            "the unfused path"
        )
    if signature.epilogue != "none":
        return f"epilogue {signature.epilogue!r}: kernels have no fused epilogue yet"
    if signature.dtype is not signature.out_dtype:
        return (
            f"output type {signature.out_dtype.value} differs from input type "
            f"{signature.dtype.value}: kernels write the input type"
        )
    if gpu.cc != 90 and kernel.schedule is Schedule.FLAT:
        return ampere_flat.why_illegal(kernel, gpu.smem_kb)
    if gpu.cc != 90:
        return ampere.why_illegal(kernel, gpu.smem_kb, signature.b_layout == "kn")
    if kernel.schedule is Schedule.FLAT:
        return flat.why_illegal_kernel(kernel, gpu.smem_kb)
    if kernel.schedule not in (Schedule.PINGPONG, Schedule.COOPERATIVE):
        return (
            f"schedule {kernel.schedule.value} is Ampere's; on sm90 use pingpong, cooperative or "
            "flat"
        )
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
        return f"cooperative splits tile_m over two warpgroups of 64 rows; {kernel.tile_m} < 128"
    if accumulator_registers(kernel) > 208:
        return (
            f"accumulators take {accumulator_registers(kernel)} of a thread's 240 registers: "
            "over 208 spills"
        )
    if kernel.stages and not MIN_STAGES <= kernel.stages <= MAX_STAGES:
        return f"stages {kernel.stages} is outside {MIN_STAGES}..{MAX_STAGES}"
    fits = stage_count(
        KernelConfig(
            kernel.tile_m,
            kernel.tile_n,
            kernel.tile_k,
            kernel.cluster_m,
            kernel.cluster_n,
            kernel.schedule,
        ),
        gpu.smem_kb,
    )
    if max(kernel.stages, MIN_STAGES) > fits:
        return (
            f"{max(kernel.stages, MIN_STAGES)} stages of {stage_bytes(kernel)} bytes do not fit "
            f"{gpu.smem_kb} KiB of shared memory ({fits} do)"
        )
    return None


def kernel_space(signature: Signature, gpu: Gpu) -> Iterator[KernelConfig]:
    """Every legal kernel (sm90: with automatic stages), in a fixed order; flat ones last."""
    if gpu.cc != 90:
        for kernel in chain(ampere.kernels(), ampere_flat.kernels()):
            if why_illegal_kernel(signature, gpu, kernel) is None:
                yield kernel
        return
    for tile_m, tile_n, tile_k, cluster, schedule in product(
        TILE_M, TILE_N, TILE_K, CLUSTERS, (Schedule.PINGPONG, Schedule.COOPERATIVE)
    ):
        kernel = KernelConfig(tile_m, tile_n, tile_k, *cluster, schedule)
        if why_illegal_kernel(signature, gpu, kernel) is None:
            yield kernel
    yield from (k for k in flat.kernels() if why_illegal_kernel(signature, gpu, k) is None)


def why_illegal_problem(problem: Problem) -> str | None:
    """Why no fused kernel can take ``problem``, or None: the full constraint, with values."""
    element_bytes = problem.signature.dtype.bytes
    if problem.m == 0 or problem.k == 0:
        return f"m={problem.m}, k={problem.k}: nothing to launch; a zero size is never launched"
    if problem.m % problem.tp and problem.op is not Op.GEMM_AR:
        return f"m={problem.m} is not a multiple of tp={problem.tp}; pad m or use the unfused path"
    for name, value in (("n", problem.n), ("k", problem.k)):
        if value % TMA_ALIGN:
            return (
                f"{name}={value}: TMA needs rows of a multiple of 16 bytes, {name} % {TMA_ALIGN} "
                f"== 0 for {element_bytes}-byte elements; pad {name} or use the unfused path"
            )
    return None


def why_illegal(
    problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
) -> str | None:
    """Why ``kernel`` with ``run`` cannot compute ``problem`` on ``topology``, or None."""
    reason = why_illegal_kernel(problem.signature, topology.gpu, kernel) or why_illegal_problem(
        problem
    )
    if reason:
        return reason
    world = problem.tp
    if world != topology.world or world > MAX_WORLD:
        return f"tp={world} is not the topology's world {topology.world} (at most {MAX_WORLD})"
    if run.groups and (sum(run.groups) != world or min(run.groups) < 1):
        return f"groups {run.groups} do not sum to the {world} ranks with at least one in each"
    if kernel.schedule is Schedule.FLAT and topology.gpu.cc != 90 and run.split != 1:
        return f"split {run.split}: flat sm80 kernels split k over the warps of a block; use 1"
    return _why_illegal_transport(problem, topology, run) or (
        flat.why_illegal(problem, kernel, run)
        if kernel.schedule is Schedule.FLAT
        else _why_illegal_tiles(problem, topology, kernel, run)
    )


def _why_illegal_tiles(
    problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
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
    if run.span > 1 and problem.op.scatters and topology.gpu.cc == 90:
        unit = epilogue_tile(kernel)[0]
        if accumulator_registers(kernel) > MAX_SPAN_ACCUMULATORS:
            return f"span {run.span}: the subtile loop of gemm_rs spills on {kernel.name}"
        if rows * run.span != kernel.tile_m or rows % unit:
            return (
                f"span {run.span} with slabs of {rows} rows: gemm_rs needs span slabs to be one "
                f"tile of {kernel.tile_m} rows, each a multiple of {unit}, in one chunk"
            )
    slab = rows * run.span
    if kernel.tile_m > 64 and kernel.tile_m >= 2 * slab:
        return f"tiles of {kernel.tile_m} rows are at least half padding for slabs of {slab} rows"
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


def _why_illegal_transport(problem: Problem, topology: Topology, run: RunConfig) -> str | None:
    carriers = TRANSPORTS[problem.op]
    if run.transport not in carriers:
        valid = " or ".join(transport.value for transport in carriers)
        return f"transport {run.transport.value} does not carry {problem.op.value}; use {valid}"
    if topology.link is LinkKind.HOST and run.transport not in HOST_TRANSPORTS:
        valid = ", ".join(transport.value for transport in HOST_TRANSPORTS)
        return (
            f"transport {run.transport.value}: over the host's memory a kernel would read or write "
            f"its whole matrix there; use one of {valid}"
        )
    if run.transport.pushes and problem.signature.return_gathered:
        name = run.transport.value
        return f"transport {name}: the gathered A is the workspace's; use copy_engine_pull"
    if run.transport is Transport.COPY_ENGINE_RING and problem.tp % 2:
        return (
            f"transport copy_engine_ring: {problem.tp} ranks do not halve over sockets; use a pull"
        )
    if run.transport is Transport.SM_COPY and run.chunks > 1:
        return "chunks: the SM copy brings whole slabs, all at once; use 1"
    if problem.m % problem.tp and not run.transport.in_one_shot:
        return (
            f"m={problem.m} is not a multiple of tp={problem.tp}: only peer_broadcast and "
            "broadcast_packets reduce rows that the ranks do not share evenly"
        )
    return None


AG_TRANSPORTS = (
    Transport.COPY_ENGINE_PUSH, Transport.COPY_ENGINE_PULL, Transport.COPY_ENGINE_RING,
    Transport.SM_COPY,
)  # fmt: skip
"""What carries ag_gemm."""

HOST_TRANSPORTS = (
    Transport.COPY_ENGINE_PULL, Transport.SM_COPY, Transport.PEER_STORE, Transport.PEER_BROADCAST,
)  # fmt: skip
"""What needs of the workspace, where that is host memory, no more than crosses the link anyway."""

RS_TRANSPORTS = (Transport.PEER_STORE, Transport.COPY_ENGINE_DRAIN)
"""What carries gemm_rs."""

TRANSPORTS = {
    Op.AG_GEMM: AG_TRANSPORTS,
    Op.A2A_GEMM: (Transport.COPY_ENGINE_PUSH,),
    Op.GEMM_RS: (*RS_TRANSPORTS, Transport.PEER_PACKETS),
    Op.GEMM_AR: (*RS_TRANSPORTS, Transport.PEER_BROADCAST, Transport.BROADCAST_PACKETS),
    Op.GEMM_A2A: RS_TRANSPORTS,
}
"""What carries each op."""


K_CHUNKS = (2, 3, 4, 5)
"""Numbers of K chunks worth trying: the first is a half to a sixteenth of K."""

PANELS = (0, 1, 2, 4, 8, 16)
"""Panel widths worth trying, in clusters along n; 0: all."""


def panel_limit(problem: Problem, kernel: KernelConfig) -> int:
    """The widest panel: clusters along n."""
    return ceil_div(problem.n, kernel.cluster_n * kernel.tile_n)


def default_transport(signature: Signature, link: LinkKind) -> Transport:
    """The transport an op uses over a link unless a record says otherwise.

    Over PCIe slabs are pulled and drained: what is measured there, with the host's memory as the
    peers, is a pull, and stores of a kernel back up into it.
    """
    if signature.op.scatters:
        drains = link is LinkKind.PCIE
        return Transport.COPY_ENGINE_DRAIN if drains else Transport.PEER_STORE
    pulls = signature.op is Op.AG_GEMM and (signature.return_gathered or link.over_pcie)
    return Transport.COPY_ENGINE_PULL if pulls else Transport.COPY_ENGINE_PUSH


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


def span_choices(problem: Problem, kernel: KernelConfig) -> tuple[int, ...]:
    """Spans worth trying: 1, and the fewest ranks whose rows fill whole tiles; flat: all."""
    if kernel.schedule is Schedule.FLAT:
        return (problem.tp,)
    if problem.m_local % kernel.tile_m == 0:
        return (1,)
    filled = (
        span
        for span in range(2, problem.tp + 1)
        if problem.tp % span == 0 and problem.m_local * span % kernel.tile_m == 0
    )
    return (1, *list(filled)[:1])


_FLAT_TRANSPORTS = {
    Op.A2A_GEMM: (Transport.COPY_ENGINE_PUSH,),
    Op.GEMM_RS: (Transport.PEER_STORE, Transport.PEER_PACKETS),
    Op.GEMM_A2A: (Transport.PEER_STORE,),
    Op.GEMM_AR: (Transport.PEER_BROADCAST, Transport.BROADCAST_PACKETS, Transport.PEER_STORE),
}


def run_space(problem: Problem, topology: Topology, kernel: KernelConfig) -> Iterator[RunConfig]:
    """Every legal run-time configuration of ``kernel`` for ``problem``, in a fixed order."""
    proposed = _proposed_runs(problem, topology, kernel)
    return (run for run in proposed if why_illegal(problem, topology, kernel, run) is None)


def _proposed_runs(
    problem: Problem, topology: Topology, kernel: KernelConfig
) -> Iterator[RunConfig]:
    """All worth trying, legal or not."""
    transport = default_transport(problem.signature, topology.link)
    if kernel.schedule is Schedule.FLAT:
        carriers = _FLAT_TRANSPORTS.get(problem.op, (transport, Transport.SM_COPY))
        for moved, split in product(carriers, flat.SPLITS):
            yield RunConfig((problem.tp,), transport=moved, span=problem.tp, split=split)
        return
    groupings, spans = group_choices(problem.op, problem.tp), span_choices(problem, kernel)
    cuts = [(ChunkAxis.M, chunks) for chunks in (1, 2, 4, 8)]
    if problem.op.gathers:
        cuts += [(ChunkAxis.K, chunks) for chunks in K_CHUNKS]
    for groups, panel, (axis, chunks), span in product(groupings, PANELS, cuts, spans):
        yield RunConfig(groups, panel, axis, chunks, 0, transport, span)
    if problem.op is Op.AG_GEMM:
        if topology.islands > 1:
            for groups, panel, (axis, chunks) in product(groupings, (0, 4), cuts):
                yield RunConfig(groups, panel, axis, chunks, 0, Transport.COPY_ENGINE_RING)
        # The SM copy brings all slabs at once: neither an order nor chunks to choose.
        for panel, span in product(PANELS, spans):
            yield RunConfig((problem.tp,), panel, transport=Transport.SM_COPY, span=span)
    elif transport is not Transport.PEER_STORE:
        # Stores of the kernel as well: for slabs so short that a copy costs more than its bytes.
        for groups in groupings:
            yield RunConfig(groups, transport=Transport.PEER_STORE)
