"""Build many kernels at once, as many as the memory allows."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fluxgen.compiler.artifact import Artifact, key_of
from fluxgen.compiler.nvcc import DEFAULT_TIMEOUT_S, CompileError, Source
from fluxgen.compiler.store import Store
from fluxgen.compiler.toolchain import Toolchain
from fluxgen.core.errors import StoreError, UsageError

GIB_PER_JOB = 3.5
"""Memory of one nvcc on one CUTLASS 3 kernel (3.4 GiB measured with CUDA 13.0)."""


@dataclass(frozen=True)
class Result:
    """What became of one source.

    Attributes:
        source: which. status: ``built``, ``cached`` or ``failed``.
        artifact: the kernel, unless failed. error: the message, if failed.
        seconds: from start to end of this build.
    """

    source: Source
    status: Literal["built", "cached", "failed"]
    artifact: Artifact | None = None
    error: str = ""
    seconds: float = 0.0


Progress = Callable[[Result, int, int], None]
"""Called, in the caller's thread, with each result, how many are done, and of how many."""


def default_jobs(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """How many nvcc fit: by this process's cores, and by free memory at 3.5 GiB each."""
    gib = [_available_gib(proc), _cgroup_gib(cgroup)]
    known = [value for value in gib if value is not None]
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(int(value / GIB_PER_JOB) for value in known)]))


def _available_gib(proc: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / (1 << 20)
    return None


def _cgroup_gib(cgroup: Path) -> float | None:
    # In a container meminfo is the host's; the container's own limit is here.
    with contextlib.suppress(OSError, ValueError):
        limit = int((cgroup / "memory.max").read_text("ascii"))
        used = int((cgroup / "memory.current").read_text("ascii"))
        return max(0, limit - used) / (1 << 30)
    return None


def build_all(
    sources: Sequence[Source],
    toolchain: Toolchain,
    store: Store,
    jobs: int | None = None,
    progress: Progress | None = None,
    *,
    timeout: float = DEFAULT_TIMEOUT_S,
    report: Callable[[str], None] | None = None,
) -> list[Result]:
    """Build every source; a kernel that fails is a result, and the others go on.

    Args:
        sources: what to build; equal ones are built once.
        toolchain, store: by what, into what.
        jobs: how many nvcc at once, by default :func:`default_jobs`.
        progress: see :data:`Progress`.
        timeout: of one nvcc, seconds.
        report: see :meth:`Store.build`.

    Returns:
        One result a source, in their order.

    Raises:
        StoreError, ToolchainError: nothing can be built at all; what runs is stopped.
        KeyboardInterrupt: as it came; every nvcc has been killed and its files removed.
    """
    if jobs is not None and (isinstance(jobs, bool) or jobs < 1):
        raise UsageError(f"jobs: expected a positive integer; found {jobs!r}")
    total, results = len(sources), dict[int, Result]()

    def done(index: int, result: Result) -> None:
        results[index] = result
        if progress is not None:
            progress(result, len(results), total)

    missing: dict[str, list[int]] = {}
    for index, source in enumerate(sources):
        key = key_of(source, toolchain)
        began = time.monotonic()
        if key not in missing and (found := _cached(store, key)) is not None:
            done(index, Result(source, "cached", found, seconds=time.monotonic() - began))
        else:
            missing.setdefault(key, []).append(index)
    if not missing:
        return [results[index] for index in range(total)]

    store.sweep()
    cancel = threading.Event()
    options = {"timeout": timeout, "cancel": cancel} | ({"report": report} if report else {})
    pool = ThreadPoolExecutor(min(jobs or default_jobs(), len(missing)), "nvcc")
    try:
        waiting: dict[Future[Result], list[int]] = {
            pool.submit(_build, sources[same[0]], toolchain, store, options): same
            for same in missing.values()
        }
        for future in as_completed(waiting):
            first, *others = waiting[future]
            result = future.result()
            done(first, result)
            for index in others:
                status: Literal["failed", "cached"] = (
                    "failed" if result.status == "failed" else "cached"
                )
                done(index, Result(sources[index], status, result.artifact, result.error))
    finally:
        cancel.set()
        pool.shutdown(wait=True, cancel_futures=True)
    return [results[index] for index in range(total)]


def _cached(store: Store, key: str) -> Artifact | None:
    try:
        return store.get(key)
    except StoreError:
        # Damaged or unsafe: Store.build replaces it, or says why it cannot.
        return None


def _build(
    source: Source, toolchain: Toolchain, store: Store, options: dict[str, object]
) -> Result:
    began = time.monotonic()
    try:
        found = store.build(source, toolchain, **options)  # type: ignore[arg-type]
    except CompileError as error:
        return Result(source, "failed", error=str(error), seconds=time.monotonic() - began)
    status: Literal["built", "cached"] = "cached" if found.cached else "built"
    return Result(source, status, found, seconds=time.monotonic() - began)
