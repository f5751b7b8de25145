"""Where things are: directories and limits, from the environment, read once per call.

| variable | meaning | default |
| --- | --- | --- |
| ``FLUXGEN_HOME`` | database, store, storage | ``~/.cache/fluxgen`` (honours ``XDG_CACHE_HOME``) |
| ``FLUXGEN_DB`` | tuning database file | ``$FLUXGEN_HOME/tuning.sqlite3`` |
| ``FLUXGEN_STORE`` | compiled kernels | ``$FLUXGEN_HOME/store`` |
| ``FLUXGEN_NVCC`` | the nvcc to use | found by :mod:`fluxgen.compiler.toolchain` |
| ``FLUXGEN_CUTLASS`` | CUTLASS include directory | the nvidia-cutlass wheel |
| ``FLUXGEN_P2P_DISABLE`` | 1: ranks meet in the host's memory; on all ranks alike | 0 |
| ``FLUXGEN_TIMEOUT_S`` | deadline of device-side waits, seconds | 30 |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fluxgen.core.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """The resolved settings; see the module's table."""

    home: Path
    db: Path
    store: Path
    nvcc: str = ""
    cutlass: str = ""
    timeout_s: float = 30.0
    p2p: bool = True

    @classmethod
    def load(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Read the environment. Nothing is created; a missing HOME is no error.

        Raises:
            UsageError: ``FLUXGEN_TIMEOUT_S`` is not a positive number, or ``FLUXGEN_P2P_DISABLE``
            not 0 or 1.
        """
        e = os.environ if env is None else env
        user = Path(e.get("HOME") or f"/tmp/fluxgen-{os.getuid()}")  # noqa: S108
        base = Path(e.get("XDG_CACHE_HOME") or user / ".cache")
        home = Path(e.get("FLUXGEN_HOME") or base / "fluxgen")
        text = e.get("FLUXGEN_TIMEOUT_S", "30")
        try:
            timeout = float(text)
        except ValueError:
            timeout = -1.0
        if not 0 < timeout < 1e6:
            raise UsageError(f"FLUXGEN_TIMEOUT_S: expected a positive number; found {text!r}")
        disabled = e.get("FLUXGEN_P2P_DISABLE", "") or "0"
        if disabled not in ("0", "1"):
            raise UsageError(f"FLUXGEN_P2P_DISABLE: expected 0 or 1; found {disabled!r}")
        return cls(
            home=home,
            db=Path(e.get("FLUXGEN_DB") or home / "tuning.sqlite3"),
            store=Path(e.get("FLUXGEN_STORE") or home / "store"),
            nvcc=e.get("FLUXGEN_NVCC", ""),
            cutlass=e.get("FLUXGEN_CUTLASS", ""),
            timeout_s=timeout,
            p2p=disabled == "0",
        )


def data_dir(name: str) -> Path:
    """A data directory of the project: ``templates``, ``generated`` or ``tuning_db``.

    In a checkout it is beside the package; in an installed wheel it is ``fluxgen/_data/<name>``.
    """
    package = Path(__file__).resolve().parent.parent
    installed = package / "_data" / name
    return installed if installed.is_dir() else package.parent / name
