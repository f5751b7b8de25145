"""``fluxgen plan``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fluxgen.cli.common import (
    Json,
    Link,
    Model,
    emit,
    named_gpu,
    progress_bar,
    say,
    stdout,
    write_file,
)  # fmt: skip
from fluxgen.core.errors import UsageError

if TYPE_CHECKING:
    from fluxgen.planning.result import Plan


def plan(
    model: Model,
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs, all of them.")],
    batch: Annotated[int, typer.Option("--batch", help="Sequences of a step, of all replicas.")],
    seq: Annotated[int, typer.Option("--seq", help="Tokens of a sequence.")],
    target: Annotated[str, typer.Option("--target", help="A GPU by name or properties.")] = "auto",
    node: Annotated[int, typer.Option("--node", help="GPUs of a node.")] = 8,
    train: Annotated[bool, typer.Option("--train", help="A training step (the default).")] = False,
    prefill: Annotated[bool, typer.Option("--prefill", help="One forward of all tokens.")] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="One token of each, behind --seq others.")
    ] = False,
    fused: Annotated[
        str, typer.Option("--fused", help="Times of fused ops: records, predict or off.")
    ] = "records",
    link: Link = "",
    link_between: Annotated[
        str, typer.Option("--link-between", help="Between nodes, of one GPU: 50GB/s,5us.")
    ] = "",
    practice: Annotated[
        str, typer.Option("--practice", help="What the software overlaps: docs/plan.md.")
    ] = "modern",
    family: Annotated[
        str, typer.Option("--family", help="megatron, axonn (its 4D grid), or all.")
    ] = "megatron",
    tp: Annotated[int | None, typer.Option("--tp", help="Only this tp.")] = None,
    cp: Annotated[int | None, typer.Option("--cp", help="Only this cp.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", help="Only so many stages.")] = None,
    vp: Annotated[int | None, typer.Option("--vp", help="Only so many chunks a stage.")] = None,
    dp: Annotated[int | None, typer.Option("--dp", help="Only so many replicas.")] = None,
    zero: Annotated[int | None, typer.Option("--zero", help="Only this: 0 to 3 (FSDP).")] = None,
    recompute: Annotated[
        str | None, typer.Option("--recompute", help="Only this: none, selective or full.")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", help="Only so many sequences at once.")
    ] = None,
    sp: Annotated[
        bool | None, typer.Option("--sp/--no-sp", help="Sequence parallelism: only so.")
    ] = None,
    ignore_memory: Annotated[
        bool, typer.Option("--ignore-memory", help="List what is thought not to fit, too.")
    ] = False,
    best: Annotated[int, typer.Option("--best", help="Layouts to list.")] = 10,
    out: Annotated[
        Path | None, typer.Option("--out", help="Also write the plan, for report and tune --plan.")
    ] = None,
    as_json: Json = False,
) -> None:
    """The best layouts of a whole step on a cluster, predicted: needs no GPU."""
    from fluxgen.planning.layout import Fixed
    from fluxgen.planning.search import plan as search

    phases = [n for n, on in (("train", train), ("prefill", prefill), ("decode", decode)) if on]
    if len(phases) > 1:
        raise UsageError(f"plan: expected one of --train, --prefill, --decode; found {phases}")
    gpu = named_gpu(target, 1)
    with progress_bar("layouts") as (bar, task):

        def show(tried: int) -> None:
            bar.update(task, completed=tried, total=None, note=f"{tried}")

        found = search(
            model, target=gpu, gpus=gpus, batch=batch, seq=seq, node=node,
            phase=phases[0] if phases else "train", fused=fused, link=link,
            link_between=link_between, practice=practice,
            fixed=Fixed(tp, cp, pp, vp, dp, zero, recompute, micro_batch, sp),
            family=family, ignore_memory=ignore_memory, best=best, progress=show,
        )  # fmt: skip
    if found.interrupted:
        say(f"interrupted: the best of the {found.tried} layouts that were tried")
    if out is not None:
        write_file(out, json.dumps(found.to_dict(), indent=1) + "\n")
        say(f"wrote {out}")
    if as_json:
        emit(found.to_dict())
    else:
        _print(found)
    if found.interrupted:
        raise typer.Exit(1)


def _print(found: Plan) -> None:
    from fluxgen.report.tables import print_table

    title = (
        f"{found.model}, {found.phase}, {found.gpus} {found.target} in nodes of {found.node}, "
        f"batch {found.batch} x {found.seq}: predicted"
    )
    columns = ("layout", "step ms", "tokens/s/GPU", "MFU %", "GB", "exposed %", "unfused ms")
    rows = [
        [
            choice.layout.key, choice.step.step_us / 1e3, choice.tokens_per_s,
            100 * choice.mfu if choice.mfu else "-", choice.memory.total / 1e9,
            100 * choice.step.exposed, choice.unfused_us / 1e3,
        ]
        for choice in found.choices
    ]  # fmt: skip
    print_table(stdout, title, columns, rows)
    if not found.choices:
        return
    parts = dict(found.best.step.parts)
    shares = ", ".join(f"{name} {100 * us / found.best.step.step_us:.1f} %"
                       for name, us in parts.items() if us > 0)  # fmt: skip
    stdout.print(f"the first: {shares}", highlight=False, soft_wrap=True)
    if found.best.unfused_us > found.best.step.step_us * 1.0005:
        gain = found.best.unfused_us / found.best.step.step_us
        sources = sorted({source.split(",")[0] for _, source in found.best.problems if source})
        text = f"fused ops make it {gain:.3f} times as fast (times: {', '.join(sources)})"
        stdout.print(text, highlight=False, soft_wrap=True)
    if found.rival is not None:
        other = found.rival
        family = "AxoNN's" if other.layout.grid else "Megatron-LM's"
        stdout.print(
            f"the best of {family} family: {other.layout.key}, {other.step.step_us / 1e3:.2f} ms, "
            f"{other.step.step_us / found.best.step.step_us:.3f} times as long",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    dropped = f"{found.tried} layouts can run, {found.dropped} do not fit in memory"
    if found.closest is not None:
        layout, over = found.closest
        dropped += f"; the closest of these, {layout.key}, by {over / 1e9:.1f} GB"
    stdout.print(dropped, highlight=False, soft_wrap=True)
