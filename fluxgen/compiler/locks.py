"""One builder per key, across threads and processes, whoever is killed meanwhile."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fluxgen.compiler.process import Cancelled
from fluxgen.core.errors import StoreError

REPORT_AFTER_S = 10.0
"""A wait longer than this is reported, and again each time it has doubled."""


@contextlib.contextmanager
def hold(
    path: Path,
    *,
    timeout: float,
    report: Callable[[str], None] | None = None,
    cancel: threading.Event | None = None,
) -> Iterator[bool]:
    """Hold the lock at ``path``; yields whether someone else held it first.

    It is a flock: the kernel gives it up when its process dies, so none is ever stale. The file
    stays, since deleting a lock file lets two hold "the" lock.

    Raises:
        StoreError: not got in ``timeout`` seconds (names file and holder), or the file system has
            no locks.
        Cancelled: ``cancel`` was set.
        OSError: the file cannot be opened.
    """
    began = time.monotonic()
    next_report = REPORT_AFTER_S
    pause = 0.005
    while (fd := _try(path)) is None:
        waited = time.monotonic() - began
        if cancel is not None and cancel.is_set():
            raise Cancelled(f"{path}: cancelled")
        if waited > timeout:
            raise StoreError(
                f"{path}: still locked after {timeout:g} s by process {_holder(path)}. Is it "
                f"building? If it hangs, end it; the lock goes with it."
            )
        if waited > next_report:
            next_report *= 2
            if report is not None:
                report(f"waiting for process {_holder(path)}, which holds {path}")
        time.sleep(pause)
        pause = min(0.2, pause * 1.5)
    try:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()}\n".encode())
        yield pause > 0.005
    finally:
        os.close(fd)


@contextlib.contextmanager
def hold_if_free(path: Path) -> Iterator[bool]:
    """Hold the lock at ``path`` if no one does; yields whether it is held. Raises OSError."""
    fd = _try(path)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def _try(path: Path) -> int | None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise StoreError(
                f"{path}: this file system has no locks ({error.strerror}). Set FLUXGEN_STORE to "
                f"a local disk."
            ) from error
        raise
    return fd


def _holder(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace").strip() or "unknown"
    except OSError:
        return "unknown"
