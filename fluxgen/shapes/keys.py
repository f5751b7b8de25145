"""Typed access to the keys of a config, with aliases and errors that name key and file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluxgen.core.errors import ModelConfigError

HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
HEAD_DIM = ("head_dim", "kv_channels", "attention_head_dim")
FFN = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
VOCAB = ("vocab_size", "padded_vocab_size")

MAX_WIDTH = 1 << 26
"""Largest width (hidden, ffn, vocabulary) that is believed; today's largest is below 2^20."""

MAX_COUNT = 1 << 14
"""Largest number of heads, layers or experts that is believed."""


def show(value: object) -> str:
    """A short, safe text of any value for an error message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"a huge {type(value).__name__}"
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{text} (text)" if isinstance(value, str) else text


@dataclass(frozen=True)
class Section:
    """One JSON object of a config and where it is.

    Attributes:
        data: the object. where: path and, for a nested object, its key.
        used: keys that the rules have looked at, present or not.
    """

    data: Mapping[str, Any]
    where: str
    used: set[str] = field(default_factory=set, compare=False)

    def note(self, *names: str) -> None:
        """Keys that the rules know, whether or not they need them."""
        self.used.update(names)

    def find(self, names: Sequence[str]) -> tuple[str, Any] | None:
        """The first non-null value among aliases of one key, with the alias that holds it.

        Raises:
            ModelConfigError: if two aliases are present and differ.
        """
        self.note(*names)
        present = [(name, self.data[name]) for name in names if self.data.get(name) is not None]
        for name, value in present[1:]:
            if value != present[0][1]:
                raise ModelConfigError(
                    f"{self.where}: {present[0][0]} and {name} mean the same; expected one value; "
                    f"found {show(present[0][1])} and {show(value)}. Remove the wrong one"
                )
        return present[0] if present else None

    def integer(self, names: Sequence[str], high: int = MAX_WIDTH, low: int = 1) -> int | None:
        """The integer under one of ``names``, or None if all are absent or null.

        Raises:
            ModelConfigError: for text, floats (also 4096.0), booleans, and values out of range.
        """
        found = self.find(names)
        if found is None:
            return None
        name, value = found
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ModelConfigError(
                f"{self.where}: {name}: expected an integer from {low} to {high}; "
                f"found {show(value)}"
            )
        return value

    def require(self, names: Sequence[str], high: int = MAX_WIDTH) -> int:
        """As :meth:`integer`, for a key that must be there.

        Raises:
            ModelConfigError: if it is absent; lists the aliases.
        """
        value = self.integer(names, high)
        if value is None:
            others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            raise ModelConfigError(
                f"{self.where}: key {names[0]}{others} is missing; it is needed and has no "
                "default. Is this the config.json of a decoder-only model?"
            )
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """A true or false under ``name``, ``default`` if absent or null.

        Raises:
            ModelConfigError: for any other value.
        """
        self.note(name)
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelConfigError(
                f"{self.where}: {name}: expected true or false; found {show(value)}"
            )
        return value

    def text(self, name: str) -> str:
        """The text under ``name``, empty if absent or null.

        Raises:
            ModelConfigError: for any other value.
        """
        self.note(name)
        value = self.data.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise ModelConfigError(f"{self.where}: {name}: expected text; found {show(value)}")
        return value

    def items(self, name: str) -> list[Any] | None:
        """The list under ``name``, None if absent or null.

        Raises:
            ModelConfigError: for any other value.
        """
        self.note(name)
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MAX_COUNT:
            raise ModelConfigError(
                f"{self.where}: {name}: expected a list of at most {MAX_COUNT} entries; "
                f"found {show(value)}"
            )
        return value

    def section(self, name: str) -> Section | None:
        """The object under ``name``, None if absent or null.

        Raises:
            ModelConfigError: for any other value.
        """
        self.note(name)
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ModelConfigError(f"{self.where}: {name}: expected an object; found {show(value)}")
        return Section(value, f"{self.where}: {name}")
