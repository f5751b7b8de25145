"""Opening the SQLite file: every way it can be unusable becomes one clear DatabaseError.

A connection lives for one transaction. That costs a fraction of a millisecond, and in return there
is nothing that a fork, a thread, a replaced file or a read transaction held elsewhere could break.

The file is made under a temporary name and linked into place when it is complete, so a database
is never visible half made: a file of 0 bytes is always damage (a truncated copy, a full disk),
never one that another process is about to fill, and is reported like any other damage. (Only where
the file system has no hard links is it made in place.) Nothing here replaces an existing file.

The file is looked at through SQLite alone: opening and closing it beside SQLite would drop the
locks that SQLite holds in this process (https://sqlite.org/howtocorrupt.html, 2.2).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import secrets
import shlex
import sqlite3
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from fluxgen.core.errors import DatabaseError
from fluxgen.db.mounts import network_filesystem
from fluxgen.db.schema import APPLICATION_ID, VERSION, create_tables, migrate

BUSY_S = 60.0
"""How long to wait for other processes' transactions, seconds; each takes milliseconds."""

T = TypeVar("T")
_log = logging.getLogger("fluxgen.db")


def transact(path: Path, work: Callable[[sqlite3.Connection], T], busy_s: float = BUSY_S) -> T:
    """Run ``work`` in one write transaction, after creating or migrating the file if needed.

    ``work`` may run more than once when other processes are in the way.

    Raises:
        DatabaseError: the file is unusable, read-only, or stays locked for ``busy_s`` seconds.
    """
    if not _exists(path):
        _create(path)

    def attempt() -> T:
        # Looked at read-only first: opened for writing, SQLite would tidy up beside a foreign file.
        with contextlib.closing(_open(path, "mode=ro", busy_s)) as connection:
            _identify(path, connection)
        with contextlib.closing(_open(path, "mode=rw", busy_s)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            _identify(path, connection)
            migrated = migrate(connection)
            result = work(connection)  # an exception closes the connection, which rolls back
            connection.execute("COMMIT")
            if migrated:
                _prefer_wal(path, connection)
            return result

    return _persist(path, attempt, busy_s)


def query(path: Path, work: Callable[[sqlite3.Connection], T], busy_s: float = BUSY_S) -> T:
    """Run ``work`` on one consistent snapshot; changes nothing, works on read-only files.

    Raises:
        DatabaseError: the file is missing, unusable, or stays locked for ``busy_s`` seconds.
    """
    if not _exists(path):
        raise DatabaseError(f"{path}: no such tuning database; tune first, or check the path")

    def attempt(options: str) -> T:
        with contextlib.closing(_open(path, options, busy_s)) as connection:
            if _identify(path, connection) == VERSION:
                connection.execute("BEGIN")
                return work(connection)
            # An older schema is read through a migrated copy: the file may not be ours to change.
            with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
                connection.backup(copy)
                copy.text_factory = connection.text_factory
                migrate(copy)
                return work(copy)

    def with_fallback() -> T:
        try:
            return attempt("mode=ro")
        except sqlite3.OperationalError as error:
            if not _says(error, "unable to open", "readonly database"):
                raise
        # WAL needs a writable directory, even to read. Without one nobody writes the file either.
        if _has_log(path):
            _log.warning("%s: read-only; its newest records, in %s-wal, are ignored", path, path)
        return attempt("mode=ro&immutable=1")

    return _persist(path, with_fallback, busy_s)


def check(path: Path, busy_s: float = BUSY_S) -> None:
    """Read the whole file and check its structure.

    Raises:
        DatabaseError: it is damaged, foreign, of a newer schema, or unreadable.
    """

    def work(connection: sqlite3.Connection) -> None:
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise damaged(path, str(verdict).splitlines()[0])

    query(path, work, busy_s)


def damaged(path: Path, detail: str) -> DatabaseError:
    """The error for a file that is not, or no longer, a tuning database."""
    moves = _move(path, f"{path}.corrupt")
    if _has_log(path):
        moves += " && " + _move(_log_of(path), f"{path}.corrupt-wal")
    return DatabaseError(
        f"{path}: expected a fluxgen tuning database; found {detail}. It is left as it is; to "
        f"start afresh, move it away: {moves}"
    )


def _move(old: Path, new: str) -> str:
    return f"mv {shlex.quote(str(old))} {shlex.quote(new)}"


def _log_of(path: Path) -> Path:
    """SQLite's write-ahead log beside a database: committed pages not yet in the file itself."""
    return path.with_name(path.name + "-wal")


def _has_log(path: Path) -> bool:
    try:
        return _log_of(path).stat().st_size > 0
    except OSError:
        return False


def _exists(path: Path) -> bool:
    try:
        status = path.stat()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise DatabaseError(f"{path}: the tuning database cannot be opened: {error}") from None
    if stat.S_ISDIR(status.st_mode):
        raise DatabaseError(f"{path}: expected a tuning database file; found a directory")
    if not stat.S_ISREG(status.st_mode):
        raise DatabaseError(f"{path}: expected a tuning database file; found a device or pipe")
    if status.st_size < 512:  # SQLite's smallest page; it takes shorter files for empty databases
        raise damaged(path, f"a file of {status.st_size} bytes, too short for one")
    if status.st_size % 512 and not _has_log(path):  # SQLite would read the rest as zeros
        raise damaged(path, f"a file of {status.st_size} bytes, cut off within a page")
    return True


def _open(path: Path, options: str, busy_s: float) -> sqlite3.Connection:
    uri = f"file:{quote(os.fsencode(path))}?{options}"
    connection = sqlite3.connect(uri, uri=True, timeout=busy_s, isolation_level=None)
    # Bad UTF-8 in one row must not fail a query over all rows: the row's own check refuses it.
    connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    return connection


def _identify(path: Path, connection: sqlite3.Connection) -> int:
    """The schema version of a file that is ours and not newer than this code."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID or version < 1:
        raise damaged(path, "another program's SQLite file")
    if version > VERSION:
        raise DatabaseError(
            f"{path}: expected schema {VERSION} or older; found {version}, written by a newer "
            "fluxgen. Update fluxgen, or point FLUXGEN_DB at another file"
        )
    return int(version)


def _create(path: Path) -> None:
    if _has_log(path) and not path.exists():  # asked last: another process may be creating it
        # SQLite would replay a lost database's log into the new one.
        raise DatabaseError(
            f"{path}: the database is gone but its log is not. Bring it back, or move the log "
            f"away: {_move(_log_of(path), f'{path}.corrupt-wal')}"
        )
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _initialise(temporary)
            _publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, sqlite3.Error) as error:
        raise DatabaseError(
            f"{path}: the tuning database cannot be created: {error}. Set FLUXGEN_DB to a path in "
            "a writable directory"
        ) from None


def _publish(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process was faster; its database is as good
    except OSError:
        _initialise(path)


def _initialise(path: Path) -> None:
    with contextlib.closing(_open(path, "mode=rwc", BUSY_S)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
            create_tables(connection)
        connection.execute("COMMIT")
        _prefer_wal(path, connection)


def _prefer_wal(path: Path, connection: sqlite3.Connection) -> None:
    # WAL lets readers and one writer work at once, but needs memory shared by all of them, which
    # two hosts do not have. Where it is refused, the rollback journal is slower and as safe.
    if network_filesystem(path) is None:
        with contextlib.suppress(sqlite3.OperationalError):
            connection.execute("PRAGMA journal_mode = WAL")


def _says(error: sqlite3.Error, *phrases: str) -> bool:
    return any(phrase in str(error) for phrase in phrases)


def _persist(path: Path, attempt: Callable[[], T], busy_s: float) -> T:
    """Retry while others hold locks that SQLite's own busy handler does not wait for."""
    deadline = time.monotonic() + busy_s
    while True:
        try:
            return attempt()
        except sqlite3.OperationalError as error:
            if not _says(error, "is locked", "locking protocol"):
                raise _explained(path, error) from None
            if time.monotonic() >= deadline:
                raise DatabaseError(
                    f"{path}: locked by another process for {busy_s:g} s; find it with "
                    f"'fuser {shlex.quote(str(path))}' and let it finish"
                ) from None
            time.sleep(random.uniform(0.005, 0.05))  # noqa: S311
        except sqlite3.Error as error:
            raise _explained(path, error) from None


def _explained(path: Path, error: sqlite3.Error) -> DatabaseError:
    shut = os.access(path, os.R_OK) and not os.access(path.parent, os.W_OK)
    if _says(error, "readonly database") or (shut and _says(error, "unable to open")):
        return DatabaseError(
            f"{path}: read-only; records cannot be written. Make it and its directory writable, "
            "or set FLUXGEN_DB to another path"
        )
    if _says(error, "unable to open", "disk I/O", "disk is full"):
        kind = network_filesystem(path)
        where = f" on a network file system ({kind}): use a local path" if kind else ""
        return DatabaseError(f"{path}: the tuning database cannot be used: {error}{where}")
    return damaged(path, str(error))
