"""What one rank of a call needs when it is alone on the GPU, whatever stands in for its peers."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable

import torch

from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.problem import Problem
from fluxgen.native import abi
from fluxgen.native.arguments import gemm_args, reduce_args, row_stride
from fluxgen.native.loader import CallGraphs, ErrorText, SupportKernels
from fluxgen.native.workspace import Sizes, group_view
from fluxgen.runtime.memory.mapped import zeroed
from fluxgen.runtime.session.fused import TRANSPORT_SMS

__all__ = ["ALWAYS", "Alone", "Queue"]

ALWAYS = 0x40000000
"""A flag with this epoch is up for the first 2**30 calls."""

Queue = tuple[Callable[[], None], Callable[[], None]]
"""What is queued before the time is taken, and what is timed."""


class Alone:
    """Rank 0 of ``problem.tp``, with its own workspace; ``group.peers`` of the others are the
    subclass's to fill in.

    Args:
        problem: what. support: the loaded library. parts: of the workspace.
        timeout_s: deadline of each wait on the GPU. in_host: the workspace is pinned host memory.
    """

    def __init__(
        self, problem: Problem, support: SupportKernels, parts: Sizes, timeout_s: float,
        in_host: bool = False,
    ) -> None:  # fmt: skip
        self.problem, self.support = problem, support
        device = torch.device("cuda", torch.cuda.current_device())
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.dtype = getattr(torch, problem.signature.dtype.torch_name)
        self.mine = zeroed(parts.total, device, in_host)
        self.report = torch.zeros(8, dtype=torch.int32, pin_memory=True)
        addresses = [self.mine.data_ptr()] + [0] * (problem.tp - 1)
        self.group = group_view(0, addresses, parts, timeout_s, self.report.data_ptr())
        self.stream = torch.cuda.current_stream(device)
        self.text = ErrorText()
        self._left = ct.c_int64(1 << 20)
        # No peer of this rank is ever late with what it reads or has ready.
        self.words(abi.READY_OFFSET, abi.MAX_WORLD).fill_(ALWAYS)
        self.words(abi.PULLED_OFFSET, abi.MAX_WORLD).fill_(ALWAYS)
        self.words(abi.CONSUMED_OFFSET, abi.MAX_WORLD).fill_(ALWAYS)
        torch.cuda.synchronize(device)

    def words(self, offset: int, count: int) -> torch.Tensor:
        """Words of this rank's control block."""
        return self.mine[offset : offset + 4 * count].view(torch.int32)

    def gemm(
        self, kernel: KernelConfig, run: RunConfig, a: torch.Tensor, b: torch.Tensor
    ) -> abi.GemmArgs:
        """Arguments of the GEMM of a call, but for its output."""
        args = gemm_args(self.group, self.problem, kernel, run)
        args.a, args.a_row_stride = a.data_ptr(), a.stride(0)
        args.b, args.b_row_stride = b.data_ptr(), row_stride(b)
        args.sms = run.sms or self.sms
        if run.transport.copies:
            args.sms = min(args.sms, self.sms - TRANSPORT_SMS)
        return args

    def reduction(self, kernel: KernelConfig, run: RunConfig, out: torch.Tensor) -> abi.ReduceArgs:
        """Arguments of the reduction into ``out`` (m / tp, n), of a gemm_ar (m, n)."""
        args = reduce_args(self.group, self.problem, kernel, run)
        args.d, args.d_row_stride = out.data_ptr(), out.stride(0)
        return args

    def graphs(self) -> CallGraphs:
        """Room for the one graph that a warm call is; for as long as the caller keeps it."""
        return self.support.graphs(1, self._left)

    def finish(self, seconds: float) -> None:
        """Wait for all that was queued.

        Raises:
            CommTimeout: a wait on the GPU passed its deadline.
        """
        del seconds  # the deadlines of the waits themselves bound it
        torch.cuda.synchronize()
        report = abi.Report.from_address(self.report.data_ptr())
        if report.code:
            error = abi.as_error(report)
            self.report.zero_()
            raise error
