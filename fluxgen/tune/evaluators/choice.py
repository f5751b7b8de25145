"""Which evaluator a name stands for, on this machine."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

from fluxgen.core.errors import ToolchainError, UsageError
from fluxgen.core.topology import Topology
from fluxgen.machine.device import devices
from fluxgen.tune.evaluators.evaluator import Evaluator
from fluxgen.tune.evaluators.predicted import PredictEvaluator
from fluxgen.tune.evaluators.process import ProcessEvaluator
from fluxgen.tune.evaluators.replay import ReplayEvaluator

__all__ = ["can_measure", "make_evaluator", "resolve", "torch_has_cuda"]

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
        return ProcessEvaluator(
            "fluxgen.tune.device.evaluator:make",
            {"gpu": topology.gpu, "store": store},
            timeout_s=DEVICE_TIMEOUT_S,
        )
    raise UsageError(
        f"evaluator: expected one of predict, device, auto, replay:FILE; found {name!r}"
    )
