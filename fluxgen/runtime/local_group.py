"""W ranks in one process on one GPU: real workspaces, real peer pointers, real flags.

Each rank is a stream with its share of the SMs. All ranks of a call must be resident at once, or
they deadlock, so the shares sum to less than the GPU: the copies between ranks of one GPU run on
SMs too, behind kernels that spin. Used by the correctness tests and the emulated evaluator.

Set ``CUDA_DEVICE_MAX_CONNECTIONS=32`` before CUDA starts: with fewer hardware queues than streams,
independent streams wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig
from fluxgen.core.errors import CommTimeout
from fluxgen.core.problem import Op, Problem
from fluxgen.runtime import abi
from fluxgen.runtime.loader import FusedKernel, SupportKernels
from fluxgen.runtime.workspace import (
    chunk_bounds,
    chunk_size,
    gathered_offset,
    slab_offset,
    workspace_bytes,
)

FREE_SMS = 4
"""SMs left to the copies and to the transports' waits."""


class LocalGroup:
    """``world`` ranks of one group on the current device.

    Args:
        world: ranks. half: bytes of one data half of each workspace. support: support kernels.
        timeout_s: deadline of device-side waits.
    """

    def __init__(
        self, world: int, half: int, support: SupportKernels, timeout_s: float = 10.0
    ) -> None:
        self.world, self.half, self.support = world, half, support
        self.epoch = 0
        device = torch.device("cuda", torch.cuda.current_device())
        self.total_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.share = max(1, (self.total_sms - FREE_SMS) // world)
        self.workspaces = [
            torch.zeros(workspace_bytes(half), dtype=torch.uint8, device=device)
            for _ in range(world)
        ]
        self.reports = [torch.zeros(8, dtype=torch.int32, pin_memory=True) for _ in range(world)]
        self.streams = [torch.cuda.Stream(device) for _ in range(world)]
        self.copies = [torch.cuda.Stream(device) for _ in range(world)]
        self.groups = [self._group(rank, timeout_s) for rank in range(world)]
        # No stream may write a flag before every workspace is zero.
        torch.cuda.synchronize(device)

    def _group(self, rank: int, timeout_s: float) -> abi.Group:
        group = abi.Group(world=self.world, rank=rank, half_bytes=self.half)
        for peer, workspace in enumerate(self.workspaces):
            group.peers[peer] = workspace.data_ptr()
        group.timeout_ns = int(timeout_s * 1e9)
        group.report = self.reports[rank].data_ptr()
        return group

    def _gemm_args(
        self, rank: int, problem: Problem, kernel: KernelConfig, run: RunConfig
    ) -> abi.GemmArgs:
        args = abi.GemmArgs(group=self.groups[rank])
        args.rows, args.n, args.k = problem.m_local, problem.n, problem.k
        args.chunk_axis = abi.CHUNK_AXES[run.chunk_axis.value]
        args.chunk_size = chunk_size(problem, kernel, run)
        args.group_count = len(run.groups)
        for i, size in enumerate(run.groups):
            args.groups[i] = size
        args.panel, args.span = run.panel, run.span
        args.sms = min(run.sms or self.share, self.share)
        return args

    def _slab(self, rank: int, source: int, problem: Problem) -> torch.Tensor:
        """The slab of ``source`` in ``rank``'s half of the current epoch, (rows, k)."""
        rows, k = problem.m_local, problem.k
        dtype = getattr(torch, problem.signature.dtype.torch_name)
        begin = slab_offset(self.half, self.epoch, source, rows * k * 2)
        return self.workspaces[rank][begin : begin + rows * k * 2].view(dtype).view(rows, k)

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
        """Queue one ag_gemm on every rank: x[r] (m/tp, k), b[r] (n, k) -> d[r] (m, n).

        ``delay(rank)`` may queue work on the current stream before that rank starts.
        """
        self.epoch += 1
        for rank in range(self.world):
            with torch.cuda.stream(self.streams[rank]):
                if delay is not None:
                    delay(rank)
                self.support.begin(
                    abi.BeginArgs(
                        group=self.groups[rank],
                        x=x[rank].data_ptr(),
                        rows=problem.m_local,
                        row_bytes=problem.k * 2,
                        row_stride_bytes=x[rank].stride(0) * 2,
                        blocks=self.share,
                    ),
                    self.streams[rank].cuda_stream,
                )
            self.copies[rank].wait_stream(self.streams[rank])
        for rank in range(self.world):
            self._pull(rank, problem, kernel.kernel, run)
        for rank in range(self.world):
            args = self._gemm_args(rank, problem, kernel.kernel, run)
            args.b, args.b_row_stride = b[rank].data_ptr(), b[rank].stride(0)
            args.d, args.d_row_stride = d[rank].data_ptr(), d[rank].stride(0)
            kernel.launch(args, self.streams[rank].cuda_stream)
            self.streams[rank].wait_stream(self.copies[rank])

    def _pull(self, rank: int, problem: Problem, kernel: KernelConfig, run: RunConfig) -> None:
        """Queue the pull of every peer's slab, chunk by chunk, each followed by its flag."""
        along_k = run.chunk_axis is ChunkAxis.K
        extent = problem.k if along_k else problem.m_local
        bounds = chunk_bounds(extent, chunk_size(problem, kernel, run))
        words = self.workspaces[rank][: abi.DATA_OFFSET].view(torch.int32)
        epoch = words[abi.EPOCH_OFFSET // 4 : abi.EPOCH_OFFSET // 4 + 1]
        with torch.cuda.stream(self.copies[rank]):
            stream = self.copies[rank].cuda_stream
            for step in range(1, self.world):
                peer = (rank + step) % self.world
                self.support.wait(abi.WaitArgs(group=self.groups[rank], peer=peer), stream)
                source, target = (
                    self._slab(peer, peer, problem),
                    self._slab(rank, peer, problem),
                )
                for chunk, (begin, end) in enumerate(bounds):
                    if along_k:
                        target[:, begin:end].copy_(source[:, begin:end])
                    else:
                        target[begin:end].copy_(source[begin:end])
                    flag = gathered_offset(peer, chunk) // 4
                    words[flag : flag + 1].copy_(epoch)

    def gemm_rs(
        self,
        kernel: FusedKernel,
        problem: Problem,
        run: RunConfig,
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        d: Sequence[torch.Tensor],
        delay: Callable[[int], None] | None = None,
    ) -> None:
        """Queue one gemm_rs on every rank: a[r] (m, k), b[r] (n, k) -> d[r] (m/tp, n)."""
        self.epoch += 1
        for rank in range(self.world):
            args = self._gemm_args(rank, problem, kernel.kernel, run)
            args.a, args.a_row_stride = a[rank].data_ptr(), a[rank].stride(0)
            args.b, args.b_row_stride = b[rank].data_ptr(), b[rank].stride(0)
            with torch.cuda.stream(self.streams[rank]):
                if delay is not None:
                    delay(rank)
            kernel.launch(args, self.streams[rank].cuda_stream)
        for rank in range(self.world):
            self.support.reduce(
                abi.ReduceArgs(
                    group=self.groups[rank],
                    rows=problem.m_local,
                    n=problem.n,
                    chunk_rows=chunk_size(problem, kernel.kernel, run),
                    d=d[rank].data_ptr(),
                    d_row_stride=d[rank].stride(0),
                    dtype=abi.DTYPES[problem.signature.dtype.value],
                    blocks=self.share,
                ),
                self.streams[rank].cuda_stream,
            )

    def run(
        self, kernel: FusedKernel, problem: Problem, run: RunConfig, *operands: Any, **kw: Any
    ) -> None:
        """Queue the op of ``problem``; see :meth:`ag_gemm` and :meth:`gemm_rs`."""
        call = self.ag_gemm if problem.op is Op.AG_GEMM else self.gemm_rs
        call(kernel, problem, run, *operands, **kw)

    def synchronize(self) -> None:
        """Wait for every rank.

        Raises:
            CommTimeout: a device-side wait passed its deadline.
        """
        for stream in (*self.streams, *self.copies):
            stream.synchronize()
        for report in self.reports:
            code, op, rank, peer, chunk, expected, seen, _ = (int(v) & 0xFFFFFFFF for v in report)
            if code:
                report.zero_()
                raise CommTimeout(abi.OP_NAMES[op], rank, peer, chunk, expected, seen)
