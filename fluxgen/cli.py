"""The command line: one function per command, each a thin layer over one module.

With ``--json`` a command prints one JSON document on stdout and nothing else there. People's
tables go to stdout too; progress, warnings and errors go to stderr. Exit codes: 0 done, 1 failed,
2 wrong usage.
"""

from __future__ import annotations

import json
import logging
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import fluxgen
from fluxgen.codegen.space import kernel_space, why_illegal_kernel
from fluxgen.core.config import KernelConfig
from fluxgen.core.dtypes import DType
from fluxgen.core.errors import (
    DatabaseError,
    FluxgenError,
    ToolchainError,
    UnsupportedError,
    UsageError,
)
from fluxgen.core.op import Op
from fluxgen.core.problem import MAX_WORLD, Problem, Signature, check_int
from fluxgen.core.settings import Settings, data_dir
from fluxgen.core.topology import Gpu, LinkKind, Topology, parse_gpu

if TYPE_CHECKING:
    from fluxgen.tune import CompiledKernels, Evaluator

app = typer.Typer(
    help="Generate, tune and look up fused communication-GEMM kernels for tensor parallelism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
db_app = typer.Typer(help="Look into, move and check tuning databases.", no_args_is_help=True)
app.add_typer(db_app, name="db")

DEFAULT_TOKENS = "512,1024,2048,4096,8192,16384"
MAX_KERNELS = 24

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Model = Annotated[
    str, typer.Option("--model", help="An HF config.json, its directory, or a preset's name.")
]
Tp = Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.")]
Target = Annotated[
    str, typer.Option("--target", help="A GPU by name or by properties, or auto for this machine.")
]
Link = Annotated[
    str, typer.Option("--link", help="nvlink, pcie, or host: no peer access; pcie2: two sockets.")
]
Tokens = Annotated[str, typer.Option("--tokens", help="Global token counts m, comma-separated.")]
Ops = Annotated[str, typer.Option("--ops", help="Ops, comma-separated; gemm_ar too.")]
Dtype = Annotated[str, typer.Option("--dtype", help="bf16 or fp16.")]
Training = Annotated[
    bool, typer.Option("--training", help="Also the GEMMs of the backward, with (k, n) weights.")
]
CompiledOnly = Annotated[
    bool, typer.Option("--compiled-only", help="Measure only kernels that are compiled.")
]
Db = Annotated[Path | None, typer.Option("--db", help="Tuning database file.")]

# Piped into a file or a pager, a table is as wide as it needs; a terminal has its own width.
stdout = Console(width=None if sys.stdout.isatty() else 160)
stderr = Console(stderr=True)


def _say(text: str) -> None:
    """One line for people, beside whatever stdout holds."""
    stderr.print(escape(text), highlight=False, soft_wrap=True)


def _emit(document: object) -> None:
    print(json.dumps(document, indent=2, sort_keys=True, allow_nan=False))


def _integers(name: str, text: str) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = ()
    if not values:
        raise UsageError(f"{name}: expected comma-separated integers; found {text!r}")
    return tuple(dict.fromkeys(values))


def _ops(text: str) -> tuple[Op, ...]:
    return tuple(dict.fromkeys(Op.parse(part) for part in text.split(",") if part.strip()))


def _target(name: str, tp: int) -> Gpu:
    if name.strip().lower() != "auto":
        return parse_gpu(name)
    from fluxgen.machine.device import devices

    visible = devices()
    if not visible:
        raise UsageError("target auto: the driver sees no GPU; name the target with --target")
    if 1 < len(visible) < tp:
        raise UsageError(
            f"tp: expected at most the {len(visible)} visible GPUs with --target auto; found {tp}. "
            "To tune for another machine, name its GPU with --target"
        )
    return visible[0].gpu


def _topology(target: str, link: str, tp: int) -> Topology:
    check_int("tp", tp, 1, MAX_WORLD)
    topology = Topology.of(_target(target, tp), link, tp)
    if target.strip().lower() == "auto" and topology.link is LinkKind.NVLINK:
        _check_nvlink(tp)
    return topology


def _check_nvlink(tp: int) -> None:
    """Refuse to tune for a link that the GPUs of this machine do not have."""
    from fluxgen.machine.device import devices
    from fluxgen.machine.wiring import nvlinked

    if nvlinked([device.address for device in devices()[:tp]]) is False:
        raise UsageError(
            "link: expected pcie with --target auto: NVLink does not join every two of this "
            f"machine's first {tp} GPUs; found nvlink. To tune for another machine, name its GPU "
            "with --target"
        )


@contextmanager
def _progress(title: str) -> Iterator[tuple[Progress, Any]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:g}/{task.total:g} {task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, transient=not stderr.is_terminal) as bar:
        yield bar, bar.add_task(title, total=1, note="")


@app.command()
def shapes(
    model: Model,
    tp: Tp,
    tokens: Annotated[str, typer.Option("--tokens", help="Token counts to list.")] = "",
    dtype: Dtype = "bf16",
    lm_head: Annotated[bool, typer.Option("--lm-head", help="Include the lm_head.")] = False,
    as_json: Json = False,
) -> None:
    """The GEMMs of one layer, per op, with counts, each shape once."""
    from fluxgen.report.tables import print_table
    from fluxgen.shapes import summary

    counts = _integers("tokens", tokens) if tokens else ()
    found = summary(model, tp, counts, DType.parse(dtype), lm_head)
    for warning in found["warnings"]:
        _say(f"warning: {warning}")
    if as_json:
        _emit(found)
        return
    title = f"{found['model']}, tp {tp} (valid: {', '.join(map(str, found['valid_tp']))})"
    print_table(
        stdout,
        title,
        ("op", "n", "k", "count", "names"),
        [[g["op"], g["n"], g["k"], g["count"], ", ".join(g["names"])] for g in found["gemms"]],
    )
    if found["others"]:
        print_table(
            stdout,
            "GEMMs that are no site of a fused op",
            ("n", "k", "count", "name", "why"),
            [[g["n"], g["k"], g["count"], g["name"], g["note"]] for g in found["others"]],
        )
    if found["problems"]:
        print_table(
            stdout,
            "problems",
            ("op", "m", "n", "k", "count"),
            [[p["op"], p["m"], p["n"], p["k"], p["count"]] for p in found["problems"]],
        )
    for note in found["notes"]:
        stdout.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)


@app.command()
def tune(
    model: Model,
    tp: Tp,
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

    topology = _topology(target, link, tp)
    wanted = _ops(ops)
    found = counted_problems(
        model,
        tp,
        _integers("tokens", tokens),
        DType.parse(dtype),
        wanted,
        training=training,
    )
    _require_kernels(topology.gpu, dtype)
    for message in found.messages:
        _say(f"note: {message}")
    path = db or Settings.load().db
    database = Database(path)
    with ExitStack() as stack:
        judge, compiled = stack.enter_context(_evaluator(evaluator, topology, jobs, compiled_only))
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
        _say(f"note: {problem.key}: {reason}")
    if result.interrupted or result.unfinished:
        _say(
            f"{len(result.unfinished)} of {len(found.problems)} problems are unfinished; all "
            "finished trials are kept. Run the same command again to go on."
        )
        if result.interrupted:
            stderr.print(_same_command(), highlight=False, markup=False, soft_wrap=True)
    if as_json:
        _emit(
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


def _same_command() -> str:
    """This command, to be copied."""
    name = Path(sys.argv[0]).name
    program = ["python", "-m", "fluxgen"] if name == "__main__.py" else [name]
    return shlex.join([*program, *sys.argv[1:]])


@contextmanager
def _evaluator(
    name: str, topology: Topology, jobs: int | None = None, compiled_only: bool = False
) -> Iterator[tuple[Evaluator, CompiledKernels | None]]:
    """The evaluator, and for one that runs kernels what compiles them; both end with the block."""
    from fluxgen import tune as tuning
    from fluxgen.tune.evaluators.process import ProcessEvaluator

    with ExitStack() as stack:
        compiled = None
        if tuning.resolve(name, topology) == "device" and tuning.can_measure(topology):
            compiled = stack.enter_context(_compiled(topology.gpu, jobs, compiled_only))
        judge = tuning.make_evaluator(name, topology)
        if isinstance(judge, ProcessEvaluator):
            stack.enter_context(judge)
        yield judge, compiled


def _compiled(gpu: Gpu, jobs: int | None, compiled_only: bool) -> CompiledKernels:
    """What the device evaluator runs: compiled as needed, where there is a compiler."""
    from fluxgen.compiler import toolchain
    from fluxgen.compiler.store import Store
    from fluxgen.tune import CompiledKernels

    tools = None
    if not compiled_only:
        try:
            tools = toolchain.find()
        except ToolchainError as error:
            raise UsageError(
                f"{error}\nor pass --compiled-only: measure the kernels that are compiled already"
            ) from None
    return CompiledKernels(f"sm{gpu.cc}", Store(), tools, jobs)


def _require_kernels(gpu: Gpu, dtype: str) -> None:
    signature = Signature.of(Op.AG_GEMM, DType.parse(dtype))
    if next(kernel_space(signature, gpu), None) is None:
        reason = why_illegal_kernel(signature, gpu, KernelConfig(128, 128, 64))
        raise UnsupportedError(f"target {gpu.name}: {reason}")


@app.command()
def build(
    model: Annotated[str | None, typer.Option("--model", help="Build a model's kernels.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="Tensor-parallel ranks.")] = None,
    target: Target = "auto",
    link: Link = "nvlink",
    tokens: Tokens = DEFAULT_TOKENS,
    ops: Ops = "ag_gemm,gemm_rs",
    dtype: Dtype = "bf16",
    training: Training = False,
    db: Db = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the sources: $FLUXGEN_HOME/generated for a model, else the shipped "
            "ones. --out generated updates those of a checkout.",
        ),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Parallel compiles (default: by RAM).")] = None,
    limit: Annotated[int | None, typer.Option(help="Compile only the first N kernels.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only compare the sources.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be done.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Render the tuned kernels into sources with a manifest, and compile what is not yet built."""
    from fluxgen.compiler.builder import build_all
    from fluxgen.compiler.generated import check_sources, read_manifest, render_all, write_sources
    from fluxgen.compiler.store import Store
    from fluxgen.report.tables import print_table
    from fluxgen.runtime.session.kernels import source_of

    if jobs is not None:
        check_int("jobs", jobs, 1, 1024)
    directory = out or _sources_directory(model is not None)
    if check:
        differences = check_sources(directory)
        if as_json:
            _emit({"directory": str(directory), "differences": differences})
        for line in differences:
            _say(line)
        if differences:
            raise FluxgenError(f"{directory}: run `fluxgen build` and commit what it writes")
        if not as_json:
            stdout.print(f"{directory}: as the templates give it", highlight=False)
        return

    entries = set(read_manifest(directory))
    wanted = entries
    if model is not None:
        if tp is None:
            raise UsageError("build --model: expected --tp too; found none")
        topology = _topology(target, link, tp)
        _require_kernels(topology.gpu, dtype)
        wanted = _tuned_entries(model, topology, tokens, ops, dtype, training, db)
        entries = entries | wanted
    if not wanted:
        _say(
            "nothing to build: no tuned kernel in the manifest or for this model; "
            "run `fluxgen tune` first, then `fluxgen build --model ...`"
        )
    rendered = render_all(wanted)
    names = list(rendered)
    names.sort(key=lambda name: (not name.startswith("support_"), name))
    if limit is not None:
        check_int("limit", limit, 1)
        supports = sum(name.startswith("support_") for name in names)
        names = names[: limit + supports]
    store = Store()
    if dry_run:
        rows = []
        for name in names:
            artifact = store.find(source_of(rendered[name]))
            rows.append([name, "cached" if artifact else "to build"])
        if as_json:
            _emit(
                {"directory": str(directory), "kernels": [{"name": n, "state": s} for n, s in rows]}
            )
        else:
            print_table(stdout, "would build", ("kernel", "state"), rows)
        return

    start = time.monotonic()
    changed = write_sources(directory, entries) if model is not None or entries else []
    sources = [source_of(rendered[name]) for name in names]
    results, tools = _prebuilt(sources, store)
    if tools is not None:
        with _progress("compiling") as (bar, task):
            bar.update(task, total=len(sources), completed=0)

            def show(result: Any, done: int, total: int) -> None:
                bar.update(task, completed=done, total=total, note=f"{result.source.name}"[:48])

            results = build_all(sources, tools, store, jobs, show, report=_say)
    failed = [result for result in results if result.status == "failed"]
    table: list[list[object]] = [
        [
            result.source.name,
            result.status,
            max((f.registers for f in result.artifact.facts), default=0) if result.artifact else 0,
            result.seconds,
        ]
        for result in results
    ]
    if as_json:
        _emit(
            {
                "directory": str(directory),
                "store": str(Settings.load().store),
                "changed": changed,
                "seconds": round(time.monotonic() - start, 3),
                "kernels": [
                    {
                        "name": r.source.name,
                        "status": r.status,
                        "key": r.artifact.key if r.artifact else None,
                        "error": r.error,
                        "facts": [f.to_dict() for f in r.artifact.facts] if r.artifact else [],
                    }
                    for r in results
                ],
            }
        )
    else:
        print_table(stdout, "kernels", ("kernel", "status", "registers", "seconds"), table)
    for result in failed:
        _say(f"failed: {result.error}")
    if failed:
        raise typer.Exit(1)


def _prebuilt(sources: list[Any], store: Any) -> tuple[list[Any], Any]:
    """The toolchain to build with; without one, what is built already, if that is everything."""
    from fluxgen.compiler import toolchain
    from fluxgen.compiler.builder import Result

    if not sources:
        return [], None
    try:
        return [], toolchain.find(Settings.load())
    except ToolchainError as error:
        found = [store.find(source) for source in sources]
        if None in found:
            raise
        _say(f"note: nothing to compile; {error}")
        pairs = zip(sources, found, strict=True)
        return [Result(source, "cached", artifact) for source, artifact in pairs], None


def _sources_directory(of_model: bool) -> Path:
    """The shipped sources, which a checkout tracks; a model's own are written under the home."""
    return Settings.load().home / "generated" if of_model else data_dir("generated")


def _tuned_entries(
    model: str,
    topology: Topology,
    tokens: str,
    ops: str,
    dtype: str,
    training: bool,
    db: Path | None,
) -> set[Any]:
    from fluxgen.compiler.generated import Entry, compiled_part
    from fluxgen.db.lookup import default_lookup
    from fluxgen.shapes import counted_problems

    look = default_lookup(db)
    found = counted_problems(
        model,
        topology.world,
        _integers("tokens", tokens),
        DType.parse(dtype),
        _ops(ops),
        training=training,
    )
    entries = set()
    misses = 0
    for problem in found.problems:
        result = look(problem, topology)
        misses += result.record is None
        if result.kernel is not None:
            entries.add(Entry(topology.gpu.arch, compiled_part(problem.signature), result.kernel))
    if misses == len(found.problems):
        raise UsageError(
            f"build: none of the {misses} problems of {model} is tuned on {topology.key}; run "
            f"`fluxgen tune --model {model} --tp {topology.world} --target {topology.gpu.name} "
            f"--link {topology.link.value}` first"
        )
    if misses:
        _say(f"note: {misses} problems are not tuned and stay unfused")
    if len(entries) > MAX_KERNELS:
        raise UsageError(
            f"build: {len(entries)} distinct kernels for one model, at most {MAX_KERNELS} are "
            "meant; tune the whole model in one call, so that its problems share kernels"
        )
    return entries


@app.command()
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

    topology = _topology(target, link, tp)
    problem = Problem(Signature.of(Op.parse(op), DType.parse(dtype)), m, n, k, tp)
    result = look(problem, topology, db=db)
    if as_json:
        _emit(
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


@app.command()
def doctor(as_json: Json = False) -> None:
    """Each part of this machine: found, or what is missing and how to get it."""
    from fluxgen.report.doctor import examine
    from fluxgen.report.tables import print_table

    checks = examine()
    if as_json:
        _emit({"fluxgen": fluxgen.__version__, "checks": [check.to_dict() for check in checks]})
    else:
        rows = [[check.name, check.state, check.detail] for check in checks]
        print_table(stdout, f"fluxgen {fluxgen.__version__}", ("part", "state", "detail"), rows)
    if any(check.state == "broken" for check in checks):
        raise typer.Exit(1)


@db_app.command("list")
def db_list(db: Db = None, as_json: Json = False) -> None:
    """The families of problems in the database, and how many m of each are tuned."""
    from fluxgen.report.tables import print_table

    families: dict[tuple[str, str, str, int, int], list[int]] = {}
    for record in _database(db).records():
        p = record.problem
        key = (record.topology, p.op.value, p.signature.dtype.value, p.n, p.k)
        families.setdefault(key, []).append(p.m)
    rows = [[*key, len(sizes), f"{min(sizes)}..{max(sizes)}"] for key, sizes in families.items()]
    columns = ("topology", "op", "dtype", "n", "k", "records", "m")
    if as_json:
        _emit([dict(zip(columns, row, strict=True)) for row in rows])
        return
    print_table(stdout, str(db or Settings.load().db), columns, rows)


@db_app.command("show")
def db_show(
    topology: Annotated[str | None, typer.Option(help="Only this topology's key.")] = None,
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Every record."""
    from fluxgen.report.tables import RECORD_COLUMNS, print_table, record_rows

    records = list(_database(db).records(topology))
    if as_json:
        _emit([record.to_dict() for record in records])
        return
    for key in dict.fromkeys(record.topology for record in records):
        rows = record_rows(record for record in records if record.topology == key)
        print_table(stdout, key, RECORD_COLUMNS, rows)


@db_app.command("export")
def db_export(
    directory: Annotated[Path, typer.Argument(help="Where packs are written.")],
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Write the database's records as packs: one sorted JSON line each."""
    from fluxgen.db.packs import export

    written = export(_database(db), directory)
    if as_json:
        _emit({"written": [str(path) for path in written]})
        return
    for path in written:
        print(path)


@db_app.command("import")
def db_import(
    path: Annotated[Path, typer.Argument(help="A pack, or a directory of packs.")],
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Read packs into the database; better provenance, then the newer record, wins."""
    from fluxgen.db.packs import import_

    _print_import(import_(path, _database(db)), as_json)


@db_app.command("merge")
def db_merge(
    paths: Annotated[list[Path], typer.Argument(help="Databases and packs.")],
    db: Db = None,
    as_json: Json = False,
) -> None:
    """Read several databases and packs into the database, by the same rule."""
    from fluxgen.db.packs import merge

    _print_import(merge(paths, _database(db)), as_json)


def _print_import(report: Any, as_json: bool) -> None:
    if as_json:
        _emit({"stored": report.stored, "kept": report.kept})
    else:
        print(f"{report.stored} records stored, {report.kept} kept as they were")


@db_app.command("verify")
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

    _require_database(db)
    if packs is not None:
        problems = verify_packs(packs)
    else:
        problems = verify(_database(db).records())
        if db is None:
            problems += verify_packs(data_dir("tuning_db"))
    again: list[dict[str, Any]] = []
    if device:
        again = _retimed(_known_records(packs, db), sample, compiled_only)
        problems += [f"{row['problem']}: {row['reason']}" for row in again if row["reason"]]
    if as_json:
        _emit({"problems": problems, **({"retimed": again} if device else {})})
    else:
        if device:
            _print_retimed(again)
        for problem in problems:
            print(problem)
        print(f"{len(problems)} problems")
    if problems:
        raise typer.Exit(1)


@app.command()
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
) -> None:
    """One HTML page: speedups by m, how the searches went, the timeline of a fused call."""
    from fluxgen.report.page import page
    from fluxgen.report.picture import speedup_svg
    from fluxgen.report.timeline import fused_timeline, perfetto, unfused_timeline
    from fluxgen.tune import searches

    topology = _topology(target, link, tp)
    _require_database(db)
    known = [r for r in _known_records(packs, db) if r.topology == topology.key]
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
    _write(out, page(f"fluxgen on {topology.key}", records, found, timelines))
    if trace is not None:
        _write(trace, json.dumps(perfetto(timelines)))
    if svg is not None:
        _write(svg, speedup_svg(f"fluxgen on {topology.key}", records))
    for path in (out, trace, svg):
        if path is not None:
            _say(f"wrote {path}")


def _write(path: Path, text: str) -> None:
    from fluxgen.compiler.generated import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def _require_database(db: Path | None) -> None:
    """A database that is named has to be there; the user's own may not be yet."""
    if db is not None and not db.is_file():
        raise DatabaseError(f"{db}: no such tuning database; tune first, or check the path")


def _known_records(packs: Path | None, db: Path | None) -> list[Any]:
    from fluxgen.db.packs import pack_files, read_pack

    records = [] if packs is not None else list(_database(db).records())
    if packs is not None or db is None:
        for path in pack_files(packs or data_dir("tuning_db")):
            records += read_pack(path)
    return records


def _retimed(records: list[Any], count: int, compiled_only: bool) -> list[dict[str, Any]]:
    """Records of this machine's GPU, timed again, as plain values."""
    from fluxgen.db.keys import topology_of
    from fluxgen.tune.retime import retime, sample

    gpu = _target("auto", 1)
    rows = []
    for key in sorted({r.topology for r in records if r.topology.startswith(f"{gpu.name}-")}):
        topology = topology_of(key, {gpu.name: gpu}, gpu.sm_count)
        of_key = [r for r in records if r.topology == key]
        with _evaluator("device", topology, compiled_only=compiled_only) as (judge, compiled):
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


def _database(path: Path | None) -> Any:
    from fluxgen.db.database import Database

    return Database(path or Settings.load().db)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if version:
        print(f"fluxgen {fluxgen.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise typer.BadParameter("expected a command; see fluxgen --help")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        app(args=arguments, prog_name="fluxgen")
    except FluxgenError as error:
        stderr.print(f"error: {escape(str(error))}", highlight=False, soft_wrap=True)
        return error.exit_code
    except SystemExit as done:  # how typer ends, wrong usage (2) and Ctrl-C (130) included
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
        return _interrupted() if code == 128 + signal.SIGINT else code
    except KeyboardInterrupt:
        return _interrupted()
    return 0


def _interrupted() -> int:
    text = "interrupted: what was finished is kept, nothing half-done is; run it again to go on"
    _say(text)
    return 1


def run() -> None:
    """The ``fluxgen`` command."""
    # How a batch system ends a job: what Ctrl-C keeps is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
