"""The live table: what it shows, what it says in a log, and the time that it thinks is left."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fluxgen.core.problem import Problem, Signature
from fluxgen.report.live import ROWS, TuneTable

PROBLEMS = [Problem(Signature.of("ag_gemm"), 8 * m, 64, 128, 8) for m in range(1, 41)]


def table(trials=10, problems=PROBLEMS, terminal=False):
    now = [0.0]
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120)
    made = TuneTable(console, "tuning on h200, emulated", problems, trials, clock=lambda: now[0])
    return made, now, out


def text(made):
    console = Console(file=io.StringIO(), width=120)
    console.print(made.render())
    return console.file.getvalue()


def test_a_row_a_problem_around_the_present_one():
    made, now, _ = table()
    made.update(0, 40, 10, 50.0, 100.0)
    made.update(30, 40, 4, 80.0, 60.0)
    now[0] = 75
    shown = text(made)
    assert "1 min 15 s" in shown
    assert "> ag_gemm m=248 n=64 k=128" in shown
    assert "4/10" in shown
    assert "0.75" in shown
    assert "m=8 " not in shown, "far above the present one"
    assert shown.count("ag_gemm") == ROWS


def test_time_left_counts_only_what_this_run_did():
    made, now, _ = table(problems=PROBLEMS[:4])
    assert made.left_s() is None
    made.update(2, 4, 1, 50.0, 100.0)  # two problems were finished by an earlier run
    now[0] = 3
    made.update(2, 4, 3, 50.0, 100.0)
    assert made.left_s() == pytest.approx(3 / 3 * 17)
    assert "left" in text(made)


def test_without_a_baseline_there_is_no_speedup():
    made, _, _ = table()
    made.update(0, 40, 1, float("inf"), float("inf"))
    assert "inf" not in text(made)


def test_a_log_gets_one_line_a_problem():
    made, _, out = table()
    with made:
        made.update(0, 40, 9, 50.0, 100.0)
        assert out.getvalue() == ""
        made.update(0, 40, 10, 50.0, 100.0)
        made.update(0, 40, 11, 50.0, 100.0)
    assert out.getvalue() == "1/40 ag_gemm m=8 n=64 k=128: best 50.0 us, unfused 100.0 us\n"


def test_a_terminal_gets_a_table_that_goes_away():
    made, _, out = table(terminal=True)
    with made:
        made.update(0, 40, 10, 50.0, 100.0)
        made._live.refresh()
    assert "tuning on h200" in out.getvalue()
