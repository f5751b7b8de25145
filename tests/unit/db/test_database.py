from __future__ import annotations

import os
import pickle
import sqlite3
from dataclasses import replace

import pytest
from dbtools import (
    AG,
    KERNEL,
    NVLINK8,
    OTHER_SIGNATURES,
    SMALL,
    baseline,
    bytes_of,
    problem,
    raw,
    record,
)

from fluxgen.core.config import RunConfig
from fluxgen.core.errors import DatabaseError, UsageError
from fluxgen.core.record import Provenance, Status
from fluxgen.core.topology import Gpu, Topology
from fluxgen.db import database as database_module
from fluxgen.db.codec import record_to_json_line
from fluxgen.db.database import Database
from fluxgen.db.lookup import Lookup, Reason
from fluxgen.db.mounts import network_filesystem
from fluxgen.db.schema import APPLICATION_ID, VERSION


@pytest.fixture
def path(tmp_path):
    return tmp_path / "odd ?#%20 näme" / "tuning.sqlite3"


@pytest.fixture
def db(path):
    return Database(path)


# --- what a store does ---------------------------------------------------------------------------


def test_reading_creates_nothing(db, path):
    assert db.get(problem(), NVLINK8) is None
    assert db.find(problem(), NVLINK8) == ()
    assert list(db.records()) == []
    assert db.failures() == ()
    assert not db.delete(problem(), NVLINK8)
    assert not path.parent.exists()


def test_put_get_find_records_delete(db, path):
    ladder = [record(m) for m in (8192, 64, 1024)]
    others = [record(64, n=128), record(64, topology="h200-nvlink-tp8"), baseline(64, k=64)]
    assert db.put_many(ladder + others) == 6
    for value in ladder + others:
        assert db.get(value.problem, value.topology) == value
    assert [r.problem.m for r in db.find(problem(1), NVLINK8)] == [64, 1024, 8192]
    assert len(list(db.records())) == 6
    assert len(list(db.records("h200-nvlink-tp8"))) == 1
    assert db.delete(problem(64), NVLINK8)
    assert not db.delete(problem(64), NVLINK8)
    assert db.get(problem(64), NVLINK8) is None
    assert list(bytes_of(path)) == [path.name]


def test_the_file_says_what_it_is(db, path):
    db.put(record())
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_better_provenance_stays_then_the_newer(db):
    old, new = "2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"
    predicted, emulated, measured = Provenance
    assert db.put(record(provenance=emulated, created=old, time_us=5))
    assert not db.put(record(provenance=predicted, created=new, time_us=1))
    assert not db.put(record(provenance=emulated, created="", time_us=1))
    assert db.get(problem(), NVLINK8).time_us == 5
    assert db.put(record(provenance=emulated, created=new, time_us=9))
    assert db.put(record(provenance=emulated, created=new, time_us=8))  # the last of equals
    assert db.get(problem(), NVLINK8).time_us == 8
    assert db.put(record(provenance=measured, created="", time_us=20))
    assert db.get(problem(), NVLINK8).time_us == 20
    assert not db.put(record(provenance=emulated, created=new, time_us=1))
    assert db.put_many([record(created=new), record(created=old)]) == 1


def test_the_key_holds_everything(db):  # J03
    values = [record(signature=signature) for signature in [AG, *OTHER_SIGNATURES]]
    values += [record(n=6152), record(k=12296), record(m=4104), record(tp=4)]
    values += [record(topology=f"{gpu}-tp8") for gpu in ("h200-nvlink", "h100-sxm-pcie")]
    values = [replace(value, time_us=float(i + 1)) for i, value in enumerate(values)]
    assert db.put_many(values) == len(values)
    for value in values:
        assert db.get(value.problem, value.topology) == value
        assert db.find(value.problem, value.topology)[0].problem.signature == (
            value.problem.signature
        )


@pytest.mark.parametrize(
    "name",
    ["NVIDIA RTX 6000 Ada/Generation", "NVIDIA A100 MIG 1g.18gb", "ＮＶＩＤＩＡ Ü ⚡", "../../x"],
)
def test_gpu_names_of_all_kinds(db, name):  # J11
    gpu = Gpu.from_properties(name, (9, 0), 132, 1800, 227, 80, nvlink_gbs=450)
    topology = Topology.of(gpu, "nvlink", 8)
    value = record(topology=topology.key)
    assert db.put(value)
    assert db.get(problem(), topology) == value


def test_failures_are_kept_apart(db):
    run = RunConfig()
    db.put(record())
    db.put_failure(problem(), NVLINK8, KERNEL, run, "hung\n\x1b[2Jtwice" + "x" * 900)
    db.put_failure(problem(), NVLINK8, KERNEL, replace(run, chunks=2), "wrong")
    db.put_failure(problem(), NVLINK8, SMALL, None, "did not build", "2026-01-01T00:00:00Z")
    db.put_failure(problem(), NVLINK8, SMALL, None, "did not build again")
    db.put_failure(problem(64), NVLINK8, SMALL, None, "other problem")
    found = {(f.kernel, f.run): f for f in db.failures(problem(), NVLINK8)}
    assert len(found) == 3 and len(db.failures()) == 4
    assert found[KERNEL, run].reason.startswith("hung [2Jtwicexx")
    assert len(found[KERNEL, run].reason) == 512
    assert found[SMALL, None].reason == "did not build again"
    assert found[SMALL, None].covers(SMALL, run) and not found[KERNEL, run].covers(SMALL, run)
    assert db.failures(problem(), "h200-nvlink-tp8") == ()
    assert db.get(problem(), NVLINK8) == record()
    assert db.clear_failures(problem(), NVLINK8) == 3
    assert db.failures(problem(), NVLINK8) == () and len(db.failures()) == 1


def test_bad_input_is_one_clear_error_and_changes_nothing(db):
    db.put(record())
    with pytest.raises(UsageError, match="put_failure"):
        db.put(replace(record(), status=Status.FAILED))
    with pytest.raises(UsageError, match="time_us"):
        db.put_many([record(64), record(time_us=float("inf"))])
    with pytest.raises(UsageError, match="topology"):
        db.get(problem(), "H100")
    with pytest.raises(UsageError, match="created"):
        db.put_failure(problem(), NVLINK8, KERNEL, None, "x", "now")
    assert list(db.records()) == [record()]
    assert db.put_many([]) == 0


def test_an_object_may_be_sent_to_another_process(db):
    db.put(record())
    assert pickle.loads(pickle.dumps(db)).get(problem(), NVLINK8) == record()


# --- damaged rows ---------------------------------------------------------------------------------

DAMAGED = [None, 7, b"\x00\xff", "", "not json", "[]", record_to_json_line(record(64))]


@pytest.mark.parametrize("data", DAMAGED)
def test_a_damaged_row_is_a_miss_healed_by_the_next_put(db, path, caplog, data):  # J05
    db.put_many([record(), record(64)])
    raw(path, ("UPDATE records SET data = ? WHERE m = 4096", data))
    assert db.get(problem(), NVLINK8) is None
    assert list(db.records()) == [record(64)]
    assert "damaged record(s) ignored" in caplog.text
    predicted = record(provenance=Provenance.PREDICTED, created="")
    assert db.put(predicted)
    assert db.get(problem(), NVLINK8) == predicted


def test_bad_utf8_in_one_row_spares_the_others(db, path):
    db.put_many([record(), record(64)])
    raw(path, ("UPDATE records SET data = CAST(x'7bff7d' AS TEXT) WHERE m = 64",))
    assert list(db.records()) == [record()]


def test_a_null_driver_is_unknown(db, path):  # J05
    db.put(record())
    raw(path, ("UPDATE records SET data = json_set(data, '$.environment.driver', NULL)",))
    assert db.get(problem(), NVLINK8).environment.driver == ""


def test_a_damaged_failure_is_ignored(db, path, caplog):
    db.put_failure(problem(), NVLINK8, KERNEL, None, "x")
    raw(path, ("UPDATE failures SET kernel = '{}'",))
    assert db.failures() == () and "failure entry is ignored" in caplog.text


# --- older and newer schemas ----------------------------------------------------------------------


def make_v1(path, *values, wal=False):
    """A file as version 1 wrote it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    statements = [
        ("CREATE TABLE records (key TEXT PRIMARY KEY, data TEXT NOT NULL)",),
        (f"PRAGMA application_id = {APPLICATION_ID}",),
        ("PRAGMA user_version = 1",),
    ]
    for value in values:
        text = value if isinstance(value, str) else record_to_json_line(value)
        key = value if isinstance(value, str) else f"{value.topology}|{value.problem.key}"
        statements.append(("INSERT INTO records VALUES (?, ?)", key, text))
    raw(path, *([("PRAGMA journal_mode = WAL",)] if wal else []), *statements)


@pytest.mark.parametrize("wal", [False, True])
def test_an_old_file_still_loads_and_is_migrated_by_the_first_write(path, wal):
    failed = replace(record(64), status=Status.FAILED)
    make_v1(path, record(), record(128), failed, "garbage", wal=wal)
    before = path.read_bytes()
    db = Database(path)
    assert db.get(problem(), NVLINK8) == record()
    assert [r.problem.m for r in db.records()] == [128, 4096]
    assert [f.problem for f in db.failures()] == [problem(64)]
    assert Lookup(path, None)(problem(), NVLINK8).reason is Reason.EXACT
    assert path.read_bytes() == before

    db.put(record(256))
    assert [r.problem.m for r in db.records()] == [128, 256, 4096]
    (failure,) = db.failures(problem(64), NVLINK8)
    assert failure.covers(failed.kernel, failed.run) and "no reason" in failure.reason
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (VERSION,)
    # what could not be read is not lost
    assert connection.execute("SELECT data FROM records_v1").fetchall() == [("garbage",)]
    connection.close()


def test_a_clean_migration_leaves_nothing_behind(path):
    make_v1(path, record())
    Database(path).put(record(64))
    connection = sqlite3.connect(path)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert names == {"records", "failures"}


def test_a_newer_schema_is_refused(db, path):
    db.put(record())
    raw(path, (f"PRAGMA user_version = {VERSION + 1}",))
    assert_never_overwritten(path, db, "newer fluxgen")


# --- files that are no databases ------------------------------------------------------------------


def assert_never_overwritten(path, opened, match):
    before = bytes_of(path)
    with pytest.raises(DatabaseError, match=match):
        Database(path)
    if opened is not None:
        for call in (
            lambda: opened.put(record(64)),
            lambda: opened.get(problem(), NVLINK8),
            lambda: opened.put_failure(problem(), NVLINK8, KERNEL, None, "x"),
            lambda: opened.delete(problem(), NVLINK8),
        ):
            with pytest.raises(DatabaseError, match=match):
                call()
    assert bytes_of(path) == before


def real_bytes(tmp_path):
    source = Database(tmp_path / "source.sqlite3")
    source.put_many([record(m) for m in range(8, 8 * 200, 8)])
    return source.path.read_bytes()


def flipped(content):
    """A page in the middle overwritten: the header and the size are right."""
    middle = len(content) // 2 // 4096 * 4096
    return content[:middle] + b"\xa5" * 4096 + content[middle + 4096 :]


BROKEN = {
    "empty": lambda b: b"",
    "one byte": lambda b: b[:1],
    "header": lambda b: b[:100],
    "half": lambda b: b[: len(b) // 2],
    "half, not at a page": lambda b: b[: len(b) // 2 + 77],
    "last byte": lambda b: b[:-1],
    "page": flipped,
    "garbage": lambda b: bytes(range(256)) * 64,
    "invalid UTF-8": lambda b: b"\xff\xfe\xfa" * 1000,
    "JSON": lambda b: b'["records"]' * 100,
    "short JSON": lambda b: b"{}",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_an_error_for_writers_and_a_miss_for_lookups(
    tmp_path, caplog, kind
):  # J07
    path = tmp_path / "there" / "tuning.sqlite3"
    path.parent.mkdir()
    opened = Database(path)  # opened before the damage
    path.write_bytes(BROKEN[kind](real_bytes(tmp_path)))
    before = bytes_of(path)
    with pytest.raises(DatabaseError, match=r"move it away: mv .*\.corrupt") as caught:
        Database(path)
    assert str(caught.value).count("\n") == 0 and caught.value.__cause__ is None
    if kind != "page":  # a write that never meets the bad page is fine
        assert_never_overwritten(path, opened, "expected a fluxgen tuning database")
    answer = Lookup(path, None)(problem(), NVLINK8)
    assert answer.reason is Reason.DEFAULT and answer.config is None
    lines = [r for r in caplog.records if "tuning database ignored" in r.getMessage()]
    assert len(lines) == 1 and "\n" not in lines[0].getMessage() and lines[0].exc_info is None
    assert bytes_of(path) == before


def test_another_programs_sqlite_file_is_refused(path):
    path.parent.mkdir()
    raw(path, ("CREATE TABLE records (topology TEXT, data TEXT)",))
    assert_never_overwritten(path, None, "another program's SQLite file")
    raw(path, ("PRAGMA user_version = 2",))
    assert_never_overwritten(path, None, "another program's SQLite file")


def test_a_file_without_its_tables_is_refused(db, path):
    db.put(record())
    raw(path, ("DROP TABLE records",))
    with pytest.raises(DatabaseError, match="no such table"):
        db.put(record())


def test_directories_pipes_and_impossible_paths_are_refused(tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for bad, match in [(tmp_path, "directory"), (tmp_path / "pipe", "pipe"), ("a\0b", "path")]:
        with pytest.raises(DatabaseError, match=match):
            Database(bad)
        assert Lookup(bad, None)(problem(), NVLINK8).reason is Reason.DEFAULT
    with pytest.raises(DatabaseError, match="cannot be"):
        Database(tmp_path / "file" / "tuning.sqlite3").put(record())


def test_a_dangling_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    Database(tmp_path / "link").put(record())
    assert (tmp_path / "target").is_file() and (tmp_path / "link").is_symlink()


def test_a_lost_databases_log_is_not_replayed_into_a_new_one(db, path):
    path.parent.mkdir()
    log = path.with_name(path.name + "-wal")
    log.write_bytes(b"pages of a database that was moved away")
    with pytest.raises(DatabaseError, match="move the log away"):
        db.put(record())
    assert list(bytes_of(path)) == [log.name]
    path.write_bytes(b"x" * 4096)
    with pytest.raises(DatabaseError, match=r"mv .* && mv .*-wal.* .*\.corrupt-wal"):
        db.put(record())


def test_no_hard_links_no_problem(db, path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    assert db.put(record())
    assert db.get(problem(), NVLINK8) == record()
    assert list(bytes_of(path)) == [path.name]


# --- network file systems -------------------------------------------------------------------------


def test_the_file_system_is_read_from_the_mount_table(tmp_path):  # K11
    table = tmp_path / "mounts"
    table.write_text(
        "/dev/root / ext4 rw 0 0\n"
        "server:/home /home nfs4 rw 0 0\n"
        "/dev/sdb /home/local ext4 rw 0 0\n"
        "//server/x /mnt/with\\040space cifs rw 0 0\n"
        "broken line\n"
    )

    def kind(path):
        return network_filesystem(path, table)

    assert kind("/home/me/.cache/x") == "nfs4"
    assert kind("/home/local/x") is None
    assert kind("/homely/x") is None
    assert kind("/mnt/with space/x") == "cifs"
    assert network_filesystem("/home/x", tmp_path / "none") is None


def test_a_network_path_is_warned_of_once_and_works(db, path, monkeypatch, caplog):  # K11
    monkeypatch.setattr(database_module, "network_filesystem", lambda path: "nfs4")
    monkeypatch.setattr("fluxgen.db.connect.network_filesystem", lambda path: "nfs4")
    for _ in range(2):
        assert Database(path).put(record())
    assert caplog.text.count("network file system (nfs4)") == 1
    connection = sqlite3.connect(path)
    # hosts do not share the memory that WAL needs
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    connection.close()
