"""The best layouts of a model on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from fluxgen.core.errors import UsageError
from fluxgen.core.problem import check_int
from fluxgen.core.settings import Settings, data_dir
from fluxgen.core.topology import Gpu, LinkKind, parse_gpu
from fluxgen.db.lookup import Lookup
from fluxgen.planning.cluster import Cluster
from fluxgen.planning.layout import MICROS, RECOMPUTE, Fixed, Layout, divisors, layouts, require
from fluxgen.planning.memory import Memory, memory
from fluxgen.planning.model import Transformer
from fluxgen.planning.practice import Practice
from fluxgen.planning.practice import practice as practice_of
from fluxgen.planning.result import Choice, Plan
from fluxgen.planning.timing.axonn import grids
from fluxgen.planning.timing.fused import MODES, Fusion
from fluxgen.planning.timing.step import Step, Stepper
from fluxgen.shapes import ModelDims, model_dims

__all__ = ["PHASES", "plan"]

PHASES = ("train", "prefill", "decode")
FAMILIES = ("megatron", "axonn", "all")
BEST = 10
MAX_BATCH = 1 << 20
MAX_SEQ = 1 << 24
MAX_GRID = 512
"""Ranks of the largest grid of AxoNN's that is tried."""

Progress = Callable[[int], None]


def plan(
    model: str | Path | Mapping[str, Any] | ModelDims | Transformer,
    *,
    target: str | Gpu,
    gpus: int,
    batch: int,
    seq: int,
    node: int = 8,
    phase: str = "train",
    fused: str = "records",
    link: str = "",
    link_between: str = "",
    practice: str = "modern",
    fixed: Fixed | None = None,
    family: str = "megatron",
    ignore_memory: bool = False,
    best: int = BEST,
    progress: Progress | None = None,
) -> Plan:
    """Predict every layout of a model on a cluster, and keep the best.

    Args:
        model: a config.json, a preset's name, or sizes. target: a GPU by name or properties.
        gpus: all of them. node: GPUs of a node. batch: sequences of a step, of all replicas.
        seq: tokens of a sequence; of a decode those that are kept of each.
        phase: ``train``, ``prefill`` or ``decode``.
        fused: where times of fused ops come from: ``records`` (predicted where there is none),
            ``predict``, or ``off``.
        link: ``nvlink`` or ``pcie`` within a node; what the GPU has where empty.
        link_between: between nodes, of one GPU: ``50GB/s,5us``; the usual network where empty.
        practice: how the software does it, see :mod:`.practice`. fixed: of the layout.
        ignore_memory: keep layouts that are thought not to fit, too.
        family: ``megatron`` (tp, cp, pp, replicas), ``axonn`` (its 4D grid), or ``all``.
        best: how many are kept. progress: told how many layouts have been tried.

    Raises:
        UsageError: an argument that does not fit, or nothing that runs or fits in memory; says
            what would do. UnsupportedError: a model of layers that the plan does not know.

    Ctrl-C ends the search: what was found until then is the plan, marked as interrupted.
    """
    check_int("batch", batch, 1, MAX_BATCH)
    check_int("seq", seq, 1, MAX_SEQ)
    check_int("best", best, 1, 1000)
    for name, value, valid in (
        ("phase", phase, PHASES),
        ("fused", fused, MODES),
        ("family", family, FAMILIES),
    ):
        if value not in valid:
            raise UsageError(f"{name}: expected one of {', '.join(valid)}; found {value!r}")
    held = fixed or Fixed()
    if held.recompute is not None and held.recompute not in RECOMPUTE:
        raise UsageError(
            f"recompute: expected one of {', '.join(RECOMPUTE)}; found {held.recompute!r}"
        )
    sizes = _sizes(model)
    kind = LinkKind.parse(link) if link else None
    gpu = target if isinstance(target, Gpu) else parse_gpu(target)
    cluster = Cluster.of(gpu, gpus, node, kind, link_between)
    does = practice_of(practice)
    lookup = None
    if fused == "records":
        lookup = Lookup(Settings.load().db, data_dir("tuning_db"), tell=False)
    stepper = Stepper(sizes, cluster, batch, seq, does, Fusion(cluster, fused, lookup), phase)
    plain = Stepper(sizes, cluster, batch, seq, does, Fusion(cluster), phase)

    found: list[tuple[float, Layout, Step, Memory]] = []
    tried = dropped = 0
    closest: tuple[Layout, float] | None = None
    interrupted = False
    room = gpu.mem_gb * 1e9
    try:
        for layout in _every(sizes, cluster, batch, seq, held, phase, family, does):
            tried += 1
            if progress is not None and tried % 64 == 0:
                progress(tried)
            need = memory(sizes, layout, does, batch, seq, phase == "train", fused != "off")
            if need.total > room:
                dropped += 1
                over = need.total - room
                if closest is None or over < closest[1]:
                    closest = layout, over
                if not ignore_memory:
                    continue
            step = stepper.step(layout)
            found.append((step.step_us, layout, step, need))
            if len(found) > 4096:  # of each family as many as are kept
                found.sort(key=lambda each: each[:2])
                found = [
                    each
                    for grids_too in (False, True)
                    for each in [e for e in found if bool(e[1].grid) is grids_too][:best]
                ]
    except KeyboardInterrupt:
        interrupted = True
    require(bool(tried), sizes, cluster, batch, held)
    if not found and not interrupted:
        assert closest is not None
        raise UsageError(
            f"plan: {sizes.name} with a batch of {batch} x {seq} tokens fits in no layout of "
            f"{gpus} {gpu.name} of {gpu.mem_gb:g} GB; the closest, {closest[0].key}, needs "
            f"{closest[1] / 1e9:.1f} GB more on each. More GPUs, or ones with more memory, would do"
        )
    chosen = sorted(found, key=lambda each: each[:2])[:best]
    choices = tuple(_choice(stepper, plain, *each[1:]) for each in chosen)
    rival = None
    if family == "all" and chosen:
        others = [each for each in found if bool(each[1].grid) != bool(chosen[0][1].grid)]
        if others:
            rival = _choice(stepper, plain, *min(others, key=lambda each: each[:2])[1:])
    return Plan(
        sizes.name, gpu.name, cluster.link.value, gpus, cluster.node, batch, seq, phase, practice,
        fused, choices, tried, dropped, closest, interrupted, sizes, cluster,
        rival,
    )  # fmt: skip


def _every(
    model: Transformer, cluster: Cluster, batch: int, seq: int, fixed: Fixed, phase: str,
    family: str, practice: Practice,
) -> Iterator[Layout]:  # fmt: skip
    """Layouts of the families that are asked for."""
    same = practice.attention != "unfused" and practice.selective == "attention"
    if family != "axonn":
        for layout in layouts(model, cluster, batch, seq, fixed, phase):
            if not (same and layout.recompute == "selective" and fixed.recompute is None):
                yield layout
    if family != "megatron" and phase == "train":
        for ranks in divisors(cluster.gpus):
            dp = cluster.gpus // ranks
            if ranks > MAX_GRID or (fixed.dp is not None and dp != fixed.dp):
                continue
            zero = 1 if dp > 1 else 0
            for grid, micro, again in product(grids(model, ranks), MICROS, ("none", "full")):
                fits = batch % (dp * micro) == 0 and micro * seq % grid[2] == 0
                if fits and fixed.micro in (None, micro) and fixed.recompute in (None, again):
                    yield Layout(ranks, 1, 1, 1, dp, zero, again, micro, False, grid)


def _sizes(model: str | Path | Mapping[str, Any] | ModelDims | Transformer) -> Transformer:
    if isinstance(model, Transformer):
        return model
    dims = model if isinstance(model, ModelDims) else model_dims(model)
    return Transformer.of(dims)


def _choice(stepper: Stepper, plain: Stepper, layout: Layout, step: Step, need: Memory) -> Choice:
    unfused = plain.step(layout).step_us
    cluster, model = stepper.cluster, stepper.model
    tokens = stepper.batch * (1 if stepper.phase == "decode" else stepper.seq)
    seconds = step.step_us / 1e6
    flops = 0.0 if stepper.phase == "decode" else model.flops(tokens, stepper.seq)
    if stepper.phase == "prefill":
        flops /= 3
    used = stepper.fusion.asked_by(lambda: _again(stepper, layout))
    return Choice(
        layout, step, need, unfused, tokens / seconds / cluster.gpus,
        flops / (seconds * cluster.gpus * cluster.gpu.tflops * 1e12), used,
    )  # fmt: skip


def _again(stepper: Stepper, layout: Layout) -> None:
    """Simulate the layer of a layout again, for what it asks of the fused ops."""
    Stepper(
        stepper.model, stepper.cluster, stepper.batch, stepper.seq, stepper.practice,
        stepper.fusion, stepper.phase,
    ).layer(layout)  # fmt: skip
