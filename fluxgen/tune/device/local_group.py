"""W ranks in one process on one GPU: real workspaces, real peer pointers, real flags.

Each rank is a stream with its share of the SMs. All ranks of a call must be resident at once, or
they deadlock, so the shares sum to less than the GPU: the copies between ranks of one GPU run on
SMs too, behind kernels that spin. Used by the correctness tests and the emulated evaluator.

Set ``CUDA_DEVICE_MAX_CONNECTIONS=32`` before CUDA starts: with fewer hardware queues than streams,
independent streams wait for each other. A rank's waits, copies and flags have a stream each, as in
a real group, but from eight ranks on one for all three, which is in order too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fluxgen.core.config import KernelConfig, RunConfig, Transport
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem
from fluxgen.kernels.flat import MAX_PACKET_TOKENS
from fluxgen.native import abi
from fluxgen.native.arguments import copy_args, gemm_args, reduce_args, row_stride
from fluxgen.native.loader import FusedKernel, SupportKernels
from fluxgen.native.workspace import Sizes, group_view, sizes
from fluxgen.runtime.memory.mapped import zeroed

HARDWARE_QUEUES = 32
"""Streams that never wait for each other, with ``CUDA_DEVICE_MAX_CONNECTIONS=32``."""

FREE_SMS = 4
"""SMs left to the copies and to the transports' waits."""


class LocalGroup:
    """``world`` ranks of one group on the current device.

    Args:
        world: ranks. support: support kernels. sizes: of each workspace. timeout_s: deadline of
            device-side waits. in_host: the workspaces are pinned host memory.
    """

    def __init__(
        self,
        world: int,
        support: SupportKernels,
        sizes: Sizes,
        timeout_s: float = 10.0,
        in_host: bool = False,
    ) -> None:
        self.world, self.sizes, self.support = world, sizes, support
        device = torch.device("cuda", torch.cuda.current_device())
        self.total_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.share = max(1, (self.total_sms - FREE_SMS) // world)
        self.workspaces = [zeroed(sizes.total, device, in_host) for _ in range(world)]
        self.reports = [torch.zeros(8, dtype=torch.int32, pin_memory=True) for _ in range(world)]
        self.streams = [torch.cuda.Stream(device) for _ in range(world)]
        self.awaits = [torch.cuda.Stream(device) for _ in range(world)]
        self.copies = self.flags = self.awaits
        if 4 * world < HARDWARE_QUEUES:  # and the default stream's
            self.copies = [torch.cuda.Stream(device) for _ in range(world)]
            self.flags = [torch.cuda.Stream(device) for _ in range(world)]
        self.events = [torch.cuda.Event() for _ in range(world)]
        for event in self.events:
            event.record()  # Torch creates the CUDA event here
        addresses = [workspace.data_ptr() for workspace in self.workspaces]
        self.groups = [
            group_view(rank, addresses, sizes, timeout_s, self.reports[rank].data_ptr())
            for rank in range(world)
        ]
        # No stream may write a flag before every workspace is zero.
        torch.cuda.synchronize(device)

    @classmethod
    def for_problems(
        cls,
        support: SupportKernels,
        *problems: Problem,
        timeout_s: float = 10.0,
        in_host: bool = False,
    ) -> LocalGroup:
        """A group large enough for each of ``problems``, which have one tp."""
        needed = Sizes()
        for problem in problems:
            few = problem.m <= MAX_PACKET_TOKENS
            needed |= sizes(problem, *(t for t in Transport if few or not t.packed))
            for op in Op:  # and for the others that its kernel serves, in slabs of the same size
                if op.compiled is problem.op.compiled:
                    served = replace(problem.signature, op=op)
                    slabs = [t for t in Transport if not (t.in_one_shot or t.packed)]
                    needed |= sizes(replace(problem, signature=served), *slabs)
        return cls(problems[0].tp, support, needed, timeout_s, in_host)

    def _gemm_args(
        self, rank: int, problem: Problem, kernel: KernelConfig, run: RunConfig
    ) -> abi.GemmArgs:
        args = gemm_args(self.groups[rank], problem, kernel, run)
        args.sms = min(run.sms or self.share, self.share)
        return args

    def ag_gemm(
        self,
        kernel: FusedKernel,
        problem: Problem,
        run: RunConfig,
        x: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        d: Sequence[torch.Tensor],
        delay: Callable[[int], None] | None = None,
    ) -> None:
        """Queue one ag_gemm on every rank: x[r] (m/tp, k), b[r] (n, k), or the
        transpose of a (k, n), -> d[r] (m, n). Of an a2a_gemm x[r] is (m, k).

        ``delay(rank)`` may queue work on the current stream before that rank starts.
        """
        dtype = getattr(torch, problem.signature.dtype.torch_name)
        row_bytes = problem.k * dtype.itemsize
        exchanges = problem.op.exchanges
        # Addresses of the own slabs, and from one peer's part of x to the next one's.
        own: list[int] = []
        step: list[int] = []
        for rank, each in enumerate(x):
            step.append(problem.m_local * each.stride(0) * dtype.itemsize if exchanges else 0)
            own.append(each.data_ptr() + rank * step[rank])
        copies, pushes = run.transport.copies, run.transport.pushes
        gathered = []
        # All ranks begin before any waits: whatever the host has to load or allocate for a launch
        # may have to wait for the GPU, and so for a kernel that waits for a rank not yet begun.
        for rank in range(self.world):
            with torch.cuda.stream(self.streams[rank]):
                if pushes:
                    matrix = self.workspaces[rank][self.sizes.gathered_offset :].view(dtype)
                    whole = matrix[: problem.m * problem.k].view(problem.m, problem.k)
                    whole.fill_(float("nan"))
                else:
                    size = problem.m, problem.k
                    whole = torch.full(size, float("nan"), dtype=dtype, device="cuda")
            gathered.append(whole)
        for rank in range(self.world):
            stream = self.streams[rank]
            with torch.cuda.stream(stream):
                if delay is not None:
                    delay(rank)
            self.support.begin(
                abi.BeginArgs(
                    group=self.groups[rank],
                    x=own[rank],
                    rows=problem.m_local,
                    row_bytes=row_bytes,
                    row_stride_bytes=x[rank].stride(0) * dtype.itemsize,
                    gathered=gathered[rank].data_ptr(),
                    blocks=self.share,
                    pull=not copies,
                    push=pushes,
                    keep=run.span > 1,
                ),
                stream.cuda_stream,
            )
        for rank in range(self.world):
            if copies:
                copy = copy_args(self.groups[rank], problem, kernel.kernel, run)
                copy.gathered, copy.x = gathered[rank].data_ptr(), x[rank].data_ptr()
                copy.row_stride_bytes = x[rank].stride(0) * dtype.itemsize
                copy.x_step_bytes = step[rank]
                self._copy(copy, rank, self.streams[rank])
        for rank in range(self.world):
            args = self._gemm_args(rank, problem, kernel.kernel, run)
            args.a, args.a_row_stride = gathered[rank].data_ptr(), problem.k
            args.own, args.own_row_stride = own[rank], x[rank].stride(0)
            args.b, args.b_row_stride = b[rank].data_ptr(), row_stride(b[rank])
            args.d, args.d_row_stride = d[rank].data_ptr(), d[rank].stride(0)
            kernel.launch(args, self.streams[rank].cuda_stream)
            self.streams[rank].wait_stream(self.copies[rank])
            self.streams[rank].wait_stream(self.flags[rank])

    def _copy(self, copy: abi.CopyArgs, rank: int, behind: torch.cuda.Stream) -> None:
        sides = self.awaits[rank], self.copies[rank], self.flags[rank]
        streams = tuple(side.cuda_stream for side in sides)
        self.support.copy(copy, behind.cuda_stream, streams, self.events[rank].cuda_event)

    def gemm_rs(
        self,
        kernel: FusedKernel,
        problem: Problem,
        run: RunConfig,
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        d: Sequence[torch.Tensor],
        delay: Callable[[int], None] | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        """Queue one gemm_rs on every rank: a[r] (m, k), b[r] as in ag_gemm -> d[r] (m/tp, n).

        Of a gemm_ar d[r], and the residual if there is one, are (m, n); so is d[r] of a gemm_a2a.
        """
        drains = run.transport is Transport.COPY_ENGINE_DRAIN
        for rank in range(self.world):
            args = self._gemm_args(rank, problem, kernel.kernel, run)
            args.a, args.a_row_stride = a[rank].data_ptr(), a[rank].stride(0)
            args.b, args.b_row_stride = b[rank].data_ptr(), row_stride(b[rank])
            with torch.cuda.stream(self.streams[rank]):
                if delay is not None:
                    delay(rank)
            self.awaits[rank].wait_stream(self.streams[rank])  # the copies begin beside the GEMM
            kernel.launch(args, self.streams[rank].cuda_stream)
        for rank in range(self.world):
            if drains:
                copy = copy_args(self.groups[rank], problem, kernel.kernel, run)
                self._copy(copy, rank, self.awaits[rank])
        for rank in range(self.world):
            reduce = reduce_args(self.groups[rank], problem, kernel.kernel, run)
            reduce.d, reduce.d_row_stride = d[rank].data_ptr(), d[rank].stride(0)
            # Few: they wait on their SMs for other ranks' GEMMs, whose clusters need free ones.
            reduce.blocks = max(1, self.share // 4)
            reduce.operands[abi.RESIDUAL].data = None if residual is None else residual.data_ptr()
            self.support.reduce(reduce, self.streams[rank].cuda_stream)
            self.streams[rank].wait_stream(self.copies[rank])
            self.streams[rank].wait_stream(self.flags[rank])

    def run(
        self, kernel: FusedKernel, problem: Problem, run: RunConfig, *operands: Any, **kw: Any
    ) -> None:
        """Queue the op of ``problem``; see :meth:`ag_gemm` and :meth:`gemm_rs`, which also queue
        what else their kernels serve."""
        call = self.ag_gemm if problem.op.gathers else self.gemm_rs
        call(kernel, problem, run, *operands, **kw)

    def synchronize(self) -> None:
        """Wait for every rank.

        Raises:
            CommTimeout: a device-side wait passed its deadline.
        """
        for stream in (*self.streams, *self.awaits, *self.copies, *self.flags):
            stream.synchronize()
        raised = []
        for memory in self.reports:
            report = abi.Report.from_address(memory.data_ptr())
            if report.code:
                raised.append(abi.as_error(report))
                memory.zero_()
        for error in sorted(raised, key=lambda e: e.by_peer):
            raise error  # one of the ranks that waited, not one that it told
