"""What the repository ships: every record is legal, renders, and is in the manifest."""

from __future__ import annotations

from fluxgen.build.generated import Entry, compiled_part, read_manifest
from fluxgen.core.settings import data_dir
from fluxgen.db.packs import pack_files, read_pack
from fluxgen.db.verify import verify_packs


def test_shipped_packs_verify():
    assert verify_packs(data_dir("tuning_db")) == []


def test_every_shipped_kernel_has_its_source_and_no_source_is_idle():
    records = [r for path in pack_files(data_dir("tuning_db")) for r in read_pack(path)]
    assert len(records) >= 100
    used = {
        Entry("sm90", compiled_part(r.problem.signature), r.kernel)
        for r in records
        if r.kernel is not None
    }
    assert used == set(read_manifest(data_dir("generated")))


def test_every_shipped_record_says_where_its_figures_come_from():
    for path in pack_files(data_dir("tuning_db")):
        for record in read_pack(path):
            assert record.environment.method, record.problem.key
            assert record.environment.fluxgen, record.problem.key
            assert record.created, record.problem.key
