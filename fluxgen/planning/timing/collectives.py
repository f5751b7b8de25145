"""Times of collectives on two levels: links within a node, adapters between nodes."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log2

from fluxgen.planning.cluster import Cluster
from fluxgen.planning.timing import constants as c
from fluxgen.predict import constants as base
from fluxgen.predict.link import one_shot_us

__all__ = ["Links", "Ranks"]


@dataclass(frozen=True)
class Ranks:
    """Who takes part: ``count`` ranks, ``near`` of them in each node."""

    count: int
    near: int


class Links:
    """Collectives of one cluster, microseconds.

    Args:
        rails: whether a collective between nodes uses the adapters of all its ranks of a node.
    """

    def __init__(self, cluster: Cluster, rails: bool = True) -> None:
        self.cluster, self.rails = cluster, rails
        topology = cluster.topology(min(2, cluster.node))
        self.near_gbs = topology.bandwidth_gbs * base.NCCL_RATE
        self.near_us = topology.latency_us
        nodes = max(1, cluster.gpus // cluster.node)
        far = c.NETWORK_FAR * max(0.0, log2(nodes / 32)) if nodes > 32 else 0.0
        self.far_gbs = cluster.between_gbs * c.NETWORK_RATE * max(0.5, 1.0 - far)

    def ranks(self, count: int, stride: int) -> Ranks:
        """``count`` ranks, each ``stride`` GPUs from the next: how many of them share a node."""
        near = max(1, min(count, self.cluster.node // stride))
        while count % near:
            near -= 1
        return Ranks(count, near)

    def gather_us(self, whole: float, ranks: Ranks) -> float:
        """All-gather or reduce-scatter of ``whole`` bytes, as each rank has them at its end.

        A ring visits the GPUs of a node before it leaves it, and there are as many rings as
        adapters: what comes into a GPU passes its links within the node at their rate, and into a
        node the adapters of its ranks. Small messages take a tree's depth instead of a ring's.
        """
        if ranks.count == 1 or whole <= 0:
            return 0.0
        share = whole * (ranks.count - 1) / ranks.count
        rate, delay = self.near_gbs, self.near_us
        if ranks.count > ranks.near:
            rate = min(rate, self.far_gbs * (ranks.near if self.rails else 1))
            delay = self.cluster.between_us
        ring = (ranks.count - 1) * delay + share / (rate * 1e3)
        # Pieces double at each level of a tree, over the same links, at half of their rate.
        tree = 2 * log2(ranks.count) * delay + 2 * share / (rate * 1e3)
        return base.NCCL_LAUNCH_US + min(ring, tree)

    def reduce_us(self, whole: float, ranks: Ranks) -> float:
        """All-reduce of ``whole`` bytes."""
        if ranks.count == 1:
            return 0.0
        return 2 * self.gather_us(whole, ranks) - base.NCCL_LAUNCH_US

    def one_shot_us(self, whole: float, ranks: Ranks) -> float:
        """All-reduce of few bytes: each rank reads those of all; infinite between nodes."""
        if ranks.count > ranks.near:
            return inf
        return one_shot_us(whole, self.cluster.topology(ranks.count))

    def send_us(self, size: float, far: bool) -> float:
        """From one GPU to another, of another node where ``far``."""
        rate = self.far_gbs if far else self.near_gbs
        return c.PIPE_WAIT_US + size / (rate * 1e3)
