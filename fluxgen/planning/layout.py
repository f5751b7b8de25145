"""How a model lies on a cluster, and which layouts there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from fluxgen.core.errors import UsageError
from fluxgen.planning.cluster import Cluster
from fluxgen.planning.model import Transformer

__all__ = ["RECOMPUTE", "Fixed", "Layout", "layouts", "why_not"]

RECOMPUTE = ("none", "selective", "full")
"""What backward computes again: nothing; attention between its GEMMs; every layer."""
MICROS = (1, 2, 4, 8)
"""Sequences of a micro-batch that are tried."""
SPARE = 2
"""Layers by which stages may be uneven."""
CHUNKS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20)


@dataclass(frozen=True, order=True)
class Layout:
    """One way to run a step.

    Attributes:
        tp: ranks that share each GEMM. cp: that share each sequence in attention, too.
        pp: stages. vp: chunks of layers of one stage (interleaved schedule; 1: 1F1B). dp: replicas.
        zero: what replicas share: 0 nothing, 1 the optimiser's state, 2 gradients too, 3 weights
            too (FSDP). recompute: one of ``RECOMPUTE``. micro: sequences of a micro-batch.
        sp: activations between the GEMMs are cut over tp.
        grid: AxoNN's (Gx, Gy, Gz) instead of tp: columns, rows and depth of each weight, whose
            product is ``tp``; () for Megatron-LM's.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int = 1
    zero: int = 0
    recompute: str = "none"
    micro: int = 1
    sp: bool = True
    grid: tuple[int, ...] = ()

    @property
    def gpus(self) -> int:
        """GPUs that it fills."""
        return self.tp * self.cp * self.pp * self.dp

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "grid": list(self.grid)}

    @property
    def key(self) -> str:
        """``tp8 pp4 vp2 dp2 zero1 selective mb1``: what is not as usual, in one line."""
        words = [f"{name}{value}" for name, value in (
            ("tp", self.tp), ("cp", self.cp), ("pp", self.pp), ("vp", self.vp), ("dp", self.dp),
        ) if value > 1]  # fmt: skip
        if self.grid:
            words[: self.tp > 1] = ["grid" + "x".join(map(str, self.grid))]
        if self.tp > 1 and not self.sp and not self.grid:
            words.append("nosp")
        if self.zero:
            words.append("fsdp" if self.zero == 3 else f"zero{self.zero}")
        if self.recompute != "none":
            words.append(self.recompute)
        return " ".join([*words, f"mb{self.micro}"])


@dataclass(frozen=True)
class Fixed:
    """What the user has fixed of a layout; None: try what there is."""

    tp: int | None = None
    cp: int | None = None
    pp: int | None = None
    vp: int | None = None
    dp: int | None = None
    zero: int | None = None
    recompute: str | None = None
    micro: int | None = None
    sp: bool | None = None


def stage_layers(model: Transformer, layout: Layout) -> int:
    """Layers of the fullest stage: the first and the last one may have one less, beside what else
    they do (Llama 3, arXiv 2407.21783, section 3.3.2)."""
    chunks = layout.pp * layout.vp
    return -(-model.layers // chunks) * layout.vp


def divisors(n: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def why_not(
    model: Transformer, cluster: Cluster, layout: Layout, batch: int, seq: int
) -> str | None:
    """Why a layout cannot run at all, or None; memory is another question."""
    if layout.gpus != cluster.gpus:
        return f"{layout.key} fills {layout.gpus} of {cluster.gpus} GPUs"
    if layout.tp > cluster.node and not layout.grid:
        return f"tp {layout.tp} is more than the {cluster.node} GPUs of a node"
    if layout.grid:
        return _why_not_rounds(layout, batch)
    for what, size in (("heads", model.heads), ("kv heads", model.kv_heads), ("ffn", model.ffn)):
        if size % layout.tp and not (what == "kv heads" and layout.tp % size == 0):
            return f"tp {layout.tp} does not divide {size} {what}"
    if layout.sp and layout.tp > 1 and seq * layout.micro % layout.tp:
        return f"tp {layout.tp} does not divide {seq * layout.micro} tokens"
    if seq % (2 * layout.cp) and layout.cp > 1:
        return f"cp {layout.cp}: expected a sequence of a multiple of {2 * layout.cp}; found {seq}"
    if stage_layers(model, layout) * layout.pp - model.layers > SPARE:
        return f"{layout.pp * layout.vp} stages do not divide {model.layers} layers"
    if layout.vp > 1 and layout.pp == 1:
        return "vp: one stage has nothing to interleave"
    if (why := _why_not_rounds(layout, batch)) is not None:
        return why
    rounds = batch // (layout.dp * layout.micro)
    if layout.vp > 1 and rounds % layout.pp:
        return f"{rounds} micro-batches are no multiple of {layout.pp} stages, as vp needs"
    if layout.zero and layout.dp * layout.cp == 1:
        return "zero: one replica has nobody to share with"
    if layout.zero >= 2 and layout.pp > 1:
        return f"zero {layout.zero} with {layout.pp} stages would send each micro-batch's gradients"
    if layout.recompute not in RECOMPUTE:
        return f"recompute: expected one of {', '.join(RECOMPUTE)}; found {layout.recompute!r}"
    return None


def _why_not_rounds(layout: Layout, batch: int) -> str | None:
    if batch % (layout.dp * layout.micro):
        return f"dp {layout.dp} x micro-batch {layout.micro} do not divide a batch of {batch}"
    return None


def layouts(
    model: Transformer, cluster: Cluster, batch: int, seq: int, fixed: Fixed, phase: str = "train"
) -> Iterator[Layout]:
    """All layouts that can run, in a fixed order. Of a decode a micro-batch is all of a replica."""
    training, decode = phase == "train", phase == "decode"

    def of(value: int | None, others: list[int]) -> list[int]:
        return others if value is None else [value]

    parts = divisors(cluster.gpus)
    tps = of(fixed.tp, [d for d in parts if d <= cluster.node])
    cps = of(fixed.cp, [1] if decode else [d for d in parts if d <= 16])
    for tp, cp in product(tps, cps):
        if cluster.gpus % (tp * cp):
            continue
        rest = divisors(cluster.gpus // (tp * cp))
        for pp in of(fixed.pp, [d for d in rest if d <= model.layers]):
            dp = cluster.gpus // (tp * cp * pp)
            if tp * cp * pp * dp != cluster.gpus or (fixed.dp is not None and dp != fixed.dp):
                continue
            vps = [v for v in CHUNKS if v == 1 or (pp > 1 and pp * v <= model.layers)]
            micros = [m for m in MICROS if batch % (dp * m) == 0]
            if decode:
                micros = [batch // dp] if batch % dp == 0 else []
            zeros = [0, 1] if pp > 1 else [0, 1, 2, 3]
            if not training:
                vps, zeros = [1], [0]
            for vp, micro, zero in product(
                of(fixed.vp, vps), of(fixed.micro, micros), of(fixed.zero, zeros)
            ):
                for recompute in (
                    [fixed.recompute] if fixed.recompute else RECOMPUTE if training else ["none"]
                ):
                    sp = fixed.sp if fixed.sp is not None else not decode
                    layout = Layout(tp, cp, pp, vp, dp, zero, recompute, micro, sp and tp > 1)
                    if why_not(model, cluster, layout, batch, seq) is None:
                        yield layout


def require(found: bool, model: Transformer, cluster: Cluster, batch: int, fixed: Fixed) -> None:
    """Refuse a search of nothing.

    Raises:
        UsageError: says what would do.
    """
    if found:
        return
    given = {name: value for name, value in vars(fixed).items() if value is not None}
    held = ", ".join(f"{name} {value}" for name, value in given.items())
    each = (fixed.dp or 1) * (fixed.micro or 1)
    near = max(1, round(batch / each)) * each
    hint = f"A batch of {near}, or" if batch % each else "Fewer of these held, or"
    raise UsageError(
        f"plan: no layout of {model.name} fills {cluster.gpus} GPUs with a batch of {batch}"
        + (f" and {held}" if held else "")
        + f": tp must divide its {model.heads} heads and be at most {cluster.node}, stages its "
        f"{model.layers} layers, replicas the batch. {hint if held else 'A batch or'} a number of "
        "GPUs that these divide would do"
    )
