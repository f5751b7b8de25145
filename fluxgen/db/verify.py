"""Is every record of a pack or database one that lookup may hand to a kernel?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from fluxgen.codegen.space import why_illegal
from fluxgen.core.errors import DatabaseError, UsageError
from fluxgen.core.record import Record, Status
from fluxgen.core.topology import GPUS, Gpu, Topology
from fluxgen.db.codec import record_from_json, record_to_json_line
from fluxgen.db.keys import split_topology, topology_of
from fluxgen.db.packs import duplicates, misplaced, pack_files, scan_pack, sort_key
from fluxgen.kernels.registry import FAMILIES


def why_bad(record: Record, gpus: Mapping[str, Gpu] | None = None) -> str | None:
    """Why one record must not be used, or None.

    A GPU outside ``gpus`` and the presets is judged by what the record itself says: as one of an
    architecture that has the kernel's schedule, of the record's number of SMs.
    """
    try:
        if record_from_json(record_to_json_line(record)) != record:
            return "does not survive a round trip through JSON"
        topologies = _topologies(record, gpus)
    except UsageError as error:
        return str(error)
    if record.status is not Status.OK:
        return f"status {record.status.value}: only winners are kept as records"
    if record.problem.m == 0 or record.problem.k == 0:
        return "a zero size is never launched, so there is nothing to tune"
    if record.kernel is None or record.run is None:
        return None
    reasons = [why_illegal(record.problem, t, record.kernel, record.run) for t in topologies]
    if all(reasons):
        return f"illegal: {reasons[0]}"
    return why_slower(record)


def _topologies(record: Record, gpus: Mapping[str, Gpu] | None) -> list[Topology]:
    """The record's topology; of an unknown GPU one for each architecture that it may be of."""
    name, *_ = split_topology(record.topology)
    if name in (gpus or {}) or name in GPUS:
        return [topology_of(record.topology, gpus)]
    kernel, sm_count = record.kernel, record.environment.sm_count
    archs = {f.archs[0] for f in FAMILIES if kernel is None or kernel.schedule in f.schedules}
    ccs = sorted((int(arch.removeprefix("sm")) for arch in archs), reverse=True)
    return [topology_of(record.topology, sm_count=sm_count, cc=cc) for cc in ccs]


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
