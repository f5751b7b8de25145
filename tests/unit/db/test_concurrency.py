"""Real processes on one database file."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sqlite3
import stat
import tempfile
import threading
import time
from pathlib import Path

import pytest
from dbtools import NVLINK8, problem, raw, record

from fluxgen.core.errors import DatabaseError
from fluxgen.core.record import Provenance
from fluxgen.db.database import Database
from fluxgen.db.lookup import Lookup, Reason

PROCESSES = 32
EACH = 6


def write_some(path, worker, start):
    """Own records, one contended record, and reads in between."""
    db = Database(path)
    start.wait(60)
    for i in range(EACH):
        assert db.put(record(8 + worker, n=8 * (i + 1)))
        # Every process writes this one; the newest time must win, whoever comes last.
        db.put(record(8, k=64, created=f"2026-01-01T00:{i:02}:{worker:02}Z", time_us=1 + worker))
        assert db.get(problem(8 + worker, n=8 * (i + 1)), NVLINK8) is not None


def run_processes(target, arguments, timeout=60):
    # A fork of this small process starts in milliseconds, 32 fresh interpreters take far longer;
    # Database holds nothing that a fork could break, which this checks as well.
    context = multiprocessing.get_context("fork")
    start = context.Event()
    processes = [context.Process(target=target, args=(*args, start)) for args in arguments]
    for process in processes:
        process.start()
    start.set()
    deadline = time.monotonic() + timeout
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("reader", [False, True], ids=["", "while a reader reads"])
def test_32_processes_writing_at_once_lose_nothing(tmp_path, reader):  # K01, K03
    path = tmp_path / "new" / "tuning.sqlite3"
    held = None
    if reader:
        Database(path).put(record(9999))
        held = sqlite3.connect(path)
        held.execute("BEGIN")
        assert held.execute("SELECT count(*) FROM records").fetchone() == (1,)
    codes = run_processes(write_some, [(path, worker) for worker in range(PROCESSES)])
    assert codes == [0] * PROCESSES
    if held is not None:
        assert held.execute("SELECT count(*) FROM records").fetchone() == (1,)
        held.close()
    db = Database(path)
    found = {(r.problem.m, r.problem.n) for r in db.records() if r.problem.k != 64}
    wanted = {(8 + w, 8 * (i + 1)) for w in range(PROCESSES) for i in range(EACH)}
    assert found == wanted | ({(9999, 6144)} if reader else set())
    contended = db.get(problem(8, k=64), NVLINK8)
    assert contended.created == f"2026-01-01T00:{EACH - 1:02}:{PROCESSES - 1:02}Z"
    assert not list(path.parent.glob("*.tmp"))


def migrate_together(path, worker, start):
    start.wait(60)
    Database(path).put(record(8 + worker))


def test_many_processes_migrate_one_old_file(tmp_path):
    from test_database import make_v1

    path = tmp_path / "tuning.sqlite3"
    make_v1(path, *(record(m) for m in range(1000, 1100)))
    codes = run_processes(migrate_together, [(path, worker) for worker in range(8)])
    assert codes == [0] * 8
    assert len(list(Database(path).records())) == 108


def write_until_killed(path, counter, start):
    start.wait(60)
    db = Database(path)
    for i in range(1, 100_000):
        db.put(record(8 * i))
        counter.value = i


def test_kill_9_during_writes_leaves_a_usable_database(tmp_path):
    path = tmp_path / "tuning.sqlite3"
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        counter, start = context.Value("l", 0), context.Event()
        process = context.Process(target=write_until_killed, args=(path, counter, start))
        process.start()
        start.set()
        deadline = time.monotonic() + 20
        while counter.value < 3 + attempt and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(random.uniform(0, 0.01))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert counter.value >= 3
        db = Database(path)
        sizes = {r.problem.m // 8 for r in db.records()}
        assert sizes >= set(range(1, counter.value + 1))  # what put() returned for is there
        assert db.put(record(7))


def test_a_lock_held_for_ever_is_an_error_that_says_so(tmp_path):
    path = tmp_path / "tuning.sqlite3"
    Database(path).put(record())
    held = sqlite3.connect(path, isolation_level=None)
    held.execute("BEGIN IMMEDIATE")
    impatient = Database(path, busy_s=0.2)
    assert impatient.get(problem(), NVLINK8) == record()
    with pytest.raises(DatabaseError, match=r"locked by another process for 0\.2 s"):
        impatient.put(record(64))
    threading.Timer(0.3, lambda: os.utime(path)).start()
    held.execute("COMMIT")
    held.close()
    assert impatient.put(record(64))


def test_threads_share_one_database(tmp_path):
    db = Database(tmp_path / "tuning.sqlite3")
    threads = [
        threading.Thread(target=lambda w=w: [db.put(record(8 + w, n=8 + 8 * i)) for i in range(5)])
        for w in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(db.records())) == 20


def as_nobody(work):
    """Run ``work`` in a child without root's right to ignore permissions; returns its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("kind", ["file", "directory", "old schema", "log left"])
def test_read_only_files_and_directories_can_be_read(kind):
    from test_database import make_v1

    folder = Path(tempfile.mkdtemp())
    path = folder / "tuning.sqlite3"
    try:
        if kind == "old schema":
            make_v1(path, record(), wal=True)
        else:
            Database(path).put(record())
        if kind == "log left":  # a writer was killed: some records are in the log only
            held = sqlite3.connect(path)
            held.execute("SELECT count(*) FROM records").fetchone()
            Database(path).put(record(64))
        os.chmod(path, 0o444)
        os.chmod(folder, 0o777 if kind == "file" else 0o555)
        before = path.read_bytes()

        def work():
            assert Database(path).get(problem(), NVLINK8) == record()
            assert Lookup(path, None)(problem(), NVLINK8).reason is Reason.EXACT
            with pytest.raises(DatabaseError, match="read-only"):
                Database(path).put(record(128))

        assert as_nobody(work) == 0
        assert path.read_bytes() == before
        if kind == "log left":
            held.close()
    finally:
        os.chmod(folder, 0o755)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


def test_an_unreadable_file_and_an_unwritable_home_say_so():
    folder = Path(tempfile.mkdtemp())
    path = folder / "tuning.sqlite3"
    try:
        Database(path).put(record())
        os.chmod(path, 0)
        os.chmod(folder, 0o755)

        def work():
            with pytest.raises(DatabaseError, match="cannot be used"):
                Database(path)
            assert Lookup(path, None)(problem(), NVLINK8).reason is Reason.DEFAULT
            with pytest.raises(DatabaseError, match="FLUXGEN_DB"):
                Database(folder / "new" / "db").put(record())

        assert as_nobody(work) == 0
    finally:
        path.unlink()
        folder.rmdir()


def test_a_lower_provenance_never_wins_a_race(tmp_path):
    path = tmp_path / "tuning.sqlite3"
    Database(path).put(record(provenance=Provenance.MEASURED, created=""))
    codes = run_processes(write_predicted, [(path,) for _ in range(4)])
    assert codes == [0] * 4
    assert Database(path).get(problem(), NVLINK8).provenance is Provenance.MEASURED


def write_predicted(path, start):
    start.wait(60)
    for i in range(5):
        value = record(provenance=Provenance.PREDICTED, created=f"2027-01-01T00:00:{i:02}Z")
        assert not Database(path).put(value)


def test_new_files_are_readable_by_others(tmp_path):
    path = tmp_path / "tuning.sqlite3"
    Database(path).put(record())
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 & ~umask
    raw(path, ("PRAGMA wal_checkpoint",))
