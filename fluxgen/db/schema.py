"""The SQLite schema, its versions, and the migrations between them.

Version 1 kept one text key a record, and failures among the records. Version 2 keeps the key in
columns, so that a family of problems is found without reading everything, and failures in a table
of their own, so that one problem can have many.

What a migration cannot read it does not drop: such rows stay in ``records_v1``.
"""

from __future__ import annotations

import sqlite3

from fluxgen.core.errors import UsageError
from fluxgen.core.problem import Problem
from fluxgen.core.record import Record, Status
from fluxgen.db.codec import canonical_json, record_from_json, record_to_json_line

APPLICATION_ID = 0x464C5847
"""``FLXG`` in the file's header: told apart from any other SQLite file."""
VERSION = 2
"""The schema this code writes (``PRAGMA user_version``)."""

KEY_COLUMNS = ("topology", "signature", "n", "k", "tp", "m")
"""Everything that tells two records apart, ``m`` last so that a family is one range."""

_KEY_SQL = """
    topology TEXT NOT NULL, signature TEXT NOT NULL,
    n INTEGER NOT NULL, k INTEGER NOT NULL, tp INTEGER NOT NULL, m INTEGER NOT NULL"""

TABLES = (
    f"CREATE TABLE records ({_KEY_SQL}, data TEXT, "
    f"PRIMARY KEY ({', '.join(KEY_COLUMNS)})) WITHOUT ROWID",
    f"CREATE TABLE failures ({_KEY_SQL}, problem TEXT NOT NULL, kernel TEXT NOT NULL, "
    "run TEXT NOT NULL, reason TEXT NOT NULL, created TEXT NOT NULL, "
    f"PRIMARY KEY ({', '.join(KEY_COLUMNS)}, kernel, run)) WITHOUT ROWID",
)
"""Version 2. A record's ``data`` is its canonical line; ``null`` as ``run``: with any."""

PUT_RECORD = "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, ?)"
PUT_FAILURE = "INSERT OR REPLACE INTO failures VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"

Key = tuple[str, str, int, int, int, int]


def key_of(problem: Problem, topology: str) -> Key:
    """The values of :data:`KEY_COLUMNS`."""
    return topology, problem.signature.key, problem.n, problem.k, problem.tp, problem.m


def create_tables(connection: sqlite3.Connection) -> None:
    """Make an empty database of the current version; the caller holds the transaction."""
    for statement in TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def migrate(connection: sqlite3.Connection) -> bool:
    """Bring an older schema to :data:`VERSION`; the caller holds the transaction.

    Returns:
        Whether anything was changed.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return False
    for old in range(version, VERSION):
        _MIGRATIONS[old](connection)
    connection.execute(f"PRAGMA user_version = {VERSION}")
    return True


def _from_1_to_2(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE records RENAME TO records_v1")
    for statement in TABLES:
        connection.execute(statement)
    for rowid, data in connection.execute("SELECT rowid, data FROM records_v1").fetchall():
        try:
            record = record_from_json(data if isinstance(data, str) else "")
        except UsageError:
            continue
        if record.status is Status.FAILED:
            connection.execute(PUT_FAILURE, _failure_row(record))
        else:
            key = key_of(record.problem, record.topology)
            connection.execute(PUT_RECORD, (*key, record_to_json_line(record)))
        connection.execute("DELETE FROM records_v1 WHERE rowid = ?", (rowid,))
    if connection.execute("SELECT count(*) FROM records_v1").fetchone() == (0,):
        connection.execute("DROP TABLE records_v1")


def _failure_row(record: Record) -> tuple[object, ...]:
    plain = record.to_dict()
    texts = (canonical_json(plain[name]) for name in ("problem", "kernel", "run"))
    reason = record.environment.method or "failed; version 1 kept no reason"
    return (*key_of(record.problem, record.topology), *texts, reason, record.created)


_MIGRATIONS = {1: _from_1_to_2}
