"""Which Ampere kernels there are, why others are not, and what is rendered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fluxgen.codegen.render import render_kernel
from fluxgen.codegen.space import kernel_space, why_illegal, why_illegal_kernel
from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.errors import UnsupportedError
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import GPUS, Topology
from fluxgen.kernels import sm80

AG, RS = Signature.of("ag_gemm"), Signature.of("gemm_rs")
A100, L20 = GPUS["a100-sxm-80gb"], GPUS["l20"]
M4, M8 = Schedule.MULTISTAGE_4, Schedule.MULTISTAGE_8


def tiled(signature, gpu):
    """The kernels of one rank's slabs; the flat ones are ``test_flat.py``'s."""
    return [k for k in kernel_space(signature, gpu) if k.schedule is not Schedule.FLAT]


def test_the_space_holds_what_the_issue_names():
    kernels = tiled(AG, A100)
    assert len(kernels) == len(set(kernels)) > 100
    assert {k.tile_m for k in kernels} == set(sm80.TILE_M)
    assert {k.tile_n for k in kernels} == set(sm80.TILE_N)
    assert {k.tile_k for k in kernels} == set(sm80.TILE_K)
    assert {k.stages for k in kernels} == set(sm80.STAGES)
    assert {k.schedule for k in kernels} == {M4, M8}
    assert KernelConfig(128, 256, 64, 1, 1, M8, 3) in kernels


@pytest.mark.parametrize("gpu", [A100, L20, GPUS["rtx-4090"]], ids=lambda g: g.name)
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_every_kernel_fits_its_gpu(gpu, layout):
    kernels = tiled(replace(RS, b_layout=layout), gpu)
    assert kernels
    for kernel in kernels:
        warps = sm80.WARPS[kernel.schedule]
        rows, columns = sm80.warp_grid(kernel)
        assert rows * columns == warps
        assert sm80.shared_bytes(kernel) <= gpu.smem_kb * 1024
        assert kernel.tile_m * kernel.tile_n // (32 * warps) <= sm80.MAX_ACCUMULATORS
        assert kernel.tile_m % (16 * rows) == kernel.tile_n % (16 * columns) == 0


def test_the_small_shared_memory_of_l20_takes_kernels_away():
    large = KernelConfig(128, 256, 64, 1, 1, M8, 3)
    assert why_illegal_kernel(AG, A100, large) is None
    assert "shared memory" in why_illegal_kernel(AG, L20, large)
    assert set(kernel_space(AG, L20)) < set(kernel_space(AG, A100))


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (KernelConfig(128, 128, 64, 1, 1, M8, 0), "stages 0"),
        (KernelConfig(128, 128, 64, 1, 1, M8, 6), "stages 6"),
        (KernelConfig(128, 128, 64, 2, 1, M8, 3), "no clusters"),
        (KernelConfig(128, 128, 128, 1, 1, M8, 3), "tile_k 128"),
        (KernelConfig(128, 160, 64, 1, 1, M8, 3), "tile_n 160"),
        (KernelConfig(256, 256, 32, 1, 1, M8, 3), "accumulators"),
        (KernelConfig(128, 256, 32, 1, 1, M4, 3), "accumulators"),
        (KernelConfig(64, 96, 64, 1, 1, M8, 3), "16x16 pieces"),
        (KernelConfig(256, 96, 32, 1, 1, M8, 3), "loads of 8 warps"),
        (KernelConfig(256, 128, 64, 1, 1, M8, 5), "shared memory"),
        (KernelConfig(128, 128, 64, 1, 1, Schedule.PINGPONG, 3), "has no such kernels"),
    ],
)
def test_illegal_kernels_and_their_reasons(kernel, reason):
    assert reason in (why_illegal_kernel(AG, A100, kernel) or "")


def test_ampere_kernels_are_not_hoppers():
    kernel = KernelConfig(128, 128, 64, 1, 1, M8, 3)
    assert "sm90 has no such kernels; use pingpong" in why_illegal_kernel(AG, GPUS["h200"], kernel)
    with pytest.raises(UnsupportedError, match="multistage8"):
        render_kernel(AG, "sm90", kernel)
    with pytest.raises(UnsupportedError, match="pingpong"):
        render_kernel(AG, "sm80", KernelConfig(128, 128, 64))


def test_a_span_of_gemm_rs_takes_any_rows_but_one_chunk():
    topology = Topology.of(A100, "nvlink", 8)
    kernel, store = KernelConfig(128, 128, 64, 1, 1, M8, 3), Transport.PEER_STORE
    problem = Problem(RS, 96 * 8, 1024, 1024, 8)
    run = RunConfig((8,), span=2, transport=store)
    assert why_illegal(problem, topology, kernel, run) is None
    assert "one chunk" in why_illegal(problem, topology, kernel, replace(run, chunks=2))
    gather = RunConfig((1, 3, 4), 0, ChunkAxis.K, 4, transport=Transport.COPY_ENGINE_PUSH)
    assert why_illegal(Problem(AG, 1024, 1024, 1024, 8), topology, kernel, gather) is None


def test_each_arch_has_its_own_name_and_the_same_text():
    kernel = KernelConfig(256, 128, 32, 1, 1, M8, 3)
    made = {arch: render_kernel(RS, arch, kernel) for arch in ("sm80", "sm86", "sm89")}
    assert made["sm86"].name == "gemm_rs_bf16_sm86_256x128x32_1x1_multistage8_s3"
    texts = {m.text.replace(f"_{arch}_", "_") for arch, m in made.items()}
    assert len(texts) == 1
    text = made["sm80"].text
    assert "kWarpsM = 4, kWarpsN = 2;" in text
    assert '#include "fluxgen/families/sm80.cuh"' in text
