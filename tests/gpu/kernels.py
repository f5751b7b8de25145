"""The compiled kernels that the GPU tests and benchmarks use, by name."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from fluxgen.core.config import KernelConfig, Schedule
from fluxgen.core.problem import Signature
from fluxgen.runtime.loader import FusedKernel, SupportKernels
from tests.gpu.conftest import KERNELS

_NAME = re.compile(
    r"(ag_gemm|gemm_rs)_(bf16|fp16)(_kn)?_sm90_(\d+)x(\d+)x(\d+)_(\d)x(\d)_(pingpong|cooperative)_"
    r"(auto|s\d+)$"
)


def parse_kernel(name: str) -> tuple[Signature, KernelConfig]:
    """The signature and configuration that a kernel's name spells."""
    match = _NAME.match(name)
    assert match, name
    op, dtype, layout, tm, tn, tk, cm, cn, schedule, stages = match.groups()
    kernel = KernelConfig(
        int(tm),
        int(tn),
        int(tk),
        int(cm),
        int(cn),
        Schedule(schedule),
        0 if stages == "auto" else int(stages[1:]),
    )
    return replace(Signature.of(op, dtype), b_layout="kn" if layout else "nk"), kernel


def compiled_kernels() -> list[str]:
    """Names of the fused GEMMs in the kernels' folder."""
    if not KERNELS.is_dir():
        return []
    return sorted(p.stem for p in KERNELS.glob("*.so") if _NAME.match(p.stem))


@cache
def load_kernel(name: str) -> FusedKernel:
    """One fused GEMM, loaded once."""
    return FusedKernel(KERNELS / f"{name}.so", *parse_kernel(name))


@cache
def load_support() -> SupportKernels:
    """The support kernels, loaded once."""
    return SupportKernels(KERNELS / "support_sm90.so")
