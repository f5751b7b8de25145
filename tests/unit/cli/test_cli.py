"""The command line as users meet it: JSON on stdout alone, exit codes, one clear error."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fluxgen.cli import main
from fluxgen.core.settings import Settings, data_dir
from fluxgen.core.topology import GPUS
from fluxgen.machine import device, wiring
from fluxgen.machine.device import Device

SMALL = ["--model", "llama-3.2-1b", "--tp", "8", "--target", "h100-sxm", "--tokens", "1024,4096"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLUXGEN_HOME", str(tmp_path / "home"))
    for name in ("FLUXGEN_DB", "FLUXGEN_STORE", "FLUXGEN_NVCC", "FLUXGEN_CUTLASS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def run(capsys, *arguments: str, code: int = 0):
    """Exit code as expected; the JSON document, or the error's text."""
    found = main(list(arguments))
    out, err = capsys.readouterr()
    assert found == code, err
    if "--json" in arguments and code == 0:
        return json.loads(out)
    if code:
        assert out == "" or "--json" not in arguments, "stdout must hold nothing but a document"
        assert "Traceback" not in err
    return err if code else out


def tune(capsys, *more: str):
    return run(capsys, "tune", *SMALL, "--evaluator", "predict", "--trials", "4", *more, "--json")


def test_shapes_lists_the_gemms_of_a_layer(capsys):
    found = run(capsys, "shapes", "--model", "llama-3.1-8b", "--tp", "8", "--json")
    shapes = {(g["op"], g["n"], g["k"], g["count"]) for g in found["gemms"]}
    assert shapes == {
        ("ag_gemm", 768, 4096, 32),
        ("gemm_rs", 4096, 512, 32),
        ("ag_gemm", 3584, 4096, 32),
        ("gemm_rs", 4096, 1792, 32),
    }
    assert "qkv" in run(capsys, "shapes", "--model", "llama-3.1-8b", "--tp", "8")


def test_tune_stores_records_that_lookup_finds(capsys, home):
    found = tune(capsys)
    assert len(found["records"]) == 8
    assert len(found["kernels"]) <= 24
    assert all(r["provenance"] == "predicted" for r in found["records"])
    assert all(r["baseline_us"] > 0 for r in found["records"])
    assert (home / "tuning.sqlite3").is_file()
    record = next(r for r in found["records"] if r["problem"]["op"] == "ag_gemm")
    problem = record["problem"]
    asked = ["--op", "ag_gemm", "--n", str(problem["n"]), "--k", str(problem["k"]), "--tp", "8"]
    where = ["--target", "h100-sxm", "--link", "nvlink", "--json"]
    exact = run(capsys, "lookup", *asked, "--m", str(problem["m"]), *where)
    assert (exact["reason"], exact["kernel"]) == ("exact", record["kernel"])
    assert exact["time_us"] == record["time_us"]
    near = run(capsys, "lookup", *asked, "--m", "3000", *where)
    assert (near["reason"], near["record_m"]) == ("bucket", 4096)
    far = run(capsys, "lookup", *asked, "--m", "1000000", *where)
    assert (far["reason"], far["kernel"]) == ("default", None)
    assert "fluxgen tune" in far["text"]


@pytest.mark.slow
def test_recorded_trials_are_replayed(capsys, home, tmp_path):
    path = tmp_path / "trials.jsonl"
    first = tune(capsys, "--record", str(path))
    assert len(path.read_text().splitlines()) == 4 * len(first["records"])
    again = run(capsys, "tune", *SMALL, "--evaluator", f"replay:{path}", "--trials", "4", "--json")
    for record in (*first["records"], *again["records"]):
        del record["created"]
    assert again["records"] == first["records"]
    assert again["evaluator"].startswith("replay-")


@pytest.mark.slow
def test_tune_is_deterministic_and_resumes(capsys, home):
    first = tune(capsys)
    again = tune(capsys)
    assert again["evaluated"] == 0, "finished trials are not repeated"
    for name in ("studies.sqlite3", "tuning.sqlite3"):
        (home / name).rename(home / f"moved-{name}")
    fresh = tune(capsys)

    def choices(found):
        return [(r["problem"], r["kernel"], r["run"]) for r in found["records"]]

    assert choices(first) == choices(again) == choices(fresh)


def test_zero_tokens_are_dropped_with_a_message(capsys):
    """B03: M = 0 is not tuned."""
    assert main(["tune", *SMALL[:-1], "0,1024", "--trials", "2", "--evaluator", "predict"]) == 0
    assert "0 is dropped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shapes", "--model", "qwen2.5-7b", "--tp", "8"], ["28", "1, 2, 4"]),
        (["shapes", "--model", "no-such-model", "--tp", "8"], ["no-such-model"]),
        (["shapes", "--model", "llama-3.1-8b", "--tp", "0"], ["tp", "0"]),
        (["shapes", "--model", "llama-3.1-8b", "--tp", "1.5"], ["--tp", "integer"]),
        (["tune", *SMALL, "--evaluator", "device"], ["device"]),
        (["tune", *SMALL, "--evaluator", "bogus"], ["bogus"]),
        (["tune", *SMALL, "--evaluator", "replay:/nowhere"], ["/nowhere", "cannot read"]),
        (["tune", *SMALL, "--record", "/"], ["record trials", "cannot write"]),
        (["tune", *SMALL, "--link", "ethernet"], ["ethernet"]),
        (["tune", *SMALL[:4], "--target", "h900"], ["h900", "h100-sxm"]),
        (["tune", *SMALL[:4], "--link", "pcie", "--target",
          "b200:cc=100,sms=148,clock=1965,smem=227,mem=180"], ["sm100", "sm80 to sm89"]),
        (["tune", *SMALL[:4], "--target", "l40s"], ["NVLink", "pcie"]),
        (["tune", *SMALL[:-1], "abc"], ["tokens", "abc"]),
        (["tune", *SMALL, "--ops", "gemm_xx"], ["gemm_xx"]),
        (["tune", *SMALL, "--dtype", "fp32"], ["fp32"]),
        (["tune", *SMALL, "--trials", "0"], ["trials"]),
        (["build", "--model", "llama-3.1-8b", "--target", "h100-sxm"], ["--tp"]),
        (["build", *SMALL], ["fluxgen tune"]),
        (["build", "--jobs", "0"], ["jobs"]),
        (["lookup", "--op", "ag_gemm", "--m", "-1", "--n", "8", "--k", "8", "--tp", "8",
          "--target", "h200"], ["m", "-1"]),
        (["nothing"], ["nothing"]),
        (["tune", "--no-such-option"], ["no-such-option"]),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_clear_error(capsys, arguments, words):
    text = run(capsys, *arguments, code=2)
    for word in words:
        assert word in text


def test_target_auto_without_a_gpu_says_what_to_do(capsys):
    arguments = [a if a != "h100-sxm" else "auto" for a in SMALL]
    assert main(["tune", *arguments]) in (1, 2)
    assert "--target" in capsys.readouterr().err


@pytest.mark.slow
def test_target_auto_does_not_tune_for_a_link_that_is_not_there(capsys, monkeypatch):
    card = Device("NVIDIA H100 PCIe", GPUS["h100-pcie"], "13.0")
    here = tuple(replace(card, address=f"gpu{i}") for i in range(8))
    asked = []
    monkeypatch.setattr(device, "devices", lambda: here)
    monkeypatch.setattr(wiring, "nvlinked", lambda gpus: asked.append(list(gpus)))  # None
    arguments = [a if a != "h100-sxm" else "auto" for a in SMALL]
    predict = ["tune", *arguments, "--evaluator", "predict", "--json"]
    assert run(capsys, *predict)["topology"] == "h100-pcie-nvlink-tp8"
    assert asked == [[f"gpu{i}" for i in range(8)]]
    monkeypatch.setattr(wiring, "nvlinked", lambda gpus: False)
    assert "expected pcie with --target auto" in run(capsys, *predict, code=2)
    assert run(capsys, *predict, "--link", "pcie")["topology"] == "h100-pcie-pcie-tp8"


def test_any_other_gpu_works_by_its_properties(capsys):
    """F17: no whitelist by name or SM count."""
    target = "mystery:cc=9.0,sms=114,clock=1700,smem=227,mem=80,nvlink=300"
    found = run(
        capsys, "tune", *SMALL[:4], "--tokens", "2048", "--target", target, "--trials", "3",
        "--evaluator", "predict", "--json",
    )  # fmt: skip
    assert found["topology"] == "mystery-nvlink-tp8"
    assert found["records"]


def test_db_commands_round_trip(capsys, tmp_path):
    found = tune(capsys)
    listed = run(capsys, "db", "list", "--json")
    assert sum(row["records"] for row in listed) == len(found["records"])
    shown = run(capsys, "db", "show", "--json")
    assert len(shown) == len(found["records"])
    packs, other = tmp_path / "packs", tmp_path / "other.sqlite3"
    written = run(capsys, "db", "export", str(packs), "--json")["written"]
    assert [Path(p).name for p in sorted(written)] == ["ag_gemm.jsonl", "gemm_rs.jsonl"]
    assert run(capsys, "db", "verify", "--packs", str(packs), "--json") == {"problems": []}
    report = run(capsys, "db", "import", str(packs), "--db", str(other), "--json")
    assert report["stored"] == len(found["records"])
    run(capsys, "db", "merge", str(packs), str(other), "--json")
    assert run(capsys, "db", "show", "--json") == shown
    assert run(capsys, "db", "show", "--db", str(other), "--json") == shown


def test_a_damaged_database_is_an_error_and_stays_as_it_was(capsys, home):
    home.mkdir()
    path = home / "tuning.sqlite3"
    path.write_bytes(b"not a database" * 100)
    before = path.read_bytes()
    text = run(capsys, "db", "list", code=1)
    assert str(path) in text.replace("\n", "")
    assert path.read_bytes() == before
    doctor = main(["doctor", "--json"])
    checks = {c["name"]: c for c in json.loads(capsys.readouterr().out)["checks"]}
    assert doctor == 1
    assert checks["database"]["state"] == "broken"


def test_doctor_names_every_part(capsys):
    found = run(capsys, "doctor", "--json")
    states = {c["name"]: c["state"] for c in found["checks"]}
    assert set(states) == {
        "toolchain", "gpu", "torch", "symmetric memory", "optuna", "database", "packs", "store",
    }  # fmt: skip
    assert states["database"] == "missing"


def test_build_without_nvcc_says_how_to_get_it(capsys, monkeypatch, tmp_path):
    tune(capsys)
    monkeypatch.setenv("FLUXGEN_NVCC", str(tmp_path / "nvcc"))
    text = run(capsys, "build", *SMALL, "--out", str(tmp_path / "generated"), code=1)
    assert "nvcc" in text


@pytest.mark.slow
def test_build_dry_run_and_check(capsys, tmp_path):
    tune(capsys)
    out = tmp_path / "gén érated"
    planned = run(capsys, "build", *SMALL, "--out", str(out), "--dry-run", "--json")
    assert planned["kernels"][0] == {"name": "support_sm90", "state": "to build"}
    assert not out.exists(), "a dry run writes nothing"


def test_a_models_sources_are_not_written_into_the_checkout(capsys, monkeypatch, tmp_path, home):
    shipped = data_dir("generated")
    before = {path.name: path.read_bytes() for path in shipped.iterdir()}
    tune(capsys)
    monkeypatch.setenv("FLUXGEN_NVCC", str(tmp_path / "nvcc"))  # sources come before compilation
    run(capsys, "build", *SMALL, code=1)
    assert {path.name: path.read_bytes() for path in shipped.iterdir()} == before
    written = Settings.load().home / "generated"
    assert shipped not in written.parents
    assert (written / "manifest.json").is_file()
    run(capsys, "build", "--check", "--out", str(written), code=0)
    run(capsys, "build", "--check", code=0)


def test_importing_fluxgen_imports_nothing_heavy():
    code = (
        "import sys, fluxgen; print([m for m in ('torch','optuna','jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_six_tuners_at_once_on_one_database(home):
    """K01: all succeed; nothing is lost."""
    command = [sys.executable, "-m", "fluxgen", "tune", *SMALL, "--evaluator", "predict"]
    command += ["--trials", "3", "--json"]
    tuners = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
        for _ in range(6)
    ]
    outputs = [tuner.communicate(timeout=240) for tuner in tuners]
    for tuner, (_, err) in zip(tuners, outputs, strict=True):
        assert tuner.returncode == 0, err.decode()
    documents = [json.loads(out) for out, _ in outputs]
    assert {len(d["records"]) for d in documents} == {8}


@pytest.mark.parametrize("target", ["a100-sxm-80gb:nvlink", "l20:pcie", "l20:pcie2"])
def test_every_corner_is_tuned_and_looked_up(home, capsys, target):
    gpu, link = target.split(":")
    where = ["--target", gpu, "--link", link]
    found = run(capsys, "tune", *SMALL[:4], *where, "--tokens", "4096", "--trials", "4", "--json")
    assert len(found["records"]) == 4
    schedules = {r["kernel"]["schedule"] for r in found["records"] if r["kernel"]}
    assert schedules <= {"multistage4", "multistage8"}
    transports = {r["run"]["transport"] for r in found["records"] if r["run"]}
    copies = {"copy_engine_pull", "copy_engine_drain"}
    ring = {"copy_engine_ring"} if link == "pcie2" else set()
    usual = {"copy_engine_push", "peer_store"} if link == "nvlink" else copies | ring
    assert ring <= transports <= {*usual, "sm_copy"}
    r = found["records"][0]["problem"]
    sizes = [x for key in "mnk" for x in (f"--{key}", str(r[key]))]
    seen = run(capsys, "lookup", "--op", r["op"], *sizes, "--tp", "8", *where, "--json")
    assert seen["topology"] == f"{gpu}-{link}-tp8"


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_is_a_failure_with_one_line(home, end):
    """Exit code 1, stdout empty, and what to do next."""
    command = [sys.executable, "-m", "fluxgen", "tune", *SMALL[:4], "--target", "h200", "--json"]
    tuner = subprocess.Popen(
        [*command, "--trials", "200", "--evaluator", "predict"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    studies = home / "studies.sqlite3"
    deadline = time.monotonic() + 60
    while not studies.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.0)
    tuner.send_signal(end)
    out, err = tuner.communicate(timeout=60)
    assert tuner.returncode == 1
    assert "again to go on" in err
    assert "Traceback" not in err
    if out:
        assert json.loads(out)["interrupted"]


def test_a_report_of_the_packs(tmp_path, capsys):
    folder = tmp_path / "out"
    folder.mkdir()
    page, trace = folder / "r.html", folder / "t.json"
    packs = str(data_dir("tuning_db"))
    command = ["report", "--target", "h200", "--packs", packs, "--out", str(page)]
    assert main([*command, "--trace", str(trace), "--problem", "m2048/n6144"]) == 0
    assert "fused, ag_gemm" in page.read_text("utf-8")
    assert json.loads(trace.read_text("utf-8"))["traceEvents"]
    assert sorted(p.name for p in folder.iterdir()) == ["r.html", "t.json"], "nothing half-written"
    capsys.readouterr()
    for more, word in [
        ([*command, "--problem", "m77/"], "m77/"),
        (["report", "--target", "l40s", "--link", "pcie", "--packs", packs], "l40s-pcie-tp8"),
        ([*command[:-1], str(folder / "none" / "r.html")], "cannot be written"),
    ]:
        assert main(more) == 2
        assert word in capsys.readouterr().err
    assert main(["db", "verify", "--db", str(folder / "none.sqlite3")]) == 1
    assert "no such tuning database" in capsys.readouterr().err
