"""Is every record of a pack or database one that lookup may hand to a kernel?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fluxgen.codegen.space import why_illegal
from fluxgen.core.errors import DatabaseError, UsageError
from fluxgen.core.record import Record, Status
from fluxgen.core.topology import Gpu
from fluxgen.db.codec import record_from_json, record_to_json_line
from fluxgen.db.keys import topology_of
from fluxgen.db.packs import duplicates, misplaced, pack_files, scan_pack, sort_key


def why_bad(record: Record, gpus: Mapping[str, Gpu] | None = None) -> str | None:
    """Why one record must not be used, or None.

    A GPU outside ``gpus`` and the presets is judged as a Hopper of the record's number of SMs.
    """
    try:
        if record_from_json(record_to_json_line(record)) != record:
            return "does not survive a round trip through JSON"
        topology = topology_of(record.topology, gpus, record.environment.sm_count)
    except UsageError as error:
        return str(error)
    if record.status is not Status.OK:
        return f"status {record.status.value}: only winners are kept as records"
    if record.problem.m == 0 or record.problem.k == 0:
        return "a zero size is never launched, so there is nothing to tune"
    if record.kernel is None or record.run is None:
        return None
    reason = why_illegal(record.problem, topology, record.kernel, record.run)
    if reason:
        return f"illegal: {reason}"
    return why_slower(record)


def why_slower(record: Record) -> str | None:
    """Why a fused record must lose to the unfused path, or None."""
    if not record.is_baseline and record.time_us > record.baseline_us:
        return (
            f"slower than the unfused path ({record.time_us:g} > {record.baseline_us:g} us): "
            "the winner is the baseline"
        )
    return None


def verify(records: Iterable[Record], gpus: Mapping[str, Gpu] | None = None) -> list[str]:
    """Everything wrong with ``records``, one line each; empty when all is well."""
    every = list(records)
    problems = []
    for record in every:
        reason = why_bad(record, gpus)
        if reason:
            problems.append(f"{record.topology}: {record.problem.key}: {reason}")
    problems += [f"duplicate records of {key}" for key in duplicates(every)]
    return problems


def verify_packs(root: Path, gpus: Mapping[str, Gpu] | None = None) -> list[str]:
    """Everything wrong with the packs under ``root``: lines, places, order and contents.

    Raises:
        DatabaseError: ``root`` is not a directory or cannot be read.
    """
    if not root.is_dir():
        raise DatabaseError(f"{root}: expected a directory of packs")
    problems: list[str] = []
    for path in pack_files(root):
        try:
            records, bad = scan_pack(path)
            problems += bad
            problems += [text for record in records if (text := misplaced(path, record))]
            problems += [f"{path}: {text}" for text in verify(records, gpus)]
            if not bad:
                problems += _uncanonical(path, records)
        except DatabaseError as error:
            problems.append(str(error))
    return problems


def _uncanonical(path: Path, records: list[Record]) -> list[str]:
    lines = path.read_bytes().split(b"\n")
    found = [
        f"{path}:{number}: not the canonical form of its record; export the pack again"
        for number, (line, record) in enumerate(zip(lines, records, strict=False), 1)
        if line != record_to_json_line(record).encode()
    ]
    if records != sorted(records, key=sort_key):
        found.append(f"{path}: not sorted by signature, n, k, m; export the pack again")
    return found
