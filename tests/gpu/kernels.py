"""The compiled kernels that the GPU tests and benchmarks use, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import cache

import pytest

from fluxgen.codegen.render import kernel_name, render_kernel
from fluxgen.compiler.store import Store
from fluxgen.core.config import KernelConfig
from fluxgen.core.errors import StoreError
from fluxgen.core.problem import Signature
from fluxgen.native.loader import FusedKernel, SupportKernels
from fluxgen.runtime.session.kernels import fused_kernel, source_of, support_kernels
from tests.gpu.build_kernels import entries
from tests.gpu.conftest import KERNELS, TIER

ARCH = "sm90"


@cache
def _entries() -> dict[str, tuple[Signature, KernelConfig, str]]:
    return {
        kernel_name(e.signature, e.arch, e.kernel): (e.signature, e.kernel, e.arch)
        for e in entries(TIER)
    }


def kernel_names() -> list[str]:
    """Names of the tier's fused GEMMs, whether or not they are compiled."""
    return sorted(_entries())


def first_of(prefix: str, names: Iterable[str]) -> str:
    """The first of ``names`` with a prefix, which the core tier need not have."""
    found = next((name for name in sorted(names) if name.startswith(prefix)), None)
    if found is None and TIER == "core":
        pytest.skip(f"the core tier has no {prefix}*")
    assert found is not None, f"no kernel is named {prefix}*"
    return found


@cache
def compiled_kernels() -> list[str]:
    """Names of those that are in the tests' store, for benchmarks."""
    found = []
    for name, (signature, kernel, arch) in _entries().items():
        with contextlib.suppress(StoreError):
            if Store(KERNELS).find(source_of(render_kernel(signature, arch, kernel))):
                found.append(name)
    return sorted(found)


@cache
def load_kernel(name: str) -> FusedKernel:
    """One fused GEMM, loaded once."""
    return fused_kernel(*_entries()[name], KERNELS)


@cache
def load_support() -> SupportKernels:
    """The support kernels, loaded once."""
    return support_kernels(ARCH, KERNELS)
