"""Committed sources: exact, complete at any moment, checked against the templates."""

from __future__ import annotations

import json

import pytest

from fluxgen.compiler.generated import (
    MANIFEST,
    Entry,
    check_sources,
    read_manifest,
    write_sources,
)
from fluxgen.core.config import KernelConfig, Schedule
from fluxgen.core.errors import BuildError, StoreError
from fluxgen.core.problem import Signature
from fluxgen.core.settings import data_dir

ENTRIES = [
    Entry("sm90", Signature.of("gemm_rs", "fp16"), KernelConfig(64, 96, 64)),
    Entry("sm90", Signature.of("ag_gemm"), KernelConfig(128, 192, 64, 2, 1, Schedule.PINGPONG)),
]


def test_round_trip_and_second_write_changes_nothing(tmp_path):
    directory = tmp_path / "générated sources"
    changed = write_sources(directory, ENTRIES)
    assert len(changed) == 4
    assert changed[-1] == MANIFEST, "the manifest comes last"
    assert set(read_manifest(directory)) == set(ENTRIES)
    assert write_sources(directory, ENTRIES) == []
    assert check_sources(directory) == []


def test_a_removed_kernel_leaves_no_file(tmp_path):
    write_sources(tmp_path, ENTRIES)
    write_sources(tmp_path, ENTRIES[:1])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {MANIFEST, "support_sm90.cu", "gemm_rs_fp16_sm90_64x96x64_1x1_pingpong_auto.cu"}


def test_check_sees_every_difference(tmp_path):
    write_sources(tmp_path, ENTRIES)
    path = tmp_path / "support_sm90.cu"
    path.write_text(path.read_text() + "// edited\n")
    (tmp_path / "extra.cu").write_text("int x;")
    next(tmp_path.glob("ag_gemm*.cu")).unlink()
    problems = check_sources(tmp_path)
    assert any("support_sm90.cu: differs" in p for p in problems)
    assert any("extra.cu: not in" in p for p in problems)
    assert any("ag_gemm" in p and "missing" in p for p in problems)
    assert len(problems) == 3


def test_a_template_change_is_seen(tmp_path):
    write_sources(tmp_path / "out", ENTRIES)
    templates = tmp_path / "templates"
    templates.mkdir()
    for source in data_dir("templates").glob("*.j2"):
        (templates / source.name).write_text(source.read_text() + "// changed\n")
    assert len(check_sources(tmp_path / "out", templates)) == 4


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"version": 1}', '{"version": 99, "kernels": []}',
     '{"version": 1, "kernels": [{"arch": "sm90"}]}',
     '{"version": 1, "kernels": [{"arch": "x; rm -rf", "signature": {}, "kernel": {}}]}',
     "[" * 100000],
)  # fmt: skip
def test_a_damaged_manifest_is_one_clear_error(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(BuildError, match=MANIFEST):
        read_manifest(tmp_path)


def test_a_kernel_name_cannot_escape_the_directory(tmp_path):
    write_sources(tmp_path, ENTRIES)
    document = json.loads((tmp_path / MANIFEST).read_text())
    document["kernels"][0]["name"] = "../../evil"
    document["kernels"][0]["kernel"]["tile_m"] = "../../evil"
    (tmp_path / MANIFEST).write_text(json.dumps(document))
    with pytest.raises(BuildError):
        read_manifest(tmp_path)


def test_a_directory_that_cannot_be_made_is_a_store_error(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(StoreError, match="--out"):
        write_sources(blocker / "generated", ENTRIES)


def test_the_repository_is_as_the_templates_give_it():
    assert check_sources(data_dir("generated")) == []
