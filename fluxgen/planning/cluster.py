"""The machine that a plan is for: nodes of GPUs, and the links within and between them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from fluxgen.core.errors import UsageError
from fluxgen.core.problem import check_int
from fluxgen.core.topology import GPUS, Gpu, LinkKind, Topology

__all__ = ["Cluster", "parse_between"]

MAX_GPUS = 1 << 17
NETWORK = {"ampere": (25.0, 5.0), "ada": (12.5, 8.0), "hopper": (50.0, 5.0)}
"""What one GPU sends to another node, GB/s in one direction, and the latency, microseconds: an
adapter of 200 Gb/s for each GPU of a DGX A100, of 400 Gb/s of a DGX H100 (data sheets), 100 Gb/s
elsewhere."""
_BETWEEN = re.compile(
    r"\s*(\d+(?:\.\d+)?)\s*GB/s\s*(?:,\s*(\d+(?:\.\d+)?)\s*us\s*)?", re.IGNORECASE
)


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes.

    Attributes:
        gpu: each of them. gpus: how many. node: of one node. link: within a node.
        between_gbs: what one GPU sends to another node, GB/s in one direction, with a network
            adapter of its own. between_us: latency of that, microseconds.
    """

    gpu: Gpu
    gpus: int
    node: int
    link: LinkKind
    between_gbs: float
    between_us: float

    @classmethod
    def of(
        cls, gpu: Gpu, gpus: int, node: int = 8, link: LinkKind | None = None, between: str = ""
    ) -> Cluster:
        """A cluster with the usual network of such GPUs, or ``between``: ``50GB/s,5us``.

        The usual ones are those of DGX systems, see ``NETWORK``.

        Raises:
            UsageError: counts that are none, GPUs that nodes do not hold evenly, or a network that
                is not understood.
        """
        check_int("gpus", gpus, 1, MAX_GPUS)
        check_int("node", node, 1, 72)
        if gpus > node and gpus % node:
            raise UsageError(
                f"gpus: expected a multiple of --node {node}, or at most that; found {gpus}. "
                f"{gpus // node * node} or {(gpus // node + 1) * node} would do"
            )
        if link is None:
            link = LinkKind.NVLINK if gpu.nvlink_gbs > 0 else LinkKind.PCIE
        rate, delay = NETWORK[gpu.generation]
        if between:
            rate, delay = parse_between(between)
        return cls(gpu, gpus, min(node, gpus), link, rate, delay)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values that make it again; the GPU by its properties."""
        g = self.gpu
        gpu = g.name if GPUS.get(g.name) == g else (
            f"{g.name}:cc={g.cc},sms={g.sm_count},clock={g.clock_mhz},smem={g.smem_kb},"
            f"mem={g.mem_gb},membw={g.mem_gbs},l2={g.l2_mb},nvlink={g.nvlink_gbs},pcie={g.pcie_gbs}"
        )  # fmt: skip
        return {"gpu": gpu, "between_gbs": self.between_gbs, "between_us": self.between_us}

    def topology(self, tp: int) -> Topology:
        """Of the tensor-parallel ranks of one node."""
        return Topology.of(self.gpu, self.link, tp)


def parse_between(text: str) -> tuple[float, float]:
    """``50GB/s,5us`` -> GB/s of one GPU in one direction, and microseconds; 5 where not given.

    Raises:
        UsageError: other text, or no bandwidth.
    """
    match = _BETWEEN.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(
            "link between nodes: expected what one GPU sends and the latency, as 50GB/s,5us; "
            f"found {text!r}"
        )
    return float(match[1]), float(match[2] or 5.0)
