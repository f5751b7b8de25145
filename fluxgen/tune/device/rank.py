"""One rank of a call, alone on the GPU with all of its SMs; the others are memory and a schedule.

ag_gemm: the peers' flags are raised on schedule. gemm_rs: stores go to inboxes on this GPU, and the
peers' flags answer this rank's.

What is left out: no bytes move, so neither the memory nor the L2 of this GPU sees what the copies
would write, or what peers would read and store. No rank is ever late.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable

import torch

from fluxgen.core.config import KernelConfig, RunConfig, Transport
from fluxgen.core.problem import Op, Problem
from fluxgen.core.topology import Topology
from fluxgen.runtime import abi
from fluxgen.runtime.arguments import gemm_args, row_stride
from fluxgen.runtime.emulated_link import Departure, EmulatedLink
from fluxgen.runtime.fused import TRANSPORT_SMS
from fluxgen.runtime.loader import CallGraphs, ErrorText, FusedKernel, SupportKernels
from fluxgen.runtime.workspace import chunk_size, sizes
from fluxgen.tune.device import schedule

ALWAYS = 0x40000000
"""A flag with this epoch is up for the first 2**30 calls."""

_GATE = 192
"""Offset of a word that only the imitated SM copy uses, in the control block's unused part."""

_FLAGS = abi.MAX_WORLD * abi.MAX_CHUNKS


class OneRank:
    """Rank 0 of ``problem.tp``, with workspaces for one problem.

    Args:
        problem, topology: what and over which link. support, link: loaded libraries.
        timeout_s: deadline of each wait on the GPU.
    """

    def __init__(
        self,
        problem: Problem,
        topology: Topology,
        support: SupportKernels,
        link: EmulatedLink,
        timeout_s: float = 5.0,
    ) -> None:
        self.problem, self.topology, self.support, self.link = problem, topology, support, link
        device = torch.device("cuda", torch.cuda.current_device())
        self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._dtype = getattr(torch, problem.signature.dtype.torch_name)
        parts = sizes(problem, *Transport)
        self.mine = torch.zeros(parts.total, dtype=torch.uint8, device=device)
        self.peers: list[torch.Tensor] = []  # of an ag_gemm all are the link's control block
        if problem.op is Op.GEMM_RS:
            self.peers = [torch.zeros_like(self.mine) for _ in range(1, problem.tp)]
        self.report = torch.zeros(8, dtype=torch.int32, pin_memory=True)
        self.group = abi.Group(
            world=problem.tp, rank=0, stage_bytes=parts.stage, half_bytes=parts.half,
            gathered_bytes=parts.gathered, timeout_ns=int(timeout_s * 1e9),
            report=self.report.data_ptr(),
        )  # fmt: skip
        self.group.peers[0] = self.mine.data_ptr()
        for peer in range(1, problem.tp):
            at = self.peers[peer - 1].data_ptr() if self.peers else link.peer
            self.group.peers[peer] = at
        self.epoch = 0
        self.stream = torch.cuda.current_stream(device)
        self._text = ErrorText()
        self._kept: list[CallGraphs] = []
        self._left = ct.c_int64(1 << 20)
        # No peer of this rank is ever late with what it reads or has ready.
        self._words(abi.READY_OFFSET, abi.MAX_WORLD).fill_(ALWAYS)
        self._words(abi.PULLED_OFFSET, abi.MAX_WORLD).fill_(ALWAYS)
        torch.cuda.synchronize(device)

    def _words(self, offset: int, count: int) -> torch.Tensor:
        return self.mine[offset : offset + 4 * count].view(torch.int32)

    def present(self, up: bool) -> None:
        """Whether what the peers send is there from the start, as in a GEMM alone."""
        for offset in (abi.ARRIVED_OFFSET, abi.GATHERED_OFFSET):
            self._words(offset, _FLAGS).fill_(ALWAYS if up else self.epoch)
        torch.cuda.synchronize()

    def call(
        self,
        kernel: FusedKernel,
        run: RunConfig,
        left: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        present: bool = False,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """(to be queued before the time is taken, the call itself), on the current stream.

        Args:
            left: ag_gemm: the whole x (m, k), this rank's slab first: the others lie where copies
                would put them; gemm_rs: (m, k). weight: (n, k). out: (m, n), or (m / tp, n).
            present: the flags are up, see :meth:`present`; nothing is scheduled.
        """
        make = self._gather if self.problem.op is Op.AG_GEMM else self._scatter
        return make(kernel, run, left, weight, out, present)

    def _gemm(
        self, kernel: KernelConfig, run: RunConfig, a: torch.Tensor, b: torch.Tensor
    ) -> abi.GemmArgs:
        args = gemm_args(self.group, self.problem, kernel, run)
        args.a, args.a_row_stride = a.data_ptr(), a.stride(0)
        args.b, args.b_row_stride = b.data_ptr(), row_stride(b)
        args.sms = run.sms or self.sms
        if run.transport.copies:
            args.sms = min(args.sms, self.sms - TRANSPORT_SMS)
        return args

    def _gather(
        self, kernel: FusedKernel, run: RunConfig, x: torch.Tensor, weight: torch.Tensor,
        out: torch.Tensor, present: bool,
    ) -> tuple[Callable[[], None], Callable[[], None]]:  # fmt: skip
        problem, config = self.problem, kernel.kernel
        args = self._gemm(config, run, x, weight)
        args.d, args.d_row_stride = out.data_ptr(), out.stride(0)
        by_sms = run.transport is Transport.SM_COPY
        row_bytes = problem.k * self._dtype.itemsize
        begin = abi.BeginArgs(
            group=self.group, x=x.data_ptr(), rows=problem.m_local, row_bytes=row_bytes,
            row_stride_bytes=row_bytes, gathered=x.data_ptr(), keep=run.span > 1,
            pull=False, push=run.transport is Transport.COPY_ENGINE_PUSH,
        )  # fmt: skip
        args.own, args.own_row_stride = x.data_ptr(), problem.k
        base = self.mine.data_ptr()
        due = [
            (base + abi.GATHERED_OFFSET + 4 * (t.visit * abi.MAX_CHUNKS + t.chunk), t.us)
            for t in schedule.arrivals(problem, self.topology, config, run)
        ]
        if by_sms:
            due.append((base + _GATE, due[-1][1] if due else 0.0))
        stream, gemm = self.stream.cuda_stream, kernel.call(args)
        whole = abi.GatherCall(
            begin=ct.addressof(begin), gemms=ct.addressof(gemm), count=1, graphs=self._graphs()
        )  # fmt: skip
        keep = begin, args, gemm  # their addresses are in the call

        def before() -> None:
            self.epoch += 1
            if not present:
                self.link.gather(self.epoch, self.topology.latency_us, due)

        def queue() -> None:
            if by_sms and not present:
                self.support.begin(keep[0], stream)
                self.link.gate(stream, base + _GATE, self.epoch)
                kernel.launch(args, stream)
            else:
                self.support.gather(ct.addressof(whole), stream, self._text)

        return before, queue

    def _scatter(
        self, kernel: FusedKernel, run: RunConfig, a: torch.Tensor, weight: torch.Tensor,
        out: torch.Tensor, present: bool,
    ) -> tuple[Callable[[], None], Callable[[], None]]:  # fmt: skip
        problem, config = self.problem, kernel.kernel
        args = self._gemm(config, run, a, weight)
        reduce = abi.ReduceArgs(
            group=self.group, rows=problem.m_local, n=problem.n,
            chunk_rows=chunk_size(problem, config, run), d=out.data_ptr(),
            d_row_stride=out.stride(0), scale=1.0,
            dtype=abi.DTYPES[problem.signature.dtype.value],
        )  # fmt: skip
        tail = schedule.wave_us(problem, self.topology, config, run)
        base = self.mine.data_ptr()
        # Who visits this rank when it visits its v-th peer: every rank begins with its own next.
        pairs = [
            Departure(
                watched=self.group.peers[t.visit] + abi.ARRIVED_OFFSET + 4 * t.chunk,
                answered=base + abi.ARRIVED_OFFSET
                + 4 * ((problem.tp - t.visit) * abi.MAX_CHUNKS + t.chunk),
                owner=t.visit, busy_us=t.us, tail_us=min(tail, t.us),
            )
            for t in schedule.departures(problem, self.topology, config, run)
        ]  # fmt: skip
        stream, gemm = self.stream.cuda_stream, kernel.call(args)
        whole = abi.ScatterCall(gemm=gemm, reduce=ct.addressof(reduce), graphs=self._graphs())
        keep = reduce, args, gemm  # their addresses are in the call

        def before() -> None:
            assert keep
            self.epoch += 1
            if not present:
                self.link.scatter(self.epoch, self.topology.latency_us, pairs)
                self.link.mark(stream, self.epoch)

        def queue() -> None:
            self.support.scatter(ct.addressof(whole), stream, self._text)

        return before, queue

    def _graphs(self) -> int:
        """Room for the one graph that a warm call is."""
        self._kept.append(self.support.graphs(1, self._left))
        return self._kept[-1].handle

    def finish(self, seconds: float) -> None:
        """Wait for all that was queued.

        Raises:
            CommTimeout: a wait on the GPU passed its deadline. KernelError: the schedule did.
        """
        torch.cuda.synchronize()
        report = abi.Report.from_address(self.report.data_ptr())
        if report.code:
            error = abi.as_error(report)
            self.report.zero_()
            raise error
        self.link.drain(seconds)
