"""Mixers that are no softmax attention: the projections that tensor parallelism cuts.

Column-parallel in, row-parallel out, as attention has it: the first is a site of an all-gather, the
second of a reduce-scatter. With H heads of P, and G groups of N states::

    Mamba-2          in: z (H P), x (H P), B (G N), C (G N), dt (H)      out: H P
    gated delta net  in: q and k (Hk Dk), v and z (Hv Dv); b and a (Hv)  out: Hv Dv
    lightning        in: q, k, v (H D); an output gate (H D)             out: H D

Sizes as in vLLM's ``MambaMixer2``, ``Qwen3NextGatedDeltaNet`` and ``MiniMaxText01LinearAttention``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fluxgen.core.errors import ModelConfigError
from fluxgen.shapes.families import Family
from fluxgen.shapes.keys import HEADS, MAX_COUNT, Section

_MAMBA_HEADS = ("mamba_num_heads", "mamba_n_heads")
_MAMBA_GROUPS = ("n_groups", "mamba_n_groups")
_MAMBA_STATES = ("ssm_state_size", "mamba_d_state")
_MAMBA_SIZES = ("mamba_head_dim", "mamba_d_head", "mamba_d_ssm", "mamba_expand", "expand")
_GATED_DELTA = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")


@dataclass(frozen=True)
class Columns:
    """Adjacent columns of a projection that are dealt out in whole units.

    Attributes:
        size: all of them. units: heads or groups. A single unit is copied to every rank.
    """

    size: int
    units: int

    def local(self, tp: int) -> int:
        """Columns of one of ``tp`` ranks that the units allow."""
        return self.size if self.units == 1 else self.size // tp


@dataclass(frozen=True)
class Mixer:
    """One kind of mixer.

    Attributes:
        count: layers that have it. name: what its GEMMs' names begin with.
        inputs: each column-parallel projection by name. output: the row-parallel one's depth.
        quantities: units and what the config calls them, for errors.
        left_out: what is not listed. bias: the projections have a bias.
    """

    count: int
    name: str
    inputs: tuple[tuple[str, tuple[Columns, ...]], ...]
    output: Columns
    quantities: tuple[tuple[str, int], ...]
    left_out: str
    bias: bool = False


_NEEDED = {
    "mamba2": (_MAMBA_HEADS, _MAMBA_GROUPS, _MAMBA_STATES),
    "gated_delta": tuple((f"linear_{name}",) for name in _GATED_DELTA),
    "lightning": (HEADS,),
}


def read_mixer(
    config: Section, family: Family, hidden: int, count: int, layers: int, notes: list[str]
) -> tuple[Mixer, ...]:
    """The mixer of ``count`` of ``layers`` layers; () without any.

    A config that lacks its sizes altogether, as an excerpt may, gets a note and no mixer.

    Raises:
        ModelConfigError: for contradictory keys, or if some are missing.
    """
    needed = _NEEDED.get(family.mixer, ())
    if not count:
        config.note(*(name for names in needed for name in names), *_MAMBA_SIZES)
        return ()
    if all(config.find(names) is None for names in needed):
        what = "are Mamba blocks" if family.mixer == "mamba2" else "have linear attention"
        notes.append(
            f"{count} of {layers} layers {what}; their projections are not listed, since the "
            f"config lacks {', '.join(names[0] for names in needed)}"
        )
        return ()
    kind = {"mamba2": _mamba, "gated_delta": _gated_delta, "lightning": _lightning}[family.mixer]
    return (kind(config, hidden, count),)


def _mamba(config: Section, hidden: int, count: int) -> Mixer:
    heads = config.require(_MAMBA_HEADS, MAX_COUNT)
    groups = config.require(_MAMBA_GROUPS, MAX_COUNT)
    state = config.require(_MAMBA_STATES)
    size = config.data.get("mamba_d_head")
    head = None if size == "auto" else config.integer(("mamba_head_dim", "mamba_d_head"))
    inner = config.integer(("mamba_d_ssm",))
    if inner is None:
        inner = heads * head if head else (config.integer(("mamba_expand",), 64) or 2) * hidden
    config.note(*_MAMBA_SIZES)
    if inner % heads or (head and inner != heads * head):
        raise ModelConfigError(
            f"{config.where}: expected {heads} Mamba heads of one size to make the inner width; "
            f"found {inner}{f', and heads of {head}' if head else ''}"
        )
    bias = config.boolean("mamba_proj_bias", False) or config.boolean("use_bias", False)
    wide, states = Columns(inner, heads), Columns(groups * state, groups)
    return Mixer(
        count, "mamba", (("in", (wide, wide, states, states, Columns(heads, heads))),), wide,
        (("mamba heads", heads), ("mamba groups", groups)),
        "the convolution, the scan and the gated norm are no GEMMs", bias,
    )  # fmt: skip


def _gated_delta(config: Section, hidden: int, count: int) -> Mixer:
    del hidden
    keys = config.require(("linear_num_key_heads",), MAX_COUNT)
    values = config.require(("linear_num_value_heads",), MAX_COUNT)
    key = Columns(keys * config.require(("linear_key_head_dim",)), keys)
    value = Columns(values * config.require(("linear_value_head_dim",)), values)
    gates = Columns(values, values)
    return Mixer(
        count, "linear", (("qkvz", (key, key, value, value)), ("ba", (gates, gates))), value,
        (("linear_num_key_heads", keys), ("linear_num_value_heads", values)),
        "the convolution, the delta rule and the gated norm are no GEMMs",
    )  # fmt: skip


def _lightning(config: Section, hidden: int, count: int) -> Mixer:
    heads = config.require(HEADS, MAX_COUNT)
    head = config.integer(("head_dim",)) or hidden // heads
    each = Columns(heads * head, heads)
    return Mixer(
        count, "linear", (("qkv", (each, each, each)), ("gate", (each,))), each,
        (("num_attention_heads", heads),), "lightning attention itself is no GEMM",
    )  # fmt: skip
