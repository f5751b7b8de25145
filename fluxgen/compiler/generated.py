"""The committed sources: ``generated/*.cu`` and their ``manifest.json``.

The manifest lists, sorted by name, every kernel with its configuration and the hash of its text.
It is what ``fluxgen build`` compiles without a model, and what ``--check`` renders again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxgen.codegen.render import Rendered, kernel_name, render_kernel, render_support
from fluxgen.core.config import KernelConfig
from fluxgen.core.dtypes import DType
from fluxgen.core.epilogue import Epilogue
from fluxgen.core.errors import BuildError, FluxgenError, StoreError
from fluxgen.core.op import Op
from fluxgen.core.problem import Signature
from fluxgen.kernels.registry import ARCHS

MANIFEST = "manifest.json"
_MAX_BYTES = 4 << 20
_VERSION = 1


@dataclass(frozen=True, order=True)
class Entry:
    """One kernel of the manifest: what must be compiled in, and for which architecture."""

    arch: str
    signature: Signature
    kernel: KernelConfig

    def render(self, templates: Path | None = None) -> Rendered:
        """Its source text, from the templates."""
        return render_kernel(self.signature, self.arch, self.kernel, templates)

    def to_dict(self, rendered: Rendered) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": rendered.name,
            "arch": self.arch,
            "signature": self.signature.to_dict(),
            "kernel": self.kernel.to_dict(),
            "sha256": hashlib.sha256(rendered.text.encode()).hexdigest(),
        }


def read_manifest(directory: Path) -> tuple[Entry, ...]:
    """The entries of ``directory``, () where there is no manifest.

    Raises:
        BuildError: the manifest is damaged; names the file and what was expected.
    """
    path = directory / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise BuildError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        document = json.loads(data)
        if document["version"] != _VERSION:
            raise ValueError(f"version {document['version']!r}, expected {_VERSION}")
        return tuple(_entry(item) for item in document["kernels"])
    except (ValueError, KeyError, TypeError, RecursionError, FluxgenError) as error:
        raise BuildError(
            f"{path}: not a manifest of this version ({type(error).__name__}: {error}); restore it "
            "from version control, or delete it and run `fluxgen build --model ...`"
        ) from error


def _entry(item: dict[str, Any]) -> Entry:
    fields = dict(item["signature"])
    fields["op"] = Op.parse(fields["op"])
    fields["dtype"] = DType.parse(fields["dtype"])
    fields["out_dtype"] = DType.parse(fields["out_dtype"])
    fields["epilogue"] = Epilogue.parse(fields["epilogue"])
    if item["arch"] not in ARCHS:
        raise ValueError(f"arch {item['arch']!r}")
    return Entry(item["arch"], Signature(**fields), KernelConfig.from_dict(item["kernel"]))


def render_all(entries: Iterable[Entry], templates: Path | None = None) -> dict[str, Rendered]:
    """Every entry's source by name, and one support source per architecture."""
    unique = sorted(set(entries))
    supports = [render_support(arch, templates) for arch in sorted({e.arch for e in unique})]
    return {r.name: r for r in (*(e.render(templates) for e in unique), *supports)}


def _files(entries: Iterable[Entry], templates: Path | None) -> dict[str, str]:
    """Everything a directory of sources holds, by file name; the manifest comes last."""
    by_name = {kernel_name(e.signature, e.arch, e.kernel): e for e in entries}
    rendered = render_all(by_name.values(), templates)
    kernels = [by_name[name].to_dict(rendered[name]) for name in sorted(by_name)]
    manifest = {"version": _VERSION, "kernels": kernels}
    texts = {f"{name}.cu": source.text for name, source in sorted(rendered.items())}
    return {**texts, MANIFEST: json.dumps(manifest, indent=1, sort_keys=True) + "\n"}


def write_sources(
    directory: Path, entries: Iterable[Entry], templates: Path | None = None
) -> list[str]:
    """Make ``directory`` hold exactly ``entries``; returns the names of files that changed.

    Each file is complete or absent at any moment; the manifest is written last.

    Raises:
        StoreError: the directory cannot be written (read-only install, full disk).
    """
    wanted = _files(entries, templates)
    changed = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in wanted.items():
            path = directory / name
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                write_text(path, text)
                changed.append(name)
        for path in sorted(directory.glob("*.cu")):
            if path.name not in wanted:
                path.unlink()
                changed.append(path.name)
    except OSError as error:
        raise StoreError(
            f"{directory}: cannot be written: {error.strerror}; choose another place with --out"
        ) from error
    return changed


def write_text(path: Path, text: str) -> None:
    """Write a file that is complete or absent, or as it was, at any moment.

    Raises:
        OSError: it cannot be written.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def check_sources(directory: Path, templates: Path | None = None) -> list[str]:
    """What differs between ``directory`` and what the templates give; empty when nothing does."""
    entries = read_manifest(directory)
    wanted = _files(entries, templates) if entries else {}
    problems = []
    for name, text in sorted(wanted.items()):
        path = directory / name
        if not path.is_file():
            problems.append(f"{name}: missing")
        elif path.read_text(encoding="utf-8", errors="replace") != text:
            problems.append(f"{name}: differs from what the templates give")
    if directory.is_dir():
        problems += [
            f"{path.name}: not in the manifest"
            for path in sorted(directory.glob("*.cu"))
            if path.name not in wanted
        ]
    return problems
