"""What a lookup answers: the record to use, or the unfused path, and why."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.problem import Problem
from fluxgen.core.record import Baseline, Provenance, Record
from fluxgen.core.version import __version__
from fluxgen.db.codec import record_to_json_line


class Reason(str, enum.Enum):
    """How an answer was found."""

    EXACT = "exact"
    BUCKET = "bucket"
    DEFAULT = "default"


@dataclass(frozen=True)
class LookupResult:
    """What to run and why.

    Attributes:
        reason: exact, bucket or default. record: the record used, None for default.
        text: one line for people, with the searched key.
        key: the searched key, ``<topology>/<Problem.key>``.
        source: the database file or pack directory the record came from, else empty.
        digest: 16 hex digits over the record (or its absence), the asked key and the version:
            equal on two ranks only if they decided from the same record.
    """

    reason: Reason
    record: Record | None
    text: str
    key: str
    source: str
    digest: str

    @property
    def kernel(self) -> KernelConfig | None:
        """The kernel to run, None for the unfused path."""
        return None if self.record is None else self.record.kernel

    @property
    def run(self) -> RunConfig | None:
        """The run-time configuration, None for the unfused path."""
        return None if self.record is None else self.record.run

    @property
    def config(self) -> tuple[KernelConfig, RunConfig] | None:
        """Kernel and run-time configuration, None for the unfused path."""
        kernel, run = self.kernel, self.run
        return None if kernel is None or run is None else (kernel, run)

    @property
    def time_us(self) -> float | None:
        """The record's time at its own m, microseconds."""
        return None if self.record is None else self.record.time_us

    @property
    def baseline_us(self) -> float | None:
        """The unfused path's time at the record's own m, microseconds."""
        return None if self.record is None else self.record.baseline_us

    @property
    def baseline(self) -> Baseline | None:
        """Which unfused path that is of; None: the record does not state it."""
        return None if self.record is None else self.record.baseline

    @property
    def provenance(self) -> Provenance | None:
        """How the record's figures were obtained."""
        return None if self.record is None else self.record.provenance


def found(key: str, problem: Problem, record: Record, source: str) -> LookupResult:
    """The answer that ``record``, of the problem's own m or of one near it, gives."""
    exact = record.problem.m == problem.m
    reason = Reason.EXACT if exact else Reason.BUCKET
    what = "the unfused path" if record.kernel is None else record.kernel.name
    near = "" if exact else f" for m={record.problem.m}, the nearest that serves it"
    text = f"{key}: {reason.value}: {record.provenance.value} record{near} from {source}: {what}"
    return LookupResult(
        reason, record, text, key, source, _digest(key, record_to_json_line(record))
    )


def default(key: str, text: str) -> LookupResult:
    """The unfused path, because of ``text``."""
    return LookupResult(Reason.DEFAULT, None, text, key, "", _digest(key, ""))


def miss(key: str, tuned_sizes: Iterable[int], rejected: str) -> str:
    """The text of a miss: the searched key, what is tuned near it, and what to do."""
    sizes = sorted(tuned_sizes)
    shown = ", ".join(map(str, sizes[:16])) + (", ..." if len(sizes) > 16 else "")
    tuned = f"tuned m: {shown}" if sizes else "none of its family is tuned"
    return (
        f"no usable record for {key} ({tuned}{rejected}); using the unfused path. "
        "Tune it with 'fluxgen tune'"
    )


def _digest(key: str, line: str) -> str:
    text = "\n".join((__version__, key, line))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
