from __future__ import annotations

import copy
import logging
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from dbtools import (
    AG,
    KERNEL,
    NVLINK8,
    OTHER_SIGNATURES,
    SMALL,
    baseline,
    problem,
    record,
)

from fluxgen.core.config import ChunkAxis, RunConfig
from fluxgen.core.problem import Problem
from fluxgen.core.record import Provenance
from fluxgen.core.topology import Gpu, Topology
from fluxgen.db import lookup as lookup_module
from fluxgen.db import packs, result
from fluxgen.db.database import Database
from fluxgen.db.lookup import Lookup, Reason, default_lookup, lookup

ALONE = Topology.of("h100-sxm", "nvlink", 1)
PAIR = Topology.of("h100-sxm", "nvlink", 2)


@pytest.fixture
def db(tmp_path):
    return Database(tmp_path / "tuning.sqlite3")


def sizes(db, topology, asked):
    look = Lookup(db, None)
    tp = topology.world
    return {
        m: (r.reason.value, r.record.problem.m if r.record else None)
        for m in asked
        for r in [look(problem(m, tp=tp), topology)]
    }


# --- the rule for m -------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False])
def test_a_ladder_for_decode_never_serves_a_prefill(db, fused):  # B09
    make = (lambda m: record(m, tp=1, kernel=SMALL)) if fused else (lambda m: baseline(m, tp=1))
    db.put_many([make(m) for m in (1, 2, 4, 8)])
    assert sizes(db, ALONE, [0, 1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 2048, 10**6]) == {
        0: ("default", None),
        1: ("exact", 1),
        2: ("exact", 2),
        3: ("bucket", 4),
        5: ("bucket", 8),
        7: ("bucket", 8),
        8: ("exact", 8),
        9: ("bucket", 8),
        12: ("bucket", 8),
        16: ("bucket", 8),
        17: ("default", None),
        2048: ("default", None),
        10**6: ("default", None),
    }


def test_between_and_beyond_distant_tuned_sizes(db):
    db.put_many([baseline(m) for m in (128, 8192)])
    assert sizes(db, NVLINK8, [63, 64, 200, 256, 257, 4095, 4096, 16384, 16385]) == {
        63: ("default", None),
        64: ("bucket", 128),
        200: ("bucket", 128),  # up would be 41x
        256: ("bucket", 128),
        257: ("default", None),
        4095: ("default", None),
        4096: ("bucket", 8192),
        16384: ("bucket", 8192),
        16385: ("default", None),
    }


def test_a_baseline_answer_is_not_a_default(db):
    db.put(baseline(64))
    answer = Lookup(db, None)(problem(64), NVLINK8)
    assert answer.reason is Reason.EXACT and answer.config is None
    assert answer.record.is_baseline and answer.baseline_us == 150.0
    assert "the unfused path" in answer.text


def test_an_answer_must_be_legal_for_the_asked_problem(db):
    db.put_many([record(4096), record(8192), record(2048)])
    look = Lookup(db, None)
    # tp does not divide m: no kernel takes it, whatever was tuned beside it
    answer = look(problem(4097), NVLINK8)
    assert answer.reason is Reason.DEFAULT and "not a multiple of tp=8" in answer.text
    # chunks of 8192 do not fit 6144: the next candidate does
    big = record(
        8192, run=RunConfig(chunk_axis=ChunkAxis.M, chunks=8), created="2027-01-01T00:00:00Z"
    )
    db.put(big)
    look.refresh()
    assert look(problem(8192), NVLINK8).record == big
    answer = look(problem(6144), NVLINK8)
    assert answer.reason is Reason.BUCKET and answer.record.problem.m == 4096
    assert answer.config == (KERNEL, RunConfig())


def test_a_record_slower_than_its_baseline_is_not_used(db):
    db.put(record(time_us=200.0))
    answer = Lookup(db, None)(problem(), NVLINK8)
    assert answer.reason is Reason.DEFAULT and "slower than the unfused path" in answer.text


@pytest.mark.parametrize("run", [RunConfig(), None])
@pytest.mark.parametrize("where", [4096, 6144])
def test_what_failed_here_is_not_proposed_again(db, tmp_path, run, where):
    packs.write_pack(packs.pack_path(tmp_path, record()), [record()])
    db.put_failure(problem(where), NVLINK8, KERNEL, run, "hung")
    answer = Lookup(db, tmp_path)(problem(6144), NVLINK8)
    assert answer.reason is Reason.DEFAULT and "it failed before: hung" in answer.text
    db.clear_failures(problem(where), NVLINK8)
    assert Lookup(db, tmp_path)(problem(6144), NVLINK8).reason is Reason.BUCKET


def test_another_failure_does_not_matter(db):
    db.put(record())
    db.put_failure(problem(), NVLINK8, KERNEL, RunConfig(chunks=4), "hung")
    db.put_failure(problem(), NVLINK8, SMALL, None, "no build")
    db.put_failure(problem(8), NVLINK8, KERNEL, None, "other size")
    assert Lookup(db, None)(problem(), NVLINK8).reason is Reason.EXACT


def test_a_wrong_world_is_a_default(db):
    db.put(record())
    answer = Lookup(db, None)(problem(), PAIR)
    assert answer.reason is Reason.DEFAULT


# --- which of several -----------------------------------------------------------------------------


def test_better_provenance_then_the_users_database(db, tmp_path):
    predicted, emulated, measured = Provenance
    pack = packs.pack_path(tmp_path, record())

    def answer(mine, shipped):
        db.delete(problem(), NVLINK8)
        db.put(record(provenance=mine, time_us=1))
        packs.write_pack(pack, [record(provenance=shipped, time_us=2)])
        result = Lookup(db, tmp_path)(problem(), NVLINK8)
        assert result.source == str(db.path if result.time_us == 1 else tmp_path)
        return result.time_us, result.provenance

    assert answer(predicted, measured) == (2, measured)
    assert answer(measured, predicted) == (1, measured)
    assert answer(emulated, emulated) == (1, emulated)


def test_exact_comes_before_a_better_provenance_beside_it(db):
    db.put_many([record(4096, provenance=Provenance.PREDICTED), record(8192)])
    assert Lookup(db, None)(problem(), NVLINK8).provenance is Provenance.PREDICTED


def test_a_useless_record_does_not_hide_the_next_best(db, tmp_path):
    db.put(record(time_us=200.0))
    shipped = record(provenance=Provenance.PREDICTED)
    packs.write_pack(packs.pack_path(tmp_path, shipped), [shipped])
    assert Lookup(db, tmp_path)(problem(), NVLINK8).record == shipped


def test_the_key_holds_everything(db):  # J03
    db.put(record())
    look = Lookup(db, None)
    asked = [problem(signature=s) for s in OTHER_SIGNATURES]
    asked += [problem(n=6152), problem(k=12296)]
    for value in asked:
        answer = look(value, NVLINK8)
        assert answer.reason is Reason.DEFAULT and value.key in answer.key
    for other in ("h200", "h100-nvl"):
        assert look(problem(), Topology.of(other, "nvlink", 8)).reason is Reason.DEFAULT
    assert look(problem(), Topology.of("h100-sxm", "pcie", 8)).reason is Reason.DEFAULT


# --- misses ---------------------------------------------------------------------------------------


def test_an_empty_database_is_a_default_with_a_hint(db, tmp_path, caplog):  # J13
    answer = Lookup(db, tmp_path / "none")(problem(), NVLINK8)
    assert answer.reason is Reason.DEFAULT and answer.config is None and answer.record is None
    assert answer.time_us is answer.baseline_us is answer.provenance is None
    assert "fluxgen tune" in answer.text and "unfused" in answer.text
    assert not db.exists()
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX 6000 Ada/Generation",
        "NVIDIA A100 MIG 1g.18gb",
        "ＮＶＩＤＩＡ Ü ⚡",
        "..",
        "a\nb",
    ],
)
def test_a_miss_is_logged_with_the_searched_key(db, caplog, name):  # J11
    gpu = Gpu.from_properties(name, (9, 0), 132, 1800, 227, 80)
    topology = Topology.of(gpu, "pcie", 8)
    answer = Lookup(db, None)(problem(), topology)
    assert answer.key == f"{gpu.name}-pcie-tp8/{problem().key}"
    assert answer.key in caplog.text and len(caplog.records) == 1
    # found again when tuned under the driver's name
    db.put(record(topology=topology.key))
    assert Lookup(db, None)(problem(), topology).reason is Reason.EXACT


def test_a_name_that_was_never_normalised_is_a_miss(db, caplog):
    gpu = replace(NVLINK8.gpu, name="NVIDIA H100/../x")
    answer = Lookup(db, None)(problem(), replace(NVLINK8, gpu=gpu))
    db.put(record())
    assert answer.reason is Reason.DEFAULT
    assert Lookup(db, None)(problem(), replace(NVLINK8, gpu=gpu)).reason is Reason.DEFAULT
    assert "normalised GPU name" in caplog.text


def test_a_server_with_every_m_does_not_fill_the_log(db, caplog):
    look = Lookup(db, None)
    for m in range(1, 200):
        look(problem(m), NVLINK8)
    look(problem(64, n=128), NVLINK8)
    warned = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warned) == 2


def test_a_miss_names_the_sizes_that_are_tuned(db):
    db.put_many([baseline(m) for m in range(8, 8 * 40, 8)])
    text = Lookup(db, None)(problem(10**6), NVLINK8).text
    assert "tuned m: 8, 16, 24" in text and "..." in text and len(text) < 500


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"x\n", b"[]\n"])
def test_a_broken_pack_is_one_warning_and_a_miss(db, tmp_path, caplog, content):  # J07
    path = packs.pack_path(tmp_path, record())
    path.parent.mkdir()
    path.write_bytes(content)
    packs.write_pack(path.with_name("gemm_rs.jsonl"), [])
    assert Lookup(None, tmp_path)(problem(), NVLINK8).reason is Reason.DEFAULT
    lines = [r.getMessage() for r in caplog.records if "pack line" in r.getMessage()]
    assert len(lines) == bool(content) and all("\n" not in text for text in lines)
    assert path.read_bytes() == content


def test_a_bad_line_spares_the_good_ones(tmp_path, caplog):
    path = packs.pack_path(tmp_path, record())
    packs.write_pack(path, [record()])
    path.write_bytes(b"garbage\n" + path.read_bytes())
    assert Lookup(None, tmp_path)(problem(), NVLINK8).reason is Reason.EXACT
    assert "ag_gemm.jsonl:1" in caplog.text


def test_a_zero_size_is_a_default_and_reads_nothing(tmp_path, caplog):
    look = Lookup(tmp_path, None)  # a directory: reading it would warn
    assert look(problem(0), NVLINK8).reason is Reason.DEFAULT
    assert look(problem(64, k=0), NVLINK8).reason is Reason.DEFAULT
    assert "nothing to launch" in look(problem(0), NVLINK8).text
    assert not caplog.records


# --- digests --------------------------------------------------------------------------------------


def test_ranks_with_different_databases_have_different_digests(tmp_path):  # J01
    dbs = [Database(tmp_path / f"rank{rank}.sqlite3") for rank in range(4)]
    dbs[0].put(record())
    dbs[1].put(record(time_us=99.5))  # the same choice from another measurement
    dbs[2].put(record(kernel=replace(KERNEL, tile_n=192)))
    digests = {Lookup(db, None)(problem(), NVLINK8).digest for db in dbs}
    assert len(digests) == 4  # the last one is empty
    near = {Lookup(db, None)(problem(4104), NVLINK8).digest for db in dbs}
    assert len(near) == 4 and not near & digests


def test_ranks_with_equal_records_have_equal_digests(tmp_path, db, monkeypatch):
    db.put(record())
    packs.export(db, tmp_path / "packs")
    mine = Lookup(db, None)(problem(), NVLINK8)
    shipped = Lookup(None, tmp_path / "packs")(problem(), NVLINK8)
    assert mine.digest == shipped.digest and len(mine.digest) == 16
    empty = [Lookup(None, None)(problem(), NVLINK8).digest for _ in range(2)]
    assert empty[0] == empty[1] != mine.digest
    monkeypatch.setattr(result, "__version__", "9.9.9")
    assert Lookup(db, None)(problem(), NVLINK8).digest != mine.digest


# --- the memo -------------------------------------------------------------------------------------


def test_changes_are_seen_after_refresh_only(db):
    look = Lookup(db, None)
    assert look(problem(), NVLINK8).reason is Reason.DEFAULT
    db.put(record())
    assert look(problem(), NVLINK8).reason is Reason.DEFAULT
    assert look(problem(8192), NVLINK8).reason is Reason.DEFAULT  # new question, same snapshot
    look.refresh()
    assert look(problem(), NVLINK8).reason is Reason.EXACT
    db.delete(problem(), NVLINK8)
    assert look(problem(8192), NVLINK8).reason is Reason.BUCKET


def test_equal_questions_have_the_same_answer_object(db):
    db.put(record())
    look = Lookup(db, None)
    first = look(problem(), NVLINK8)
    assert look(copy.deepcopy(problem()), copy.deepcopy(NVLINK8)) is first
    assert look.lookup(problem(), NVLINK8) is first


def test_objects_made_anew_for_each_call_are_told_apart(db):
    """The memo goes by identity: an address that is used again must not bring an old answer."""
    db.put_many([record(), record(signature=OTHER_SIGNATURES[1])])
    look = Lookup(db, None, memo_size=7)
    for i in range(200):
        signature = replace(AG, dtype=OTHER_SIGNATURES[1].dtype) if i % 2 else replace(AG)
        signature = replace(signature, out_dtype=signature.dtype)
        answer = look(Problem(signature, 4096, 6144, 12288, 8), replace(NVLINK8))
        if i % 2:
            assert answer.reason is Reason.DEFAULT  # fp16 -> fp16 is not tuned
        else:
            assert answer.record.problem.signature == AG


def test_the_memo_is_bounded(db):
    db.put(record())
    look = Lookup(db, None, memo_size=10)
    for m in range(1, 100):
        look(problem(m), NVLINK8)
    assert len(look._snapshot.memo) <= 10 and len(look._snapshot.answers) <= 10
    assert look(problem(), NVLINK8).reason is Reason.EXACT


def test_threads_share_one_lookup(db):  # H07
    db.put_many([baseline(m) for m in (64, 4096)])
    look = Lookup(db, None, memo_size=50)
    wrong, stop = [], threading.Event()

    def ask(offset):
        while not stop.is_set():
            for m in range(1, 300, 7):
                answer = look(problem(m + offset), NVLINK8)
                wanted = 32 <= m + offset <= 128
                if (answer.record is not None) is not wanted or not answer.key.count(
                    f"/m{m + offset}/"
                ):
                    wrong.append((m, offset, answer))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        time.sleep(0.02)
        look.refresh()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_warm_lookup_takes_microseconds_at_most(db):
    db.put(record())
    look = Lookup(db, None)
    value = problem()
    look(value, NVLINK8)
    best = float("inf")
    for _ in range(20):
        begin = time.perf_counter_ns()
        for _ in range(1000):
            look(value, NVLINK8)
        best = min(best, (time.perf_counter_ns() - begin) / 1000)
    assert best < 2000, f"{best} ns"


# --- the process's one lookup ---------------------------------------------------------------------


@pytest.fixture
def fresh():
    lookup_module._shared.cache_clear()
    yield
    lookup_module._shared.cache_clear()


def test_default_lookup_follows_the_settings(db, tmp_path, monkeypatch, fresh):
    db.put(record())
    monkeypatch.setenv("FLUXGEN_DB", str(db.path))
    assert default_lookup() is default_lookup()
    assert lookup(problem(), NVLINK8).source == str(db.path)
    monkeypatch.setenv("FLUXGEN_DB", str(tmp_path / "other"))
    assert lookup(problem(m=808), NVLINK8, packs=tmp_path).reason is Reason.DEFAULT
    assert lookup(problem(), NVLINK8, db=db.path, packs=tmp_path).reason is Reason.EXACT
    assert default_lookup(db.path, tmp_path) is default_lookup(db.path, tmp_path)


def test_looking_up_imports_nothing_heavy():
    code = (
        "import sys, fluxgen.db.lookup, fluxgen.db.verify\n"
        "heavy = {'torch', 'optuna', 'numpy', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
