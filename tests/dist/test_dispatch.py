"""Every reason that a decision can give, on a machine without a GPU."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from fluxgen.core.config import KernelConfig, RunConfig, Schedule
from fluxgen.core.errors import UnsupportedError
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Provenance, Record
from fluxgen.core.topology import Topology, parse_gpu
from fluxgen.db.database import Database
from fluxgen.db.lookup import Lookup, default_lookup
from fluxgen.db.result import found
from fluxgen.machine.device import Device
from fluxgen.runtime.session import dispatch
from fluxgen.runtime.session.dispatch import Call, Cause, decide, note

pytestmark = [pytest.mark.dist]

CUDA = torch.device("cuda", 0)


@pytest.fixture
def h100(monkeypatch, tmp_path):
    monkeypatch.setenv("FLUXGEN_STORE", str(tmp_path / "store"))
    gpu = parse_gpu("h100-sxm")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(dispatch, "devices", lambda: (Device("NVIDIA H100", gpu, "13.0"),))
    dispatch.decide.cache_clear()
    yield
    dispatch.decide.cache_clear()


def ask(m, n, k, *, dtype=torch.bfloat16, device=CUDA, tp=8, op=Op.AG_GEMM, **more):
    decision = decide(Call(op, m, (n,), k, dtype, device, tp, **more))
    note(decision)
    return decision


def test_reasons(h100):
    assert ask(0, 8, 8).cause is Cause.NOTHING_TO_DO
    assert ask(8, 8, 8, tp=1).cause is Cause.ONE_RANK
    assert ask(8, 8, 8, device=torch.device("cpu")).cause is Cause.NO_GPU
    decision = ask(8, 8, 8, dtype=torch.float32)
    assert decision.cause is Cause.DTYPE
    assert "float32" in decision.reason
    assert ask(8, 8, 8, device=torch.device("cuda", 3)).cause is Cause.DEVICE
    assert ask(8, 8, 8, tp=17).cause is Cause.DEVICE
    decision = ask(4096, 1000, 1000)
    assert decision.cause is Cause.NO_RECORD
    assert "no record" in decision.reason


def test_a_record_gives_its_reason(h100, monkeypatch):
    topology = Topology.of("h100-sxm", "nvlink", 8)
    problem = Problem(Signature.of("ag_gemm"), 4096, 3584, 4096, 8)
    winner = default_lookup()(problem, topology)
    assert winner.kernel is not None
    decision = ask(4096, 3584, 4096)
    assert decision.cause is Cause.NOT_BUILT
    assert decision.path == "unfused"
    assert decision.winner is None
    assert "run `fluxgen build`" in decision.reason
    assert winner.text in decision.reason
    rs = {"op": Op.GEMM_RS}
    assert ask(4096, 4096, 512, bias="partial", **rs).cause is Cause.BIAS
    assert ask(4096, 4096, 512, bias="replicated", **rs).cause is Cause.NOT_BUILT

    record = dataclasses.replace(
        winner.record, kernel=None, run=None, time_us=winner.record.baseline_us
    )
    baseline = found(winner.key, problem, record, "a database")
    answers = SimpleNamespace(first=lambda problems, topology: baseline)
    monkeypatch.setattr(dispatch, "default_lookup", lambda: answers)
    dispatch.decide.cache_clear()
    decision = ask(4096, 3584, 4096)
    assert decision.cause is Cause.BASELINE
    assert decision.reason == f"record says baseline: {baseline.text}"
    with dispatch.strict(), pytest.raises(UnsupportedError, match="record says baseline"):
        ask(4096, 3584, 4096)


@pytest.mark.parametrize("tuned", ["nk", "kn"])
@pytest.mark.parametrize("returned", [True, False])
def test_records_of_near_signatures_serve(h100, monkeypatch, tmp_path, caplog, tuned, returned):
    """A backward gathers, returns that and reads (K, N): a record without that will do."""
    topology = Topology.of("h100-sxm", "nvlink", 8)
    gather = Signature.of("ag_gemm")
    mine = dataclasses.replace(gather, b_layout=tuned, return_gathered=returned)
    kernel, run = KernelConfig(128, 128, 64, 1, 1, Schedule.PINGPONG), RunConfig()
    database = Database(tmp_path / "tuning.sqlite3")
    database.put(Record(Problem(mine, 1024, 1024, 1024, 8), topology.key, kernel, run, 1.0, 2.0,
                        Provenance.PREDICTED))  # fmt: skip
    monkeypatch.setattr(dispatch, "default_lookup", lambda: look)
    asked = {"layouts": ("kn",), "return_gathered": True}
    look = Lookup(database, None)
    assert ask(1024, 1024, 1024, **asked).cause is Cause.NOT_BUILT
    assert "no usable record" not in caplog.text
    # An exact size of a near signature comes before another size of the call's own.
    exact = dataclasses.replace(gather, b_layout="kn", return_gathered=True)
    database.put(Record(Problem(exact, 2048, 1024, 1024, 8), topology.key, None, None, 2.0, 2.0,
                        Provenance.PREDICTED))  # fmt: skip
    dispatch.decide.cache_clear()
    look = Lookup(database, None)
    assert ask(1024, 1024, 1024, **asked).cause is Cause.NOT_BUILT
    assert ask(2048, 1024, 1024, **asked).cause is Cause.BASELINE
    assert ask(512, 512, 512, **asked).cause is Cause.NO_RECORD
    assert [r.name for r in caplog.records].count("fluxgen.db") == 1


def test_told_once_and_remembered(h100, caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_told", set())
    with caplog.at_level(logging.DEBUG, "fluxgen.runtime"), dispatch.explain() as seen:
        for m in (8, 8, 16):
            ask(m, 8, 8, dtype=torch.float32)
        ask(0, 8, 8)
    mine = [r for r in caplog.records if r.name == "fluxgen.runtime"]
    assert [r.levelno for r in mine] == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    assert "float32" in mine[0].getMessage()
    assert [d.cause for d in seen.decisions] == [Cause.DTYPE] * 3 + [Cause.NOTHING_TO_DO]
    assert seen.decisions[0] is seen.decisions[1]
    with pytest.raises(AttributeError):
        seen.decisions[0].path = "fused"


def test_an_explanation_of_nothing_says_so():
    assert str(dispatch.Explanation()) == "no call of a fluxgen op yet"


def test_importing_fluxgen_leaves_torch_out():
    code = "import fluxgen, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
