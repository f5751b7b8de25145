"""Candidates, kernel choice, the one decision, and evaluators: nothing here opens a study."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxgen.codegen.space import why_illegal
from fluxgen.core.config import KernelConfig, RunConfig, Transport
from fluxgen.core.errors import UsageError
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Provenance
from fluxgen.core.topology import GPUS, Topology
from fluxgen.machine.device import Device
from fluxgen.tune import PredictEvaluator, decide, make_evaluator, resolve
from fluxgen.tune.candidates import KNOBS, SM_COPY, Candidates
from fluxgen.tune.cover import Costs, choose_kernels
from fluxgen.tune.evaluators import choice
from fluxgen.tune.plan import GIVEN_UP, RANKED_RUNS, RUNS_PER_KERNEL, History, next_step, shortlist
from fluxgen.tune.seeds import heuristic_tiles, seed_kernels

TOPOLOGIES = {tp: Topology.of("h100-sxm", "nvlink", tp) for tp in (1, 2, 3, 5, 8)}

problems = st.builds(
    lambda op, tp, rows, n, k: Problem(Signature.of(op), tp * rows, n, k, tp),
    st.sampled_from(list(Op)),
    st.sampled_from(list(TOPOLOGIES)),
    st.sampled_from([1, 8, 63, 64, 128, 1000]),
    st.sampled_from([8, 64, 1000, 1007, 4096]),
    st.sampled_from([8, 64, 127, 1000, 4096]),
)


@settings(max_examples=40, deadline=None)
@given(problems, st.randoms(use_true_random=False))
def test_whatever_is_sampled_decodes_to_a_legal_configuration(
    problem: Problem, draw: random.Random
) -> None:
    topology = TOPOLOGIES[problem.tp]
    candidates = Candidates(problem, topology)
    if not candidates.kernels:
        assert candidates.version == "none"
        assert candidates.prior == {}
        return
    for _ in range(10):
        params = {knob: draw.choice(candidates.choices[knob]) for knob in KNOBS}
        params["kernel"] = draw.choice(list(candidates.by_name))
        kernel, run = candidates.decode(params)
        assert why_illegal(problem, topology, kernel, run) is None
        # What was decoded is its own nearest: studies hold canonical parameters.
        encoded = candidates.encode(kernel, run)
        assert encoded is not None
        assert candidates.decode(encoded) == (kernel, run)


SHORT = {op: Problem(Signature.of(op), 512, *nk, 8) for op, nk in (
    ("ag_gemm", (6144, 12288)), ("gemm_rs", (12288, 6144)),
)}  # fmt: skip
"""Slabs of 64 rows."""


@pytest.mark.parametrize("op", list(SHORT))
def test_tiles_taller_than_a_slab_are_candidates_with_a_span_only(op: str) -> None:
    candidates = Candidates(SHORT[op], TOPOLOGIES[8])
    assert set(candidates.choices["span"]) >= {1, 2}
    tall = KernelConfig(128, 128, 64, 2, 1)
    assert candidates.spans(tall) == (2,)
    assert candidates.spans(KernelConfig(64, 128, 64)) == (1,)
    assert {run.span for run in candidates.ranked_runs(tall)} == {2}
    # Whatever span and groups are asked of it.
    for span in candidates.choices["span"]:
        for groups in candidates.choices["groups"]:
            params = {"kernel": tall.name, "groups": groups, "panel": 4, "cut": "m1", "span": span}
            params["split"] = 1
            kernel, run = candidates.decode(params)
            assert (kernel, run.span) == (tall, 2)
            assert why_illegal(candidates.problem, TOPOLOGIES[8], kernel, run) is None


def test_the_best_kernel_for_short_slabs_has_a_span_and_is_encoded_with_it() -> None:
    """Measured: 128x192 tiles over two slabs take 0.99 of cuBLAS, 64x192 tiles 1.14."""
    candidates = Candidates(SHORT["ag_gemm"], TOPOLOGIES[8])
    kernel = next(iter(candidates.prior))
    run = candidates.ranked_runs(kernel)[0]
    assert kernel.tile_m == 64 * run.span > 64
    params = candidates.encode(kernel, run)
    assert params is not None
    assert params["span"] == run.span
    assert candidates.decode(params) == (kernel, run)
    assert candidates.encode(kernel, replace(run, span=1)) is None


@pytest.mark.slow
def test_the_prior_is_sorted_and_its_best_is_the_best_of_all() -> None:
    problem = Problem(Signature.of("ag_gemm"), 1024, 768, 4096, 8)
    candidates = Candidates(problem, TOPOLOGIES[8])
    times = list(candidates.prior.values())
    assert times == sorted(times)
    evaluator = PredictEvaluator()
    best = min(
        evaluator.evaluate(problem, TOPOLOGIES[8], kernel, run).time_us
        for kernel in candidates.kernels
        for run in candidates.ranked_runs(kernel)
    )
    assert times[0] <= best * 1.02


@pytest.mark.parametrize(
    ("m", "copies"), [(64, Transport.SM_COPY), (4096, Transport.COPY_ENGINE_PUSH)]
)
def test_the_transport_is_searched_with_the_rest(m: int, copies: Transport) -> None:
    """Few rows: copied by SMs before the GEMM; many: chunk by chunk beside it."""
    topology = Topology.of("h200", "nvlink", 8)
    candidates = Candidates(Problem(Signature.of("ag_gemm"), m, 768, 4096, 8), topology)
    kernel = next(iter(candidates.prior))
    best = candidates.ranked_runs(kernel)[0]
    assert best.transport is copies
    both = {run.transport for run in candidates.ranked_runs(kernel)}
    assert both == {Transport.SM_COPY, Transport.COPY_ENGINE_PUSH}
    for run in candidates.ranked_runs(kernel):
        assert candidates.decode(candidates.encode(kernel, run)) == (kernel, run)
    # With another grouping than it can have: the copy has none.
    params = {**candidates.encode(kernel, best), "cut": SM_COPY, "groups": "1-7", "panel": 16}
    decoded = candidates.decode(params)[1]
    assert (decoded.transport, decoded.chunks, decoded.groups) == (Transport.SM_COPY, 1, (8,))
    scatter = Candidates(Problem(Signature.of("gemm_rs"), m, 4096, 1792, 8), topology)
    assert SM_COPY not in scatter.choices["cut"]


def test_runs_are_searched_before_another_kernel_is_built() -> None:
    problem = Problem(Signature.of("ag_gemm"), 4096, 4096, 4096, 8)
    candidates = Candidates(problem, TOPOLOGIES[8])
    kernels = shortlist(candidates, list(candidates.prior), 1 + 3 * RUNS_PER_KERNEL)
    assert len(kernels) == 3
    history, seen = History(), []
    for _ in range(3 * RUNS_PER_KERNEL + 5):
        kernel, run, exactly = next_step(candidates, history, kernels)
        assert exactly == (history.used[kernel] < RANKED_RUNS)
        history.times[kernel, run] = 100.0 - kernels.index(kernel)
        history.used[kernel] += 1
        seen.append(kernel)
    expected = [kernel for kernel in kernels for _ in range(RUNS_PER_KERNEL)]
    assert seen[: len(expected)] == expected
    assert set(seen[len(expected) :]) == {kernels[2]}  # the fastest gets the rest
    history.dead.add(kernels[2])
    assert next_step(candidates, history, kernels)[0] == kernels[1]
    history.dead.update(kernels)
    assert next_step(candidates, history, kernels) is None


def test_a_kernel_far_behind_is_given_up_and_its_trials_go_to_others() -> None:
    problem = Problem(Signature.of("ag_gemm"), 4096, 4096, 4096, 8)
    candidates = Candidates(problem, TOPOLOGIES[8])
    kernels = list(candidates.prior)[:3]
    history, asked = History(), Counter()
    for _ in range(20):
        kernel, run, _ = next_step(candidates, history, kernels)
        asked[kernel] += 1
        history.used[kernel] += 1
        slow = {kernels[0]: 100.0, kernels[1]: 100.0 * GIVEN_UP + 1, kernels[2]: 101.0}
        history.times[kernel, run] = slow[kernel]
    assert asked[kernels[1]] == 1
    assert asked[kernels[2]] == RUNS_PER_KERNEL
    assert asked[kernels[0]] == 20 - 1 - RUNS_PER_KERNEL


A, B, C, D = (KernelConfig(128, n, 64) for n in (64, 128, 192, 256))


def test_cover_prefers_a_shared_kernel_when_few_are_allowed() -> None:
    costs = [
        Costs(100.0, 1, {A: 50.0, C: 55.0}),
        Costs(100.0, 1, {B: 50.0, C: 55.0}),
    ]
    assert choose_kernels(costs, 1) == (C,)
    assert set(choose_kernels(costs, 3)) == {A, B, C}
    assert choose_kernels(costs, 0) == ()


def test_cover_counts_occurrences_and_serves_short_problems_with_what_is_left() -> None:
    costs = [Costs(1e6, 100, {A: 9e5}), Costs(10.0, 1, {B: 5.0}), Costs(10.0, 1, {D: 20.0})]
    assert choose_kernels(costs, 1) == (A,)
    assert choose_kernels(costs, 3) == (A, B)  # D is slower than the baseline
    assert choose_kernels(costs, 3, preferred=[B]) == (B, A)
    heavy = [Costs(100.0, 1, {A: 50.0}), Costs(100.0, 10, {B: 90.0})]
    assert choose_kernels(heavy, 1) == (B,)


def test_ranks_with_their_own_noise_reach_one_decision() -> None:
    """J01: each rank's own minimum differs; the group's slowest-rank minimum does not."""
    noise = random.Random(7)
    candidates = [None, *((k, RunConfig(panel=p)) for k in (A, B, C, D) for p in (0, 2, 4))]
    own = set()
    for _ in range(20):
        ranks = [{c: 100 + noise.uniform(0, 5) for c in candidates} for _ in range(4)]
        own.update(min(times, key=times.__getitem__) for times in ranks)
        shuffled = [dict(noise.sample(list(t.items()), len(t))) for t in ranks]
        noise.shuffle(shuffled)
        decision = decide(ranks)
        assert decide(shuffled) == decision
        assert decision[1] == max(times[decision[0]] for times in ranks)
    assert len(own) > 1


def test_ties_go_to_the_baseline_then_to_the_smaller_configuration() -> None:
    first, second = (A, RunConfig()), (B, RunConfig())
    assert decide([{second: 5.0, first: 5.0, None: 5.0}]) == (None, 5.0)
    assert decide([{second: 5.0, first: 5.0}]) == (first, 5.0)


def test_a_candidate_that_failed_on_one_rank_is_out() -> None:
    fast = (A, RunConfig())
    assert decide([{None: 9.0, fast: 1.0}, {None: 9.0, fast: math.inf}]) == (None, 9.0)
    assert decide([{None: 9.0, fast: 1.0}, {None: 9.0, fast: math.nan}]) == (None, 9.0)
    assert decide([{None: 9.0, fast: 1.0}, {None: 8.0}]) == (None, 9.0)
    for bad in ([], [{fast: math.inf}], [{fast: 1.0}, {None: 1.0}]):
        with pytest.raises(UsageError, match="ranks"):
            decide(bad)


def test_evaluators_by_name() -> None:
    topology = TOPOLOGIES[8]
    with mock.patch.object(choice, "devices", lambda: ()):
        assert isinstance(make_evaluator("auto", topology), PredictEvaluator)
        with pytest.raises(UsageError, match=r"expected a GPU .* in this machine.*predict"):
            make_evaluator("device", topology)
        over_pcie = Topology.of("h100-sxm", "pcie", 8)
        assert resolve("auto", over_pcie) == "predict"
    with pytest.raises(UsageError, match="predict, device, auto"):
        make_evaluator("magic", topology)


def test_auto_measures_where_the_gpu_is() -> None:
    topology = TOPOLOGIES[8]
    here = Device("here", topology.gpu, "13.0")
    other = Device("other", GPUS["a100-sxm-80gb"], "13.0")
    for found, expected in [((here,), "device"), ((other, here), "predict"), ((), "predict")]:
        with (
            mock.patch.object(choice, "devices", lambda found=found: found),
            mock.patch.object(choice, "torch_has_cuda", lambda: True),
        ):
            assert resolve("auto", topology) == expected
    with mock.patch.object(choice, "devices", lambda: (here,)):  # Torch's own word
        torch = pytest.importorskip("torch")
        expected = "device" if torch.version.cuda else "predict"
        assert resolve("auto", topology) == expected
    assert resolve("replay:x", topology) == "replay:x"
    sockets = Topology.of(topology.gpu, "pcie", 8, 2)
    with (
        mock.patch.object(choice, "devices", lambda: (here,)),
        mock.patch.object(choice, "torch_has_cuda", lambda: True),
    ):
        assert resolve("auto", Topology.of(topology.gpu, "pcie", 8)) == "device"
        assert resolve("auto", sockets) == "predict"
        with pytest.raises(UsageError, match="socket to"):
            make_evaluator("device", sockets)


def test_the_predicted_baseline_and_an_illegal_candidate() -> None:
    evaluator, topology = PredictEvaluator(), TOPOLOGIES[8]
    problem = Problem(Signature.of("ag_gemm"), 1024, 768, 4096, 8)
    base = evaluator.evaluate(problem, topology, None, None)
    assert base.ok
    assert base.time_us == base.baseline_us > 0
    assert base.provenance is Provenance.PREDICTED
    bad = evaluator.evaluate(problem, topology, A, RunConfig(groups=(3, 3)))
    assert not bad.ok
    assert "groups" in bad.reason
    assert math.isinf(bad.time_us)
    assert "GB/s" in evaluator.method(topology)


FAKE_HEURISTICS = """
import os, sys
class _Names:
    def __init__(self, **names): self.__dict__.update(names)
NvMatmulHeuristicsNvidiaGpu = _Names(H100_SXM=3)
NvMatmulHeuristicsTarget = _Names(CUTLASS3=4)
NvMatmulHeuristicsFlags = _Names(PERF_MODEL_BASED_AUTO_TUNING=8)
NvMatmulHeuristicsMatmulLayout = _Names(NT_ROW_MAJOR=1)
class NvMatmulHeuristicsInterface:
    def __init__(self, target, precision, flags):
        if precision != "HSH" or "CRASH" in os.environ: os.kill(os.getpid(), 11)
        self.loaded = False
    def createHardwareDescriptor(self): return "hw"
    def setHardwarePredefinedGpu(self, hw, gpu): assert gpu == 3
    def loadInternalDiscoverySet(self, layout, hw): self.loaded = True; return True
    def makeNvMatmulHeuristicsProblem(self, *shape): return shape
    def get(self, shape, count, hw):
        assert self.loaded and shape == (128, 768, 4096, 1, 8), shape
        tile = _Names(cta_tile_m=128, cta_tile_n=64, cta_tile_k=64, cluster_m=1, cluster_n=1)
        return [{"kernel": tile, "runtime": 1.0}]
    def __del__(self): os.kill(os.getpid(), 11)
"""


def test_seeds_need_no_package_and_survive_one_that_crashes(monkeypatch, tmp_path) -> None:
    """The real package ends in a segmentation fault when it is cleaned up, or asked for bf16."""
    problem, topology = Problem(Signature.of("ag_gemm"), 1024, 768, 4096, 8), TOPOLOGIES[8]
    assert heuristic_tiles([problem], topology) == {}
    (tmp_path / "nvMatmulHeuristics.py").write_text(FAKE_HEURISTICS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    tiles = heuristic_tiles([problem], topology)
    assert tiles == {problem: [(128, 64, 64, 1, 1)]}
    kernels = Candidates(problem, topology).kernels
    assert A in seed_kernels(tiles[problem], kernels)
    monkeypatch.setenv("CRASH", "1")
    assert heuristic_tiles([problem], topology) == {}
    assert heuristic_tiles([problem], Topology.of("a100-sxm-80gb", "nvlink", 8)) == {}
