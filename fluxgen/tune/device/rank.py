"""One rank of a call, alone on the GPU with all of its SMs; the others are memory and a schedule.

ag_gemm: the peers' flags are raised on schedule. gemm_rs: stores go to inboxes on this GPU, and the
peers' flags answer this rank's. Packets have no flags: this rank
sends its own into all of its slots, and nothing of the link is imitated.

What is left out: no bytes move, so neither the memory nor the L2 of this GPU sees what the copies
would write, or what peers would read and store. No rank is ever late.
"""

from __future__ import annotations

import ctypes as ct
from collections.abc import Callable

import torch

from fluxgen.core.config import RunConfig, Transport
from fluxgen.core.errors import KernelError
from fluxgen.core.problem import Problem
from fluxgen.core.topology import Topology
from fluxgen.native import abi
from fluxgen.native.loader import FusedKernel, SupportKernels
from fluxgen.native.workspace import sizes
from fluxgen.tune.device import schedule
from fluxgen.tune.device.alone import ALWAYS, Alone, Queue
from fluxgen.tune.device.emulated_link import Departure, EmulatedLink

_GATE = 192
"""Offset of a word that only the imitated SM copy uses, in the control block's unused part."""

_FLAGS = abi.MAX_WORLD * abi.MAX_CHUNKS


class OneRank(Alone):
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
        parts = sizes(problem, *(t for t in Transport if t is not Transport.COPY_ENGINE_DRAIN))
        super().__init__(problem, support, parts, timeout_s)
        self.topology, self.link = topology, link
        link.reset()
        self.peers: list[torch.Tensor] = []  # of an ag_gemm all are the link's control block
        if problem.op.scatters:
            self.peers = [torch.zeros_like(self.mine) for _ in range(1, problem.tp)]
        for peer in range(1, problem.tp):
            at = self.peers[peer - 1].data_ptr() if self.peers else link.peer
            self.group.peers[peer] = at
        self.epoch, self._up = 0, False
        torch.cuda.synchronize()

    def present(self, up: bool) -> None:
        """Whether what the peers send is there from the start, as in a GEMM alone."""
        self._up = up
        for offset in (abi.ARRIVED_OFFSET, abi.GATHERED_OFFSET):
            # Not this rank's own: the reduction waits for its GEMM.
            self.words(offset, _FLAGS)[abi.MAX_CHUNKS :].fill_(ALWAYS if up else self.epoch)
        self.words(abi.REDUCED_OFFSET, abi.MAX_WORLD).fill_(ALWAYS if up else self.epoch)
        torch.cuda.synchronize()

    def call(
        self,
        kernel: FusedKernel,
        run: RunConfig,
        left: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        present: bool = False,
    ) -> Queue:
        """(to be queued before the time is taken, the call itself), on the current stream.

        Args:
            left: ag_gemm: the whole x (m, k), this rank's slab first: the others lie where copies
                would put them; else (m, k). weight: (n, k). out: (m, n), of a gemm_rs (m / tp, n).
            present: the flags are up, see :meth:`present`; nothing is scheduled.
        """
        make = self._gather if self.problem.op.gathers else self._scatter
        before, queue = make(kernel, run, left, weight, out, present)
        if self.problem.op.scatters:
            self._load(queue)
        return before, queue

    def _load(self, queue: Callable[[], None]) -> None:
        """Two calls whose peers' flags are up. CUDA loads kernels at the first launch, and at the
        second the graph is made, for which the driver may allocate memory: both may wait for
        streams that watch for the flags of just that launch."""
        up = self._up
        self.present(True)
        for _ in range(2):
            self.epoch += 1
            queue()
            torch.cuda.synchronize()
        self.present(up)

    def _gather(
        self, kernel: FusedKernel, run: RunConfig, x: torch.Tensor, weight: torch.Tensor,
        out: torch.Tensor, present: bool,
    ) -> Queue:  # fmt: skip
        problem, config = self.problem, kernel.kernel
        args = self.gemm(config, run, x, weight)
        args.d, args.d_row_stride = out.data_ptr(), out.stride(0)
        by_sms = run.transport is Transport.SM_COPY
        row_bytes = problem.k * self.dtype.itemsize
        begin = abi.BeginArgs(
            group=self.group, x=x.data_ptr(), rows=problem.m_local, row_bytes=row_bytes,
            row_stride_bytes=row_bytes, gathered=x.data_ptr(), keep=run.span > 1,
            pull=False, push=run.transport.pushes,
        )  # fmt: skip
        args.own, args.own_row_stride = x.data_ptr(), problem.k
        base = self.mine.data_ptr()
        due = [
            (base + abi.GATHERED_OFFSET + 4 * (t.visit * abi.MAX_CHUNKS + t.chunk), t.us)
            for t in schedule.arrivals(problem, self.topology, config, run)
        ]
        if by_sms:
            due.append((base + _GATE, due[-1][1] if due else 0.0))
        stream, gemm, graphs = self.stream.cuda_stream, kernel.call(args), self.graphs()
        whole = abi.GatherCall(
            begin=ct.addressof(begin), gemms=ct.addressof(gemm), count=1, graphs=graphs.handle
        )  # fmt: skip
        keep = begin, args, gemm, graphs  # their addresses are in the call

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
                self.support.gather(ct.addressof(whole), stream, self.text)

        return before, queue

    def _scatter(
        self, kernel: FusedKernel, run: RunConfig, a: torch.Tensor, weight: torch.Tensor,
        out: torch.Tensor, present: bool,
    ) -> Queue:  # fmt: skip
        problem, config = self.problem, kernel.kernel
        args = self.gemm(config, run, a, weight)
        reduce = self.reduction(config, run, out)
        base = self.mine.data_ptr()
        # Who visits this rank when it visits its v-th peer: every rank begins with its own next.
        pairs = [
            Departure(
                watched=self.group.peers[t.visit] + abi.ARRIVED_OFFSET + 4 * t.chunk,
                answered=base + abi.ARRIVED_OFFSET
                + 4 * ((problem.tp - t.visit) * abi.MAX_CHUNKS + t.chunk),
                busy_us=t.busy_us, tail_us=t.tail_us,
            )
            for t in schedule.departures(problem, self.topology, config, run)
        ]  # fmt: skip
        # In two shots the reduced rows go out behind them, and a peer's come in when ours are out.
        pairs += [
            Departure(
                watched=self.group.peers[t.visit] + abi.REDUCED_OFFSET,
                answered=base + abi.REDUCED_OFFSET + 4 * (problem.tp - t.visit),
                busy_us=t.busy_us, tail_us=t.tail_us,
            )
            for t in schedule.second_shot(problem, self.topology, run)
        ]  # fmt: skip
        packed = run.transport.packed
        if packed:
            self._send_to_self(args)
            pairs = []
        stream, gemm, graphs = self.stream.cuda_stream, kernel.call(args), self.graphs()
        whole = abi.ScatterCall(gemm=gemm, reduce=ct.addressof(reduce), graphs=graphs.handle)
        keep = reduce, args, gemm, graphs  # their addresses are in the call

        def before() -> None:
            assert keep
            self.epoch += 1
            if not present and not packed:
                self.link.scatter(self.epoch, self.topology.latency_us, pairs)
                self.link.mark(stream, self.epoch)

        def queue() -> None:
            self.support.scatter(ct.addressof(whole), stream, self.text)

        return before, queue

    def _send_to_self(self, args: abi.GemmArgs) -> None:
        """What goes to the p-th peer's slot of this rank goes to this rank's slot of that peer.

        Raises:
            KernelError: slabs are so short that shifted workspaces are not aligned.
        """
        slab = args.rows * args.n * 4
        if slab % 256:
            raise KernelError(
                f"packets of {args.rows} x {args.n}: expected m * n to be a multiple of 64, "
                "or they cannot be imitated on one GPU"
            )
        for peer in range(1, self.problem.tp):
            args.group.peers[peer] = self.mine.data_ptr() + peer * slab

    def finish(self, seconds: float) -> None:
        """Wait for all that was queued.

        Raises:
            CommTimeout: a wait on the GPU passed its deadline. KernelError: the schedule did.
        """
        super().finish(seconds)
        self.link.drain(seconds)
