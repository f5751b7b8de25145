"""gemm_rs and gemm_ar of few tokens: in packets and with flags, against cuBLAS and the same bytes;
and gathers of few tokens, by SMs and by copy engines.

    python -m tests.bench.bench_few_tokens [--tokens 1,8,64] [--seconds 120] [--out FILE]

One rank of W = 8 has all SMs; its peers' flags are up, its packets are all its own, stores land on
this GPU. Measured is the call, kernel by kernel, cold L2, interleaved with cuBLAS's GEMM. What the
link takes is then added to all of them, as a formula: one latency and the bytes at its rate, the
unfused path by the better of one shot and two. Of each transport the best kernel and split.

Of an ag_gemm the peers' slabs lie in this GPU's memory and are really copied, as fast as that
allows: what is shown is what a transport costs beside its bytes.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import re
import shlex
import statistics
import sys
import time
from itertools import product
from pathlib import Path

import torch

from fluxgen.codegen.space import why_illegal
from fluxgen.core.config import RunConfig, Transport
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.kernels.flat import SPLITS
from fluxgen.native.loader import FusedKernel
from fluxgen.shapes import model_gemms
from fluxgen.tune.device import schedule
from fluxgen.tune.device.alone import Queue
from fluxgen.tune.device.check import Operands, matmul, wrong
from fluxgen.tune.device.emulated_link import EmulatedLink, emulated_link
from fluxgen.tune.device.pcie import OverPcie
from fluxgen.tune.device.rank import OneRank
from fluxgen.tune.device.timing import Stopwatch
from tests.bench.bench_data_present import DECODED
from tests.gpu.conftest import KERNELS
from tests.gpu.kernels import compiled_kernels, load_kernel, load_support

WORLD = 8
TOKENS = (1, 8, 16, 32, 64, 128, 256)
TRANSPORTS = {
    Op.GEMM_AR: (Transport.BROADCAST_PACKETS, Transport.PEER_BROADCAST),
    Op.GEMM_RS: (Transport.PEER_PACKETS, Transport.PEER_STORE),
}


def kernels_of(call: Queue) -> list[str]:
    """What one call, itself one launch of a CUDA graph, runs on the GPU, in its order."""
    before, queue = call
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as seen:
        before()
        queue()
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return [re.sub(r"^void |fluxgen::|\(.*|<.*", "", e.name) for e in events]


def measure(
    problem: Problem, topology: Topology, kernels: list[FusedKernel], link: EmulatedLink
) -> dict[str, object]:
    support = load_support()
    rank = OneRank(problem, topology, support, link)
    rank.present(True)
    operands = Operands.of(problem)
    left, weight = operands.left[0], operands.weight
    rows = problem.m if problem.op is Op.GEMM_AR else problem.m_local
    out = torch.full((rows, problem.n), float("nan"), device="cuda", dtype=left.dtype)
    plain = torch.empty(problem.m, problem.n, device="cuda", dtype=left.dtype)
    watch = Stopwatch(lambda: rank.finish(30))

    def library() -> None:
        torch.mm(left, weight.t(), out=plain)

    watch.warm(library, 5.0)
    row: dict[str, object] = {**problem.to_dict()}
    queues, chosen, links = {"cublas": ((lambda: None), library)}, {}, {}
    for transport in TRANSPORTS[problem.op]:
        calls = {}
        for kernel, split in product(kernels, SPLITS):
            run = RunConfig((WORLD,), transport=transport, span=WORLD, split=split)
            if why_illegal(problem, topology, kernel.kernel, run) is None:
                call = rank.call(kernel, run, left, weight, out, present=True)
                calls[f"{kernel.kernel.name} {split}"] = (call, kernel, run)
        if not calls:
            continue
        times = watch.round({name: call for name, (call, _, _) in calls.items()})
        best = min(times, key=lambda name: statistics.median(times[name]))
        call, kernel, run = calls[best]
        reason = wrong(problem, kernel, run, support)
        assert reason is None, reason
        queues[transport.value], chosen[transport] = call, best
        links[transport] = schedule.unhidden_us(problem, topology, kernel.kernel, run)
    assert torch.isfinite(plain).all()
    assert torch.equal(plain, matmul(left, weight))
    for name, timing in watch.interleaved(queues, most=60).items():
        row[name] = {"us": timing.median_us, "spread": timing.spread}
    unfused = row["cublas"]["us"] + schedule.unfused_us(problem, topology)  # type: ignore[index]
    row["unfused_us"] = unfused
    for transport, name in chosen.items():
        entry = row[transport.value]
        assert isinstance(entry, dict)
        entry["kernel"] = name
        entry["whole_us"] = entry["us"] + links[transport]
        entry["speedup"] = unfused / entry["whole_us"]
        entry["kernels"] = kernels_of(queues[transport.value])
    return row


class OverHbm(OverPcie):
    """Its peers' workspaces lie in this GPU's own memory; nothing goes the other way."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, load_support())
        self._peers = [memory.cuda() for memory in self._peers]
        for peer, memory in enumerate(self._peers, start=1):
            self.group.peers[peer] = memory.data_ptr()
        self._moves = False
        torch.cuda.synchronize()


GATHERS = (Transport.SM_COPY, Transport.COPY_ENGINE_PULL)


def measure_gather(
    problem: Problem, topology: Topology, kernels: list[FusedKernel]
) -> dict[str, object]:
    rank = OverHbm(problem)
    operands = Operands.of(problem)
    whole, weight = torch.cat(operands.left), operands.weight
    rank.stage(whole)
    out = torch.full((problem.m, problem.n), float("nan"), device="cuda", dtype=whole.dtype)
    plain = torch.empty_like(out)
    watch = Stopwatch(lambda: rank.finish(30))

    def library() -> None:
        torch.mm(whole, weight.t(), out=plain)

    watch.warm(library, 5.0)
    row: dict[str, object] = {"m": problem.m, "n": problem.n, "k": problem.k}
    queues = {"cublas": ((lambda: None), library)}
    for transport in GATHERS:
        calls = {}
        for kernel, split in product(kernels, SPLITS):
            run = RunConfig((WORLD,), transport=transport, span=WORLD, split=split)
            if why_illegal(problem, topology, kernel.kernel, run) is None:
                call = rank.call(kernel, run, whole[: problem.m_local], weight, out)
                calls[f"{kernel.kernel.name} {split}"] = call
        times = watch.round(calls)
        best = min(times, key=lambda name: statistics.median(times[name]))
        out.fill_(float("nan"))
        calls[best][0]()
        calls[best][1]()
        rank.finish(30)
        assert torch.equal(out, matmul(whole, weight)), f"{problem.key} {transport.value} {best}"
        queues[transport.value] = calls[best]
        row[f"{transport.value} kernel"] = best
    for name, timing in watch.interleaved(queues, most=60).items():
        row[name] = {"us": timing.median_us, "spread": timing.spread}
    row["kernels"] = {t.value: kernels_of(queues[t.value]) for t in GATHERS}
    return row


def main() -> None:
    """Measure and print a table; JSON with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--out", default="few_tokens.json")
    args = parser.parse_args()
    faulthandler.dump_traceback_later(args.seconds + 60, exit=True)
    start = time.monotonic()
    topology = Topology.of("h200", "nvlink", WORLD)
    names = [n for n in compiled_kernels() if n.startswith("gemm_rs_bf16_sm90") and "_flat_" in n]
    kernels = [load_kernel(name) for name in sorted(names)]
    gemms = [g for model in DECODED for g in model_gemms(model, WORLD) if g.op is Op.GEMM_RS]
    rows, link = [], emulated_link("sm90", KERNELS)
    tokens = [int(m) for m in args.tokens.split(",")]
    for op, m, (n, k) in product(TRANSPORTS, tokens, dict.fromkeys((g.n, g.k) for g in gemms)):
        if op is Op.GEMM_RS and m % WORLD:
            continue
        if time.monotonic() - start > args.seconds:
            print(f"stopped after {args.seconds:g} s")
            break
        row = measure(Problem(Signature.of(op), m, n, k, WORLD), topology, kernels, link)
        rows.append(row)
        cells = [f"{op.value} {m:4d} {n:6d} {k:6d}  cublas {row['cublas']['us']:6.1f}"]  # type: ignore[index]
        cells.append(f"unfused {row['unfused_us']:6.1f}")
        for transport in TRANSPORTS[op]:
            entry = row.get(transport.value)
            if isinstance(entry, dict):
                cells.append(
                    f"{transport.value} {entry['us']:6.1f} + link = {entry['whole_us']:6.1f}, "
                    f"{entry['speedup']:.2f} ({entry['kernel']})"
                )
        print("  ".join(cells), flush=True)
    for op, transports in TRANSPORTS.items():
        for row in [r for r in rows if r["op"] == op.value][:1]:
            for transport in transports:
                print(op.value, transport.value, row[transport.value]["kernels"])  # type: ignore[index]
    gathers = []
    names = [n for n in compiled_kernels() if n.startswith("ag_gemm_bf16_sm90") and "_flat_" in n]
    kernels = [load_kernel(name) for name in sorted(names)]
    columns = [g for model in DECODED for g in model_gemms(model, WORLD) if g.op is Op.AG_GEMM]
    for m, (n, k) in product((8, 64), dict.fromkeys((g.n, g.k) for g in columns)):
        if time.monotonic() - start > args.seconds:
            print(f"stopped after {args.seconds:g} s")
            break
        row = measure_gather(Problem(Signature.of("ag_gemm"), m, n, k, WORLD), topology, kernels)
        gathers.append(row)
        cells = [f"{t} {row[t]['us']:6.1f}" for t in ("cublas", *(g.value for g in GATHERS))]  # type: ignore[index]
        print(f"ag_gemm {m:3d} {n:6d} {k:6d}  ", "  ".join(cells), row["kernels"], flush=True)
    command = shlex.join(["python", "-m", "tests.bench.bench_few_tokens", *sys.argv[1:]])
    Path(args.out).write_text(
        json.dumps(
            {
                "command": command,
                "gpu": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "provenance": "emulated: one GPU, local stores; the link's time by a formula",
                "rows": rows,
                "gathers": gathers,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
