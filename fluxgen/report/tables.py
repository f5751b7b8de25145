"""Tables for people, on stderr or stdout; every value comes as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fluxgen.core.config import Transport
from fluxgen.core.record import Baseline, Record


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
    "op", "dtype", "m", "n", "k", "kernel", "run", "us", "unfused us", "unfused by", "speedup",
    "known by",
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
            baseline_text(r.baseline),
            r.speedup,
            r.provenance.value,
        ]
        for r in records
    ]


_BASELINES = {
    Baseline.NCCL: "NCCL",
    Baseline.ONE_SHOT: "one-shot all-reduce",
    Baseline.LINK_BOUND: "bound of the link",
    Baseline.COPIES: "plain copies",
}


def baseline_text(baseline: Baseline | None) -> str:
    """Which unfused path a figure is compared with, in a few words."""
    return "not stated" if baseline is None else _BASELINES[baseline]


_MOVES = {
    Transport.COPY_ENGINE_PULL: "pull",
    Transport.COPY_ENGINE_PUSH: "push",
    Transport.COPY_ENGINE_RING: "ring",
    Transport.COPY_ENGINE_DRAIN: "drain",
    Transport.PEER_STORE: "store",
    Transport.PEER_BROADCAST: "store to all",
    Transport.PEER_PACKETS: "packets",
    Transport.BROADCAST_PACKETS: "packets to all",
    Transport.SM_COPY: "copy by SMs",
}


def run_text(run: Mapping[str, Any]) -> str:
    """A run configuration on one line: ``pull, groups 1-2-5, panel 4, m x2, span 2``."""
    groups = "-".join(map(str, run["groups"])) or "all"
    parts = [
        _MOVES[Transport(run["transport"])],
        f"groups {groups}",
        f"panel {run['panel'] or 'all'}",
    ]
    parts.append(f"{run['chunk_axis']} x{run['chunks']}")
    if run["span"] > 1:
        parts.append(f"span {run['span']}")
    if run.get("split", 1) > 1:
        parts.append(f"K in {run['split']} parts")
    if run["sms"]:
        parts.append(f"{run['sms']} SMs")
    return ", ".join(parts)
