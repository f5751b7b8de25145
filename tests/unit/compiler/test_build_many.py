"""Many kernels at once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from fakecuda import Fake, alive, until

from fluxgen.compiler.builder import Result, build_all, default_jobs
from fluxgen.core.errors import StoreError, ToolchainError, UsageError


def test_one_failure_does_not_stop_the_others(fake: Fake) -> None:
    # L13
    sources = [
        fake.source(name="a"),
        fake.source("print kernel.cu(3): error: bad", "exit 2", name="b"),
        fake.source(name="c"),
        fake.source("spill 8 8", name="d"),
    ]
    seen: list[tuple[str, int, int]] = []

    def progress(result: Result, done: int, total: int) -> None:
        seen.append((result.source.name, done, total))

    results = build_all(sources, fake.toolchain, fake.store, 2, progress)
    assert [r.status for r in results] == ["built", "failed", "built", "failed"]
    assert [r.source for r in results] == sources
    assert "kernel.cu(3): error: bad" in results[1].error and "spill" in results[3].error
    assert results[0].artifact is not None and results[1].artifact is None
    assert sorted(name for name, _, _ in seen) == ["a", "b", "c", "d"]
    assert [(done, total) for _, done, total in seen] == [(i, 4) for i in (1, 2, 3, 4)]


def test_second_run_compiles_nothing_and_is_fast(fake: Fake) -> None:
    texts = [("sleep 0", f"k{i}") for i in range(24)]
    sources = [fake.source(line, name=name) for line, name in texts]
    assert {r.status for r in build_all(sources, fake.toolchain, fake.store, 4)} == {"built"}
    found, calls = fake.toolchain, len(fake.pids)
    began = time.monotonic()
    sources = [fake.source(line, name=name) for line, name in texts]
    results = build_all(sources, found, fake.store)
    assert time.monotonic() - began < 2
    assert {r.status for r in results} == {"cached"} and len(fake.pids) == calls == 24


def test_equal_sources_are_built_once(fake: Fake) -> None:
    results = build_all([fake.source()] * 3, fake.toolchain, fake.store, 3)
    assert [r.status for r in results] == ["built", "cached", "cached"] and len(fake.pids) == 1
    assert all(r.artifact is not None for r in results)


def test_jobs_run_at_once_and_no_more(fake: Fake) -> None:
    found = fake.toolchain
    together = [fake.source("gate 4", name=str(i)) for i in range(4)]
    results = build_all(together, found, fake.store, 4)
    assert [r.error for r in results] == [""] * 4
    one_by_one = [fake.source("alone 0.1", name=str(i)) for i in range(4)]
    results = build_all(one_by_one, found, fake.store, 1)
    assert [r.error for r in results] == [""] * 4


def test_damaged_kernel_is_built_again(fake: Fake) -> None:
    (first,) = build_all([fake.source()], fake.toolchain, fake.store)
    assert first.artifact is not None
    os.truncate(first.artifact.path, 0)
    lines: list[str] = []
    (again,) = build_all([fake.source()], fake.toolchain, fake.store, report=lines.append)
    assert again.status == "built" and "building again" in lines[0]


def test_ctrl_c_kills_all_and_leaves_nothing(fake: Fake) -> None:
    code = """
sources = [source("child 60", name=str(i)) for i in range(6)]
build_all(sources, toolchain(), store, jobs=3)
"""
    builder = fake.spawn(code)
    until(lambda: len(fake.pids) == 6)
    began = time.monotonic()
    builder.send_signal(signal.SIGINT)
    _, err = builder.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert err.rstrip().endswith("KeyboardInterrupt") and builder.returncode != 0
    until(lambda: not any(map(alive, fake.pids)))
    assert len(fake.pids) == 6, "the other three must not have been started"
    assert fake.leavings() == [] and fake.published == []


def test_store_that_is_not_private_is_one_error(fake: Fake) -> None:
    fake.store.root.mkdir()
    fake.store.root.chmod(0o777)
    with pytest.raises(StoreError, match="writable by its owner alone"):
        build_all([fake.source(name=str(i)) for i in range(5)], fake.toolchain, fake.store, 2)
    assert fake.pids == []


def test_nvcc_that_vanishes_is_one_error(fake: Fake) -> None:
    found = fake.toolchain
    (fake.cuda / "bin" / "nvcc").unlink()
    with pytest.raises(ToolchainError, match="cannot be run"):
        build_all([fake.source(name=str(i)) for i in range(5)], found, fake.store, 2)
    assert fake.leavings() == []


def test_leavings_of_dead_builds_are_swept(fake: Fake) -> None:
    build_all([fake.source()], fake.toolchain, fake.store)
    stale = fake.store.root / "tmp" / f"{'f' * 64}.xyz"
    stale.mkdir()
    (stale / "kernel.so").write_text("half")
    build_all([fake.source("sleep 0")], fake.toolchain, fake.store)
    assert fake.leavings() == []


def test_nothing_to_do(fake: Fake) -> None:
    assert build_all([], fake.toolchain, fake.store) == []
    assert not fake.store.root.exists()


@pytest.mark.parametrize("jobs", [0, -1, True])
def test_jobs_must_be_positive(fake: Fake, jobs: int) -> None:
    with pytest.raises(UsageError, match="jobs: expected a positive integer"):
        build_all([], fake.toolchain, fake.store, jobs)


@pytest.mark.parametrize(
    ("available_gib", "limit_gib", "want"),
    [(1000, None, 64), (1, None, 1), (16, None, 4), (64, 8, 2), (64, "max", 18), (None, None, 64)],
)
def test_default_jobs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    available_gib: int | None,
    limit_gib: int | str | None,
    want: int,
) -> None:
    # L07
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    if available_gib is not None:
        (tmp_path / "meminfo").write_text(
            f"MemTotal: 9 kB\nMemAvailable:   {available_gib << 20} kB\n"
        )
    if limit_gib is not None:
        text = limit_gib if isinstance(limit_gib, str) else str(limit_gib << 30)
        (tmp_path / "memory.max").write_text(text + "\n")
        (tmp_path / "memory.current").write_text("1024\n")
    assert default_jobs(tmp_path, tmp_path) == want
