"""The whole path with a real nvcc, on a source that compiles in seconds."""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

import pytest

from fluxgen.compiler.builder import build_all
from fluxgen.compiler.nvcc import CompileError, Source
from fluxgen.compiler.store import Store
from fluxgen.compiler.toolchain import Toolchain, find

pytestmark = pytest.mark.nvcc

TEXT = """
#include <tiny.h>
#include <cutlass/version.h>
#include <cuda/std/array>
__global__ void tiny(float* p) {
  __shared__ float s[32];
  s[threadIdx.x] = p[threadIdx.x];
  __syncthreads();
  p[threadIdx.x] = s[31 - threadIdx.x];
}
extern "C" __attribute__((visibility("default"))) int answer(float* p) {
  if (p != nullptr) tiny<<<1, 32>>>(p);
  return TINY + CUTLASS_MAJOR;
}
extern "C" int hidden() { return 1; }
"""

SPILL = """
__global__ void __launch_bounds__(1024, 2) spill(float* p) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) p[i * 1024 + threadIdx.x] = a[63 - i] * a[i] + a[(i * 7) % 64];
}
"""


# Accumulators are touched between wgmmas in flight.
SERIALISED = """
__global__ void serialised(float* out, unsigned long long a, unsigned long long b) {
  float x = 0, y = 0, z = 0, w = 0;
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < 4; ++i) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; "
                 "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "
                 "{%0, %1, %2, %3}, %4, %5, p, 1, 1, 0, 0;}"
                 : "+f"(x), "+f"(y), "+f"(z), "+f"(w) : "l"(a + i), "l"(b));
    x += 1;
  }
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  out[threadIdx.x] = x + y + z + w;
}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("nvcc") / "größe 漢 (und) raum & mehr"
    (base / "include").mkdir(parents=True)
    (base / "include" / "tiny.h").write_text("#define TINY 38\n")
    return base


def source(place: Path, text: str = TEXT, arch: str = "sm90") -> Source:
    return Source.of("tiny", text, arch, include=place / "include")


def _fatbin_kinds(library: Path) -> set[str]:
    """What the embedded fat binaries hold (layout: CUDA's fatbinary_section.h)."""
    data, kinds = library.read_bytes(), set()
    at = data.find(b"\x50\xed\x55\xba")
    while at >= 0:
        head, size = struct.unpack_from("<HQ", data, at + 6)
        item, end = at + head, at + head + size
        while item < end:
            kind, length, payload = struct.unpack_from("<HxxIQ", data, item)
            kinds.add({1: "ptx", 2: "elf"}.get(kind, str(kind)))
            item += length + payload
        at = data.find(b"\x50\xed\x55\xba", end)
    return kinds


def test_real_toolchain(toolchain: Toolchain) -> None:
    assert int(toolchain.version.split(".")[0]) >= 12
    assert toolchain.cutlass_version.startswith("4.")
    assert (toolchain.cutlass / "cute" / "tensor.hpp").is_file()
    assert toolchain.root is not None
    again = find(env={**os.environ, "FLUXGEN_NVCC": str(toolchain.root)})
    assert again.identity == toolchain.identity


@pytest.mark.parametrize("arch", ["sm90", "sm80"])
def test_compile_load_and_cache_in_an_odd_place(
    toolchain: Toolchain, place: Path, arch: str
) -> None:
    store = Store(place / "store")
    made = store.build(source(place, arch=arch), toolchain)
    assert not made.cached
    library = ctypes.CDLL(str(store.load_path(made.key)))
    assert library.answer(None) == 42
    assert not hasattr(library, "hidden")
    (facts,) = made.facts
    assert "tiny" in facts.kernel and facts.arch == {"sm90": "sm_90a", "sm80": "sm_80"}[arch]
    assert 4 <= facts.registers <= 64 and facts.smem == 128 and facts.barriers == 1
    assert facts.spill_stores == facts.spill_loads == 0
    # PTX for later GPUs, except that of sm_90a, which has no later.
    kinds = _fatbin_kinds(made.path)
    assert kinds == ({"elf", "ptx"} if arch == "sm80" else {"elf"})
    assert store.build(source(place, arch=arch), toolchain).cached
    assert list(store.root.glob("tmp/*")) == []


def test_errors_are_told_and_others_go_on(toolchain: Toolchain, place: Path) -> None:
    store = Store(place / "store2")
    sources = [
        source(place, TEXT.replace("float s[32]", "floot s[32]")),
        source(place, '#include "nope.h"\n'),
        source(place, SPILL),
        source(place, SERIALISED),
        source(place, "int fine;\n"),
    ]
    results = build_all(sources, toolchain, store)
    assert [r.status for r in results] == ["failed"] * 4 + ["built"]
    first, second, third, fourth, _ = results
    assert 'kernel.cu(6): error: identifier "floot" is undefined' in first.error
    assert "nope.h: No such file" in second.error.splitlines()[0]
    assert "registers spill" in third.error and "32 registers" in third.error
    assert "serialises wgmma (C75" in fourth.error and "serialised" in fourth.error
    log = Path(first.error.splitlines()[1].removeprefix("Full log: "))
    assert "floot" in log.read_text()


def test_timeout_stops_a_real_nvcc(toolchain: Toolchain, place: Path) -> None:
    with pytest.raises(CompileError, match=r"not done after 0\.5 s"):
        Store(place / "store3").build(source(place), toolchain, timeout=0.5)
