"""``fluxgen build``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fluxgen.cli.common import (
    DEFAULT_TOKENS,
    MAX_KERNELS,
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
    named_ops,
    named_topology,
    progress_bar,
    require_kernels,
    say,
    stdout,
)
from fluxgen.core.dtypes import DType
from fluxgen.core.errors import (
    FluxgenError,
    ToolchainError,
    UsageError,
)
from fluxgen.core.problem import check_int
from fluxgen.core.settings import Settings, data_dir
from fluxgen.core.topology import Topology


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
            emit({"directory": str(directory), "differences": differences})
        for line in differences:
            say(line)
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
        topology = named_topology(target, link, tp)
        require_kernels(topology.gpu, dtype)
        wanted = _tuned_entries(model, topology, tokens, ops, dtype, training, db)
        entries = entries | wanted
    if not wanted:
        say(
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
            emit(
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
        with progress_bar("compiling") as (bar, task):
            bar.update(task, total=len(sources), completed=0)

            def show(result: Any, done: int, total: int) -> None:
                bar.update(task, completed=done, total=total, note=f"{result.source.name}"[:48])

            results = build_all(sources, tools, store, jobs, show, report=say)
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
        emit(
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
        say(f"failed: {result.error}")
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
        say(f"note: nothing to compile; {error}")
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
    from fluxgen.compiler.generated import Entry
    from fluxgen.db.lookup import default_lookup
    from fluxgen.shapes import counted_problems

    look = default_lookup(db)
    found = counted_problems(
        model,
        topology.world,
        integers("tokens", tokens),
        DType.parse(dtype),
        named_ops(ops),
        training=training,
    )
    entries = set()
    misses = 0
    for problem in found.problems:
        result = look(problem, topology)
        misses += result.record is None
        if result.kernel is not None:
            entries.add(Entry(topology.gpu.arch, problem.signature.compiled, result.kernel))
    if misses == len(found.problems):
        raise UsageError(
            f"build: none of the {misses} problems of {model} is tuned on {topology.key}; run "
            f"`fluxgen tune --model {model} --tp {topology.world} --target {topology.gpu.name} "
            f"--link {topology.link.value}` first"
        )
    if misses:
        say(f"note: {misses} problems are not tuned and stay unfused")
    if len(entries) > MAX_KERNELS:
        raise UsageError(
            f"build: {len(entries)} distinct kernels for one model, at most {MAX_KERNELS} are "
            "meant; tune the whole model in one call, so that its problems share kernels"
        )
    return entries
