"""When bytes arrive: the transports of the fused kernels, and NCCL's collectives."""

from __future__ import annotations

from fluxgen.core.config import ChunkAxis, Transport
from fluxgen.core.topology import LinkKind, Topology
from fluxgen.predict import constants as c


def transfer_us(size: float, topology: Topology, rate: float = 1.0) -> float:
    """Microseconds that ``size`` bytes take at ``rate`` of the topology's bandwidth."""
    return size / (topology.bandwidth_gbs * 1e3 * rate)


def pull_order(chunks: int, axis: ChunkAxis, world: int) -> list[tuple[int, int]]:
    """(visit, chunk) of each remote chunk, in the order of the copy-engine transport.

    Slabs are pulled in ring order (own + 1, own + 2, ...): M chunks slab by slab, K chunks piece
    by piece (the first piece of every slab, then the second), since every tile needs them all.
    """
    remote = range(1, world)
    if axis is ChunkAxis.K:
        return [(visit, chunk) for chunk in range(chunks) for visit in remote]
    return [(visit, chunk) for visit in remote for chunk in range(chunks)]


def pull_arrivals(
    slab_bytes: float, chunks: int, axis: ChunkAxis, topology: Topology
) -> list[tuple[int, int, float]]:
    """When each chunk has been pulled by the copy engine and its flag raised.

    Returns:
        (visit, chunk, microseconds) for each remote chunk; visit 1 is the first remote slab. The
        own slab (visit 0) is there from the start and not listed.
    """
    each = transfer_us(slab_bytes / chunks, topology) + c.COPY_US
    order = pull_order(chunks, axis, topology.world)
    start = topology.latency_us
    return [(visit, chunk, start + each * (i + 1)) for i, (visit, chunk) in enumerate(order)]


def store_rate(topology: Topology, transport: Transport) -> float:
    """Share of the link's copy rate at which finished tiles leave."""
    if transport is not Transport.PEER_STORE:
        return 1.0
    return c.STORE_RATE_PCIE if topology.link is LinkKind.PCIE else c.STORE_RATE_NVLINK


def nccl_us(remote_bytes: float, topology: Topology) -> float:
    """Time of NCCL's all-gather or reduce-scatter, microseconds.

    Args:
        remote_bytes: bytes one rank receives from others (its own slab is free).
    """
    if topology.world == 1:
        return 0.0
    steps = topology.latency_us * (topology.world - 1)
    return c.NCCL_LAUNCH_US + steps + transfer_us(remote_bytes, topology, c.NCCL_RATE)
