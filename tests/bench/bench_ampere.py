"""The Ampere kernels with their data present, beside CUTLASS 2.x over the same tiles, in one run.

    python -m tests.bench.bench_ampere build             # needs nvcc, no GPU
    python -m tests.bench.bench_ampere run [--seconds 60] [--out FILE.json]

Both are sm80 code; a newer GPU compiles their PTX, so what is compared is one against the other on
that GPU, not an A100. All flags are up, gemm_rs stores into local inboxes. CUTLASS 2.x computes the
same product with ``device::Gemm`` (``cutlass2x.cu``). Each round times cuBLAS, every CUTLASS 2.x
kernel and every candidate once, in turn; figures are medians over rounds.

Wanted: at most 1.00 of the best CUTLASS 2.x kernel.
"""

from __future__ import annotations

import argparse
import ctypes as ct
import json
import shlex
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxgen.codegen.render import render_kernel, render_support
from fluxgen.codegen.space import why_illegal, why_illegal_kernel
from fluxgen.compiler import toolchain
from fluxgen.compiler.builder import build_all
from fluxgen.compiler.nvcc import Source
from fluxgen.compiler.store import Store
from fluxgen.core.config import KernelConfig, RunConfig, Schedule
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.kernels.transports import default_transport
from fluxgen.runtime.session.kernels import fused_kernel, source_of

TOPOLOGY = Topology.of("a100-sxm-80gb", "nvlink", 8)
SHAPES = [
    ("ag_gemm", 4096, 6144, 12288), ("gemm_rs", 4096, 12288, 6144),
    ("ag_gemm", 8192, 6144, 12288), ("gemm_rs", 8192, 12288, 6144),
    ("ag_gemm", 2048, 7168, 8192), ("gemm_rs", 2048, 8192, 3584),
]  # fmt: skip
GROUPS, PANELS = ((8,), (1, 7), (1,) * 8), (1, 2, 4, 8, 16)
TEXT = Path(__file__).with_name("cutlass2x.cu")


@dataclass(frozen=True)
class Tile:
    """One tile: of a CUTLASS 2.x kernel, and of ours with as many warps and stages."""

    m: int
    n: int
    k: int
    warp_m: int
    warp_n: int
    stages: int

    @property
    def name(self) -> str:
        warp = f"{self.warp_m}x{self.warp_n}"
        return f"cutlass2x_{self.m}x{self.n}x{self.k}_{warp}_s{self.stages}"

    @property
    def source(self) -> Source:
        defines = {"TILE_M": self.m, "TILE_N": self.n, "TILE_K": self.k, "WARP_M": self.warp_m,
                   "WARP_N": self.warp_n, "STAGES": self.stages}  # fmt: skip
        lines = [f"#define {name} {value}" for name, value in defines.items()]
        return Source.of(self.name, "\n".join([*lines, TEXT.read_text("utf-8")]), "sm80")

    @property
    def ours(self) -> KernelConfig:
        four = self.m * self.n == 4 * self.warp_m * self.warp_n
        schedule = Schedule.MULTISTAGE_4 if four else Schedule.MULTISTAGE_8
        return KernelConfig(self.m, self.n, self.k, 1, 1, schedule, self.stages)


TILES = (
    Tile(128, 256, 64, 64, 64, 3), Tile(256, 128, 64, 64, 64, 3), Tile(128, 256, 32, 64, 64, 4),
    Tile(256, 128, 32, 64, 64, 4), Tile(128, 128, 64, 64, 64, 4), Tile(128, 128, 64, 32, 64, 4),
    Tile(128, 128, 32, 64, 64, 5),
)  # fmt: skip


def sources() -> dict[str, Source]:
    """All that is compiled: legal kernels of both ops, CUTLASS 2.x's, the support library."""
    made = {tile.name: tile.source for tile in TILES}
    for op in ("ag_gemm", "gemm_rs"):
        for tile in TILES:
            signature = Signature.of(op)
            if why_illegal_kernel(signature, TOPOLOGY.gpu, tile.ours) is None:
                rendered = render_kernel(signature, "sm80", tile.ours)
                made[rendered.name] = source_of(rendered)
    support = render_support("sm80")
    return {**made, support.name: source_of(support)}


def build() -> int:
    """Compile into ``FLUXGEN_STORE``."""
    results = build_all([*sources().values()], toolchain.find(), Store())
    failed = [r for r in results if r.status == "failed"]
    for result in failed:
        print(result.error, file=sys.stderr)
    print(f"{len(results) - len(failed)} of {len(results)} compiled")
    return 1 if failed else 0


def measure(problem: Problem) -> dict[str, Any]:
    """One shape: all in turn, a few rounds; then the best of each kind, many."""
    import torch

    from tests.bench.bench_data_present import Bench, interleave

    bench = Bench(problem)
    stream = torch.cuda.current_stream().cuda_stream
    calls: dict[str, Any] = {"cublas": bench.cublas}

    def plain(function: Any) -> Any:
        def call(i: int) -> None:
            a, b = bench.a[i % bench.copies], bench.b[i % bench.copies]
            addresses = (ct.c_void_p(t.data_ptr()) for t in (a, b, bench.d))
            status = function(*addresses, problem.m, problem.n, problem.k, ct.c_void_p(stream))
            assert status == 0, f"CUTLASS 2.x: status {status}"

        return call

    transport = default_transport(problem.signature, TOPOLOGY.link)
    want = bench.a[0] @ bench.b[0].t()
    for tile in TILES:
        found = Store().find(tile.source)
        if found is None:
            continue
        calls[tile.name] = plain(ct.CDLL(str(found.path)).cutlass2x)
        bench.d.fill_(float("nan"))
        calls[tile.name](0)
        torch.testing.assert_close(bench.d, want, rtol=2e-2, atol=1.0)
    for tile in TILES:
        signature = problem.signature
        if why_illegal_kernel(signature, TOPOLOGY.gpu, tile.ours) is not None:
            continue
        kernel = fused_kernel(signature, tile.ours, "sm80")
        for groups in GROUPS:
            for panel in PANELS:
                run = RunConfig(groups, panel, transport=transport)
                if why_illegal(problem, TOPOLOGY, tile.ours, run) is None:
                    name = f"fluxgen {tile.ours.name} {groups} p{panel}"
                    calls[name] = lambda i, k=kernel, r=run: bench.fused(k, r, i)
    names = list(calls)
    interleave(list(calls.values()), 1)
    coarse = interleave(list(calls.values()), 3)
    medians = {n: statistics.median(row[i] for row in coarse) for i, n in enumerate(names)}
    best = {
        kind: min((n for n in names if n.startswith(kind)), key=medians.__getitem__)
        for kind in ("cublas", "cutlass2x", "fluxgen")
    }
    fine = interleave([calls[name] for name in best.values()], 24)
    times = {kind: [row[i] for row in fine] for i, kind in enumerate(best)}
    pairs = zip(times["fluxgen"], times["cutlass2x"], strict=True)
    ratio = [ours / theirs for ours, theirs in pairs]
    low, middle, high = statistics.quantiles(ratio, n=4)
    return {
        **problem.to_dict(),
        "best": best,
        "ms": {kind: statistics.median(t) for kind, t in times.items()},
        "tflops": {kind: problem.flops / statistics.median(t) / 1e9 for kind, t in times.items()},
        "ratio": middle,
        "quartiles": [low, high],
        "all_ms": medians,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("build", "run"))
    parser.add_argument("--seconds", type=float, default=60.0, help="no shape begins after these")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "build":
        return build()
    import torch

    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    for op, m, n, k in SHAPES:
        if time.monotonic() - begin > args.seconds:
            print("time is up; not run:", op, m, n, k)
            break
        row = measure(Problem(Signature.of(op), m, n, k, TOPOLOGY.world))
        rows.append(row)
        print(op, m, n, k, {kind: round(t, 4) for kind, t in row["ms"].items()},
              round(row["ratio"], 3), [round(q, 3) for q in row["quartiles"]], row["best"],
              flush=True)  # fmt: skip
        torch.cuda.empty_cache()
    if args.out:
        document = {"command": "python -m tests.bench.bench_ampere " + shlex.join(sys.argv[1:]),
                    "provenance": "emulated: one GPU, data present, sm80 code by its PTX",
                    "gpu": torch.cuda.get_device_name(), "rows": rows}  # fmt: skip
        args.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
