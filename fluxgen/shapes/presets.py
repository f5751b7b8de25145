"""Published models by name, so that common shapes need no file and no network."""

from __future__ import annotations

import copy
import difflib
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluxgen.core.errors import ModelConfigError


@functools.lru_cache(maxsize=1)
def _presets() -> Mapping[str, Mapping[str, Any]]:
    # Only the keys that shapes depend on, spelled as each family's own config.json spells them:
    # presets then take the same path through the code as a user's file.
    text = Path(__file__).with_name("presets.json").read_text(encoding="utf-8")
    presets: dict[str, dict[str, Any]] = json.loads(text)
    return presets


def preset_names() -> tuple[str, ...]:
    """The names of all presets, sorted."""
    return tuple(sorted(_presets()))


def find_preset(name: str) -> tuple[str, dict[str, Any]] | None:
    """A preset's proper name and its config object, or None if there is no such preset.

    The name may be in any case, with ``_`` or a space for ``-``, and with the publisher before
    a slash (``meta-llama/Llama-3.1-8B``).
    """
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    if key.count("/") == 1 and not key.startswith((".", "/", "~")):
        key = key.split("/")[1]
    config = _presets().get(key)
    return None if config is None else (key, copy.deepcopy(dict(config)))


def unknown_model(name: str) -> ModelConfigError:
    """The error for text that is neither a preset nor a path; lists near matches, then all."""
    names = preset_names()
    key = name.strip().lower()[:80].split("/")[-1]
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.6)
    hint = f"Did you mean {', '.join(near)}? " if near else ""
    return ModelConfigError(
        f"model: expected a preset or the path of a config.json; found {name[:80]!r}. {hint}"
        f"Presets: {', '.join(names)}"
    )
