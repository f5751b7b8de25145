"""The picture of speedups: valid XML, one dot for each record, nothing outside of its frame."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Provenance, Record
from fluxgen.report.picture import HEIGHT, WIDTH, speedup_svg

SPACE = "{http://www.w3.org/2000/svg}"


def record(op: str, m: int, speedup: float, n: int = 6144) -> Record:
    problem = Problem(Signature.of(op), m, n, 12288, 8)
    return Record(
        problem, "h200-nvlink-tp8", None, None, 100.0, 100.0 * speedup, Provenance.EMULATED
    )


@pytest.mark.parametrize(
    "records",
    [
        [record("ag_gemm", 512, 1.0)],
        [record("ag_gemm", 512, 0.7), record("gemm_rs", 64, 1.2)],
        [record("gemm_ar", 2**i, 1 + i / 3, n) for i in range(14) for n in (64, 128)],
    ],
)
def test_it_shows_every_record_within_its_frame(records):
    root = ET.fromstring(speedup_svg("a < b & c", records))
    assert root.find(f"{SPACE}title").text == "a < b & c"
    dots = root.findall(f"{SPACE}circle")
    assert len(dots) == len(records)
    for dot in dots:
        assert 0 < float(dot.get("cx")) < WIDTH
        assert 0 < float(dot.get("cy")) < HEIGHT
    shown = {dot.find(f"{SPACE}title").text for dot in dots}
    assert f"{records[0].problem.op.value}, m={records[0].problem.m}: " in "".join(shown)
    assert len(root.findall(f"{SPACE}polyline")) == len({r.problem.op for r in records})


def test_faster_is_higher_and_more_tokens_are_further_right():
    records = [record("ag_gemm", 512, 1.0), record("ag_gemm", 1024, 1.5)]
    root = ET.fromstring(speedup_svg("t", records))
    one, two = root.findall(f"{SPACE}circle")
    assert float(one.get("cx")) < float(two.get("cx"))
    assert float(one.get("cy")) > float(two.get("cy"))


def test_the_same_records_give_the_same_text():
    records = [record("ag_gemm", 512, 1.0), record("gemm_rs", 1024, 1.5)]
    assert speedup_svg("t", records) == speedup_svg("t", records[::-1])
