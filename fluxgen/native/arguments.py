"""From a problem and its configuration to the argument structs of the compiled libraries."""

from __future__ import annotations

from typing import Any

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Transport
from fluxgen.core.problem import Problem
from fluxgen.native import abi
from fluxgen.native.workspace import chunk_size

PATIENCE = 1.25
"""Deadline of a gathering GEMM over that of its transport. The GEMM waits for this rank's own
copies, which come one after the other: were it the first to give up, it would name whichever peer
is behind the late one. Seen on a GPU: with rank 2 of 3 killed, rank 1 named rank 0."""

_KINDS = {
    Transport.COPY_ENGINE_PULL: abi.PULL,
    Transport.COPY_ENGINE_PUSH: abi.PUSH,
    Transport.COPY_ENGINE_DRAIN: abi.DRAIN,
    Transport.COPY_ENGINE_RING: abi.RING,
}

__all__ = ["PATIENCE", "copy_args", "gemm_args", "reduce_args", "row_stride"]


def gemm_args(
    group: abi.Group, problem: Problem, kernel: KernelConfig, run: RunConfig
) -> abi.GemmArgs:
    """All of a GEMM's arguments but its operands; ``sms`` as the configuration has it.

    An ag_gemm is taken for the last of its call.
    """
    args = abi.GemmArgs(group=group)
    args.rows, args.n, args.k = problem.m_local, problem.n, problem.k
    args.chunk_axis = abi.CHUNK_AXES[run.chunk_axis.value]
    args.chunk_size = chunk_size(problem, kernel, run)
    args.group_count = len(run.groups)
    for i, size in enumerate(run.groups):
        args.groups[i] = size
    args.panel, args.span, args.sms = run.panel, run.span, run.sms
    args.split = run.split
    if problem.op.gathers:
        args.ends_call, args.cut = 1, run.cut
        args.group.timeout_ns = int(group.timeout_ns * PATIENCE)
    else:
        if run.transport.packed:
            args.sends = abi.PACKETS_TO_OWNERS
        if run.transport.in_one_shot:
            args.rows, args.sends = problem.m, args.sends + abi.TO_ALL
        args.drain = run.transport is Transport.COPY_ENGINE_DRAIN
    return args


def reduce_args(
    group: abi.Group, problem: Problem, kernel: KernelConfig, run: RunConfig
) -> abi.ReduceArgs:
    """All of a reduction's arguments but its operands; the sum is not scaled."""
    args = abi.ReduceArgs(group=group, rows=problem.m_local, n=problem.n, scale=1.0)
    args.chunk_rows = chunk_size(problem, kernel, run)
    args.dtype = abi.DTYPES[problem.signature.dtype.value]
    for operand in args.operands:
        operand.dtype = args.dtype
    args.operands[abi.RESIDUAL].row_stride = problem.n
    args.drain = run.transport is Transport.COPY_ENGINE_DRAIN
    args.packed = run.transport.packed
    if not problem.op.reduces:
        args.shares = abi.EXCHANGE
    elif problem.op.shares:
        args.shares = abi.TWO_SHOTS
        if run.transport.in_one_shot:
            args.rows, args.shares = problem.m, abi.ONE_SHOT
    return args


def copy_args(
    group: abi.Group, problem: Problem, kernel: KernelConfig, run: RunConfig
) -> abi.CopyArgs:
    """A copy-engine transport; of an ag_gemm but for the addresses of its operands."""
    size, item = chunk_size(problem, kernel, run), problem.signature.dtype.bytes
    columns = problem.k if problem.op.gathers else problem.n
    return abi.CopyArgs(
        group=group,
        row_stride_bytes=columns * item,
        rows=problem.m_local,
        row_bytes=columns * item,
        chunk_size=size * item if run.chunk_axis is ChunkAxis.K else size,
        chunk_axis=abi.CHUNK_AXES[run.chunk_axis.value],
        cut=run.cut,
        kind=_KINDS[run.transport],
    )


def row_stride(weight: Any) -> int:
    """Elements between the rows of a weight (n, k), or of the (k, n) that it transposes."""
    return int(weight.stride(0) if weight.stride(1) == 1 else weight.stride(1))
