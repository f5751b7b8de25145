"""Records timed again, by an evaluator that stands for a GPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.errors import UsageError
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Baseline, Environment, Provenance, Record
from fluxgen.core.topology import Topology
from fluxgen.tune.evaluators import Evaluator, Measurement
from fluxgen.tune.retime import TOLERANCE, retime, sample

TOPOLOGY = Topology.of("h200", "nvlink", 8)
KERNEL = KernelConfig(128, 192, 64, 2, 1)
TRIALS = sorted((Path(__file__).parents[2] / "bench/data").glob("h200_nvlink_tp*.jsonl"))
"""``_winners``: of a run of which only the records were kept."""


def record(m, fused=True):
    problem = Problem(Signature.of("ag_gemm"), m, 6144, 12288, 8)
    kernel, run = (KERNEL, RunConfig((8,))) if fused else (None, None)
    environment = Environment("h200", 132, "0.1.0", "test")
    return Record(problem, TOPOLOGY.key, kernel, run, 80.0, 100.0, Provenance.EMULATED, environment)


class Device(Evaluator):
    """As slow as it is told, by m."""

    kind, provenance = "test", Provenance.EMULATED

    def __init__(self, **times):
        self.times, self.asked = times, []

    def method(self, topology):
        return "test"

    def baseline(self, problem, topology):
        return Baseline.COPIES

    def measure(self, case):
        problem, kernel, run = case.problem, case.kernel, case.run
        self.asked.append((problem.m, kernel, run))
        time_us = self.times.get(f"m{problem.m}", 80.0)
        if time_us is None:
            return Measurement.failure(self.provenance, "wrong result: rank 3")
        return Measurement(time_us, 100.0, self.provenance)


def test_a_sample_is_of_fused_records_from_end_to_end():
    records = [record(m * 512, fused=m % 3 > 0) for m in range(1, 31)]
    chosen = sample(records, 5)
    assert len(chosen) == 5
    assert all(r.kernel is not None for r in chosen)
    assert chosen[0].problem.m < 1025
    assert chosen[-1].problem.m > 20 * 512
    assert len(sample(records, 100)) == 20
    assert sample([record(512, fused=False)], 3) == []
    with pytest.raises(UsageError, match="sample"):
        sample(records, 0)


def test_what_no_longer_holds_is_named():
    device = Device(m1024=100 * (1 + TOLERANCE) + 1, m2048=None, m4096=100.5)
    found = retime([record(m) for m in (512, 1024, 2048, 4096)], TOPOLOGY, device)
    assert [f.reason is None for f in found] == [True, False, False, True]
    assert "slower than the unfused path: 103.0 us, unfused 100.0" in found[1].reason
    assert found[2].reason == "wrong result: rank 3"
    assert math.isinf(found[2].time_us)
    assert device.asked[0] == (512, KERNEL, RunConfig((8,)))


def test_a_kernel_that_cannot_be_had_is_not_timed():
    class Nothing:
        def expect(self, wanted):
            self.wanted = list(wanted)

        def wait(self, signature, kernel):
            return "does not compile: registers spill"

    device, nothing = Device(), Nothing()
    (found,) = retime([record(512)], TOPOLOGY, device, nothing)
    assert found.reason == "does not compile: registers spill"
    assert device.asked == []
    assert nothing.wanted == [(Signature.of("ag_gemm"), KERNEL)]


@pytest.mark.parametrize("tp, least", [(2, 20), (4, 20), (8, 110)])
def test_the_emulated_records_of_the_packs_are_recorded_trials(tp, least):
    """What ships as emulated was measured: its candidate is among the trials, at its time."""
    from fluxgen.core.settings import data_dir
    from fluxgen.db.packs import pack_files, read_pack
    from fluxgen.tune import ReplayEvaluator

    topology = Topology.of("h200", "nvlink", tp)
    replays = [ReplayEvaluator(path) for path in TRIALS]
    assert all(replay.provenance is Provenance.EMULATED for replay in replays)
    emulated = [
        r
        for path in pack_files(data_dir("tuning_db"), topology)
        for r in read_pack(path)
        if r.provenance is Provenance.EMULATED
    ]
    assert len(emulated) >= least
    for r in emulated:
        answers = [(e.evaluate(r.problem, topology, r.kernel, r.run), e) for e in replays]
        found = [(answer, e) for answer, e in answers if answer.ok]
        assert found, (r.problem.key, [answer.reason for answer, _ in answers])
        assert r.environment.method in {e.method(topology) for _, e in found}
        # Some were timed in more than one run. A record's time is brought to its first baseline's
        # clock.
        ratios = [answer.time_us / answer.baseline_us for answer, _ in found]
        mine = r.time_us / r.baseline_us
        assert any(mine == pytest.approx(ratio, rel=0.005) for ratio in ratios), r.problem.key
