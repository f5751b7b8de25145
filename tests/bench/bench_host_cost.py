"""What a warm call costs the host, beside torch's own fused ops in the same run.

    python -m tests.bench.bench_host_cost [--worlds 2 4 8] [--out FILE]

Ranks are processes on one GPU, so the GPU's times mean nothing here and are not shown; the host's
are of a real call: from the call until it returns, with an empty queue before each batch. Every
round runs all candidates in turn; medians of the rounds, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from tests.dist.pool import Pool
from tests.gpu.ranks import AG, RS, STORE, Environment, database, on_the_gpu, record

WORLDS = (2, 4, 8)
BATCH, ROUNDS = 10, 12
ROWS, N, K = 128, 512, 512


def _measure(groups: Any, rank: int) -> dict[str, list[float]]:
    import torch
    from torch.distributed import _symmetric_memory as symm_mem

    from fluxgen.runtime.dispatch import strict
    from fluxgen.runtime.ops import all_gather_matmul, matmul_reduce_scatter

    del rank
    group = groups["all"]
    name, world = group.group_name, group.size()
    x = torch.randn(ROWS, K, device="cuda").bfloat16()
    a = torch.randn(ROWS * world, K, device="cuda").bfloat16()
    w = torch.randn(N, K, device="cuda").bfloat16()
    wt = w.t().contiguous()
    symm_mem.enable_symm_mem_for_group(name)
    ops = torch.ops.symm_mem
    candidates = {
        "linear": lambda: torch.nn.functional.linear(a, w),
        "ag fluxgen": lambda: all_gather_matmul(x, w, group=group),
        "ag torch": lambda: ops.fused_all_gather_matmul(x, [wt], 0, name),
        "rs fluxgen": lambda: matmul_reduce_scatter(a, w, group=group),
        "rs torch": lambda: ops.fused_matmul_reduce_scatter(a, wt, "sum", 0, name),
    }
    times: dict[str, list[float]] = {key: [] for key in candidates}
    for key, call in list(candidates.items()):
        try:
            call()
        except Exception as error:  # a torch without its own op must not end the measurement
            print(f"{key} cannot run: {error}"[:200], flush=True)
            del candidates[key], times[key]
    with torch.no_grad(), strict():
        for round_ in range(ROUNDS + 2):
            for key, call in candidates.items():
                torch.cuda.synchronize()
                torch.distributed.barrier(group)
                start = time.perf_counter()
                for _ in range(BATCH):
                    call()
                end = time.perf_counter()
                if round_ >= 2:
                    times[key].append((end - start) / BATCH * 1e6)
    torch.cuda.synchronize()
    return times


def main() -> None:
    """Print one line for each world and candidate."""
    from fluxgen.core.problem import Problem
    from tests.gpu.ranks import AG_NK, PULL_ROWS, RS_NK, SM_COPY

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    args = parser.parse_args()
    out = args.out
    found = {}
    for world in args.worlds:
        for transport, run in (("copy engine, 2 chunks", PULL_ROWS), ("SM copy", SM_COPY)):
            problems = [Problem(s, ROWS * world, N, K, world) for s in (AG, RS)]
            records = [record(problems[0], AG_NK, run), record(problems[1], RS_NK, STORE)]
            pool = Pool(
                {"all": list(range(world))}, world, Environment(database(records)), on_the_gpu
            )
            try:
                results = pool(_measure)
            finally:
                pool.close()
            for key in results[0]:
                # The slowest rank of each round: all wait for it.
                worst = [max(r) for r in zip(*(result[key] for result in results), strict=True)]
                low, middle, high = statistics.quantiles(worst, n=4)
                found[f"{world} ranks, {transport}: {key}"] = (middle, low, high)
                print(f"{world} {transport} {key}: {middle:.1f} us ({low:.1f} to {high:.1f})")
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
