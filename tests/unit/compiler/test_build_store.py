"""The store: what is in a key, who may write, and what survives a kill."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakecuda import Fake, alive, until

from fluxgen.compiler import artifact as artifact_module
from fluxgen.compiler import locks
from fluxgen.compiler.artifact import key_of, source_key
from fluxgen.compiler.headers import headers_hash
from fluxgen.compiler.nvcc import CompileError, Source
from fluxgen.compiler.store import Store
from fluxgen.core.errors import StoreError


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_build_then_cached(fake: Fake) -> None:
    umask = os.umask(0)
    try:
        made = fake.store.build(fake.source(), fake.toolchain)
    finally:
        os.umask(umask)
    assert not made.cached and made.path.read_bytes().startswith(b"fake90a")
    assert made.path == fake.store.root / made.key[:2] / made.key / "kernel.so"
    names = ["build.log", "kernel.cu", "kernel.so", "meta.json"]
    assert sorted(p.name for p in made.path.parent.iterdir()) == names
    assert {mode(p) for p in made.path.parent.iterdir()} == {0o600}
    for path in [fake.store.root, *fake.store.root.glob("*"), made.path.parent]:
        assert mode(path) == 0o700
    meta = json.loads((made.path.parent / "meta.json").read_text())
    assert meta["name"] == "kern" and meta["arch"] == "sm90" and meta["sha256"] == made.sha256
    assert meta["facts"][0]["registers"] == 168 and meta["versions"]["nvcc"] == "13.0.88"
    assert abs(meta["created"] - time.time()) < 60

    again = fake.store.build(fake.source(), fake.toolchain)
    assert again.cached and dataclasses.replace(again, cached=False) == made
    assert len(fake.pids) == 1 and fake.leavings() == []
    assert fake.store.load_path(made.key) == made.path
    assert [item.key for item in fake.store.list()] == [made.key]


def test_everything_that_changes_a_kernel_changes_its_key(fake: Fake) -> None:
    found, source = fake.toolchain, fake.source()
    keys = {
        key_of(source, found),
        key_of(dataclasses.replace(source, text=source.text + " "), found),
        key_of(dataclasses.replace(source, arch="sm80"), found),
        key_of(dataclasses.replace(source, abi="2"), found),
        key_of(source, dataclasses.replace(found, version="13.0.89")),
        key_of(source, dataclasses.replace(found, build="other")),
        key_of(source, dataclasses.replace(found, cutlass_version="4.2.1")),
    }
    header = fake.include / "fluxgen" / "abi.h"
    header.write_text("#define ABI 2\n")
    keys.add(key_of(fake.source(), found))
    header.rename(header.with_name("abi2.h"))
    keys.add(key_of(fake.source(), found))
    assert len(keys) == 9
    # A name is for people, and the host compiler sees no device code.
    assert key_of(dataclasses.replace(source, name="other"), found) in keys
    assert key_of(source, dataclasses.replace(found, host="/usr/bin/clang++")) in keys


def test_the_headers_hash_covers_what_is_included_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in (("a", '#include "sub/b"\n'), ("sub/b", "1"), ("c", "1")):
        (tmp_path / name).write_text(text)
    text = '#include <cuda.h>\n  #  include "a"\n#include "not/ours.h"\n'
    before = headers_hash(text, tmp_path)
    (tmp_path / "c").write_text("22")
    assert headers_hash(text, tmp_path) == before
    (tmp_path / "sub" / "b").write_text("22")
    assert headers_hash(text, tmp_path) != before
    (tmp_path / "sub" / "b").write_text("1")
    assert headers_hash(text, tmp_path) == before
    (tmp_path / "sub" / "b").write_text('#include "a"\n')  # a cycle ends
    assert headers_hash(text, tmp_path) != before
    assert headers_hash("", tmp_path) == headers_hash("int x;", tmp_path)


def test_headers_that_change_during_the_build_are_noticed(fake: Fake) -> None:
    source = fake.source()
    (fake.include / "fluxgen" / "abi.h").write_text("#define ABI 3\n")
    with pytest.raises(CompileError, match="changed since"):
        fake.store.build(source, fake.toolchain)
    slow = fake.source("sleep 0.6")
    header = fake.include / "fluxgen" / "abi.h"
    timer = threading.Timer(0.3, header.write_text, ["#define ABI 4\n"])
    timer.start()
    with pytest.raises(CompileError, match="changed since"):
        fake.store.build(slow, fake.toolchain)
    assert fake.published == []


def test_another_arch_is_another_kernel(fake: Fake) -> None:
    # J15
    paths = {
        arch: fake.store.build(fake.source(arch=arch), fake.toolchain).path
        for arch in ("sm90", "sm80", "sm86")
    }
    for arch, path in paths.items():
        assert path.read_bytes().startswith(b"fake" + arch[2:].encode())


def test_cwd_and_mode_bits_do_not_matter(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    # J15
    monkeypatch.chdir(fake.base)
    store = Store(Path("relative store"))
    made = store.build(fake.source(), fake.toolchain)
    monkeypatch.chdir("/")
    made.path.chmod(0o400)
    assert store.build(fake.source(), fake.toolchain).cached
    assert made.path.is_absolute() and fake.base in made.path.parents


def test_failed_build_keeps_source_and_log_and_no_artefact(fake: Fake) -> None:
    source = fake.source("print kernel.cu(1): error: bad", "exit 2")
    with pytest.raises(CompileError, match=r"kernel\.cu\(1\): error: bad") as error:
        fake.store.build(source, fake.toolchain)
    kept = fake.store.root / "failed" / key_of(source, fake.toolchain)
    assert str(kept / "build.log") in str(error.value)
    assert "error: bad" in (kept / "build.log").read_text()
    assert (kept / "kernel.cu").read_text() == source.text
    assert fake.published == [] and fake.leavings() == []
    assert fake.store.get(kept.name) is None
    # It is tried again: the user may have mended the machine.
    with pytest.raises(CompileError):
        fake.store.build(source, fake.toolchain)
    assert len(fake.pids) == 2
    assert fake.store.clean() == 1 and not kept.exists()


def test_find_needs_no_toolchain(fake: Fake) -> None:
    source = fake.source()
    assert fake.store.find(source) is None
    found = fake.toolchain
    made = fake.store.build(source, found)
    shutil.rmtree(fake.cuda / "bin")
    assert fake.store.find(source) == dataclasses.replace(made, cached=True)
    assert fake.store.find(fake.source("sleep 0")) is None
    (fake.store.root / "refs" / source_key(source)).unlink()
    assert fake.store.find(source) is None
    fake.store.build(source, found)
    assert fake.store.find(source) is not None


@pytest.mark.parametrize("key", ["", "../../etc", "A" * 64, "a" * 63])
def test_key_must_be_one(fake: Fake, key: str) -> None:
    with pytest.raises(StoreError, match="64 hexadecimal digits"):
        fake.store.load_path(key)


def test_load_of_nothing(fake: Fake) -> None:
    with pytest.raises(StoreError, match=r"found none. Build it first"):
        fake.store.load_path("a" * 64)
    assert fake.store.list() == [] and fake.store.clean() == 0
    assert not fake.store.root.exists()


# ------------------------------------------------------------------- damage and strangers


@pytest.mark.parametrize("damage", ["flip", "truncate", "meta", "meta-key", "no-so", "no-meta"])
def test_damage_is_refused_on_load_and_mended_on_build(fake: Fake, damage: str) -> None:
    made = fake.store.build(fake.source(), fake.toolchain)
    meta = made.path.parent / "meta.json"
    if damage == "flip":
        data = bytearray(made.path.read_bytes())
        data[5] ^= 1
        made.path.write_bytes(data)
    elif damage == "truncate":
        os.truncate(made.path, 3)
    elif damage == "meta":
        meta.write_text("{not json")
    elif damage == "meta-key":
        meta.write_text(meta.read_text().replace(made.key, "0" * 64))
    else:
        (made.path if damage == "no-so" else meta).unlink()
    with pytest.raises(StoreError, match="found damage"):
        fake.store.load_path(made.key)
    lines: list[str] = []
    again = fake.store.build(fake.source(), fake.toolchain, report=lines.append)
    assert not again.cached and again.sha256 == made.sha256
    assert len(lines) == 1 and "building again" in lines[0]
    assert fake.store.load_path(made.key) == made.path and fake.leavings() == []


def test_clean_removes_what_is_damaged(fake: Fake) -> None:
    good = fake.store.build(fake.source(), fake.toolchain)
    bad = fake.store.build(fake.source("sleep 0"), fake.toolchain)
    os.truncate(bad.path, 1)
    assert fake.store.clean() == 1
    assert fake.published == [good.path.parent]
    assert fake.store.clean(everything=True) == 1 and fake.published == []


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o777, 0o1777])
def test_store_that_others_can_write_is_refused(fake: Fake, bits: int) -> None:
    made = fake.store.build(fake.source(), fake.toolchain)
    fake.store.root.chmod(bits)
    for action in (
        lambda: fake.store.load_path(made.key),
        lambda: fake.store.build(fake.source(), fake.toolchain),
        lambda: fake.store.find(fake.source()),
        fake.store.list,
        fake.store.clean,
    ):
        with pytest.raises(StoreError, match=r"writable by its owner alone.*chmod -R go-w"):
            action()
    assert len(fake.pids) == 1


@pytest.mark.parametrize("part", ["so", "meta", "directory", "shard"])
def test_kernel_that_others_could_have_written_is_refused(fake: Fake, part: str) -> None:
    made = fake.store.build(fake.source(), fake.toolchain)
    where = {
        "so": made.path,
        "meta": made.path.parent / "meta.json",
        "directory": made.path.parent,
        "shard": made.path.parent.parent,
    }[part]
    where.chmod(mode(where) | 0o002)
    with pytest.raises(StoreError, match="writable by its owner alone"):
        fake.store.load_path(made.key)


def test_kernel_that_is_a_link_is_refused(fake: Fake) -> None:
    made = fake.store.build(fake.source(), fake.toolchain)
    elsewhere = fake.base / "elsewhere.so"
    made.path.rename(elsewhere)
    made.path.symlink_to(elsewhere)
    with pytest.raises(StoreError, match="expected a plain file"):
        fake.store.load_path(made.key)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("part", ["root", "so"])
def test_strangers_files_are_refused(fake: Fake, part: str) -> None:
    made = fake.store.build(fake.source(), fake.toolchain)
    os.chown(fake.store.root if part == "root" else made.path, 65534, 65534)
    with pytest.raises(StoreError, match="owned by uid 0 or root; found uid 65534"):
        fake.store.load_path(made.key)


def test_store_may_be_reached_by_a_link(fake: Fake) -> None:
    (fake.base / "real").mkdir(mode=0o700)
    fake.store.root.symlink_to(fake.base / "real")
    made = fake.store.build(fake.source(), fake.toolchain)
    assert fake.store.load_path(made.key).is_file()


def test_file_in_the_place_of_the_store(fake: Fake) -> None:
    fake.store.root.write_text("")
    with pytest.raises(StoreError, match="expected a directory"):
        fake.store.build(fake.source(), fake.toolchain)


# ------------------------------------------------------------------------ read-only and full


def _modes(root: Path, directories: int, files: int) -> None:
    for path in [*root.rglob("*"), root]:
        path.chmod(directories if path.is_dir() else files)


@pytest.fixture
def read_only(fake: Fake) -> Iterator[str]:
    made = fake.store.build(fake.source(), fake.toolchain)
    _modes(fake.store.root, 0o500, 0o400)
    yield made.key
    _modes(fake.store.root, 0o700, 0o600)


def test_read_only_store_loads(fake: Fake, read_only: str) -> None:
    # L03
    code = f"""
shutil = __import__("shutil"); shutil.rmtree({str(fake.cuda / "bin")!r})
print(store.load_path({read_only!r})); print(store.find(source()).key); print(len(store.list()))
"""
    out, err = fake.spawn(code, drop_root=True).communicate(timeout=30)
    assert out.split("\n")[1:3] == [read_only, "1"] and out.endswith("\n1\n"), err


def test_read_only_store_builds_what_it_has_and_says_one_thing_of_the_rest(
    fake: Fake, read_only: str
) -> None:
    code = """
tools = toolchain()
print(build_all([source()], tools, store)[0].status)
try:
    build_all([source(), source(name="b"), source(name="c")], tools, store, jobs=2)
except Exception as error:
    print(type(error).__name__, str(error).count(chr(10)), error)
"""
    out, err = fake.spawn(code, drop_root=True).communicate(timeout=30)
    first, second = out.splitlines()
    assert first == "cached", err
    assert second.startswith("StoreError 0 store: expected to be able to write in"), err
    assert "FLUXGEN_STORE" in second and len(fake.pids) == 1


def test_home_that_cannot_be_written(fake: Fake) -> None:
    closed = fake.base / "closed"
    closed.mkdir(mode=0o500)
    code = f"""
try:
    Store(Path({str(closed / "a" / "store")!r})).build(source(), toolchain())
except Exception as error:
    print(type(error).__name__, error)
"""
    out, err = fake.spawn(code, drop_root=True).communicate(timeout=30)
    assert out.startswith("StoreError store: expected to be able to write"), err


@pytest.fixture
def tiny_disk(fake: Fake) -> Iterator[Path]:
    mount = shutil.which("mount")
    where = fake.base / "tiny"
    where.mkdir()
    if (
        mount is None
        or subprocess.run(
            [mount, "-t", "tmpfs", "-o", "size=256k,mode=0700", "tiny", str(where)],
            capture_output=True,
            check=False,
        ).returncode
    ):
        pytest.skip("no right to mount a small tmpfs")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_full_disk_during_nvcc(fake: Fake, tiny_disk: Path) -> None:
    store = Store(tiny_disk / "store")
    store.build(fake.source(), fake.toolchain)
    with pytest.raises(StoreError, match=r"no space left.*FLUXGEN_STORE"):
        store.build(fake.source("fill"), fake.toolchain)
    assert list(store.root.glob("tmp/*")) == [] and len(store.list()) == 1
    # The room came back with the removal of what was half written.
    store.build(fake.source("sleep 0"), fake.toolchain)


def test_full_disk_before_nvcc(fake: Fake, tiny_disk: Path) -> None:
    store = Store(tiny_disk / "store")
    store.build(fake.source(), fake.toolchain)
    with (tiny_disk / "big").open("wb", buffering=0) as file, pytest.raises(OSError):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(StoreError, match="no space left"):
        store.build(fake.source("sleep 0"), fake.toolchain)
    assert store.build(fake.source(), fake.toolchain).cached


def test_full_disk_while_publishing(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifact_module, "write_meta", full)
    with pytest.raises(StoreError, match="no space left"):
        fake.store.build(fake.source(), fake.toolchain)
    assert fake.published == [] and fake.leavings() == []


# ----------------------------------------------------------------- several at once, and killed

BUILD = "a = store.build(source({lines}), toolchain()); print(a.cached, a.sha256)\n"


def test_eight_processes_compile_once(fake: Fake) -> None:
    # L09
    code = BUILD.format(lines='"sleep 1"')
    builders = [fake.spawn(code) for _ in range(8)]
    out = [builder.communicate(timeout=50) for builder in builders]
    assert all(builder.returncode == 0 for builder in builders), out
    answers = [text.split() for text, _ in out]
    assert len({digest for _, digest in answers}) == 1
    assert len(fake.pids) == 1 and [cached for cached, _ in answers].count("False") == 1


def test_waiters_share_the_failure_they_waited_for(fake: Fake) -> None:
    code = """
tools, bad = toolchain(), source("gate go", "print kernel.cu(1): error: bad", "exit 2")
print("ready", flush=True)
try:
    store.build(bad, tools)
except Exception as error:
    print(error)
"""
    builders = [fake.spawn(code) for _ in range(4)]
    for builder in builders:
        assert builder.stdout is not None and builder.stdout.readline() == "ready\n"
    until(lambda: fake.pids)
    time.sleep(0.5)
    (fake.cuda / "go").touch()
    out = [builder.communicate(timeout=50)[0] for builder in builders]
    assert all("kernel.cu(1): error: bad" in text and "build.log" in text for text in out)
    assert len(fake.pids) == 1


def test_kill_9_during_nvcc_then_rerun(fake: Fake) -> None:
    # L01
    builder = fake.spawn(BUILD.format(lines='"sleep_once 60"'))
    until(lambda: fake.pids)
    builder.kill()
    builder.communicate(timeout=10)
    assert alive(fake.pids[0]), "the orphan must still run for this test to mean anything"
    assert len(fake.leavings()) == 1
    began = time.monotonic()
    made = fake.store.build(fake.source("sleep_once 60"), fake.toolchain)
    assert time.monotonic() - began < 5 and not made.cached
    assert fake.leavings() == []


def test_clean_leaves_a_running_build_alone(fake: Fake) -> None:
    thread = threading.Thread(
        target=fake.store.build, args=(fake.source("sleep 1"), fake.toolchain)
    )
    thread.start()
    until(lambda: fake.pids)
    stale = fake.store.root / "tmp" / f"{'0' * 64}.abc"
    stale.mkdir()
    assert fake.store.clean(everything=True) == 1 and not stale.exists()
    thread.join()
    assert len(fake.published) == 1


def test_ctrl_c_in_one_build(fake: Fake) -> None:
    builder = fake.spawn(BUILD.format(lines='"child 60"'))
    until(lambda: len(fake.pids) == 2)
    builder.send_signal(signal.SIGINT)
    _, err = builder.communicate(timeout=10)
    assert "KeyboardInterrupt" in err
    until(lambda: not any(map(alive, fake.pids)))
    assert fake.leavings() == [] and fake.published == []


def test_long_wait_names_the_lock_and_its_holder(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "REPORT_AFTER_S", 0.2)
    source, lines = fake.source("sleep 1.2"), list[str]()
    other = fake.spawn(BUILD.format(lines='"sleep 1.2"'))
    until(lambda: fake.pids)
    assert fake.store.build(source, fake.toolchain, report=lines.append).cached
    other.communicate(timeout=10)
    lock = fake.store.root / "locks" / f"{key_of(source, fake.toolchain)}.lock"
    assert lines and f"process {other.pid}" in lines[0] and str(lock) in lines[0]


def test_endless_wait_ends_with_the_name_of_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with (
        locks.hold(path, timeout=1) as waited,
        pytest.raises(StoreError, match=f"{path}: still locked after 0.2 s by process"),
        locks.hold(path, timeout=0.2),
    ):
        pass
    assert waited is False
    with locks.hold(path, timeout=1) as waited, locks.hold_if_free(path) as held:
        assert not waited and not held


def test_source_is_compiled_from_its_own_headers(fake: Fake) -> None:
    source = Source.of("k", "", "sm90", include=fake.include)
    fake.store.build(source, fake.toolchain)
    assert f"-I{fake.include}" in fake.args[-1]
