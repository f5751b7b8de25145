"""One rank of a call over this machine's own PCIe link: the peers are pinned host memory.

Where no GPU reaches another's memory, so is this rank's own workspace.

The bytes are real, in both directions: what this rank pulls comes out of the host's memory, what it
stores goes there, and copies the other way, begun with the call, are the peers' traffic. What is
left out: peers that are late, and switches or bridges between two GPUs.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable

import torch

from fluxgen.core.config import RunConfig, Transport
from fluxgen.core.problem import Problem
from fluxgen.native import abi
from fluxgen.native.arguments import copy_args
from fluxgen.native.loader import FusedKernel, SupportKernels
from fluxgen.native.workspace import sizes
from fluxgen.tune.device.alone import ALWAYS, Alone, Queue

__all__ = ["OverPcie"]


class OverPcie(Alone):
    """Rank 0 of ``problem.tp``, whose peers' workspaces lie in the host's memory.

    Args:
        problem: what. support: the loaded library. in_host: this rank's workspace lies in the
            host's memory, too. timeout_s: deadline of each wait on the GPU.
    """

    def __init__(
        self, problem: Problem, support: SupportKernels, in_host: bool = False,
        timeout_s: float = 5.0,
    ) -> None:  # fmt: skip
        rs = [Transport.PEER_STORE, *[Transport.COPY_ENGINE_DRAIN] * (not in_host)]
        parts = sizes(problem, *(rs if problem.op.scatters else [Transport.COPY_ENGINE_PULL]))
        super().__init__(problem, support, parts, timeout_s, in_host)
        item = problem.signature.dtype.bytes
        self._moves = problem.tp > 1
        # A slab that comes in and one that goes out, of every peer: they share memory where what
        # they hold does not matter.
        columns = problem.k if problem.op.gathers else problem.n
        slab = problem.m_local * columns * item
        self._peers = [
            torch.zeros(parts.gathered_offset + slab, dtype=torch.uint8, pin_memory=True)
            for _ in range(1, problem.tp if problem.op.gathers else min(problem.tp, 2))
        ]  # fmt: skip
        for peer in range(1, problem.tp):
            self.group.peers[peer] = self._peers[(peer - 1) % len(self._peers)].data_ptr()
        self._host = torch.zeros(slab, dtype=torch.uint8, pin_memory=True)
        self._slab = torch.zeros(slab, dtype=torch.uint8, device="cuda")
        self._gathered = torch.zeros(
            problem.m if problem.op.gathers else 0, problem.k, dtype=self.dtype, device="cuda"
        )
        self._traffic = torch.cuda.Stream()
        self._sides = [torch.cuda.Stream(priority=-1) for _ in range(3)]
        self._began, self._ordered = (torch.cuda.Event() for _ in range(2))
        for event in (self._began, self._ordered):
            event.record()
        # No peer's slab of a gemm_rs is late; this rank's own flags are its GEMM's.
        others = slice(abi.MAX_CHUNKS, None)
        self.words(abi.ARRIVED_OFFSET, abi.MAX_WORLD * abi.MAX_CHUNKS)[others].fill_(ALWAYS)
        torch.cuda.synchronize()

    def call(
        self,
        kernel: FusedKernel,
        run: RunConfig,
        left: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
    ) -> Queue:
        """(to be queued before the time is taken, the call itself), on the current stream.

        Args:
            left: ag_gemm: the whole x (m, k), of which the peers get theirs; gemm_rs: (m, k).
            weight: (n, k). out: (m, n), or (m / tp, n).
        """
        make = self._gather if self.problem.op.gathers else self._scatter
        return make(kernel, run, left, weight, out)

    def stage(self, left: torch.Tensor) -> None:
        """Give the peers of an ag_gemm their slabs of ``left`` (m, k)."""
        for memory, slab in zip(self._peers, left.chunk(self.problem.tp)[1:], strict=True):
            data = slab.contiguous().view(torch.uint8).flatten()
            memory[abi.DATA_OFFSET : abi.DATA_OFFSET + data.numel()].copy_(data)
        torch.cuda.synchronize()

    def unfused(self, left: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Queue:
        """The same bytes by plain copies, before cuBLAS (ag_gemm) or after it (gemm_rs)."""
        gathers, tp = self.problem.op.gathers, self.problem.tp

        def queue() -> None:
            self._peers_traffic()
            if gathers:
                self._copy_slabs(out)
            torch.mm(left, weight.t(), out=out)
            if not gathers:
                self._copy_slabs(out)
                torch.sum(out.view(tp, -1, out.shape[1]), dim=0)

        return self._settle, queue

    def copies_alone(self, out: torch.Tensor) -> Queue:
        """The remote bytes of a call by plain copies, in the direction that it waits for.

        Args:
            out: gemm_rs: (m, n), what is sent.
        """

        def queue() -> None:
            self._peers_traffic()
            self._copy_slabs(out)

        return self._settle, queue

    def beside(self, work: Callable[[], None], out: torch.Tensor) -> Queue:
        """:meth:`copies_alone` and ``work`` at once, neither waiting for the other: what a fused
        call could take at best, given what the two do to each other."""
        _, copies = self.copies_alone(out)
        apart = torch.cuda.Stream()

        def queue() -> None:
            apart.wait_stream(self.stream)
            with torch.cuda.stream(apart):
                work()
            copies()
            self.stream.wait_stream(apart)

        return self._settle, queue

    def _copy_slabs(self, out: torch.Tensor) -> None:
        """Every remote slab by one plain copy, between the same places as in a fused call: out of
        its peer into the gathered matrix, or out of ``out`` to its owner."""
        gathers, tp = self.problem.op.gathers, self.problem.tp
        for i, slab in enumerate((self._gathered if gathers else out).chunk(tp)[1:]):
            data = slab.view(torch.uint8).flatten()
            peer = self._peers[i % len(self._peers)][abi.DATA_OFFSET :][: data.numel()]
            if gathers:
                data.copy_(peer, non_blocking=True)
            else:
                peer.copy_(data, non_blocking=True)

    def _settle(self) -> None:
        """The peers' traffic of the call before has ended when the next one begins."""
        self.stream.wait_stream(self._traffic)

    def _peers_traffic(self) -> None:
        """What the peers move the other way meanwhile: as many bytes."""
        self._began.record(self.stream)
        self._traffic.wait_event(self._began)
        with torch.cuda.stream(self._traffic):
            for _ in range(1, self.problem.tp):
                if self.problem.op.gathers:
                    self._host.copy_(self._slab, non_blocking=True)
                else:
                    self._slab.copy_(self._host, non_blocking=True)

    def _gather(
        self, kernel: FusedKernel, run: RunConfig, x: torch.Tensor, weight: torch.Tensor,
        out: torch.Tensor,
    ) -> Queue:  # fmt: skip
        problem, config = self.problem, kernel.kernel
        gathered = self._gathered.data_ptr()
        args = self.gemm(config, run, self._gathered, weight)
        args.d, args.d_row_stride = out.data_ptr(), out.stride(0)
        args.own, args.own_row_stride = x.data_ptr(), problem.k
        row_bytes = problem.k * self.dtype.itemsize
        by_sms = run.transport is Transport.SM_COPY
        awaits, copies, flags = (side.cuda_stream for side in self._sides)
        begin = abi.BeginArgs(
            group=self.group, x=x.data_ptr(), rows=problem.m_local, row_bytes=row_bytes,
            row_stride_bytes=row_bytes, gathered=gathered, keep=run.span > 1, pull=by_sms,
        )  # fmt: skip
        copy = copy_args(self.group, problem, config, run)
        copy.gathered = gathered
        gemm, graphs = kernel.call(args), self.graphs()
        whole = abi.GatherCall(
            begin=ct.addressof(begin), copy=None if by_sms else ct.addressof(copy),
            gemms=ct.addressof(gemm), count=1, awaits=awaits, copies=copies, flags=flags,
            event=self._ordered.cuda_event, graphs=graphs.handle,
        )  # fmt: skip
        return self._whole(self.support.gather, whole, (begin, copy, args, gemm, graphs))

    def _scatter(
        self, kernel: FusedKernel, run: RunConfig, a: torch.Tensor, weight: torch.Tensor,
        out: torch.Tensor,
    ) -> Queue:  # fmt: skip
        args = self.gemm(kernel.kernel, run, a, weight)
        reduce = self.reduction(kernel.kernel, run, out)
        gemm, graphs = kernel.call(args), self.graphs()
        drains = run.transport is Transport.COPY_ENGINE_DRAIN
        copy = copy_args(self.group, self.problem, kernel.kernel, run) if drains else None
        awaits, copies, flags = (side.cuda_stream for side in self._sides)
        whole = abi.ScatterCall(
            gemm=gemm, reduce=ct.addressof(reduce), graphs=graphs.handle,
            copy=None if copy is None else ct.addressof(copy), awaits=awaits, copies=copies,
            flags=flags, event=self._ordered.cuda_event,
        )  # fmt: skip
        return self._whole(self.support.scatter, whole, (reduce, args, gemm, copy, graphs))

    def _whole(self, launch: Callable[..., None], whole: ct.Structure, keep: object) -> Queue:
        stream = self.stream.cuda_stream

        def queue() -> None:
            assert keep  # their addresses are in the call
            if self._moves:
                self._peers_traffic()
            launch(ct.addressof(whole), stream, self.text)

        return self._settle, queue
