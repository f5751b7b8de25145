"""Tables of records: whatever a record may hold has words."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fluxgen.core.config import KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Baseline, Provenance, Record
from fluxgen.report.page import page
from fluxgen.report.tables import (
    RECORD_COLUMNS,
    baseline_text,
    print_table,
    record_rows,
    run_text,
)


def test_every_transport_has_words():
    texts = {run_text(RunConfig(transport=transport).to_dict()) for transport in Transport}
    assert len(texts) == len(Transport)


def test_a_split_k_is_said():
    assert "K in 4 parts" in run_text(RunConfig(split=4).to_dict())
    assert "parts" not in run_text(RunConfig().to_dict())


@pytest.mark.parametrize("baseline", [None, *Baseline])
def test_a_record_says_what_it_is_compared_with(baseline):
    problem = Problem(Signature.of("gemm_ar"), 16, 8192, 3584, 8)
    kernel = KernelConfig(16, 64, 128, 1, 1, Schedule.FLAT)
    run = RunConfig(transport=Transport.BROADCAST_PACKETS, split=2)
    record = Record(
        problem, "h100-sxm-nvlink-tp8", kernel, run, 10.0, 20.0, Provenance.PREDICTED,
        baseline=baseline,
    )  # fmt: skip
    text = io.StringIO()
    print_table(Console(file=text, width=400), "t", RECORD_COLUMNS, record_rows([record]))
    assert baseline_text(baseline) in text.getvalue()
    assert "packets to all" in text.getvalue()
    assert len({baseline_text(b) for b in (None, *Baseline)}) == 1 + len(Baseline)
    assert baseline_text(baseline) in page("t", [record], {}, {})
