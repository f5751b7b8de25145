"""What a warm call of each op costs the host, beside torch's own fused ops in the same run.

    python -m tests.bench.bench_host_cost [--worlds 2 4 8] [--alone [--one-by-one]] [--out FILE]

Ranks are processes on one GPU. The GPU's times mean nothing here and are not shown; the host's are
of a real call, from the call until it returns, with an empty queue before each batch. Every round
runs all candidates in turn; medians of the rounds, with quartiles; of the ranks the slowest.

Processes that share a GPU take turns on it, which makes each launch dearer. With ``--alone`` there
is one process: one rank whose peers' flags are up already, so that it waits for nobody. What is
queued is the same. Torch's ops need their peers and are left out. What a call takes on the GPU
means something there (copies within its memory, in place of a link) and is shown, to be compared
with ``--one-by-one``, which makes no CUDA graphs of calls. "Turns" are 126 operands in turn, as the
layers of Llama-3.1-405B; "new" are more than graphs are kept of. The keys under which calls are
known are those that the ops themselves ask for.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fluxgen.core.config import RunConfig, Transport
from fluxgen.core.problem import Problem, Signature
from fluxgen.native import abi
from tests.dist.pool import Pool
from tests.gpu.ranks import (
    AG,
    AG_NK,
    AR,
    PULL_ROWS,
    PUSH,
    PUSH_ROWS,
    RS,
    RS_NK,
    SM_COPY,
    STORE,
    Environment,
    database,
    on_the_gpu,
    record,
)

WORLDS = (2, 4, 8)
BATCH, ROUNDS = 10, 12
ROWS, N, K = 128, 512, 512
TRANSPORTS = (
    ("push, 1 chunk", replace(PUSH_ROWS, chunks=1)),
    ("push, 2 chunks", PUSH_ROWS),
    ("push, 3 chunks of K", PUSH),
    ("pull, 2 chunks", PULL_ROWS),
    ("SM copy", SM_COPY),
)


A2A_GEMM, GEMM_A2A = Signature.of("a2a_gemm"), Signature.of("gemm_a2a")


def _ops() -> dict[str, Callable[..., Any]]:
    """By the short names of the table; x and w, and the group by name."""
    from fluxgen.runtime import ops
    from fluxgen.runtime.ops import all_reduce, all_to_all

    return {
        "ag": ops.all_gather_matmul,
        "rs": ops.matmul_reduce_scatter,
        "ar": all_reduce.matmul_all_reduce,
        "a2a-gemm": all_to_all.all_to_all_matmul,
        "gemm-a2a": all_to_all.matmul_all_to_all,
    }


class _Learning(dict[Hashable, Any]):
    """Known calls of a group: whatever is asked for and not known is ``next``."""

    next: Any = None

    def get(self, key: Hashable, default: Any = None) -> Any:
        return self.setdefault(key, self.next)


def _time(candidates: dict[str, Callable[[], Any]], settle: Callable[[], None]) -> Any:
    """Microseconds of the host for each call, one value a round."""
    import torch

    times: dict[str, list[float]] = {}
    with torch.no_grad():
        for round_ in range(ROUNDS + 2):
            for key, call in candidates.items():
                torch.cuda.synchronize()
                settle()
                start = time.perf_counter()
                for _ in range(BATCH):
                    call()
                end = time.perf_counter()
                if round_ >= 2:
                    times.setdefault(key, []).append((end - start) / BATCH * 1e6)
    torch.cuda.synchronize()
    return times


def _time_on_gpu(call: Callable[[], Any]) -> list[float]:
    """Microseconds on the GPU for each call, of calls that were queued before the first started."""
    import torch

    times = []
    with torch.no_grad():
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(8_000_000)
            start.record()
            for _ in range(3 * BATCH):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / (3 * BATCH) * 1e3)
    return times


def _tensors(world: int) -> Any:
    import torch

    x = torch.randn(ROWS, K, device="cuda").bfloat16()
    a = torch.randn(ROWS * world, K, device="cuda").bfloat16()
    w = torch.randn(N, K, device="cuda").bfloat16()
    return x, a, w


def _ranks(groups: Any, rank: int, pushes: bool) -> dict[str, list[float]]:
    import torch

    from fluxgen.runtime.session.dispatch import strict

    del rank
    group = groups["all"]
    name = group.group_name
    x, a, w = _tensors(group.size())
    wt, theirs = w.t().contiguous(), torch.ops.symm_mem
    candidates = {
        "linear": lambda: torch.nn.functional.linear(a, w),
        "ag torch": lambda: theirs.fused_all_gather_matmul(x, [wt], 0, name),
        "rs torch": lambda: theirs.fused_matmul_reduce_scatter(a, wt, "sum", 0, name),
    }
    for key, op in _ops().items():
        if key != "a2a-gemm" or pushes:  # another transport's record would be changed to push
            candidates[f"{key} fluxgen"] = partial(op, x if key == "ag" else a, w, group=group)
    with strict():
        for call in candidates.values():
            call()
        return _time(candidates, lambda: torch.distributed.barrier(group))


def _alone(world: int, run: RunConfig, one_by_one: bool) -> dict[str, list[float]]:
    import torch
    import torch.distributed as dist

    from fluxgen.core.errors import CommTimeout
    from fluxgen.native.workspace import group_view, sizes
    from fluxgen.runtime.session import launches as runs
    from fluxgen.runtime.session.dispatch import Call, Cause, Decision, Winner
    from fluxgen.runtime.session.fused import Fused
    from fluxgen.runtime.session.groups import state_of

    if not dist.is_initialized():
        path = tempfile.mkdtemp(prefix="fluxgen-bench-")
        dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    if one_by_one:
        runs.GRAPHS = 0
    state = state_of(group)
    x, a, w = _tensors(world)
    ours = _ops()
    signatures = dict(zip(ours, (AG, RS, AR, A2A_GEMM, GEMM_A2A), strict=True))
    problems = {key: Problem(s, ROWS * world, N, K, world) for key, s in signatures.items()}
    if not run.transport.pushes:
        del problems["a2a-gemm"]
    how = {
        key: (AG_NK, run) if problem.op.gathers else (RS_NK, STORE)
        for key, problem in problems.items()
    }
    parts = sizes(problems["ag"], *Transport)
    for key, problem in problems.items():
        parts |= sizes(problem, how[key][1].transport)
    spaces = [torch.zeros(parts.total, dtype=torch.uint8, device="cuda") for _ in range(world)]
    for space in spaces:
        words = space[: abi.COUNTERS_OFFSET].view(torch.int32)
        words[abi.READY_OFFSET // 4 :] = 2**30  # every flag there is

    class Workspace:
        captured = timed_out = False
        report = abi.Report()
        scratch = torch.empty(ROWS * world * K * 2, dtype=torch.uint8, device="cuda")
        scratch_at = scratch.data_ptr()

        def timeout(self) -> CommTimeout:
            raise AssertionError("nobody is waited for")

    workspace: Any = Workspace()
    workspace.sizes = parts
    workspace.gathered_at = spaces[0].data_ptr() + parts.gathered_offset
    workspace.group = group_view(0, [space.data_ptr() for space in spaces], parts, 5.0, 0)
    fused = Fused(x.device, "sm90")
    fused.adopt(workspace)
    state.fast = known = _Learning()
    operand = dict.fromkeys(problems, a) | {"ag": x}
    with torch.no_grad():
        for key, problem in problems.items():
            rows = (problem.m,)
            call = Call(problem.op, problem.m, (N,), K, torch.bfloat16, x.device, world, sizes=rows)
            winner = Winner((problem,), *how[key], "sm90", ("",))
            decision = Decision("fused", "the benchmark's", call.key, Cause.FUSED, winner)
            launches = runs.run_of(fused, call, decision)
            known.next = partial(launches.fast, (K, K))
            ours[key](operand[key], w, group=group)
            assert launches in [value.func.__self__ for value in known.values()]
    assert len(known) == len(problems)
    state.fast = dict(known)
    torch.cuda.synchronize()

    def in_turn(op: Callable[..., Any], x: torch.Tensor, count: int) -> Callable[[], Any]:
        order = itertools.cycle([(x.clone(), w.clone()) for _ in range(count)])
        return lambda: op(*next(order), group=group)

    ag, rs, few, many = ours["ag"], ours["rs"], 126, 200
    with torch.no_grad():
        turns = {
            "linear": lambda: torch.nn.functional.linear(a, w),
            **{f"{k} fluxgen": partial(ours[k], operand[k], w, group=group) for k in problems},
            "ag turns": in_turn(ag, x, few),
            "rs turns": in_turn(rs, a, few),
        }
        # Their graphs are made after all operands are, so that outputs stay where they are.
        for key in ("ag turns", "rs turns") if few < runs.GRAPHS else ():
            torch.cuda.synchronize()
            free = torch.cuda.mem_get_info()[0]
            for _ in range(4 * few):
                turns[key]()
            torch.cuda.synchronize()
            used = (free - torch.cuda.mem_get_info()[0]) / 2**20
            print(f"{key}: {used:.0f} MiB of the GPU's memory went to {few} graphs")
    found: dict[str, list[float]] = _time(turns, lambda: None)
    for key in problems:
        found[f"{key}, on the GPU"] = _time_on_gpu(turns[f"{key} fluxgen"])
    with torch.no_grad():
        new = {"ag new": in_turn(ag, x, many), "rs new": in_turn(rs, a, many)}
    return found | _time(new, lambda: None)


def main() -> None:
    """Print one line for each world, transport and candidate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--one-by-one", action="store_true")
    args = parser.parse_args()
    found = {}
    for world in args.worlds:
        for transport, run in TRANSPORTS:
            if args.alone:
                results = [_alone(world, run, args.one_by_one)]
            else:
                problems = [Problem(s, ROWS * world, N, K, world) for s in (AG, RS)]
                records = [record(problems[0], AG_NK, run), record(problems[1], RS_NK, STORE)]
                pool = Pool(
                    {"all": list(range(world))}, world, Environment(database(records)), on_the_gpu
                )
                try:
                    results = pool(_ranks, run.transport.pushes)
                finally:
                    pool.close()
            for key in results[0]:
                worst = [max(r) for r in zip(*(result[key] for result in results), strict=True)]
                low, middle, high = statistics.quantiles(worst, n=4)
                found[f"{world} ranks, {transport}: {key}"] = (middle, low, high)
                print(f"{world} {transport}, {key}: {middle:.1f} us ({low:.1f} to {high:.1f})")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
