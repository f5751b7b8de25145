"""The flat kernels' constraints, each with its reason, and the space they span."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fluxgen.codegen.render import kernel_name, render_kernel
from fluxgen.codegen.space import kernel_space, run_space, why_illegal, why_illegal_kernel
from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.errors import UsageError
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology, parse_gpu
from fluxgen.kernels import flat

H200 = Topology.of("h200", "nvlink", 8)
AG, RS, AR = (Signature.of(op) for op in ("ag_gemm", "gemm_rs", "gemm_ar"))
KERNEL = KernelConfig(16, 64, 128, 1, 1, Schedule.FLAT)
RUN = RunConfig((8,), transport=Transport.PEER_STORE, span=8)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tile_m": 48}, "tile_m 48"),
        ({"tile_n": 96}, "tile_n 96"),
        ({"tile_k": 32}, "tile_k 32"),
        ({"cluster_m": 2}, "cluster 2x1"),
        ({"tile_m": 128, "tile_n": 256}, "spill"),
        ({"stages": 2}, "stages 2"),
        ({"tile_m": 128, "tile_n": 192, "stages": 4}, "do not|bytes of shared memory"),
    ],
)
def test_a_kernel_that_cannot_be_compiled_says_why(changes, words):
    reason = why_illegal_kernel(AG, H200.gpu, replace(KERNEL, **changes))
    assert reason is not None
    assert any(word in reason for word in words.split("|")), reason


AMPERE_KERNEL = KernelConfig(16, 32, 32, 1, 1, Schedule.FLAT, 3)


@pytest.mark.parametrize(
    ("gpu", "changes", "words"),
    [
        ("a100-sxm-80gb", {"tile_m": 128}, "tile_m 128"),
        ("a100-sxm-80gb", {"tile_n": 256}, "tile_n 256"),
        ("a100-sxm-80gb", {"tile_k": 128}, "tile_k 128"),
        ("a100-sxm-80gb", {"stages": 0}, "stages 0"),
        ("a100-sxm-80gb", {"cluster_m": 2}, "no clusters"),
        ("a100-sxm-80gb", {"tile_m": 64, "tile_n": 64, "stages": 2}, "too many registers"),
        ("a100-sxm-80gb", {"tile_n": 64, "stages": 6}, "a block has 163 KiB"),
        ("l20", {"stages": 6}, "a block has 99 KiB"),
    ],
)
def test_an_ampere_kernel_that_cannot_be_compiled_says_why(gpu, changes, words):
    assert why_illegal_kernel(AG, parse_gpu(gpu), AMPERE_KERNEL) is None
    changed = replace(AMPERE_KERNEL, **changes)
    assert words in (why_illegal_kernel(AG, parse_gpu(gpu), changed) or "")


@pytest.mark.parametrize("signature", [AG, RS, AR])
@pytest.mark.parametrize("gpu", ["a100-sxm-80gb", "l20", "rtx-4090"])
def test_amperes_flat_kernels_have_one_split_and_their_own_template(signature, gpu):
    topology = Topology.of(gpu, "pcie", 8)
    kernels = [k for k in kernel_space(signature, topology.gpu) if k.schedule is Schedule.FLAT]
    assert len(kernels) == len(set(kernels)) >= 20
    problem = Problem(signature, 16, 1024, 4096, 8)
    for kernel in kernels:
        runs = list(run_space(problem, topology, kernel))
        assert {run.split for run in runs} == (set() if kernel.tile_m >= 32 else {1})
    assert "sm80_flat.cuh" in render_kernel(signature, topology.gpu.arch, AMPERE_KERNEL).text
    split = replace(RUN, split=2)
    assert "warps of a block" in (why_illegal(Problem(RS, 16, 1024, 4096, 8), topology,
                                              AMPERE_KERNEL, split) or "")  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "run", "words"),
    [
        (Problem(RS, 264, 512, 512, 8), RUN, "at most 256 tokens"),
        (Problem(RS, 16, 512, 512, 8), replace(RUN, span=4), "span 4"),
        (Problem(RS, 16, 512, 512, 8), replace(RUN, groups=(4, 4)), "groups (4, 4)"),
        (Problem(RS, 16, 512, 512, 8), replace(RUN, panel=2), "panel 2"),
        (Problem(RS, 16, 512, 512, 8), replace(RUN, chunks=2), "chunks 2"),
        (Problem(RS, 16, 512, 512, 8), replace(RUN, split=8), "4 tiles of k"),
        (Problem(RS, 16, 512, 4096, 8), replace(RUN, split=3), "split 3"),
        (Problem(RS, 16, 512, 512, 8), replace(RUN, transport=Transport.PEER_BROADCAST),
         "does not carry gemm_rs"),
        (Problem(RS, 16, 512, 512, 8), replace(RUN, transport=Transport.COPY_ENGINE_DRAIN),
         "copy_engine_drain"),
        (Problem(AR, 17, 512, 512, 8), RUN, "only peer_broadcast"),
        (Problem(RS, 72, 512, 512, 8), replace(RUN, transport=Transport.PEER_PACKETS),
         "at most 64 tokens; use one"),
        (Problem(AR, 16, 512, 512, 8), replace(RUN, transport=Transport.PEER_PACKETS),
         "does not carry gemm_ar"),
        (Problem(AR, 65, 512, 512, 8), replace(RUN, transport=Transport.BROADCAST_PACKETS),
         "at most 64 tokens; use one"),
        (Problem(RS, 17, 512, 512, 8), RUN, "not a multiple of tp=8"),
    ],
)  # fmt: skip
def test_a_run_that_it_cannot_take_says_why(problem, run, words):
    assert words in (why_illegal(problem, H200, KERNEL, run) or "")


def test_what_only_flat_kernels_can():
    tiled = KernelConfig(64, 64, 64, 1, 1, Schedule.PINGPONG)
    problem = Problem(AR, 512, 512, 512, 8)
    stores = RunConfig((8,), transport=Transport.PEER_STORE)
    assert why_illegal(problem, H200, tiled, stores) is None
    assert "only flat kernels" in (
        why_illegal(problem, H200, tiled, replace(stores, split=2)) or ""
    )
    in_one = replace(stores, transport=Transport.PEER_BROADCAST)
    assert "only flat kernels" in (why_illegal(problem, H200, tiled, in_one) or "")
    assert why_illegal(Problem(AR, 1, 512, 512, 8), H200, KERNEL, replace(in_one, span=8)) is None


@pytest.mark.parametrize("signature", [AG, RS, AR])
@pytest.mark.parametrize("m", [8, 64, 256])
def test_every_run_of_the_space_is_legal_and_each_split_is_in_it(signature, m):
    problem = Problem(signature, m, 1024, 4096, 8)
    kernels = [k for k in kernel_space(signature, H200.gpu) if k.schedule is Schedule.FLAT]
    assert len(kernels) == len(set(kernels)) >= 20
    for kernel in kernels:
        runs = list(run_space(problem, H200, kernel))
        padded = kernel.tile_m > 16 and kernel.tile_m >= 2 * m
        assert {run.split for run in runs} == (set() if padded else set(flat.SPLITS))
        assert all(run.chunk_axis is ChunkAxis.M and run.span == 8 for run in runs)


def test_one_compiled_kernel_serves_both_reductions():
    assert kernel_name(AR, "sm90", KERNEL) == kernel_name(RS, "sm90", KERNEL)
    assert render_kernel(AR, "sm90", KERNEL) == render_kernel(RS, "sm90", KERNEL)
    assert "families/sm90_flat.cuh" in render_kernel(AG, "sm90", KERNEL).text


def test_runs_without_a_split_are_written_as_before_and_read():
    old = RunConfig((8,), span=8).to_dict()
    assert "split" not in old
    assert RunConfig.from_dict(old) == RunConfig((8,), span=8)
    split = RunConfig((8,), span=8, split=4)
    assert RunConfig.from_dict(split.to_dict()) == split
    with pytest.raises(UsageError, match=r"run.split"):
        RunConfig.from_dict({**old, "split": "4"})
