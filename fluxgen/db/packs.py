"""Shipped packs: ``<topology key>/<op>.jsonl`` under ``tuning_db/``, one winner a line, reviewable.

Lines are canonical (:func:`fluxgen.db.codec.record_to_json_line`), sorted by signature, n, k and m,
and end with a newline, so that re-tuning one problem is a diff of one line.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from fluxgen.core.errors import DatabaseError, UsageError
from fluxgen.core.record import Record, Status
from fluxgen.core.topology import Topology
from fluxgen.db.codec import record_from_json, record_to_json_line
from fluxgen.db.database import Database
from fluxgen.db.keys import topology_key
from fluxgen.db.schema import Key, key_of

MAX_PACK_BYTES = 64 * 1024 * 1024
"""Largest pack file read: about 60,000 records."""
MAX_SHOWN = 5
"""Bad lines named in one error."""


@dataclass(frozen=True)
class ImportReport:
    """What an import did: records ``stored``, and ``kept`` back because a better one was there."""

    stored: int
    kept: int


def pack_path(root: Path, record: Record) -> Path:
    """The pack file that ``record`` belongs to.

    Raises:
        UsageError: a malformed topology key.
    """
    return root / topology_key(record.topology) / f"{record.problem.op.value}.jsonl"


def pack_files(root: Path, topology: Topology | str | None = None) -> tuple[Path, ...]:
    """The pack files under ``root`` (of one topology), sorted; none if there is no such directory.

    Raises:
        UsageError: a malformed topology key. DatabaseError: a directory cannot be read.
    """
    pattern = "*" if topology is None else topology_key(topology)
    try:
        return tuple(sorted(p for p in root.glob(f"{pattern}/*.jsonl") if p.is_file()))
    except OSError as error:
        raise DatabaseError(f"{root}: the packs cannot be listed: {error}") from None


def scan_pack(path: Path) -> tuple[list[Record], list[str]]:
    """Read one pack; returns its good records and, for each bad line, ``file:line: why``.

    Raises:
        DatabaseError: the file cannot be read, or is larger than :data:`MAX_PACK_BYTES`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_PACK_BYTES + 1)
    except (OSError, ValueError) as error:
        raise DatabaseError(f"{path}: the pack cannot be read: {error}") from None
    if len(content) > MAX_PACK_BYTES:
        raise DatabaseError(f"{path}: expected a pack of at most {MAX_PACK_BYTES} bytes")
    records: list[Record] = []
    problems: list[str] = []
    lines = content.split(b"\n")
    if lines.pop():
        problems.append(f"{path}:{len(lines) + 1}: no newline at the end: the file was cut off")
    for number, line in enumerate(lines, 1):
        try:
            record = record_from_json(line)
            if record.status is not Status.OK:
                raise UsageError("status: a pack holds winners only; found failed")
            records.append(record)
        except UsageError as error:
            problems.append(f"{path}:{number}: {error}")
    return records, problems


def read_pack(path: Path) -> list[Record]:
    """Every record of one pack.

    Raises:
        DatabaseError: as :func:`scan_pack`, or any line is bad; names file and line.
    """
    records, problems = scan_pack(path)
    _refuse(problems)
    return records


def write_pack(path: Path, records: Iterable[Record]) -> None:
    """Write one pack, sorted, atomically: a reader sees the old file or the new one, never a part.

    Raises:
        UsageError: a record is invalid. DatabaseError: the file cannot be written.
    """
    lines = [record_to_json_line(record) + "\n" for record in sorted(records, key=sort_key)]
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="ascii", newline="\n") as file:
            file.writelines(lines)
            file.flush()
            # mkstemp makes private files; a pack is shared like the rest of the checkout
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        raise DatabaseError(f"{path}: the pack cannot be written: {error}") from None
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def sort_key(record: Record) -> tuple[str, int, int, int, int]:
    """The order of lines in a pack: signature, n, k, tp, m."""
    _, signature, n, k, tp, m = key_of(record.problem, record.topology)
    return signature, n, k, tp, m


def export(db: Database, root: Path) -> list[Path]:
    """Write every record of ``db`` as packs under ``root``; returns the files written.

    A pack that ``db`` has records for is replaced by them, so that it holds exactly what ``db``
    does (to add to a pack, import it first); other packs are left alone.

    Raises:
        DatabaseError: the database is missing or unusable, or a pack cannot be written.
    """
    if not db.exists():
        raise DatabaseError(f"{db.path}: no such tuning database; tune first, or check the path")
    written: list[Path] = []
    records = sorted(db.records(), key=lambda record: pack_path(root, record))
    for path, group in groupby(records, key=lambda record: pack_path(root, record)):
        write_pack(path, group)
        written.append(path)
    return written


def import_(path: Path, db: Database) -> ImportReport:
    """Add a pack file, or every pack under a directory, to ``db``: all of it or, on error, nothing.

    Records in a directory must lie where :func:`pack_path` says. A better record that ``db``
    already has is kept.

    Raises:
        DatabaseError: ``path`` is missing, a line is bad (names file and line), or ``db`` is
            unusable.
    """
    return merge([path], db)


def merge(paths: Sequence[Path], db: Database) -> ImportReport:
    """Add packs (``.jsonl``), directories of packs and other databases to ``db``, all or nothing.

    Which record stays depends on the records, not on the order of ``paths``, unless two of one
    key, provenance and time differ: then the later path wins.

    Raises:
        DatabaseError: as :func:`import_`.
    """
    records: list[Record] = []
    for path in paths:
        records += _read_any(path)
    try:
        stored = db.put_many(records)
    except UsageError as error:
        raise DatabaseError(f"{db.path}: nothing was imported: {error}") from None
    return ImportReport(stored, len(records) - stored)


def _read_any(path: Path) -> Iterator[Record]:
    if path.is_dir():
        files = pack_files(path)
        if not files:
            raise DatabaseError(
                f"{path}: expected packs as <topology>/<op>.jsonl in the directory; found none"
            )
        for file in files:
            records = read_pack(file)
            _refuse([text for record in records if (text := misplaced(file, record))])
            yield from records
    elif path.suffix == ".jsonl":
        yield from read_pack(path)
    elif path.exists():
        yield from Database(path).records()
    else:
        raise DatabaseError(f"{path}: no such pack, directory of packs or database")


def misplaced(path: Path, record: Record) -> str | None:
    """Why ``record`` does not belong in the pack at ``path``, or None."""
    proper = pack_path(path.parent.parent, record)
    if proper == path:
        return None
    return (
        f"{path}: {record.problem.key} belongs in {proper.parent.name}/{proper.name}, "
        f"not in {path.parent.name}/{path.name}"
    )


def load(root: Path, topology: str) -> tuple[list[Record], list[str]]:
    """The usable records of one topology's packs, and what is wrong with the others."""
    records: list[Record] = []
    problems: list[str] = []
    for path in pack_files(root, topology):
        try:
            good, bad = scan_pack(path)
        except DatabaseError as error:
            good, bad = [], [str(error)]
        problems += bad
        for record in good:
            wrong = misplaced(path, record)
            problems += [wrong] if wrong else []
            records += [] if wrong else [record]
    return records, problems


def duplicates(records: Iterable[Record]) -> list[Key]:
    """The keys that occur more than once, each once, in order."""
    seen: dict[Key, int] = {}
    for record in records:
        key = key_of(record.problem, record.topology)
        seen[key] = seen.get(key, 0) + 1
    return [key for key, count in seen.items() if count > 1]


def _refuse(problems: list[str]) -> None:
    if problems:
        more = len(problems) - MAX_SHOWN
        tail = [f"... and {more} more"] if more > 0 else []
        raise DatabaseError("\n".join(problems[:MAX_SHOWN] + tail))
