"""The search space: legal means legal, every reason names what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxgen.codegen.space import (
    kernel_space,
    run_space,
    why_illegal,
    why_illegal_kernel,
    why_illegal_problem,
)
from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.epilogue import Epilogue
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology, parse_gpu
from fluxgen.kernels.slabs import group_choices
from fluxgen.kernels.sm90 import CLUSTERS, TILE_K, TILE_M, TILE_N, stage_count

H100 = parse_gpu("h100-sxm")
AG, RS = Signature.of("ag_gemm"), Signature.of("gemm_rs")
GOOD = KernelConfig(128, 128, 64, 2, 1, Schedule.PINGPONG)


def test_the_space_holds_what_the_issue_names():
    kernels = [k for k in kernel_space(AG, H100) if k.schedule is not Schedule.FLAT]
    assert len(kernels) == len(set(kernels)) > 100
    assert {k.tile_m for k in kernels} == set(TILE_M)
    assert {k.tile_n for k in kernels} == set(TILE_N)
    assert {k.tile_k for k in kernels} == set(TILE_K)
    assert {(k.cluster_m, k.cluster_n) for k in kernels} == set(CLUSTERS)
    assert {k.schedule for k in kernels} == {Schedule.PINGPONG, Schedule.COOPERATIVE}
    assert KernelConfig(128, 192, 64, 2, 1, Schedule.PINGPONG) in kernels
    assert KernelConfig(256, 192, 64, 2, 1, Schedule.COOPERATIVE) in kernels


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (KernelConfig(64, 128, 64, schedule=Schedule.COOPERATIVE), "two warpgroups"),
        (KernelConfig(128, 256, 64), "registers"),
        (KernelConfig(256, 256, 64, schedule=Schedule.COOPERATIVE), "registers"),
        (KernelConfig(96, 128, 64), "tile_m 96"),
        (KernelConfig(128, 100, 64), "tile_n 100"),
        (KernelConfig(128, 128, 32), "tile_k 32"),
        (KernelConfig(128, 128, 64, 1, 4), "cluster 1x4"),
        (KernelConfig(128, 128, 64, stages=2), "stages 2"),
        (KernelConfig(128, 128, 64, stages=12), "shared memory"),
        (KernelConfig(256, 192, 128, schedule=Schedule.COOPERATIVE), "shared memory"),
    ],
)
def test_illegal_kernels_and_their_reasons(kernel, reason):
    assert reason in (why_illegal_kernel(AG, H100, kernel) or "")


@pytest.mark.parametrize(
    ("signature", "reason"),
    [
        (Signature(Op.AG_GEMM, epilogue=Epilogue.parse("bias")), "epilogue"),
    ],
)
def test_signatures_without_a_kernel(signature, reason):
    assert reason in (why_illegal_kernel(signature, H100, GOOD) or "")


def test_ampere_says_so():
    assert "sm80" in (why_illegal_kernel(AG, parse_gpu("a100-sxm-80gb"), GOOD) or "")


@pytest.mark.parametrize(
    ("m", "n", "k", "tp", "word"),
    [
        (1023, 1024, 1024, 8, "m=1023"),
        (1024, 36, 64, 8, "n=36"),
        (1024, 64, 100, 8, "k=100"),
        (0, 64, 64, 8, "m=0"),
        (64, 64, 0, 8, "k=0"),
        (1024, 64, 4, 8, "k=4"),
    ],
)
def test_problems_tma_cannot_take(m, n, k, tp, word):
    """A01, A05, A09, A11, B01, B05: refused on the host with the value and the constraint."""
    assert word in (why_illegal_problem(Problem(AG, m, n, k, tp)) or "")


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (RunConfig((4, 3)), "groups"),
        (RunConfig((8, 0)), "groups"),
        (RunConfig((8,), panel=1000), "panel"),
        (RunConfig((8,), chunks=17), "chunks"),
        (RunConfig((8,), chunks=0), "chunks"),
        (RunConfig((8,), chunks=16), "row chunks"),
        (RunConfig((8,), transport=Transport.PEER_STORE), "transport"),
        (RunConfig((8,), sms=1), "sms"),
        (RunConfig((8,), sms=500), "sms"),
    ],
)
def test_illegal_runs(run, reason):
    problem = Problem(AG, 8192, 6144, 12288, 8)
    assert reason in (why_illegal(problem, Topology.of(H100, "nvlink", 8), GOOD, run) or "")


def test_a_gemm_rs_is_stored_or_drained():
    problem = Problem(RS, 8192, 12288, 6144, 8)
    nvlink, pcie = (Topology.of(H100, link, 8) for link in ("nvlink", "pcie"))
    for transport in Transport:
        legal = transport in (Transport.PEER_STORE, Transport.COPY_ENGINE_DRAIN)
        run = RunConfig((8,), transport=transport)
        assert (why_illegal(problem, nvlink, GOOD, run) is None) == legal
    over_pcie = [run.transport for run in run_space(problem, pcie, GOOD)]
    assert over_pcie[0] is Transport.COPY_ENGINE_DRAIN
    assert over_pcie.count(Transport.PEER_STORE) == len(group_choices(problem.op, 8))
    stores = {run.transport for run in run_space(problem, nvlink, GOOD)}
    assert stores == {Transport.PEER_STORE}


def test_a_ring_is_for_even_ranks_on_several_sockets():
    def transports(world, islands):
        problem = Problem(AG, 1024 * world, 6144, 4096, world)
        topology = Topology.of(H100, "pcie", world, islands)
        return {run.transport for run in run_space(problem, topology, GOOD)}

    assert Transport.COPY_ENGINE_RING in transports(8, 2)
    assert Transport.COPY_ENGINE_RING not in transports(8, 1)
    assert Transport.COPY_ENGINE_RING not in transports(3, 3)
    ring = RunConfig((3,), transport=Transport.COPY_ENGINE_RING)
    odd = Problem(AG, 3072, 6144, 4096, 3)
    assert "3 ranks" in (why_illegal(odd, Topology.of(H100, "pcie", 3), GOOD, ring) or "")


def test_k_chunks_are_for_ag_and_fit_k():
    topology = Topology.of(H100, "nvlink", 8)
    run = RunConfig((8,), chunk_axis=ChunkAxis.K, chunks=4)
    assert why_illegal(Problem(AG, 8192, 6144, 12288, 8), topology, GOOD, run) is None
    assert "k chunks" in (why_illegal(Problem(AG, 8192, 6144, 256, 8), topology, GOOD, run) or "")
    rs = RunConfig((8,), chunk_axis=ChunkAxis.K, chunks=4, transport=Transport.PEER_STORE)
    assert "no k" in (why_illegal(Problem(RS, 8192, 6144, 12288, 8), topology, GOOD, rs) or "")


def test_half_padded_tiles_are_refused():
    """Tiles are chosen for m/tp, not m; a cluster may span slabs, so it adds no padding."""
    topology = Topology.of(H100, "nvlink", 8)
    run = RunConfig((8,))
    slabs_of_64 = Problem(AG, 512, 6144, 12288, 8)
    assert "padding" in (why_illegal(slabs_of_64, topology, GOOD, run) or "")
    assert why_illegal(slabs_of_64, topology, KernelConfig(64, 192, 64, 2, 1), run) is None
    assert why_illegal(Problem(AG, 1024, 6144, 12288, 8), topology, GOOD, run) is None


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([AG, RS]),
    st.integers(1, 64),
    st.integers(1, 400),
    st.integers(1, 400),
    st.integers(1, 16),
    st.data(),
)
def test_everything_enumerated_is_legal(signature, rows, n8, k8, world, data):
    problem = Problem(signature, rows * 16 * world, n8 * 8, k8 * 8, world)
    topology = Topology.of(H100, "nvlink", world)
    kernel = data.draw(st.sampled_from(list(kernel_space(signature, H100))))
    runs = list(run_space(problem, topology, kernel))
    assert len(runs) == len(set(runs))
    for run in runs:
        assert why_illegal(problem, topology, kernel, run) is None
        assert sum(run.groups) == world


@pytest.mark.parametrize("world", range(1, 17))
def test_group_choices_sum_to_the_world(world):
    for op in Op:
        choices = group_choices(op, world)
        assert (world,) in choices
        for groups in choices:
            assert sum(groups) == world
            assert min(groups) >= 1
    if world == 8:
        assert (1, 2, 5) in group_choices(Op.AG_GEMM, 8)
        assert (5, 2, 1) in group_choices(Op.GEMM_RS, 8)


def test_stages_match_what_cutlass_chose():
    """From compiled kernels' own description (sm90, 227 KiB); see tests/nvcc."""
    assert stage_count(KernelConfig(128, 128, 64, 2, 1), 227) == 6
