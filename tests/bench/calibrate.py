"""The model against measured GEMM times with all data present.

    python -m tests.bench.calibrate [tests/bench/data/h200_data_present_fit.json]

Per problem: Spearman's rank correlation between predicted and measured times over all
configurations, the median absolute relative error of the predicted ratio to cuBLAS, and the
regret: the measured ratio of the configuration that is predicted fastest, minus the least one
measured. Ratios are compared because power limits move absolute times from run to run; a ratio of
3 to 5 rounds is itself good to about 1 %. For gemm_rs the reduction's time is compared too.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fluxgen.core.config import KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.predict import constants, predict
from fluxgen.predict.gemm import library_gemm_us

DATA = Path(__file__).with_name("data") / "h200_data_present_fit.json"


@dataclass(frozen=True)
class Sweep:
    """One problem's measured configurations.

    Attributes:
        measured: time of each configuration over cuBLAS's. cublas_us: cuBLAS, microseconds.
        reduce_us: the reduction of gemm_rs alone, microseconds, or None.
    """

    problem: Problem
    configs: tuple[tuple[KernelConfig, RunConfig], ...]
    measured: np.ndarray
    cublas_us: float
    reduce_us: float | None


@dataclass(frozen=True)
class Fit:
    """How well one problem is predicted.

    Attributes:
        spearman: rank correlation, -1 to 1. error: median of |predicted / measured - 1|.
        regret: see the module. cublas, reduce: predicted over measured, minus 1.
    """

    spearman: float
    error: float
    regret: float
    cublas: float
    reduce: float | None


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share the mean of theirs."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean: np.ndarray = np.cumsum(counts) - (counts + 1) / 2
    return mean[index.reshape(-1)]


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Rank correlation of two equally long arrays; 0 where one is constant."""
    a, b = (r - r.mean() for r in (ranks(first), ranks(second)))
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm else 0.0


@cache
def kernel_of(name: str) -> KernelConfig:
    """The kernel that :attr:`KernelConfig.name` names, with automatic stages."""
    tile, cluster, schedule, _ = name.split("_")
    return KernelConfig(
        *(int(x) for x in tile.split("x")), *(int(x) for x in cluster.split("x")),
        Schedule(schedule),
    )  # fmt: skip


def load(path: Path = DATA) -> list[Sweep]:
    """The sweeps of a file that ``bench_data_present`` measured."""
    sweeps = []
    for result in json.loads(path.read_text())["results"]:
        op = Op.parse(result["op"])
        transport = Transport.COPY_ENGINE_PULL if op is Op.AG_GEMM else Transport.PEER_STORE
        rows: list[list[Any]] = result.get("configs") or [  # as the bench writes them, or kept
            [name, run["groups"], run["panel"], run["span"], ratio]
            for name, run, ratio, _ in result["coarse"]
        ]
        sweeps.append(
            Sweep(
                Problem(
                    Signature.of(op, result["dtype"]),
                    *(result[key] for key in ("m", "n", "k", "tp")),
                ),
                tuple(
                    (
                        kernel_of(name),
                        RunConfig(tuple(groups), panel, transport=transport, span=span),
                    )
                    for name, groups, panel, span, *_ in rows
                ),
                np.array([row[4] for row in rows]),
                result["cublas_ms"] * 1e3,
                result["reduce_ms"] * 1e3 if result.get("reduce_ms") else None,
            )
        )
    return sweeps


def evaluate(sweep: Sweep, topology: Topology) -> Fit:
    """Compare one sweep with the model as it stands."""
    problem = sweep.problem
    predictions = [predict(problem, topology, kernel, run) for kernel, run in sweep.configs]
    library = library_gemm_us(problem.m, problem.n, problem.k, topology.gpu)
    predicted = np.array([p.gemm_us + constants.LAUNCH_US for p in predictions]) / library
    chosen = sweep.measured[int(predicted.argmin())]
    reduce = None
    if sweep.reduce_us is not None:
        reduce = (predictions[0].reduce_us + constants.LAUNCH_US) / sweep.reduce_us - 1
    return Fit(
        spearman(predicted, sweep.measured),
        float(np.median(np.abs(predicted / sweep.measured - 1))),
        float(chosen - sweep.measured.min()),
        library / sweep.cublas_us - 1,
        reduce,
    )


def main() -> int:
    """Print one line per problem and the means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", type=Path, default=DATA)
    path = parser.parse_args().path
    print(f"model {constants.MODEL_VERSION}, {path.name}")
    print(f"{'problem':<28} spearman   error  regret  cuBLAS  reduce")
    fits = []
    for sweep in load(path):
        p = sweep.problem
        fit = evaluate(sweep, Topology.of("h200", "nvlink", p.tp))
        fits.append(fit)
        reduce = "      -" if fit.reduce is None else f"{fit.reduce:+7.1%}"
        print(
            f"{p.op.value:<8} {f'{p.m}x{p.n}x{p.k}':<19} {fit.spearman:8.3f} {fit.error:7.1%} "
            f"{fit.regret:7.4f} {fit.cublas:+7.1%} {reduce}"
        )
    means = [float(np.mean([getattr(f, key) for f in fits])) for key in _MEANS]
    print(f"{'mean':<28} {means[0]:8.3f} {means[1]:7.1%} {means[2]:7.4f}")
    return 0


_MEANS = ("spearman", "error", "regret")

if __name__ == "__main__":
    raise SystemExit(main())
