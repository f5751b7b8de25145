"""The search: the best of all that fit, what it says when nothing does, and published steps."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import fluxgen
from fluxgen.cli import main
from fluxgen.core.errors import UsageError
from fluxgen.core.topology import GPUS
from fluxgen.planning.cluster import Cluster
from fluxgen.planning.file import read_plan
from fluxgen.planning.layout import Fixed, Layout, layouts
from fluxgen.planning.memory import memory
from fluxgen.planning.model import Transformer
from fluxgen.planning.practice import PRACTICES
from fluxgen.planning.search import plan
from fluxgen.planning.timing.fused import Fusion
from fluxgen.planning.timing.step import Stepper
from fluxgen.shapes import model_dims
from tests.bench import bench_plan

H100 = GPUS["h100-sxm"]
SMALL = {"target": "h100-sxm", "gpus": 16, "batch": 32, "seq": 4096}


def test_the_best_is_the_best_of_all_that_fit():
    found = plan("llama-3.1-8b", **SMALL, fused="off", best=5)
    model, cluster = Transformer.of(model_dims("llama-3.1-8b")), Cluster.of(H100, 16)
    modern = PRACTICES["modern"]
    stepper = Stepper(model, cluster, 32, 4096, modern, Fusion(cluster))
    times = {}
    for layout in layouts(model, cluster, 32, 4096, Fixed()):
        if memory(model, layout, modern, 32, 4096).total <= H100.mem_gb * 1e9:
            times[layout] = stepper.step(layout).step_us
    assert found.best.step.step_us == pytest.approx(min(times.values()))
    assert found.best.layout in times
    assert [c.step.step_us for c in found.choices] == sorted(c.step.step_us for c in found.choices)
    assert found.tried > found.dropped > 0
    assert plan("llama-3.1-8b", **SMALL, fused="off", best=5) == found


def test_parts_add_up_and_figures_agree():
    for choice in plan("llama-3.1-8b", **SMALL).choices:
        step = choice.step
        assert sum(us for _, us in step.parts) == pytest.approx(step.step_us)
        assert all(us >= 0 for _, us in step.parts)
        assert 0 <= step.exposed < 1
        tokens = 32 * 4096 / (step.step_us / 1e6) / 16
        assert choice.tokens_per_s == pytest.approx(tokens)
        assert 0 < choice.mfu < 0.8
        assert choice.memory.total <= 80e9
        assert step.step_us <= choice.unfused_us * 1.000001


def test_fused_ops_come_from_records_where_there_are_some():
    """The shipped records of H100s at tp 8 are of 512 tokens and more."""
    fixed = Fixed(tp=8, micro=1)
    with_records = plan("llama-3.1-8b", **SMALL, fixed=fixed, best=1).best
    sources = {source for _, source in with_records.problems}
    assert any("m=4096" in source for source in sources)
    predicted = plan("llama-3.1-8b", **SMALL, fixed=fixed, fused="predict", best=1).best
    assert {source for _, source in predicted.problems} <= {"predicted", ""}
    off = plan("llama-3.1-8b", **SMALL, fixed=fixed, fused="off", best=1).best
    assert off.step.step_us == off.unfused_us >= with_records.step.step_us
    assert {p for p, _ in off.problems} == {p for p, _ in with_records.problems}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_serving_has_no_replicas_to_wait_for(phase):
    found = plan("llama-3.1-70b", target="h200", gpus=8, batch=32, seq=4096, phase=phase)
    parts = dict(found.best.step.parts)
    assert parts["replicas"] == parts["optimiser"] == 0
    assert all(c.layout.recompute == "none" and c.layout.zero == 0 for c in found.choices)
    if phase == "decode":
        assert found.best.mfu == 0
        weights = 2 * 70.55e9 / found.best.layout.tp
        assert found.best.step.step_us > weights / 4.8e6 * 0.9, "weights are read at least once"


def test_both_families_beside_each_other():
    megatron = plan("llama-3.1-8b", **SMALL, fused="off", best=1)
    axonn = plan("llama-3.1-8b", **SMALL, fused="off", family="axonn", best=1).best
    both = plan("llama-3.1-8b", **SMALL, fused="off", family="all", best=1)
    assert axonn.layout.grid and not megatron.best.layout.grid
    times = [megatron.best.step.step_us, axonn.step.step_us]
    assert both.rival is not None and megatron.rival is None
    assert [both.best.step.step_us, both.rival.step.step_us] == sorted(times)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": 63}, "56 or 64 would do"),
        ({"gpus": 0}, "gpus"),
        ({"batch": 0}, "batch"),
        ({"seq": -1}, "seq"),
        ({"phase": "test"}, "train, prefill, decode"),
        ({"fused": "maybe"}, "records, predict, off"),
        ({"family": "x"}, "megatron, axonn, all"),
        ({"practice": "x"}, "modern"),
        ({"link_between": "fast"}, "50GB/s,5us"),
        ({"link": "x"}, "nvlink"),
        ({"target": "x"}, "target"),
        ({"batch": 7, "fixed": Fixed(dp=2)}, "A batch of 8"),
        ({"fixed": Fixed(tp=3)}, "tp 3"),
        ({"fixed": Fixed(recompute="some")}, "none, selective, full"),
        ({"gpus": 1, "fixed": Fixed(zero=3)}, "no layout"),
    ],
)
def test_bad_input_gets_one_line_that_says_what_would_do(changes, words):
    with pytest.raises(UsageError) as error:
        plan("llama-3.1-8b", **{**SMALL, **changes})
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_that_fits_nowhere_says_by_how_much():
    with pytest.raises(UsageError, match=r"needs \d+\.\d GB more on each"):
        plan("llama-3.1-405b", target="h100-sxm", gpus=8, batch=8, seq=8192)


def test_a_layout_that_is_given_can_be_predicted_whether_or_not_it_fits():
    """The published 22B on one node: 1.42 s with recomputation and without sequence parallelism."""
    sizes = Transformer("22b", 48, 6144, 64, 64, 96, 24576, False, 51200, True)
    fixed = Fixed(tp=8, recompute="full", micro=4, sp=False)
    given = {"target": "a100-sxm-80gb", "gpus": 8, "batch": 4, "seq": 2048, "fixed": fixed}
    found = plan(sizes, practice="megatron-2022", fused="off", **given)
    assert found.best.step.step_us / 1e6 == pytest.approx(1.42, rel=0.1)
    with pytest.raises(UsageError, match="more on each"):
        plan("llama-3.1-70b", **SMALL, fixed=Fixed(dp=16, zero=0, micro=1, recompute="none"))
    large = plan(
        "llama-3.1-70b", **SMALL, fixed=Fixed(dp=16, zero=0, micro=1, recompute="none"),
        ignore_memory=True,
    )  # fmt: skip
    assert large.best.memory.total > 80e9
    assert large.dropped == large.tried


def test_an_interrupted_search_keeps_what_it_has():
    def stop(tried: int) -> None:
        if tried >= 64:
            raise KeyboardInterrupt

    found = plan("llama-3.1-8b", **SMALL, progress=stop)
    assert found.interrupted
    assert found.tried == 64
    assert plan("llama-3.1-8b", **SMALL).tried > 64


def test_python_reaches_it_by_name():
    found = fluxgen.plan("llama-3.1-8b", **SMALL, best=1)
    assert found.best.layout.gpus == 16


# --- written down ---------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setenv("FLUXGEN_HOME", str(tmp_path / "home"))
    path = tmp_path / "plan.json"
    arguments = ["plan", "--model", "llama-3.1-8b", "--target", "h100-sxm", "--gpus", "16",
                 "--batch", "32", "--seq", "4096", "--tp", "8", "--best", "2"]  # fmt: skip
    assert main([*arguments, "--out", str(path)]) == 0
    return path


def test_a_written_plan_is_read_back(written):
    saved = read_plan(written)
    found = plan("llama-3.1-8b", **SMALL, fixed=Fixed(tp=8), best=2)
    assert saved.layout == found.best.layout
    assert saved.problems == tuple(p for p, _ in found.best.problems)
    assert saved.topology().key == "h100-sxm-nvlink-tp8"
    assert set(saved.timelines()) >= {"forward of a layer", "backward of a layer"}


def test_a_report_and_a_search_of_it(written, tmp_path, capsys):
    page, trace = tmp_path / "plan.html", tmp_path / "trace.json"
    assert main(["report", "--plan", str(written), "--out", str(page), "--trace", str(trace)]) == 0
    text = page.read_text()
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    for layout in (c["key"] for c in json.loads(written.read_text())["choices"]):
        assert layout in text
    assert json.loads(trace.read_text())["traceEvents"]
    capsys.readouterr()
    command = ["tune", "--plan", str(written), "--evaluator", "predict", "--trials", "2", "--json"]
    assert main(command) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    keys = {(r["problem"]["op"], r["problem"]["n"], r["problem"]["k"]) for r in records}
    assert keys == {(p.op.value, p.n, p.k) for p in read_plan(written).problems}


def test_tune_wants_a_model_or_a_plan(written, capsys):
    assert main(["tune"]) == 2
    assert main(["tune", "--plan", str(written), "--tp", "8"]) == 2
    assert "neither --model nor --tp" in capsys.readouterr().err


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: "[]", lambda d: "{", lambda d: "", lambda d: json.dumps({**d, "choices": []}),
        lambda d: json.dumps({**d, "sizes": {"layers": 1}}),
        lambda d: json.dumps({**d, "practice": "x"}), lambda d: json.dumps({**d, "gpu": "x"}),
        lambda d: json.dumps({k: v for k, v in d.items() if k != "between_gbs"}),
        lambda d: json.dumps({**d, "choices": [{**d["choices"][0], "problems": [{"op": 1}]}]}),
        lambda d: json.dumps({**d, "choices": [{**d["choices"][0], "layout": {"tp": 1}}]}),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(written, damage):
    written.write_text(damage(json.loads(written.read_text())))
    with pytest.raises(UsageError, match=r"plan: .*plan\.json: expected a file"):
        read_plan(written)


def test_a_plan_that_is_not_there(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_plan(tmp_path / "none.json")


# --- published steps ------------------------------------------------------------------------------


def test_published_steps_are_predicted_as_the_results_say():
    """The file behind the results page is what the model says today."""
    found = [bench_plan.predict(row) for row in bench_plan.rows()]
    assert len(found) >= 25 and None not in found
    stated = json.loads((bench_plan.DATA / "plan_errors.json").read_text())
    assert bench_plan.summary(found) == stated["total"]["all"]
    apart = [row for row in found if not row.data.get("fitted")]
    assert bench_plan.summary(apart) == stated["total"]["nothing fitted"]
    assert bench_plan.pairs(found) == stated["ranking"]
    assert bench_plan.error(apart) < 1.09


def test_rows_have_their_source():
    groups = set()
    for row in bench_plan.rows():
        assert row["source"] and row["measured"] and row["batch"] and row["seq"]
        layout = row["layout"]
        assert layout["tp"] * layout["cp"] * layout["pp"] * layout["dp"] == row["gpus"], row["id"]
        groups.add(row["group"])
    assert {"megatron-sc21", "megatron-2205", "nemo", "torchtitan", "llm-foundry"} <= groups


def test_a_layout_in_words():
    layout = Layout(8, 2, 4, 3, 2, 1, "full", 2, False)
    assert layout.key == "tp8 cp2 pp4 vp3 dp2 nosp zero1 full mb2"
    assert replace(layout, zero=3, sp=True, recompute="none").key == "tp8 cp2 pp4 vp3 dp2 fsdp mb2"
    assert Layout(8, dp=2, grid=(2, 2, 2), sp=False).key == "grid2x2x2 dp2 mb1"
