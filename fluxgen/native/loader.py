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

from fluxgen.core.config import KernelConfig
from fluxgen.core.errors import KernelError
from fluxgen.core.problem import Signature
from fluxgen.kernels.registry import with_schedule
from fluxgen.native import abi

_MESSAGE_BYTES = 512
_local = threading.local()


class ErrorText:
    """Room for a library's error text. ``address`` is of its first byte, ``size`` in bytes."""

    size = _MESSAGE_BYTES

    def __init__(self) -> None:
        self._buffer = ct.create_string_buffer(_MESSAGE_BYTES)
        self.address = ct.addressof(self._buffer)

    def error(self, status: int) -> KernelError:
        """What the library has written, as an error."""
        return KernelError(self._buffer.value.decode("utf-8", "replace"), status)


def _text() -> ErrorText:
    """This thread's."""
    found: ErrorText | None = getattr(_local, "text", None)
    if found is None:
        found = _local.text = ErrorText()
    return found


class Library:
    """A shared library whose calls return a status and write a text."""

    def __init__(self, path: Path) -> None:
        try:
            self._lib = ct.CDLL(str(path))
        except OSError as error:
            raise KernelError(
                f"{path}: cannot be loaded: {error}. Run `fluxgen build` again on this machine."
            ) from error
        self.path = path

    def _symbol(self, name: str, restype: Any = ct.c_int) -> Any:
        try:
            symbol = getattr(self._lib, name)
        except AttributeError:
            raise KernelError(
                f"{self.path}: has no symbol {name}: not a fluxgen library, or of another version; "
                "run `fluxgen build` again"
            ) from None
        symbol.restype = restype
        return symbol

    def _call(self, symbol: Any, *args: Any) -> None:
        text = _text()
        status = symbol(*args, ct.c_void_p(text.address), ct.c_int64(_MESSAGE_BYTES))
        if status:
            raise text.error(status)


class FusedKernel(Library):
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
        expected = {
            **abi.described(signature),
            "tile_m": kernel.tile_m,
            "tile_n": kernel.tile_n,
            "tile_k": kernel.tile_k,
            "cluster_m": kernel.cluster_m,
            "cluster_n": kernel.cluster_n,
            **with_schedule(kernel.schedule).described(kernel),
        }
        found = {name: getattr(self.info, name) for name in expected}
        if found != expected or kernel.stages not in (0, self.info.stages):
            raise KernelError(f"{path}: holds kernel {found}, expected {expected}")
        self._launch = self._symbol("fluxgen_gemm_launch")
        self._update = self._symbol("fluxgen_gemm_update")
        self._check = self._symbol("fluxgen_gemm_check")

    def check(self, args: abi.GemmArgs) -> None:
        """Raise KernelError if the kernel cannot take ``args``. Needs no GPU."""
        self._call(self._check, ct.byref(args))

    def call(self, args: abi.GemmArgs) -> abi.GemmCall:
        """This kernel with ``args``, which the caller keeps alive, for the support library."""
        launch, update = (ct.cast(f, ct.c_void_p).value for f in (self._launch, self._update))
        return abi.GemmCall(launch=launch, update=update, args=ct.addressof(args))

    def launch(self, args: abi.GemmArgs, stream: int) -> None:
        """Queue the kernel on ``stream`` (a ``cudaStream_t`` as an integer)."""
        self._call(self._launch, ct.byref(args), ct.c_void_p(stream))


class SupportKernels(Library):
    """The support library: whole calls, as graphs or not, and the kernels that are not GEMMs.

    Raises:
        KernelError: not loadable or of another ABI.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        version = self._symbol("fluxgen_abi_version")()
        if version != abi.CALLS_VERSION:
            raise KernelError(
                f"{path}: has version {version} of the calls, this package speaks "
                f"{abi.CALLS_VERSION}; run `fluxgen build` again"
            )
        self._begin = self._symbol("fluxgen_begin")
        self._copy = self._symbol("fluxgen_copy")
        self._order = self._symbol("fluxgen_order")
        self._reduce = self._symbol("fluxgen_reduce")
        self._graphs = self._symbol("fluxgen_graphs", ct.c_void_p)
        self._graphs_made = self._symbol("fluxgen_graphs_made", ct.c_int64)
        self._graphs_free = self._symbol("fluxgen_graphs_free", None)
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

    def copy(self, args: abi.CopyArgs, stream: int, sides: tuple[int, ...], event: int) -> None:
        """Queue copies behind ``stream``, on the side streams of their waits, of
        themselves and of their flags."""
        self._call(self._copy, ct.byref(args), *map(ct.c_void_p, (stream, *sides, event)))

    def order(self, before: int, after: int, event: int) -> None:
        """What comes on stream ``after`` waits for what is on stream ``before``."""
        self._call(self._order, ct.c_void_p(before), ct.c_void_p(after), ct.c_void_p(event))

    def reduce(self, args: abi.ReduceArgs, stream: int) -> None:
        """Queue the reduction that ends a gemm_rs."""
        self._call(self._reduce, ct.byref(args), ct.c_void_p(stream))

    def gather(self, call: int, stream: int, text: ErrorText) -> None:
        """Queue a whole ag_gemm; ``call`` is the address of a ``fluxgen_gather_call``.

        ``text`` is used by no other thread meanwhile.
        """
        status = self._gather(call, stream, text.address, _MESSAGE_BYTES)
        if status:
            raise text.error(status)

    def scatter(self, call: int, stream: int, text: ErrorText) -> None:
        """Queue a whole gemm_rs; ``call`` is the address of a ``fluxgen_scatter_call``."""
        status = self._scatter(call, stream, text.address, _MESSAGE_BYTES)
        if status:
            raise text.error(status)

    def graphs(self, most: int, left: ct.c_int64) -> CallGraphs:
        """Room for the graphs of one kind of call, at most so many, and ``left`` of all kinds."""
        return CallGraphs(self, most, left)


class CallGraphs:
    """The CUDA graphs of one kind of call; ``handle`` goes into the call's struct.

    The support library makes them, from the second call on, and launches them.
    """

    def __init__(self, support: SupportKernels, most: int, left: ct.c_int64) -> None:
        self.handle: int = support._graphs(ct.c_int64(most), ct.byref(left))
        self._made = support._graphs_made
        free = support._graphs_free

        def release(handle: ct.c_void_p, left: ct.c_int64) -> None:
            free(handle)
            del left  # counted up until here

        # Not when the interpreter ends: a daemon thread may still be launching them.
        weakref.finalize(self, release, ct.c_void_p(self.handle), left).atexit = False

    def __len__(self) -> int:
        return int(self._made(ct.c_void_p(self.handle)))
