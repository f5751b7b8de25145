"""What this machine has and lacks: each part found, or what is missing and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from fluxgen.compiler import toolchain
from fluxgen.compiler.store import Store
from fluxgen.core.errors import FluxgenError
from fluxgen.core.settings import Settings, data_dir
from fluxgen.db.database import Database
from fluxgen.db.verify import verify_packs
from fluxgen.machine.device import devices
from fluxgen.machine.wiring import islands, nvlinked


@dataclass(frozen=True)
class Check:
    """One part of the machine.

    Attributes:
        name: which part. state: ``found``, ``missing`` (optional or obtainable) or ``broken``.
        detail: what was found, or what is missing and how to get it.
    """

    name: str
    state: str
    detail: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def examine(settings: Settings | None = None) -> list[Check]:
    """Look at every part; a failing part never hides the others."""
    config = settings or Settings.load()
    return [
        _check("toolchain", lambda: _toolchain(config)),
        _check("gpu", _gpu),
        _check("torch", _torch),
        _check("symmetric memory", _symmetric_memory),
        _check("optuna", lambda: _package("optuna", "pip install 'fluxgen-kernels[tune]'")),
        _check("database", lambda: _database(config), damaged=True),
        _check("packs", _packs, damaged=True),
        _check("store", lambda: _store(config), damaged=True),
    ]


class _MissingError(Exception):
    pass


def _check(name: str, look: Callable[[], str], damaged: bool = False) -> Check:
    try:
        return Check(name, "found", look())
    except _MissingError as missing:
        return Check(name, "missing", str(missing))
    except (FluxgenError, OSError) as error:
        return Check(name, "broken" if damaged else "missing", str(error))


def _toolchain(settings: Settings) -> str:
    found = toolchain.find(settings)
    return (
        f"nvcc {found.version} at {found.nvcc}; CUTLASS {found.cutlass_version} at "
        f"{found.cutlass}; host compiler {found.host}"
    )


def _gpu() -> str:
    visible = devices()
    if not visible:
        raise _MissingError("the driver sees no GPU; predictions and builds work without one")
    names = ", ".join(f"{d.name} ({d.gpu.arch}, {d.gpu.sm_count} SMs)" for d in visible)
    sockets = islands([device.numa for device in visible])
    where = f"; on {sockets} sockets, over PCIe: --link pcie{sockets}" if sockets > 1 else ""
    linked = nvlinked([device.address for device in visible])
    if linked is not None:
        where = "; joined by NVLink" if linked else f"; not all joined by NVLink{where}"
    return f"{names}; driver for CUDA {visible[0].driver}{where}"


def _package(name: str, how: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise _MissingError(f"not installed: {how}") from None


def _torch() -> str:
    return _package("torch", "pip install 'fluxgen-kernels[torch]'")


def _symmetric_memory() -> str:
    _torch()
    name = "torch.distributed._symmetric_memory"
    if importlib.util.find_spec(name) is None:
        raise _MissingError(f"{name} is not in this torch: install torch 2.9 or newer")
    return name


def _database(settings: Settings) -> str:
    database = Database(settings.db)
    if not database.exists():
        raise _MissingError(f"none at {settings.db}: the first `fluxgen tune` makes it")
    count = sum(1 for _ in database.records())
    return f"{count} records in {settings.db}"


def _packs() -> str:
    root = data_dir("tuning_db")
    problems = verify_packs(root)
    if problems:
        raise FluxgenError(
            f"{root}: {problems[0]}" + f" (and {len(problems) - 1} more)" * (len(problems) > 1)
        )
    return f"{len(list(root.glob('*/*.jsonl')))} packs in {root}"


def _store(settings: Settings) -> str:
    if not settings.store.exists():
        raise _MissingError(f"none at {settings.store}: the first `fluxgen build` makes it")
    return f"{len(Store(settings.store).list())} compiled kernels in {settings.store}"
