"""The headers a kernel is compiled against: fluxgen's own, by content, and CUTLASS, by version."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

from fluxgen.core.errors import BuildError, ToolchainError
from fluxgen.core.settings import data_dir

CUTLASS_LOW, CUTLASS_HIGH = (4, 2), (5, 0)
"""Versions that will do: from the first up to, not including, the second."""

_INSTALL = "pip install nvidia-cutlass==4.2.0.0"
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_hashes: dict[tuple[str, tuple[tuple[str, int, int, int], ...]], str] = {}


def include_dir() -> Path:
    """The directory of fluxgen's own device headers."""
    return data_dir("templates") / "include"


def headers_hash(text: str, include: Path | None = None) -> str:
    """SHA-256 over the headers under ``include`` that ``text`` includes, directly or not.

    Sorted relative paths and contents; what is not under ``include`` (CUTLASS, CUDA) counts by its
    version elsewhere. Contents are read again only if a file's size, mtime or inode has changed.

    Raises:
        BuildError: the directory is missing or cannot be read.
    """
    root = (include_dir() if include is None else include).absolute()
    if not root.is_dir():
        raise BuildError(
            f"device headers: expected a directory at {root}; found none. Reinstall fluxgen."
        )
    try:
        files = _closure(text.encode(), root)
        stats = {name: path.stat() for name, path in files.items()}
        stamp = tuple((n, s.st_size, s.st_mtime_ns, s.st_ino) for n, s in stats.items())
        cached = _hashes.get((str(root), stamp))
        if cached is None:
            digest = hashlib.sha256()
            for name, path in files.items():
                data = path.read_bytes()
                digest.update(f"{len(name.encode())}:{name}:{len(data)}:".encode())
                digest.update(data)
            cached = _hashes[str(root), stamp] = digest.hexdigest()
    except OSError as error:
        raise BuildError(f"device headers: cannot read {root}: {error}. Reinstall fluxgen.") from (
            error
        )
    return cached


def _closure(text: bytes, root: Path) -> dict[str, Path]:
    """The headers reached from ``text`` by name, sorted; unknown names belong to others."""
    found: dict[str, Path] = {}
    pending = [name.decode("utf-8", "replace") for name in _INCLUDE.findall(text)]
    while pending:
        name = pending.pop()
        path = root / name
        if name in found or not path.is_file():
            continue
        found[name] = path
        pending += [n.decode("utf-8", "replace") for n in _INCLUDE.findall(path.read_bytes())]
    return dict(sorted(found.items()))


def find_cutlass(given: str, search: Sequence[str] | None = None) -> tuple[Path, str]:
    """CUTLASS' include directory and its version.

    Args:
        given: ``Settings.cutlass``: the include directory or the checkout around it, or ``""`` for
            the nvidia-cutlass wheel.
        search: where wheels are looked for, ``None`` for ``sys.path``.

    Raises:
        ToolchainError: there is none, or its version will not do.
    """
    if given:
        base = Path(given).expanduser().absolute()
        candidates = [base, base / "include"]
        where = f"FLUXGEN_CUTLASS={given}"
    else:
        candidates = _wheel_candidates(search)
        where = "the nvidia-cutlass wheel"
    for include in candidates:
        header = include / "cutlass" / "version.h"
        if header.is_file():
            version = _read_version(header)
            if not CUTLASS_LOW <= version[:2] < CUTLASS_HIGH:
                raise ToolchainError(
                    f"CUTLASS: expected version 4.2 or newer, older than 5; found "
                    f"{_dotted(version)} in {include}. Run: {_INSTALL}"
                    + (", and unset FLUXGEN_CUTLASS" if given else "")
                )
            return include.resolve(), _dotted(version)
    raise ToolchainError(
        f"CUTLASS: expected cutlass/version.h in {where}; found none"
        + (f" in {' or '.join(map(str, candidates))}" if candidates else "")
        + f". Run: {_INSTALL}"
        + (", and unset FLUXGEN_CUTLASS" if given else "")
    )


def _wheel_candidates(search: Sequence[str] | None) -> list[Path]:
    # find_spec, no import: cutlass_library's __init__ sets up logging and reads the environment.
    if search is None:
        spec = importlib.util.find_spec("cutlass_library")
        bases = list(spec.submodule_search_locations or []) if spec else []
    else:
        bases = [str(Path(entry) / "cutlass_library") for entry in search]
    return [Path(base) / "source" / "include" for base in bases]


def _read_version(header: Path) -> tuple[int, ...]:
    text = header.read_text("utf-8", "replace")
    numbers = []
    for part in ("MAJOR", "MINOR", "PATCH"):
        match = re.search(rf"^\s*#\s*define\s+CUTLASS_{part}\s+(\d+)", text, re.MULTILINE)
        if match is None:
            raise ToolchainError(
                f"CUTLASS: expected CUTLASS_{part} in {header}; found none. Run: {_INSTALL}"
            )
        numbers.append(int(match[1]))
    return tuple(numbers)


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
