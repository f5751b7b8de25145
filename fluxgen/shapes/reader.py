"""Reading a model's ``config.json``: data from strangers, so everything is checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from fluxgen.core.errors import ModelConfigError
from fluxgen.shapes.presets import find_preset, unknown_model

MAX_BYTES = 1 << 20
"""Largest file that is read; published configs are below 64 KiB."""

MAX_DEPTH = 64
"""Deepest nesting of arrays and objects; published configs stay below 10."""

_NATIVE_KEYS = ("dim", "n_heads")
_HIDDEN_KEYS = ("hidden_size", "n_embd", "n_embed", "d_model", "model_type")


@dataclass(frozen=True)
class RawConfig:
    """A parsed config before any meaning is given to it.

    Attributes:
        name: what to call the model: the preset, the directory or the file.
        where: the path, or ``preset NAME``; starts every error message.
        data: the JSON object.
        side_quantization: the object of a ``hf_quant_config.json`` beside the file (ModelOpt
            keeps the recipe there), empty without one.
    """

    name: str
    where: str
    data: Mapping[str, Any]
    side_quantization: Mapping[str, Any] = field(default_factory=dict)


def load_config(model: str | Path | Mapping[str, Any] | RawConfig) -> RawConfig:
    """Read a model's configuration.

    Args:
        model: the name of a preset (any case), a ``config.json`` or a directory that holds one, or
            the parsed object itself. A preset's name wins over a relative path of the same text;
            write ``./name`` for the directory.

    Raises:
        ModelConfigError: naming the path, for anything that is no readable Hugging Face config.
    """
    if isinstance(model, RawConfig):
        return model
    if isinstance(model, Mapping):
        return _checked(RawConfig("model", "model config", model))
    if not isinstance(model, (str, Path)):
        raise ModelConfigError(
            "model: expected a preset's name, a path or a config's object; "
            f"found {type(model).__name__}"
        )
    if isinstance(model, str):
        # publisher/name may also be a relative directory; what is on disk is what was meant.
        preset = None if "/" in model and _exists(model) else find_preset(model)
        if preset is not None:
            return RawConfig(preset[0], f"preset {preset[0]}", preset[1])
        if not model.strip():
            raise ModelConfigError(
                "model: expected a preset's name or a path; found an empty string"
            )
    return _from_path(model)


def parse_json(text: bytes, where: str) -> Mapping[str, Any]:
    """Parse the bytes of a JSON object strictly.

    A byte-order mark is accepted; duplicate keys, NaN and Infinity are not, because which value
    a reader keeps would be a guess.

    Raises:
        ModelConfigError: naming ``where`` and, for a syntax error, the line and column.
    """
    if len(text) > MAX_BYTES:
        raise ModelConfigError(
            f"{where}: expected a config.json of at most {MAX_BYTES} bytes; found more. "
            "Is this a weights or tokenizer file?"
        )
    try:
        decoded = text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ModelConfigError(
            f"{where}: expected UTF-8 text; found byte 0x{text[error.start]:02x} at offset "
            f"{error.start}"
        ) from None
    if not decoded.strip():
        raise ModelConfigError(f"{where}: expected a JSON object; found an empty file")
    _check_depth(decoded, where)

    def refuse_constant(literal: str) -> NoReturn:
        raise ModelConfigError(
            f"{where}: expected JSON numbers; found {literal}, which is not JSON. "
            "Remove it or write null"
        )

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ModelConfigError(
                    f"{where}: expected each key once; found {key[:80]!r} twice. Keep one"
                )
            result[key] = value
        return result

    def finite(literal: str) -> float:
        value = float(literal)
        if not math.isfinite(value):
            raise ModelConfigError(
                f"{where}: expected numbers that fit a double; found {literal[:40]}"
            )
        return value

    try:
        data = json.loads(
            decoded, object_pairs_hook=unique, parse_constant=refuse_constant, parse_float=finite
        )
    except json.JSONDecodeError as error:
        raise ModelConfigError(
            f"{where}: not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}. "
            "JSON has no comments, trailing commas or single quotes"
        ) from None
    except RecursionError:
        raise ModelConfigError(f"{where}: the JSON is nested too deeply for a config") from None
    except ModelConfigError:
        raise
    except ValueError:
        # Python refuses to convert integers of more than 4300 digits.
        raise ModelConfigError(
            f"{where}: expected integers of a model's size; found one of thousands of digits"
        ) from None
    if not isinstance(data, dict):
        raise ModelConfigError(
            f"{where}: expected a JSON object at the top level; found {_json_name(data)}"
        )
    return data


def _from_path(model: str | Path) -> RawConfig:
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            folder, path = path, path / "config.json"
            if not path.exists():
                hint = (
                    " It has a params.json, the native format; convert the checkpoint to "
                    "Hugging Face's first"
                    if (folder / "params.json").exists()
                    else ""
                )
                raise ModelConfigError(f"{folder}: expected a config.json in it; found none.{hint}")
        if not path.exists():
            if isinstance(model, str) and _looks_like_a_name(model):
                raise unknown_model(model)
            raise ModelConfigError(f"{path}: expected a config.json; found no such file")
        if not path.is_file():
            raise ModelConfigError(f"{path}: expected a regular file; found something else")
        data = parse_json(_read(path), str(path))
        side = path.with_name("hf_quant_config.json")
        quantization = parse_json(_read(side), str(side)) if side.is_file() else {}
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, ModelConfigError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        shown = repr(str(model)[:200])
        raise ModelConfigError(f"model {shown}: cannot read it: {reason}") from None
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return _checked(RawConfig(name or "model", str(path), data, quantization))


def _looks_like_a_name(model: str) -> bool:
    # NAME or publisher/NAME, as model hubs write it.
    return model.count("/") <= 1 and not model.startswith(("/", ".", "~")) and ".json" not in model


def _exists(model: str) -> bool:
    try:
        return Path(model).exists()
    except (OSError, ValueError):
        return False


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _checked(raw: RawConfig) -> RawConfig:
    data = raw.data
    if all(key in data for key in _NATIVE_KEYS) and not any(key in data for key in _HIDDEN_KEYS):
        raise ModelConfigError(
            f"{raw.where}: not a Hugging Face config: it has the keys 'dim' and 'n_heads' of a "
            "native params.json. Give the config.json of the converted checkpoint"
        )
    return raw


def _check_depth(text: str, where: str) -> None:
    # Brackets inside strings count too; no config holds 64 unbalanced ones, and counting them
    # spares a tokenizer.
    depth = 0
    for char in text:
        if char in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ModelConfigError(
                    f"{where}: expected nesting of at most {MAX_DEPTH}; found more. "
                    "This is no model config"
                )
        elif char in "]}":
            depth -= 1


def _json_name(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
