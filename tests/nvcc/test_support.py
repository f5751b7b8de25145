"""The support library: a real compile, and what it refuses on the host before a launch."""

from __future__ import annotations

import ctypes as ct

import pytest

from fluxgen.codegen.render import render_support
from fluxgen.compiler.store import Store
from fluxgen.core.errors import KernelError
from fluxgen.native import abi
from fluxgen.native.loader import ErrorText, SupportKernels
from fluxgen.runtime.session.kernels import source_of

pytestmark = [pytest.mark.nvcc, pytest.mark.timeout(300)]

ADDRESS = 1 << 22


@pytest.fixture(scope="module")
def support(tmp_path_factory, toolchain):
    store = Store(tmp_path_factory.mktemp("store") / "s")
    artifact = store.build(source_of(render_support("sm90")), toolchain)
    assert all((f.spill_stores, f.spill_loads) == (0, 0) for f in artifact.facts)
    return SupportKernels(artifact.path)


def group(**changes):
    v = {"world": 4, "rank": 1, "stage": 1 << 20, "half": 1 << 20, "peer": ADDRESS, **changes}
    made = abi.Group(world=v["world"], rank=v["rank"], stage_bytes=v["stage"], half_bytes=v["half"])
    made.gathered_bytes = made.drained_bytes = made.result_bytes = 4 << 20
    for peer in range(4):
        made.peers[peer] = v["peer"]
    return made


def begin(**changes):
    v = {"x": ADDRESS, "rows": 8, "row_bytes": 256, "row_stride_bytes": 256, "gathered": ADDRESS}
    return abi.BeginArgs(**{"group": group(), **v, **changes})


def pull(**changes):
    v = {"gathered": ADDRESS, "rows": 8, "row_bytes": 256, "chunk_size": 0, "chunk_axis": 0}
    return abi.CopyArgs(**{"group": group(), **v, **changes})


def push(**changes):
    v = {"gathered": 0, "x": ADDRESS, "row_stride_bytes": 256, "kind": abi.PUSH}
    return pull(**{**v, **changes})


def drain(**changes):
    return pull(**{"gathered": 0, "kind": abi.DRAIN, **changes})


def reduce(**changes):
    v = {"rows": 8, "n": 64, "d": ADDRESS, "d_row_stride": 64, "scale": 1.0, **changes}
    given = {kind: v.pop(kind) for kind in abi.OPERANDS if kind in v}
    stride, dtype = v.pop("stride", 64), v.pop("of", 0)
    args = abi.ReduceArgs(**{"group": group(), **v})
    for kind, data in given.items():
        place = args.operands[abi.OPERANDS[kind]]
        place.data, place.row_stride, place.dtype = data, stride, dtype
    return args


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (begin(x=ADDRESS + 2), "16-byte aligned"),
        (begin(rows=0), "x:"),
        (begin(row_bytes=250), "x:"),
        (begin(row_stride_bytes=128), "x:"),
        (begin(gathered=0, keep=1), "gathered:"),
        (begin(gathered=0, pull=1), "gathered:"),
        (begin(rows=1 << 20), "do not fit the workspace"),
        (begin(rows=1 << 13, push=1), "do not fit the workspace"),
        (begin(pull=1, push=1), "at most one"),
        (begin(group=group(world=17)), "world <= 16"),
        (begin(group=group(rank=4)), "rank < world"),
        (begin(group=group(peer=0)), "address is null"),
        (pull(gathered=8), "gathered:"),
        (pull(chunk_size=-1), "multiple of 16"),
        (pull(cut=5), "at most world"),
        (pull(rows=1 << 20), "at most 16 chunks of slabs that fit"),
        (push(rows=1 << 13), "at most 16 chunks of slabs that fit"),
        (push(x=0), "x:"),
        (push(row_stride_bytes=248), "x:"),
        (push(row_stride_bytes=128), "x:"),
        (pull(rows=64, chunk_size=1), "at most 16 chunks"),
        (pull(chunk_axis=1, row_bytes=1 << 17, rows=1, chunk_size=2), "at most 16 chunks"),
        (reduce(n=60), "d:"),
        (reduce(d=ADDRESS + 2), "d:"),
        (reduce(bias=ADDRESS + 2), "bias:"),
        (reduce(bias=ADDRESS, of=1), "the dtype of D"),
        (reduce(shares=1, residual=ADDRESS, stride=63), "residual: expected rows"),
        (reduce(shares=1, residual=ADDRESS, stride=68), "residual: expected rows"),
        (reduce(chunk_rows=-1), "16 chunks"),
        (pull(kind=9), "kind:"),
        (push(kind=abi.RING, x=0), "x:"),
        (push(x_step_bytes=8), "x_step_bytes:"),
        (push(kind=abi.RING, x_step_bytes=256), "x_step_bytes:"),
        (push(kind=abi.RING, rows=1 << 13), "at most 16 chunks of slabs that fit"),
        (drain(chunk_axis=1), "chunks of rows"),
        (drain(rows=1 << 13), "at most 16 chunks of slabs that fit"),
        (reduce(n=1 << 20, d_row_stride=1 << 20), "does not fit one half"),
        (reduce(n=1 << 20, d_row_stride=1 << 20, drain=1), "drained into"),
        (reduce(drain=2), "drain:"),
        (reduce(dtype=2), "dtype:"),
        (reduce(shares=4), "shares:"),
        (reduce(shares=3, bias=ADDRESS), "bias, scale:"),
        (reduce(shares=3, residual=ADDRESS), "residual:"),
        (reduce(shares=3, d_row_stride=72), "contiguous"),
        (reduce(shares=2, drain=1, group=group(drained=1 << 20)), "drain:"),
        (reduce(shares=1, d_row_stride=72), "contiguous"),
        (reduce(shares=1, group=group(half=1 << 30), rows=1 << 15), "workspace's result"),
        (reduce(residual=ADDRESS), "residual:"),
        (reduce(shares=1, residual=ADDRESS + 2), "residual:"),
    ],
)
def test_what_it_cannot_take_is_refused_on_the_host(support, args, words):  # C07, D05, I03
    calls = {
        abi.BeginArgs: lambda: support.begin(args, 0),
        abi.CopyArgs: lambda: support.copy(args, 0, (0, 0, 0), 0),
        abi.ReduceArgs: lambda: support.reduce(args, 0),
    }
    with pytest.raises(KernelError, match=words):
        calls[type(args)]()


def test_whole_calls_pass_on_what_their_parts_refuse(support):
    parts = begin(rows=0), pull(chunk_size=-1), reduce(n=60), reduce(), drain(chunk_axis=1)
    call = abi.GatherCall(begin=ct.addressof(parts[0]))
    with pytest.raises(KernelError, match="x:"):
        support.gather(ct.addressof(call), 0, ErrorText())
    call.copy = ct.addressof(parts[1])
    with pytest.raises(KernelError, match="multiple of 16"):  # before anything is queued
        support.gather(ct.addressof(call), 0, ErrorText())
    launched = []

    @ct.CFUNCTYPE(ct.c_int, ct.c_void_p, ct.c_void_p, ct.c_void_p, ct.c_int64)
    def launch(args, stream, message, size):
        launched.append((args, stream))
        return 2

    gemm = abi.GemmCall(launch=ct.cast(launch, ct.c_void_p).value, args=12345)
    call = abi.ScatterCall(gemm=gemm, reduce=ct.addressof(parts[2]))
    with pytest.raises(KernelError, match="d:"):
        support.scatter(ct.addressof(call), 99, ErrorText())
    assert launched == [], "a GEMM without its reduction would raise flags of a call that is none"
    call.reduce = ct.addressof(parts[3])
    call.copy = ct.addressof(parts[4])
    with pytest.raises(KernelError, match="chunks of rows"):
        support.scatter(ct.addressof(call), 99, ErrorText())
    assert launched == []
    call.copy = None
    with pytest.raises(KernelError):
        support.scatter(ct.addressof(call), 99, ErrorText())
    assert launched == [(12345, 99)]
    call.abi_version = 1
    with pytest.raises(KernelError, match="version"):
        support.scatter(ct.addressof(call), 0, ErrorText())
    assert len(launched) == 1


def test_without_a_gpu_a_good_call_is_one_clear_error(support):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here: the addresses of this test would be launched with")
    with pytest.raises(KernelError, match="begin: "):
        support.begin(begin(), 0)
    with pytest.raises(KernelError, match="order of streams: "):
        support.order(0, 0, 0)
