"""A plan that was written down: read back, checked."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fluxgen.core.errors import FluxgenError, UsageError
from fluxgen.core.problem import Problem
from fluxgen.core.topology import LinkKind, Topology, parse_gpu
from fluxgen.db.codec import problem_from_dict
from fluxgen.planning.cluster import Cluster
from fluxgen.planning.layout import Layout
from fluxgen.planning.model import Transformer
from fluxgen.planning.practice import practice
from fluxgen.planning.timing.fused import Fusion
from fluxgen.planning.timing.step import Stepper
from fluxgen.predict.simulate import Timeline

__all__ = ["SavedPlan", "read_plan"]

MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class SavedPlan:
    """What ``fluxgen plan --out`` wrote.

    Attributes:
        document: its plain values. layout: the best one. problems: that its layers pose.
    """

    document: dict[str, Any]
    layout: Layout
    problems: tuple[Problem, ...]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """All of them, the best first."""
        return list(self.document["choices"])

    @property
    def title(self) -> str:
        """One line."""
        d = self.document
        return (
            f"{d['model']}: {d['phase']} on {d['gpus']} {d['target']} in nodes of {d['node']}, "
            f"batch {d['batch']} x {d['seq']}"
        )

    def topology(self) -> Topology:
        """Of the best layout's tensor-parallel ranks.

        Raises:
            UsageError: it has none.
        """
        if self.layout.tp == 1 or self.layout.grid:
            raise UsageError(
                f"plan: {self.layout.key} has no tensor-parallel ranks, so there is nothing to tune"
            )
        return Topology.of(
            parse_gpu(self.document["gpu"]), LinkKind.parse(self.document["link"]), self.layout.tp
        )

    def timelines(self) -> dict[str, Timeline]:
        """Of a step of the best layout, without looking records up again."""
        d = self.document
        cluster = Cluster.of(parse_gpu(d["gpu"]), d["gpus"], d["node"], LinkKind.parse(d["link"]))
        cluster = replace(cluster, between_gbs=d["between_gbs"], between_us=d["between_us"])
        mode = "off" if d["fused"] == "off" else "predict"
        stepper = Stepper(
            Transformer(**d["sizes"]), cluster, d["batch"], d["seq"], practice(d["practice"]),
            Fusion(cluster, mode), d["phase"],
        )  # fmt: skip
        return stepper.timelines(self.layout)


def read_plan(path: Path) -> SavedPlan:
    """A plan that ``fluxgen plan --out`` has written.

    Raises:
        UsageError: the file cannot be read, or is no plan; says what is wrong.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES} bytes")
        document = json.loads(path.read_bytes())
        first = document["choices"][0]
        grid = tuple(first["layout"]["grid"])
        layout = Layout(**{**first["layout"], "grid": grid})
        names = ("model", "target", "gpu", "link", "gpus", "node", "batch", "seq", "phase", "sizes",
                 "practice", "fused", "between_gbs", "between_us")  # fmt: skip
        missing = [name for name in names if name not in document]
        if missing:
            raise ValueError(f"lacks {', '.join(missing)}")
        problems = []
        for each in first["problems"]:
            problems.append(problem_from_dict({k: v for k, v in each.items() if k != "source"}))
        saved = SavedPlan(document, layout, tuple(problems))
        Transformer(**document["sizes"])
        practice(document["practice"])
        parse_gpu(document["gpu"])
    except OSError as error:
        raise UsageError(f"plan: cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, FluxgenError) as error:
        raise UsageError(
            f"plan: {path}: expected a file that `fluxgen plan --out` wrote; found "
            f"{type(error).__name__}: {error}"
        ) from None
    return saved
