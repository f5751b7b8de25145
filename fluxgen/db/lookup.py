"""Which configuration to run: exact, else a near size, else the unfused default; and why.

The rule, for a problem of m tokens and the records of its family (same topology, signature, n, k
and tp) at tuned sizes t:

1. ``m = 0`` or ``k = 0``: default; nothing is launched.
2. **exact**: the record at t = m.
3. **bucket**: the smallest t above m with t <= 2 m; else the largest t below m with m <= 2 t.
   Up comes first because a configuration for more tokens wastes a part of its last tiles, one for
   fewer cuts the work too finely. Beyond a factor of two either way nothing is inferred: a tile
   tuned for a handful of tokens never runs a prefill.
4. **default**: the unfused path (kernel and run are None).

Each candidate must be legal for the *asked* problem (its m may not divide, its chunks may not fit),
must not have failed on this machine, and must not be slower than its own baseline; else the next
one is tried. At equal t, the better provenance comes first (measured, emulated, predicted) and, at
equal provenance, the user's database before the shipped packs. A baseline record is an answer
like any other: it says that the unfused path won there.

So with the ladder t = 1, 2, 4, 8: m = 3 -> 4, m = 12 -> 8, m = 0, 17, 2048 and 10**6 -> default.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from fluxgen.codegen.space import why_illegal
from fluxgen.core.errors import DatabaseError, UsageError
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Record
from fluxgen.core.settings import Settings, data_dir
from fluxgen.core.topology import Topology
from fluxgen.db import packs as shipped
from fluxgen.db.database import Database, Failure
from fluxgen.db.result import LookupResult, Reason, default, found, miss
from fluxgen.db.verify import why_slower

MEMO_SIZE = 8192
"""Answers kept; more distinct questions than that start over (about 1 KB each)."""

REACH = 2
"""The largest ratio of the asked m to a tuned one, either way, that a record is used over."""

__all__ = ["MEMO_SIZE", "REACH", "Lookup", "LookupResult", "Reason", "default_lookup", "lookup"]

_log = logging.getLogger("fluxgen.db")


_Family = dict[int, list[tuple[Record, str]]]
"""Tuned m -> records there, best first, each with its source."""
_FamilyKey = tuple[Signature, int, int, int]
_Entry = tuple[LookupResult, Signature, Topology]


class _Snapshot:
    """What was read once: per topology, its families and failures; and the answers so far."""

    def __init__(self) -> None:
        self.families: dict[str, dict[_FamilyKey, _Family]] = {}
        self.failures: dict[str, list[Failure]] = {}
        self.answers: dict[tuple[Problem, Topology], LookupResult] = {}
        # By identity, which hashes several times faster than by value. An entry holds its objects,
        # so an identity in here cannot be reused for another object.
        self.memo: dict[tuple[int, int, int, int, int, int], _Entry] = {}


class Lookup:
    """Answers from one database and one directory of packs; safe to share between threads.

    Both are read once per topology, at its first question. Later changes of the files are seen
    after :meth:`refresh` only, so that all layers of a running model decide alike. A database or
    pack that cannot be used is one warning and a miss, never an error.

    Args:
        db: a tuning database or its path; None for none. It need not exist.
        packs: a directory of packs; None for none.
        memo_size: answers kept. tell: warn, once for each family, where there is no record.
    """

    def __init__(
        self,
        db: Database | Path | str | None,
        packs: Path | None,
        *,
        memo_size: int = MEMO_SIZE,
        tell: bool = True,
    ) -> None:
        self._db = db
        self._packs = packs
        self._memo_size, self._tells = memo_size, tell
        self._lock = threading.Lock()
        self._told: set[tuple[str, _FamilyKey]] = set()
        self._snapshot = _Snapshot()

    def __call__(self, problem: Problem, topology: Topology) -> LookupResult:
        """The answer for ``problem`` on ``topology``; see the module for the rule.

        Fastest (well below a microsecond) when the caller passes the same ``Signature`` and
        ``Topology`` objects again, as an op that is called repeatedly does.
        """
        signature = problem.signature
        entry = self._snapshot.memo.get(
            (id(signature), id(topology), problem.m, problem.n, problem.k, problem.tp)
        )
        return entry[0] if entry is not None else self._slow(problem, topology)

    lookup = __call__

    def first(self, problems: Sequence[Problem], topology: Topology) -> LookupResult:
        """The best answer for any of ``problems``: exact, else a near size, else the default.

        For questions that differ in what hardly changes the best choice, nearest first. A miss is
        logged once, for ``problems[0]``.
        """
        answers = [self._slow(problem, topology, tell=False) for problem in problems]
        for reason in (Reason.EXACT, Reason.BUCKET):
            for answer in answers:
                if answer.reason is reason:
                    return answer
        return self(problems[0], topology)

    def refresh(self) -> None:
        """Forget everything read; the next question reads the files again."""
        with self._lock:
            self._snapshot = _Snapshot()
            self._told.clear()

    def _slow(self, problem: Problem, topology: Topology, tell: bool = True) -> LookupResult:
        with self._lock:
            snapshot = self._snapshot
            answer = snapshot.answers.get((problem, topology))
            if answer is None:
                answer = self._decide(snapshot, problem, topology)
                if len(snapshot.answers) >= self._memo_size:
                    snapshot.answers.clear()
                snapshot.answers[problem, topology] = answer
            if not tell:
                return answer
            if answer.reason is Reason.DEFAULT and problem.m and problem.k:
                self._tell(problem, topology, answer)
            if len(snapshot.memo) >= self._memo_size:
                # Another thread may be inside the old dict's get; it keeps that dict alive.
                snapshot.memo = {}
            key = (id(problem.signature), id(topology), problem.m, problem.n, problem.k, problem.tp)
            snapshot.memo[key] = (answer, problem.signature, topology)
            return answer

    def _decide(self, snapshot: _Snapshot, problem: Problem, topology: Topology) -> LookupResult:
        key = f"{topology.key}/{problem.key}"
        if problem.m == 0 or problem.k == 0:
            return default(key, f"{key}: a zero size, nothing to launch")
        if topology.key not in snapshot.families:
            self._load(snapshot, topology.key)
        family_key = (problem.signature, problem.n, problem.k, problem.tp)
        family = snapshot.families[topology.key].get(family_key, {})
        failures = snapshot.failures[topology.key]
        rejected = ""
        for tuned in _candidates(problem.m, family):
            for record, source in family[tuned]:
                reason = _why_not(problem, topology, record, failures)
                if reason is None:
                    return found(key, problem, record, source)
                rejected = rejected or f"; the record for m={tuned} does not fit: {reason}"
        return default(key, miss(key, family, rejected))

    def _tell(self, problem: Problem, topology: Topology, answer: LookupResult) -> None:
        told = (topology.key, (problem.signature, problem.n, problem.k, problem.tp))
        loud = self._tells and told not in self._told
        _log.log(logging.WARNING if loud else logging.DEBUG, "%s", answer.text)
        self._told.add(told)

    def _load(self, snapshot: _Snapshot, topology: str) -> None:
        found: list[tuple[Record, str]] = []
        failures: list[Failure] = []
        try:
            if self._db is not None:
                db = self._db if isinstance(self._db, Database) else Database(self._db)
                found += [(record, str(db.path)) for record in db.records(topology)]
                failures += db.failures(topology=topology)
        except (DatabaseError, UsageError) as error:
            _log.warning("tuning database ignored: %s", error)
        try:
            if self._packs is not None:
                records, problems = shipped.load(self._packs, topology)
                found += [(record, str(self._packs)) for record in records]
                if problems:
                    _log.warning(
                        "%d bad pack line(s) ignored; first: %s", len(problems), problems[0]
                    )
        except (DatabaseError, UsageError) as error:
            _log.warning("tuning packs ignored: %s", error)
        families: dict[_FamilyKey, _Family] = {}
        # Stable: at equal provenance the user's database, read first, stays first.
        for record, source in sorted(found, key=lambda item: -item[0].provenance.rank):
            p = record.problem
            family = families.setdefault((p.signature, p.n, p.k, p.tp), {})
            family.setdefault(p.m, []).append((record, source))
        snapshot.failures[topology] = failures
        snapshot.families[topology] = families


def _candidates(m: int, family: _Family) -> list[int]:
    """The tuned sizes that may serve ``m``, best first."""
    above = sorted(t for t in family if m < t <= REACH * m)
    below = sorted((t for t in family if t < m <= REACH * t), reverse=True)
    return [m] * (m in family) + above + below


def _why_not(
    problem: Problem, topology: Topology, record: Record, failures: list[Failure]
) -> str | None:
    if record.kernel is None or record.run is None:
        return None
    for failure in failures:
        if failure.problem in (problem, record.problem) and failure.covers(
            record.kernel, record.run
        ):
            return f"it failed before: {failure.reason}"
    return why_illegal(problem, topology, record.kernel, record.run) or why_slower(record)


def default_lookup(db: Path | None = None, packs: Path | None = None) -> Lookup:
    """The process's one Lookup of a database path and packs directory.

    None means the settings' database (``FLUXGEN_DB``) and the shipped packs.
    """
    return _shared(
        Settings.load().db if db is None else db, data_dir("tuning_db") if packs is None else packs
    )


@functools.cache
def _shared(db: Path, packs: Path) -> Lookup:
    return Lookup(db, packs)


def lookup(
    problem: Problem,
    topology: Topology,
    *,
    db: Path | None = None,
    packs: Path | None = None,
) -> LookupResult:
    """One answer from :func:`default_lookup`; hot callers keep the ``Lookup`` instead."""
    return default_lookup(db, packs)(problem, topology)
