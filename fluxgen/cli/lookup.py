"""``fluxgen lookup``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from fluxgen.cli.common import (
    Db,
    Dtype,
    Json,
    Link,
    Target,
    Tp,
    emit,
    named_topology,
    stdout,
)
from fluxgen.core.dtypes import DType
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature


def lookup(
    op: Annotated[str, typer.Option("--op", help="The fused op, as ag_gemm.")],
    m: Annotated[int, typer.Option("--m", help="Global tokens.")],
    n: Annotated[int, typer.Option("--n", help="Columns of the local GEMM.")],
    k: Annotated[int, typer.Option("--k", help="Depth of the local GEMM.")],
    tp: Tp,
    dtype: Dtype = "bf16",
    target: Target = "auto",
    link: Link = "nvlink",
    db: Db = None,
    as_json: Json = False,
) -> None:
    """The configuration that would run, its time, the unfused time, and why this record."""
    from fluxgen.db.lookup import lookup as look
    from fluxgen.report.tables import baseline_text, run_text

    topology = named_topology(target, link, tp)
    problem = Problem(Signature.of(Op.parse(op), DType.parse(dtype)), m, n, k, tp)
    result = look(problem, topology, db=db)
    if as_json:
        emit(
            {
                "problem": problem.to_dict(),
                "topology": topology.key,
                "reason": result.reason.value,
                "text": result.text,
                "kernel": None if result.kernel is None else result.kernel.to_dict(),
                "run": None if result.run is None else result.run.to_dict(),
                "time_us": result.time_us,
                "baseline_us": result.baseline_us,
                "baseline": None if result.baseline is None else result.baseline.value,
                "provenance": None if result.provenance is None else result.provenance.value,
                "record_m": None if result.record is None else result.record.problem.m,
                "source": result.source,
                "digest": result.digest,
            }
        )
        return
    lines = [("why", result.text)]
    if result.record is not None:
        what = "unfused" if result.kernel is None else result.kernel.name
        lines += [
            ("kernel", what),
            ("run", "-" if result.run is None else run_text(result.run.to_dict())),
            ("time", f"{result.time_us:.1f} us at m={result.record.problem.m}"),
            ("unfused", f"{result.baseline_us:.1f} us ({baseline_text(result.record.baseline)})"),
            ("provenance", result.record.provenance.value),
        ]
    for name, text in lines:
        stdout.print(f"{name:>10}  {escape(text)}", highlight=False, soft_wrap=True)
