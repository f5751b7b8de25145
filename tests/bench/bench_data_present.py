"""Fused kernels with their data present, against cuBLAS, interleaved in one run.

    python -m tests.bench.bench_data_present [--shapes section6|llama|models|decode]
                                             [--tokens 8192,16384] [--seconds 120] [--out FILE]
                                             [--arch sm80]

All SMs belong to one rank of W = 8, every flag is already up, RS stores land in local inboxes: what
is measured is the cost of the fused form itself (rank-batched order, waits, signals), not of a
link. Each round times cuBLAS and every candidate once, in turn; figures are medians over rounds of
the ratio within a round, with the quartiles as spread. A first pass ranks all (kernel, groups,
panel) with few rounds, a second times the best ones with many. The RS reduction is timed apart.
At the end, per m, the geometric mean and the worst of the best ratios. ``--arch sm80`` times
Ampere's kernels, in the code that this GPU compiles from their PTX.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shlex
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

from fluxgen.codegen.space import span_choices, why_illegal
from fluxgen.core.config import ChunkAxis, RunConfig, Schedule, Transport
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.kernels.flat import SPLITS
from fluxgen.kernels.slabs import group_choices
from fluxgen.native import abi
from fluxgen.native.arguments import gemm_args
from fluxgen.native.workspace import group_view, sizes
from fluxgen.shapes import model_gemms
from tests.gpu.kernels import compiled_kernels, load_kernel, load_support

WORLD = 8
SECTION6 = [
    ("ag_gemm", m, n, k) for m in (512, 1024, 2048, 4096, 8192) for n, k in ((6144, 12288),)
] + [("gemm_rs", m, 12288, 6144) for m in (512, 1024, 2048, 4096, 8192)]
SETS = {
    "section6": SECTION6,
    "llama": [("ag_gemm", m, 7168, 8192) for m in (1024, 4096)]
    + [("ag_gemm", m, 3584, 4096) for m in (1024, 4096)]
    + [("gemm_rs", m, 4096, 1792) for m in (1024, 4096)],
}
MODELS = (
    "gpt3-175b", "llama-3.1-70b", "llama-3.1-8b", "llama-3.1-405b", "qwen2.5-72b",
    "devstral-2-123b",
)  # fmt: skip
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
DECODED = ("llama-3.1-8b", "llama-3.1-70b", "gpt3-175b")
FEW = (8, 16, 32, 64, 128, 256, 512)


def shapes_of(name: str) -> list[tuple[str, int, int, int]]:
    """op, m, n, k of a set; of ``models`` and ``decode``, every GEMM of one layer of each, once."""
    if name in SETS:
        return SETS[name]
    models, tokens = (MODELS, TOKENS) if name == "models" else (DECODED, FEW)
    gemms = [g for model in models for g in model_gemms(model, WORLD) if g.op is not None]
    each = dict.fromkeys((g.op.value, g.n, g.k) for g in gemms)
    return [(op, m, n, k) for m in tokens for op, n, k in each]


class Bench:
    """One problem's buffers (rotating, so that L2 holds no input from the round before)."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizes = sizes(problem, Transport.COPY_ENGINE_PULL)
        p, bf16 = problem, torch.bfloat16
        bytes_in = 2 * (p.m * p.k + p.n * p.k)
        self.copies = max(2, min(64, -(-300_000_000 // bytes_in)))
        self.a = [torch.randn(p.m, p.k, device="cuda").to(bf16) for _ in range(self.copies)]
        self.b = [torch.randn(p.n, p.k, device="cuda").to(bf16) for _ in range(self.copies)]
        self.d = torch.empty(p.m, p.n, device="cuda", dtype=bf16)
        self.out = torch.empty(p.m_local, p.n, device="cuda", dtype=bf16)
        self.workspaces = [
            torch.zeros(self.sizes.total, dtype=torch.uint8, device="cuda") for _ in range(WORLD)
        ]
        controls = [space[: abi.DATA_OFFSET].view(torch.int32) for space in self.workspaces]
        for words in controls:
            words[0] = 1
        self.flags = [c[abi.ARRIVED_OFFSET // 4 : abi.COUNTERS_OFFSET // 4] for c in controls]
        self.raise_flags()
        self.begun = controls[0][abi.BEGUN_OFFSET // 4 : abi.MULTIPLIED_OFFSET // 4 + 1]
        self.aborted = controls[0][abi.ABORTED_OFFSET // 4]
        self.one_call = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
        addresses = [space.data_ptr() for space in self.workspaces]
        self.group = group_view(0, addresses, self.sizes, 5.0, 0)
        torch.cuda.synchronize()

    def raise_flags(self) -> None:
        """For all calls to come; a gemm_rs that runs lowers this rank's to its own epoch."""
        for flags in self.flags:
            flags.fill_(2**30)

    def begin(self) -> None:
        """Before each timing, as the kernel that begins a gather: one call has begun."""
        self.begun.copy_(self.one_call)

    def check(self) -> None:
        """A kernel that gave up waiting did no work, and its time means nothing."""
        if int(self.aborted):
            raise RuntimeError(f"{self.problem.key}: a kernel waited for a flag past its deadline")

    def cublas(self, i: int) -> None:
        torch.mm(self.a[i % self.copies], self.b[i % self.copies].t(), out=self.d)

    def fused(self, kernel, run: RunConfig, i: int) -> None:
        p = self.problem
        args = gemm_args(self.group, p, kernel.kernel, run)
        a, b = self.a[i % self.copies], self.b[i % self.copies]
        args.a, args.a_row_stride = a.data_ptr(), p.k
        if p.op is Op.AG_GEMM:
            args.own, args.own_row_stride = a.data_ptr(), p.k
        args.b, args.b_row_stride = b.data_ptr(), p.k
        args.d, args.d_row_stride = self.d.data_ptr(), p.n
        kernel.launch(args, torch.cuda.current_stream().cuda_stream)

    def reduce(self, i: int) -> None:
        p = self.problem
        args = abi.ReduceArgs(group=self.group, rows=p.m_local, n=p.n, d=self.out.data_ptr())
        args.d_row_stride, args.scale = p.n, 1.0
        load_support().reduce(args, torch.cuda.current_stream().cuda_stream)


AHEAD_CYCLES = 200_000
"""The GPU idles so long, about 0.1 ms, before each call: the host needs less to queue one."""

NOTHING_US = 2.5
"""Two events with nothing between them are at most so far apart, or the GPU waited for the host."""


def interleave(calls, rounds: int, begin=lambda: None) -> list[list[float]]:
    """Milliseconds of each call in each round, every round running all calls in turn.

    Raises:
        RuntimeError: the host fell behind, so that the times of short kernels are its own.
    """
    torch.cuda._sleep(20_000_000)  # and before the first one
    events = []
    for i in range(rounds):
        row = []
        for call in (*calls, lambda i: None):
            begin()
            torch.cuda._sleep(AHEAD_CYCLES)
            start, end = torch.cuda.Event(True), torch.cuda.Event(True)
            start.record()
            call(i)
            end.record()
            row.append((start, end))
        events.append(row)
    torch.cuda.synchronize()
    times = [[start.elapsed_time(end) for start, end in row] for row in events]
    nothing = statistics.median(row.pop() for row in times) * 1e3
    if nothing > NOTHING_US:
        raise RuntimeError(f"{nothing:.1f} us between two events: the GPU waits for the host")
    return times


LONG, MANY = 4096, 40
"""Of problems of more rows than ``LONG``, the ``MANY`` fastest of one round are timed again."""


def ratios(times: list[list[float]], index: int) -> list[float]:
    return [row[index] / row[0] for row in times]


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high


GPUS = {"sm90": "h200", "sm80": "a100-sxm-80gb"}
"""What an architecture's kernels are legal for."""


def candidates(problem: Problem, topology: Topology, full: bool):
    transport = Transport.COPY_ENGINE_PULL if problem.op is Op.AG_GEMM else Transport.PEER_STORE
    for name in compiled_kernels():
        if f"_{topology.gpu.arch}_" not in name:
            continue
        kernel = load_kernel(name)
        if kernel.signature != problem.signature:
            continue
        if kernel.kernel.schedule is Schedule.FLAT:
            for split in SPLITS:
                run = RunConfig((WORLD,), transport=transport, span=WORLD, split=split)
                if why_illegal(problem, topology, kernel.kernel, run) is None:
                    yield kernel, run
            continue
        groupings = group_choices(problem.op, WORLD)
        for groups in groupings if full else groupings[:2]:
            for panel in (0, 1, 2, 4, 8):
                for span in span_choices(problem, topology, kernel.kernel):
                    run = RunConfig(groups, panel, ChunkAxis.M, 1, 0, transport, span)
                    if why_illegal(problem, topology, kernel.kernel, run) is None:
                        yield kernel, run


def run_problem(problem: Problem, topology: Topology, full: bool) -> dict:
    bench = Bench(problem)
    pool = list(candidates(problem, topology, full))
    calls = [bench.cublas, *[lambda i, k=k, r=r: bench.fused(k, r, i) for k, r in pool]]
    once = interleave(calls, 1, bench.begin)[0]
    bench.check()
    if problem.m > LONG:  # the rest would take minutes
        near = sorted(range(1, len(calls)), key=lambda c: once[c])[:MANY]
        pool = [pool[c - 1] for c in near]
        calls = [calls[0], *[calls[c] for c in near]]
    coarse = interleave(calls, 5 if problem.m <= 1024 else 3, bench.begin)
    order = sorted(range(1, len(calls)), key=lambda c: statistics.median(ratios(coarse, c)))
    best: list[int] = []
    for c in order:  # the two best runs of each of the five best kernels
        name = pool[c - 1][0].kernel.name
        names = [pool[b - 1][0].kernel.name for b in best]
        if names.count(name) < 2 and (name in names or len(set(names)) < 5):
            best.append(c)
    rounds = 40 if problem.m <= 2048 else 24
    fine = interleave([calls[0], *[calls[c] for c in best]], rounds, bench.begin)
    rows = []
    for position, c in enumerate(best, start=1):
        kernel, run = pool[c - 1]
        low, middle, high = quartiles(ratios(fine, position))
        rows.append(
            {
                "kernel": kernel.kernel.name,
                "run": run.to_dict(),
                "ratio": middle,
                "quartiles": [low, high],
                "ms": statistics.median(row[position] for row in fine),
            }
        )
    rows.sort(key=lambda r: r["ratio"])
    cublas = statistics.median(row[0] for row in fine)
    result = {
        **problem.to_dict(),
        "cublas_ms": cublas,
        "cublas_tflops": problem.flops / cublas / 1e9,
        "best": rows,
        "coarse": [
            [
                pool[c - 1][0].kernel.name,
                pool[c - 1][1].to_dict(),
                statistics.median(ratios(coarse, c)),
                statistics.median(row[c] for row in coarse),
            ]
            for c in order
        ],
    }
    if problem.op is Op.GEMM_RS:
        bench.raise_flags()
        times = interleave([bench.reduce], 20)
        result["reduce_ms"] = statistics.median(row[0] for row in times)
    bench.check()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="data_present.json")
    parser.add_argument("--shapes", default="section6", choices=(*SETS, "models", "decode"))
    parser.add_argument("--tokens", help="of the set, only these m, as 8192,16384")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--full", action="store_true", help="all groupings in the first pass")
    parser.add_argument("--arch", default="sm90", choices=list(GPUS))
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds + 60, exit=True)
    start = time.monotonic()
    topology = Topology.of(GPUS[args.arch], "nvlink", WORLD)
    results = []
    tokens = {int(m) for m in args.tokens.split(",")} if args.tokens else None
    for op, m, n, k in shapes_of(args.shapes):
        if tokens is not None and m not in tokens:
            continue
        if time.monotonic() - start > args.seconds:
            print("time is up; the shapes below were not run:", op, m, n, k)
            break
        problem = Problem(Signature.of(op, "bf16"), m, n, k, WORLD)
        result = run_problem(problem, topology, args.full)
        results.append(result)
        top = result["best"][0]
        extra = f" reduce {result['reduce_ms']:.3f}" if "reduce_ms" in result else ""
        print(
            f"{op} {m:>5}x{n}x{k} cublas {result['cublas_ms']:.4f} ms "
            f"({result['cublas_tflops']:.0f} TF) fused {top['ms']:.4f} ratio {top['ratio']:.3f} "
            f"[{top['quartiles'][0]:.3f}, {top['quartiles'][1]:.3f}] {top['kernel']} "
            f"{top['run']['groups']} p{top['run']['panel']} s{top['run']['span']} "
            f"k{top['run'].get('split', 1)}{extra}",
            flush=True,
        )
        torch.cuda.empty_cache()
        if args.shapes in ("models", "decode"):
            del result["coarse"]
        Path(args.out).write_text(
            json.dumps(
                {
                    "command": shlex.join(
                        ["python", "-m", "tests.bench.bench_data_present", *sys.argv[1:]]
                    ),
                    "gpu": torch.cuda.get_device_name(),
                    "torch": torch.__version__,
                    "provenance": "emulated: one GPU, data present, local inboxes",
                    "results": results,
                },
                indent=1,
            )
        )
    for m in dict.fromkeys(r["m"] for r in results):
        best = [r["best"][0]["ratio"] for r in results if r["m"] == m]
        mean = statistics.geometric_mean(best)
        print(f"m={m}: {len(best)} shapes, geometric mean {mean:.3f}, worst {max(best):.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
