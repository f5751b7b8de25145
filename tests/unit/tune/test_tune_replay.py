"""Trials are recorded as they are made, and replayed: the same search on the same figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from tuning_helpers import OTHER, PROBLEM, TOPOLOGY, Fake

from fluxgen.core.errors import UsageError
from fluxgen.core.record import Baseline
from fluxgen.tune import Measurement, make_evaluator, tune
from fluxgen.tune.evaluators.replay import Recorder, ReplayEvaluator

HERE = Path(__file__).parent


def search(evaluator, problems=(PROBLEM,), trials=8):
    return tune(problems, TOPOLOGY, evaluator=evaluator, trials=trials, storage="memory")


def test_a_replayed_search_makes_the_same_trials_and_finds_the_same(tmp_path):
    def fail(kernel, run):
        if run.chunks == 8:
            return Measurement.failure(Fake.provenance, "it hung")
        return None

    path = tmp_path / "trials.jsonl"
    live = Fake(fail=fail)
    first = search(Recorder(live, path), (PROBLEM, OTHER))
    replay = make_evaluator(f"replay:{path}", TOPOLOGY)
    assert replay.provenance is Fake.provenance
    assert replay.method(TOPOLOGY) == "made up"
    assert replay.trials == len({json.dumps(json.loads(t)) for t in path.read_text().splitlines()})
    asked = []

    class Watching:
        # As the live one: a study's draws are seeded with its name, which holds the kind.
        kind, provenance, method = Fake.kind, replay.provenance, replay.method
        baseline = staticmethod(replay.baseline)

        def measure(self, case):
            problem, kernel, run = case.problem, case.kernel, case.run
            asked.append((problem, kernel, run))
            return replay.measure(case)

    second = search(Watching(), (PROBLEM, OTHER))
    assert asked == live.calls
    assert {problem for problem, *_ in asked} == {PROBLEM, OTHER}
    assert [(r.kernel, r.run, r.time_us, r.baseline) for r in first.records] == [
        (r.kernel, r.run, r.time_us, r.baseline) for r in second.records
    ]
    assert {r.baseline for r in second.records} == {Baseline.COPIES}


def test_an_older_recording_states_no_baseline(tmp_path):
    path = tmp_path / "trials.jsonl"
    search(Recorder(Fake(), path), trials=3)
    trials = [json.loads(line) for line in path.read_text().splitlines()]
    for trial in trials:
        assert trial.pop("baseline") == "copies"
    path.write_text("\n".join(map(json.dumps, trials)))
    replay = make_evaluator(f"replay:{path}", TOPOLOGY)
    assert replay.baseline(PROBLEM, TOPOLOGY) is None
    assert search(replay, trials=3).records[0].baseline is None


def test_what_was_not_recorded_fails(tmp_path):
    path = tmp_path / "trials.jsonl"
    search(Recorder(Fake(), path), trials=3)
    replay = ReplayEvaluator(path)
    found = replay.evaluate(OTHER, TOPOLOGY, None, None)
    assert not found.ok
    assert found.reason == "not among the recorded trials"


def test_a_failure_is_replayed_with_its_reason(tmp_path):
    path = tmp_path / "trials.jsonl"

    def fail(kernel, run):
        return Measurement.failure(Fake.provenance, "did not build", kernel_failed=True)

    search(Recorder(Fake(fail=fail), path), trials=3)
    trial = next(t for t in map(json.loads, path.read_text().splitlines()) if t["kernel"])
    assert trial["time_us"] is None
    failed = [
        m for m in ReplayEvaluator(path)._found.values() if not m.ok
    ]  # what evaluate() looks in
    assert failed
    assert all((m.reason, m.kernel_failed) == ("did not build", True) for m in failed)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "expected trials of one provenance; found none"),
        (b"{}\n", ":1: expected a recorded trial"),
        (b"\xff\n", ":1: expected a recorded trial"),
        (b"[]\n", ":1: expected a recorded trial"),
    ],
)
def test_a_file_that_is_no_recording_says_so(tmp_path, content, words):
    path = tmp_path / "trials.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=words):
        make_evaluator(f"replay:{path}", TOPOLOGY)
    with pytest.raises(UsageError, match="cannot read"):
        make_evaluator(f"replay:{tmp_path / 'none'}", TOPOLOGY)
    with pytest.raises(UsageError, match="cannot write"):
        Recorder(Fake(), tmp_path)


def test_mixed_provenance_and_bad_values_are_refused(tmp_path):
    path = tmp_path / "trials.jsonl"
    search(Recorder(Fake(), path), trials=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for change, words in (
        ({"provenance": "predicted"}, "emulated, predicted"),
        ({"provenance": "dreamt"}, ":3: "),
        ({"time_us": "fast"}, ":3: "),
        ({"kernel": {"tile_m": 1}}, ":3: "),
    ):
        changed = {**lines[-1], **change}
        path.write_text("".join(json.dumps(t) + "\n" for t in (*lines[:2], changed)))
        with pytest.raises(UsageError, match=words):
            ReplayEvaluator(path)


def test_many_recorders_of_one_file_lose_and_mix_nothing(tmp_path):
    path = tmp_path / "trials.jsonl"
    program = (
        "import sys; from tuning_helpers import *; from fluxgen.tune import Recorder\n"
        "r = Recorder(Fake(), sys.argv[1])\n"
        "for _ in range(200): r.evaluate(PROBLEM, TOPOLOGY, None, None)\n"
    )
    many = [
        subprocess.Popen([sys.executable, "-c", program, str(path)], cwd=HERE) for _ in range(4)
    ]
    assert [each.wait() for each in many] == [0] * 4
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 800
    assert ReplayEvaluator(path).trials == 1
