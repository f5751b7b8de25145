"""Constants, enums and structs, read out of the C headers that libraries are compiled against.

The headers are plain C on purpose: ``#define NAME 9``, ``constexpr int64_t kName = 4 * OTHER;``,
``enum name { A = 0 };`` and ``typedef struct name { ... } name;`` of integers, floats, pointers,
arrays and other structs. Whatever else a header has is passed over; what is like one of these and
cannot be read is an error, so that no field is lost.
"""

from __future__ import annotations

import ast
import ctypes as ct
import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

from fluxgen.core.errors import BuildError

__all__ = ["Layout", "read_layout"]

_Type: TypeAlias = Any
"""A ctypes type: a number, a pointer, an array or a struct."""

_SCALARS: dict[str, _Type] = {
    "int32_t": ct.c_int32,
    "uint32_t": ct.c_uint32,
    "int64_t": ct.c_int64,
    "uint64_t": ct.c_uint64,
    "float": ct.c_float,
}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+([A-Z]\w*)[ \t]+([^\n\\]+)$", re.MULTILINE)
_CONSTANT = re.compile(r"\bconstexpr\s+int(?:64_t|32_t)?\s+(k\w+)\s*=\s*([^;]+);")
_ENUM = re.compile(r"\benum\s+(\w+)\s*(?::\s*\w+\s*)?\{([^}]*)\}")
_STRUCT = re.compile(r"\btypedef\s+struct\s+(\w+)\s*\{([^}]*)\}\s*\1\s*;")
_CALLBACK = re.compile(r"\btypedef\s+\w+\s*\(\s*\*\s*(\w+)\s*\)\s*\(")
_FIELD = re.compile(
    r"(?:const\s+)?(?P<type>\w+)(?:\s+const)?\s*(?P<pointer>\**)(?:\s*const\b)?\s*"
    r"(?P<names>\w[\w\s,\[\]]*)"
)
_NAME = re.compile(r"(\w+)(?:\s*\[\s*(\w+)\s*\])?")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.LShift: operator.lshift,
}


@dataclass(frozen=True)
class Layout:
    """What headers declare.

    Attributes:
        constants: macros, ``constexpr`` numbers and members of enums, by name.
        enums: members of each enum, by its name. structs: by their C names.
    """

    constants: Mapping[str, int]
    enums: Mapping[str, Mapping[str, int]]
    structs: Mapping[str, type[ct.Structure]]

    def members(self, enum: str, prefix: str = "FLUXGEN_") -> dict[str, int]:
        """Members of an enum in lower case, without what all of their names begin with."""
        return {
            name.removeprefix(prefix).lower(): value for name, value in self.enums[enum].items()
        }


def read_layout(headers: Iterable[Path], classes: Mapping[str, type[ct.Structure]]) -> Layout:
    """Everything that ``headers`` declare, in the order in which they build on each other.

    Args:
        classes: the class of each struct by its C name, which gets its ``_fields_``. A struct that
            is not among them gets a class of its own.

    Raises:
        BuildError: a header cannot be read, or has a declaration of a kind that is not known here.
    """
    constants: dict[str, int] = {}
    enums: dict[str, dict[str, int]] = {}
    structs: dict[str, type[ct.Structure]] = {}
    types: dict[str, _Type] = dict(_SCALARS)
    for path in headers:
        try:
            text = _COMMENT.sub("", path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BuildError(
                f"{path}: cannot be read: {error.strerror}. Reinstall fluxgen."
            ) from error
        try:
            for match in _DEFINE.finditer(text):
                value = _macro(match[2], constants)
                if value is not None:
                    constants[match[1]] = value
            for match in _ENUM.finditer(text):
                enums[match[1]] = _members(match[2], constants)
                constants |= enums[match[1]]
            for match in _CONSTANT.finditer(text):
                constants[match[1]] = _number(match[2], constants)
            for match in _CALLBACK.finditer(text):
                types[match[1]] = ct.c_void_p
            for match in _STRUCT.finditer(text):
                struct = classes.get(match[1])
                if struct is None:
                    struct = cast("type[ct.Structure]", type(match[1], (ct.Structure,), {}))
                struct._fields_ = _fields(match[2], types, constants)
                structs[match[1]] = types[match[1]] = struct
        except _UnreadableError as error:
            raise BuildError(f"{path}: {error}. Reinstall fluxgen.") from None
    return Layout(constants, enums, structs)


class _UnreadableError(Exception):
    """A declaration of a kind that is not known."""


def _macro(text: str, constants: Mapping[str, int]) -> int | None:
    """A macro's number, or None: it is no number."""
    try:
        return _number(text, constants)
    except _UnreadableError:
        return None


def _number(text: str, constants: Mapping[str, int]) -> int:
    """An integer expression of numbers, names that are known, and ``+ - * <<``."""
    plain = re.sub(r"\b(0x[0-9a-fA-F]+|\d+)[uUlL]+\b", r"\1", text.strip())
    try:
        return _evaluate(ast.parse(plain, mode="eval").body, constants)
    except (SyntaxError, KeyError):
        raise _UnreadableError(f"expected an integer constant; found {text.strip()!r}") from None


def _evaluate(node: ast.expr, constants: Mapping[str, int]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return constants[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left, constants), _evaluate(node.right, constants)
        return int(_OPERATORS[type(node.op)](left, right))
    raise KeyError(ast.dump(node))


def _members(body: str, constants: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    following = 0
    for item in filter(None, (part.strip() for part in body.split(","))):
        name, _, value = (part.strip() for part in item.partition("="))
        found[name] = _number(value, {**constants, **found}) if value else following
        following = found[name] + 1
    return found


def _fields(
    body: str, types: Mapping[str, _Type], constants: Mapping[str, int]
) -> list[tuple[str, _Type]]:
    found: list[tuple[str, _Type]] = []
    for line in filter(None, (part.strip() for part in body.split(";"))):
        match = _FIELD.fullmatch(line)
        if match is None or (not match["pointer"] and match["type"] not in types):
            raise _UnreadableError(f"expected a field of a known type; found {line!r}")
        each = ct.c_void_p if match["pointer"] else types[match["type"]]
        for name in match["names"].split(","):
            part = _NAME.fullmatch(name.strip())
            if part is None:
                raise _UnreadableError(f"expected a name or an array; found {name.strip()!r}")
            count = _number(part[2], constants) if part[2] else 0
            found.append((part[1], each * count if count else each))
    return found
