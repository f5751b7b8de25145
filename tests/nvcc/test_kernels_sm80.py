"""Real compiles of Ampere kernels, for sm80 and sm89: no spills, PTX for newer GPUs, refusals."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from fluxgen.codegen.render import render_kernel
from fluxgen.compiler import toolchain
from fluxgen.compiler.store import Store
from fluxgen.core.config import KernelConfig, Schedule
from fluxgen.core.errors import KernelError, ToolchainError
from fluxgen.core.problem import Signature
from fluxgen.kernels import sm80, sm80_flat
from fluxgen.native import abi
from fluxgen.native.loader import FusedKernel
from fluxgen.runtime.session.kernels import source_of

pytestmark = [pytest.mark.nvcc, pytest.mark.timeout(900)]

M8 = Schedule.MULTISTAGE_8
LARGEST = Signature.of("ag_gemm"), "sm80", KernelConfig(128, 256, 64, 1, 1, M8, 3)
SMALL = Signature.of("gemm_rs", "fp16"), "sm89", KernelConfig(64, 64, 32, 1, 1, M8, 5)


@pytest.fixture(scope="module", params=[LARGEST, SMALL], ids=["sm80", "sm89"])
def built(request, tmp_path_factory):
    signature, arch, kernel = request.param
    try:
        tools = toolchain.find()
    except ToolchainError as error:
        pytest.skip(f"no toolchain: {error}")
    store = Store(tmp_path_factory.mktemp("store") / "s")
    artifact = store.build(source_of(render_kernel(signature, arch, kernel)), tools)
    return artifact, FusedKernel(artifact.path, signature, kernel), tools


def test_no_spills(built):
    (facts,) = built[0].facts
    assert (facts.spill_stores, facts.spill_loads, facts.stack) == (0, 0, 0)
    assert facts.registers <= 255


def test_the_library_describes_itself(built):
    _, loaded, _ = built
    assert loaded.info.warps == 8
    assert loaded.info.smem_bytes == sm80.shared_bytes(loaded.kernel)
    other = KernelConfig(128, 128, 64, 1, 1, Schedule.MULTISTAGE_4, 3)
    with pytest.raises(KernelError, match="expected"):
        FusedKernel(loaded.path, loaded.signature, other)


def test_newer_gpus_find_ptx(built):
    artifact, _, tools = built
    dump = tools.nvcc.parent / "cuobjdump"
    if not dump.exists():
        pytest.skip("no cuobjdump beside nvcc")
    listed = subprocess.run([dump, "--list-ptx", artifact.path], capture_output=True, text=True)
    assert artifact.arch.replace("sm", "sm_") in listed.stdout


FLAT_AG = Signature.of("ag_gemm", "fp16"), KernelConfig(64, 32, 32, 1, 1, Schedule.FLAT, 3)
FLAT_RS = (
    replace(Signature.of("gemm_rs"), b_layout="kn"),
    KernelConfig(16, 16, 64, 1, 1, Schedule.FLAT, 2),
)


@pytest.fixture(scope="module", params=[FLAT_AG, FLAT_RS], ids=["most sums", "kn"])
def built_flat(request, tmp_path_factory, toolchain):
    signature, kernel = request.param
    store = Store(tmp_path_factory.mktemp("store") / "s")
    artifact = store.build(source_of(render_kernel(signature, "sm80", kernel)), toolchain)
    return artifact, FusedKernel(artifact.path, signature, kernel)


def test_a_flat_kernel_does_not_spill_and_says_what_it_is(built_flat):
    artifact, loaded = built_flat
    (facts,) = artifact.facts
    assert (facts.spill_stores, facts.spill_loads, facts.stack) == (0, 0, 0)
    assert facts.registers <= 255
    assert (loaded.info.flat, loaded.info.warps) == (1, 8)
    assert loaded.info.smem_bytes == sm80_flat.shared_bytes(loaded.kernel)
    with pytest.raises(KernelError, match="expected"):
        FusedKernel(loaded.path, loaded.signature, replace(loaded.kernel, tile_n=64))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": 2}, "split=2: expected 1"),
        ({"span": 2}, "span=2: a flat kernel tiles all 4 slabs"),
        ({"chunk_size": 64}, "chunk_size=64|multiple of 16"),
        ({"n": 36}, "n=36"),
    ],
)
def test_what_a_flat_kernel_cannot_take_is_refused_on_the_host(built_flat, changes, words):
    _, loaded = built_flat
    fits = {"rows": 4, "span": 4, "b_row_stride": 512}
    loaded.check(arguments(loaded, **fits))
    with pytest.raises(KernelError, match=words):
        loaded.check(arguments(loaded, **{**fits, **changes}))


def test_packets_are_of_a_reduction_and_need_room(built_flat):
    _, loaded = built_flat
    fits = {"rows": 13, "span": 1, "b_row_stride": 512, "sends": abi.PACKETS_TO_ALL}
    if loaded.signature.op.gathers:
        with pytest.raises(KernelError, match="sends=3: expected 0"):
            loaded.check(arguments(loaded, **fits))
        return
    with pytest.raises(KernelError, match=r"packet_bytes: .*at least 106496; found 0"):
        loaded.check(arguments(loaded, **fits))
    args = arguments(loaded, **fits)
    args.group.packet_bytes = 106496
    loaded.check(args)
    args.sends = 4
    with pytest.raises(KernelError, match="sends=4"):
        loaded.check(args)


def arguments(kernel, **changes):
    group = abi.Group(world=4, rank=1, half_bytes=1 << 30)
    for peer in range(4):
        group.peers[peer] = (peer + 1) << 32
    v = {"rows": 256, "n": 512, "k": 256, "a": 1 << 20, "b": 1 << 21, "d": 1 << 22,
         "a_row_stride": 256, "b_row_stride": 256, "d_row_stride": 512, **changes}  # fmt: skip
    args = abi.GemmArgs(group=group)
    for name, value in v.items():
        setattr(args, name, value)
    return args


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": 36}, "n=36"),
        ({"k": 100}, "k=100"),
        ({"a": 8}, "16 bytes"),
        ({"b_row_stride": 255}, "shorter than its row"),
        ({"cut": 5}, "cut=5"),
        ({"span": 3}, "span=3"),
        ({"rows": 0}, "never launched"),
    ],
)
def test_what_it_cannot_take_is_refused_on_the_host(built, changes, words):
    _, loaded, _ = built
    loaded.check(arguments(loaded))
    with pytest.raises(KernelError, match=words):
        loaded.check(arguments(loaded, **changes))
