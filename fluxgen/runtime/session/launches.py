"""The launches of one kind of fused call.

    GatherRun    begin -> [side streams: copies, chunk by chunk] + a GEMM for each weight -> join
    ScatterRun   GEMM (stores into the owners' inboxes, or side streams: copies) -> reduce
                 -> collect, where every rank gets all rows

A run keeps its argument structs and fills in addresses, so a call is one call into C; and there,
outside of captures, one launch: of a CUDA graph with those addresses (docs/adr/0010). What is
allocated are the outputs and, where it is returned or captured, the gathered x, by Torch's caching
allocator.
"""

from __future__ import annotations

import ctypes as ct
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from fluxgen.core.problem import Problem
from fluxgen.kernels.family import panel_limit
from fluxgen.native import abi
from fluxgen.native.arguments import copy_args, gemm_args, reduce_args, row_stride
from fluxgen.native.loader import FusedKernel
from fluxgen.runtime.memory.mapped import Workspace
from fluxgen.runtime.session import dispatch, kernels
from fluxgen.runtime.session.dispatch import Call, Decision, warn_once
from fluxgen.runtime.session.fused import ITEM, Fused

__all__ = ["GRAPHS", "GatherRun", "ScatterRun", "layout_of", "run_of"]

GRAPHS = 128
"""CUDA graphs kept of one kind of call, each for other operands: the layers of a model, 126 in the
deepest that we know, Llama-3.1-405B."""

_ALIGN = 8
"""Elements in the 16 bytes that TMA asks of strides."""

_current_device = torch.cuda.current_device


class _Run:
    """The argument structs of one call on one workspace.

    Args:
        fused: the group's. call: what the ranks agreed on. decision: what they agreed to run.
    """

    def __init__(self, fused: Fused, call: Call, decision: Decision) -> None:
        winner = decision.winner
        assert winner is not None
        self.fused, self.decision, self.winner, self.cut = fused, decision, winner, call.cut
        self.first = winner.problems[0]
        self.dtype = call.dtype
        # Rows as the ranks cut them, and whether the operands' other dims come with them.
        self.plain = call.cut == 0
        rows = self.first.rows_out
        self._lead = (rows // math.prod(call.sizes[1:]), *call.sizes[1:]) if self.plain else (rows,)
        self._generation = -1

    def _current(self) -> Workspace:
        """The group's workspace; the structs are made again if they are for another."""
        fused = self.fused
        workspace = fused.workspace
        assert workspace is not None
        if fused.generation != self._generation:
            self._graphs = fused.graphs(GRAPHS)  # may begin another generation
            self._direct, self._strides = False, ()
            self._build(workspace.group)
            self._generation = fused.generation
        return workspace

    _call: Any
    _graphs: int
    """Handle of the graphs, which ``fused`` owns."""
    _direct: bool
    """Whether the call's struct says to launch one by one."""
    _strides: tuple[int, ...]
    """Row strides of the operands that are in the structs."""

    def _build(self, group: abi.Group) -> None:
        raise NotImplementedError

    def _launch_one_by_one(self, direct: bool) -> None:
        self._call.graphs = None if direct else self._graphs
        self._direct = direct

    def _gemm(self, group: abi.Group, problem: Problem) -> tuple[FusedKernel, abi.GemmArgs]:
        """The kernel and the arguments of a GEMM of this call."""
        winner = self.winner
        kernel = kernels.fused_kernel(problem.signature, winner.kernel, winner.arch)
        # One of several weights may be narrower than the record's panel.
        run = replace(winner.run, panel=min(winner.run.panel, panel_limit(problem, winner.kernel)))
        args = gemm_args(group, problem, winner.kernel, run)
        if run.transport.copies:
            fused = self.fused
            args.sms = min(args.sms or fused.sms, fused.sms - fused.reserved)
        return kernel, args

    def readable(self, x: torch.Tensor, w: torch.Tensor) -> tuple[int, int] | None:
        """Row strides of x and a weight if TMA can read such where they lie, at aligned addresses.

        None: each call has to look, and maybe to copy.
        """
        try:
            rows = x.view(-1, x.shape[-1])
        except RuntimeError:
            return None
        kn = self.first.signature.b_layout == "kn"
        if not self.plain or not _has_rows(rows) or not _has_rows(w.t() if kn else w):
            return None
        return _stride(rows), row_stride(w)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """x as the (rows, K) that the ranks cut along rows, readable by TMA."""
        if not self.plain:
            x = x.movedim(self.cut, 0)
        return _as_tma("x", x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))

    def _shape(self, columns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Size and strides of an output, or of the gathered x, of so many columns."""
        size = (*self._lead, columns)
        return size, torch.empty(size, device="meta").stride()

    def _shaped(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """(rows, N) with the dims that x has, contiguous."""
        if self.plain:
            return out
        other = x.movedim(self.cut, 0).shape[1:-1]
        return out.view(-1, *other, out.shape[-1]).movedim(0, self.cut).contiguous()


class GatherRun(_Run):
    """ag_gemm and a2a_gemm."""

    def _build(self, group: abi.Group) -> None:
        winner, first, fused = self.winner, self.first, self.fused
        by_copies = winner.run.transport.copies
        pushes = winner.run.transport.pushes
        self._begin = abi.BeginArgs(
            group=group, rows=first.m_local, row_bytes=first.k * ITEM,
            pull=not by_copies, push=pushes,
        )  # fmt: skip
        self._copy = copy_args(group, first, winner.kernel, winner.run) if by_copies else None
        self._pushed = self._copy if pushes else None
        self._rank, self._gathered, self._own = group.rank, 0, 0
        self._spans = winner.run.span > 1  # tiles of the own slab hold rows of others too
        self._outs = []  # of each weight: the arguments, size and strides of the output
        self._gemms = (abi.GemmCall * len(winner.problems))()
        for i, problem in enumerate(winner.problems):
            kernel, args = self._gemm(group, problem)
            args.a_row_stride, args.d_row_stride = problem.k, problem.n
            args.ends_call = i == len(winner.problems) - 1
            self._gemms[i] = kernel.call(args)
            self._outs.append((args, *self._shape(problem.n)))
        self._whole = self._shape(first.k)
        self._call = abi.GatherCall(
            begin=ct.addressof(self._begin),
            copy=ct.addressof(self._copy) if self._copy is not None else None,
            gemms=ct.addressof(self._gemms),
            count=len(self._outs),
            awaits=fused.awaits,
            copies=fused.copies,
            flags=fused.flags,
            event=fused.event,
            graphs=self._graphs,
        )
        self._call_at = ct.addressof(self._call)

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
        with self.fused.alone():
            rows = self._rows(x)
            ready = [
                _weight(weight, problem.signature.b_layout)
                for weight, problem in zip(weights, self.winner.problems, strict=True)
            ]  # kept until the launch: some may be copies
            at = [w.data_ptr() for w in ready]
            strides = (_stride(rows), *map(row_stride, ready))
            outs = self._queue(rows.data_ptr(), at, strides, return_gathered)
            for out, bias in zip(outs, biases, strict=False):  # the gathered x has none
                if bias is not None:
                    out.add_(bias)
            return [self._shaped(out, x) for out in outs]

    def fast(
        self,
        strides: tuple[int, int] | None,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        return_gathered: bool,
    ) -> Any:
        """A call with one weight, and operands whose strides are what ``readable`` gave.

        Returns:
            y, or with ``return_gathered`` a pair of that and the gathered x.
        """
        x_at, w_at = x.data_ptr(), w.data_ptr()
        if strides is None or (x_at | w_at) & 15 or _current_device() != self.fused.index:
            outs = self(x, (w,), (bias,), return_gathered)
        else:
            with self.fused.queue.lock:
                outs = self._queue(x_at, (w_at,), strides, return_gathered)
                if bias is not None:
                    outs[0].add_(bias)
        return (outs[0], outs[1]) if return_gathered else outs[0]

    def _queue(
        self,
        x: int,
        weights: Sequence[int],
        strides: tuple[int, ...],
        return_gathered: bool,
    ) -> list[torch.Tensor]:
        """As a call without bias, of addresses and row strides of operands that TMA can read."""
        workspace = self._current()
        fused, begin = self.fused, self._begin
        stream, capturing = fused.enter(workspace)
        dispatch.note(self.decision)
        gathered, address = None, workspace.scratch_at
        if self._pushed is not None:
            address, self._pushed.x = workspace.gathered_at, x
        elif return_gathered or capturing:
            gathered = fused.empty(*self._whole, self.dtype)
            address = gathered.data_ptr()
        if address != self._gathered:
            self._gather_into(address)
        if strides != self._strides:
            self._set_strides(strides)
        own = x + self._own  # of an a2a_gemm this rank's rows of x are the own slab
        begin.x, begin.keep = own, return_gathered or self._spans
        outs = []
        for i, (args, size, stride) in enumerate(self._outs):
            out = fused.empty(size, stride, self.dtype)
            args.own, args.b, args.d = own, weights[i], out.data_ptr()
            outs.append(out)
        if capturing is not self._direct:
            self._launch_one_by_one(capturing)
        fused.support.gather(self._call_at, stream, fused.text)
        if gathered is not None and return_gathered:
            outs.append(gathered)
        return outs

    def _gather_into(self, address: int) -> None:
        self._begin.gathered = address
        if self._copy is not None:
            self._copy.gathered = address
        for args, _, _ in self._outs:
            args.a = address
        self._gathered = address

    def _set_strides(self, strides: tuple[int, ...]) -> None:
        self._begin.row_stride_bytes = strides[0] * ITEM
        if self._pushed is not None:
            self._pushed.row_stride_bytes = strides[0] * ITEM
        if self.first.op.exchanges:
            assert self._pushed is not None
            self._pushed.x_step_bytes = self.first.m_local * strides[0] * ITEM
            self._own = self._rank * self._pushed.x_step_bytes
        for (args, _, _), stride in zip(self._outs, strides[1:], strict=True):
            args.own_row_stride, args.b_row_stride = strides[0], stride
        self._strides = strides


class ScatterRun(_Run):
    """gemm_rs, gemm_ar and gemm_a2a."""

    def __init__(self, fused: Fused, call: Call, decision: Decision) -> None:
        super().__init__(fused, call, decision)
        self.scale = 1.0 / call.tp if call.reduce_op == "avg" else 1.0

    def _build(self, group: abi.Group) -> None:
        first = self.first
        kernel, self._args = self._gemm(group, first)
        self._reduce = reduce_args(group, first, self.winner.kernel, self.winner.run)
        self._reduce.d_row_stride, self._reduce.scale = first.n, self.scale
        # Views into the struct's array: a call sets no more than their addresses.
        self._bias = self._reduce.operands[abi.BIAS]
        self._residual = self._reduce.operands[abi.RESIDUAL]
        self._out = self._shape(first.n)
        self._call = abi.ScatterCall(
            gemm=kernel.call(self._args), reduce=ct.addressof(self._reduce), graphs=self._graphs
        )
        if self.winner.run.transport.copies:
            fused = self.fused
            self._copy = copy_args(group, first, self.winner.kernel, self.winner.run)
            self._call.copy = ct.addressof(self._copy)
            self._call.awaits, self._call.copies = fused.awaits, fused.copies
            self._call.flags, self._call.event = fused.flags, fused.event
        self._call_at = ct.addressof(self._call)

    def __call__(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``scale * (this rank's part of the sum over ranks of x @ w.T) + bias``; or that part of
        each rank's, one behind the other.

        Summed in fp32 in rank order and rounded once: the same bits on every run. Of an all-reduce
        all rows, with the same bits on every rank.

        Args:
            x, w: of the call that the ranks agreed on. bias: (n,). residual: (m, n), of an
                all-reduce: added last, before the rounding.

        Raises:
            CommTimeout: an earlier call of this group did not complete.
        """
        with self.fused.alone():
            rows, weight = self._rows(x), _weight(w, self.first.signature.b_layout)
            strides = (_stride(rows), row_stride(weight))
            at = rows.data_ptr(), weight.data_ptr()
            return self._shaped(self._queue(*at, strides, bias, residual), x)

    def fast(
        self,
        strides: tuple[int, int] | None,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A call with operands whose strides are what ``readable`` gave."""
        x_at, w_at = x.data_ptr(), w.data_ptr()
        if strides is None or (x_at | w_at) & 15 or _current_device() != self.fused.index:
            return self(x, w, bias, residual)
        with self.fused.queue.lock:
            return self._queue(x_at, w_at, strides, bias, residual)

    def _queue(
        self,
        x: int,
        w: int,
        strides: tuple[int, ...],
        bias: torch.Tensor | None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As a call, of addresses and row strides of operands that TMA can read."""
        workspace = self._current()
        fused, args, reduce = self.fused, self._args, self._reduce
        if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % 16):
            bias = bias.clone(memory_format=torch.contiguous_format)
        if residual is not None and (not residual.is_contiguous() or residual.data_ptr() % 16):
            residual = residual.clone(memory_format=torch.contiguous_format)
        stream, capturing = fused.enter(workspace)
        dispatch.note(self.decision)
        out = fused.empty(*self._out, self.dtype)
        if strides != self._strides:
            args.a_row_stride, args.b_row_stride = strides
            self._strides = strides
        args.a, args.b, reduce.d = x, w, out.data_ptr()
        self._bias.data = None if bias is None else bias.data_ptr()
        self._residual.data = None if residual is None else residual.data_ptr()
        if capturing is not self._direct:
            self._launch_one_by_one(capturing)
        fused.support.scatter(self._call_at, stream, fused.text)
        return out


def run_of(fused: Fused, call: Call, decision: Decision) -> GatherRun | ScatterRun:
    """The launches of a call that has been agreed on and prepared."""
    kind = GatherRun if call.op.gathers else ScatterRun
    return kind(fused, call, decision)


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
