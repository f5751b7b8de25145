"""The C ABI of compiled libraries, read from ``abi.h``, ``calls.h`` and headers of ``protocol``.

What those headers in ``templates/include/fluxgen`` declare is said there alone; this module gives
it the names that Python uses. A test compiles the headers and compares sizes and offsets.
"""

from __future__ import annotations

import ctypes as ct

from fluxgen.core.errors import CommTimeout
from fluxgen.core.problem import Signature
from fluxgen.core.settings import data_dir
from fluxgen.native.layout import read_layout


class _Versioned(ct.Structure):
    """An argument struct: its first two fields are filled in on construction."""

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)
        self.abi_version = self.version()
        self.struct_size = ct.sizeof(type(self))

    @classmethod
    def version(cls) -> int:
        """That of the libraries which take it."""
        return CALLS_VERSION


class _OfGemm(_Versioned):
    @classmethod
    def version(cls) -> int:
        return ABI_VERSION


class Operand(ct.Structure):
    """``fluxgen_operand``: what an epilogue reads beside the sum."""


class Report(ct.Structure):
    """``fluxgen_report``: what a wait that passed its deadline leaves."""


class Group(ct.Structure):
    """``fluxgen_group``: one rank's view of its group."""


class GemmArgs(_OfGemm):
    """``fluxgen_gemm_args``: one fused GEMM."""


class ReduceArgs(_Versioned):
    """``fluxgen_reduce_args``: what ends a gemm_rs."""


class BeginArgs(_Versioned):
    """``fluxgen_begin_args``: what starts an ag_gemm."""


class CopyArgs(_Versioned):
    """``fluxgen_copy_args``: a copy-engine transport."""


class GemmCall(ct.Structure):
    """``fluxgen_gemm_call``: one library's functions, for the support library to call."""


class GatherCall(_Versioned):
    """``fluxgen_gather_call``: a whole ag_gemm."""


class ScatterCall(_Versioned):
    """``fluxgen_scatter_call``: a whole gemm_rs."""


class KernelInfo(_OfGemm):
    """``fluxgen_kernel_info``: what a library holds."""


STRUCTS: dict[str, type[ct.Structure]] = {
    "fluxgen_report": Report,
    "fluxgen_group": Group,
    "fluxgen_operand": Operand,
    "fluxgen_gemm_args": GemmArgs,
    "fluxgen_reduce_args": ReduceArgs,
    "fluxgen_begin_args": BeginArgs,
    "fluxgen_copy_args": CopyArgs,
    "fluxgen_gemm_call": GemmCall,
    "fluxgen_gather_call": GatherCall,
    "fluxgen_scatter_call": ScatterCall,
    "fluxgen_kernel_info": KernelInfo,
}

HEADERS = tuple(
    data_dir("templates") / "include" / "fluxgen" / name
    for name in ("abi.h", "calls.h", "protocol/layout.cuh", "protocol/flags.cuh")
)
LAYOUT = read_layout(HEADERS, STRUCTS)
_CONSTANTS = LAYOUT.constants

ABI_VERSION = _CONSTANTS["FLUXGEN_ABI_VERSION"]
"""Of compiled GEMMs."""
CALLS_VERSION = _CONSTANTS["FLUXGEN_CALLS_VERSION"]
"""Of the support library. A change of it compiles no GEMM again."""
MAX_WORLD = _CONSTANTS["FLUXGEN_MAX_WORLD"]
MAX_CHUNKS = _CONSTANTS["FLUXGEN_MAX_CHUNKS"]

EPOCH_OFFSET = _CONSTANTS["kEpochOffset"]
ABORTED_OFFSET = _CONSTANTS["kAbortedOffset"]
BEGUN_OFFSET = _CONSTANTS["kBegunOffset"]
MULTIPLIED_OFFSET = _CONSTANTS["kMultipliedOffset"]
READY_OFFSET = _CONSTANTS["kReadyOffset"]
PULLED_OFFSET = _CONSTANTS["kPulledOffset"]
ARRIVED_OFFSET = _CONSTANTS["kArrivedOffset"]
GATHERED_OFFSET = _CONSTANTS["kGatheredOffset"]
COUNTERS_OFFSET = _CONSTANTS["kCountersOffset"]
CONSUMED_OFFSET = _CONSTANTS["kConsumedOffset"]
REDUCED_OFFSET = _CONSTANTS["kReducedOffset"]
DATA_OFFSET = _CONSTANTS["kDataOffset"]
"""Byte offsets inside a workspace; drawn in ``protocol/layout.cuh``."""

PEER_ABORTED = _CONSTANTS["kPeerAborted"]
"""``Report.code`` where not this rank's wait but a peer's passed its deadline."""

OPS = LAYOUT.members("fluxgen_op")
DTYPES = LAYOUT.members("fluxgen_dtype")
OPERANDS = LAYOUT.members("fluxgen_operand_kind")
BIAS, RESIDUAL = OPERANDS["bias"], OPERANDS["residual"]
"""Places in an array of operands."""
CHUNK_AXES = LAYOUT.members("fluxgen_chunk_axis", "FLUXGEN_CHUNK_")

PULL, PUSH = _CONSTANTS["FLUXGEN_PULL"], _CONSTANTS["FLUXGEN_PUSH"]
DRAIN, RING = _CONSTANTS["FLUXGEN_DRAIN"], _CONSTANTS["FLUXGEN_RING"]
"""``enum fluxgen_copies``."""
TWO_SHOTS, ONE_SHOT = _CONSTANTS["FLUXGEN_TWO_SHOTS"], _CONSTANTS["FLUXGEN_ONE_SHOT"]
EXCHANGE = _CONSTANTS["FLUXGEN_EXCHANGE"]
"""``enum fluxgen_shares``."""
TO_OWNERS, TO_ALL = _CONSTANTS["FLUXGEN_TO_OWNERS"], _CONSTANTS["FLUXGEN_TO_ALL"]
PACKETS_TO_OWNERS = _CONSTANTS["FLUXGEN_PACKETS_TO_OWNERS"]
PACKETS_TO_ALL = _CONSTANTS["FLUXGEN_PACKETS_TO_ALL"]
"""``enum fluxgen_sends``."""

_WAITERS = {
    OPS["ag_gemm"]: "ag_gemm",
    OPS["gemm_rs"]: "gemm_rs",
    _CONSTANTS["FLUXGEN_REDUCTION"]: "gemm_rs (reduction)",
    _CONSTANTS["FLUXGEN_TRANSPORT"]: "transport",
    _CONSTANTS["FLUXGEN_COLLECTION"]: "all-reduce",
}


def described(signature: Signature) -> dict[str, int]:
    """Fields of :class:`KernelInfo` that a library of ``signature`` must have."""
    part = signature.compiled
    return {
        "op": OPS[part.op.value],
        "dtype": DTYPES[part.dtype.value],
        "out_dtype": DTYPES[part.out_dtype.value],
        "b_transposed": int(part.b_layout == "kn"),
        "epilogue": sum(1 << OPERANDS[operand.value] for operand in part.epilogue.operands),
    }


def as_error(report: Report) -> CommTimeout:
    """A report whose ``code`` is not zero, as an error."""
    return CommTimeout(
        _WAITERS.get(report.op, str(report.op)),
        report.rank,
        report.peer,
        report.chunk,
        report.expected,
        report.seen,
        by_peer=report.code == PEER_ABORTED,
    )
