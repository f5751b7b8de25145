"""Whole tuning runs with made-up and predicted times."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from tuning_helpers import OTHER, PROBLEM, TOPOLOGY, Fake

from fluxgen import __version__
from fluxgen.core.errors import UsageError
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Provenance
from fluxgen.core.topology import Topology
from fluxgen.db.database import Database
from fluxgen.predict import predict_baseline
from fluxgen.tune import Measurement, PredictEvaluator, tune
from fluxgen.tune import search as search_module
from fluxgen.tune.candidates import Candidates


@pytest.fixture(params=["memory", "sqlite", "journal"])
def storage(request, tmp_path) -> str:
    return {
        "memory": "memory",
        "sqlite": f"sqlite:///{tmp_path}/deep/er/studies.sqlite3",
        "journal": f"journal:{tmp_path}/deep/studies.journal",
    }[request.param]


def test_any_storage_gives_the_same_search(storage: str, tmp_path) -> None:
    fake, reference = Fake(), Fake()
    seen = []
    result = tune(
        [PROBLEM, OTHER], TOPOLOGY, evaluator=fake, trials=14, storage=storage,
        progress=lambda *args: seen.append(args),
    )  # fmt: skip
    same = tune([PROBLEM, OTHER], TOPOLOGY, evaluator=reference, trials=14, storage="memory")
    assert fake.calls == reference.calls
    assert [replace(r, created="") for r in result.records] == [
        replace(r, created="") for r in same.records
    ]
    assert result.evaluated == 28
    assert len(set(fake.calls)) == 28
    assert fake.asked[0] == fake.asked[14] == (None, None)
    assert [args[2] for args in seen] == [*range(1, 15)] * 2
    assert {args[1] for args in seen} == {2}
    assert seen[-1][3] <= 600
    assert seen[-1][4] == 1000.0
    if storage != "memory":
        again = Fake()
        resumed = tune([PROBLEM, OTHER], TOPOLOGY, evaluator=again, trials=14, storage=storage)
        assert again.calls == []
        assert resumed.evaluated == 0
        assert [r.run for r in resumed.records] == [r.run for r in result.records]
        more = Fake()
        tune([PROBLEM], TOPOLOGY, evaluator=more, trials=17, storage=storage)
        assert len(more.calls) == 3
        assert not set(more.calls) & set(fake.calls)


def test_the_seed_decides_the_sampled_trials() -> None:
    runs = []
    for seed in (1, 1, 2):
        fake = Fake()
        tune([PROBLEM], TOPOLOGY, evaluator=fake, trials=40, storage="memory", seed=seed)
        runs.append(fake.asked)
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_records_say_what_won_and_how_it_is_known() -> None:
    sunk = []
    result = tune(
        [PROBLEM], TOPOLOGY, evaluator=Fake(), trials=6, storage="memory", sink=sunk.append
    )
    (record,) = result.records
    assert sunk == [record]
    assert record.provenance is Provenance.EMULATED
    assert record.topology == TOPOLOGY.key
    assert record.baseline_us == 1000.0
    assert record.time_us <= 600
    assert record.environment.gpu == "h100-sxm"
    assert record.environment.sm_count == 132
    assert record.environment.fluxgen == __version__
    assert record.environment.method == "made up"
    assert record.created.endswith("Z")
    assert result.kernels == (record.kernel,)


def test_where_the_baseline_is_faster_the_record_says_baseline() -> None:
    """B07: the unfused path is candidate 0 and may win."""
    result = tune([PROBLEM], TOPOLOGY, evaluator=Fake(base=50.0), trials=6, storage="memory")
    (record,) = result.records
    assert record.is_baseline
    assert record.run is None
    assert record.time_us == record.baseline_us == 50.0
    assert result.kernels == ()


def test_a_narrow_predicted_win_is_no_win() -> None:
    class Guess(Fake):
        provenance = Provenance.PREDICTED

    def winner(evaluator: Fake):
        return tune([PROBLEM], TOPOLOGY, evaluator=evaluator, trials=8, storage="memory").records[0]

    best = winner(Fake()).time_us
    narrow, clear = 1.03 * best, 1.1 * best
    assert winner(Guess(base=narrow)).is_baseline
    assert winner(Guess(base=narrow)).time_us == narrow
    assert not winner(Guess(base=clear)).is_baseline
    assert not winner(Fake(base=narrow)).is_baseline  # a measured win is a win


def test_a_small_problem_is_predicted_to_stay_unfused() -> None:
    topology = Topology.of("h100-sxm", "nvlink", 8)
    small = Problem(Signature.of("ag_gemm"), 64, 6144, 12288, 8)
    (record,) = tune(
        [small], topology, evaluator=PredictEvaluator(), trials=3, storage="memory"
    ).records
    assert record.is_baseline
    assert record.baseline_us == pytest.approx(predict_baseline(small, topology).time_us)


def test_problems_without_work_are_dropped_with_a_message(caplog) -> None:
    """B03."""
    empty = replace(PROBLEM, m=0)
    with caplog.at_level(logging.WARNING, "fluxgen.tune"):
        result = tune([empty, PROBLEM], TOPOLOGY, evaluator=Fake(), trials=2, storage="memory")
    assert [r.problem for r in result.records] == [PROBLEM]
    assert result.dropped[0][0] == empty
    assert "m=0" in result.dropped[0][1]
    assert "m=0" in caplog.text


@pytest.mark.parametrize(
    ("problem", "topology"),
    [
        (replace(PROBLEM, n=1023), TOPOLOGY),  # TMA cannot take it
        (replace(PROBLEM, m=2047), TOPOLOGY),
        (PROBLEM, replace(TOPOLOGY, gpu=replace(TOPOLOGY.gpu, cc=100))),  # no kernels for it
    ],
)
def test_a_problem_no_kernel_can_take_gets_the_baseline(problem, topology) -> None:
    fake = Fake()
    result = tune([problem], topology, evaluator=fake, storage="memory")
    assert result.records[0].is_baseline
    assert fake.asked == [(None, None)]
    assert result.unfinished == ()


def test_duplicates_are_tuned_once() -> None:
    fake = Fake()
    result = tune([PROBLEM] * 3, TOPOLOGY, evaluator=fake, trials=2, storage="memory")
    assert len(result.records) == 1
    assert len(fake.calls) == 2


@pytest.mark.slow
def test_a_model_uses_no_more_kernels_than_allowed(tmp_path) -> None:
    topology = Topology.of("h100-sxm", "nvlink", 4)
    problems = [
        Problem(Signature.of(op), m, n, k, 4)
        for m in (256, 1024, 4096)
        for op, n, k in (("ag_gemm", 1536, 2048), ("gemm_rs", 2048, 1024))
    ]
    storage = f"sqlite:///{tmp_path}/s.sqlite3"
    totals = {}
    for limit in (24, 2, 1):
        result = tune(
            problems, topology, evaluator=PredictEvaluator(), trials=6, storage=storage,
            max_kernels=limit,
        )  # fmt: skip
        used = {r.kernel for r in result.records if r.kernel}
        assert set(result.kernels) == used
        assert len(used) <= limit
        assert all(r.time_us <= r.baseline_us for r in result.records)
        totals[limit] = sum(r.time_us for r in result.records)
    assert totals[24] <= totals[2] <= totals[1]


def test_failures_are_kept_and_not_proposed_again(tmp_path) -> None:
    db = Database(tmp_path / "db.sqlite3")
    storage = f"sqlite:///{tmp_path}/s.sqlite3"
    bad = Measurement.failure(Provenance.EMULATED, "wrong result")

    def even_panels(kernel, run):
        return bad if run.panel else None

    first = Fake(fail=even_panels)
    result = tune([PROBLEM], TOPOLOGY, evaluator=first, trials=14, storage=storage, db=db)
    failed = {c for c in first.asked if c[0] and c[1].panel}
    assert failed
    assert {(f.kernel, f.run) for f in db.failures(PROBLEM, TOPOLOGY)} == failed
    assert {f.reason for f in db.failures()} == {"wrong result"}
    assert not result.records[0].run.panel
    again = Fake(fail=even_panels)
    tune([PROBLEM], TOPOLOGY, evaluator=again, trials=20, storage=storage, db=db)
    assert len(again.calls) == 6
    assert not failed & set(again.asked)
    # A new study learns of them from the database.
    fresh = Fake(fail=even_panels)
    tune([PROBLEM], TOPOLOGY, evaluator=fresh, trials=14, storage="memory", db=db)
    assert not failed & set(fresh.asked)


def test_a_kernel_that_does_not_build_is_tried_once(tmp_path) -> None:
    db = Database(tmp_path / "db.sqlite3")
    dead = []

    def build(kernel, run):
        if not dead or kernel == dead[0]:
            dead.append(kernel)
            return Measurement.failure(Provenance.EMULATED, "spills", kernel_failed=True)
        return None

    fake = Fake(fail=build)
    tune([PROBLEM], TOPOLOGY, evaluator=fake, trials=20, storage="memory", db=db)
    assert len(dead) == 1
    (failure,) = db.failures(PROBLEM, TOPOLOGY)
    assert failure.kernel == dead[0]
    assert failure.run is None


def test_an_evaluator_that_raises_fails_the_candidate_only() -> None:
    def explode(kernel, run):
        raise RuntimeError("no such launch")

    result = tune([PROBLEM], TOPOLOGY, evaluator=Fake(fail=explode), trials=5, storage="memory")
    assert result.records[0].is_baseline
    assert result.evaluated == 5


def test_without_a_baseline_a_problem_is_reported_not_guessed() -> None:
    class NoBaseline(Fake):
        def measure(self, case):
            kernel = case.kernel
            if kernel is None:
                return Measurement.failure(self.provenance, "out of memory")
            return super().measure(case)

    result = tune([PROBLEM], TOPOLOGY, evaluator=NoBaseline(), trials=5, storage="memory")
    assert result.records == ()
    assert result.failed == ((PROBLEM, "out of memory"),)
    assert result.evaluated == 1


def test_a_known_winner_of_the_family_is_tried_first(tmp_path) -> None:
    db = Database(tmp_path / "db.sqlite3")
    tune([PROBLEM], TOPOLOGY, evaluator=Fake(), trials=12, storage="memory", db=db, sink=db.put)
    winner = db.get(PROBLEM, TOPOLOGY)
    sibling, fake = replace(PROBLEM, m=4096), Fake()
    tune([sibling], TOPOLOGY, evaluator=fake, trials=4, storage="memory", db=db)
    assert fake.asked[1] == (winner.kernel, winner.run)


def test_known_records_of_a_pack_are_tried_first_the_nearest_m_first(tmp_path) -> None:
    found = tune([PROBLEM], TOPOLOGY, evaluator=Fake(), trials=12, storage="memory")
    (winner,) = found.records
    assert winner.kernel is not None
    other = next(c for c in Candidates(PROBLEM, TOPOLOGY).kernels if c != winner.kernel)
    run = Candidates(PROBLEM, TOPOLOGY).ranked_runs(other)[0]
    far = replace(winner, problem=replace(PROBLEM, m=16384), kernel=other, run=run)
    stranger = replace(winner, topology="a100-sxm-80gb-nvlink-tp2")
    fake = Fake()
    known = (far, stranger, winner)
    tune([PROBLEM], TOPOLOGY, evaluator=fake, trials=4, storage="memory", known=known)
    assert fake.asked[1:3] == [(winner.kernel, winner.run), (other, run)]


def test_drift_of_the_baseline_is_divided_out() -> None:
    class Drifting(Fake):
        """All gets twice as slow after the baseline was taken: the clock fell."""

        def measure(self, case):
            kernel = case.kernel
            m = super().measure(case)
            return m if kernel is None else replace(m, time_us=1800.0, baseline_us=2000.0)

    (record,) = tune([PROBLEM], TOPOLOGY, evaluator=Drifting(), trials=3, storage="memory").records
    assert record.kernel is not None
    assert record.time_us == pytest.approx(900.0)
    assert record.baseline_us == 1000.0


def test_ctrl_c_keeps_what_is_finished_and_resumes(tmp_path) -> None:
    storage = f"sqlite:///{tmp_path}/s.sqlite3"
    whole, first, second = Fake(), Fake(stop_at=8), Fake()
    sunk = []
    expected = tune([PROBLEM, OTHER], TOPOLOGY, evaluator=whole, trials=12, storage="memory")
    result = tune(
        [PROBLEM, OTHER], TOPOLOGY, evaluator=first, trials=12, storage=storage, sink=sunk.append
    )
    assert result.interrupted
    assert result.unfinished == (PROBLEM, OTHER)
    assert [r.problem for r in sunk] == [PROBLEM]  # seven candidates of it are known
    resumed = tune([PROBLEM, OTHER], TOPOLOGY, evaluator=second, trials=12, storage=storage)
    assert not resumed.interrupted
    assert resumed.unfinished == ()
    assert first.calls + second.calls[1:] == whole.calls  # the interrupted one was repeated
    assert second.calls[0] == first.calls[-1]
    assert [r.run for r in resumed.records] == [r.run for r in expected.records]


def test_a_timeout_ends_the_search_and_says_what_is_unfinished() -> None:
    fake = Fake(sleep=0.05)
    result = tune(
        [PROBLEM, OTHER], TOPOLOGY, evaluator=fake, trials=100, storage="memory", timeout=1.0
    )
    assert result.unfinished == (PROBLEM, OTHER)[-len(result.unfinished) :]
    assert result.unfinished
    assert len(fake.calls) < 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trials": 0}, "trials"),
        ({"max_kernels": 0}, "max_kernels"),
        ({"seed": -1}, "seed"),
        ({"timeout": 0}, "timeout"),
        ({"counts": {PROBLEM: -1}}, "count"),
        ({"storage": "nonsense"}, "storage"),
        ({"storage": "sqlite:////proc/nowhere/x.sqlite3"}, "storage"),
    ],
)
def test_nonsense_is_refused(arguments, message) -> None:
    with pytest.raises(UsageError, match=message):
        tune([PROBLEM], TOPOLOGY, **{"evaluator": Fake(), "storage": "memory", **arguments})


def test_a_problem_of_another_world_is_refused() -> None:
    with pytest.raises(UsageError, match="tp"):
        tune([replace(PROBLEM, tp=4)], TOPOLOGY, evaluator=Fake(), storage="memory")


def test_the_default_storage_is_sqlite_under_the_home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLUXGEN_HOME", str(tmp_path / "home"))
    tune([PROBLEM], TOPOLOGY, evaluator=Fake(), trials=1)
    assert (tmp_path / "home" / "studies.sqlite3").is_file()
    assert search_module.default_storage().startswith("sqlite:///")
