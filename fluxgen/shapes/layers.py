"""What block each layer of a hybrid model has: attention, another mixer, or an MLP alone."""

from __future__ import annotations

from typing import Any

from fluxgen.core.errors import ModelConfigError, UnsupportedError
from fluxgen.shapes.families import Family
from fluxgen.shapes.keys import MAX_COUNT, Section, show

ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention", "attention")
MIXER, MLP, MOE, BOTH = "mixer", "mlp", "moe", "both"
"""A layer of another mixer (Mamba-2, linear attention); of an MLP or experts alone; of attention
and another mixer side by side."""

_LETTERS = {"M": MIXER, "-": MLP, "*": "attention", "E": MOE}
_NAMES = {
    "mamba": MIXER, "mamba2": MIXER, "linear_attention": MIXER, "mlp": MLP, "moe": MOE,
    **{kind: kind for kind in ATTENTION_TYPES},
}  # fmt: skip


def layer_kinds(config: Section, model_type: str, family: Family, layers: int) -> list[str]:
    """One of the kinds above, or of ``ATTENTION_TYPES``, for each layer.

    Raises:
        ModelConfigError: for a list that does not have one entry for each layer.
        UnsupportedError: for kinds of layers that are unknown.
    """
    if family.layers == "pattern":
        pattern = config.text("hybrid_override_pattern")
        if pattern or config.items("layers_block_type") is None:
            if len(pattern) != layers or set(pattern) - set(_LETTERS):
                raise ModelConfigError(
                    f"{config.where}: hybrid_override_pattern: expected one of M, -, *, E for each "
                    f"of {layers} layers; found {len(pattern)} letters: {show(pattern)}"
                )
            return [_LETTERS[letter] for letter in pattern]
    if family.layers == "both":
        return [BOTH] * layers
    if family.layers == "indices":
        return _by_index(config, layers)
    if family.layers == "attn_type_list":
        flags = config.items("attn_type_list")
        if flags is not None:
            if len(flags) != layers or any(flag not in (0, 1) for flag in flags):
                raise ModelConfigError(
                    f"{config.where}: attn_type_list: expected a 0 (linear) or 1 (full) for each "
                    f"of {layers} layers; found {show(flags)}"
                )
            return ["full_attention" if flag else MIXER for flag in flags]
    for name in ("layer_types", "layers_block_type"):
        types = config.items(name)
        if types is not None:
            return [_named(config, name, kind, model_type, family) for kind in _all(
                config, name, types, layers)]  # fmt: skip
    if family.layers == "interval":
        period = config.integer(("full_attention_interval",), MAX_COUNT) or 4
        return ["full_attention" if (i + 1) % period == 0 else MIXER for i in range(layers)]
    if family.layers in ("types", "pattern", "attn_type_list"):
        raise ModelConfigError(
            f"{config.where}: expected layer_types or layers_block_type, one entry for each of "
            f"{layers} layers; found neither"
        )
    return ["attention"] * layers


def _all(config: Section, name: str, types: list[Any], layers: int) -> list[Any]:
    if len(types) != layers:
        raise ModelConfigError(
            f"{config.where}: expected one entry of {name} for each of {layers} layers; "
            f"found {len(types)}"
        )
    return types


def _named(config: Section, name: str, kind: object, model_type: str, family: Family) -> str:
    known = _NAMES.get(kind, "") if isinstance(kind, str) else ""
    if known in ATTENTION_TYPES or (known == MIXER and family.mixer):
        return known
    if known in (MLP, MOE) and family.layers == "pattern":
        return known
    expected = ", ".join(
        (*ATTENTION_TYPES, *(("linear_attention, mamba",) if family.mixer else ()))
    )
    raise UnsupportedError(
        f"{config.where}: {name}: expected {expected}; found {show(kind)}, whose shapes are not "
        f"known for {model_type or 'this model'}"
    )


def _by_index(config: Section, layers: int) -> list[str]:
    name = "attn_layer_indices"
    chosen = config.items(name) or []
    for index in chosen:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < layers:
            raise ModelConfigError(
                f"{config.where}: {name}: expected layer numbers below {layers}; "
                f"found {show(index)}"
            )
    return ["attention" if i in chosen else MIXER for i in range(layers)]
