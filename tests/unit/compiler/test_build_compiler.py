"""One compile: flags, facts, and one clear error for each way to fail."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest
from fakecuda import Fake, alive, until

from fluxgen.compiler import process
from fluxgen.compiler.nvcc import CompileError, Source, arch_flags, compile
from fluxgen.compiler.ptxas import PtxasFacts, first_error, out_of_memory, parse_facts
from fluxgen.core.errors import BuildError, StoreError, ToolchainError, UsageError

C7510 = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized due to insufficient register resources for the wgmma pipeline in the function "
    "'_Z1kPf'"
)
C7508 = (
    "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain "
    "minimum register requirements."
)


def test_success(fake: Fake) -> None:
    out = fake.base / "out"
    made = compile(fake.source(), fake.toolchain, out)
    assert made.path == out / "kernel.so" and made.path.read_bytes().startswith(b"fake90a")
    assert made.facts == (PtxasFacts("_Z1kPf", "sm_90a", 168, 10, 16, 0, 0, 1024),)
    assert "ptxas info" in made.log.read_text()
    assert sorted(p.name for p in out.iterdir()) == ["build.log", "kernel.cu", "kernel.so"]


def test_arguments_and_environment(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O0")
    monkeypatch.setenv("CPATH", "/elsewhere")
    found = dataclasses.replace(fake.toolchain, libraries=(fake.base / "lib",))
    compile(fake.source(), found, fake.base / "out")
    args = fake.args[-1]
    for wanted in (
        "-std=c++17",
        "-O3",
        "-DNDEBUG",
        "-shared",
        "-cudart=static",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        "-gencode=arch=compute_90a,code=sm_90a",
        f"-I{fake.include}",
        f"-isystem={found.cutlass}",
        f"-isystem={fake.cuda / 'include' / 'cccl'}",
        f"-L{fake.base / 'lib'}",
        f"-ccbin={found.host}",
    ):
        assert wanted in args
    assert not fake.environ & {"NVCC_APPEND_FLAGS", "CPATH"}


def test_arch_flags() -> None:
    assert arch_flags("sm90") == ("-gencode=arch=compute_90a,code=sm_90a",)
    for number in (80, 86, 89):
        want = f"-gencode=arch=compute_{number},code=[compute_{number},sm_{number}]"
        assert arch_flags(f"sm{number}") == (want,)
    for bad in ("", "90", "sm_90", "sm9", "sm90a; rm -rf /"):
        with pytest.raises(UsageError, match="expected sm80, sm86, sm89 or sm90"):
            arch_flags(bad)


def failure(fake: Fake, *lines: str, timeout: float = 60) -> CompileError:
    with pytest.raises(CompileError) as error:
        compile(fake.source(*lines), fake.toolchain, fake.base / "out", timeout)
    assert not (fake.base / "out" / "nvcc-tmp").exists()
    return error.value


def test_first_error_line_is_shown_and_the_log_kept(fake: Fake) -> None:
    # L07
    error = failure(
        fake,
        "print kernel.cu(1): warning #177-D: variable was declared but never referenced",
        'print kernel.cu(7): error: identifier "zz" is undefined',
        "print kernel.cu(9): error: expected a ;",
        "exit 2",
    )
    assert error.reason == 'kern: kernel.cu(7): error: identifier "zz" is undefined'
    assert error.log is not None and str(error.log) in str(error)
    assert "expected a ;" in error.log.read_text()
    assert isinstance(error, BuildError) and not error.transient


@pytest.mark.parametrize(
    "line",
    [
        "kernel.cu:1:10: fatal error: nope.h: No such file or directory",
        "ptxas fatal   : Unresolved extern function '_Z1f'",
        "ptxas /tmp/x.ptx, line 12; error   : Unexpected instruction types specified for 'mov'",
        "nvcc fatal   : Unsupported gpu architecture 'sm_999'",
        "/usr/bin/ld: cannot find -lcudart_static: No such file or directory",
        "kernel.cu:(.text+0x5): undefined reference to `h()'",
        "a.hpp(3): catastrophic error: out of sorts",
        "a.hpp(12): error #20013-D: calling a constexpr __host__ function",
    ],
)
def test_first_error_of_each_tool(line: str) -> None:
    log = f"ptxas info    : 0 bytes gmem\n\n{line}\ncollect2: error: ld returned 1 exit status\n"
    assert first_error(log) == line


def test_failure_without_any_message(fake: Fake) -> None:
    assert first_error("") == "nvcc wrote no message"
    assert "ptxas info" in failure(fake, "exit 1").reason


def test_spills_fail(fake: Fake) -> None:
    error = failure(fake, "spill 40 36")
    assert "40 bytes stored, 36 loaded, at 168 registers in _Z1kPf" in error.reason


@pytest.mark.parametrize("code", ["C7510", "C7511", "C7514"])
def test_serialised_wgmma_fails_whatever_the_cause(fake: Fake, code: str) -> None:
    line = C7510.replace("C7510", code)
    assert f"serialises wgmma ({code}) in _Z1kPf" in failure(fake, f"print {line}").reason


def test_other_warnings_are_facts(fake: Fake) -> None:
    made = compile(fake.source(f"print {C7508}"), fake.toolchain, fake.base / "out")
    assert made.facts[0].warnings == ("C7508",)


@pytest.mark.slow
def test_timeout_kills_grandchildren(fake: Fake) -> None:
    began = time.monotonic()
    error = failure(fake, "child 30", timeout=4.0)
    assert time.monotonic() - began < 8  # 4 seconds for the end, as ever
    assert "not done after 4 s" in error.reason and error.transient
    assert len(fake.pids) == 2
    until(lambda: not any(map(alive, fake.pids)))


@pytest.mark.parametrize(
    "lines",
    [
        ("kill",),
        ("exit 137",),
        ("print nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "exit 9"),
        ("print g++: fatal error: Killed signal terminated program cc1plus", "exit 1"),
        ("print virtual memory exhausted: Cannot allocate memory", "exit 1"),
    ],
)
def test_out_of_memory(fake: Fake, lines: tuple[str, ...]) -> None:
    error = failure(fake, *lines)
    assert "no memory" in error.reason and "fewer --jobs" in error.reason and error.transient


def test_an_ordinary_error_is_not_out_of_memory() -> None:
    assert not out_of_memory('kernel.cu(7): error: identifier "Killed_t" is undefined', 2)


def test_disk_full_as_the_log_says(fake: Fake) -> None:
    line = "print /tmp/x.s: fatal error: error writing to x.s: No space left on device"
    with pytest.raises(StoreError, match=r"no space left.*FLUXGEN_STORE"):
        compile(fake.source(line, "exit 1"), fake.toolchain, fake.base / "out")


def test_success_without_a_library(fake: Fake) -> None:
    assert "wrote no library" in failure(fake, "nothing").reason


def test_stale_library_is_not_taken_for_a_new_one(fake: Fake) -> None:
    compile(fake.source(), fake.toolchain, fake.base / "out")
    assert "wrote no library" in failure(fake, "nothing").reason


def test_cancel(fake: Fake) -> None:
    cancel = threading.Event()
    threading.Timer(0.3, cancel.set).start()
    with pytest.raises(process.Cancelled):
        compile(fake.source("child 30"), fake.toolchain, fake.base / "out", cancel=cancel)
    until(lambda: not any(map(alive, fake.pids)))


def test_nvcc_gone(fake: Fake) -> None:
    found = fake.toolchain
    (fake.cuda / "bin" / "nvcc").unlink()
    with pytest.raises(ToolchainError, match="cannot be run"):
        compile(fake.source(), found, fake.base / "out")


@pytest.mark.parametrize("name", ["a,b", "it's", 'a"b', "a$(touch x)b", "a`b", "a\\b"])
def test_paths_nvcc_would_hand_to_a_shell(fake: Fake, name: str) -> None:
    with pytest.raises(ToolchainError, match="expected one that nvcc can take"):
        compile(fake.source(), fake.toolchain, fake.base / name)
    assert fake.args == []


def test_source_with_any_letters(fake: Fake) -> None:
    source = Source.of("naïve", "// größer ≥ 漢字\n", "sm90", include=fake.include)
    compile(source, fake.toolchain, fake.base / "out")
    assert (fake.base / "out" / "kernel.cu").read_text("utf-8") == source.text


def test_missing_headers() -> None:
    with pytest.raises(BuildError, match="expected a directory at /nowhere"):
        Source.of("k", "", "sm90", include=Path("/nowhere"))


def test_facts_of_several_kernels_and_callees() -> None:
    log = f"""\
ptxas info    : 24 bytes gmem, 192 bytes cmem[4]
ptxas info    : Compiling entry function '_Z1aPf' for 'sm_90a'
ptxas info    : Function properties for _Z1aPf
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 1 barriers, 128 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 2.4 ms
ptxas info    : Compiling entry function '_Z1bPf' for 'sm_90a'
ptxas info    : Function properties for _Z6callee
    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Function properties for _Z1bPf
    16 bytes stack frame, 1 bytes spill stores, 2 bytes spill loads
ptxas info    : Used 255 registers, 360 bytes cmem[0]
{C7510.replace("_Z1kPf", "_Z1aPf")}
"""
    a, b = parse_facts(log)
    assert a == PtxasFacts("_Z1aPf", "sm_90a", 10, 1, 8, 0, 0, 128, ("C7510",))
    assert b == PtxasFacts("_Z1bPf", "sm_90a", 255, 0, 16, 5, 10, 0)
    assert PtxasFacts.from_dict(a.to_dict()) == a
    assert parse_facts("") == ()
