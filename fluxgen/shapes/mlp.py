"""The MLPs of a model: dense, shared experts and routed experts, and which layers have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fluxgen.core.errors import ModelConfigError, UnsupportedError
from fluxgen.shapes.families import Family
from fluxgen.shapes.keys import EXPERTS, FFN, MAX_COUNT, MAX_WIDTH, Section, show
from fluxgen.shapes.layers import MLP, MOE

_EXPERT_WIDTH = ("moe_intermediate_size",)
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_shared_expert")


@dataclass(frozen=True)
class Mlp:
    """One kind of MLP.

    Attributes:
        count: layers that have it.
        width: elements between its two GEMMs (of one of gate and up, not of both).
        gated: gate and up projections rather than one. bias: both GEMMs have a bias.
        role: ``dense``, ``shared`` (a shared expert) or ``expert`` (routed; a grouped GEMM).
        experts: routed experts in a layer, 0 for the other roles.
    """

    count: int
    width: int
    gated: bool
    bias: bool
    role: str = "dense"
    experts: int = 0


def read_mlps(
    config: Section,
    model_type: str,
    family: Family,
    hidden: int,
    kinds: Sequence[str],
    notes: list[str],
) -> tuple[Mlp, ...]:
    """The MLPs of layers of these kinds, without those that no layer has.

    Raises:
        ModelConfigError: for missing or contradictory keys.
        UnsupportedError: for experts in a family that is not known to have any.
    """
    gated, bias = family.gated, family.mlp_bias.read(config)
    mlp_type = config.text("mlp_type")
    if model_type == "starcoder2" and mlp_type not in ("", "default"):
        raise UnsupportedError(
            f"{config.where}: mlp_type: expected 'default'; found {show(mlp_type)}"
        )
    layers = len(kinds)
    special = _SPECIAL.get(family.moe)
    if special is not None:
        found = special(config, family, hidden, kinds, notes)
        return tuple(
            Mlp(count, width, gated, bias, *rest) for count, width, *rest in found if count
        )

    experts = 0 if family.moe == "dbrx" else config.integer(EXPERTS, MAX_COUNT, low=0) or 0
    if not family.moe:
        if experts > 1:
            raise UnsupportedError(
                f"{config.where}: model_type {model_type} with {experts} experts is not known; "
                "which width is the experts' would be a guess"
            )
        widths = _each(config, FFN, layers)
        if widths is not None:
            return tuple(Mlp(n, width, gated, bias) for width, n in Counter(widths).items())
        return (Mlp(layers, _width(config, family, hidden), gated, bias),)

    if family.moe == "dbrx":
        inner = config.section("ffn_config") or Section({}, f"{config.where}: ffn_config")
        return (
            Mlp(
                layers,
                inner.require(("ffn_hidden_size",)),
                gated,
                bias,
                "expert",
                inner.require(("moe_num_experts",), MAX_COUNT),
            ),
        )
    if not experts:
        experts = config.require(EXPERTS, MAX_COUNT) if family.moe in ("all", "llama4") else 0
    if family.moe == "llama4":
        config.note("intermediate_size_mlp")  # of dense layers, of which there may be none
    expert_layers = _expert_layers(config, family, layers) if experts else [False] * layers
    moe, dense = sum(expert_layers), layers - sum(expert_layers)

    result: list[Mlp] = []
    if dense:
        names = ("intermediate_size_mlp",) if family.moe == "llama4" else FFN
        result.append(Mlp(dense, config.require(names), gated, bias))
    else:
        config.note(*FFN)  # of dense layers, of which there are none
    if moe:
        if family.moe in ("all", "llama4"):
            # Here intermediate_size is the width of one expert.
            width = config.require(FFN)
            same = config.integer(_EXPERT_WIDTH)
            if same is not None and same != width:
                raise ModelConfigError(
                    f"{config.where}: intermediate_size {width} and moe_intermediate_size {same} "
                    f"both mean the experts' width for {model_type}; expected one value"
                )
        else:
            width = config.require(_EXPERT_WIDTH)
        shared = _shared_width(config, family, width)
        if shared:
            result.append(Mlp(moe, shared, gated, bias, "shared"))
        result.append(Mlp(moe, width, gated, bias, "expert", experts))
        if family.moe == "sparse_step" and not dense and config.find(FFN) is not None:
            notes.append("intermediate_size is not used: every layer has experts")
    return tuple(result)


def _width(config: Section, family: Family, hidden: int) -> int:
    width = config.integer(FFN)
    if width is None and family.ffn_defaults_to_4h:
        # MPT alone has a factor instead of a width.
        return (config.integer(("expansion_ratio",), 64) or 4) * hidden
    if width is None:
        width = config.require(FFN)
    if not family.ffn_counts_both:
        return width
    if width % 2:
        raise ModelConfigError(
            f"{config.where}: intermediate_size: expected an even number, because it counts gate "
            f"and up together; found {width}"
        )
    return width // 2


def _expert_layers(config: Section, family: Family, layers: int) -> list[bool]:
    """For each layer, whether it has experts."""
    if family.moe == "all":
        return [True] * layers
    if family.moe == "llama4":
        chosen = _layer_list(config, "moe_layers", layers)
        if chosen is not None:
            return [i in chosen for i in range(layers)]
        step = config.integer(("interleave_moe_layer_step",), MAX_COUNT) or 1
        return [(i + 1) % step == 0 for i in range(layers)]
    if family.moe == "sparse_step":
        plain = _layer_list(config, "mlp_only_layers", layers) or frozenset()
        step = config.integer(("decoder_sparse_step",), MAX_COUNT) or 1
        return [i not in plain and (i + 1) % step == 0 for i in range(layers)]
    kinds = config.items("mlp_layer_types")
    if kinds is not None:
        if len(kinds) != layers or any(kind not in ("dense", "sparse") for kind in kinds):
            raise ModelConfigError(
                f"{config.where}: mlp_layer_types: expected 'dense' or 'sparse' for each of "
                f"{layers} layers; found {show(kinds)}"
            )
        return [kind == "sparse" for kind in kinds]
    first = config.integer(("first_k_dense_replace",), MAX_COUNT, low=0) or 0
    config.note("moe_layer_freq")
    frequency = config.data.get("moe_layer_freq")
    if isinstance(frequency, list):
        if len(frequency) != layers or any(flag not in (0, 1) for flag in frequency):
            raise ModelConfigError(
                f"{config.where}: moe_layer_freq: expected a 0 or 1 for each of {layers} layers; "
                f"found {show(frequency)}"
            )
        return [i >= first and bool(flag) for i, flag in enumerate(frequency)]
    step = config.integer(("moe_layer_freq",), MAX_COUNT) or 1
    return [i >= first and i % step == 0 for i in range(layers)]


def _layer_list(config: Section, name: str, layers: int) -> frozenset[int] | None:
    items = config.items(name)
    if items is None:
        return None
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < layers:
            raise ModelConfigError(
                f"{config.where}: {name}: expected layer numbers below {layers}; found {show(item)}"
            )
    return frozenset(items)


def _shared_width(config: Section, family: Family, expert_width: int) -> int:
    if family.moe == "llama4":
        return expert_width
    if family.moe == "first_k_dense":
        return (config.integer(_SHARED, MAX_COUNT, low=0) or 0) * expert_width
    names = ("shared_expert_intermediate_size", "shared_intermediate_size")
    return config.integer(names, low=0) or 0


# Families with rules of their own: (count, width, role, experts) of each kind of MLP.


def _ernie(config: Section, family: Family, hidden: int, kinds: Sequence[str], notes: Any) -> Any:
    layers = len(kinds)
    experts = config.integer(("moe_num_experts",), MAX_COUNT, low=0) or 0
    start = config.integer(("moe_layer_start_index",), MAX_COUNT, low=0) or 0
    end = config.integer(("moe_layer_end_index",), MAX_COUNT, low=-1)
    last = layers - 1 if end is None or end < 0 else end
    step = config.integer(("moe_layer_interval",), MAX_COUNT) or 1
    chosen = [i for i in range(layers) if start <= i <= last and (i + 1) % step == 0]
    moe = len(chosen) if experts else 0
    yield layers - moe, config.require(FFN) if moe < layers else 0
    if moe:
        width = config.require(_EXPERT_WIDTH)
        shared = config.integer(_SHARED, MAX_COUNT, low=0) or 0
        yield (moe if shared else 0), shared * width, "shared"
        yield moe, width, "expert", experts


def _hunyuan(config: Section, family: Family, hidden: int, kinds: Sequence[str], notes: Any) -> Any:
    layers = len(kinds)
    whole = config.require(FFN)
    experts = _per_layer(config, "num_experts", layers, 1, MAX_COUNT)
    skipped = config.integer(("moe_layer_num_skipped",), MAX_COUNT, low=0) or 0
    moe = [i for i in range(layers) if experts[i] > 1 and i >= skipped]
    widths = _per_layer(config, "moe_intermediate_size", layers, whole, MAX_WIDTH)
    shared = _per_layer(config, "num_shared_expert", layers, 1, MAX_COUNT)
    yield layers - len(moe), whole
    if config.boolean("use_mixed_mlp_moe", bool(moe)):
        for count, number in Counter(shared[i] for i in moe).items():
            yield number, count * whole, "shared"
    for (width, count), number in Counter((widths[i], experts[i]) for i in moe).items():
        yield number, width, "expert", count


def _longcat(config: Section, family: Family, hidden: int, kinds: Sequence[str], notes: Any) -> Any:
    layers = len(kinds)
    notes.append("each layer has two dense MLPs and, beside them, experts")
    yield 2 * layers, config.require(("ffn_hidden_size", "intermediate_size"))
    experts = config.require(EXPERTS, MAX_COUNT)
    yield layers, config.require(("expert_ffn_hidden_size",)), "expert", experts


def _granite(config: Section, family: Family, hidden: int, kinds: Sequence[str], notes: Any) -> Any:
    layers = len(kinds)
    experts = config.integer(EXPERTS, MAX_COUNT, low=0) or 0
    shared = config.integer(("shared_intermediate_size",), low=0) or 0
    if not experts:  # then the shared expert is the layer's only MLP
        config.note(*FFN)
        yield layers, shared or config.require(FFN)
        return
    yield (layers if shared else 0), shared, "shared"
    yield layers, config.require(FFN), "expert", experts


def _nemotron(
    config: Section, family: Family, hidden: int, kinds: Sequence[str], notes: Any
) -> Any:
    dense, moe = kinds.count(MLP), kinds.count(MOE)
    yield dense, config.require(FFN) if dense else 0
    if moe:
        if config.integer(("moe_latent_size",)):
            notes.append("experts work in a latent space: its two projections are not listed")
        shared = config.integer(("moe_shared_expert_intermediate_size",), low=0) or 0
        number = config.integer(_SHARED, MAX_COUNT, low=0)
        yield (moe if shared and number != 0 else 0), shared, "shared"
        width = config.require(_EXPERT_WIDTH)
        yield moe, width, "expert", config.require(EXPERTS, MAX_COUNT)
    else:
        config.note(*_SHARED, *_EXPERT_WIDTH, *EXPERTS, "moe_shared_expert_intermediate_size")


_SPECIAL = {
    "ernie": _ernie, "hunyuan": _hunyuan, "longcat": _longcat, "granite_hybrid": _granite,
    "nemotron_h": _nemotron,
}  # fmt: skip


def _each(config: Section, names: Sequence[str], layers: int) -> list[int] | None:
    """A width for each layer, where a config lists them; None where it does not."""
    for name in names:
        if isinstance(config.data.get(name), list):
            return _per_layer(config, name, layers, 1, MAX_WIDTH)
    return None


def _per_layer(config: Section, name: str, layers: int, default: int, high: int) -> list[int]:
    """An integer for each layer: one for all, or a list of them."""
    config.note(name)
    value = config.data.get(name)
    values = value if isinstance(value, list) else [default if value is None else value] * layers
    for each in values:
        if isinstance(each, bool) or not isinstance(each, int) or not 0 < each <= high:
            raise ModelConfigError(
                f"{config.where}: {name}: expected an integer from 1 to {high}, or a list of one "
                f"for each layer; found {show(value)}"
            )
    if len(values) != layers:
        raise ModelConfigError(
            f"{config.where}: {name}: expected one entry for each of {layers} layers; "
            f"found {len(values)}"
        )
    return values
