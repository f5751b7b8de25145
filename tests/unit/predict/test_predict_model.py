"""What must hold of the model whatever its constants."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxgen.codegen.space import kernel_space, run_space, why_illegal
from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.errors import UsageError
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Baseline
from fluxgen.core.topology import GPUS, Topology
from fluxgen.predict import Prediction, predict, predict_baseline
from fluxgen.predict.constants import COPY_PCIE_US, COPY_US
from fluxgen.predict.gemm import Grid, gemm_time
from fluxgen.predict.link import copy_arrivals, crossing, nccl_us
from fluxgen.predict.overlap import first_need, last_touch

H100 = Topology.of("h100-sxm", "nvlink", 8)
KERNELS = list(kernel_space(Signature.of("ag_gemm"), H100.gpu))
PCIE_KERNEL = KernelConfig(128, 128, 64, 1, 1, Schedule.MULTISTAGE_4, 3)

ops = st.sampled_from(list(Op))
problems = st.builds(
    lambda op, rows, n, k: Problem(Signature.of(op), 8 * rows, 8 * n, 8 * k, 8),
    ops, st.integers(1, 2048), st.integers(1, 2048), st.integers(16, 2048),
)  # fmt: skip


@st.composite
def candidates(draw: st.DrawFn) -> tuple[Problem, KernelConfig, RunConfig]:
    problem = draw(problems)
    kernel = draw(st.sampled_from(KERNELS))
    groups = draw(st.sampled_from([(), (8,), (1, 7), (1, 2, 5), (5, 2, 1), (1,) * 8]))
    axis = draw(st.sampled_from(list(ChunkAxis))) if problem.op is Op.AG_GEMM else ChunkAxis.M
    transport = Transport.COPY_ENGINE_PULL
    if problem.op.scatters:
        transport = draw(st.sampled_from([Transport.PEER_STORE, Transport.COPY_ENGINE_DRAIN]))
    if kernel.schedule is Schedule.FLAT:
        split = draw(st.sampled_from([1, 2, 4, 8]))
        if problem.op.scatters:
            transport = Transport.PEER_STORE
        return problem, kernel, RunConfig((8,), transport=transport, span=8, split=split)
    panel = draw(st.sampled_from([0, 2, 8]))
    chunks = draw(st.sampled_from([1, 2, 4]))
    span = draw(st.sampled_from([1, 1, 2, 4]))
    if span > 1:
        groups = draw(st.sampled_from([(), (8,), (4, 4)]))
    return problem, kernel, RunConfig(groups, panel, axis, chunks, 0, transport, span)


@settings(max_examples=150, deadline=None)
@given(candidates(), st.floats(1.0, 4.0))
def test_more_bandwidth_is_never_slower(candidate, factor: float) -> None:
    faster = replace(H100, bandwidth_gbs=H100.bandwidth_gbs * factor)
    assert predict(*_on(candidate, faster)).time_us <= predict(*_on(candidate, H100)).time_us + 1e-9


@settings(max_examples=150, deadline=None)
@given(candidates(), st.integers(4, 131))
def test_more_sms_are_never_slower(candidate, sms: int) -> None:
    problem, kernel, run = candidate
    few = predict(problem, H100, kernel, replace(run, sms=sms)).time_us
    more = predict(problem, H100, kernel, replace(run, sms=sms + 1)).time_us
    assert more <= few * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(candidates(), st.integers(1, 512))
def test_more_rows_are_never_faster(candidate, extra: int) -> None:
    problem, kernel, run = candidate
    bigger = replace(problem, m=problem.m + 8 * extra)
    less, more = predict(problem, H100, kernel, run), predict(bigger, H100, kernel, run)
    assert less.gemm_us <= more.gemm_us * (1 + 1e-9)
    # A source whose first row moves over a border of tiles or clusters may be needed later.
    if run.span == kernel.cluster_m == 1:
        assert less.time_us <= more.time_us * (1 + 1e-9)
    assert predict_baseline(problem, H100).time_us <= predict_baseline(bigger, H100).time_us * (
        1 + 1e-9
    )


@settings(max_examples=150, deadline=None)
@given(candidates())
def test_predictions_are_finite_and_consistent(candidate) -> None:
    problem, kernel, run = candidate
    p = predict(problem, H100, kernel, run)
    assert math.isfinite(p.time_us)
    assert p.time_us >= p.gemm_us > 0
    assert p.exposed_us == pytest.approx(p.time_us - p.gemm_us)
    assert 0 <= p.padding < 1
    flops = problem.flops / (p.gemm_us * 1e-6) / 1e12
    assert flops < H100.gpu.tflops


def _on(candidate, topology: Topology):
    problem, kernel, run = candidate
    return problem, topology, kernel, run


def test_only_the_last_cluster_row_of_a_group_is_padded() -> None:
    """m/tp = 128 rows and 2x1 clusters of 128-row tiles: a cluster takes rows of two slabs."""
    problem = Problem(Signature.of("ag_gemm"), 1024, 6144, 12288, 8)
    pairs = KernelConfig(128, 128, 64, 2, 1)

    def padding(groups: tuple[int, ...]) -> float:
        return predict(problem, H100, pairs, RunConfig(groups, 4)).padding

    assert padding((8,)) == padding((2, 2, 4)) == 0
    assert padding((1, 2, 5)) == pytest.approx(0.2)  # 1 + 1 + 3 cluster rows for 8 rows
    assert padding((1,) * 8) == pytest.approx(0.5)
    whole = gemm_time(128, 6144, 12288, 8, (8,), 4, pairs, H100.gpu, 0).time_us
    by_rank = gemm_time(128, 6144, 12288, 8, (1,) * 8, 4, pairs, H100.gpu, 0).time_us
    assert by_rank / whole == pytest.approx(2.0, rel=0.15)


def test_a_span_fills_tiles_that_are_taller_than_a_slab() -> None:
    """m/tp = 64 rows in 128-row tiles: measured 0.99 (span 2) against 1.14 of cuBLAS (64-row)."""
    h200 = Topology.of("h200", "nvlink", 8)
    problem = Problem(Signature.of("ag_gemm"), 512, 6144, 12288, 8)
    tall, short = KernelConfig(128, 192, 64, 2, 1), KernelConfig(64, 192, 64, 2, 1)
    filled = predict(problem, h200, tall, RunConfig((8,), 2, span=2))
    halved = predict(problem, h200, tall, RunConfig((8,), 2))
    small = predict(problem, h200, short, RunConfig((8,), 2))
    assert (filled.padding, halved.padding) == (0, 0.5)
    assert halved.gemm_us / filled.gemm_us == pytest.approx(2.0, rel=0.1)
    assert small.gemm_us / filled.gemm_us == pytest.approx(1.14, rel=0.06)
    grouped = predict(problem, h200, tall, RunConfig((2, 6), 2, span=2))
    assert grouped.padding == pytest.approx(1 / 3)  # 1 + 2 cluster rows of 2 for 1 + 3 rows


def test_a_spanned_tile_waits_for_its_last_source() -> None:
    """On a slow link the call ends one wave after the last slab, whatever the span."""
    slow = replace(H100, bandwidth_gbs=10.0)
    problem = Problem(Signature.of("ag_gemm"), 512, 6144, 12288, 8)
    for span in (1, 2, 4, 8):
        run = RunConfig((8,), 0, span=span)
        p = predict(problem, slow, KernelConfig(64, 192, 64), run)
        assert p.time_us > p.comm_us
        one_wave = p.gemm_us / p.waves
        assert p.time_us - p.comm_us == pytest.approx(one_wave, rel=0.35)


def walk(rows: int, columns: int, groups: tuple[int, ...], cluster_m: int, panel: int):
    """The tiles (visit, row) of each cluster, spelled out as ``tile_order.cuh`` draws it."""
    first = 0
    for slabs in groups:
        tiles = [(first + v, row) for v in range(slabs) for row in range(rows)]
        first += slabs
        for begin in range(0, columns, panel or columns):
            width = min(panel or columns, columns - begin)
            for row in range(0, len(tiles), cluster_m):
                for _ in range(width):
                    yield tiles[row : row + cluster_m]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 7), st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]), st.integers(0, 8), st.data(),
)  # fmt: skip
def test_positions_are_those_of_the_walk(rows, columns, groups, cluster_m, panel, data) -> None:
    clusters = list(walk(rows, columns, tuple(groups), cluster_m, panel))
    grid = Grid(rows, columns, groups, cluster_m, 3)
    assert grid.total == len(clusters)
    assert grid.waves == -(-len(clusters) // 3)
    tile = data.draw(st.sampled_from([(v, r) for v in range(sum(groups)) for r in range(rows)]))
    first = next(i for i, tiles in enumerate(clusters) if tile in tiles)
    assert first_need(grid, panel, *tile) == first
    last = max(i for i, tiles in enumerate(clusters) if tile in tiles)
    assert last_touch(grid, panel, *tile) == last


def test_waves_are_counted_on_the_target() -> None:
    kernel = KernelConfig(128, 256, 64, 1, 1, Schedule.COOPERATIVE)
    for name, waves in (("h100-sxm", 2), ("h100-pcie", 2), ("h20", 3)):
        gpu = GPUS[name]
        assert gemm_time(1024, 6144, 4096, 1, (1,), 0, kernel, gpu, 0).grid.waves == waves, name
    assert gemm_time(1024, 6144, 4096, 1, (1,), 0, kernel, GPUS["h20"], 0).grid.total == 192


def test_the_walk_matches_the_drawing_in_the_tile_order_header() -> None:
    grid = Grid(rows=2, columns=5, groups=(1, 3), cluster_m=1, slots=132)
    assert [first_need(grid, 2, visit, 0) for visit in range(4)] == [0, 10, 14, 18]
    assert first_need(grid, 2, 1, 1) == 12
    assert first_need(Grid(2, 5, (4,), 1, 132), 0, 3, 1) == 35


def test_chunks_arrive_in_ring_order() -> None:
    topology = replace(H100, world=3)
    run = RunConfig((3,), chunks=2)
    by_rows = copy_arrivals(1e6, run, topology, run.shares)
    assert [(v, c) for v, c, _ in by_rows] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    run = RunConfig((3,), chunk_axis=ChunkAxis.K, chunks=2)
    by_k = copy_arrivals(1e6, run, topology, run.shares)
    assert [(v, c) for v, c, _ in by_k] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    times = [t for *_, t in by_k]
    assert times == sorted(times)
    assert by_rows[-1][2] >= 2e6 / (topology.bandwidth_gbs * 1e3)


def test_draining_over_pcie_hides_the_gemm_or_the_copies() -> None:
    """Over the slow link the copies remain, and what the first chunk and the last one cost."""
    pcie, kernel = Topology.of("h200", "pcie", 8), KernelConfig(128, 192, 64, 2, 1)
    problem = Problem(Signature.of("gemm_rs"), 8192, 12288, 6144, 8)

    def of(groups, chunks, transport=Transport.COPY_ENGINE_DRAIN, panel=0):
        return predict(problem, pcie, kernel, RunConfig(groups, panel, chunks=chunks,
                                                        transport=transport))  # fmt: skip

    drained = of((1,) * 8, 2)
    assert drained.comm_us < drained.time_us < 1.1 * drained.comm_us
    assert drained.time_us < of((1,) * 8, 1, Transport.PEER_STORE).time_us
    # All slabs in one group with narrow panels are whole only when the GEMM ends.
    late = of((8,), 2, panel=1)
    assert late.time_us > drained.time_us + 0.8 * drained.gemm_us
    # Each copy costs.
    assert of((1,) * 8, 8).comm_us == pytest.approx(drained.comm_us + 42 * COPY_PCIE_US)


def test_the_hosts_memory_costs_what_goes_there_and_comes_back() -> None:
    """A slab is staged before anyone has it; partial slabs are read back after they are stored."""
    pcie, host = (Topology.of("l20", link, 8) for link in ("pcie", "host"))
    run = RunConfig((8,), chunks=2)
    direct = copy_arrivals(25e6, run, pcie, run.shares)
    staged = copy_arrivals(25e6, run, host, run.shares)
    assert [t for *_, t in staged] == pytest.approx([t + 1000 for *_, t in direct])  # 25 GB/s
    rs = Problem(Signature.of("gemm_rs"), 4096, 12288, 6144, 8)
    run, slab_us = RunConfig((8,)), 4096 / 8 * 12288 * 2 / 25e3
    run = replace(run, transport=Transport.PEER_STORE)
    near, far = (predict(rs, link, PCIE_KERNEL, run) for link in (pcie, host))
    assert far.comm_us == pytest.approx(near.comm_us * 8 / 7)  # the own slab, too
    assert far.time_us > near.time_us + 7 * slab_us
    assert far.reduce_us > 8 * slab_us
    alone = Problem(Signature.of("gemm_rs"), 512, 12288, 6144, 1)
    one = replace(host, world=1)
    assert predict(alone, one, PCIE_KERNEL, RunConfig()).comm_us == 0
    # Nothing that would put a kernel's operand, or its output, behind the link.
    for op, refused, wanted in (
        ("ag_gemm", Transport.COPY_ENGINE_PUSH, {Transport.COPY_ENGINE_PULL, Transport.SM_COPY}),
        ("gemm_rs", Transport.COPY_ENGINE_DRAIN, {Transport.PEER_STORE}),
    ):
        problem, run = Problem(Signature.of(op), 4096, 6144, 6144, 8), RunConfig(transport=refused)
        assert {r.transport for r in run_space(problem, host, PCIE_KERNEL)} == wanted
        assert "over the host's memory" in str(why_illegal(problem, host, PCIE_KERNEL, run))
        assert why_illegal(problem, pcie, PCIE_KERNEL, run) is None


def test_a_ring_crosses_the_sockets_link_once() -> None:
    """Pulled, sixteen slabs cross it each way; forwarded, each rank's own link is the bound."""
    one, two = (Topology.of("l20", "pcie", 8, islands) for islands in (1, 2))
    assert crossing(one) == 1
    assert crossing(two) == pytest.approx((16 / 40) / (7 / 25))
    pull, ring = RunConfig((8,)), RunConfig((8,), transport=Transport.COPY_ENGINE_RING)
    pulled = copy_arrivals(25e6, pull, two, pull.shares)
    ringed = copy_arrivals(25e6, ring, two, ring.shares)
    assert [v for v, *_ in ringed] == [v for v, *_ in pulled]
    assert pulled[-1][2] > 1.4 * ringed[-1][2]
    alone = copy_arrivals(25e6, pull, one, pull.shares)
    assert ringed[-1][2] == pytest.approx(alone[-1][2] + 6 * two.latency_us)
    # Few sockets' GPUs are no faster than their link; many small slabs are not slower than one.
    assert crossing(Topology.of("l20", "pcie", 2, 2)) == 1
    best = min(
        run_space(Problem(Signature.of("ag_gemm"), 8192, 512, 12288, 8), two, PCIE_KERNEL),
        key=lambda run: (
            predict(
                Problem(Signature.of("ag_gemm"), 8192, 512, 12288, 8), two, PCIE_KERNEL, run
            ).time_us
        ),
    )
    assert best.transport is Transport.COPY_ENGINE_RING


def test_k_chunks_cut_the_first_remote_group_and_double() -> None:
    topology = replace(H100, world=5)
    run = RunConfig((1, 2, 2), chunk_axis=ChunkAxis.K, chunks=3)
    assert run.shares == (0.25, 0.25, 0.5)
    arrivals = copy_arrivals(1e6, run, topology, run.shares)
    assert [(v, c) for v, c, _ in arrivals] == [
        (1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2), (3, 0), (4, 0),
    ]  # fmt: skip
    took = [b - a for a, b in pairwise([topology.latency_us, *(t for *_, t in arrivals)])]
    each = 1e6 / (topology.bandwidth_gbs * 1e3)
    for time_us, share in zip(took, [0.25] * 4 + [0.5] * 2 + [1.0] * 2, strict=True):
        assert time_us == pytest.approx(each * share + COPY_US)


def test_one_rank_communicates_nothing() -> None:
    alone = replace(H100, world=1)
    for op in Op:
        problem = Problem(Signature.of(op), 1024, 1024, 1024, 1)
        assert predict(problem, alone, KERNELS[0], RunConfig()).comm_us == 0
        assert predict_baseline(problem, alone).comm_us == 0
    assert nccl_us(1e6, alone) == 0


def test_few_tokens_are_compared_with_a_one_shot_all_reduce() -> None:
    """What servers run for them; of many, or where no server has it, with NCCL's collective."""

    def baseline(op: str, m: int, topology: Topology = H100) -> Prediction:
        problem = Problem(Signature.of(op), m, 8192, 3584, topology.world)
        return predict_baseline(problem, topology)

    for op in ("gemm_ar", "gemm_rs"):
        decode = baseline(op, 16)
        assert decode.baseline is Baseline.ONE_SHOT
        # 6 us and seven peers' 16 x 8192 bf16 at 396 GB/s.
        assert decode.comm_us == pytest.approx(6 + 7 * 16 * 8192 * 2 / 396e3)
        assert decode.time_us == pytest.approx(decode.gemm_us + decode.comm_us)
        assert baseline(op, 4096).baseline is Baseline.NCCL
        comms = [baseline(op, m).comm_us for m in (8, 16, 64, 256, 512, 1024, 4096)]
        assert comms == sorted(comms)
    for op in ("ag_gemm", "gemm_a2a", "a2a_gemm"):
        assert baseline(op, 16).baseline is Baseline.NCCL
    for elsewhere in (
        Topology.of("h100-pcie", "pcie", 8),
        Topology.of("h100-sxm", "nvlink", 16),
        replace(H100, world=12),
    ):
        assert baseline("gemm_ar", 48, elsewhere).baseline is Baseline.NCCL
    fused = predict(
        Problem(Signature.of("gemm_rs"), 1024, 8192, 3584, 8), H100, KERNELS[0], RunConfig()
    )
    assert fused.baseline is None


def test_wrong_requests_are_refused() -> None:
    empty = Problem(Signature.of("ag_gemm"), 0, 1024, 1024, 8)
    with pytest.raises(UsageError, match="m=0"):
        predict(empty, H100, KERNELS[0], RunConfig())
    with pytest.raises(UsageError, match="tp=4"):
        predict_baseline(Problem(Signature.of("ag_gemm"), 64, 1024, 1024, 4), H100)


def test_every_preset_has_a_baseline() -> None:
    for gpu in GPUS.values():
        link = "nvlink" if gpu.nvlink_gbs else "pcie"
        topology = Topology.of(gpu, link, 4)
        p = predict_baseline(Problem(Signature.of("gemm_rs"), 4096, 4096, 4096, 4), topology)
        rate = 2 * 4096**3 / (p.gemm_us * 1e-6) / 1e12
        assert 0.3 * gpu.tflops < rate < gpu.tflops, gpu.name


def test_a_prediction_takes_few_calls() -> None:
    """A search predicts tens of thousands; a call of Python's takes about 0.3 us (70 us in all)."""
    problem = Problem(Signature.of("ag_gemm"), 4096, 6144, 12288, 8)
    pairs = [
        (kernel, run)
        for kernel in KERNELS[:5]
        for run in islice(run_space(problem, H100, kernel), 50)
    ]
    calls = 0

    def count(frame: object, event: str, what: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for kernel, run in pairs:
            predict(problem, H100, kernel, run)
    finally:
        sys.setprofile(None)
    assert calls / len(pairs) < 300
