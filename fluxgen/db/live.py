"""Answers to whoever asks by names: warm in about a microsecond, and never older than the files.

The ops of a running model keep one :class:`~fluxgen.db.lookup.Lookup`, so that all layers decide
alike. A person, or a scheduler, that asks :func:`fluxgen.lookup` wants to know what the database
says now:

* another ``FLUXGEN_DB`` (or ``FLUXGEN_HOME``, ``XDG_CACHE_HOME``, ``HOME`` behind it) counts from
  the next call on;
* a change of the database, by any process, counts at the latest ``CHECK_S`` after it was made: so
  often a call looks at the files, at most;
* the shipped packs are read once per topology, and again with the database.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from fluxgen.core.problem import Problem, Signature
from fluxgen.core.settings import Settings, data_dir
from fluxgen.core.topology import Topology
from fluxgen.db.lookup import MEMO_SIZE, Lookup
from fluxgen.db.result import LookupResult

__all__ = ["CHECK_S", "LiveLookup"]

CHECK_S = 0.01
"""Seconds between two looks at the database's files."""
_SETTLED_NS = 50_000_000
"""A file that changed less than this before it was read may have changed again within one tick of
its file system's clock, unseen; it is read once more."""

# The dict behind os.environ, which has no other that a missing variable does not cost an exception.
_variable = getattr(os.environ, "_data", os.environb).get
_now = time.monotonic


class LiveLookup:
    """Lookups by names, each answered once until something changes; safe to share.

    Args:
        packs: a directory of packs, None: the shipped ones.
    """

    def __init__(self, packs: Path | None = None) -> None:
        self._packs = data_dir("tuning_db") if packs is None else packs
        self._lock = threading.Lock()
        self._where: object = None  # nowhere yet: what the first call finds is another place
        self._until = 0.0
        self._db = Path()
        self._files: tuple[Any, ...] = ()
        self._settled = True
        self._look = Lookup(None, None)
        self._answers: dict[tuple[Any, ...], LookupResult] = {}

    def __call__(
        self, op: str, m: int, n: int, k: int, tp: int, target: str, link: str, dtype: str
    ) -> LookupResult:
        """As :func:`fluxgen.lookup`."""
        # The types, since 4096.0 and True are equal to integers, and refused.
        key = (op, m, n, k, tp, target, link, dtype, type(m), type(n), type(k), type(tp))
        try:
            answer = self._answers.get(key)
        except TypeError:  # not hashable: let the checks say what it should be
            return self._look(*_parsed(op, m, n, k, tp, target, link, dtype))
        if answer is not None and _now() < self._until and _place() == self._where:
            return answer
        asked = _parsed(op, m, n, k, tp, target, link, dtype)
        with self._lock:
            self._update()
            answer = self._look(*asked)
            if len(self._answers) >= MEMO_SIZE:
                self._answers = {}
            self._answers[key] = answer
            return answer

    def _update(self) -> None:
        """Begin anew if the database is another one, or has changed."""
        where = _place()
        moved = where != self._where
        if not moved and _now() < self._until:
            return
        if moved:
            self._db = Settings.load().db
        files = _stamps(self._db)
        if moved or files != self._files or not self._settled:
            newest = max((stamp[0] for stamp in files if stamp is not None), default=0)
            self._settled = time.time_ns() - newest > _SETTLED_NS
            self._answers = {}
            self._look = Lookup(self._db, self._packs)
        self._where, self._files = where, files
        self._until = _now() + CHECK_S


def _parsed(
    op: str, m: int, n: int, k: int, tp: int, target: str, link: str, dtype: str
) -> tuple[Problem, Topology]:
    """Raises UsageError for what is none."""
    return Problem(Signature.of(op, dtype), m, n, k, tp), Topology.of(target, link, tp)


def _place() -> object:
    """What of the environment says which database is asked."""
    named = _variable(b"FLUXGEN_DB")
    return named or (_variable(b"FLUXGEN_HOME"), _variable(b"XDG_CACHE_HOME"), _variable(b"HOME"))


def _stamps(db: Path) -> tuple[tuple[int, int, int] | None, ...]:
    """What changes with the database and with its write-ahead log."""
    found: list[tuple[int, int, int] | None] = []
    for path in (db, f"{db}-wal"):
        try:
            status = os.stat(path)  # noqa: PTH116
        except (OSError, ValueError):
            found.append(None)
        else:
            found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)
