"""Fused calls over this machine's own PCIe link, pinned host memory as the peers.

    python -m tests.bench.bench_pcie [--trials 10] [--seconds 200] [--out FILE.json]

Needs a GPU and compiled kernels (``FLUXGEN_STORE``). For each shape the search of ``fluxgen tune``
picks a configuration of the compiled kernels; then all candidates run in turn, with L2 flushed:

    gemm      the library's GEMM alone
    copies    the remote bytes alone, by plain copies, with as many the other way
    both      the two at once, with nothing to wait for: what they do to each other
    unfused   one after the other
    fluxgen   the configuration found: ag_gemm pulls by copy engine, gemm_rs is drained

Medians and quartiles, microseconds. Wanted: total / max(gemm, copies) at most 1.05 from m = 4096.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from tests.bench.bench_search import Recorded, compiled
from tests.bench.bench_side_by_side import quartiles

SHAPES = [
    (op, m, n, k)
    for m in (1024, 2048, 4096, 8192, 16384)
    for op, n, k in (("ag_gemm", 6144, 12288), ("gemm_rs", 12288, 6144))
]
TP = 8
ROUNDS = 3


def measure(problem: Problem, topology: Topology, trials: int) -> dict[str, Any]:
    """One shape: search, then all in turn."""
    import torch

    from fluxgen.runtime.session.kernels import fused_kernel, support_kernels
    from fluxgen.tune import tune
    from fluxgen.tune.candidates import Candidates
    from fluxgen.tune.device.check import Operands, matmul
    from fluxgen.tune.device.evaluator import make
    from fluxgen.tune.device.pcie import OverPcie
    from fluxgen.tune.device.timing import Stopwatch

    there = Recorded(k for k in Candidates(problem, topology).kernels
                     if compiled(problem.signature, k))  # fmt: skip
    found = tune([problem], topology, evaluator=make(topology.gpu), trials=trials,
                 storage="memory", compiled=there)  # type: ignore[arg-type]  # fmt: skip
    (record,) = found.records
    operands = Operands.of(problem)
    gathers = problem.op is Op.AG_GEMM
    left = torch.cat(operands.left) if gathers else operands.left[0]
    weight, want = operands.weight, matmul(left, operands.weight)
    rank = OverPcie(problem, support_kernels("sm90"))
    if gathers:
        rank.stage(left)
    whole, sent = torch.empty_like(want), torch.zeros_like(want)

    def gemm() -> None:
        torch.mm(left, weight.t(), out=whole)

    candidates: dict[str, Any] = {
        "gemm": (lambda: None, gemm),
        "copies": rank.copies_alone(whole),
        "both": rank.beside(gemm, sent),
        "unfused": rank.unfused(left, weight, whole),
    }
    out = torch.full_like(want if gathers else want[: problem.m_local], float("nan"))
    if record.kernel is not None and record.run is not None:
        kernel = fused_kernel(problem.signature, record.kernel, "sm90")
        candidates["fluxgen"] = rank.call(kernel, record.run, left, weight, out)
    watch = Stopwatch(lambda: rank.finish(20.0))
    watch.warm(candidates["gemm"][1])
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, more in watch.round(candidates).items():
            times[name] += more
    if "fluxgen" in candidates:
        assert torch.equal(out, want[: out.shape[0]]), "a wrong result was timed"
    us = {name: quartiles(some) for name, some in times.items()}
    us.setdefault("fluxgen", us["unfused"])
    longer = max(us["gemm"]["median"], us["copies"]["median"])
    return {
        "op": problem.op.value, "m": problem.m, "n": problem.n, "k": problem.k, "tp": problem.tp,
        "kernel": record.kernel.name if record.kernel else None,
        "run": record.run.to_dict() if record.run else None, "us": us,
        "total_over_max": round(us["fluxgen"]["median"] / longer, 3),
        "unfused_over_fluxgen": round(us["unfused"]["median"] / us["fluxgen"]["median"], 3),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=200, help="no shape is begun after these")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import torch

    from fluxgen.machine.device import devices

    gpu = devices()[torch.cuda.current_device()].gpu
    topology = Topology.of(gpu, "pcie", TP)
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    for op, m, n, k in SHAPES:
        if time.monotonic() - begin > args.seconds:
            break
        row = measure(Problem(Signature.of(op), m, n, k, TP), topology, args.trials)
        rows.append(row)
        us = [f"{name} {f['median']:.0f}" for name, f in row["us"].items()]
        print(op, m, *us, row["total_over_max"], row["unfused_over_fluxgen"], row["kernel"],
              row["run"] and (row["run"]["groups"], row["run"]["chunk_axis"], row["run"]["chunks"]),
              flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    document = {"command": "python -m tests.bench.bench_pcie " + shlex.join(sys.argv[1:]),
                "provenance": "emulated", "gpu": gpu.name, "rows": rows}  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
