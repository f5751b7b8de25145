from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from dbtools import AG, KERNEL, NVLINK8, OTHER_SIGNATURES, baseline, problem, record
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxgen.core.config import KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.errors import DatabaseError, FluxgenError
from fluxgen.core.op import Op
from fluxgen.core.problem import Signature
from fluxgen.core.record import Environment, Provenance, Status
from fluxgen.core.settings import data_dir
from fluxgen.core.topology import Gpu
from fluxgen.db import packs
from fluxgen.db.codec import record_to_json_line
from fluxgen.db.database import Database
from fluxgen.db.verify import verify, verify_packs

RS = Signature.of(Op.GEMM_RS)
VALUES = [
    record(8192),
    record(1024),
    baseline(64),
    record(1024, n=512),
    record(1024, signature=RS),
    record(1024, topology="h200-nvlink-tp8"),
    record(1024, tp=4),
]


@pytest.fixture
def db(tmp_path):
    db = Database(tmp_path / "tuning.sqlite3")
    db.put_many(VALUES)
    return db


def lines_of(path):
    return path.read_text().splitlines()


def test_export_writes_sorted_reviewable_packs(db, tmp_path):
    root = tmp_path / "packs"
    written = packs.export(db, root)
    assert [str(p.relative_to(root)) for p in written] == [
        "h100-sxm-nvlink-tp4/ag_gemm.jsonl",
        "h100-sxm-nvlink-tp8/ag_gemm.jsonl",
        "h100-sxm-nvlink-tp8/gemm_rs.jsonl",
        "h200-nvlink-tp8/ag_gemm.jsonl",
    ]
    content = written[1].read_bytes()
    assert content.endswith(b"}\n") and b"\r" not in content
    sizes = [(p["n"], p["m"]) for p in (json.loads(x)["problem"] for x in lines_of(written[1]))]
    assert sizes == [(512, 1024), (6144, 64), (6144, 1024), (6144, 8192)]
    assert verify_packs(root) == []
    assert written[0].stat().st_mode & 0o777 == 0o644
    before = [p.read_bytes() for p in written]
    assert packs.export(db, root) == written  # the same bytes again: no noise in a diff
    assert [p.read_bytes() for p in written] == before
    # one problem tuned again is one changed line
    db.put(record(1024, time_us=90, created="2027-01-01T00:00:00Z"))
    packs.export(db, root)
    old, new = before[1].decode().splitlines(), lines_of(written[1])
    assert sum(a != b for a, b in zip(old, new, strict=True)) == 1
    assert not list(root.rglob(".*"))


def test_import_brings_everything_back(db, tmp_path):
    packs.export(db, tmp_path / "packs")
    other = Database(tmp_path / "other.sqlite3")
    assert packs.import_(tmp_path / "packs", other) == packs.ImportReport(len(VALUES), 0)
    assert list(other.records()) == list(db.records())
    one = Database(tmp_path / "one.sqlite3")
    assert packs.import_(tmp_path / "packs/h200-nvlink-tp8/ag_gemm.jsonl", one).stored == 1


def test_merge_keeps_the_better_whatever_the_order(tmp_path):
    newest = record(time_us=80, created="2026-06-01T00:00:00Z")
    sources = {
        "a.jsonl": record(time_us=50, provenance=Provenance.PREDICTED, created=""),
        "b.jsonl": newest,
        "c.jsonl": record(time_us=70, created="2026-05-01T00:00:00Z"),
    }
    for name, value in sources.items():
        packs.write_pack(tmp_path / name, [value])
    Database(tmp_path / "d.sqlite3").put(record(64))
    paths = [*(tmp_path / name for name in sources), tmp_path / "d.sqlite3"]
    for i, order in enumerate((paths, paths[::-1])):
        into = Database(tmp_path / f"into{i}.sqlite3")
        report = packs.merge(order, into)
        assert report.stored + report.kept == 4
        assert into.get(problem(), NVLINK8) == newest
        assert into.get(problem(64), NVLINK8) == record(64)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"[1]", "object"),
        (b"\xff", "UTF-8"),
        (b'{"time_us":NaN}', "finite"),
        (b" " * 20_000, "bytes"),
        (record_to_json_line(record())[:-1].encode() + b',"x":1}', "'x'"),
        (record_to_json_line(replace(record(), status=Status.FAILED)).encode(), "winners only"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line_and_nothing_is_imported(tmp_path, db, line, why):
    good = [record_to_json_line(record(m)).encode() for m in (64, 128)]
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\n".join([good[0], line, good[1]]) + b"\n")
    with pytest.raises(DatabaseError, match=rf"p\.jsonl:2: .*{why}"):
        packs.read_pack(path)
    empty = Database(tmp_path / "empty.sqlite3")
    with pytest.raises(DatabaseError, match=r"p\.jsonl:2: "):
        packs.merge([db.path, path], empty)
    assert list(empty.records()) == []
    records, problems = packs.scan_pack(path)
    assert len(records) == 2 and len(problems) == 1


def test_many_bad_lines_are_summed_up(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"x\n" * 100)
    with pytest.raises(DatabaseError, match="and 95 more"):
        packs.read_pack(path)


def test_a_cut_off_pack_is_noticed(tmp_path):
    path = tmp_path / "h100-sxm-nvlink-tp8/ag_gemm.jsonl"
    packs.write_pack(path, [record(64), record(128)])
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) * 3 // 4, 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DatabaseError, match="cut off"):
            packs.read_pack(path)
    path.write_bytes(b"")
    assert packs.read_pack(path) == []


@given(st.binary(max_size=300), st.integers(0, 2000), st.integers(0, 2000))
@settings(max_examples=150, deadline=None)
def test_only_deliberate_errors_escape_from_any_bytes(tmp_path_factory, noise, start, end):
    path = tmp_path_factory.mktemp("fuzz") / "p.jsonl"
    packs.write_pack(path, [record(64), baseline(128)])
    whole = path.read_bytes()
    path.write_bytes(whole[:start] + noise + whole[end:])
    records, problems = packs.scan_pack(path)
    assert all("p.jsonl:" in text for text in problems)
    assert verify(records) is not None
    try:
        packs.read_pack(path)
    except FluxgenError:
        assert problems


def test_impossible_packs_are_clear_errors(tmp_path, db, monkeypatch):
    with pytest.raises(DatabaseError, match="cannot be read"):
        packs.read_pack(tmp_path / "none.jsonl")
    with pytest.raises(DatabaseError, match="no such pack"):
        packs.import_(tmp_path / "none", db)
    (tmp_path / "bare").mkdir()
    with pytest.raises(DatabaseError, match="found none"):
        packs.import_(tmp_path / "bare", db)
    with pytest.raises(DatabaseError, match="directory of packs"):
        verify_packs(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(DatabaseError, match="cannot be written"):
        packs.export(db, tmp_path / "file")
    with pytest.raises(DatabaseError, match="no such tuning database"):
        packs.export(Database(tmp_path / "none.sqlite3"), tmp_path / "out")
    packs.write_pack(tmp_path / "big.jsonl", VALUES[:2])
    monkeypatch.setattr(packs, "MAX_PACK_BYTES", 100)
    with pytest.raises(DatabaseError, match="at most 100 bytes"):
        packs.read_pack(tmp_path / "big.jsonl")


def test_a_failed_write_leaves_the_old_pack(tmp_path, monkeypatch):
    path = tmp_path / "h100-sxm-nvlink-tp8/ag_gemm.jsonl"
    packs.write_pack(path, [record(64)])
    before = path.read_bytes()

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DatabaseError, match="No space left"):
        packs.write_pack(path, [record(128)])
    assert path.read_bytes() == before and os.listdir(path.parent) == [path.name]


def test_a_record_in_the_wrong_place_is_refused(tmp_path):
    path = tmp_path / "h200-nvlink-tp8/ag_gemm.jsonl"
    packs.write_pack(path, [record(64)])
    with pytest.raises(DatabaseError, match="belongs in h100-sxm-nvlink-tp8"):
        packs.import_(tmp_path, Database(tmp_path / "db"))
    assert "belongs in" in verify_packs(tmp_path)[0]
    assert packs.load(tmp_path, "h200-nvlink-tp8")[0] == []


# --- verify ---------------------------------------------------------------------------------------


def test_verify_finds_nothing_wrong_with_good_records():
    assert verify(VALUES) == []
    assert verify([baseline(1023)]) == []  # the unfused path takes any m


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (record(1023), "not a multiple of tp"),
        (record(k=12290), "multiple of 16 bytes"),
        (record(64), "half padding"),
        (record(kernel=replace(KERNEL, tile_n=100)), "tile_n 100"),
        (record(run=RunConfig(groups=(3, 4))), "do not sum"),
        (record(run=RunConfig(sms=200)), "sms 200"),
        (record(run=RunConfig(chunks=0)), "chunks 0"),
        (record(topology="l20-pcie-tp8"), "sm89 has no such kernels"),
        (record(topology="l20-nvlink-tp8"), "no NVLink"),
        (record(topology="a100-mig-1g.18gb-nvlink-tp8", run=RunConfig(sms=2000)), "sms 2000"),
        (record(time_us=151.0), "slower than the unfused path"),
        (record(time_us=-1.0), "time_us"),
        (record(topology="x/../y-pcie-tp8"), "topology"),
        (replace(record(), kernel=None), "kernel, run"),
        (replace(record(), status=Status.FAILED), "failed"),
        (baseline(0), "zero size"),
        *((record(signature=OTHER_SIGNATURES[i]), "illegal") for i in (2, 4)),
    ],
)
def test_verify_says_what_is_wrong(value, why):
    (found,) = verify([value])
    assert why in found and value.problem.key in found


def test_verify_takes_other_gpus_and_finds_duplicates():
    mig = Gpu.from_properties("a100 mig", (9, 0), 14, 1000, 227, 20, pcie_gbs=5)
    value = record(topology="a100-mig-pcie-tp8", run=RunConfig(sms=100))
    assert verify([value]) == []
    assert "14" in verify([value], {"a100-mig": mig})[0]
    found = verify([record(), record(time_us=1)])
    assert len(found) == 1 and "duplicate" in found[0]


@pytest.mark.parametrize("gpu", ["rtx-pro-6000", "a100-mig-1g.18gb", "nobody-knows"])
def test_an_unknown_gpu_is_judged_by_its_kernels_schedule(gpu):
    """And not as a Hopper: Ampere's kernels are legal there, tiles that no GPU has are not."""
    ampere = KernelConfig(128, 128, 64, 1, 1, Schedule.MULTISTAGE_8, 3)
    topology = f"{gpu}-pcie-tp8"
    good = record(topology=topology, kernel=ampere)
    assert verify([good]) == []
    assert verify([record(topology=topology)]) == []  # of Hopper's schedule
    few = replace(good, run=RunConfig(sms=100), environment=Environment(sm_count=84))
    assert "sms 100" in verify([few])[0]
    wide = replace(ampere, cluster_m=2)
    assert "cluster" in verify([record(topology=topology, kernel=wide)])[0]
    flat = KernelConfig(16, 16, 64, 1, 1, Schedule.FLAT, 4)  # tiles of Ampere's alone
    run = RunConfig((8,), transport=Transport.SM_COPY, span=8)
    assert verify([record(16, topology=topology, kernel=flat, run=run)]) == []
    assert "half padding" in verify([record(64, topology=topology, kernel=ampere)])[0]


def test_verify_packs_finds_what_would_spoil_a_diff(tmp_path):
    path = tmp_path / "h100-sxm-nvlink-tp8/ag_gemm.jsonl"
    lines = [record_to_json_line(record(m)) for m in (8192, 1024)]
    path.parent.mkdir()
    path.write_text("\n".join(lines) + "\n")
    assert "not sorted" in verify_packs(tmp_path)[0]
    path.write_text(json.dumps(record(1024).to_dict()) + "\n")
    assert "ag_gemm.jsonl:1: not the canonical form" in verify_packs(tmp_path)[0]
    path.write_text("x\n")
    assert "ag_gemm.jsonl:1: " in verify_packs(tmp_path)[0]


def test_the_shipped_packs_are_good():
    assert verify_packs(data_dir("tuning_db")) == []


def test_the_signature_is_a_part_of_the_order():
    a, b = record(signature=replace(AG, return_gathered=True)), record(signature=AG)
    assert packs.sort_key(a) != packs.sort_key(b)
