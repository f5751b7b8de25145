"""Load compiled libraries with ctypes: a fused GEMM, or the support kernels.

No Torch here: pointers are integers, streams are integers. Every non-zero status becomes a
:class:`~fluxgen.core.errors.KernelError` with the library's own text.
"""

from __future__ import annotations

import ctypes as ct
import threading
import weakref
from pathlib import Path
from typing import Any

from fluxgen.core.config import KernelConfig, Schedule
from fluxgen.core.errors import KernelError
from fluxgen.core.problem import Signature
from fluxgen.runtime import abi

_MESSAGE_BYTES = 512
_MESSAGE_SIZE = ct.c_int64(_MESSAGE_BYTES)
_local = threading.local()


def _message() -> Any:
    """This thread's buffer for a library's error text."""
    buffer = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = ct.create_string_buffer(_MESSAGE_BYTES)
    return buffer


class _Library:
    def __init__(self, path: Path) -> None:
        try:
            self._lib = ct.CDLL(str(path))
        except OSError as error:
            raise KernelError(
                f"{path}: cannot be loaded: {error}. Run `fluxgen build` again on this machine."
            ) from error
        self.path = path

    def _symbol(self, name: str) -> Any:
        try:
            symbol = getattr(self._lib, name)
        except AttributeError:
            raise KernelError(
                f"{self.path}: has no symbol {name}: not a fluxgen library, or of another version; "
                "run `fluxgen build` again"
            ) from None
        symbol.restype = ct.c_int
        return symbol

    def _call(self, symbol: Any, *args: Any) -> None:
        message = _message()
        status = symbol(*args, message, _MESSAGE_SIZE)
        if status:
            raise KernelError(message.value.decode("utf-8", "replace"), status)


class FusedKernel(_Library):
    """One compiled fused GEMM.

    Args:
        path: the shared library. signature, kernel: what it must hold.

    Raises:
        KernelError: not loadable, of another ABI, or holding another kernel than asked for.
    """

    def __init__(self, path: Path, signature: Signature, kernel: KernelConfig) -> None:
        super().__init__(path)
        self.signature, self.kernel = signature, kernel
        describe = self._symbol("fluxgen_kernel_describe")
        self.info = abi.KernelInfo()
        status = describe(ct.byref(self.info))
        if status or self.info.abi_version != abi.ABI_VERSION:
            raise KernelError(
                f"{path}: has ABI version {self.info.abi_version}, this package speaks "
                f"{abi.ABI_VERSION}; run `fluxgen build` again",
                status,
            )
        found = (
            self.info.op,
            self.info.dtype,
            self.info.b_transposed,
            self.info.tile_m,
            self.info.tile_n,
            self.info.tile_k,
            self.info.cluster_m,
            self.info.cluster_n,
            bool(self.info.cooperative),
        )
        expected = (
            abi.OPS[signature.op.value],
            abi.DTYPES[signature.dtype.value],
            abi.B_LAYOUTS[signature.b_layout],
            kernel.tile_m,
            kernel.tile_n,
            kernel.tile_k,
            kernel.cluster_m,
            kernel.cluster_n,
            kernel.schedule is Schedule.COOPERATIVE,
        )
        if found != expected or kernel.stages not in (0, self.info.stages):
            raise KernelError(f"{path}: holds kernel {found}, expected {expected}")
        self._launch = self._symbol("fluxgen_gemm_launch")
        self._check = self._symbol("fluxgen_gemm_check")

    def check(self, args: abi.GemmArgs) -> None:
        """Raise KernelError if the kernel cannot take ``args``. Needs no GPU."""
        self._call(self._check, ct.byref(args))

    @property
    def launcher(self) -> int:
        """Address of the launch function, for ``fluxgen_gemm_call``."""
        address = ct.cast(self._launch, ct.c_void_p).value
        assert address is not None
        return address

    def launch(self, args: abi.GemmArgs, stream: int) -> None:
        """Queue the kernel on ``stream`` (a ``cudaStream_t`` as an integer)."""
        self._call(self._launch, ct.byref(args), ct.c_void_p(stream))


class SupportKernels(_Library):
    """The support library: begin and pull (ag_gemm), reduce (gemm_rs), order of streams.

    Raises:
        KernelError: not loadable or of another ABI.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        version = self._symbol("fluxgen_abi_version")()
        if version != abi.ABI_VERSION:
            raise KernelError(
                f"{path}: has ABI version {version}, this package speaks {abi.ABI_VERSION}; "
                "run `fluxgen build` again"
            )
        self._begin = self._symbol("fluxgen_begin")
        self._pull = self._symbol("fluxgen_pull")
        self._order = self._symbol("fluxgen_order")
        self._reduce = self._symbol("fluxgen_reduce")
        self._pull_graph = self._symbol("fluxgen_pull_graph")
        self._graph_free = self._symbol("fluxgen_graph_free")
        self._gather = self._whole_call("fluxgen_gather")
        self._scatter = self._whole_call("fluxgen_scatter")

    def _whole_call(self, name: str) -> Any:
        """With types declared, integers are passed as addresses at a third of the cost."""
        symbol = self._symbol(name)
        symbol.argtypes = [ct.c_void_p, ct.c_void_p, ct.c_void_p, ct.c_int64]
        return symbol

    def begin(self, args: abi.BeginArgs, stream: int) -> None:
        """Queue the start of an ag_gemm; with ``args.pull``, its whole transport."""
        self._call(self._begin, ct.byref(args), ct.c_void_p(stream))

    def pull(self, args: abi.PullArgs, stream: int, copy: int, forked: int) -> None:
        """Queue the copies of an ag_gemm on stream ``copy``, behind what is on ``stream``."""
        self._call(
            self._pull, ct.byref(args), ct.c_void_p(stream), ct.c_void_p(copy), ct.c_void_p(forked)
        )

    def order(self, before: int, after: int, event: int) -> None:
        """What comes on stream ``after`` waits for what is on stream ``before``."""
        self._call(self._order, ct.c_void_p(before), ct.c_void_p(after), ct.c_void_p(event))

    def reduce(self, args: abi.ReduceArgs, stream: int) -> None:
        """Queue the reduction that ends a gemm_rs."""
        self._call(self._reduce, ct.byref(args), ct.c_void_p(stream))

    def pull_graph(self, args: abi.PullArgs, copy: int) -> PullGraph:
        """The copies of ``args``, into the matrix where it lies now, as one graph."""
        handle = ct.c_void_p()
        self._call(self._pull_graph, ct.byref(args), ct.c_void_p(copy), ct.byref(handle))
        return PullGraph(self, handle.value or 0)

    def gather(self, call: int, stream: int) -> None:
        """Queue a whole ag_gemm; ``call`` is the address of a ``fluxgen_gather_call``."""
        self._call(self._gather, call, stream)

    def scatter(self, call: int, stream: int) -> None:
        """Queue a whole gemm_rs; ``call`` is the address of a ``fluxgen_scatter_call``."""
        self._call(self._scatter, call, stream)


class PullGraph:
    """A CUDA graph of an ag_gemm's copies; ``handle`` is its ``cudaGraphExec_t``."""

    def __init__(self, support: SupportKernels, handle: int) -> None:
        self.handle = handle
        weakref.finalize(self, support._graph_free, ct.c_void_p(handle))
