"""One source in, one shared library out, or one error that says why not."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fluxgen.compiler import process
from fluxgen.compiler.headers import headers_hash, include_dir
from fluxgen.compiler.ptxas import (
    PtxasFacts,
    disk_full,
    first_error,
    out_of_memory,
    parse_facts,
    serialised_wgmma,
)
from fluxgen.compiler.toolchain import Toolchain
from fluxgen.core.errors import BuildError, StoreError, ToolchainError, UsageError

# Without NDEBUG the asserts inside CUTLASS' main loop make ptxas serialise wgmma (C7510).
FLAGS = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fPIC,-fvisibility=hidden",
    "-shared",
    "-cudart=static",
    "-Xptxas=-v",
)
"""nvcc's flags for every kernel; those of the architecture come from :func:`arch_flags`."""

DEFAULT_TIMEOUT_S = 1800.0
SO, CU, LOG = "kernel.so", "kernel.cu", "build.log"
_LOG_LIMIT = 16 << 20


@dataclass(frozen=True)
class Source:
    """What is to be compiled.

    Attributes:
        name: what messages call it.
        text: the whole .cu file.
        arch: ``sm80``, ``sm86``, ``sm89``, ``sm90``.
        headers_hash: :func:`fluxgen.compiler.headers.headers_hash` of the text's headers.
        include: directory of fluxgen's device headers.
        abi: version of the C interface, part of the store's key.
    """

    name: str
    text: str = field(repr=False)
    arch: str
    headers_hash: str
    include: Path
    abi: str = ""

    @classmethod
    def of(
        cls, name: str, text: str, arch: str, *, include: Path | None = None, abi: str = ""
    ) -> Source:
        """A source against the headers as they are now, by default fluxgen's own.

        Raises:
            UsageError: ``arch`` is no architecture. BuildError: the headers cannot be read.
        """
        arch_flags(arch)
        where = include_dir() if include is None else include.absolute()
        return cls(name, text, arch, headers_hash(text, where), where, abi)


@dataclass(frozen=True)
class Compiled:
    """A library as nvcc left it."""

    path: Path
    log: Path
    facts: tuple[PtxasFacts, ...]
    seconds: float


class CompileError(BuildError):
    """One kernel could not be built.

    Attributes:
        reason: one line. log: the whole log, if one was kept.
        transient: whether the same source may build at another time (memory, deadline).
    """

    def __init__(self, reason: str, log: Path | None = None, transient: bool = False) -> None:
        super().__init__(reason if log is None else f"{reason}\nFull log: {log}")
        self.reason, self.log, self.transient = reason, log, transient


def arch_flags(arch: str) -> tuple[str, ...]:
    """nvcc's flags for an architecture.

    sm90 needs the ``a`` features (wgmma), which have no portable PTX; the others carry PTX too.

    Raises:
        UsageError: not of the form ``sm80``.
    """
    match = re.fullmatch(r"sm(\d{2,3})", arch)
    if match is None:
        raise UsageError(f"arch: expected sm80, sm86, sm89 or sm90; found {arch!r}")
    number = match[1]
    if number == "90":
        return ("-gencode=arch=compute_90a,code=sm_90a",)
    return (f"-gencode=arch=compute_{number},code=[compute_{number},sm_{number}]",)


def compile(
    source: Source,
    toolchain: Toolchain,
    out_dir: Path,
    timeout: float = DEFAULT_TIMEOUT_S,
    *,
    cancel: threading.Event | None = None,
) -> Compiled:
    """Compile ``source`` to ``out_dir/kernel.so``, with ``kernel.cu`` and ``build.log`` beside it.

    Raises:
        CompileError: nvcc failed, was killed or was too slow, or ptxas spilled or serialised wgmma.
        StoreError: ``out_dir`` cannot be written: no space, no permission.
        ToolchainError: nvcc cannot be started, or a path is one that it cannot take.
        process.Cancelled: ``cancel`` was set.
    """
    out_dir = out_dir.absolute()
    log_path, library, scratch = out_dir / LOG, out_dir / SO, out_dir / "nvcc-tmp"
    args = _arguments(source, toolchain, out_dir)
    began = time.monotonic()
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)
        (out_dir / CU).write_text(source.text, "utf-8")
        # In memory first: on a full disk the message that says so could not be written either.
        with os.fdopen(os.memfd_create("nvcc-log"), "w+b") as log:
            try:
                status = _run(source, args, log, scratch, timeout, cancel)
            except BaseException:
                with contextlib.suppress(OSError):
                    _save(log, log_path)
                raise
            text = _save(log, log_path)
    except OSError as error:
        raise _cannot_write(out_dir, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    facts = parse_facts(text)
    if status != 0:
        raise _failure(source, status, text, log_path)
    _check_quality(source, facts, text, log_path)
    if not library.is_file() or library.stat().st_size == 0:
        raise CompileError(f"{source.name}: nvcc succeeded but wrote no library", log_path)
    return Compiled(library, log_path, facts, time.monotonic() - began)


def _save(log: IO[bytes], path: Path) -> str:
    log.seek(0)
    data = log.read(_LOG_LIMIT)
    path.write_bytes(data)
    return data.decode("utf-8", "replace")


def _arguments(source: Source, toolchain: Toolchain, out_dir: Path) -> list[str]:
    quiet = (toolchain.cutlass, *toolchain.includes)
    for path in (source.include, *quiet, *toolchain.libraries, Path(toolchain.host), out_dir):
        _check_path(path)
    return [
        str(toolchain.nvcc),
        *FLAGS,
        *arch_flags(source.arch),
        f"-ccbin={toolchain.host}",
        f"-I{source.include}",
        *(f"-isystem={path}" for path in quiet),
        *(f"-L{path}" for path in toolchain.libraries),
        CU,
        "-o",
        SO,
    ]


def _check_path(path: Path) -> None:
    # nvcc splits paths at commas, eats single quotes, and hands the rest to sh in double quotes.
    bad = sorted(set(str(path)) & set(",\"'$`\\\n"))
    if bad:
        raise ToolchainError(
            f"path {str(path)!r}: expected one that nvcc can take; found {' '.join(map(repr, bad))}"
            f" in it. Move it, or set FLUXGEN_HOME to a plain path."
        )


def _run(
    source: Source,
    args: list[str],
    log: IO[bytes],
    scratch: Path,
    timeout: float,
    cancel: threading.Event | None,
) -> int:
    env = process.clean_env(TMPDIR=str(scratch))
    try:
        return process.run(
            args,
            log,
            env=env,
            timeout=timeout,
            cwd=scratch.parent,
            cancel=cancel,
        )
    except process.Expired as error:
        raise CompileError(
            f"{source.name}: nvcc was not done after {timeout:g} s and was stopped; "
            f"use fewer --jobs or a longer timeout",
            scratch.parent / LOG,
            transient=True,
        ) from error
    except OSError as error:
        raise ToolchainError(
            f"{args[0]}: cannot be run: {error}. Find another nvcc, or set FLUXGEN_NVCC."
        ) from error


def _cannot_write(where: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(where)
    return StoreError(f"{where}: cannot be written: {error}. Set FLUXGEN_STORE to another place.")


def _no_space(where: Path) -> StoreError:
    return StoreError(
        f"no space left on the disk of {where}; free some, or set FLUXGEN_STORE to another disk"
    )


def _failure(source: Source, status: int, text: str, log: Path) -> Exception:
    if disk_full(text):
        return _no_space(log.parent)
    if out_of_memory(text, status):
        return CompileError(
            f"{source.name}: the compiler was killed or got no memory (status {status}); one kernel"
            f" needs about 3.5 GiB: use fewer --jobs",
            log,
            transient=True,
        )
    return CompileError(f"{source.name}: {first_error(text)}", log)


def _check_quality(source: Source, facts: tuple[PtxasFacts, ...], text: str, log: Path) -> None:
    for fact in facts:
        if fact.spill_stores or fact.spill_loads:
            raise CompileError(
                f"{source.name}: registers spill: {fact.spill_stores} bytes stored, "
                f"{fact.spill_loads} loaded, at {fact.registers} registers in {fact.kernel[:200]}; "
                f"take a smaller tile",
                log,
            )
    if serialised := serialised_wgmma(text):
        code, function = serialised[0]
        raise CompileError(
            f"{source.name}: ptxas serialises wgmma ({code}) in {function[:200] or 'a function'}",
            log,
        )
