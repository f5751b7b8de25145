"""Killed tuners, stale trials, shared storages (cases K01, K03, K05, K07, K09)."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from tuning_helpers import PROBLEM, TOPOLOGY, Fake

from fluxgen.tune import PredictEvaluator, study, tune
from fluxgen.tune.candidates import Candidates
from fluxgen.tune.owners import PREFIX, alive, others_alive, this_owner
from fluxgen.tune.plan import History
from fluxgen.tune.search import study_name
from fluxgen.tune.study import BASELINE, VOID, Session, open_storage

HELPER = Path(__file__).with_name("tuning_helpers.py")
ROOT = Path(__file__).parents[3]


def start(storage: str, trials: int, die_at: int = 0, sleep: float = 0.0) -> subprocess.Popen:
    command = [sys.executable, str(HELPER), storage, str(trials), str(die_at), str(sleep)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def open_study(storage: str) -> optuna.Study:
    name = study_name(Candidates(PROBLEM, TOPOLOGY), Fake.kind)
    return optuna.load_study(study_name=name, storage=open_storage(storage))


def states(storage: str) -> list[str]:
    return [trial.state.name for trial in open_study(storage).get_trials()]


@pytest.mark.parametrize("scheme", ["sqlite:///{}/s.sqlite3", "journal:{}/s.journal"])
def test_kill_9_loses_no_finished_trial(scheme: str, tmp_path) -> None:
    """K05: the process dies in its 7th candidate; a resume repeats that one and no other."""
    storage = scheme.format(tmp_path)
    process = start(storage, 12, die_at=7)
    process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert states(storage) == ["COMPLETE"] * 6 + ["RUNNING"]
    whole, rest = Fake(), Fake()
    expected = tune([PROBLEM], TOPOLOGY, evaluator=whole, trials=12, storage="memory")
    result = tune([PROBLEM], TOPOLOGY, evaluator=rest, trials=12, storage=storage)
    assert rest.calls == whole.calls[6:]
    assert result.evaluated == 6
    assert states(storage) == ["COMPLETE"] * 6 + ["FAIL"] + ["COMPLETE"] * 6
    assert result.records[0].run == expected.records[0].run
    assert result.records[0].kernel == expected.records[0].kernel


def test_a_candidate_that_kills_the_process_is_retried_once(tmp_path) -> None:
    storage = f"sqlite:///{tmp_path}/s.sqlite3"
    for die_at in (3, 1):  # the second process begins with the retry, and dies too
        process = start(storage, 6, die_at=die_at)
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
    killer = [t for t in open_study(storage).get_trials() if t.state == TrialState.RUNNING]
    failures = []

    class Db:
        def failures(self, *_):
            return ()

        find = failures

        def put_failure(self, problem, topology, kernel, run, reason) -> None:
            failures.append((kernel, run, reason))

    fake = Fake()
    tune([PROBLEM], TOPOLOGY, evaluator=fake, trials=6, storage=storage, db=Db())
    candidates = Candidates(PROBLEM, TOPOLOGY)
    culprit = candidates.decode(killer[0].params)
    assert culprit not in fake.asked
    assert failures == [(*culprit, "the process died twice while evaluating it")]
    assert "RUNNING" not in states(storage)
    again = Fake()
    tune([PROBLEM], TOPOLOGY, evaluator=again, trials=9, storage=storage)
    assert culprit not in again.asked


def test_a_tuner_whose_trials_are_used_up_waits_for_anothers_baseline(tmp_path) -> None:
    """K01: it would else fail: "the baseline was not timed" (once in 30 runs of six tuners)."""
    storage = f"sqlite:///{tmp_path}/s.sqlite3"
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Fake):
        def measure(self, case):
            kernel = case.kernel
            if kernel is None:
                begun.set()
                assert go_on.wait(60)
            return super().measure(case)

    class Last(Fake):
        def measure(self, case):
            if len(self.calls) == 2:  # with the baseline, that is all four
                threading.Timer(0.5, go_on.set).start()
            return super().measure(case)

    results = []

    def run(evaluator) -> None:
        results.append(tune([PROBLEM], TOPOLOGY, evaluator=evaluator, trials=4, storage=storage))

    first = threading.Thread(target=run, args=(Slow(),))
    first.start()
    assert begun.wait(60)
    run(Last())
    go_on.set()
    first.join(60)
    assert len(results) == 2
    for result in results:
        assert not result.failed
        assert [r.baseline_us for r in result.records] == [1000.0]


def test_a_trial_that_does_not_say_yet_what_it_is_of_may_be_the_baseline(tmp_path) -> None:
    """Under load the process that has begun it may take seconds to write that down."""
    storage = open_storage(f"sqlite:///{tmp_path}/s.sqlite3")
    one, other = session(storage), session(storage)
    trial = one.study.ask()
    assert trial.params == {}
    assert other.baseline_pending()
    assert trial.suggest_categorical("kernel", one._space["kernel"].choices) == BASELINE
    assert other.baseline_pending()
    one.study.tell(trial, 5.0)
    assert not other.baseline_pending()
    one.study.ask()  # of a fused candidate: the baseline is known
    assert not other.baseline_pending()


@pytest.mark.slow
def test_eight_processes_share_one_sqlite_file(tmp_path) -> None:
    """K01: nobody dies with "database is locked", from the creation of the file on."""
    storage = f"sqlite:///{tmp_path}/s.sqlite3"
    processes = [start(storage, 16, sleep=0.01) for _ in range(8)]
    outputs = [process.communicate(timeout=200) for process in processes]
    assert [p.returncode for p in processes] == [0] * 8, outputs
    trials = open_study(storage).get_trials()
    assert sorted(t.number for t in trials) == list(range(len(trials)))
    made = [t for t in trials if VOID not in t.user_attrs]  # void: another had it already
    assert {t.state for t in made} <= {TrialState.COMPLETE}
    assert 16 <= len(made) <= 24
    assert sum(int(out.split()[0]) for out, _ in outputs) == len(made), "each was evaluated once"
    attributes = open_study(storage).user_attrs
    assert sum(key.startswith(PREFIX) for key in attributes) == 8
    assert not any(attributes.values())


@pytest.mark.slow
def test_a_reader_does_not_stop_the_tuner(tmp_path) -> None:
    """K03: a dashboard or the sqlite3 shell holds a read transaction all the while."""
    storage = f"sqlite:///{tmp_path}/s.sqlite3"
    tune([PROBLEM], TOPOLOGY, evaluator=Fake(), trials=1, storage=storage)
    reader = sqlite3.connect(tmp_path / "s.sqlite3", isolation_level=None)
    reader.execute("BEGIN")
    before = reader.execute("SELECT count(*) FROM trials").fetchone()
    result = tune([PROBLEM], TOPOLOGY, evaluator=Fake(), trials=5, storage=storage)
    assert result.evaluated == 4
    assert reader.execute("SELECT count(*) FROM trials").fetchone() == before
    reader.close()


def session(storage, **arguments) -> Session:
    candidates = Candidates(PROBLEM, TOPOLOGY)
    kernels = list(candidates.prior)[:2]
    return Session(storage, "study", candidates, kernels, 0, History(), **arguments)


def test_telling_a_trial_that_another_worker_finished_is_ignored() -> None:
    """K07."""
    storage = open_storage("memory")
    one = session(storage)
    trial, candidate, _ = next(one.ask())
    assert candidate is None
    one.study.tell(trial.number, 5.0)
    one.tell(trial, candidate, Fake().evaluate(PROBLEM, TOPOLOGY, None, None))
    assert one.history().times == {None: 5.0}
    again, candidate, _ = next(one.ask())
    one.study.tell(again.number, state=TrialState.FAIL)
    failure = PredictEvaluator().evaluate(PROBLEM, TOPOLOGY, *candidate)
    one.tell(again, candidate, failure)
    assert candidate in one.history().failed


def test_a_trial_that_another_takes_for_dead_while_it_is_written_is_left(monkeypatch) -> None:
    """Seen with six tuners on two busy cores: writing a proposal down took longer than a claim."""
    storage = open_storage("memory")
    one = session(storage)
    ask, lost = one.study.ask, []

    def slow(*args, **kwargs):
        trial = ask(*args, **kwargs)
        if not lost:
            lost.append(trial.number)
            long_ago = datetime.now() - timedelta(hours=2)
            storage._get_trial(trial._trial_id).datetime_start = long_ago
            session(storage).close()  # of another tuner, which queues it again
        return trial

    monkeypatch.setattr(one.study, "ask", slow)
    trial, candidate, _ = next(one.ask())
    assert (lost, trial.number, candidate) == ([0], 1, None)
    one.close()


def test_a_live_tuners_running_trial_is_left_alone_until_it_is_old() -> None:
    storage = open_storage("memory")
    one = session(storage)
    trial, _, _ = next(one.ask())
    two = session(storage)  # of the same, living process
    assert two.study.trials[0].state == TrialState.RUNNING
    assert None in two.history().open
    # The in-memory storage's own record, so that the trial looks old.
    storage._get_trial(trial._trial_id).datetime_start = datetime.now() - timedelta(hours=2)
    three = session(storage)
    assert three.study.trials[0].state == TrialState.FAIL
    assert three.study.trials[1].user_attrs == {"retry_of": 0}
    one.close()
    two.close()
    assert [c for _, c, _ in [next(three.ask())]] == [None]


def test_queued_repeats_are_answered_without_evaluating() -> None:
    storage = open_storage("memory")
    one = session(storage)
    asked = one.ask()
    for _ in range(3):
        trial, candidate, _ = next(asked)
        one.tell(trial, candidate, Fake().evaluate(PROBLEM, TOPOLOGY, *(candidate or (None,) * 2)))
    one.study.enqueue_trial(one.study.trials[1].params)
    one.study.enqueue_trial({"kernel": one.study.trials[1].params["kernel"]})  # only a part
    trial, candidate, history = next(asked)
    assert candidate not in history.times
    assert one.study.trials[3].value == one.study.trials[1].value


def test_owners() -> None:
    own = this_owner()
    assert alive(own) is True
    host, pid, started, token = own.removeprefix(PREFIX).split("|")
    reused = f"{PREFIX}{host}|{pid}|{int(started) + 1}|{token}"
    assert alive(reused) is False
    foreign = f"{PREFIX}elsewhere|1|1|x"
    assert alive(foreign) is None
    assert alive("tuner:garbage") is None
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    gone = f"{PREFIX}{host}|{child.pid}|1|{token}"
    assert alive(gone) is False
    assert not others_alive([own, gone, reused], own)
    assert others_alive([own, foreign], own)


def test_a_journal_lock_left_by_a_killed_tuner_ends_within_its_grace(tmp_path, monkeypatch) -> None:
    """K09: the lock of a process that was killed holding it must not stop the next for ever."""
    monkeypatch.setattr(study, "JOURNAL_GRACE_S", 1)
    path = tmp_path / "study.journal"
    path.touch()
    Path(f"{path}.lock").symlink_to(path)
    start = time.monotonic()
    storage = study.open_storage(f"journal:{path}")
    assert optuna.create_study(storage=storage, study_name="x").trials == []
    assert 0.5 < time.monotonic() - start < 20
