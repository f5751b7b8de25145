"""The C ABI of compiled libraries as ctypes: mirrors ``abi.h`` and ``calls.h`` in
``templates/include/fluxgen``.

A test compiles the headers and compares every size and offset with these.
"""

from __future__ import annotations

import ctypes as ct

from fluxgen.core.errors import CommTimeout

ABI_VERSION = 9
MAX_WORLD = 16
MAX_CHUNKS = 16

EPOCH_OFFSET = 0
ABORTED_OFFSET = 4
BEGUN_OFFSET = 16
MULTIPLIED_OFFSET = 20
STAGED_OFFSET = 28
SENT_OFFSET = 32
DRAINED_OFFSET = 36
READY_OFFSET = 256
PULLED_OFFSET = 384
ARRIVED_OFFSET = 512
GATHERED_OFFSET = 1536
COUNTERS_OFFSET = 2560
FILLED_OFFSET = 3584
CONSUMED_OFFSET = 4608
REDUCED_OFFSET = 4672
DATA_OFFSET = 5120
"""Byte offsets inside a workspace; drawn in ``protocol.cuh``."""

PEER_ABORTED = 2
"""``Report.code`` where not this rank's wait but a peer's passed its deadline."""

OPS = {"ag_gemm": 0, "gemm_rs": 1}
OP_NAMES = {
    0: "ag_gemm", 1: "gemm_rs", 2: "gemm_rs (reduction)", 3: "transport", 4: "all-reduce",
}  # fmt: skip
DTYPES = {"bf16": 0, "fp16": 1}
B_LAYOUTS = {"nk": 0, "kn": 1}
CHUNK_AXES = {"m": 0, "k": 1}
PULL, PUSH, DRAIN, RING = 0, 1, 2, 3
"""``enum fluxgen_copies``."""
TWO_SHOTS, ONE_SHOT, EXCHANGE = 1, 2, 3
"""``enum fluxgen_shares``."""
TO_OWNERS, TO_ALL, PACKETS_TO_OWNERS, PACKETS_TO_ALL = 0, 1, 2, 3
"""``enum fluxgen_sends``."""


class _Struct(ct.Structure):
    """A versioned argument struct: the first two fields are filled in on construction."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)
        if hasattr(self, "abi_version"):
            self.abi_version = ABI_VERSION
            self.struct_size = ct.sizeof(type(self))


class Report(ct.Structure):
    """``fluxgen_report``: what a wait that passed its deadline leaves."""

    _fields_ = [
        (name, ct.c_uint32)
        for name in ("code", "op", "rank", "peer", "chunk", "expected", "seen", "reserved")
    ]


def as_error(report: Report) -> CommTimeout:
    """A report whose ``code`` is not zero, as an error."""
    return CommTimeout(
        OP_NAMES.get(report.op, str(report.op)),
        report.rank,
        report.peer,
        report.chunk,
        report.expected,
        report.seen,
        by_peer=report.code == PEER_ABORTED,
    )


class Group(ct.Structure):
    """``fluxgen_group``: one rank's view of its group."""

    _fields_ = [
        ("world", ct.c_int32),
        ("rank", ct.c_int32),
        ("stage_bytes", ct.c_int64),
        ("half_bytes", ct.c_int64),
        ("gathered_bytes", ct.c_int64),
        ("drained_bytes", ct.c_int64),
        ("result_bytes", ct.c_int64),
        ("packet_bytes", ct.c_int64),
        ("peers", ct.c_void_p * MAX_WORLD),
        ("timeout_ns", ct.c_uint64),
        ("report", ct.c_void_p),
    ]


_VERSION = [("abi_version", ct.c_uint32), ("struct_size", ct.c_uint32)]


class GemmArgs(_Struct):
    """``fluxgen_gemm_args``."""

    _fields_ = [
        *_VERSION,
        ("group", Group),
        ("rows", ct.c_int64),
        ("n", ct.c_int64),
        ("k", ct.c_int64),
        ("a", ct.c_void_p),
        ("a_row_stride", ct.c_int64),
        ("b", ct.c_void_p),
        ("b_row_stride", ct.c_int64),
        ("d", ct.c_void_p),
        ("d_row_stride", ct.c_int64),
        ("chunk_axis", ct.c_int32),
        ("group_count", ct.c_int32),
        ("groups", ct.c_int32 * MAX_WORLD),
        ("panel", ct.c_int32),
        ("chunk_size", ct.c_int64),
        ("sms", ct.c_int32),
        ("span", ct.c_int32),
        ("own", ct.c_void_p),
        ("own_row_stride", ct.c_int64),
        ("ends_call", ct.c_int32),
        ("cut", ct.c_int32),
        ("drain", ct.c_int32),
        ("split", ct.c_int32),
        ("sends", ct.c_int32),
        ("reserved", ct.c_uint32),
    ]


class ReduceArgs(_Struct):
    """``fluxgen_reduce_args``."""

    _fields_ = [
        *_VERSION,
        ("group", Group),
        ("rows", ct.c_int64),
        ("n", ct.c_int64),
        ("chunk_rows", ct.c_int64),
        ("d", ct.c_void_p),
        ("d_row_stride", ct.c_int64),
        ("bias", ct.c_void_p),
        ("residual", ct.c_void_p),
        ("scale", ct.c_float),
        ("dtype", ct.c_int32),
        ("blocks", ct.c_int32),
        ("drain", ct.c_int32),
        ("shares", ct.c_int32),
        ("packed", ct.c_int32),
    ]


class BeginArgs(_Struct):
    """``fluxgen_begin_args``."""

    _fields_ = [
        *_VERSION,
        ("group", Group),
        ("x", ct.c_void_p),
        ("rows", ct.c_int64),
        ("row_bytes", ct.c_int64),
        ("row_stride_bytes", ct.c_int64),
        ("gathered", ct.c_void_p),
        ("blocks", ct.c_int32),
        ("pull", ct.c_int32),
        ("keep", ct.c_int32),
        ("push", ct.c_int32),
    ]


class CopyArgs(_Struct):
    """``fluxgen_copy_args``."""

    _fields_ = [
        *_VERSION,
        ("group", Group),
        ("gathered", ct.c_void_p),
        ("x", ct.c_void_p),
        ("row_stride_bytes", ct.c_int64),
        ("x_step_bytes", ct.c_int64),
        ("rows", ct.c_int64),
        ("row_bytes", ct.c_int64),
        ("chunk_size", ct.c_int64),
        ("chunk_axis", ct.c_int32),
        ("cut", ct.c_int32),
        ("kind", ct.c_int32),
        ("reserved", ct.c_uint32),
    ]


class GemmCall(ct.Structure):
    """``fluxgen_gemm_call``: one library's functions, for the support library to call."""

    _fields_ = [("launch", ct.c_void_p), ("update", ct.c_void_p), ("args", ct.c_void_p)]


class GatherCall(_Struct):
    """``fluxgen_gather_call``."""

    _fields_ = [
        *_VERSION,
        ("begin", ct.c_void_p),
        ("copy", ct.c_void_p),
        ("gemms", ct.c_void_p),
        ("count", ct.c_int64),
        ("awaits", ct.c_void_p),
        ("copies", ct.c_void_p),
        ("flags", ct.c_void_p),
        ("event", ct.c_void_p),
        ("graphs", ct.c_void_p),
    ]


class ScatterCall(_Struct):
    """``fluxgen_scatter_call``."""

    _fields_ = [
        *_VERSION,
        ("gemm", GemmCall),
        ("reduce", ct.c_void_p),
        ("copy", ct.c_void_p),
        ("awaits", ct.c_void_p),
        ("copies", ct.c_void_p),
        ("flags", ct.c_void_p),
        ("event", ct.c_void_p),
        ("graphs", ct.c_void_p),
    ]


class KernelInfo(_Struct):
    """``fluxgen_kernel_info``."""

    _fields_ = [
        *_VERSION,
        ("op", ct.c_int32),
        ("dtype", ct.c_int32),
        ("tile_m", ct.c_int32),
        ("tile_n", ct.c_int32),
        ("tile_k", ct.c_int32),
        ("cluster_m", ct.c_int32),
        ("cluster_n", ct.c_int32),
        ("cooperative", ct.c_int32),
        ("stages", ct.c_int32),
        ("smem_bytes", ct.c_int32),
        ("b_transposed", ct.c_int32),
        ("warps", ct.c_int32),
        ("flat", ct.c_int32),
    ]


STRUCTS: dict[str, type[ct.Structure]] = {
    "fluxgen_report": Report,
    "fluxgen_group": Group,
    "fluxgen_gemm_args": GemmArgs,
    "fluxgen_reduce_args": ReduceArgs,
    "fluxgen_begin_args": BeginArgs,
    "fluxgen_copy_args": CopyArgs,
    "fluxgen_gemm_call": GemmCall,
    "fluxgen_gather_call": GatherCall,
    "fluxgen_scatter_call": ScatterCall,
    "fluxgen_kernel_info": KernelInfo,
}
