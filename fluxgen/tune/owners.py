"""Which process works on a study, and whether it still lives."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path

PREFIX = "tuner:"


def this_owner() -> str:
    """A key for one session of this process: host, process id, start time, random text."""
    pid = os.getpid()
    return f"{PREFIX}{_host()}|{pid}|{_started(pid)}|{secrets.token_hex(4)}"


def alive(owner: str) -> bool | None:
    """Whether the process of an owner key runs; None if it is of another host or unreadable."""
    fields = owner.removeprefix(PREFIX).split("|")
    if len(fields) != 4 or fields[0] != _host() or not fields[1].isdigit():
        return None
    pid = int(fields[1])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it exists, and belongs to someone else
    # A zombie is dead, and an id may have been given to a later process.
    return _started(pid) == fields[2]


def others_alive(owners: Iterable[str], own: str) -> bool:
    """Whether any owner but ``own`` may still be at work; those of other hosts may."""
    return any(owner != own and alive(owner) is not False for owner in owners)


def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = "-"
    return f"{socket.gethostname()}/{boot}"


def _started(pid: int) -> str:
    """Start time of a process in clock ticks, "dead" for a zombie, "-" where there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "-"
    fields = text.rpartition(")")[2].split()
    return "dead" if fields[0] in "ZX" else fields[19]
