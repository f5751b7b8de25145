"""The fused path of the ops: a group's workspace and side stream, and the launches of a call.

Everything is queued on the caller's current stream and one side stream that is joined again, so a
call can be captured in a CUDA graph. Nothing here waits for the GPU, and nothing is allocated but
the outputs and the gathered x, by Torch's caching allocator.

    all_gather_matmul      begin -> [side stream: pull, chunk by chunk] + GEMM a weight -> join
    matmul_reduce_scatter  GEMM (stores into the owners' inboxes) -> reduce
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fluxgen.codegen.space import panel_limit
from fluxgen.core.config import Transport
from fluxgen.core.errors import CaptureError, CommTimeout
from fluxgen.core.problem import Op, Problem
from fluxgen.runtime import abi, kernels
from fluxgen.runtime.arguments import gemm_args, pull_args, row_stride
from fluxgen.runtime.dispatch import Winner, warn_once
from fluxgen.runtime.loader import FusedKernel
from fluxgen.runtime.symmetric import SymmetricWorkspace
from fluxgen.runtime.workspace import aligned, chunk_size, half_bytes, stage_bytes

__all__ = ["Fused", "layout_of"]

TRANSPORT_SMS = 2
"""SMs that the GEMM leaves to the transport's one-thread kernels: one cluster of two. A kernel that
spins on all SMs would keep them from starting, and wait for them."""

SHARED_GPU_SMS = 4
"""The same where ranks share a GPU: there the copies themselves run on SMs."""

_ALIGN = 8  # elements of 16 bits in the 16 bytes that TMA asks of strides and addresses


@dataclass
class _Gather:
    """The argument structs of one ag_gemm, addresses filled in at each call."""

    begin: abi.BeginArgs
    pull: abi.PullArgs | None
    gemms: list[tuple[FusedKernel, abi.GemmArgs]]


@dataclass
class _Reduce:
    """The argument structs of one gemm_rs."""

    kernel: FusedKernel
    gemm: abi.GemmArgs
    reduce: abi.ReduceArgs


class Fused:
    """What the fused calls of one group share on one GPU. Not locked: the group's state is.

    Args:
        device: this rank's GPU. arch: of the kernels. sharing: ranks of the group on this GPU.
    """

    def __init__(self, device: torch.device, arch: str, sharing: int = 1) -> None:
        self.device = device
        self.support = kernels.support_kernels(arch)
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._reserved = SHARED_GPU_SMS if sharing > 1 else TRANSPORT_SMS
        self._workspace: SymmetricWorkspace | None = None
        self._kept: list[SymmetricWorkspace] = []
        self._plans: dict[tuple[Winner, Any], Any] = {}
        with torch.cuda.device(device):
            # Before any GEMM's blocks, or the transport would start behind them.
            self._side = torch.cuda.Stream(device, priority=-1)
            self._events = [torch.cuda.Event() for _ in range(3)]
            for event in self._events:
                event.record()  # Torch creates the CUDA event here, outside of any capture
        self._forked, self._joined, self._ordered = (e.cuda_event for e in self._events)
        self._copy = self._side.cuda_stream
        self._last_stream: int | None = None
        self._broken: CommTimeout | None = None

    def needs_workspace(self, winner: Winner) -> bool:
        """Whether the present workspace is too small for the call, or there is none."""
        stage, half = _needs(winner)
        w = self._workspace
        return w is None or w.stage < stage or w.half < half

    def allocate(self, group: dist.ProcessGroup, winner: Winner, timeout_s: float) -> Any:
        """A workspace for this call and all before it. Collective, outside of captures."""
        stage, half = _needs(winner)
        if self._workspace is not None:
            # Calls in flight on the old one end first: it may be freed when it is replaced.
            torch.cuda.synchronize(self.device)
            stage, half = max(stage, self._workspace.stage), max(half, self._workspace.half)
        return SymmetricWorkspace(group, self.device, stage, half, timeout_s)

    def adopt(self, workspace: SymmetricWorkspace) -> None:
        """Use ``workspace`` from now on; one that a graph has captured is kept for its replays."""
        if self._workspace is not None and self._workspace.captured:
            self._kept.append(self._workspace)
        self._workspace = workspace
        self._plans.clear()

    def check(self) -> None:
        """Raise what a device-side wait of this group reported.

        Raises:
            CommTimeout: also at every later call: the workspace holds no promise any more.
        """
        if self._broken is not None:
            raise self._broken
        for workspace in (self._workspace, *self._kept):
            if workspace is not None and workspace.timed_out:
                self._broken = workspace.timeout()
                raise self._broken

    def all_gather_matmul(
        self, winner: Winner, x: torch.Tensor, weights: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Each ``gathered @ w.T``, and the gathered x.

        Args:
            winner: of the agreed decision. x: (m/tp, k). weights: of (n_i, k), in the layouts of
                the decision.

        Returns:
            y_i of (m, n_i); gathered (m, k).

        Raises:
            CommTimeout: an earlier call of this group did not complete.
        """
        plan: _Gather = self._plan(winner, x.dtype)
        x = _as_tma("x", x)
        m, k = winner.problems[0].m, winner.problems[0].k
        stream = self._enter()
        gathered = x.new_empty((m, k))
        address = gathered.data_ptr()
        begin = plan.begin
        begin.x, begin.gathered = x.data_ptr(), address
        begin.row_stride_bytes = _stride(x) * 2
        self.support.begin(begin, stream)
        if plan.pull is not None:
            plan.pull.gathered = address
            self.support.pull(plan.pull, stream, self._copy, self._forked)
        outs = []
        for (kernel, args), weight in zip(plan.gemms, weights, strict=True):
            w = _weight(weight, kernel.signature.b_layout)
            out = x.new_empty((m, args.n))
            args.a = address
            args.b, args.b_row_stride = w.data_ptr(), row_stride(w)
            args.d = out.data_ptr()
            kernel.launch(args, stream)
            outs.append(out)
        if plan.pull is not None:
            self.support.order(self._copy, stream, self._joined)
        return outs, gathered

    def matmul_reduce_scatter(
        self,
        winner: Winner,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        """``scale * (this rank's rows of the sum over ranks of x @ w.T) + bias``.

        Args:
            winner: of the agreed decision. x: (m, k). w: (n, k), in the layout of the decision.
            bias: (n,).

        Returns:
            (m/tp, n). Summed in fp32 in rank order and rounded once.

        Raises:
            CommTimeout: an earlier call of this group did not complete.
        """
        plan: _Reduce = self._plan(winner, x.dtype)
        x, w = _as_tma("x", x), _weight(w, plan.kernel.signature.b_layout)
        if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % 16):
            bias = bias.clone(memory_format=torch.contiguous_format)
        stream = self._enter()
        args, reduce = plan.gemm, plan.reduce
        out = x.new_empty((reduce.rows, reduce.n))
        args.a, args.a_row_stride = x.data_ptr(), _stride(x)
        args.b, args.b_row_stride = w.data_ptr(), row_stride(w)
        plan.kernel.launch(args, stream)
        reduce.d, reduce.scale = out.data_ptr(), scale
        reduce.bias = None if bias is None else bias.data_ptr()
        self.support.reduce(reduce, stream)
        return out

    def _enter(self) -> int:
        """The stream of this call, ordered behind the group's last call."""
        assert self._workspace is not None
        self.check()
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        if torch.cuda.is_current_stream_capturing():
            # A capture starts a graph of its own; its replays are ordered by their stream.
            self._workspace.captured = True
            self._last_stream = None
        elif stream != self._last_stream:
            if self._last_stream is not None:
                self.support.order(self._last_stream, stream, self._ordered)
            self._last_stream = stream
        return int(stream)

    def _plan(self, winner: Winner, dtype: torch.dtype) -> Any:
        plan = self._plans.get((winner, dtype))
        if plan is None:
            if self.needs_workspace(winner):
                raise CaptureError(f"{winner.problems[0].key}: no workspace for this call")
            gathers = winner.problems[0].op is Op.AG_GEMM
            plan = self._plan_gather(winner) if gathers else self._plan_reduce(winner)
            self._plans[winner, dtype] = plan
        return plan

    def _plan_gather(self, winner: Winner) -> _Gather:
        assert self._workspace is not None
        group, first = self._workspace.group, winner.problems[0]
        by_copies = winner.run.transport is Transport.COPY_ENGINE_PULL and first.tp > 1
        begin = abi.BeginArgs(group=group, rows=first.m_local, row_bytes=first.k * 2)
        begin.pull = not by_copies
        pull = pull_args(group, 0, first, winner.kernel, winner.run) if by_copies else None
        gemms = []
        for problem in winner.problems:
            kernel, args = self._gemm(winner, problem)
            if by_copies:
                args.sms = min(args.sms or self._sms, self._sms - self._reserved)
            args.a_row_stride, args.d_row_stride = problem.k, problem.n
            gemms.append((kernel, args))
        return _Gather(begin, pull, gemms)

    def _plan_reduce(self, winner: Winner) -> _Reduce:
        assert self._workspace is not None
        (problem,) = winner.problems
        kernel, gemm = self._gemm(winner, problem)
        reduce = abi.ReduceArgs(group=self._workspace.group, rows=problem.m_local, n=problem.n)
        reduce.chunk_rows = chunk_size(problem, winner.kernel, winner.run)
        reduce.d_row_stride = problem.n
        reduce.dtype = abi.DTYPES[problem.signature.dtype.value]
        return _Reduce(kernel, gemm, reduce)

    def _gemm(self, winner: Winner, problem: Problem) -> tuple[FusedKernel, abi.GemmArgs]:
        assert self._workspace is not None
        kernel = kernels.fused_kernel(problem.signature, winner.kernel, winner.arch)
        run = replace(winner.run, panel=min(winner.run.panel, panel_limit(problem, winner.kernel)))
        return kernel, gemm_args(self._workspace.group, problem, winner.kernel, run)


def _needs(winner: Winner) -> tuple[int, int]:
    """Bytes of stage and half that a call needs; the stage at least the least there is."""
    first = winner.problems[0]
    return max(aligned(1), stage_bytes(first)), max(aligned(1), half_bytes(first))


def layout_of(w: torch.Tensor) -> str:
    """``kn`` for the transpose of a row-major (k, n), else ``nk``."""
    return "kn" if w.stride(0) == 1 and w.stride(1) != 1 else "nk"


def _stride(x: torch.Tensor) -> int:
    """Elements between rows; Torch allows any stride of a dim of size one."""
    return int(x.stride(0) if x.shape[0] > 1 else x.shape[1])


def _as_tma(name: str, t: torch.Tensor) -> torch.Tensor:
    """``t``, or a copy of it if TMA cannot read its rows where they lie.

    The address and the strides are this call's and this rank's own: they must not change the path.
    """
    if (
        t.stride(1) == 1
        and ((t.stride(0) % _ALIGN == 0 and t.stride(0) >= t.shape[1]) or t.shape[0] == 1)
        and t.data_ptr() % 16 == 0
    ):
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
