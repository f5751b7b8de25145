"""The measuring evaluator: what it times follows the link, and what is wrong it finds."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from fluxgen.core.config import ChunkAxis, RunConfig, Transport  # noqa: E402
from fluxgen.core.problem import Problem  # noqa: E402
from fluxgen.core.topology import Topology  # noqa: E402
from fluxgen.machine.device import devices  # noqa: E402
from fluxgen.tune.device import check, schedule  # noqa: E402
from fluxgen.tune.device.evaluator import make  # noqa: E402
from tests.gpu.conftest import KERNELS  # noqa: E402
from tests.gpu.kernels import first_of, kernel_names, load_kernel  # noqa: E402

RUNS = {
    "ag_gemm": RunConfig((1, 2, 5), 0, ChunkAxis.M, 1),
    "gemm_rs": RunConfig((7, 1), 1, transport=Transport.PEER_STORE),
}


@pytest.fixture(scope="module")
def evaluator():
    return make(devices()[0].gpu, KERNELS, brief=True)


def candidate(op):
    name = first_of(f"{op}_bf16_sm90_128x192x64_2x1", kernel_names())
    kernel = load_kernel(name)
    n, k = (6144, 12288) if op == "ag_gemm" else (12288, 6144)
    return Problem(kernel.signature, 2048, n, k, 8), kernel.kernel, RUNS[op]


def over(gbs):
    return replace(Topology.of(devices()[0].gpu, "nvlink", 8), bandwidth_gbs=gbs)


@pytest.mark.parametrize("op", sorted(RUNS))
def test_a_call_takes_as_long_as_its_link_or_its_gemm(evaluator, op):
    problem, kernel, run = candidate(op)
    times = {}
    for gbs in (20.0, 400.0):
        topology = over(gbs)
        base = evaluator.evaluate(problem, topology, None, None)
        found = evaluator.evaluate(problem, topology, kernel, run)
        assert found.ok, found.reason
        link = schedule.unfused_us(problem, topology)
        gemm = base.time_us - link
        assert 0.9 * max(link, gemm) < found.time_us < 1.3 * (link + gemm)
        times[gbs] = found.time_us
    assert times[20.0] > 2 * times[400.0]


@pytest.mark.parametrize("op", sorted(RUNS))
def test_a_wrong_result_is_found(evaluator, op, monkeypatch):
    problem, kernel, run = candidate(op)
    right = check.Operands.expected

    def off_by_one(self, problem):
        out = [part.clone() for part in right(self, problem)]
        out[-1][-1, -1] += 1e4  # more than bf16 rounds away
        return out

    monkeypatch.setattr(check.Operands, "expected", off_by_one)
    found = evaluator.evaluate(problem, over(400.0), kernel, run)
    assert not found.ok
    assert "rank 7: 1 of" in found.reason


@pytest.mark.parametrize("op", sorted(RUNS))
def test_over_pcie_real_bytes_move(evaluator, op):
    """No faster than the bytes of this machine's link, and right: the slabs come from the host."""
    problem, kernel, run = candidate(op)
    if op == "ag_gemm":
        run = replace(run, transport=Transport.COPY_ENGINE_PULL, chunks=2)
    else:
        run = RunConfig((1,) * 8, chunks=2, transport=Transport.COPY_ENGINE_DRAIN)
    topology = Topology.of(devices()[0].gpu, "pcie", 8)
    base = evaluator.evaluate(problem, topology, None, None)
    found = evaluator.evaluate(problem, topology, kernel, run)
    assert found.ok, found.reason
    gen5_us = problem.comm_bytes / 64e3  # no PCIe link of 16 lanes is faster
    assert found.time_us > gen5_us
    assert base.time_us > gen5_us
    assert found.time_us < base.time_us
