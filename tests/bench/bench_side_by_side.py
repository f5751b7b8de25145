"""fluxgen beside what else there is, over the same imitated link, all in one run and in turn.

    python -m tests.bench.bench_side_by_side [--shapes FILE.json] [--db FILE] [--out FILE.json]

Needs a GPU and compiled kernels (``FLUXGEN_STORE``). Rank 0 of ``tp`` runs alone; what the others
send is a schedule of flags (:mod:`fluxgen.tune.device.rank`), no bytes move. Candidates:

    gemm         the library's GEMM alone, all data present
    present      our GEMM alone, all data present, with the kernels around it
    unfused      the collective at the link's rate and one latency, then cuBLAS (after it: gemm_rs);
                 NCCL's own costs are not in it
    decomposed   in the manner of torch's async TP: a slab's cuBLAS GEMM as it arrives (its result
                 sent as it is made), the own slab first (last), the reduction after the last
    fluxgen      what the tuning database says, which may be `unfused`

Each is timed with L2 flushed. Times are medians and quartiles, microseconds; E is the paper's
overlap efficiency, 1 - (time - gemm) / (unfused - gemm).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology

# Before CUDA starts: streams that share a queue would wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

IN_FLIGHT = 10
"""Timings queued at once: a decomposed call is up to forty launches."""

SHAPES = Path(__file__).with_name("data") / "side_by_side_shapes.json"
ARCH = "sm90"


class Peers:
    """The peers' way of doing it, with the library's GEMM, for one problem."""

    def __init__(self, problem: Problem, topology: Topology, operands: Any, support: Any) -> None:
        import torch

        from fluxgen.tune.device.emulated_link import emulated_link
        from fluxgen.tune.device.rank import OneRank

        self.problem, self.topology = problem, topology
        self.left, self.weight = operands
        self.link = emulated_link(ARCH)  # epochs of its own
        self.rank = OneRank(problem, topology, support, self.link)
        self.stream = self.rank.stream.cuda_stream
        self.out = torch.empty(problem.m, problem.n, dtype=self.left.dtype, device="cuda")
        self.part = self.out[: problem.m_local].clone()
        self.epoch = 0

    def _flag(self, visit: int) -> int:
        from fluxgen.native import abi

        base = int(self.rank.mine.data_ptr())
        return base + abi.GATHERED_OFFSET + 4 * visit * abi.MAX_CHUNKS

    def _schedule(self, due: list[tuple[int, float]]) -> None:
        self.epoch += 1
        self.link.gather(self.epoch, self.topology.latency_us, due)

    def _wait(self, visit: int) -> None:
        self.link.gate(self.stream, self._flag(visit), self.epoch)

    def unfused(self) -> tuple[Callable[[], None], Callable[[], None]]:
        import torch

        from fluxgen.predict.link import transfer_us

        whole = transfer_us(self.problem.comm_bytes, self.topology)
        gathers = self.problem.op is Op.AG_GEMM

        def before() -> None:
            self._schedule([(self._flag(1), whole)])

        def queue() -> None:
            if not gathers:
                torch.mm(self.left, self.weight.t(), out=self.out)
            self.link.mark(self.stream, self.epoch)
            self._wait(1)
            if gathers:
                torch.mm(self.left, self.weight.t(), out=self.out)

        return before, queue

    def decomposed(self) -> tuple[Callable[[], None], Callable[[], None]]:
        return self._gather() if self.problem.op is Op.AG_GEMM else self._scatter()

    def _slab_us(self) -> float:
        from fluxgen.predict.constants import COPY_US
        from fluxgen.predict.link import transfer_us

        return transfer_us(self.problem.comm_bytes / (self.problem.tp - 1), self.topology) + COPY_US

    def _gather(self) -> tuple[Callable[[], None], Callable[[], None]]:
        import torch

        tp, weight, each = self.problem.tp, self.weight.t(), self._slab_us()
        left, out = self.left.chunk(tp), self.out.chunk(tp)

        def before() -> None:
            self._schedule([(self._flag(v), each * v) for v in range(1, tp)])

        def queue() -> None:
            self.link.mark(self.stream, self.epoch)
            for visit in range(tp):
                if visit:
                    self._wait(visit)
                torch.mm(left[visit], weight, out=out[visit])

        return before, queue

    def _scatter(self) -> tuple[Callable[[], None], Callable[[], None]]:
        import torch

        from fluxgen.native import abi
        from fluxgen.tune.device.emulated_link import Departure

        p, weight, each = self.problem, self.weight.t(), self._slab_us()
        left, out = self.left.chunk(p.tp), self.out.chunk(p.tp)
        at = slice(abi.ARRIVED_OFFSET, abi.ARRIVED_OFFSET + 4)
        sent = [memory[at].view(torch.int32) for memory in self.rank.peers]
        base = self.rank.mine.data_ptr() + abi.ARRIVED_OFFSET
        answers = [base + 4 * (p.tp - v) * abi.MAX_CHUNKS for v in range(1, p.tp)]
        pairs = [
            Departure(sent[v - 1].data_ptr(), answers[v - 1], each, each)
            for v in range(1, p.tp)
        ]  # fmt: skip

        # CUDA loads kernels at their first launch, and waits then for the streams that watch.
        torch.mm(left[0], weight, out=out[0])
        torch.sum(self.out.view(p.tp, p.m_local, p.n), dim=0, out=self.part)
        sent[0].fill_(self.epoch)
        torch.cuda.synchronize()

        def before() -> None:
            self.epoch += 1
            self.link.scatter(self.epoch, self.topology.latency_us, pairs)
            self.link.mark(self.stream, self.epoch)

        def queue() -> None:
            for visit in (*range(1, p.tp), 0):
                torch.mm(left[visit], weight, out=out[visit])
                if visit:
                    sent[visit - 1].fill_(self.epoch)
            for answer in answers:
                self.link.gate(self.stream, answer, self.epoch)
            torch.sum(self.out.view(p.tp, p.m_local, p.n), dim=0, out=self.part)

        return before, queue


def quartiles(times: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(times, n=4)
    return {"median": round(middle, 2), "low": round(low, 2), "high": round(high, 2)}


def measure(problem: Problem, topology: Topology, db: Path | None, rounds: int) -> dict[str, Any]:
    """All candidates of one problem, in turn."""
    import torch

    from fluxgen.db.lookup import lookup
    from fluxgen.runtime.session.kernels import fused_kernel, support_kernels
    from fluxgen.tune.device.check import Operands, matmul
    from fluxgen.tune.device.emulated_link import emulated_link
    from fluxgen.tune.device.rank import OneRank
    from fluxgen.tune.device.timing import Stopwatch

    support = support_kernels(ARCH)
    operands = Operands.of(problem)
    left = torch.cat(operands.left) if problem.op is Op.AG_GEMM else operands.left[0]
    weight = operands.weight
    peers = Peers(problem, topology, (left, weight), support)
    found = lookup(problem, topology, db=db)
    whole = torch.empty(problem.m, problem.n, dtype=left.dtype, device="cuda")
    candidates: dict[str, Any] = {
        "gemm": (lambda: None, lambda: torch.mm(left, weight.t(), out=whole)),
        "unfused": peers.unfused(),
        "decomposed": peers.decomposed(),
    }
    ranks = []
    if found.kernel is not None and found.run is not None:
        kernel = fused_kernel(problem.signature, found.kernel, ARCH)
        rows = problem.m if problem.op is Op.AG_GEMM else problem.m_local
        for name, present in (("fluxgen", False), ("present", True)):
            rank = OneRank(problem, topology, support, emulated_link(ARCH))  # epochs of its own
            rank.present(present)
            out = torch.full((rows, problem.n), float("nan"), dtype=left.dtype, device="cuda")
            candidates[name] = rank.call(kernel, found.run, left, weight, out, present)
            ranks.append((rank, out))

    def finish() -> None:
        torch.cuda.synchronize()
        for rank, _ in ranks:
            rank.finish(20.0)
        peers.rank.finish(20.0)

    watch = Stopwatch(finish, IN_FLIGHT)
    watch.warm(candidates["gemm"][1])
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, more in watch.round(candidates).items():
            times[name] += more
    want = matmul(left, weight)
    if problem.op is Op.AG_GEMM:
        for out in (peers.out, *(out for _, out in ranks)):
            assert torch.equal(out, want), "a wrong result was timed"
    figures = {name: quartiles(found) for name, found in times.items()}
    if "fluxgen" not in figures:
        figures["fluxgen"] = figures["unfused"]
    gemm, unfused = figures["gemm"]["median"], figures["unfused"]["median"]
    for figure in figures.values():
        figure["E"] = round(1 - (figure["median"] - gemm) / (unfused - gemm), 3)
    for each in (peers.rank, *(rank for rank, _ in ranks)):
        each.link.close()  # its thread polls
    return {
        "op": problem.op.value, "m": problem.m, "n": problem.n, "k": problem.k, "tp": problem.tp,
        "record": found.text, "kernel": found.kernel.name if found.kernel else None,
        "run": found.run.to_dict() if found.run else None, "us": figures,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    names = ("gemm", "present", "unfused", "decomposed", "fluxgen")
    lines = [
        "| op | m, n, k | "
        + " | ".join(names)
        + " | unfused / fluxgen | decomposed / fluxgen | E |",
        "| --- " * (len(names) + 5) + "|",
    ]
    for row in rows:
        us = row["us"]
        times = [
            f"{us[name]['median']:.0f} ({us[name]['low']:.0f} to {us[name]['high']:.0f})"
            if name in us else "" for name in names
        ]  # fmt: skip
        ours = us["fluxgen"]["median"]
        lines.append(
            f"| {row['op']} | {row['m']}, {row['n']}, {row['k']} | "
            + " | ".join(times)
            + f" | {us['unfused']['median'] / ours:.2f} | {us['decomposed']['median'] / ours:.2f} "
            f"| {us['fluxgen']['E']:.2f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=Path, default=SHAPES, help="JSON: a list of [op, m, n, k]")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--db", type=Path, help="tuning database, beside the shipped packs")
    parser.add_argument("--rounds", type=int, default=4, help="of six timings each")
    parser.add_argument("--seconds", type=float, default=300, help="no shape is begun after these")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    import time

    import torch

    from fluxgen.machine.device import devices

    began = time.monotonic()
    torch.backends.cuda.matmul.allow_tf32 = False
    gpu = devices()[0].gpu
    topology = Topology.of(gpu, "nvlink", args.tp)
    rows = []
    for op, m, n, k in json.loads(args.shapes.read_text("utf-8")):
        if time.monotonic() - began > args.seconds:
            print(f"out of time before {op} {m} {n} {k}", file=sys.stderr)
            break
        problem = Problem(Signature.of(op), m, n, k, args.tp)
        rows.append(measure(problem, topology, args.db, args.rounds))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    print(table(rows))
    if args.out:
        command = ["python", "-m", "tests.bench.bench_side_by_side", *sys.argv[1:]]
        result = {
            "command": shlex.join(command),
            "gpu": gpu.name, "provenance": "emulated", "link_gbs": topology.bandwidth_gbs,
            "latency_us": topology.latency_us, "results": rows,
        }  # fmt: skip
        args.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
