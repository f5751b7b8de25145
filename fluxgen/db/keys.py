"""Topology keys as text: checked before they become a directory's name or a database key."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from fluxgen.core.errors import UsageError
from fluxgen.core.problem import MAX_WORLD
from fluxgen.core.topology import GPUS, Gpu, LinkKind, Topology

_TOPOLOGY = re.compile(
    r"(?P<gpu>[a-z0-9][a-z0-9.-]{0,63})-(?P<link>nvlink|pcie|host)(?P<islands>(?<=pcie)[2-8])?"
    r"-tp(?P<tp>[1-9][0-9]?)",
    re.ASCII,
)


def split_topology(key: object) -> tuple[str, LinkKind, int, int]:
    """``l20-pcie2-tp8`` -> (``l20``, ``LinkKind.PCIE``, 8, 2): GPU, link, ranks, sockets.

    Raises:
        UsageError: the text is not what ``Topology.key`` makes of a normalised GPU name.
    """
    match = _TOPOLOGY.fullmatch(key) if isinstance(key, str) else None
    islands = int(match["islands"] or 1) if match else 1
    if match is None or not 1 <= int(match["tp"]) <= MAX_WORLD or int(match["tp"]) % islands:
        raise UsageError(
            "topology: expected <gpu>-<nvlink|pcie|host>-tp<1..16> with a normalised GPU name, "
            "e.g. h100-sxm-nvlink-tp8, or pcie2 to pcie8 for as many sockets, each with as many "
            f"ranks; found {str(key)[:100]!r}"
        )
    return match["gpu"], LinkKind(match["link"]), int(match["tp"]), islands


def topology_key(topology: Topology | str) -> str:
    """The checked key of a topology, or of its key.

    Raises:
        UsageError: as :func:`split_topology`.
    """
    key = topology if isinstance(topology, str) else topology.key
    split_topology(key)
    return key


def topology_of(
    key: str, gpus: Mapping[str, Gpu] | None = None, sm_count: int = 0, cc: int = 0
) -> Topology:
    """A topology with the properties that ``key`` names.

    Args:
        key: of a topology. gpus: GPUs by name, beside the presets.
        sm_count, cc: of a GPU that is in neither: SMs (0: unknown, so not limiting) and compute
            capability times ten. With these it is taken for the best-equipped preset of its
            architecture: enough to judge a record without the machine that it came from.

    Raises:
        UsageError: as :func:`split_topology`; NVLink on a preset without it; a GPU that is known
            nowhere, of no given ``cc``, or of one that no kernels are generated for.
    """
    name, link, world, islands = split_topology(key)
    gpu = (gpus or {}).get(name) or GPUS.get(name)
    if gpu is None:
        alike = _EQUIPPED.get(90 if cc == 90 else cc // 10 * 10)
        if alike is None:
            known = f"; found compute capability {cc / 10:.1f}" if cc else ""
            raise UsageError(
                f"topology {key}: expected a GPU that is known, or its compute capability, of 8.x "
                f"or 9.0{known}. Nothing is assumed of {name!r}"
            )
        gpu = dataclasses.replace(GPUS[alike], name=name, sm_count=sm_count or 1024)
    return Topology.of(gpu, link, world, islands)


_EQUIPPED = {80: "a100-sxm-80gb", 90: "h100-sxm"}
"""By architecture: the preset with the most shared memory and every link."""
