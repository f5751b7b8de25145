"""What the store keeps of one kernel, and how its key is made."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fluxgen.compiler import private
from fluxgen.compiler.nvcc import FLAGS, SO, Source, arch_flags
from fluxgen.compiler.ptxas import PtxasFacts
from fluxgen.compiler.toolchain import Toolchain
from fluxgen.core.errors import StoreError

META = "meta.json"
_VERSION = 1


@dataclass(frozen=True)
class Artifact:
    """A kernel in the store.

    Attributes:
        key: its address. name, arch: of its source. path: the library.
        sha256: of the library. facts: what ptxas said. versions: of what it was built with.
        created: seconds since 1970. seconds: how long nvcc took.
        cached: whether it was there already when asked for.
    """

    key: str
    name: str
    arch: str
    path: Path
    sha256: str
    facts: tuple[PtxasFacts, ...]
    versions: dict[str, str]
    created: float
    seconds: float
    cached: bool = True

    def fresh(self) -> Artifact:
        """The same, marked as just built."""
        return replace(self, cached=False)


def source_key(source: Source) -> str:
    """A digest of what is compiled: text, headers, architecture, flags, interface version."""
    return _digest(
        source.text,
        source.headers_hash,
        source.arch,
        [*FLAGS, *arch_flags(source.arch)],
        source.abi,
    )


def key_of(source: Source, toolchain: Toolchain) -> str:
    """The store's key: what is compiled, and by what."""
    return _digest(source_key(source), toolchain.identity)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([_VERSION, *parts]).encode()).hexdigest()


def versions_of(source: Source, toolchain: Toolchain) -> dict[str, str]:
    """What ``meta.json`` says of the tools, for people."""
    return {
        "nvcc": toolchain.version,
        "nvcc_build": toolchain.build,
        "cutlass": toolchain.cutlass_version,
        "toolchain": toolchain.identity,
        "host": toolchain.host,
        "flags": " ".join([*FLAGS, *arch_flags(source.arch)]),
        "headers": source.headers_hash,
        "abi": source.abi,
        "source": source_key(source),
    }


def write_meta(directory: Path, artifact: Artifact) -> None:
    """Write ``meta.json``. Raises OSError."""
    data: dict[str, Any] = {
        "version": _VERSION,
        "key": artifact.key,
        "name": artifact.name,
        "arch": artifact.arch,
        "sha256": artifact.sha256,
        "facts": [fact.to_dict() for fact in artifact.facts],
        "versions": artifact.versions,
        "created": artifact.created,
        "seconds": artifact.seconds,
    }
    (directory / META).write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", "utf-8")


def read(directory: Path, key: str, *, verify: bool = True) -> Artifact:
    """The artefact in ``directory``, which must be private and, if ``verify``, of the right bytes.

    Raises:
        StoreError: it is not private, or damaged.
    """
    library = directory / SO
    try:
        private.check(directory, directory=True)
        private.check(library, directory=False)
        private.check(directory / META, directory=False)
        data = json.loads((directory / META).read_text("utf-8"))
        if data["version"] != _VERSION or data["key"] != key:
            raise ValueError(f"version {data['version']!r}, key {data['key']!r}")
        artifact = Artifact(
            key=key,
            name=str(data["name"]),
            arch=str(data["arch"]),
            path=library,
            sha256=str(data["sha256"]),
            facts=tuple(PtxasFacts.from_dict(fact) for fact in data["facts"]),
            versions={str(k): str(v) for k, v in data["versions"].items()},
            created=float(data["created"]),
            seconds=float(data["seconds"]),
        )
        found = file_hash(library) if verify else artifact.sha256
    except FileNotFoundError as error:
        raise StoreError(_damaged(directory, f"{error.filename} is missing")) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(_damaged(directory, f"{type(error).__name__}: {error}")) from error
    if found != artifact.sha256:
        raise StoreError(
            _damaged(directory, f"sha256 of {SO} is {found[:12]}..., not {artifact.sha256[:12]}...")
        )
    return artifact


def _damaged(directory: Path, why: str) -> str:
    return (
        f"store: expected a whole kernel in {directory}; found damage ({why}). "
        f"Build it again, or remove that directory."
    )


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
