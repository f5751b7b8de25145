"""From a configuration to a callable: the compiled library of a kernel, out of the store.

Needs neither nvcc nor a writable directory: the store is only read, and what is loaded matches the
hash that was recorded when it was built.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from fluxgen.codegen.render import (
    Rendered,
    render_kernel,
    render_support,
)
from fluxgen.compiler.nvcc import Source
from fluxgen.compiler.store import Store
from fluxgen.core.config import KernelConfig
from fluxgen.core.errors import StoreError
from fluxgen.core.problem import Signature
from fluxgen.native import abi
from fluxgen.native.loader import FusedKernel, SupportKernels


def source_of(rendered: Rendered) -> Source:
    """What the store is asked for: the text, the headers it includes and the ABI it speaks."""
    version = f"{abi.ABI_VERSION}" if rendered.gemm else f"{abi.ABI_VERSION}.{abi.CALLS_VERSION}"
    return Source.of(rendered.name, rendered.text, rendered.arch, abi=version)


def _key(rendered: Rendered, store: Store) -> str:
    artifact = store.find(source_of(rendered))
    if artifact is None:
        raise StoreError(
            f"{rendered.name} is not compiled in this store; run `fluxgen build` (with --model for "
            "the kernels of a model)"
        )
    return artifact.key


def artefact_path(rendered: Rendered, store: Store) -> Path:
    """The library of ``rendered`` in ``store``, checked against its recorded hash.

    Raises:
        StoreError: not built, damaged, or writable by others.
    """
    return store.load_path(_key(rendered, store))


def artefact_key(
    signature: Signature, kernel: KernelConfig, arch: str, root: Path | None = None
) -> str:
    """The content key of the compiled kernel; everything in it and the support library load.

    Raises:
        StoreError, KernelError: as :func:`fused_kernel`.
    """
    support_kernels(arch, root)
    fused_kernel(signature, kernel, arch, root)
    return _key(render_kernel(signature, arch, kernel), Store(root))


@lru_cache(maxsize=256)
def fused_kernel(
    signature: Signature, kernel: KernelConfig, arch: str, root: Path | None = None
) -> FusedKernel:
    """The compiled kernel, loaded once per process.

    Args:
        root: the store's directory, None for ``Settings.store``.

    Raises:
        StoreError: not built, damaged, or writable by others. KernelError: not loadable.
    """
    path = artefact_path(render_kernel(signature, arch, kernel), Store(root))
    return FusedKernel(path, signature, kernel)


@lru_cache(maxsize=8)
def support_kernels(arch: str, root: Path | None = None) -> SupportKernels:
    """The support library of ``arch``; errors as :func:`fused_kernel`."""
    return SupportKernels(artefact_path(render_support(arch), Store(root)))
