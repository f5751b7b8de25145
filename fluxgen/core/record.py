"""One line of the tuning database: what won, by how much, and how that is known."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.problem import Problem


class Provenance(str, enum.Enum):
    """Where a figure comes from, best last (see :attr:`rank`)."""

    PREDICTED = "predicted"
    """No GPU: the model of :mod:`fluxgen.predict`."""
    EMULATED = "emulated"
    """One GPU, the link imitated at a stated bandwidth."""
    MEASURED = "measured"
    """Several GPUs over their real link."""

    @property
    def rank(self) -> int:
        """0, 1, 2: a record of a higher rank replaces one of a lower."""
        return list(Provenance).index(self)


class Baseline(str, enum.Enum):
    """What the unfused path of a figure is: cuBLAS's GEMM, and one of these beside it."""

    NCCL = "nccl"
    """NCCL's collective, in its ring or tree."""
    ONE_SHOT = "one_shot_all_reduce"
    """An all-reduce kernel in which each rank reads what all peers have, as servers use it for few
    tokens: vLLM's and TensorRT-LLM's own, Torch's ``symm_mem.one_shot_all_reduce``."""
    LINK_BOUND = "link_bound"
    """The collective's bytes at the link's rate and its latency, in one shot or in two: a bound
    that neither NCCL nor a kernel of a server's reaches."""
    COPIES = "copies"
    """Plain copies by a copy engine, timed."""


class Status(str, enum.Enum):
    """Whether a record may be used."""

    OK = "ok"
    FAILED = "failed"
    """The configuration did not build, was wrong, or hung: never propose it again."""


@dataclass(frozen=True)
class Environment:
    """What a figure was obtained with; unknown values are empty, never invented.

    Attributes:
        gpu: device name as the driver reports it, or the preset's name. sm_count: SMs.
        driver, cuda, cutlass, fluxgen: versions. templates: hash of the templates.
        method: how the figure was obtained, e.g. the emulated bandwidth.
    """

    gpu: str = ""
    sm_count: int = 0
    driver: str = ""
    cuda: str = ""
    cutlass: str = ""
    templates: str = ""
    fluxgen: str = ""
    method: str = ""


@dataclass(frozen=True)
class Record:
    """The best known way to compute one problem on one topology.

    Attributes:
        problem: what is computed. topology: ``Topology.key`` (``h100-sxm-nvlink-tp8``).
        kernel, run: the winner; both None when the unfused baseline wins.
        time_us, baseline_us: of the winner and of the unfused path, microseconds.
        provenance, environment, status: how the figures were obtained.
        created: UTC time as ISO 8601, e.g. ``2026-12-01T12:00:00Z``.
        baseline: which unfused path ``baseline_us`` is of; None: not stated, as in records written
            before there was a choice.
    """

    problem: Problem
    topology: str
    kernel: KernelConfig | None
    run: RunConfig | None
    time_us: float
    baseline_us: float
    provenance: Provenance
    environment: Environment = field(default_factory=Environment)
    status: Status = Status.OK
    created: str = ""
    baseline: Baseline | None = None

    @property
    def is_baseline(self) -> bool:
        """Whether the unfused path wins."""
        return self.kernel is None

    @property
    def speedup(self) -> float:
        """Baseline time over the winner's time."""
        return self.baseline_us / self.time_us if self.time_us > 0 else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, one flat level for the problem; a baseline not stated is left out."""
        stated = {} if self.baseline is None else {"baseline": self.baseline.value}
        return {
            "problem": self.problem.to_dict(),
            "topology": self.topology,
            "kernel": None if self.kernel is None else self.kernel.to_dict(),
            "run": None if self.run is None else self.run.to_dict(),
            "time_us": self.time_us,
            "baseline_us": self.baseline_us,
            "provenance": self.provenance.value,
            "environment": dict(vars(self.environment)),
            "status": self.status.value,
            "created": self.created,
            **stated,
        }
