"""``fluxgen tune``."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fluxgen.cli.common import (
    DEFAULT_TOKENS,
    MAX_KERNELS,
    CompiledOnly,
    Db,
    Dtype,
    Json,
    Link,
    Ops,
    Target,
    Tokens,
    Training,
    emit,
    integers,
    named_evaluator,
    named_ops,
    named_topology,
    require_kernels,
    say,
    stderr,
    stdout,
)
from fluxgen.core.dtypes import DType
from fluxgen.core.errors import UsageError
from fluxgen.core.settings import Settings, data_dir

if TYPE_CHECKING:
    from fluxgen.core.topology import Topology
    from fluxgen.shapes import ProblemSet


def tune(
    model: Annotated[
        str | None, typer.Option("--model", help="An HF config.json, its directory, or a preset.")
    ] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Tensor-parallel ranks.")] = None,
    target: Target = "auto",
    link: Link = "nvlink",
    tokens: Tokens = DEFAULT_TOKENS,
    ops: Ops = "ag_gemm,gemm_rs",
    dtype: Dtype = "bf16",
    training: Training = False,
    evaluator: Annotated[str, typer.Option(help="auto, predict, device or replay:FILE.")] = "auto",
    trials: Annotated[int, typer.Option(help="Candidates per problem.")] = 16,
    timeout: Annotated[float | None, typer.Option(help="Seconds for the whole call.")] = None,
    storage: Annotated[str | None, typer.Option(help="Optuna storage URL.")] = None,
    db: Db = None,
    seed: Annotated[int, typer.Option(help="Seed of the sampler.")] = 0,
    record: Annotated[
        Path | None, typer.Option(help="Append each trial to this file, for replay:FILE.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Parallel compiles (default: by RAM).")] = None,
    compiled_only: CompiledOnly = False,
    plan: Annotated[
        Path | None,
        typer.Option(help="Instead of a model: the problems of a plan's best layout."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Search the best kernel and run-time configuration of every GEMM of a model."""
    from fluxgen import tune as tuning
    from fluxgen.core.record import Provenance
    from fluxgen.db.database import Database
    from fluxgen.db.packs import load
    from fluxgen.report.live import TuneTable
    from fluxgen.report.tables import RECORD_COLUMNS, print_table, record_rows
    from fluxgen.shapes import counted_problems

    if plan is not None:
        if model is not None or tp is not None:
            raise UsageError("tune --plan: expected neither --model nor --tp, which the plan has")
        model, topology, found = _planned(plan)
        wanted = tuple(dict.fromkeys(problem.op for problem in found))
        training = any(problem.signature.b_layout == "kn" for problem in found)
    elif model is None or tp is None:
        raise UsageError("tune: expected --model and --tp, or --plan FILE; found neither")
    else:
        topology = named_topology(target, link, tp)
        wanted = named_ops(ops)
        found = counted_problems(
            model,
            tp,
            integers("tokens", tokens),
            DType.parse(dtype),
            wanted,
            training=training,
        )
    require_kernels(topology.gpu, dtype)
    for message in found.messages:
        say(f"note: {message}")
    path = db or Settings.load().db
    database = Database(path)
    with ExitStack() as stack:
        judge, compiled = stack.enter_context(
            named_evaluator(evaluator, topology, jobs, compiled_only)
        )
        if record is not None:
            judge = tuning.Recorder(judge, record)
        # What is predicted needs no hints of what was.
        measures = judge.provenance is not Provenance.PREDICTED
        shipped = load(data_dir("tuning_db"), topology.key)[0] if measures else []
        title = f"tuning on {topology.key}, {judge.provenance.value}"
        table = stack.enter_context(TuneTable(stderr, title, found.problems, trials))
        result = tuning.tune(
            found.problems,
            topology,
            evaluator=judge,
            trials=trials,
            timeout=timeout,
            storage=storage,
            db=database,
            seed=seed,
            # Each op, and each layout of its weight, compiles its own.
            max_kernels=MAX_KERNELS // (max(1, len(wanted)) * (2 if training else 1)),
            counts=dict(zip(found.problems, found.counts, strict=True)),
            progress=table.update,
            sink=database.put,
            compiled=compiled,
            known=shipped,
        )
    for problem, reason in (*result.dropped, *result.failed):
        say(f"note: {problem.key}: {reason}")
    if result.interrupted or result.unfinished:
        say(
            f"{len(result.unfinished)} of {len(found.problems)} problems are unfinished; all "
            "finished trials are kept. Run the same command again to go on."
        )
        if result.interrupted:
            stderr.print(_same_command(), highlight=False, markup=False, soft_wrap=True)
    if as_json:
        emit(
            {
                "model": model,
                "topology": topology.key,
                "evaluator": judge.kind,
                "db": str(path),
                "records": [record.to_dict() for record in result.records],
                "kernels": [kernel.name for kernel in result.kernels],
                "evaluated": result.evaluated,
                "dropped": [[p.key, why] for p, why in result.dropped],
                "failed": [[p.key, why] for p, why in result.failed],
                "unfinished": [p.key for p in result.unfinished],
                "interrupted": result.interrupted,
            }
        )
    else:
        print_table(stdout, f"{topology.key}", RECORD_COLUMNS, record_rows(result.records))
        stdout.print(
            f"{len(result.records)} records, {len(result.kernels)} distinct kernels, in {path}",
            highlight=False, markup=False,
        )  # fmt: skip
    if result.interrupted or result.failed:
        raise typer.Exit(1)


def _planned(path: Path) -> tuple[str, Topology, ProblemSet]:
    """Name, topology and problems of a plan's best layout."""
    from fluxgen.planning.file import read_plan
    from fluxgen.shapes import ProblemSet

    saved = read_plan(path)
    topology = saved.topology()
    counts = (int(saved.document["sizes"]["layers"]),) * len(saved.problems)
    names = (("layer",),) * len(saved.problems)
    return saved.document["model"], topology, ProblemSet(saved.problems, counts, names, ())


def _same_command() -> str:
    """This command, to be copied."""
    name = Path(sys.argv[0]).name
    program = ["python", "-m", "fluxgen"] if name == "__main__.py" else [name]
    return shlex.join([*program, *sys.argv[1:]])
