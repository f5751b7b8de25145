"""Kernels that candidates need, compiled ahead of the GPU: it measures some while others build."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from fluxgen.codegen.render import (
    Rendered,
    render_emulated_link,
    render_kernel,
    render_support,
)
from fluxgen.compiler.builder import default_jobs
from fluxgen.compiler.nvcc import CompileError
from fluxgen.compiler.store import Store
from fluxgen.compiler.toolchain import Toolchain
from fluxgen.core.config import KernelConfig
from fluxgen.core.errors import UsageError
from fluxgen.core.problem import Signature
from fluxgen.runtime.session.kernels import source_of

__all__ = ["CompiledKernels"]

Wanted = tuple[Signature, KernelConfig]


class CompiledKernels:
    """The kernels of one architecture in a store.

    Args:
        arch: ``sm90``. store: where they are and are put. tools: None: only what is there is used.
        jobs: nvcc at once, None: as the memory allows.

    Raises:
        UsageError: the libraries that every measurement needs are neither there nor can be built.
    """

    def __init__(
        self, arch: str, store: Store, tools: Toolchain | None, jobs: int | None = None
    ) -> None:
        self._arch, self._store, self._tools = arch, store, tools
        self._cancel = threading.Event()
        self._pool = ThreadPoolExecutor(jobs or default_jobs(), "nvcc")
        self._building: dict[Wanted, Future[str | None]] = {}
        for rendered in (render_support(arch), render_emulated_link(arch)):
            reason = self._get(rendered)
            if reason:
                self.close()
                raise UsageError(f"{rendered.name}: {reason}")

    def __enter__(self) -> CompiledKernels:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop what is being compiled; nothing half-written stays."""
        self._cancel.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def unusable(self, signature: Signature, kernel: KernelConfig) -> str | None:
        """Why this kernel cannot be had on this machine, or None."""
        if self._tools is not None:
            return None
        return self._get(render_kernel(signature, self._arch, kernel))

    def expect(self, wanted: Iterable[Wanted]) -> None:
        """Start to compile what will be needed, in this order."""
        for signature, kernel in wanted:
            if (signature, kernel) not in self._building:
                rendered = render_kernel(signature, self._arch, kernel)
                future = self._pool.submit(self._get, rendered)
                self._building[signature, kernel] = future

    def wait(self, signature: Signature, kernel: KernelConfig) -> str | None:
        """Wait until this kernel is compiled; the reason if it does not compile.

        Raises:
            StoreError: the store cannot be used.
        """
        self.expect([(signature, kernel)])
        return self._building[signature, kernel].result()

    def _get(self, rendered: Rendered) -> str | None:
        source = source_of(rendered)
        if self._tools is None:
            found = self._store.find(source)
            return None if found else "not compiled, and nothing may be built here"
        try:
            self._store.build(source, self._tools, cancel=self._cancel)
        except CompileError as error:
            return f"does not compile: {str(error).splitlines()[0]}"
        return None
