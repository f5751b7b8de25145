"""An evaluator in another process: what crashes, hangs or breaks there, and what becomes of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("optuna")

from tuning_helpers import PROBLEM, TOPOLOGY

from fluxgen.core.config import KernelConfig, RunConfig, Schedule
from fluxgen.core.errors import MachineError, UnsupportedError
from fluxgen.core.record import Baseline
from fluxgen.db.database import Database
from fluxgen.tune import tune
from fluxgen.tune.evaluators import process
from fluxgen.tune.evaluators.process import ProcessEvaluator

HERE = Path(__file__).parent
DEVICE = "fake_device"
RUN = RunConfig(groups=(1, 1))


def kernel(tile_n):
    return KernelConfig(128, tile_n, 64, 1, 1, Schedule.PINGPONG)


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))


@pytest.fixture
def device(tmp_path):
    made = []

    def make(timeout_s=30.0, **faults):
        options = {"faults": faults, "log": str(tmp_path / "l")}
        made.append(ProcessEvaluator(f"{DEVICE}:make", options, timeout_s=timeout_s))
        return made[-1]

    yield make
    for each in made:
        each.close()


def asked(tmp_path):
    return [line.split() for line in (tmp_path / "l").read_text().splitlines()]


def test_it_is_the_evaluator_that_it_holds(device):
    with device() as evaluator:
        assert (evaluator.kind, evaluator.provenance.value) == ("fake-device", "emulated")
        assert evaluator.method(TOPOLOGY) == "made up"
        assert evaluator.baseline(PROBLEM, TOPOLOGY) is Baseline.COPIES
        found = tune([PROBLEM], TOPOLOGY, evaluator=evaluator, trials=2, storage="memory")
        environment = found.records[0].environment
        assert (environment.driver, environment.cuda) == ("13.0", "12.9")
        assert evaluator.evaluate(PROBLEM, TOPOLOGY, None, None).time_us == 1000.0
        measured = evaluator.evaluate(PROBLEM, TOPOLOGY, kernel(128), RUN)
        assert measured.ok
        assert 400 <= measured.time_us <= 600
        assert evaluator.started == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("crash", "died of SIGSEGV: an illegal memory access was encountered"),
        ("exit", "ended with exit code 3"),
        ("raise", "raised ValueError: misaligned address"),
    ],
)
def test_a_bad_candidate_fails_and_the_next_one_is_served(device, fault, words):
    evaluator = device(n96=fault)
    failed = evaluator.evaluate(PROBLEM, TOPOLOGY, kernel(96), RUN)
    assert not failed.ok
    assert words in failed.reason
    assert evaluator.evaluate(PROBLEM, TOPOLOGY, kernel(128), RUN).ok
    assert evaluator.started == (1 if fault == "raise" else 2)


def test_one_that_hangs_is_killed_in_time(device, tmp_path):
    evaluator = device(n96="hang", timeout_s=2.0)
    start = time.monotonic()
    failed = evaluator.evaluate(PROBLEM, TOPOLOGY, kernel(96), RUN)
    assert time.monotonic() - start < 10
    assert "did not answer for 2 s and was killed" in failed.reason
    with pytest.raises(ProcessLookupError):
        os.kill(int(asked(tmp_path)[-1][0]), 0)
    assert evaluator.evaluate(PROBLEM, TOPOLOGY, kernel(128), RUN).ok


def test_one_that_cannot_be_killed_ends_the_search(device, tmp_path, monkeypatch):
    """As one that the driver holds: a tuner that waited for it would hang with it."""
    evaluator = device(n96="hang", timeout_s=1.0)
    with monkeypatch.context() as immortal:
        immortal.setattr(process, "KILLED_S", 0.5)
        immortal.setattr(process.os, "killpg", lambda pid, how: None)
        start = time.monotonic()
        with pytest.raises(MachineError, match="after it was killed: the driver holds it"):
            evaluator.evaluate(PROBLEM, TOPOLOGY, kernel(96), RUN)
        assert time.monotonic() - start < 10
    os.kill(int(asked(tmp_path)[-1][0]), signal.SIGKILL)


@pytest.mark.parametrize(
    ("maker", "kind", "words"),
    [
        ("refuse", UnsupportedError, "no GPU here"),
        ("die", MachineError, "ended with exit code 7: libcuda.so.1: cannot open"),
        ("never_ready", MachineError, "did not answer for 3 s and was killed before it was ready"),
        ("nothing_of_that_name", MachineError, "AttributeError"),
    ],
)
def test_one_that_does_not_start_says_why(maker, kind, words):
    # Only the one that never answers needs a short deadline: to import Torch takes longer on a busy
    # machine.
    start_s = 3 if maker == "never_ready" else 60
    with pytest.raises(kind, match=words):
        ProcessEvaluator(f"{DEVICE}:{maker}", timeout_s=5, start_s=start_s)


@pytest.mark.slow
def test_a_search_goes_on_and_never_asks_again(device, tmp_path):
    """What crashed or hung is in the database: another search, of another study, skips it."""
    db = Database(tmp_path / "tuning.sqlite3")
    faults = {"k2": "crash", "k4": "hang", "m4": "hang", "k8": "hang", "m8": "hang"}

    def search():
        """The record, and the candidates that were asked for: bad and good."""
        before = len(asked(tmp_path)) if (tmp_path / "l").exists() else 0
        with device(**faults, timeout_s=2.0) as evaluator:
            made = tune(
                [PROBLEM], TOPOLOGY, evaluator=evaluator, trials=10, storage="memory", db=db
            )
        lines = asked(tmp_path)[before:]
        return made.records, {n for _, n, *f in lines if f}, {n for _, n, *f in lines if not f}

    records, bad, _ = search()
    assert {faults[name.rpartition("/")[2]] for name in bad} == {"crash", "hang"}
    assert records[0].kernel is not None
    cut = f"{records[0].run.chunk_axis.value}{records[0].run.chunks}"
    assert cut not in faults
    reasons = {failure.reason.partition(":")[0] for failure in db.failures(PROBLEM, TOPOLOGY)}
    assert reasons == {
        "the process that evaluated it died of SIGSEGV",
        "the process that evaluated it did not answer for 2 s and was killed",
    }
    _, again, others = search()
    assert not again & bad
    assert others


def test_a_broken_machine_ends_the_search_and_blames_no_candidate(device, tmp_path):
    db = Database(tmp_path / "tuning.sqlite3")
    storage = f"sqlite:///{tmp_path / 'studies.sqlite3'}"
    every = {f"n{n}": "broken" for n in (64, 96, 128, 160, 192, 224, 256)}
    with device(**every) as evaluator, pytest.raises(MachineError, match="the GPU is lost"):
        tune([PROBLEM], TOPOLOGY, evaluator=evaluator, trials=6, storage=storage, db=db)
    assert not db.failures(PROBLEM, TOPOLOGY)
    with device() as evaluator:  # mended: it goes on with the very candidate
        result = tune([PROBLEM], TOPOLOGY, evaluator=evaluator, trials=6, storage=storage, db=db)
    assert result.records[0].kernel is not None
    broken, first = (
        next(name for _, name, *_ in group if name != "baseline")
        for group in (asked(tmp_path)[:2], asked(tmp_path)[2:])
    )
    assert broken == first


def test_it_ends_with_its_tuner(tmp_path):
    """Also when the tuner is killed while a candidate hangs."""
    log = tmp_path / "l"
    program = (
        "from fluxgen.tune.evaluators.process import ProcessEvaluator\n"
        "from test_tune_worker import *\n"
        f"options = {{'faults': {{'n96': 'hang'}}, 'log': {str(log)!r}}}\n"
        f"evaluator = ProcessEvaluator('{DEVICE}:make', options, timeout_s=600)\n"
        "evaluator.evaluate(PROBLEM, TOPOLOGY, kernel(96), RUN)\n"
    )
    tuner = subprocess.Popen([sys.executable, "-c", program], cwd=HERE)
    try:
        deadline = time.monotonic() + 60
        while not log.exists() or not log.read_text().endswith("hang\n"):
            assert time.monotonic() < deadline
            assert tuner.poll() is None
            time.sleep(0.05)
        worker = int(log.read_text().split()[0])
        os.kill(worker, 0)
        tuner.send_signal(signal.SIGKILL)
        tuner.wait()
        while Path(f"/proc/{worker}/stat").exists():
            if Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                break
            assert time.monotonic() < deadline, "the worker outlived its tuner"
            time.sleep(0.05)
    finally:
        tuner.kill()
