"""What a candidate's time is: predicted without a GPU, replayed from a file, or measured on one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Protocol

from fluxgen.codegen.space import why_illegal
from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.errors import ToolchainError, UsageError
from fluxgen.core.problem import Problem
from fluxgen.core.record import Baseline, Provenance
from fluxgen.core.topology import Topology
from fluxgen.machine.device import devices
from fluxgen.predict import predict, predict_baseline
from fluxgen.predict.constants import MODEL_VERSION


@dataclass(frozen=True)
class Measurement:
    """One evaluated candidate.

    Attributes:
        time_us: of the candidate, the slowest rank's, microseconds; infinite if not ``ok``.
        baseline_us: of the unfused path, taken together with it (interleaved on a device).
        provenance: how both figures were obtained.
        ok: whether the candidate built, ran and gave right results. reason: why not, one line.
        kernel_failed: whether it was the kernel that failed (e.g. did not build), so that no other
            run-time configuration of it need be tried.
        spread: how well ``time_us`` is known: half of its confidence interval, over it.
    """

    time_us: float
    baseline_us: float
    provenance: Provenance
    ok: bool = True
    reason: str = ""
    kernel_failed: bool = False
    spread: float = 0.0

    @classmethod
    def failure(
        cls, provenance: Provenance, reason: str, *, kernel_failed: bool = False
    ) -> Measurement:
        """A candidate that failed for ``reason``."""
        return cls(math.inf, math.inf, provenance, False, reason, kernel_failed)


class Evaluator(Protocol):
    """Times candidates. Implementations must return the same verdict for all ranks.

    Attributes:
        kind: short name without spaces; studies of different kinds are kept apart. It holds
            whatever makes old times incomparable, such as a model version.
        provenance: of every measurement.
    """

    @property
    def kind(self) -> str: ...  # noqa: D102

    @property
    def provenance(self) -> Provenance: ...  # noqa: D102

    def method(self, topology: Topology) -> str:
        """How figures are obtained, for ``Environment.method``."""
        ...

    def baseline(self, problem: Problem, topology: Topology) -> Baseline | None:
        """Which unfused path the problem's candidate 0 is; None: not known."""
        ...

    def evaluate(
        self,
        problem: Problem,
        topology: Topology,
        kernel: KernelConfig | None,
        run: RunConfig | None,
    ) -> Measurement:
        """Time ``kernel`` with ``run``; both None: the unfused baseline, candidate 0.

        A candidate that fails is returned with ``ok=False``.

        Raises:
            MachineError: the machine is broken; nothing is said about the candidate.
        """
        ...


def versions_of(evaluator: Evaluator) -> dict[str, str]:
    """``driver`` and ``cuda`` of an evaluator that has them, for a record's ``Environment``.

    Models and recordings have none: unknown versions are empty, never invented.
    """
    return dict(getattr(evaluator, "versions", {}))


class PredictEvaluator:
    """The model of :mod:`fluxgen.predict`: needs no GPU, the same figure every time."""

    kind = f"predict{MODEL_VERSION}"
    provenance = Provenance.PREDICTED

    def method(self, topology: Topology) -> str:
        """The model's version and the link it assumes."""
        return (
            f"model {MODEL_VERSION}, {topology.link.value} {topology.bandwidth_gbs:g} GB/s, "
            f"{topology.latency_us:g} us"
        )

    def baseline(self, problem: Problem, topology: Topology) -> Baseline | None:
        """The better of NCCL's collective and a one-shot all-reduce, as predicted."""
        return predict_baseline(problem, topology).baseline

    def evaluate(
        self,
        problem: Problem,
        topology: Topology,
        kernel: KernelConfig | None,
        run: RunConfig | None,
    ) -> Measurement:
        """Predict one candidate; an illegal one fails with its reason.

        Raises:
            UsageError: m or k is 0, or tp is not the topology's world.
        """
        baseline = predict_baseline(problem, topology).time_us
        if kernel is None or run is None:
            return Measurement(baseline, baseline, self.provenance)
        reason = why_illegal(problem, topology, kernel, run)
        if reason:
            return Measurement.failure(self.provenance, reason)
        time_us = predict(problem, topology, kernel, run).time_us
        return Measurement(time_us, baseline, self.provenance)


DEVICE_TIMEOUT_S = 120.0
"""Seconds for one candidate on a device: far more than the slowest takes, its check included."""


def resolve(name: str, topology: Topology) -> str:
    """What ``auto`` means for this topology here: ``device`` where its GPU and Torch are."""
    if name != "auto":
        return name
    return "device" if can_measure(topology) else "predict"


def can_measure(topology: Topology) -> bool:
    """Whether this machine has the topology's GPU, and a Torch that can use it.

    NVLink is imitated; over PCIe the host's memory stands for the peers. Nothing stands for the
    link between two sockets.
    """
    if topology.islands > 1:
        return False
    try:
        found = devices()
    except ToolchainError:
        return False
    return any(d.gpu == topology.gpu for d in found[:1]) and torch_has_cuda()


def torch_has_cuda() -> bool:
    """Whether the installed Torch was built for CUDA, without importing it (seconds)."""
    torch = find_spec("torch")
    if torch is None or not torch.submodule_search_locations:
        return False
    path = Path(torch.submodule_search_locations[0]) / "version.py"
    spec = spec_from_file_location("fluxgen_torch_version", path)
    if spec is None or spec.loader is None or not path.is_file():
        return False
    version = module_from_spec(spec)
    spec.loader.exec_module(version)
    return bool(getattr(version, "cuda", None))


def make_evaluator(name: str, topology: Topology, store: Path | None = None) -> Evaluator:
    """The evaluator ``predict``, ``device``, ``replay:FILE``, or ``auto`` (see :func:`resolve`).

    Args:
        topology: what will be evaluated. store: of the compiled kernels that ``device`` runs.

    Raises:
        UsageError: any other name, a file that holds no trials, or a device that is not here.
        MachineError: the process that measures does not come up.
    """
    name = resolve(name, topology)
    if name == "predict":
        return PredictEvaluator()
    if name.startswith("replay:"):
        from fluxgen.tune.replay import ReplayEvaluator

        return ReplayEvaluator(name.removeprefix("replay:"))
    if name == "device":
        if not can_measure(topology):
            if topology.islands > 1:
                raise UsageError(
                    f"evaluator 'device': {topology.key}: one GPU has no link from socket to "
                    "socket to measure; use --link pcie, or --evaluator predict"
                )
            raise UsageError(
                f"evaluator 'device': expected a GPU {topology.gpu.name} in this machine, and a "
                "Torch built for CUDA; found none. Measure there, or use --evaluator predict"
            )
        from fluxgen.tune.worker import ProcessEvaluator

        return ProcessEvaluator(
            "fluxgen.tune.device.evaluator:make",
            {"gpu": topology.gpu, "store": store},
            timeout_s=DEVICE_TIMEOUT_S,
        )
    raise UsageError(
        f"evaluator: expected one of predict, device, auto, replay:FILE; found {name!r}"
    )
