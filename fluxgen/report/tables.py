"""Tables for people, on stderr or stdout; every value comes as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fluxgen.core.config import Transport
from fluxgen.core.record import Record


def print_table(
    console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]
) -> None:
    """One table; numbers are right-aligned, text is shown as it is (no markup)."""
    table = Table(title=title, title_justify="left", header_style="bold")
    body = [list(row) for row in rows]
    for i, column in enumerate(columns):
        numeric = bool(body) and all(isinstance(row[i], (int, float)) for row in body)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in body:
        table.add_row(*(_cell(value) for value in row))
    console.print(table, markup=False)


def _cell(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value).replace("[", "\\[")


RECORD_COLUMNS = (
    "op", "dtype", "m", "n", "k", "kernel", "run", "us", "unfused us", "speedup", "known by",
)  # fmt: skip
"""Columns of :func:`record_rows`; the topology is the table's title."""


def record_rows(records: Iterable[Record]) -> list[list[object]]:
    """One row per record, in the order of :data:`RECORD_COLUMNS`."""
    return [
        [
            r.problem.op.value,
            r.problem.signature.dtype.value,
            r.problem.m,
            r.problem.n,
            r.problem.k,
            "unfused" if r.kernel is None else r.kernel.name,
            "-" if r.run is None else run_text(r.run.to_dict()),
            round(r.time_us, 1),
            round(r.baseline_us, 1),
            r.speedup,
            r.provenance.value,
        ]
        for r in records
    ]


_MOVES = {
    Transport.COPY_ENGINE_PULL.value: "pull",
    Transport.COPY_ENGINE_PUSH.value: "push",
    Transport.COPY_ENGINE_RING.value: "ring",
    Transport.COPY_ENGINE_DRAIN.value: "drain",
    Transport.PEER_STORE.value: "store",
    Transport.SM_COPY.value: "copy by SMs",
}


def run_text(run: Mapping[str, Any]) -> str:
    """A run configuration on one line: ``pull, groups 1-2-5, panel 4, m x2, span 2``."""
    groups = "-".join(map(str, run["groups"])) or "all"
    parts = [_MOVES[run["transport"]], f"groups {groups}", f"panel {run['panel'] or 'all'}"]
    parts.append(f"{run['chunk_axis']} x{run['chunks']}")
    if run["span"] > 1:
        parts.append(f"span {run['span']}")
    if run["sms"]:
        parts.append(f"{run['sms']} SMs")
    return ", ".join(parts)
