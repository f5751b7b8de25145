"""``fluxgen db``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fluxgen.cli.common import (
    CompiledOnly,
    Db,
    Json,
    emit,
    known_records,
    named_evaluator,
    named_gpu,
    open_database,
    require_database,
    stdout,
)
from fluxgen.core.settings import Settings, data_dir

app = typer.Typer(help="Look into, move and check tuning databases.", no_args_is_help=True)


@app.command("list")
def db_list(db: Db = None, as_json: Json = False) -> None:
    """The families of problems in the database, and how many m of each are tuned."""
    from fluxgen.report.tables import print_table

    families: dict[tuple[str, str, str, int, int], list[int]] = {}
    for record in open_database(db).records():
        p = record.problem
        key = (record.topology, p.op.value, p.signature.dtype.value, p.n, p.k)
        families.setdefault(key, []).append(p.m)
    rows = [[*key, len(sizes), f"{min(sizes)}..{max(sizes)}"] for key, sizes in families.items()]
    columns = ("topology", "op", "dtype", "n", "k", "records", "m")
    if as_json:
        emit([dict(zip(columns, row, strict=True)) for row in rows])
        return
    print_table(stdout, str(db or Settings.load().db), columns, rows)


@app.command("show")
def db_show(
    topology: Annotated[str | None, typer.Option(help="Only this topology's key.")] = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Every record."""
    from fluxgen.report.tables import RECORD_COLUMNS, print_table, record_rows

    records = list(open_database(db).records(topology))
    if as_json:
        emit([record.to_dict() for record in records])
        return
    for key in dict.fromkeys(record.topology for record in records):
        rows = record_rows(record for record in records if record.topology == key)
        print_table(stdout, key, RECORD_COLUMNS, rows)


@app.command("export")
def db_export(
    directory: Annotated[Path, typer.Argument(help="Where packs are written.")],
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Write the database's records as packs: one sorted JSON line each."""
    from fluxgen.db.packs import export

    written = export(open_database(db), directory)
    if as_json:
        emit({"written": [str(path) for path in written]})
        return
    for path in written:
        print(path)


@app.command("import")
def db_import(
    path: Annotated[Path, typer.Argument(help="A pack, or a directory of packs.")],
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Read packs into the database; better provenance, then the newer record, wins."""
    from fluxgen.db.packs import import_

    _print_import(import_(path, open_database(db)), as_json)


@app.command("merge")
def db_merge(
    paths: Annotated[list[Path], typer.Argument(help="Databases and packs.")],
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Read several databases and packs into the database, by the same rule."""
    from fluxgen.db.packs import merge

    _print_import(merge(paths, open_database(db)), as_json)


def _print_import(report: Any, as_json: bool) -> None:
    if as_json:
        emit({"stored": report.stored, "kept": report.kept})
    else:
        print(f"{report.stored} records stored, {report.kept} kept as they were")


@app.command("verify")
def db_verify(
    packs: Annotated[Path | None, typer.Option(help="Packs instead of the database.")] = None,
    db: Db = None,
    device: Annotated[
        bool, typer.Option("--device", help="Time a sample again on this machine's GPU.")
    ] = False,
    sample: Annotated[int, typer.Option(help="With --device: records of each tp and link.")] = 8,
    compiled_only: CompiledOnly = False,
    as_json: Json = False,
) -> None:
    """Check every record: readable, legal, in its place, not slower than its own baseline."""
    from fluxgen.db.verify import verify, verify_packs

    require_database(db)
    if packs is not None:
        problems = verify_packs(packs)
    else:
        problems = verify(open_database(db).records())
        if db is None:
            problems += verify_packs(data_dir("tuning_db"))
    again: list[dict[str, Any]] = []
    if device:
        again = _retimed(known_records(packs, db), sample, compiled_only)
        problems += [f"{row['problem']}: {row['reason']}" for row in again if row["reason"]]
    if as_json:
        emit({"problems": problems, **({"retimed": again} if device else {})})
    else:
        if device:
            _print_retimed(again)
        for problem in problems:
            print(problem)
        print(f"{len(problems)} problems")
    if problems:
        raise typer.Exit(1)


def _retimed(records: list[Any], count: int, compiled_only: bool) -> list[dict[str, Any]]:
    """Records of this machine's GPU, timed again, as plain values."""
    from fluxgen.db.keys import topology_of
    from fluxgen.tune.retime import retime, sample

    gpu = named_gpu("auto", 1)
    rows = []
    for key in sorted({r.topology for r in records if r.topology.startswith(f"{gpu.name}-")}):
        topology = topology_of(key, {gpu.name: gpu}, gpu.sm_count)
        of_key = [r for r in records if r.topology == key]
        with named_evaluator("device", topology, compiled_only=compiled_only) as (judge, compiled):
            if compiled is not None:
                of_key = [
                    r
                    for r in of_key
                    if r.kernel and not compiled.unusable(r.problem.signature, r.kernel)
                ]
            chosen = sample(of_key, count)
            rows += [
                {
                    "topology": key,
                    "problem": f"{key}: {r.record.problem.key}",
                    "known_us": r.record.time_us,
                    "known_speedup": r.record.speedup,
                    "provenance": r.record.provenance.value,
                    "us": r.time_us if r.reason is None else None,
                    "speedup": r.baseline_us / r.time_us if r.reason is None else None,
                    "reason": r.reason,
                }
                for r in retime(chosen, topology, judge, compiled)
            ]
    return rows


def _print_retimed(rows: list[dict[str, Any]]) -> None:
    from fluxgen.report.tables import print_table

    columns = ("problem", "known_us", "known_speedup", "provenance", "us", "speedup")
    body = [["-" if row[c] is None else row[c] for c in columns] for row in rows]
    print_table(stdout, "timed again", columns, body)
