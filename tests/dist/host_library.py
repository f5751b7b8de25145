"""The fused path without a GPU: libraries that do on the host what the compiled ones do.

They read the same argument structs, by address, that the runtime hands to C, so a wrong address,
stride, size or layout gives a wrong result here as it would on the device. The exchange between
ranks goes over gloo; workspaces, streams and events are stand-ins.
"""

from __future__ import annotations

import ctypes as ct
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from fluxgen.codegen.space import why_illegal
from fluxgen.core.config import KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.native import abi
from fluxgen.native.workspace import Sizes, group_view
from fluxgen.runtime.memory import mapped
from fluxgen.runtime.session import dispatch, fused, groups, kernels
from fluxgen.runtime.session import launches as runs
from fluxgen.runtime.session.dispatch import Call, Cause, Decision, Winner

KERNEL = KernelConfig(64, 96, 64, 2, 1, Schedule.PINGPONG)
FLAT = KernelConfig(16, 64, 128, 1, 1, Schedule.FLAT)


def matrix(address: int, rows: int, columns: int, stride: int) -> torch.Tensor:
    """A bf16 matrix where it lies in memory."""
    assert address % 16 == 0, "TMA reads addresses that are multiples of 16 bytes"
    assert stride % 8 == 0, "TMA reads strides that are multiples of 16 bytes"
    assert stride >= columns
    size = (rows - 1) * stride + columns
    flat = torch.frombuffer((ct.c_uint16 * size).from_address(address), dtype=torch.bfloat16)
    return flat.as_strided((rows, columns), (stride, 1))


class Kernel:
    """A fused GEMM; the "address" of its launcher is its place in a list."""

    made: list[Kernel] = []

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.made.append(self)
        self.place = len(self.made)

    def call(self, args: abi.GemmArgs) -> abi.GemmCall:
        return abi.GemmCall(launch=self.place, args=ct.addressof(args))

    def weight(self, args: abi.GemmArgs) -> torch.Tensor:
        if self.signature.b_layout == "nk":
            return matrix(args.b, args.n, args.k, args.b_row_stride)
        return matrix(args.b, args.k, args.n, args.b_row_stride).t()


class Support:
    """The support library of one group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.calls: list[str] = []

    def order(self, before: int, after: int, event: int) -> None:
        self.calls.append("order")

    def graphs(self, most: int, left: ct.c_int64) -> Any:
        return mock.Mock(handle=most)

    def gather(self, call: int, stream: int, text: Any) -> None:
        c = abi.GatherCall.from_address(call)
        begin = abi.BeginArgs.from_address(c.begin)
        columns, world = begin.row_bytes // 2, begin.group.world
        slab = begin.rows * begin.row_bytes
        if begin.push:
            assert slab * world <= begin.group.gathered_bytes
        else:
            assert slab <= begin.group.stage_bytes
        x = matrix(begin.x, begin.rows, columns, begin.row_stride_bytes // 2)
        step = abi.CopyArgs.from_address(c.copy).x_step_bytes if c.copy else 0
        gathered = matrix(begin.gathered, begin.rows * world, columns, columns)
        parts = [torch.empty(begin.rows, columns).bfloat16() for _ in range(world)]
        if step:
            base, stride = begin.x - begin.group.rank * step, begin.row_stride_bytes // 2
            sent = [matrix(base + p * step, begin.rows, columns, stride) for p in range(world)]
            every = [torch.empty(begin.rows * world, columns).bfloat16() for _ in range(world)]
            dist.all_gather(every, torch.cat(sent), group=self.group)
            parts = [other.chunk(world)[begin.group.rank] for other in every]
        else:
            dist.all_gather(parts, x.contiguous(), group=self.group)
        gathered.copy_(torch.cat(parts))
        mine = slice(begin.group.rank * begin.rows, (begin.group.rank + 1) * begin.rows)
        if not begin.keep:
            gathered[mine] = float("nan")
        assert c.graphs, "no capture is going on"
        self.calls.append("pushes" if begin.push else "pulls" if c.copy else "sm copy")
        assert bool(begin.pull) != bool(c.copy)
        if c.copy:
            copy = abi.CopyArgs.from_address(c.copy)
            assert (copy.kind in (abi.PUSH, abi.RING)) == bool(begin.push)
            assert copy.gathered == begin.gathered
            assert (copy.rows, copy.row_bytes) == (begin.rows, begin.row_bytes)
            if begin.push:
                assert copy.x + begin.group.rank * step == begin.x
                assert copy.row_stride_bytes == begin.row_stride_bytes
                assert step in (0, begin.rows * begin.row_stride_bytes)
        gemms = (abi.GemmCall * c.count).from_address(c.gemms)
        for i, gemm in enumerate(gemms):
            args = abi.GemmArgs.from_address(gemm.args)
            assert args.rows * world == gathered.shape[0]
            assert bool(args.ends_call) == (i == c.count - 1)
            a = matrix(args.a, args.rows * world, args.k, args.a_row_stride)
            if args.span <= 1:
                a = a.clone()
                a[mine] = matrix(args.own, args.rows, args.k, args.own_row_stride)
            d = matrix(args.d, args.rows * world, args.n, args.d_row_stride)
            w = Kernel.made[gemm.launch - 1].weight(args)
            d.copy_((a.float() @ w.float().t()).bfloat16())

    def scatter(self, call: int, stream: int, text: Any) -> None:
        c = abi.ScatterCall.from_address(call)
        args = abi.GemmArgs.from_address(c.gemm.args)
        reduce = abi.ReduceArgs.from_address(c.reduce)
        world = args.group.world
        assert (args.rows, args.n) == (reduce.rows, reduce.n)
        slabs = args.rows * world * args.n * 2
        if c.copy:
            copy = abi.CopyArgs.from_address(c.copy)
            assert (copy.kind, args.drain, reduce.drain) == (abi.DRAIN, 1, 1)
            assert (copy.rows, copy.row_bytes) == (args.rows, args.n * 2)
            assert copy.chunk_size == args.chunk_size == reduce.chunk_rows
            assert slabs <= args.group.drained_bytes
        else:
            assert args.drain == reduce.drain == 0
            packed = args.sends >= abi.PACKETS_TO_OWNERS
            assert (2 * slabs if packed else slabs) <= (
                args.group.packet_bytes if packed else args.group.half_bytes
            )
        one_shot = args.sends in (abi.TO_ALL, abi.PACKETS_TO_ALL)
        count = args.rows if one_shot else args.rows * world
        a = matrix(args.a, count, args.k, args.a_row_stride)
        w = Kernel.made[c.gemm.launch - 1].weight(args)
        partial = (a.float() @ w.float().t()).bfloat16()
        parts = [torch.empty_like(partial) for _ in range(world)]
        dist.all_gather(parts, partial, group=self.group)
        rows = slice(args.group.rank * args.rows, (args.group.rank + 1) * args.rows)
        assert one_shot == (reduce.shares == abi.ONE_SHOT)
        assert reduce.packed == (args.sends >= abi.PACKETS_TO_OWNERS)
        if reduce.shares == abi.EXCHANGE:
            matrix(reduce.d, world * args.rows, args.n, args.n).copy_(
                torch.cat([part[rows] for part in parts])
            )
            self.calls.append("exchanges, " + ("drains" if c.copy else "stores"))
            return
        if reduce.shares:
            assert one_shot or slabs <= args.group.result_bytes
            rows = slice(None)
        total = sum(part[rows].float() for part in parts) * reduce.scale
        bias, residual = (reduce.operands[kind].data for kind in (abi.BIAS, abi.RESIDUAL))
        if bias:
            total = total + matrix(bias, 1, args.n, args.n)[0].float()
        if residual:
            assert reduce.shares
            total = total + matrix(residual, len(total), args.n, args.n).float()
        matrix(reduce.d, len(total), args.n, reduce.d_row_stride).copy_(total.bfloat16())
        assert c.graphs, "no capture is going on"
        how = ("", "shares, ", "one shot, ")[reduce.shares] + "packets, " * reduce.packed
        self.calls.append(how + ("drains" if c.copy else "stores"))


def empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(size, float("nan"), dtype=dtype).as_strided(size, stride)


class Local:
    """A rank's own part of a workspace: only the scratch and the matrix are memory."""

    ticket = None

    def __init__(self, device: Any, sizes: Sizes, scratch: int) -> None:
        self.sizes = sizes
        self.matrix = torch.empty(max(16, sizes.gathered), dtype=torch.uint8)
        self.scratch = torch.empty(max(16, scratch), dtype=torch.uint8)

    def join(self, group, tickets, prefix, timeout_s):
        return Workspace(group, self, prefix, timeout_s)


class Workspace:
    """A workspace of no memory."""

    def __init__(self, group: dist.ProcessGroup, local: Local, prefix: str, timeout_s: float):
        self.sizes, self.scratch, self.matrix = local.sizes, local.scratch, local.matrix
        self.scratch_at, self.gathered_at = local.scratch.data_ptr(), local.matrix.data_ptr()
        self.captured, self.prefix, self.report = False, prefix, abi.Report()
        self.group = group_view(group.rank(), [0] * group.size(), local.sizes, timeout_s, 0)

    timed_out = mapped.Workspace.timed_out


def decide(call: Call, transport: Transport = Transport.COPY_ENGINE_PULL) -> Decision:
    """As ``dispatch.decide`` on a machine where every legal call has a record and a kernel."""
    gathers, kernel = call.op.gathers, KERNEL
    if call.op is Op.A2A_GEMM:
        transport = Transport.COPY_ENGINE_PUSH
    if call.return_gathered and transport.pushes:
        transport = Transport.COPY_ENGINE_PULL
    in_one = call.op is Op.GEMM_AR and transport.in_one_shot
    few = in_one or (call.op is Op.GEMM_RS and transport is Transport.PEER_PACKETS)
    if not gathers and not few:
        pulls = transport is Transport.COPY_ENGINE_PULL
        transport = Transport.COPY_ENGINE_DRAIN if pulls else Transport.PEER_STORE
    run = RunConfig(transport=transport)
    if few:
        kernel, run = FLAT, RunConfig((call.tp,), transport=transport, span=call.tp)
    plain = Signature.of(call.op)
    reason, problems = "", []
    if call.dtype is not torch.bfloat16 or call.tp == 1 or min(call.m, *call.ns, call.k) == 0:
        reason = "nothing for a kernel"
    elif (call.sizes[call.cut] % call.tp and not in_one) or call.bias == "partial":
        reason = "no kernel"
    else:
        for n, layout in zip(call.ns, call.layouts, strict=True):
            signature = Signature(plain.op, plain.dtype, plain.out_dtype, layout)
            problems.append(Problem(signature, call.m, n, call.k, call.tp))
            reason = (
                reason
                or why_illegal(
                    problems[-1], Topology.of("h100-sxm", "nvlink", call.tp), kernel, run
                )
                or ""
            )
    if reason:
        return Decision("unfused", reason, call.key, Cause.NO_RECORD)
    winner = Winner(tuple(problems), kernel, run, "sm90", ("key",))
    return Decision("fused", "a record", call.key, Cause.FUSED, winner)


@contextmanager
def host_library(
    group: dist.ProcessGroup, transport: Transport = Transport.COPY_ENGINE_PULL
) -> Any:
    """Calls of ``group`` on CPU tensors take the fused path inside; yields its Support."""
    support = Support(group)
    state = groups.state_of(group)

    def make(device: torch.device, arch: str) -> fused.Fused:
        made = object.__new__(fused.Fused)
        made.device, made.support, made.sms, made.reserved = device, support, 132, 2
        made.index, made.empty, made.text = -1, empty, None
        made.queue = fused.Queue()
        made.workspace, made._kept, made._of_runs = None, [], []
        made.generation, made.graphs_left = 0, ct.c_int64(8)
        made.awaits = made.copies = made.flags = made.event = made._ordered = 1
        made._broken = None
        return made

    state.fused = None
    state._entries.clear()
    state.fast.clear()
    with (
        mock.patch.object(dispatch, "decide", lambda call: decide(call, transport)),
        mock.patch.object(groups, "Fused", make),
        mock.patch.object(fused, "SymmetricPart", Local),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: mock.Mock(uuid="g")),
        mock.patch.object(kernels, "fused_kernel", lambda s, kernel, arch: Kernel(s)),
        mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda index: 3, create=True),
        mock.patch.object(fused, "_is_capturing", lambda: False),
        mock.patch.object(torch.cuda, "synchronize", lambda device=None: None),
        mock.patch.object(fused, "_current_device", lambda: -1),
        mock.patch.object(runs, "_current_device", lambda: -1),
        mock.patch.object(groups, "_capturing", lambda device: False),
    ):
        try:
            yield support
        finally:
            state.fused = None
            state._entries.clear()
            state.fast.clear()
