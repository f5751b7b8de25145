"""What the repository ships: every record is legal and renders; what was measured is in the
manifest."""

from __future__ import annotations

import json
from pathlib import Path

from fluxgen.compiler.generated import Entry, read_manifest
from fluxgen.core.record import Baseline, Provenance
from fluxgen.core.settings import data_dir
from fluxgen.core.topology import LinkKind
from fluxgen.db.keys import topology_of
from fluxgen.db.packs import pack_files, read_pack
from fluxgen.db.verify import verify_packs


def test_shipped_packs_verify():
    assert verify_packs(data_dir("tuning_db")) == []


def records():
    return [r for path in pack_files(data_dir("tuning_db")) for r in read_pack(path)]


def entries(records):
    return {
        Entry(topology_of(r.topology).gpu.arch, r.problem.signature.compiled, r.kernel)
        for r in records
        if r.kernel is not None
    }


def test_every_measured_kernel_has_its_source_and_no_source_is_idle():
    measured = [r for r in records() if r.provenance is not Provenance.PREDICTED]
    assert len(measured) >= 170
    assert entries(measured) == set(read_manifest(data_dir("generated")))


def test_every_predicted_kernel_renders():
    """Their sources are written by ``fluxgen build``, for the GPU that it is asked for."""
    predicted = [r for r in records() if r.provenance is Provenance.PREDICTED]
    assert len(predicted) >= 600
    for entry in entries(predicted):
        assert entry.arch.removeprefix("sm") in entry.render().text, entry


def test_every_corner_is_shipped():
    """Ampere and Hopper, NVLink and PCIe; and a GPU that reaches no other's memory."""
    corners = {(t.gpu.cc // 10, t.link) for t in map(topology_of, {r.topology for r in records()})}
    four = {(cc, link) for cc in (8, 9) for link in (LinkKind.NVLINK, LinkKind.PCIE)}
    assert corners == {*four, (8, LinkKind.HOST)}


def test_every_shipped_record_says_where_its_figures_come_from():
    for path in pack_files(data_dir("tuning_db")):
        for record in read_pack(path):
            assert record.environment.method, record.problem.key
            assert record.environment.fluxgen, record.problem.key
            assert record.created, record.problem.key
            bound = record.baseline in (Baseline.LINK_BOUND, Baseline.COPIES)
            assert bound == (record.provenance is Provenance.EMULATED), record.problem.key
            assert record.baseline is not None, record.problem.key


def test_what_was_measured_over_pcie_is_in_the_data():
    """Each record is a row of a run of ``tests.bench.bench_pcie``."""
    data = Path(__file__).parents[2] / "bench/data"
    rows = [
        row
        for name in ("h200_pcie.json", "h200_pcie_first.json")
        for row in json.loads((data / name).read_text("utf-8"))["rows"]
    ]
    found = [r for r in records() if r.topology == "h200-pcie-tp8"]
    assert len(found) == 10
    for r in found:
        p = r.problem
        (row,) = [
            row
            for row in rows
            if (row["op"], row["m"], row["n"], row["k"]) == (p.op.value, p.m, p.n, p.k)
            and round(row["us"]["fluxgen"]["median"], 3) == r.time_us
        ]
        assert (row["kernel"], row["run"]) == (r.kernel.name, r.run.to_dict())
        assert round(row["us"]["unfused"]["median"], 3) == r.baseline_us
        assert row["tp"] == p.tp
