"""The fused path of the ops: a group's workspace and side stream, and the launches of a call.

Everything is queued on the caller's current stream and one side stream that is joined again, so a
call can be captured in a CUDA graph. Nothing here waits for the GPU. What is allocated are the
outputs and, where it is returned or captured, the gathered x, by Torch's caching allocator.

    GatherRun    begin -> [side stream: pulls, chunk by chunk] + a GEMM for each weight -> join
    ScatterRun   GEMM (stores into the owners' inboxes) -> reduce

A run keeps its argument structs and fills in addresses, so a warm call is one call into C.
"""

from __future__ import annotations

import collections
import ctypes as ct
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from fluxgen.codegen.space import panel_limit
from fluxgen.core.config import Transport
from fluxgen.core.errors import CommTimeout
from fluxgen.core.problem import Op, Problem
from fluxgen.runtime import abi, kernels
from fluxgen.runtime.arguments import gemm_args, pull_args, row_stride
from fluxgen.runtime.dispatch import Call, Winner, warn_once
from fluxgen.runtime.loader import PullGraph
from fluxgen.runtime.symmetric import LocalPart, SymmetricWorkspace
from fluxgen.runtime.workspace import aligned, chunk_size, half_bytes, stage_bytes

__all__ = ["Fused", "GatherRun", "ScatterRun", "layout_of"]

TRANSPORT_SMS = 2
"""SMs that the GEMM leaves to the transport's one-thread kernels: one cluster of two. A kernel that
spins on all SMs would keep them from starting, and wait for them."""

SHARED_GPU_SMS = 4
"""The same where ranks share a GPU: there the copies themselves run on SMs."""

_ITEM = 2
"""Bytes of an element: the kernels compute 16-bit types."""

_ALIGN = 8
"""Elements in the 16 bytes that TMA asks of strides."""


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
    """

    def __init__(self, device: torch.device, arch: str) -> None:
        self.device = device
        self.support = kernels.support_kernels(arch)
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.reserved = TRANSPORT_SMS
        self.queue = _queues[device.index]
        self.workspace: SymmetricWorkspace | None = None
        self._kept: list[SymmetricWorkspace] = []
        with torch.cuda.device(device):
            # A high priority: its kernels come before the blocks of a GEMM.
            self._side = torch.cuda.Stream(device, priority=-1)
            self._events = [torch.cuda.Event() for _ in range(3)]
            for event in self._events:
                event.record()  # Torch creates the CUDA event here, outside of any capture
        self.copy = self._side.cuda_stream
        self.forked, self.joined, self._ordered = (e.cuda_event for e in self._events)
        self._broken: CommTimeout | None = None

    def needs_workspace(self, winner: Winner) -> bool:
        """Whether the present workspace is too small for the call, or there is none."""
        stage, half, scratch = _needs(winner)
        w = self.workspace
        return w is None or w.stage < stage or w.half < half or w.scratch.numel() < scratch

    def allocate(self, winner: Winner) -> LocalPart:
        """Memory for a workspace that serves this call and all before it. Outside of captures."""
        stage, half, scratch = _needs(winner)
        if self.workspace is not None:
            # Calls in flight on the old one end first: it may be freed when it is replaced.
            torch.cuda.synchronize(self.device)
            stage, half = max(stage, self.workspace.stage), max(half, self.workspace.half)
            scratch = max(scratch, self.workspace.scratch.numel())
        return LocalPart(self.device, stage, half, scratch)

    def adopt(self, workspace: SymmetricWorkspace) -> None:
        """Use ``workspace`` from now on; one that a graph has captured is kept for its replays."""
        if self.workspace is not None and self.workspace.captured:
            self._kept.append(self.workspace)
        self.workspace = workspace

    def run(self, call: Call, winner: Winner) -> GatherRun | ScatterRun:
        """The launches of a call that has been agreed on and prepared."""
        kind = GatherRun if call.op is Op.AG_GEMM else ScatterRun
        return kind(self, call, winner)

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

    def enter(self) -> tuple[int, bool]:
        """The stream of a call, ordered behind the group's last call; whether it is capturing."""
        workspace = self.workspace
        assert workspace is not None
        if self._broken is not None or workspace.timed_out or self._kept:
            self.check()
        stream = int(torch._C._cuda_getCurrentRawStream(self.device.index))
        if torch.cuda.is_current_stream_capturing():
            # Its calls are ordered by its stream, its replays by the one they are queued on.
            workspace.captured = True
            return stream, True
        queue = self.queue
        if stream != queue.last:
            if queue.last is not None:
                self.support.order(queue.last, stream, self._ordered)
            queue.last = stream
        return stream, False


class _Run:
    """The argument structs of one call on one workspace."""

    def __init__(self, fused: Fused, call: Call, winner: Winner) -> None:
        self.fused, self.winner, self.cut = fused, winner, call.cut
        self.plain = call.cut == 0 and len(call.sizes) == 1
        self.first = winner.problems[0]
        self._workspace: SymmetricWorkspace | None = None

    def _current(self) -> SymmetricWorkspace:
        """The group's workspace; the structs are made again if it is not theirs."""
        workspace = self.fused.workspace
        assert workspace is not None
        if workspace is not self._workspace:
            self._build(workspace.group)
            self._workspace = workspace
        return workspace

    def _build(self, group: abi.Group) -> None:
        raise NotImplementedError

    def _gemm(self, group: abi.Group, problem: Problem) -> tuple[int, abi.GemmArgs]:
        """The launcher's address and the arguments of a GEMM of this call."""
        winner = self.winner
        kernel = kernels.fused_kernel(problem.signature, winner.kernel, winner.arch)
        # One of several weights may be narrower than the record's panel.
        run = replace(winner.run, panel=min(winner.run.panel, panel_limit(problem, winner.kernel)))
        return kernel.launcher, gemm_args(group, problem, winner.kernel, run)

    def readable(self, x: torch.Tensor, w: torch.Tensor) -> tuple[int, int] | None:
        """Row strides of a plain x and a weight if TMA can read such, at any aligned address."""
        kn = self.first.signature.b_layout == "kn"
        if not self.plain or not _has_rows(x) or not _has_rows(w.t() if kn else w):
            return None
        return _stride(x), row_stride(w)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """x as the (rows, K) that the ranks cut along rows, readable by TMA."""
        if not self.plain:
            x = x.movedim(self.cut, 0).reshape(-1, x.shape[-1])
        return _as_tma("x", x)

    def _shaped(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(rows, N) with the dims that x has, contiguous."""
        if self.plain:
            return out
        other = x.movedim(self.cut, 0).shape[1:-1]
        return out.view(-1, *other, out.shape[-1]).movedim(0, self.cut).contiguous()


class GatherRun(_Run):
    """ag_gemm."""

    def _build(self, group: abi.Group) -> None:
        winner, first = self.winner, self.first
        by_copies = winner.run.transport is Transport.COPY_ENGINE_PULL and first.tp > 1
        self._begin = abi.BeginArgs(
            group=group, rows=first.m_local, row_bytes=first.k * _ITEM, pull=not by_copies
        )
        self._pull = pull_args(group, 0, first, winner.kernel, winner.run) if by_copies else None
        self._args = []
        self._gemms = (abi.GemmCall * len(winner.problems))()
        for gemm, problem in zip(self._gemms, winner.problems, strict=True):
            gemm.launch, args = self._gemm(group, problem)
            gemm.args = ct.addressof(args)
            if by_copies:
                sms = self.fused.sms
                args.sms = min(args.sms or sms, sms - self.fused.reserved)
            args.a_row_stride, args.d_row_stride = problem.k, problem.n
            self._args.append(args)
        self._call = abi.GatherCall(
            begin=ct.addressof(self._begin),
            pull=ct.addressof(self._pull) if self._pull is not None else None,
            gemms=ct.addressof(self._gemms),
            count=len(self._args),
            copy=self.fused.copy,
            forked=self.fused.forked,
            joined=self.fused.joined,
        )
        self._call_at = ct.addressof(self._call)
        self._graph: PullGraph | None = None  # into the workspace's scratch

    def __call__(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        return_gathered: bool,
    ) -> list[torch.Tensor]:
        """Each ``gathered @ w.T + bias``, then the gathered x if it is asked for.

        Args:
            x, weights: of the call that the ranks agreed on. biases: (n_i,) or None.

        Raises:
            CommTimeout: an earlier call of this group did not complete.
        """
        rows = self._rows(x)
        ready = [
            _weight(weight, problem.signature.b_layout)
            for weight, problem in zip(weights, self.winner.problems, strict=True)
        ]  # kept until the launch: some may be copies
        at = [(w.data_ptr(), row_stride(w)) for w in ready]
        outs = self.queue(rows, rows.data_ptr(), _stride(rows), at, biases, return_gathered)
        return [self._shaped(out, x) for out in outs]

    def queue(
        self,
        rows: torch.Tensor,
        x: int,
        x_stride: int,
        weights: Sequence[tuple[int, int]],
        biases: Sequence[torch.Tensor | None],
        return_gathered: bool,
    ) -> list[torch.Tensor]:
        """As a call, of operands that TMA can read: their addresses and row strides.

        Args:
            rows: any tensor of x's type and device. x, weights: of (m/tp, k) and each (n_i, k).
        """
        workspace = self._current()
        fused, call, begin = self.fused, self._call, self._begin
        stream, capturing = fused.enter()
        m = self.first.m
        gathered = None
        if return_gathered or capturing:
            gathered = rows.new_empty((m, self.first.k))
            address = gathered.data_ptr()
        else:
            address = workspace.scratch_at
        begin.x, begin.gathered, begin.row_stride_bytes = x, address, x_stride * _ITEM
        if self._pull is not None:
            self._pull.gathered = address
            if gathered is None and self._graph is None:
                self._graph = fused.support.pull_graph(self._pull, fused.copy)
            call.pull_graph = self._graph.handle if gathered is None and self._graph else None
        outs = []
        for args, (w, w_stride) in zip(self._args, weights, strict=True):
            out = rows.new_empty((m, args.n))
            args.a, args.b, args.b_row_stride, args.d = address, w, w_stride, out.data_ptr()
            outs.append(out)
        fused.support.gather(self._call_at, stream)
        for out, bias in zip(outs, biases, strict=True):
            if bias is not None:
                out.add_(bias)
        if gathered is not None and return_gathered:
            outs.append(gathered)
        return outs


class ScatterRun(_Run):
    """gemm_rs."""

    def _build(self, group: abi.Group) -> None:
        launcher, self._args = self._gemm(group, self.first)
        self._reduce = abi.ReduceArgs(group=group, rows=self.first.m_local, n=self.first.n)
        self._reduce.chunk_rows = chunk_size(self.first, self.winner.kernel, self.winner.run)
        self._reduce.d_row_stride = self.first.n
        self._reduce.dtype = abi.DTYPES[self.first.signature.dtype.value]
        self._call = abi.ScatterCall(
            gemm=abi.GemmCall(launch=launcher, args=ct.addressof(self._args)),
            reduce=ct.addressof(self._reduce),
        )
        self._call_at = ct.addressof(self._call)

    def __call__(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """``scale * (this rank's part of the sum over ranks of x @ w.T) + bias``.

        Summed in fp32 in rank order and rounded once: the same bits on every run.

        Args:
            x, w: of the call that the ranks agreed on. bias: (n,).

        Raises:
            CommTimeout: an earlier call of this group did not complete.
        """
        rows, weight = self._rows(x), _weight(w, self.first.signature.b_layout)
        out = self.queue(
            rows, rows.data_ptr(), _stride(rows), weight.data_ptr(), row_stride(weight), bias, scale
        )
        return self._shaped(out, x)

    def queue(
        self,
        rows: torch.Tensor,
        x: int,
        x_stride: int,
        w: int,
        w_stride: int,
        bias: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """As a call, of operands that TMA can read: their addresses and row strides.

        Args:
            rows: any tensor of x's type and device. x, w: of (m, k) and (n, k).
        """
        self._current()
        if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % 16):
            bias = bias.clone(memory_format=torch.contiguous_format)
        stream, _ = self.fused.enter()
        args, reduce = self._args, self._reduce
        out: torch.Tensor = rows.new_empty((reduce.rows, reduce.n))
        args.a, args.a_row_stride, args.b, args.b_row_stride = x, x_stride, w, w_stride
        reduce.d, reduce.scale = out.data_ptr(), scale
        reduce.bias = None if bias is None else bias.data_ptr()
        self.fused.support.scatter(self._call_at, stream)
        return out


def _needs(winner: Winner) -> tuple[int, int, int]:
    """Bytes of stage, half and scratch that a call needs; the least there is of the first two."""
    first = winner.problems[0]
    gathered = first.m * first.k * _ITEM if first.op is Op.AG_GEMM else 0
    return max(aligned(1), stage_bytes(first)), max(aligned(1), half_bytes(first)), gathered


def layout_of(w: torch.Tensor) -> str:
    """``kn`` for the transpose of a row-major (k, n), else ``nk``."""
    return "kn" if w.stride(0) == 1 and w.stride(1) != 1 else "nk"


def _stride(x: torch.Tensor) -> int:
    """Elements between rows; Torch allows any stride of a dim of size one."""
    return int(x.stride(0) if x.shape[0] > 1 else x.shape[1])


def _has_rows(t: torch.Tensor) -> bool:
    """Whether strides are those of contiguous rows at multiples of 16 bytes."""
    rows, columns = t.stride()
    aligned_rows = rows % _ALIGN == 0 and rows >= t.shape[1]
    return bool(columns == 1 and (aligned_rows or t.shape[0] == 1))


def _as_tma(name: str, t: torch.Tensor) -> torch.Tensor:
    """``t``, or a copy of it if TMA cannot read its rows where they lie.

    The address and the strides are this call's and this rank's own: they must not change the path.
    """
    if _has_rows(t) and t.data_ptr() % 16 == 0:
        return t
    warn_once(
        f"{name} is copied",
        f"{name}: strides {tuple(t.stride())} of shape {tuple(t.shape)} at an address of "
        f"{t.data_ptr() % 16} modulo 16: the kernels need contiguous rows, at multiples of 16 "
        "bytes. It is copied at every such call; pass it aligned to save that",
    )
    return t.clone(memory_format=torch.contiguous_format)


def _weight(w: torch.Tensor, layout: str) -> torch.Tensor:
    """A weight (n, k) as its layout's kernel reads it: rows of n, or of k."""
    return _as_tma("w", w) if layout == "nk" else _as_tma("w", w.t()).t()
