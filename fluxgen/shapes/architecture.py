"""From a config to the dimensions of a model's layers (whole model, before any sharding)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fluxgen.core.errors import ModelConfigError, UnsupportedError
from fluxgen.shapes.attention import Attention, read_attention
from fluxgen.shapes.families import ARCHITECTURES, FAMILIES, NESTED_TYPES, OFF, Family
from fluxgen.shapes.keys import (
    EXPERTS,
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    MAX_COUNT,
    VOCAB,
    Section,
    show,
)
from fluxgen.shapes.layers import BOTH, MIXER, layer_kinds
from fluxgen.shapes.mixers import Mixer, read_mixer
from fluxgen.shapes.mlp import Mlp, read_mlps
from fluxgen.shapes.quantization import Quantization, read_quantization
from fluxgen.shapes.reader import RawConfig, load_config
from fluxgen.shapes.unused import unused_keys

# Where multi-modal configs keep the language model. A vision_config is never read.
_TEXT_KEYS = ("text_config", "language_config", "llm_config", "thinker_config")

_GATED_ACTIVATIONS = ("", "silu", "swish", "swiglu", "geglu")

# Keys whose presence changes the shapes in a way that is not implemented.
_FOREIGN_KEYS = {
    "block_configs": "each layer has its own shapes",
    "per_layer_config": "each layer has its own shapes",
    "o_lora_rank": "its output projection is low-rank and grouped",
    "attn_layer_period": "it mixes attention with state-space layers of the first kind",
    "linear_attn_config": "it mixes softmax with linear attention",
    "ssm_cfg": "its layers are state-space blocks",
    "mamba_d_state": "it mixes attention with state-space layers",
    "num_kv_shared_layers": "some layers have no k and v projections",
    "use_double_wide_mlp": "some layers have a wider MLP",
    "enable_moe_block": "dense MLP and experts run in parallel",
}


_MIXER_KEYS = ("mamba_d_state", "attn_layer_period")
"""Those of them that a family with a mixer knows."""


@dataclass(frozen=True)
class ModelDims:
    """A model's layers, unsharded. Widths are in elements.

    Attributes:
        name, where: the model's name; where its config is.
        model_type: as in the config, empty without one.
        hidden: width of the residual stream. layers: decoder layers. vocab: 0 if unknown.
        attention: each kind of attention block, with the number of layers that have it.
        mixers: each other kind of mixer (Mamba-2, linear attention), likewise.
        mlps: each kind of MLP (dense, shared expert, routed expert), likewise.
        layout: ``nk`` or ``kn``, how weights are stored.
        parallel: attention and MLP share one input and one reduction.
        quantization: what the config says about quantised weights, or None.
        notes: facts worth knowing. warnings: what may be wrong.
    """

    name: str
    where: str
    model_type: str
    hidden: int
    layers: int
    vocab: int
    attention: tuple[Attention, ...]
    mixers: tuple[Mixer, ...]
    mlps: tuple[Mlp, ...]
    layout: str
    parallel: bool
    quantization: Quantization | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def model_dims(model: str | Path | Mapping[str, Any] | RawConfig) -> ModelDims:
    """Extract the layers' dimensions of a model.

    Args:
        model: whatever :func:`fluxgen.shapes.reader.load_config` takes.

    Raises:
        ModelConfigError: for an unreadable config or one that lacks a key.
        UnsupportedError: for an architecture whose shapes would be a guess.
    """
    raw = load_config(model)
    notes: list[str] = []
    warnings: list[str] = []
    top = Section(raw.data, raw.where)
    quantization = read_quantization(top, raw.side_quantization)
    config, model_type = _language_model(top, warnings)
    if quantization is None:
        quantization = read_quantization(config, {})
    family = FAMILIES.get(_family_name(model_type))
    _refuse_foreign(config, model_type, family)
    unknown = family is None
    if family is None:
        family = _generic_family(config, model_type, warnings)
    if family.refused:
        raise UnsupportedError(
            f"{raw.where}: model_type {model_type}: {family.refused}; "
            "give the GEMM sizes by hand instead"
        )
    if config is not top:
        config = _with_class_defaults(config, family, notes)

    hidden = config.require(HIDDEN)
    # Transformers doubles num_hidden_layers of LongCat-Flash, whose layers have two of most blocks.
    names = ("num_layers",) if family.moe == "longcat" else LAYERS
    layers = config.require(names, MAX_COUNT)
    kinds = layer_kinds(config, model_type, family, layers)
    attention = read_attention(config, model_type, family, hidden, kinds)
    mixed = sum(kind in (MIXER, BOTH) for kind in kinds)
    mixers = read_mixer(config, family, hidden, mixed, layers, notes)
    notes += [f"{mixer.name}: {mixer.left_out}" for mixer in mixers]
    if BOTH in kinds:
        notes.append(
            "attention and the mixer run side by side on one input: they may share one all-gather "
            "and one reduce-scatter"
        )
    mlps = read_mlps(config, model_type, family, hidden, kinds, notes)
    if family.parallel.read(config):
        notes.append(
            "attention and MLP run in parallel on one input: qkv and the first MLP GEMM may share "
            "one all-gather, o and the last one reduce-scatter"
        )
    embed = config.integer(("word_embed_proj_dim",))
    if embed is not None and embed != hidden:
        notes.append(f"word_embed_proj_dim {embed} differs; layer GEMMs use hidden {hidden}")
    if family is FAMILIES.get("gemma3n_text"):
        config.note(
            "altup_num_inputs", "laurel_rank", "hidden_size_per_layer_input",
            "vocab_size_per_layer_input", "num_kv_shared_layers",
        )  # fmt: skip
        notes.append(
            "not listed, since every rank computes them whole: altup, laurel and the per-layer "
            "inputs and gates; layers that share k and v still hold their projections"
        )
    extra = config.integer(("num_nextn_predict_layers", "mtp_num_hidden_layers"), MAX_COUNT, low=0)
    if extra:
        notes.append(
            f"{extra} multi-token-prediction layer(s): the same shapes as the main layers, and not "
            "in their counts"
        )
    if family.layout == "kn":
        notes.append(
            "weights are stored (K, N) as in GPT-2's Conv1D; transpose them once when loading"
        )
    left = unused_keys(config, unknown)
    if left:
        warnings.append(
            f"{', '.join(left)}: keys that may change the shapes and that the rules for "
            f"{model_type[:60] or 'a config without model_type'} do not use; what they describe is "
            "not listed"
        )
    return ModelDims(
        name=raw.name,
        where=raw.where,
        model_type=model_type,
        hidden=hidden,
        layers=layers,
        vocab=config.integer(VOCAB) or 0,
        attention=attention,
        mixers=mixers,
        mlps=mlps,
        layout=family.layout,
        parallel=family.parallel.read(config),
        quantization=quantization,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _language_model(top: Section, warnings: list[str]) -> tuple[Section, str]:
    """Descend to the language model's section; returns it and its model_type."""
    config, model_type = top, _model_type(top)
    while True:
        nested = [s for s in map(config.section, _TEXT_KEYS) if s is not None]
        if not nested:
            return config, model_type
        if len(nested) > 1:
            places = " and ".join(s.where.rsplit(": ", 1)[-1] for s in nested)
            raise ModelConfigError(
                f"{config.where}: expected one language model; found {places}. Remove one"
            )
        child = nested[0]
        for names in (HIDDEN, LAYERS, HEADS):
            outer, inner = config.find(names), child.find(names)
            if outer is not None and inner is not None and outer[1] != inner[1]:
                warnings.append(
                    f"{inner[0]} is {show(inner[1])} in {child.where.rsplit(': ', 1)[-1]} but "
                    f"{show(outer[1])} above it; the nested value is used"
                )
        config, model_type = child, _model_type(child) or _family_name(model_type)


def _family_name(model_type: str) -> str:
    """The language model's type of a multi-modal one, which some exports give in its place."""
    if model_type in FAMILIES:
        return model_type
    text_type = NESTED_TYPES.get(model_type, f"{model_type}_text")
    return text_type if text_type in FAMILIES else model_type


def _model_type(config: Section) -> str:
    model_type = config.text("model_type")
    if not model_type:
        for name in (config.items("architectures") or [])[:1]:
            model_type = ARCHITECTURES.get(name, "") if isinstance(name, str) else ""
    return model_type


def _refuse_foreign(config: Section, model_type: str, family: Family | None) -> None:
    if config.boolean("is_encoder_decoder", False):
        raise UnsupportedError(
            f"{config.where}: is_encoder_decoder is true; only decoder-only models are supported"
        )
    known: tuple[str, ...] = _MIXER_KEYS if family is not None and family.mixer else ()
    if family is FAMILIES["gemma3n_text"]:
        known = ("num_kv_shared_layers",)
    for key, reason in _FOREIGN_KEYS.items():
        if key not in known and config.data.get(key) not in (None, 0, False, [], {}):
            name = model_type or "without model_type"
            raise UnsupportedError(
                f"{config.where}: unsupported architecture ({name}): {key}: {reason}; "
                "give the GEMM sizes by hand instead"
            )
    if (family is None or not family.mixer) and (
        config.text("hybrid_override_pattern") or config.items("layers_block_type")
    ):
        raise UnsupportedError(
            f"{config.where}: unsupported architecture ({model_type or 'without model_type'}): "
            "it mixes attention with other kinds of layers"
        )


def _generic_family(config: Section, model_type: str, warnings: list[str]) -> Family:
    """The rules for an unknown ``model_type``: only where every dimension is in the config."""
    shown = f"model_type {model_type[:60]!r}" if model_type else "a config without model_type"
    missing = [
        names[0]
        for names in (HIDDEN, LAYERS, HEADS, KV_HEADS, FFN)
        if config.find(names) is None and not (names is KV_HEADS and _is_mla(config))
    ]
    if missing:
        raise ModelConfigError(
            f"{config.where}: {shown} is unknown, and without {', '.join(missing)} its shapes "
            "would be a guess. Known types: " + ", ".join(sorted(FAMILIES))
        )
    moe = ""
    if (config.integer(EXPERTS, MAX_COUNT, low=0) or 0) > 1:
        if config.find(("moe_intermediate_size",)) is None:
            raise UnsupportedError(
                f"{config.where}: {shown} is unknown and has experts: without "
                "moe_intermediate_size, whether intermediate_size is the experts' width would be "
                "a guess"
            )
        moe = "first_k_dense"
    activation = config.find(("hidden_act", "hidden_activation", "activation_function"))
    gated = activation is None or activation[1] in _GATED_ACTIVATIONS
    bias = config.data.get("attention_bias") is True
    warnings.append(
        f"{shown} is unknown: generic rules are used, with a "
        f"{'gated (gate_up, down)' if gated else 'plain (fc1, fc2)'} MLP"
    )
    config.note("attention_bias", "hidden_act", "hidden_activation", "activation_function")
    flag = replace(OFF, default=bias)
    return Family(gated=gated, qkv_bias=flag, o_bias=flag, moe=moe)


def _is_mla(config: Section) -> bool:
    return config.find(("kv_lora_rank",)) is not None


def _with_class_defaults(config: Section, family: Family, notes: list[str]) -> Section:
    """Fill in what a nested config omits because it equals the class default."""
    aliases = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
    }
    added = {
        key: value
        for key, value in family.nested.items()
        if not any(name in config.data for name in aliases.get(key, (key,)))
    }
    if not added:
        return config
    listed = ", ".join(f"{key} {value}" for key, value in added.items())
    notes.append(f"class defaults used for keys that the text config omits: {listed}")
    return Section({**config.data, **added}, config.where, config.used)
