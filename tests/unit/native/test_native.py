"""Workspace sizes, the loader's errors, and device detection, without a GPU."""

from __future__ import annotations

import ctypes as ct
import itertools
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Transport
from fluxgen.core.errors import KernelError, StoreError, ToolchainError, UsageError
from fluxgen.core.problem import Problem, Signature
from fluxgen.machine.device import devices
from fluxgen.native import abi
from fluxgen.native.arguments import copy_args, gemm_args
from fluxgen.native.loader import FusedKernel, SupportKernels
from fluxgen.native.workspace import Sizes, chunk_size, sizes
from fluxgen.runtime.session.kernels import fused_kernel
from fluxgen.tune.device import schedule
from tests.unit.protocol.host import driver

AG, RS = Signature.of("ag_gemm"), Signature.of("gemm_rs")
KERNEL = KernelConfig(128, 128, 64)


def chunk_bounds(extent: int, size: int) -> list[tuple[int, int]]:
    """Begin and end of each chunk, as the transport and the kernels cut them."""
    step = size or extent
    return [(begin, min(begin + step, extent)) for begin in range(0, extent, step)]


PULL, PUSH = Transport.COPY_ENGINE_PULL, Transport.COPY_ENGINE_PUSH
DRAIN = Transport.COPY_ENGINE_DRAIN


@pytest.mark.parametrize(
    ("problem", "transports", "want"),
    [
        (Problem(AG, 1024, 512, 256, 8), [PULL], Sizes(stage=128 * 256 * 2)),
        (Problem(AG, 1024, 512, 256, 8), [Transport.SM_COPY], Sizes(stage=128 * 256 * 2)),
        (Problem(AG, 1024, 512, 256, 8), [PUSH], Sizes(gathered=1024 * 256 * 2)),
        (Problem(AG, 8, 8, 8, 8), [PUSH, PULL], Sizes(1024, 0, 1024)),
        (Problem(RS, 1024, 512, 256, 8), [Transport.PEER_STORE], Sizes(half=1024 * 512 * 2)),
        (Problem(AG, 262144, 64, 8192, 1), [PULL], Sizes(stage=2**32)),
        (Problem(RS, 131072, 4096, 64, 2), [], Sizes(half=2**30)),
        (Problem(RS, 1024, 512, 256, 8), [DRAIN], Sizes(drained=1024 * 512 * 2)),
        (
            Problem(RS, 1024, 512, 256, 8),
            [DRAIN, Transport.PEER_STORE],
            Sizes(half=1024 * 512 * 2, drained=1024 * 512 * 2),
        ),
    ],
)
def test_buffers_hold_all_slabs_and_count_beyond_32_bits(problem, transports, want):
    """C05, C07."""
    assert sizes(problem, *transports) == want
    data = want.stage + 2 * want.half + want.gathered + 2 * want.drained
    assert want.total == abi.DATA_OFFSET + data


def test_a_workspace_serves_what_fits_each_part():
    one, other = Sizes(2, 3, 4, 1), Sizes(3, 2, 4, 5)
    assert not one.hold(other)
    assert (one | other) == Sizes(3, 3, 4, 5)
    assert (one | other).hold(one)


@pytest.mark.parametrize(
    ("problem", "transport"),
    [
        (Problem(AG, 2**31 - 8, 8, 2**20, 8), PULL),
        (Problem(AG, 2**28, 8, 2**20, 8), PUSH),
        (Problem(RS, 2**31 - 8, 2**20, 8, 8), Transport.PEER_STORE),
        (Problem(RS, 2**28, 2**20, 8, 8), DRAIN),
    ],
)
def test_an_absurd_workspace_is_refused(problem, transport):
    with pytest.raises(UsageError, match="split the call"):
        sizes(problem, transport)


@given(st.integers(1, 5000), st.integers(1, 16), st.sampled_from([64, 128, 256]))
def test_row_chunks_cover_the_slab_once_at_tile_borders(rows, chunks, tile_m):
    problem = Problem(AG, rows * 4, 64, 256, 4)
    kernel = KernelConfig(tile_m, 128, 64)
    size = chunk_size(problem, kernel, RunConfig(chunks=chunks))
    bounds = chunk_bounds(rows, size)
    assert bounds[0][0] == 0
    assert bounds[-1][1] == rows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert len(bounds) <= max(1, chunks) <= abi.MAX_CHUNKS
    assert all(begin % tile_m == 0 for begin, _ in bounds)


@given(st.integers(1, 20000), st.integers(1, 16))
def test_k_chunks_end_where_every_tile_k_does_and_double(k, chunks):
    run = RunConfig(chunk_axis=ChunkAxis.K, chunks=chunks)
    first = chunk_size(Problem(AG, 64, 64, k, 1), KERNEL, run)
    begins, ends = (ct.c_int64 * 16)(), (ct.c_int64 * 16)()
    count = driver().k_chunks(ct.c_int64(first or k), ct.c_int64(k), begins, ends)
    assert 1 <= count <= chunks
    assert (begins[0], ends[count - 1]) == (0, k)
    assert all(begins[i] == ends[i - 1] == first * 2 ** (i - 1) for i in range(1, count))
    assert all(begin % 128 == 0 for begin in begins)
    shares = schedule.chunk_sizes(Problem(AG, 64, 64, k, 1), KERNEL, run)
    assert shares == pytest.approx([(ends[i] - begins[i]) / k for i in range(count)])


@pytest.mark.parametrize(
    ("groups", "cut"),
    [((), 0), ((8,), 8), ((1, 7), 8), ((1, 3, 4), 4), ((4, 4), 4), ((1, 1, 6), 2), ((1,), 0)],
)
def test_k_chunks_cut_the_slabs_of_the_first_remote_group(groups, cut):
    assert RunConfig(groups).cut == cut


def test_a_gathering_gemm_waits_longer_than_its_transport():
    """Or it names the rank behind the late one: its copies come one after the other."""
    group, run = abi.Group(world=4, timeout_ns=1000), RunConfig(chunks=2)
    gather = Problem(AG, 512, 512, 512, 4)
    assert gemm_args(group, gather, KERNEL, run).group.timeout_ns == 1250
    assert copy_args(group, gather, KERNEL, run).group.timeout_ns == 1000
    scatter = Problem(RS, 512, 512, 512, 4)
    assert gemm_args(group, scatter, KERNEL, run).group.timeout_ns == 1000


def test_a_drained_gemm_and_its_copies_cut_rows_alike():
    group, problem = abi.Group(world=4), Problem(RS, 2048, 520, 256, 4)
    run = RunConfig(chunks=2, transport=DRAIN)
    gemm, copy = gemm_args(group, problem, KERNEL, run), copy_args(group, problem, KERNEL, run)
    assert (gemm.drain, copy.kind) == (1, abi.DRAIN)
    assert gemm.chunk_size == copy.chunk_size == 256
    assert (copy.rows, copy.row_bytes) == (512, 1040)
    stores = RunConfig(chunks=2, transport=Transport.PEER_STORE)
    assert gemm_args(group, problem, KERNEL, stores).drain == 0


def test_what_is_not_a_library_is_one_clear_error(tmp_path):
    path = tmp_path / "kernel.so"
    path.write_bytes(b"\x7fELF garbage")
    with pytest.raises(KernelError, match="fluxgen build"):
        FusedKernel(path, AG, KERNEL)
    with pytest.raises(KernelError, match="fluxgen build"):
        SupportKernels(tmp_path / "absent.so")


def test_a_foreign_library_is_refused(tmp_path):
    source = tmp_path / "x.c"
    source.write_text("int other(void) { return 1; }\n")
    library = tmp_path / "x.so"
    subprocess.run([shutil.which("gcc"), "-shared", "-fPIC", source, "-o", library], check=True)
    with pytest.raises(KernelError, match="no symbol"):
        FusedKernel(library, AG, KERNEL)


def test_another_abi_version_is_refused(tmp_path):
    source = tmp_path / "x.c"
    source.write_text("int fluxgen_abi_version(void) { return 99; }\n")
    library = tmp_path / "x.so"
    subprocess.run([shutil.which("gcc"), "-shared", "-fPIC", source, "-o", library], check=True)
    with pytest.raises(KernelError, match="99"):
        SupportKernels(library)


def test_a_kernel_that_is_not_built_says_what_to_run(tmp_path):
    """J13, L03: no nvcc is asked for, nothing is created."""
    with pytest.raises(StoreError, match="fluxgen build"):
        fused_kernel(AG, KERNEL, "sm90", tmp_path / "store")
    assert not (tmp_path / "store").exists()


FAKE_DRIVER = """
#include <string.h>
int cuInit(unsigned f) { (void)f; return INIT; }
int cuDriverGetVersion(int* v) { *v = 13000; return 0; }
int cuDeviceGetCount(int* n) { *n = 1; return 0; }
int cuDeviceGet(int* d, int i) { *d = i; return 0; }
int cuDeviceGetPCIBusId(char* s, int n, int d) { (void)d; strncpy(s, "0000:3B:00.0", n); return 0; }
int cuDeviceGetName(char* s, int n, int d) { (void)d; strncpy(s, NAME, n); return 0; }
int cuDeviceTotalMem_v2(unsigned long* b, int d) { (void)d; *b = 80000000000UL; return 0; }
int cuDeviceGetAttribute(int* v, int a, int d) {
  (void)d;
  *v = a == 16 ? SMS : a == 13 ? 1755000 : a == 36 ? 2619000 : a == 37 ? 5120 :
       a == 38 ? 50000000 : a == 75 ? 9 : a == 76 ? 0 : a == 97 ? 232448 : 0;
  return 0;
}
"""


def fake_driver(tmp_path, name, sms, init=0):
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so.1"
    source.write_text(FAKE_DRIVER)
    subprocess.run(
        [shutil.which("gcc"), "-shared", "-fPIC", f'-DNAME="{name}"', f"-DSMS={sms}",
         f"-DINIT={init}", source, "-o", library],
        check=True,
    )  # fmt: skip
    return str(library)


def test_a_known_gpu_is_its_preset(tmp_path):
    (device,) = devices(fake_driver(tmp_path, "NVIDIA H100 80GB HBM3", 132))
    assert device.gpu.name == "h100-sxm"
    assert device.gpu.tflops == 989
    assert device.driver == "13.0"


def test_a_part_of_a_known_gpu_is_described_by_its_properties(tmp_path):
    (device,) = devices(fake_driver(tmp_path, "NVIDIA H100 80GB HBM3", 60))
    assert device.gpu.name == "h100-sxm-60sm"
    assert (device.gpu.sm_count, device.gpu.cc, device.gpu.smem_kb) == (60, 90, 227)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", 0), ("?", 0), (None, 0)])
def test_the_socket_of_a_gpu_is_the_kernels_word(tmp_path, text, node):
    if text is not None:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0" / "numa_node").write_text(text)
    (device,) = devices(fake_driver(tmp_path, "NVIDIA L20", 92), tmp_path)
    assert (device.numa, device.address) == (node, "0000:3b:00.0")


def test_an_unknown_gpu_works(tmp_path):
    (device,) = devices(fake_driver(tmp_path, "NVIDIA H900 Ultra", 120))
    assert (device.gpu.name, device.gpu.sm_count) == ("h900-ultra", 120)
    assert device.gpu.mem_gbs == pytest.approx(3352, abs=1)


def test_no_driver_or_a_broken_one_says_so(tmp_path):
    with pytest.raises(ToolchainError, match="--target"):
        devices("libno-such-driver.so")
    with pytest.raises(ToolchainError, match="999"):
        devices(fake_driver(tmp_path, "x", 1, init=999))
