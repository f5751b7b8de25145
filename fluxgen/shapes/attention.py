"""The attention blocks of a model: heads, kv heads, head sizes, and which layers have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluxgen.core.errors import ModelConfigError, UnsupportedError
from fluxgen.shapes.families import Family
from fluxgen.shapes.keys import HEAD_DIM, HEADS, KV_HEADS, MAX_COUNT, Section
from fluxgen.shapes.layers import ATTENTION_TYPES, BOTH


@dataclass(frozen=True)
class Latent:
    """The low-rank sizes of multi-head latent attention (MLA).

    Attributes:
        q_rank: rank of the query's down projection, 0 if queries are projected directly.
        kv_rank: rank of the joint key/value projection.
        nope, rope: parts of a query head without and with rotary embedding. v: value head size.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    v: int


@dataclass(frozen=True)
class Attention:
    """One kind of attention block.

    Attributes:
        count: layers that have it.
        heads, kv_heads: query heads; key/value heads. head_dim: elements of one head.
        label: what tells it from other kinds in the same model, empty if it is the only one.
        qkv_bias, o_bias: biases. gated: q has twice the columns (an output gate).
        shared_kv: one projection serves as both k and v.
        latent: MLA's sizes, or None; with it ``kv_heads`` and ``head_dim`` have no meaning.
    """

    count: int
    heads: int
    kv_heads: int
    head_dim: int
    label: str = ""
    qkv_bias: bool = False
    o_bias: bool = False
    gated: bool = False
    shared_kv: bool = False
    latent: Latent | None = None


def read_attention(
    config: Section, model_type: str, family: Family, hidden: int, kinds: Sequence[str]
) -> tuple[Attention, ...]:
    """The attention blocks of layers of these kinds.

    Raises:
        ModelConfigError: for missing or contradictory keys.
        UnsupportedError: where which layers have which block would be a guess.
    """
    heads = config.require(HEADS, MAX_COUNT)
    qkv_bias, o_bias = family.qkv_bias.read(config), family.o_bias.read(config)
    kv_rank = config.integer(("kv_lora_rank",))
    # Each layer of LongCat-Flash has two blocks of attention and two dense MLPs beside its experts.
    layers = len(kinds) * (2 if family.moe == "longcat" else 1)
    if kv_rank is not None:
        config.note(*KV_HEADS, *HEAD_DIM, "qk_head_dim")
        latent = Latent(
            q_rank=config.integer(("q_lora_rank",)) or 0,
            kv_rank=kv_rank,
            nope=config.require(("qk_nope_head_dim",)),
            rope=config.require(("qk_rope_head_dim",)),
            v=config.require(("v_head_dim",)),
        )
        return (Attention(layers, heads, 0, 0, "", qkv_bias, o_bias, latent=latent),)

    kv_heads = _kv_heads(config, model_type, family, heads)
    _check_groups(config, heads, kv_heads)
    head_dim = _head_dim(config, family, hidden, heads)
    gated = family.output_gate.read(config) or config.boolean("attn_output_gate", False)
    full = kinds.count("full_attention")
    count = sum(kind in (*ATTENTION_TYPES, BOTH) for kind in kinds)
    block = Attention(count, heads, kv_heads, head_dim, "", qkv_bias, o_bias, gated)

    global_dim = config.integer(("global_head_dim",))
    global_kv = config.integer(("num_global_key_value_heads",), MAX_COUNT)
    if global_dim is None and global_kv is None:
        return (block,) if count else ()
    if config.items("layer_types") is None:
        raise UnsupportedError(
            f"{config.where}: global_head_dim or num_global_key_value_heads without layer_types: "
            "which layers are global would be a guess"
        )
    # Without a v projection of its own a global layer takes its own number of kv heads; with one
    # it keeps the local number (Gemma 4).
    shared = config.boolean("attention_k_eq_v", False)
    global_kv = (global_kv or kv_heads) if shared else kv_heads
    _check_groups(config, heads, global_kv)
    wide = Attention(
        full, heads, global_kv, global_dim or head_dim, "global", qkv_bias, o_bias, gated, shared
    )
    local = Attention(count - full, heads, kv_heads, head_dim, "", qkv_bias, o_bias, gated)
    return tuple(kind for kind in (local, wide) if kind.count)


def _kv_heads(config: Section, model_type: str, family: Family, heads: int) -> int:
    if family.kv == "multi_query":
        return 1 if config.boolean("multi_query", True) else heads
    if family.kv == "falcon":
        grouped = config.boolean("new_decoder_architecture", False) or model_type == "RefinedWeb"
        if not grouped:
            # num_kv_heads is present but unused in these configs.
            config.note(*KV_HEADS)
            return 1 if config.boolean("multi_query", True) else heads
    elif family.kv == "chatglm":
        if not config.boolean("multi_query_attention", False):
            return heads
        return config.require(("multi_query_group_num",), MAX_COUNT)
    elif family.kv == "attn_config":
        inner = config.section("attn_config")
        nested = inner.integer(("kv_n_heads",), MAX_COUNT) if inner is not None else None
        return nested or config.integer(KV_HEADS, MAX_COUNT) or heads
    return config.integer(KV_HEADS, MAX_COUNT) or heads


def _check_groups(config: Section, heads: int, kv_heads: int) -> None:
    if heads % kv_heads:
        raise ModelConfigError(
            f"{config.where}: expected the number of heads to be a multiple of the kv heads; "
            f"found {heads} heads and {kv_heads} kv heads"
        )


def _head_dim(config: Section, family: Family, hidden: int, heads: int) -> int:
    explicit = config.integer(HEAD_DIM)
    if explicit is not None:
        return explicit
    # An explicit null asks for hidden / heads even where the class default is a number.
    if family.head_dim and not any(name in config.data for name in HEAD_DIM):
        return family.head_dim
    if hidden % heads:
        raise ModelConfigError(
            f"{config.where}: expected head_dim, or a hidden size that the heads divide; "
            f"found hidden {hidden} and {heads} heads"
        )
    return hidden // heads
