"""When bytes arrive: the transports of the fused kernels, and NCCL's collectives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fluxgen.core.config import ChunkAxis, RunConfig, Transport
from fluxgen.core.problem import Problem
from fluxgen.core.topology import LinkKind, Topology
from fluxgen.predict import constants as c


def transfer_us(size: float, topology: Topology, rate: float = 1.0) -> float:
    """Microseconds that ``size`` bytes take at ``rate`` of the topology's bandwidth."""
    return size / (topology.bandwidth_gbs * 1e3 * rate)


def copy_us(topology: Topology) -> float:
    """Microseconds that each copy of a copy engine takes beside its bytes."""
    return c.COPY_PCIE_US if topology.link.over_pcie else c.COPY_US


def staging_us(slab_bytes: float, topology: Topology) -> float:
    """Before a peer can have a slab: where GPUs meet in the host's memory, it goes there first."""
    return transfer_us(slab_bytes, topology) if topology.link is LinkKind.HOST else 0.0


def sm_copy_us(problem: Problem, topology: Topology) -> float:
    """When the SM copy of an ag_gemm has all slabs: one kernel, before the GEMM."""
    slab = problem.m_local * problem.k * problem.signature.dtype.bytes
    moved = staging_us(slab, topology) + transfer_us(problem.comm_bytes, topology)
    return topology.latency_us + moved + c.LAUNCH_US


def crossing(topology: Topology) -> float:
    """How much longer all ranks' slabs take at once, where each crosses to every other socket.

    Of W ranks on S sockets, the W/S of one receive W - W/S slabs each through the link between
    sockets, in the time in which W - 1 come over a rank's own.
    """
    world, here = topology.world, topology.world // topology.islands
    if topology.islands == 1 or topology.link is not LinkKind.PCIE:
        return 1.0
    across = here * (world - here) / c.SOCKET_GBS
    return max(1.0, across / ((world - 1) / topology.bandwidth_gbs))


def copy_order(run: RunConfig, chunks: int, world: int) -> list[tuple[int, int, bool]]:
    """(visit, chunk, whether it is the whole slab) of each remote chunk, in the transport's order.

    Slabs come in ring order (own + 1, own + 2, ...). M chunks come slab by slab; K chunks of the
    slabs that are cut (:attr:`RunConfig.cut`) piece by piece, the first piece of each, then the
    second, and after them the later slabs whole, each as chunk 0.
    """
    if run.chunk_axis is ChunkAxis.M or chunks == 1:
        return [(v, chunk, chunks == 1) for v in range(1, world) for chunk in range(chunks)]
    cut = run.cut or world
    pieces = [(v, chunk, False) for chunk in range(chunks) for v in range(1, cut)]
    return pieces + [(v, 0, True) for v in range(cut, world)]


def copy_arrivals(
    slab_bytes: float, run: RunConfig, topology: Topology, shares: Sequence[float]
) -> list[tuple[int, int, float]]:
    """When each chunk has been copied by the copy engine and its flag raised.

    Args:
        shares: of the slab that each chunk is, as :attr:`RunConfig.shares` or as a kernel cuts it.

    Returns:
        (visit, chunk, microseconds) for each remote chunk; visit 1 is the first remote slab. The
        own slab (visit 0) is there from the start and not listed.
    """
    ring = run.transport is Transport.COPY_ENGINE_RING
    out, slab_us = [], transfer_us(slab_bytes, topology)
    now = topology.latency_us + staging_us(slab_bytes, topology)
    slab_us *= 1.0 if ring else crossing(topology)
    parts_us, each = [slab_us * share for share in shares], copy_us(topology)
    for visit, chunk, whole in copy_order(run, len(shares), topology.world):
        now += (slab_us if whole else parts_us[chunk]) + each
        hops = (visit - 1) * topology.latency_us if ring else 0.0
        out.append((visit, chunk, now + hops))
    return out


def store_rate(topology: Topology, transport: Transport) -> float:
    """Share of the link's copy rate at which finished tiles leave."""
    if not transport.stores:
        return 1.0
    return c.STORE_RATE_PCIE if topology.link.over_pcie else c.STORE_RATE_NVLINK


def nccl_us(remote_bytes: float, topology: Topology) -> float:
    """Time of NCCL's all-gather or reduce-scatter, microseconds.

    Args:
        remote_bytes: bytes one rank receives from others (its own slab is free).
    """
    if topology.world == 1:
        return 0.0
    steps = topology.latency_us * (topology.world - 1)
    return c.NCCL_LAUNCH_US + steps + transfer_us(remote_bytes, topology, c.NCCL_RATE)


def one_shot_us(partial_bytes: float, topology: Topology) -> float:
    """Time of a one-shot all-reduce, in which every rank reads the partial sums of all peers.

    Args:
        partial_bytes: of one rank's partial sums.

    Returns:
        Microseconds; infinite where servers do not use one: more ranks than they have a kernel for,
        or GPUs that do not meet over NVLink.
    """
    if topology.world == 1:
        return 0.0
    if topology.link is not LinkKind.NVLINK or topology.world > c.ONE_SHOT_WORLD:
        return math.inf
    return c.ONE_SHOT_US + transfer_us((topology.world - 1) * partial_bytes, topology)
