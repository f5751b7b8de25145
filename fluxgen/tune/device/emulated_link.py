"""A link that is not there: flags raised on schedule by a host thread, without taking an SM.

For measurements on one GPU. How, and what it leaves out: ``emulated_link.cuh``. No Torch here.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fluxgen.codegen.render import render_emulated_link
from fluxgen.compiler.store import Store
from fluxgen.core.errors import KernelError
from fluxgen.native import abi
from fluxgen.native.loader import ErrorText, Library
from fluxgen.runtime.session.kernels import artefact_path

__all__ = ["Departure", "EmulatedLink", "LinkFigures"]


class _Arrival(ct.Structure):
    _fields_ = [("flag", ct.c_void_p), ("due_us", ct.c_double)]


class _Departure(ct.Structure):
    _fields_ = [
        ("watched", ct.c_void_p),
        ("answered", ct.c_void_p),
        ("busy_us", ct.c_double),
        ("tail_us", ct.c_double),
    ]


class _Figures(ct.Structure):
    _fields_ = [
        ("lag_us", ct.c_double),
        ("latest_us", ct.c_double),
        ("raised", ct.c_int64),
        ("late", ct.c_int64),
    ]


@dataclass(frozen=True)
class Departure:
    """One chunk that a gemm_rs sends, and the one that it gets in turn.

    Attributes:
        watched, answered: addresses of the flag that the GEMM raises on a peer, and of that which
            is raised for it.
        busy_us: the link's time for it. tail_us: for what its last wave of tiles leaves.
    """

    watched: int
    answered: int
    busy_us: float
    tail_us: float


@dataclass(frozen=True)
class LinkFigures:
    """How well the schedule was kept, since the last look.

    Attributes:
        lag_us: from a write of the host to its view of the effect (taken off of each due time).
        latest_us: of the latest flag. raised: flags. late: those issued over 1 us late.
    """

    lag_us: float
    latest_us: float
    raised: int
    late: int


class EmulatedLink(Library):
    """A host thread that raises flags on the current device; ``close`` ends it.

    Raises:
        KernelError: not loadable, of another ABI, or the driver cannot write flags in stream order.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._handle = ct.c_void_p()
        if self._symbol("fluxgen_abi_version")() != abi.ABI_VERSION:
            raise KernelError(f"{path}: of another ABI version; run `fluxgen build` again")
        text = ErrorText()
        opened = self._symbol("fluxgen_link_open", ct.c_void_p)(
            ct.c_void_p(text.address), ct.c_int64(text.size)
        )
        if not opened:
            raise text.error(3)
        self._handle = ct.c_void_p(opened)
        self._mark = self._symbol("fluxgen_link_mark")
        self._gate = self._symbol("fluxgen_link_gate")
        self._gather = self._symbol("fluxgen_link_gather")
        self._scatter = self._symbol("fluxgen_link_scatter")
        self._drain = self._symbol("fluxgen_link_drain")
        self.peer: int = self._symbol("fluxgen_link_peer", ct.c_void_p)(self._handle)

    def reset(self) -> None:
        """Forget the epochs so far: for a rank that begins with its first. Nothing is queued."""
        self._symbol("fluxgen_link_reset", None)(self._handle)

    def close(self) -> None:
        """End the thread; what was queued is forgotten."""
        if self._handle:
            self._symbol("fluxgen_link_close", None)(self._handle)
            self._handle = ct.c_void_p()

    def mark(self, stream: int, epoch: int) -> None:
        """Start the schedule of ``epoch`` in stream order: for a call whose kernels do not."""
        self._call(self._mark, self._handle, ct.c_void_p(stream), ct.c_uint32(epoch))

    def gate(self, stream: int, word: int, epoch: int) -> None:
        """What comes on ``stream`` waits until the word at this address reaches ``epoch``."""
        self._call(
            self._gate, self._handle, ct.c_void_p(stream), ct.c_void_p(word), ct.c_uint32(epoch)
        )

    def gather(self, epoch: int, latency_us: float, arrivals: Sequence[tuple[int, float]]) -> None:
        """Schedule the flags at these addresses, so many microseconds after the start."""
        array = (_Arrival * len(arrivals))(*(_Arrival(flag, due) for flag, due in arrivals))
        self._call(
            self._gather, self._handle, ct.c_uint32(epoch), ct.c_double(latency_us), array,
            ct.c_int64(len(arrivals)),
        )  # fmt: skip

    def scatter(self, epoch: int, latency_us: float, departures: Sequence[Departure]) -> None:
        """Watch the flags that a GEMM of this epoch will raise, in this order, and answer each.

        To be called before the GEMM is queued, or the GPU may wait for a host that is behind.
        """
        array = (_Departure * len(departures))(
            *(_Departure(d.watched, d.answered, d.busy_us, d.tail_us) for d in departures)
        )
        self._call(
            self._scatter, self._handle, ct.c_uint32(epoch), ct.c_double(latency_us), array,
            ct.c_int64(len(departures)),
        )  # fmt: skip

    def drain(self, seconds: float) -> LinkFigures:
        """Wait until all that was scheduled has happened.

        Raises:
            KernelError: it has not, after so many seconds; the schedule is forgotten.
        """
        figures = _Figures()
        if self._drain(self._handle, ct.c_double(seconds), ct.byref(figures)):
            self._symbol("fluxgen_link_cancel", None)(self._handle)
            raise KernelError(f"emulated link: a call did not end within {seconds:g} s")
        return LinkFigures(figures.lag_us, figures.latest_us, figures.raised, figures.late)


def emulated_link(arch: str, root: Path | None = None) -> EmulatedLink:
    """A new emulated link on the current device.

    Args:
        root: the store's directory, None for ``Settings.store``.

    Raises:
        StoreError: not built, damaged, or writable by others. KernelError: not loadable.
    """
    return EmulatedLink(artefact_path(render_emulated_link(arch), Store(root)))
