"""What a plan answers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fluxgen.core.problem import Problem
from fluxgen.planning.cluster import Cluster
from fluxgen.planning.layout import Layout
from fluxgen.planning.memory import Memory
from fluxgen.planning.model import Transformer
from fluxgen.planning.timing.step import Step

__all__ = ["Choice", "Plan"]


@dataclass(frozen=True)
class Choice:
    """One layout that fits.

    Attributes:
        layout, step, memory: of it. unfused_us: of the same layout without fused ops.
        tokens_per_s: of one GPU. mfu: the model's FLOP over those of all GPUs in that time, 0 of a
            decode.
        problems: that its layers pose to fused ops, with where the time of each came from; empty
            where the fused op is not used.
    """

    layout: Layout
    step: Step
    memory: Memory
    unfused_us: float
    tokens_per_s: float
    mfu: float
    problems: tuple[tuple[Problem, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "layout": self.layout.to_dict(),
            "key": self.layout.key,
            "step_us": self.step.step_us,
            "unfused_us": self.unfused_us,
            "tokens_per_s_per_gpu": self.tokens_per_s,
            "mfu": self.mfu,
            "memory_gb": self.memory.total / 1e9,
            "exposed": self.step.exposed,
            "parts_us": dict(self.step.parts),
            "problems": [{**p.to_dict(), "source": source} for p, source in self.problems],
        }


@dataclass(frozen=True)
class Plan:
    """The best layouts of a model on a cluster.

    Attributes:
        model, target: names. link: within a node.
        gpus, node, batch, seq, phase, practice, fused: as asked.
        choices: the best first. tried: layouts that can run. dropped: that do not fit in memory.
        closest: of those the one that misses least, and by how many bytes; None where none was.
        interrupted: whether the search was cut short, so that better ones may be missing.
        sizes, cluster: what was predicted. rival: of a search of both families, the best of the one
            that the first choice is not of.
    """

    model: str
    target: str
    link: str
    gpus: int
    node: int
    batch: int
    seq: int
    phase: str
    practice: str
    fused: str
    choices: tuple[Choice, ...]
    tried: int
    dropped: int
    closest: tuple[Layout, float] | None = None
    interrupted: bool = False
    sizes: Transformer | None = None
    cluster: Cluster | None = None
    rival: Choice | None = None

    @property
    def best(self) -> Choice:
        """The first of the choices."""
        return self.choices[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        closest = None
        if self.closest is not None:
            closest = {"layout": self.closest[0].to_dict(), "over_gb": self.closest[1] / 1e9}
        return {
            "model": self.model,
            "target": self.target,
            "link": self.link,
            "gpus": self.gpus,
            "node": self.node,
            "batch": self.batch,
            "seq": self.seq,
            "phase": self.phase,
            "practice": self.practice,
            "fused": self.fused,
            "choices": [choice.to_dict() for choice in self.choices],
            "tried": self.tried,
            "dropped": self.dropped,
            "closest": closest,
            "rival": None if self.rival is None else self.rival.to_dict(),
            "interrupted": self.interrupted,
            "sizes": None if self.sizes is None else asdict(self.sizes),
            **({} if self.cluster is None else self.cluster.to_dict()),
        }
