"""``fluxgen report``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fluxgen.cli.common import (
    Db,
    Link,
    Target,
    Tp,
    known_records,
    named_topology,
    require_database,
    say,
    write_file,
)
from fluxgen.core.errors import (
    UsageError,
)


def report(
    target: Target = "auto",
    tp: Tp = 8,
    link: Link = "nvlink",
    packs: Annotated[Path | None, typer.Option(help="Packs instead of the database.")] = None,
    db: Db = None,
    storage: Annotated[
        str | None, typer.Option(help="Optuna storage URL, for how the searches went.")
    ] = None,
    problem: Annotated[
        str, typer.Option(help="Draw a call whose key holds this; of several the most exposed.")
    ] = "",
    out: Annotated[Path, typer.Option(help="The page.")] = Path("fluxgen-report.html"),
    trace: Annotated[
        Path | None, typer.Option(help="Also the drawn calls as a Perfetto trace.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Also the speedups by m as a picture.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Of a plan instead, which `fluxgen plan --out` wrote.")
    ] = None,
) -> None:
    """One HTML page: speedups by m, how the searches went, the timeline of a fused call."""
    if plan is not None:
        _of_plan(plan, out, trace)
        return
    from fluxgen.report.page import page
    from fluxgen.report.picture import speedup_svg
    from fluxgen.report.timeline import fused_timeline, perfetto, unfused_timeline
    from fluxgen.tune import searches

    topology = named_topology(target, link, tp)
    require_database(db)
    known = [r for r in known_records(packs, db) if r.topology == topology.key]
    records = list({r.problem: r for r in sorted(known, key=lambda r: r.provenance.rank)}.values())
    if not records:
        raise UsageError(
            f"report: expected records of {topology.key}; found none. Run `fluxgen tune` first, or "
            "name another --target, --tp or --link"
        )
    fused = [r for r in records if r.kernel is not None and problem in r.problem.key]
    timelines = {}
    if fused:
        drawn = [(r, fused_timeline(r.problem, topology, r.kernel, r.run)) for r in fused]
        shown, timeline = max(drawn, key=lambda d: (1 - d[1].gemm_us / d[1].end_us, d[0].problem))
        timelines["fused, " + shown.problem.key] = timeline
        timelines["unfused"] = unfused_timeline(shown.problem, topology)
    elif problem:
        raise UsageError(f"problem: expected a part of a fused record's key; found {problem!r}")
    found = searches(storage, topology.key) if storage is not None else {}
    write_file(out, page(f"fluxgen on {topology.key}", records, found, timelines))
    if trace is not None:
        write_file(trace, json.dumps(perfetto(timelines)))
    if svg is not None:
        write_file(svg, speedup_svg(f"fluxgen on {topology.key}", records))
    for path in (out, trace, svg):
        if path is not None:
            say(f"wrote {path}")


def _of_plan(path: Path, out: Path, trace: Path | None) -> None:
    from fluxgen.planning.file import read_plan
    from fluxgen.report.plan_page import plan_page
    from fluxgen.report.timeline import perfetto

    saved = read_plan(path)
    timelines = saved.timelines()
    write_file(out, plan_page(saved.title, saved.choices, timelines))
    say(f"wrote {out}")
    if trace is not None:
        write_file(trace, json.dumps(perfetto(timelines)))
        say(f"wrote {trace}")
