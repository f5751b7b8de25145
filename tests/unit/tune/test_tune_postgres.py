"""Several tuners on one PostgreSQL storage: no trial twice, none lost."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

optuna = pytest.importorskip("optuna")

pytestmark = pytest.mark.timeout(240)

TUNER = """
import sys
sys.path.insert(0, sys.argv[1])
from tuning_helpers import Fake
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.tune import tune
problems = [Problem(Signature.of("ag_gemm"), m, 1024, 1024, 8) for m in (512, 1024)]
fake = Fake(sleep=0.01)
found = tune(problems, Topology.of("h100-sxm", "nvlink", 8), evaluator=fake, trials=12,
             storage=sys.argv[2])
print(len(found.records))
for problem, kernel, run in fake.calls:
    print(problem.m, kernel, run)
"""


def program(name):
    installed = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"))
    found = shutil.which(name) or (installed[-1] if installed else "")
    if not found:
        pytest.skip(f"no PostgreSQL here: {name} is not installed (apt-get install postgresql)")
    return found


@pytest.fixture(scope="module")
def server():
    """A server of its own on a free port, by a user that is not root."""
    pytest.importorskip("psycopg2", reason="no driver for PostgreSQL: pip install psycopg2-binary")
    initdb, postgres = program("initdb"), program("postgres")
    user = {}
    if os.geteuid() == 0:
        try:
            subprocess.run(["id", "postgres"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
        user = {"user": "postgres", "group": "postgres"}
    home = Path(tempfile.mkdtemp(prefix="fluxgen-pg-", dir="/tmp"))
    if user:
        shutil.chown(home, "postgres", "postgres")
    data = home / "data"
    subprocess.run(
        [initdb, "-D", str(data), "-U", "tuner", "--auth=trust", "-E", "UTF8"],
        check=True, capture_output=True, cwd=home, **user,
    )  # fmt: skip
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [postgres, "-D", str(data), "-h", "127.0.0.1", "-p", str(port), "-k", str(home)],
            stdout=log, stderr=log, cwd=home, **user,
        )  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    else:
        raise AssertionError((home / "log").read_text())
    time.sleep(0.5)  # it listens a moment before it takes connections
    yield f"postgresql+psycopg2://tuner@127.0.0.1:{port}/postgres"
    process.send_signal(signal.SIGINT)  # "fast": it does not wait for clients
    process.wait(30)
    shutil.rmtree(home, ignore_errors=True)


@pytest.mark.slow
def test_three_tuners_on_one_postgresql(server):
    from fluxgen.tune.study import open_storage

    open_storage(server)  # the tables, once
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", TUNER, here, server]
    tuners = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    evaluated = Counter()
    for tuner in tuners:
        out, _ = tuner.communicate(timeout=200)
        assert tuner.returncode == 0
        records, *calls = out.splitlines()
        assert records == "2"
        evaluated.update(calls)
    assert max(evaluated.values()) == 1, evaluated.most_common(3)
    storage = open_storage(server)
    finished = 0
    for study in optuna.get_all_study_summaries(storage):
        loaded = optuna.load_study(study_name=study.study_name, storage=storage)
        trials = loaded.get_trials(deepcopy=False)
        assert all(trial.state.is_finished() for trial in trials)
        finished += sum(trial.state == optuna.trial.TrialState.COMPLETE for trial in trials)
    assert finished == len(evaluated) >= 24, "every trial that was made is there, once"


def test_a_server_that_is_not_there_is_one_clear_error():
    pytest.importorskip("psycopg2", reason="no driver for PostgreSQL: pip install psycopg2-binary")
    from fluxgen.core.errors import UsageError
    from fluxgen.tune.study import open_storage

    with pytest.raises(UsageError, match="storage: expected"):
        open_storage("postgresql+psycopg2://tuner@127.0.0.1:1/none")
