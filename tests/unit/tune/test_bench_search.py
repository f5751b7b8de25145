"""The benchmark of searches: a sweep is recorded once, and a search in it is judged rightly."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("optuna")

from fluxgen.core.config import KernelConfig
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.tune import PredictEvaluator
from tests.bench import bench_search
from tests.bench.bench_search import compare, every, problem_of, sweep

TOPOLOGY = Topology.of("h200", "nvlink", 8)
PROBLEM = Problem(Signature.of("gemm_rs"), 4096, 8192, 8192, 8)
KERNELS = {KernelConfig(128, 128, 64, 1, 1), KernelConfig(64, 256, 64, 1, 1)}


def there(signature, kernel):
    return kernel in KERNELS


def test_a_sweep_records_everything_once_and_a_search_is_compared_with_it(tmp_path):
    path = tmp_path / "t.jsonl"
    legal = every(PROBLEM, TOPOLOGY, there)
    assert {kernel for kernel, _ in legal} == KERNELS
    assert sweep([PROBLEM], TOPOLOGY, PredictEvaluator(), path, there) == len(legal) + 1
    assert sweep([PROBLEM], TOPOLOGY, PredictEvaluator(), path, there) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == len(legal) + 1
    found = compare(path, "h200", "nvlink")
    (row,) = found["problems"]
    assert row["trials"] == len(legal)
    assert row["kernels"] == 2
    assert found["provenance"] == "predicted"
    shares = list(row["found_over_best"].values())
    assert all(share >= 1 for share in shares)
    assert row["reached"] == (shares[-1] <= bench_search.WANTED)


def test_a_search_that_misses_the_best_is_said_to(tmp_path):
    """The best configuration of the recording is one that the prediction ranks last."""
    path = tmp_path / "t.jsonl"
    sweep([PROBLEM], TOPOLOGY, PredictEvaluator(), path, there)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    worst = max((t for t in lines if t["kernel"]), key=lambda t: t["time_us"])
    worst["time_us"] = 0.1 * min(t["time_us"] for t in lines)
    path.write_text("".join(json.dumps(t) + "\n" for t in lines))
    (row,) = compare(path, "h200", "nvlink")["problems"]
    first = next(iter(row["found_over_best"].values()))
    assert first > 1.5
    assert row["best_over_unfused"] < 0.2


def test_keys_are_read_back():
    assert problem_of(PROBLEM.key) == PROBLEM
