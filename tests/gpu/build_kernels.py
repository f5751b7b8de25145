"""Compile what the GPU tests and benchmarks load, into a store of its own, ``build_out/gpu``.

    python -m tests.gpu.build_kernels [--tier core|full] [--limit N]

``core``: at most 24 kernels, of each schedule, architecture, op and weight layout. ``full``: those,
every kernel of ``generated/`` and more corners of the space (tiles of 96, 144 and 224 columns,
clusters of four, explicit stages). Needs nvcc, no GPU; what is in the store is not compiled again.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from fluxgen.codegen.render import render_emulated_link
from fluxgen.compiler import toolchain
from fluxgen.compiler.builder import build_all
from fluxgen.compiler.generated import Entry, read_manifest, render_all
from fluxgen.compiler.store import Store
from fluxgen.core.config import KernelConfig, Schedule
from fluxgen.core.problem import Signature
from fluxgen.core.settings import data_dir
from fluxgen.runtime.session.kernels import source_of
from tests.gpu.conftest import KERNELS, TIERS

PP, CO, FLAT = Schedule.PINGPONG, Schedule.COOPERATIVE, Schedule.FLAT
M4, M8 = Schedule.MULTISTAGE_4, Schedule.MULTISTAGE_8
KN_AG = replace(Signature.of("ag_gemm"), b_layout="kn")
KN_RS = replace(Signature.of("gemm_rs"), b_layout="kn")
FLAT_TILES = (
    (16, 64, 128), (16, 192, 128), (32, 128, 128), (64, 64, 128), (64, 128, 128), (64, 256, 64),
    (128, 128, 128), (128, 192, 64),
)  # fmt: skip
AMPERE_FLAT_TILES = (
    (16, 16, 64, 4), (16, 16, 64, 6), (16, 32, 64, 3), (16, 64, 32, 4), (32, 32, 32, 4),
    (32, 64, 32, 3), (64, 32, 32, 3),
)  # fmt: skip
AG, RS = Signature.of("ag_gemm"), Signature.of("gemm_rs")
HALF_AG, HALF_RS = Signature.of("ag_gemm", "fp16"), Signature.of("gemm_rs", "fp16")
CORE = (
    Entry("sm90", AG, KernelConfig(64, 96, 64, 2, 1, PP)),
    Entry("sm90", RS, KernelConfig(64, 96, 64, 2, 1, PP)),
    Entry("sm90", AG, KernelConfig(128, 192, 64, 2, 1, PP)),
    Entry("sm90", RS, KernelConfig(128, 192, 64, 2, 1, PP)),
    Entry("sm90", KN_AG, KernelConfig(128, 128, 64, 1, 1, PP)),
    Entry("sm90", KN_RS, KernelConfig(128, 128, 64, 1, 1, PP)),
    Entry("sm90", HALF_AG, KernelConfig(128, 224, 64, 2, 2, CO)),
    Entry("sm90", HALF_RS, KernelConfig(64, 160, 64, 2, 2, PP)),
    Entry("sm90", HALF_RS, KernelConfig(256, 128, 64, 1, 1, CO, 4)),
    Entry("sm90", AG, KernelConfig(16, 64, 128, 1, 1, FLAT)),
    Entry("sm90", RS, KernelConfig(16, 64, 128, 1, 1, FLAT)),
    Entry("sm90", KN_AG, KernelConfig(32, 128, 64, 1, 1, FLAT)),
    Entry("sm90", KN_RS, KernelConfig(16, 64, 64, 1, 1, FLAT)),
    Entry("sm90", HALF_AG, KernelConfig(128, 64, 64, 1, 1, FLAT, 3)),
    Entry("sm90", HALF_RS, KernelConfig(64, 128, 64, 1, 1, FLAT)),
    # Ampere's, which any newer GPU compiles from their PTX.
    Entry("sm80", AG, KernelConfig(128, 256, 64, 1, 1, M8, 3)),
    Entry("sm80", RS, KernelConfig(128, 256, 32, 1, 1, M8, 4)),
    Entry("sm80", RS, KernelConfig(64, 64, 64, 1, 1, M4, 5)),
    Entry("sm80", KN_AG, KernelConfig(128, 128, 32, 1, 1, M4, 5)),
    Entry("sm80", KN_RS, KernelConfig(256, 96, 64, 1, 1, M8, 3)),
    Entry("sm80", AG, KernelConfig(16, 16, 64, 1, 1, FLAT, 4)),
    Entry("sm80", RS, KernelConfig(16, 16, 64, 1, 1, FLAT, 4)),
    Entry("sm80", KN_AG, KernelConfig(16, 16, 64, 1, 1, FLAT, 4)),
    Entry("sm80", KN_RS, KernelConfig(32, 64, 32, 1, 1, FLAT, 3)),
)
CORNERS = (
    Entry("sm90", KN_AG, KernelConfig(128, 192, 64, 2, 1, PP)),
    Entry("sm90", KN_RS, KernelConfig(64, 256, 64, 2, 1, PP)),
    Entry("sm90", HALF_AG, KernelConfig(64, 96, 64, 1, 1, PP)),
    # Small tiles, for small problems: the search's and the tests'.
    Entry("sm90", AG, KernelConfig(64, 64, 64, 2, 2, PP)),
    Entry("sm90", AG, KernelConfig(128, 96, 64, 2, 1, PP)),
    Entry("sm90", AG, KernelConfig(128, 160, 64, 2, 2, PP)),
    Entry("sm90", AG, KernelConfig(128, 192, 64, 1, 2, PP)),
    Entry("sm90", AG, KernelConfig(256, 160, 64, 1, 1, CO)),
    Entry("sm90", RS, KernelConfig(64, 64, 64, 2, 2, PP)),
    Entry("sm90", RS, KernelConfig(64, 96, 64, 2, 2, PP)),
    Entry("sm90", RS, KernelConfig(64, 160, 64, 2, 1, PP)),
    Entry("sm90", RS, KernelConfig(128, 96, 64, 1, 2, PP)),
    # Flat ones, for few tokens.
    *(
        Entry("sm90", Signature.of(op), KernelConfig(m, n, k, 1, 1, FLAT))
        for op in ("ag_gemm", "gemm_rs")
        for m, n, k in FLAT_TILES
    ),
    # Ampere's, which any newer GPU compiles from their PTX.
    Entry("sm80", AG, KernelConfig(64, 96, 64, 1, 1, M4, 4)),
    Entry("sm80", RS, KernelConfig(64, 64, 64, 1, 1, M8, 5)),
    Entry("sm80", HALF_AG, KernelConfig(256, 128, 32, 1, 1, M8, 3)),
    Entry("sm80", HALF_RS, KernelConfig(128, 128, 64, 1, 1, M8, 4)),
    *(
        Entry("sm80", Signature.of(op), KernelConfig(m, n, k, 1, 1, FLAT, stages))
        for op in ("ag_gemm", "gemm_rs")
        for m, n, k, stages in AMPERE_FLAT_TILES
    ),
    Entry("sm80", KN_RS, KernelConfig(16, 32, 32, 1, 1, FLAT, 2)),
    Entry("sm80", HALF_AG, KernelConfig(64, 32, 32, 1, 1, FLAT, 3)),
    Entry("sm80", HALF_RS, KernelConfig(16, 64, 32, 1, 1, FLAT, 4)),
)


def entries(tier: str) -> tuple[Entry, ...]:
    """The kernels that the tests of a tier use."""
    if tier == "core":
        return CORE
    return tuple(dict.fromkeys((*CORE, *read_manifest(data_dir("generated")), *CORNERS)))


def main() -> int:
    """Compile; the exit code is 1 if any kernel failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", choices=TIERS, default="full")
    parser.add_argument("--limit", type=int, default=0)
    chosen = parser.parse_args()
    rendered = list(render_all(entries(chosen.tier)).values())
    rendered.append(render_emulated_link("sm90"))
    rendered.sort(key=lambda r: not r.name.startswith(("support", "emulated_link")))
    sources = [source_of(r) for r in rendered][: chosen.limit or None]
    results = build_all(
        sources,
        toolchain.find(),
        Store(KERNELS),
        None,
        lambda result, done, total: print(
            f"{done}/{total} {result.source.name}: {result.status} {result.error}", flush=True
        ),
    )
    return int(any(result.status == "failed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
