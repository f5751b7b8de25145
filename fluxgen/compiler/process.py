"""Run one tool: no shell, a clean environment, a deadline, and no survivors."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from fluxgen.core.errors import FluxgenError

# Everything else stays out: NVCC_APPEND_FLAGS, CPATH and their like change what is compiled
# without changing the store's key.
_KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH", "LIBRARY_PATH")


class Expired(FluxgenError):
    """The deadline passed; every process of the tool has been killed."""


class Cancelled(FluxgenError):
    """The caller's event was set; every process of the tool has been killed."""


def clean_env(env: Mapping[str, str] | None = None, **extra: str) -> dict[str, str]:
    """The environment a tool gets: search paths and a C locale, so that messages can be parsed."""
    source = os.environ if env is None else env
    kept = {key: source[key] for key in _KEPT if source.get(key)}
    kept.setdefault("PATH", os.defpath)
    return {**kept, "LC_ALL": "C.UTF-8", **extra}


def run(
    args: Sequence[str],
    log: IO[bytes],
    *,
    env: Mapping[str, str],
    timeout: float,
    cwd: Path | None = None,
    cancel: threading.Event | None = None,
) -> int:
    """Run ``args`` with all output going to ``log``; return its exit status.

    The tool leads a process group of its own, so that what it started dies with it: nvcc's cicc
    and ptxas would otherwise run on for a minute after a Ctrl-C.

    Raises:
        Expired: after ``timeout`` seconds.
        Cancelled: ``cancel`` was set meanwhile.
        OSError: the tool cannot be started.
    """
    end = time.monotonic() + timeout
    with subprocess.Popen(
        list(args),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=cwd,
        env=dict(env),
        start_new_session=True,
    ) as child:
        try:
            while True:
                if cancel is not None and cancel.is_set():
                    raise Cancelled(f"{args[0]}: cancelled")
                left = end - time.monotonic()
                if left <= 0:
                    raise Expired(f"{args[0]}: not done after {timeout:g} s")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return child.wait(min(0.1, left))
        except BaseException:
            # Not reaped yet, so the group's id cannot have passed to another.
            _kill_group(child.pid)
            raise


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def capture(args: Sequence[str], *, env: Mapping[str, str], timeout: float) -> tuple[int, str]:
    """Run ``args``; return its exit status and its output. Raises what :func:`run` raises."""
    with tempfile.TemporaryFile() as log:
        status = run(args, log, env=env, timeout=timeout)
        log.seek(0)
        return status, log.read(1 << 20).decode("utf-8", "replace")
