"""How much of an exhaustive sweep a search needs: sweep once, then search in the recording.

    python -m tests.bench.bench_search sweep FILE [--evaluator device] [--shapes FILE.json]
    python -m tests.bench.bench_search compare FILE
    python -m tests.bench.bench_search overlap FILE [FILE ...]

``sweep`` times every legal configuration of every kernel that is compiled (``FLUXGEN_STORE``), each
briefly and unchecked, and appends it to FILE as ``fluxgen tune --record`` does; what FILE has is
not timed again. ``compare`` runs the search of ``fluxgen tune`` on those times, with more and more
trials, and prints one JSON object: per problem, the best found over the best there is. ``overlap``
prints, as a table, how much of the communication the best trial of each problem hides.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fluxgen.codegen.render import render_kernel
from fluxgen.compiler.store import Store
from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.errors import UsageError
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.runtime.session.kernels import source_of
from fluxgen.tune import PredictEvaluator, Recorder, ReplayEvaluator, tune
from fluxgen.tune.candidates import Candidates
from fluxgen.tune.device.schedule import unfused_us
from fluxgen.tune.evaluators import Evaluator
from fluxgen.tune.evaluators.process import ProcessEvaluator

SHAPES = (
    ("ag_gemm", 1024, 6144, 12288),
    ("ag_gemm", 4096, 6144, 12288),
    ("ag_gemm", 2048, 7168, 8192),
    ("gemm_rs", 1024, 12288, 6144),
    ("gemm_rs", 4096, 12288, 6144),
    ("gemm_rs", 2048, 8192, 3584),
)
"""op, m, n, k where no file names others."""

BUDGETS = (16, 32, 64, 128)
"""Trials of the searches that are compared, and 15 % of the sweep's besides."""

BRIEF_TIMEOUT_S = 20.0
"""A brief trial takes milliseconds, the first one of a process some seconds."""

SHARE, WANTED = 0.15, 1.02
"""With this share of the trials the best found should be within this factor of the best."""


def compiled(signature: Signature, kernel: KernelConfig) -> bool:
    """Whether the store has it."""
    arch = "sm90"
    return Store().find(source_of(render_kernel(signature, arch, kernel))) is not None


def every(
    problem: Problem, topology: Topology, there: Any = compiled
) -> list[tuple[KernelConfig, RunConfig]]:
    """Every legal configuration of the kernels that are there."""
    candidates = Candidates(problem, topology)
    kernels = [k for k in candidates.kernels if there(problem.signature, k)]
    return [(k, run) for k in kernels for run in candidates.ranked_runs(k)]


def sweep(
    problems: Iterable[Problem], topology: Topology, evaluator: Evaluator, path: Path,
    there: Any = compiled,
) -> int:  # fmt: skip
    """Record what ``path`` does not have yet; returns how many trials that were."""
    recorder = Recorder(evaluator, path)
    known = ReplayEvaluator(path) if path.stat().st_size else None
    made = 0
    for problem in problems:
        for kernel, run in [(None, None), *every(problem, topology, there)]:
            if known is not None:
                found = known.evaluate(problem, topology, kernel, run)
                if found.reason != "not among the recorded trials":
                    continue
            recorder.evaluate(problem, topology, kernel, run)
            made += 1
            if made % 200 == 0:
                print(f"{time.strftime('%H:%M:%S')}: {made}", file=sys.stderr, flush=True)
        print(f"{problem.key}: {made} trials", file=sys.stderr, flush=True)
    return made


class Recorded:
    """Stands for the compiled kernels of a search: those that a recording has."""

    def __init__(self, kernels: Iterable[KernelConfig]) -> None:
        self.kernels = set(kernels)

    def unusable(self, signature: Signature, kernel: KernelConfig) -> str | None:
        return None if kernel in self.kernels else "not recorded"

    def expect(self, wanted: object) -> None:
        pass

    def wait(self, signature: Signature, kernel: KernelConfig) -> None:
        pass


DISTURBED = 0.1
"""A trial whose baseline is so far from the median of its problem's was disturbed, and says
nothing: one in a few thousand."""


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The fused trials of a recording that were not disturbed, by problem."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text("utf-8").splitlines():
        trial = json.loads(line)
        if trial["kernel"] is not None and trial["time_us"] is not None:
            found.setdefault(trial["problem"], []).append(trial)
    for problem, trials in found.items():
        usual = statistics.median(trial["baseline_us"] for trial in trials)
        found[problem] = [
            trial for trial in trials if abs(trial["baseline_us"] / usual - 1) <= DISTURBED
        ]
    return found


def problem_of(key: str) -> Problem:
    """The problem of a plain key, as ``Problem.key`` writes it."""
    op, types, *_, m, n, k, tp = key.split("/")
    sizes = [int(text.lstrip("mnktp")) for text in (m, n, k, tp)]
    problem = Problem(Signature.of(op, types.partition("->")[0]), *sizes)
    if problem.key != key:
        raise UsageError(f"compare: expected plain problems; found {key}")
    return problem


def compare(path: Path, target: str, link: str) -> dict[str, Any]:
    """The search's best over the sweep's, per problem and budget."""
    trials = read(path)
    replay = ReplayEvaluator(path)
    rows = []
    for key, found in trials.items():
        problem = problem_of(key)
        topology = Topology.of(target, link, problem.tp)
        best = min(1.0, *(t["time_us"] / t["baseline_us"] for t in found))  # or the unfused path
        kernels = {KernelConfig.from_dict(t["kernel"]) for t in found}
        share = max(2, math.floor(SHARE * len(found)))
        results = {}
        for budget in sorted({*(b for b in BUDGETS if b < share), share}):
            done = tune(
                [problem], topology, evaluator=replay, trials=budget, storage="memory",
                compiled=Recorded(kernels),  # type: ignore[arg-type]
            )  # fmt: skip
            (record,) = done.records
            results[str(budget)] = round(record.time_us / record.baseline_us / best, 4)
        rows.append({
            "problem": key, "trials": len(found), "kernels": len(kernels),
            "best_over_unfused": round(best, 4), "found_over_best": results,
            "reached": results[str(share)] <= WANTED,
        })  # fmt: skip
    return {
        "command": shlex.join(["python", "-m", "tests.bench.bench_search", *sys.argv[1:]]),
        "provenance": replay.provenance.value,
        "wanted": {"share_of_trials": SHARE, "found_over_best": WANTED},
        "problems": rows,
    }


def overlap(paths: Iterable[Path], target: str, link: str) -> str:
    """A table: E = 1 - (fused - GEMM) / communication, the paper's overlap efficiency.

    GEMM is the library's, timed in turn with the fused call; communication the bytes at the link's
    rate and one latency.
    """
    trials: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        for key, found in read(path).items():
            trials.setdefault(key, []).extend(found)
    lines = [
        "| op, n, k | m | GEMM us | link us | fused us | speedup | E | total / max | kernel, run |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for problem, found in sorted(
        ((problem_of(key), found) for key, found in trials.items()),
        key=lambda item: (item[0].op.value, item[0].n, item[0].k, item[0].m),
    ):
        topology = Topology.of(target, link, problem.tp)
        best = min(found, key=lambda t: t["time_us"] / t["baseline_us"])
        fused, moved = best["time_us"], unfused_us(problem, topology)
        gemm = best["baseline_us"] - moved
        kernel, run = KernelConfig.from_dict(best["kernel"]), RunConfig.from_dict(best["run"])
        groups = "-".join(map(str, run.groups))
        how = f"{groups}, panel {run.panel}, {run.chunk_axis.value}{run.chunks}, span {run.span}"
        lines.append(
            f"| {problem.op.value} {problem.n}, {problem.k} | {problem.m} | {gemm:.0f} "
            f"| {moved:.0f} | {fused:.0f} | {best['baseline_us'] / fused:.2f} "
            f"| {1 - (fused - gemm) / moved:.2f} | {fused / max(gemm, moved):.2f} "
            f"| {kernel.name}: {how}, {run.transport.value} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("sweep", "compare", "overlap"))
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--shapes", type=Path, help="JSON: a list of [op, m, n, k]")
    parser.add_argument("--target", default="h200")
    parser.add_argument("--link", default="nvlink")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--evaluator", choices=("predict", "device"), default="device")
    args = parser.parse_args()
    if args.what == "overlap":
        print(overlap(args.files, args.target, args.link))
        return 0
    if len(args.files) > 1:
        parser.error(f"{args.what}: expected one file; found {len(args.files)}")
    (file,) = args.files
    if args.what == "compare":
        print(json.dumps(compare(file, args.target, args.link), indent=1))
        return 0
    shapes = json.loads(args.shapes.read_text("utf-8")) if args.shapes else SHAPES
    problems = [Problem(Signature.of(op), m, n, k, args.tp) for op, m, n, k in shapes]
    topology = Topology.of(args.target, args.link, args.tp)
    with ExitStack() as stack:
        evaluator: Evaluator = PredictEvaluator()
        if args.evaluator == "device":
            evaluator = stack.enter_context(
                ProcessEvaluator(
                    "fluxgen.tune.device.evaluator:make",
                    {"gpu": topology.gpu, "check": False, "brief": True},
                    timeout_s=BRIEF_TIMEOUT_S,
                )
            )
        print(json.dumps({"trials": sweep(problems, topology, evaluator, file)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
