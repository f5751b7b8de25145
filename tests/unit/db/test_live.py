"""``fluxgen.lookup``: warm answers that follow the environment and the database."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from dbtools import record

import fluxgen
from fluxgen.core.errors import UsageError
from fluxgen.db import live
from fluxgen.db.database import Database
from fluxgen.db.lookup import default_lookup
from fluxgen.db.result import Reason

ASKED = ("ag_gemm", 4096, 6144, 128 * 77, 8, "h100-sxm", "nvlink", "bf16")  # in no pack


def put(path, time_us, m=4096):
    """By another process, as a tuner beside this one would."""
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "from dbtools import record; from fluxgen.db.database import Database\n"
        "Database(sys.argv[2]).put(record(int(sys.argv[4]), k=128 * 77, "
        "time_us=float(sys.argv[3])))"
    )
    folder = __file__.rsplit("/", 1)[0]
    command = [sys.executable, "-c", code, folder, str(path), str(time_us), str(m)]
    subprocess.run(command, check=True, timeout=60)


@pytest.fixture
def look(tmp_path, monkeypatch):
    monkeypatch.setenv("FLUXGEN_DB", str(tmp_path / "a.sqlite3"))
    return live.LiveLookup()


def test_what_another_process_puts_is_seen(look, tmp_path):
    assert look(*ASKED).reason is Reason.DEFAULT
    put(tmp_path / "a.sqlite3", 90.0)
    assert look(*ASKED).time_us == 90.0
    reader = sqlite3.connect(tmp_path / "a.sqlite3")  # which keeps the write-ahead log
    reader.execute("SELECT count(*) FROM sqlite_master").fetchall()
    for us in (80.0, 70.0, 60.0):
        put(tmp_path / "a.sqlite3", us)
        assert look(*ASKED).time_us == us
    reader.close()
    put(tmp_path / "a.sqlite3", 50.0, m=512)
    assert look(*ASKED).time_us == 60.0


def test_what_this_process_puts_is_seen_in_its_time(look, tmp_path):
    database = Database(tmp_path / "a.sqlite3")
    for us in range(99, 89, -1):
        database.put(record(k=128 * 77, time_us=float(us)))
        end = time.monotonic() + 20 * live.CHECK_S
        while look(*ASKED).time_us != us:
            assert time.monotonic() < end
            time.sleep(live.CHECK_S / 10)


def test_a_database_that_goes_away(look, tmp_path):
    Database(tmp_path / "a.sqlite3").put(record(k=128 * 77, time_us=90.0))
    assert look(*ASKED).time_us == 90.0
    for path in tmp_path.iterdir():
        path.unlink()
    time.sleep(2 * live.CHECK_S)
    assert look(*ASKED).reason is Reason.DEFAULT


def test_another_database_counts_at_once(look, tmp_path, monkeypatch):
    for name, us in (("a", 90.0), ("b", 80.0), ("home/tuning", 70.0), ("xdg/fluxgen/tuning", 60.0)):
        path = tmp_path / f"{name}.sqlite3"
        path.parent.mkdir(parents=True, exist_ok=True)
        Database(path).put(record(k=128 * 77, time_us=us))
    assert look(*ASKED).time_us == 90.0
    monkeypatch.setenv("FLUXGEN_DB", str(tmp_path / "b.sqlite3"))
    assert look(*ASKED).time_us == 80.0
    monkeypatch.setenv("FLUXGEN_DB", str(tmp_path / "a.sqlite3"))
    assert look(*ASKED).time_us == 90.0
    monkeypatch.delenv("FLUXGEN_DB")
    monkeypatch.setenv("FLUXGEN_HOME", str(tmp_path / "home"))
    assert look(*ASKED).time_us == 70.0
    monkeypatch.delenv("FLUXGEN_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert look(*ASKED).time_us == 60.0
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    assert look(*ASKED).reason is Reason.DEFAULT


def test_the_ops_own_lookup_stays_as_it_is(look, tmp_path):
    """All layers of a running model decide alike, whatever is looked up beside them."""
    from fluxgen.core.problem import Problem, Signature
    from fluxgen.core.topology import Topology

    kept = default_lookup()
    asked = (
        Problem(Signature.of("ag_gemm"), 4096, 6144, 128 * 77, 8),
        Topology.of("h100-sxm", "nvlink", 8),
    )
    assert kept(*asked).reason is Reason.DEFAULT
    put(tmp_path / "a.sqlite3", 90.0)
    assert look(*ASKED).time_us == 90.0
    assert kept(*asked).reason is Reason.DEFAULT


BAD = [
    {"op": "gather"}, {"op": ["ag_gemm"]}, {"op": None}, {"m": 4096.0}, {"m": True}, {"m": "4096"},
    {"m": -1}, {"n": 0}, {"n": 6144.0}, {"k": 1.5}, {"tp": 8.0}, {"tp": 17}, {"tp": True},
    {"target": "no such gpu"}, {"target": ["h100-sxm"]}, {"link": "wire"}, {"link": {}},
    {"dtype": "int8"}, {"dtype": []}, {"m": [4096]}, {"m": {}},
]  # fmt: skip


@pytest.mark.parametrize("changes", BAD, ids=str)
def test_bad_arguments_are_errors_also_once_their_equals_are_known(changes):
    good = {"op": "ag_gemm", "m": 4096, "n": 6144, "k": 12288, "tp": 8, "target": "h100-sxm"}
    for _ in range(2):
        fluxgen.lookup(**good)
        with pytest.raises(UsageError):
            fluxgen.lookup(**{**good, **changes})


def test_known_answers_are_kept(look, monkeypatch):
    monkeypatch.setattr(live, "CHECK_S", 60.0)
    answer = look(*ASKED)
    monkeypatch.setattr(live, "_parsed", None)  # a warm call does not get there
    assert look(*ASKED) is answer


def test_threads_ask_while_the_database_changes(look, tmp_path):
    database = Database(tmp_path / "a.sqlite3")
    wrong: list[object] = []
    stop = threading.Event()

    def ask():
        last = 1000.0
        while not stop.is_set():
            found = look(*ASKED)
            now = last if found.reason is Reason.DEFAULT else found.time_us
            if now > last:
                wrong.append((last, now))  # older than what was seen before
            last = now

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for us in range(99, 79, -1):
        database.put(record(k=128 * 77, time_us=float(us)))
        time.sleep(0.02)
    time.sleep(10 * live.CHECK_S)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert look(*ASKED).time_us == 80.0
