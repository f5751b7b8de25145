"""How the GPUs of one group reach each other: NVLink, the sockets they hang from, or not at all."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from dataclasses import dataclass

from fluxgen.core.topology import MAX_ISLANDS, Gpu, LinkKind, Topology

# nvmlGpuP2PCapsIndex_t and nvmlGpuP2PStatus_t (nvml.h).
_NVLINK, _OK = 2, 0


@dataclass(frozen=True)
class Wiring:
    """How a group's GPUs reach each other, as far as it is known.

    Attributes:
        peers: whether they can address each other's memory; if not, they meet in the host's.
        nvlink: whether NVLink joins every two of them; None where nobody can say.
        islands: sockets that they hang from (see :func:`islands`).
    """

    peers: bool = True
    nvlink: bool | None = None
    islands: int = 1

    def topology(self, gpu: Gpu, world: int) -> Topology:
        """The topology to look records up for. Where nobody can say, a GPU that has NVLink uses it.

        Raises:
            UsageError: as :meth:`Topology.of`.
        """
        if not self.peers:
            return Topology.of(gpu, LinkKind.HOST, world)
        if gpu.nvlink_gbs > 0 and self.nvlink is not False:
            return Topology.of(gpu, LinkKind.NVLINK, world)
        return Topology.of(gpu, LinkKind.PCIE, world, self.islands)


UNKNOWN = Wiring()
"""Before the ranks have met."""


def islands(nodes: Sequence[int]) -> int:
    """Sockets of a group, from the NUMA node of each rank's GPU, in their order.

    1 where the ranks do not go socket by socket, each with as many: then a ring would cross more
    often than it has to.
    """
    world = len(nodes)
    if world < 2:
        return 1
    borders = sum(here != there for here, there in zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    kinds = len(set(nodes))
    even = all(nodes.count(node) == world // kinds for node in nodes)
    return kinds if even and borders == kinds and kinds <= MAX_ISLANDS else 1


def nvlinked(addresses: Sequence[str], library: str = "libnvidia-ml.so.1") -> bool | None:
    """Whether NVLink joins every two of these GPUs, also through switches, as NVML has it.

    Cards of one name are sold with and without it (bridges), and pairs of a larger machine may be
    bridged alone.

    Args:
        addresses: PCI address of each rank's GPU.

    Returns:
        None where nobody can say: without NVML, for a GPU that it does not show or that several
        ranks share, and for fewer than two.
    """
    if len(addresses) < 2 or len(set(addresses)) < len(addresses):
        return None
    try:
        nvml = ct.CDLL(library)
        if nvml.nvmlInit_v2():
            return None
    except (OSError, AttributeError):
        return None
    try:
        return _all_linked(nvml, addresses)
    except AttributeError:  # a driver older than the function
        return None
    finally:
        nvml.nvmlShutdown()


def _all_linked(nvml: ct.CDLL, addresses: Sequence[str]) -> bool | None:
    handles = [ct.c_void_p() for _ in addresses]
    for address, handle in zip(addresses, handles, strict=True):
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(address.encode(), ct.byref(handle)):
            return None
    linked = True
    for i, one in enumerate(handles):
        for other in handles[i + 1 :]:
            status = ct.c_int()
            if nvml.nvmlDeviceGetP2PStatus(one, other, _NVLINK, ct.byref(status)):
                return None
            linked = linked and status.value == _OK
    return linked
