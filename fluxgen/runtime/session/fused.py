"""What the fused calls of a group share on one GPU: workspace, side streams, order, memory.

The calls themselves are in ``runs``. Everything is queued on the caller's current stream and side
streams that are joined again, so a call can be captured in a CUDA graph. A call waits for
nothing; a new workspace waits for the GPU once.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes as ct
import threading
from collections.abc import Callable, Iterator

import torch

from fluxgen.core.errors import CommTimeout
from fluxgen.native.loader import CallGraphs, ErrorText
from fluxgen.native.workspace import Sizes, aligned, sizes
from fluxgen.runtime.memory.hosted import HostPart
from fluxgen.runtime.memory.mapped import Workspace
from fluxgen.runtime.memory.symmetric import SymmetricPart
from fluxgen.runtime.session import kernels
from fluxgen.runtime.session.dispatch import Winner

__all__ = ["ITEM", "Fused", "Queue"]

TRANSPORT_SMS = 2
"""SMs that the GEMM leaves to the transport's one-thread kernels: one cluster of two. A kernel that
spins on all SMs would keep them from starting, and wait for them."""

GRAPHS_OF_ALL = 1024
"""CUDA graphs kept of all calls of a group, at up to 0.3 MiB of the GPU's memory (measured)."""

SHARED_GPU_SMS = 4
"""The same where ranks share a GPU: there the copies themselves run on SMs."""

ITEM = 2
"""Bytes of an element: the kernels compute 16-bit types."""

_current_device = torch.cuda.current_device
_is_capturing = torch.cuda.is_current_stream_capturing


class Queue:
    """The order of all fused calls of this process on one GPU, whatever their group and stream.

    Two calls side by side would each leave SMs for a transport, and take those that the other left:
    then no transport can start, and both GEMMs wait for one.

    Attributes:
        lock: held while a call is queued. last: the stream of the last eager call, if any.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.last: int | None = None


_queues: collections.defaultdict[int, Queue] = collections.defaultdict(Queue)


class Fused:
    """What the fused calls of one group share on one GPU.

    Args:
        device: this rank's GPU. arch: of the kernels.

    Attributes:
        generation: of the workspace and the graphs; argument structs for another are made again.
        empty: an uninitialised tensor on the current GPU, of size, strides and type.
        text: for the library's errors, of whoever holds the queue's lock.
    """

    def __init__(self, device: torch.device, arch: str) -> None:
        self.device, self.index = device, device.index
        self.support = kernels.support_kernels(arch)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.reserved = TRANSPORT_SMS
        self.queue = _queues[device.index]
        self.workspace: Workspace | None = None
        self._kept: list[Workspace] = []
        self.generation = 0
        self.graphs_left = ct.c_int64(GRAPHS_OF_ALL)
        self._of_runs: list[CallGraphs] = []
        with torch.cuda.device(device):
            # A high priority: its kernels come before the blocks of a GEMM.
            self._side = [torch.cuda.Stream(device, priority=-1) for _ in range(3)]
            self._events = [torch.cuda.Event() for _ in range(2)]
            for event in self._events:
                event.record()  # Torch creates the CUDA event here, outside of any capture
        self.awaits, self.copies, self.flags = (side.cuda_stream for side in self._side)
        self.event, self._ordered = (e.cuda_event for e in self._events)
        self.empty, self.text = _allocator(device), ErrorText()
        self._broken: CommTimeout | None = None

    def needs_workspace(self, winner: Winner) -> bool:
        """Whether the present workspace is too small for the call, or there is none."""
        needed, scratch = _needs(winner)
        w = self.workspace
        return w is None or not w.sizes.hold(needed) or w.scratch.numel() < scratch

    def allocate(self, winner: Winner, hosted: bool) -> SymmetricPart | HostPart:
        """Memory for a workspace that serves this call and all before it. Outside of captures.

        Args:
            hosted: in the host's memory: the GPUs cannot reach each other's.
        """
        needed, scratch = _needs(winner)
        with self.alone():  # no other thread's capture: it would be broken by what waits here
            if self.workspace is not None:
                # Calls in flight on the old one end first: it is freed when it is replaced.
                torch.cuda.synchronize(self.device)
                needed |= self.workspace.sizes
                scratch = max(scratch, self.workspace.scratch.numel())
            part = HostPart if hosted else SymmetricPart
            return part(self.device, needed, scratch)

    def adopt(self, workspace: Workspace) -> None:
        """Use ``workspace`` from now on; one that a graph has captured is kept for its replays.

        Whatever refers to another is let go of here, where no capture is going on: freeing
        symmetric memory waits for the GPU, which a capture forbids.
        """
        with self.alone():
            if self.workspace is not None:
                torch.cuda.synchronize(self.device)
                if self.workspace.captured:
                    self._kept.append(self.workspace)
            self.generation += 1  # first: whoever finds the old one uses what is freed next
            self.workspace = workspace
            self._of_runs.clear()

    def graphs(self, most: int) -> int:
        """A handle of room for the graphs of one kind of call on the present workspace.

        When all are taken, all are let go of: models meet new sizes, and forget old ones.
        """
        if self.graphs_left.value <= 0 and not _is_capturing():
            self.generation += 1
            self._of_runs.clear()
        graphs = self.support.graphs(most, self.graphs_left)
        self._of_runs.append(graphs)
        return graphs.handle

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """This GPU is the current one, and no other thread queues calls on it."""
        if _current_device() == self.index:
            with self.queue.lock:
                yield
        else:
            with torch.cuda.device(self.index), self.queue.lock:
                yield

    def check(self) -> None:
        """Raise what a device-side wait of this group reported.

        Raises:
            CommTimeout: also at every later call: the workspace holds no promise any more.
        """
        if self._broken is not None:
            raise self._broken
        for workspace in (self.workspace, *self._kept):
            if workspace is not None and workspace.timed_out:
                self._broken = workspace.timeout()
                raise self._broken

    def enter(self, workspace: Workspace) -> tuple[int, bool]:
        """The stream of a call, ordered behind this GPU's last call; whether it is capturing."""
        if workspace.report.code or self._kept or self._broken is not None:
            self.check()
        stream: int = torch._C._cuda_getCurrentRawStream(self.index)
        if _is_capturing():
            # Its calls are ordered by its stream, its replays by the one they are queued on.
            workspace.captured = True
            return stream, True
        queue = self.queue
        if stream != queue.last:
            if queue.last is not None:
                self.support.order(queue.last, stream, self._ordered)
            queue.last = stream
        return stream, False


def _allocator(
    device: torch.device,
) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """What Inductor's code allocates with, at half of the cost of ``torch.empty``; else that."""
    found = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if found is not None:
        return found  # type: ignore[no-any-return]
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def _needs(winner: Winner) -> tuple[Sizes, int]:
    """Sizes of the workspace and bytes of scratch that a call needs; the least that there is."""
    first, transport = winner.problems[0], winner.run.transport
    least = Sizes(stage=aligned(1), half=aligned(1))
    scratched = first.op.gathers and not transport.pushes
    needed = least | sizes(first, transport)
    return needed, first.m * first.k * ITEM if scratched else 0
