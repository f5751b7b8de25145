"""The user's tuning database: the best record of each problem, and what failed.

A key is everything that makes two calls different: topology (GPU, link, ranks), the whole signature
(op, types, layout, epilogue, scaling, return_gathered), n, k, tp and m. Of two records of one key
the one of the better provenance stays; of equal provenance, the newer.
"""

# ruff: noqa: S608 (the only interpolated SQL text is this module's own constants)
from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.errors import DatabaseError, UsageError
from fluxgen.core.problem import Problem
from fluxgen.core.record import Record, Status
from fluxgen.core.topology import Topology
from fluxgen.db.codec import (
    MAX_TEXT,
    canonical_json,
    created_from,
    json_value,
    problem_from_dict,
    record_from_json,
    record_to_json_line,
)
from fluxgen.db.connect import BUSY_S, check, query, transact
from fluxgen.db.keys import topology_key
from fluxgen.db.mounts import network_filesystem
from fluxgen.db.schema import PUT_FAILURE, PUT_RECORD, Key, key_of

_log = logging.getLogger("fluxgen.db")
_warned: set[Path] = set()

_ONE = "topology = ? AND signature = ? AND n = ? AND k = ? AND tp = ? AND m = ?"
_FAMILY = "topology = ? AND signature = ? AND n = ? AND k = ? AND tp = ?"
_ORDER = "ORDER BY topology, signature, n, k, tp, m"
_RECORD_ROW = "topology, signature, n, k, tp, m, data"


@dataclass(frozen=True)
class Failure:
    """A configuration never to be proposed again for a problem.

    Attributes:
        problem, topology: where it failed (``Topology.key``).
        kernel, run: what failed; ``run`` is None when the kernel fails with any (it did not build).
        reason: why, in one line. created: UTC as in ``Record``, may be empty.
    """

    problem: Problem
    topology: str
    kernel: KernelConfig
    run: RunConfig | None
    reason: str
    created: str = ""

    def covers(self, kernel: KernelConfig | None, run: RunConfig | None) -> bool:
        """Whether ``kernel`` with ``run`` is what failed."""
        return kernel == self.kernel and (self.run is None or run == self.run)


def replaces(new: Record, old: Record) -> bool:
    """Whether ``new`` takes the place of ``old`` under one key: better provenance, else newer."""
    if new.provenance is not old.provenance:
        return new.provenance.rank > old.provenance.rank
    return new.created >= old.created


class Database:
    """One SQLite file; any number of processes and threads may use it at once.

    An object holds no connection and no lock: it may be shared by threads and survive a fork.

    Args:
        path: the file; it and its directory are created by the first write.
        busy_s: how long to wait for other processes, seconds.

    Raises:
        DatabaseError: the path exists and is not a tuning database this version can read. It is
            never overwritten; the message says how to move it away.
    """

    def __init__(self, path: Path | str, *, busy_s: float = BUSY_S) -> None:
        try:
            self.path = Path(os.path.realpath(path))
        except (ValueError, OSError) as error:
            raise DatabaseError(f"tuning database: expected a path; {error}") from None
        self._busy_s = busy_s
        if self.exists():
            check(self.path, busy_s)
        kind = network_filesystem(self.path)
        if kind and self.path not in _warned:
            _warned.add(self.path)
            _log.warning(
                "%s is on a network file system (%s), where SQLite's locks are unreliable: let "
                "only one host write it, or set FLUXGEN_DB to a local path",
                self.path,
                kind,
            )

    def exists(self) -> bool:
        """Whether the file is there; without it, everything reads as empty."""
        return os.path.lexists(self.path)

    def put(self, record: Record) -> bool:
        """Store ``record`` unless a better one is there (see :func:`replaces`).

        Returns:
            Whether it was stored.

        Raises:
            UsageError: the record is invalid, or failed (use :meth:`put_failure`).
            DatabaseError: the file cannot be written.
        """
        return self.put_many([record]) == 1

    def put_many(self, records: Iterable[Record]) -> int:
        """Store records in one transaction, all or none; returns how many were stored.

        Raises:
            UsageError, DatabaseError: as :meth:`put`.
        """
        rows: list[tuple[Key, Record, str]] = []
        for record in records:
            if record.status is not Status.OK:
                raise UsageError(
                    f"record of {record.problem.key}: expected status ok; found "
                    f"{record.status.value}. Store failures with put_failure"
                )
            line = record_to_json_line(record)
            rows.append((key_of(record.problem, record.topology), record, line))

        def work(connection: sqlite3.Connection) -> int:
            stored = 0
            for key, record, line in rows:
                sql = f"SELECT {_RECORD_ROW} FROM records WHERE {_ONE}"
                row = connection.execute(sql, key).fetchone()
                # A damaged row counts as absent: the next tuning run heals it.
                old = None if row is None else _decoded(row)
                if not isinstance(old, Record) or replaces(record, old):
                    connection.execute(PUT_RECORD, (*key, line))
                    stored += 1
            return stored

        return transact(self.path, work, self._busy_s) if rows else 0

    def get(self, problem: Problem, topology: Topology | str) -> Record | None:
        """The record of exactly this problem, or None.

        Raises:
            UsageError: a malformed topology key. DatabaseError: the file is unusable.
        """
        found = self._select(f"WHERE {_ONE}", key_of(problem, topology_key(topology)))
        return found[0] if found else None

    def find(self, problem: Problem, topology: Topology | str) -> tuple[Record, ...]:
        """Every record of the problem's family (all but m are equal), by ascending m.

        Raises:
            UsageError, DatabaseError: as :meth:`get`.
        """
        key = key_of(problem, topology_key(topology))[:-1]
        return tuple(self._select(f"WHERE {_FAMILY} {_ORDER}", key))

    def records(self, topology: Topology | str | None = None) -> Iterator[Record]:
        """Every record (of one topology), sorted by key; a snapshot taken at the call.

        Raises:
            UsageError, DatabaseError: as :meth:`get`.
        """
        if topology is None:
            return iter(self._select(_ORDER, ()))
        return iter(self._select(f"WHERE topology = ? {_ORDER}", (topology_key(topology),)))

    def delete(self, problem: Problem, topology: Topology | str) -> bool:
        """Remove one record; returns whether there was one.

        Raises:
            UsageError, DatabaseError: as :meth:`put`.
        """
        return self._delete("records", key_of(problem, topology_key(topology))) == 1

    def put_failure(
        self,
        problem: Problem,
        topology: Topology | str,
        kernel: KernelConfig,
        run: RunConfig | None,
        reason: str,
        created: str = "",
    ) -> None:
        """Remember that ``kernel`` with ``run`` (None: with any) failed on ``problem``.

        ``reason`` is kept as one printable line of at most 512 characters.

        Raises:
            UsageError: a malformed topology key or time. DatabaseError: as :meth:`put`.
        """
        line = " ".join("".join(c if c.isprintable() else " " for c in reason).split())
        row = (
            *key_of(problem, topology_key(topology)),
            canonical_json(problem.to_dict()),
            canonical_json(kernel.to_dict()),
            canonical_json(None if run is None else run.to_dict()),
            line[:MAX_TEXT],
            created_from(created),
        )
        transact(self.path, lambda c: c.execute(PUT_FAILURE, row).rowcount, self._busy_s)

    def failures(
        self, problem: Problem | None = None, topology: Topology | str | None = None
    ) -> tuple[Failure, ...]:
        """What failed: on this problem (None: any), on this topology (None: any).

        Raises:
            UsageError, DatabaseError: as :meth:`get`.
        """
        if not self.exists():
            return ()
        sql = f"SELECT topology, problem, kernel, run, reason, created FROM failures {_ORDER}"
        wanted = None if topology is None else topology_key(topology)
        rows = query(self.path, lambda c: c.execute(sql).fetchall(), self._busy_s)
        found = (_failure(self.path, row) for row in rows if wanted in (None, row[0]))
        return tuple(f for f in found if f is not None and problem in (None, f.problem))

    def clear_failures(self, problem: Problem, topology: Topology | str) -> int:
        """Forget what failed on one problem, e.g. after a fix; returns how many were forgotten.

        Raises:
            UsageError, DatabaseError: as :meth:`put`.
        """
        return self._delete("failures", key_of(problem, topology_key(topology)))

    def _delete(self, table: str, key: Key) -> int:
        if not self.exists():
            return 0
        sql = f"DELETE FROM {table} WHERE {_ONE}"
        return transact(self.path, lambda c: c.execute(sql, key).rowcount, self._busy_s)

    def _select(self, clause: str, values: tuple[object, ...]) -> list[Record]:
        if not self.exists():
            return []
        sql = f"SELECT {_RECORD_ROW} FROM records {clause}"
        rows = query(self.path, lambda c: c.execute(sql, values).fetchall(), self._busy_s)
        decoded = [_decoded(row) for row in rows]
        bad = [text for text in decoded if isinstance(text, str)]
        if bad:
            _log.warning(
                "%s: %d damaged record(s) ignored, tune again to heal them; the first: %s",
                self.path,
                len(bad),
                bad[0],
            )
        return [record for record in decoded if isinstance(record, Record)]


def _decoded(row: tuple[object, ...]) -> Record | str:
    """The record of a row, or why it is unusable."""
    *key, data = row
    try:
        record = record_from_json(data if isinstance(data, str) else "")
    except UsageError as error:
        return str(error)
    if record.status is not Status.OK:
        return f"status {record.status.value}"
    if list(key_of(record.problem, record.topology)) != key:
        return f"the key {ascii(key)[:200]} is not its record's"
    return record


def _failure(path: Path, row: tuple[object, ...]) -> Failure | None:
    try:
        topology, problem, kernel, run, reason, created = (str(value) for value in row)
        plain_run = json_value(run)
        return Failure(
            problem=problem_from_dict(json_value(problem)),
            topology=topology_key(topology),
            kernel=KernelConfig.from_dict(json_value(kernel)),
            run=None if plain_run is None else RunConfig.from_dict(plain_run),
            reason=reason,
            created=created,
        )
    except UsageError as error:
        _log.warning("%s: a damaged failure entry is ignored: %s", path, error)
        return None
