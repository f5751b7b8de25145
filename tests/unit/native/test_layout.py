"""Layouts come out of the headers: as the compiler sees them, whole, or with a clear error."""

from __future__ import annotations

import ctypes as ct
import shutil
import subprocess

import pytest

from fluxgen.core.errors import BuildError
from fluxgen.core.settings import data_dir
from fluxgen.native import abi
from fluxgen.native.layout import read_layout


def test_a_compiler_sees_the_same_layout(tmp_path):
    """Every size, offset, constant and member of an enum that was read, asserted in C++."""
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed: it compiles the device headers for the host"
    facts = ["using namespace fluxgen;"]
    for name, struct in abi.LAYOUT.structs.items():
        facts.append(f"static_assert(sizeof({name}) == {ct.sizeof(struct)});")
        for field, *_ in struct._fields_:
            offset = getattr(struct, field).offset
            facts.append(f"static_assert(offsetof({name}, {field}) == {offset});")
    for name, value in abi.LAYOUT.constants.items():
        facts.append(f"static_assert({name} == {value});")
    assert len(facts) > 150
    source = tmp_path / "layout.cpp"
    include = data_dir("templates") / "include"
    includes = [f'#include "{path.relative_to(include)}"' for path in abi.HEADERS]
    source.write_text("\n".join(["#include <cstddef>", *includes, *facts]) + "\n")
    subprocess.run(
        [compiler, "-std=c++17", "-fsyntax-only", f"-I{include}", str(source)], check=True
    )


def test_every_struct_has_a_class_that_says_what_it_is():
    assert set(abi.LAYOUT.structs) == set(abi.STRUCTS)
    for name, struct in abi.STRUCTS.items():
        assert abi.LAYOUT.structs[name] is struct
        assert f"``{name}``" in (struct.__doc__ or "")


HEADER = """
#ifndef X_H_
#define X_H_  // a guard is no number
#define X_MOST 3
#define X_CALL(a) \\
  (a)
enum x_kind { X_ONE = 1, X_TWO, X_NINE = 9 };
enum class x_other : uint8_t { kNo };
constexpr int64_t kFirst = 4 * X_MOST;
constexpr int64_t kNext = kFirst + (1 << 4);
typedef int (*x_caller)(void const* args);
typedef struct x_inner {
  const void* at;
} x_inner;
typedef struct x_args {
  uint32_t abi_version; /* of
                           two lines */
  x_inner inner;
  int32_t a, b, each[X_MOST];  // a comment; with { and }
  void* const peers[2];
  x_caller call;
  float scale;
} x_args;
inline int f(int a) { return a; }
#endif
"""


def read(tmp_path, text):
    path = tmp_path / "x.h"
    path.write_text(text)
    return read_layout([path], {})


def test_what_a_header_may_hold(tmp_path):
    found = read(tmp_path, HEADER)
    assert found.constants == {
        "X_MOST": 3, "X_ONE": 1, "X_TWO": 2, "X_NINE": 9, "kFirst": 12, "kNext": 28,
    }  # fmt: skip
    assert found.members("x_kind", "X_") == {"one": 1, "two": 2, "nine": 9}
    args = found.structs["x_args"]
    assert [(n, ct.sizeof(t)) for n, t in args._fields_] == [
        ("abi_version", 4), ("inner", 8), ("a", 4), ("b", 4), ("each", 12), ("peers", 16),
        ("call", 8), ("scale", 4),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("typedef struct x {\n  long double a;\n} x;", "long double a"),
        ("typedef struct x {\n  unknown a;\n} x;", "unknown a"),
        ("typedef struct x {\n  int32_t a[N];\n} x;", "N"),
        ("typedef struct x {\n  int32_t a : 3;\n} x;", "int32_t a : 3"),
        ("typedef struct x {\n  int32_t a[2][3];\n} x;", "a[2][3]"),
        ("enum x { A = sizeof(int) };", "sizeof(int)"),
        ("constexpr int64_t kA = kB + 1;", "kB + 1"),
    ],
)
def test_a_declaration_of_another_kind_is_an_error(tmp_path, text, found):
    with pytest.raises(BuildError) as error:
        read(tmp_path, text)
    assert found in str(error.value)
    assert "x.h" in str(error.value)


def test_a_header_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(BuildError, match="Reinstall fluxgen"):
        read_layout([tmp_path / "none.h"], {})
