"""Real compiles of fused kernels: what ptxas says, what a library says of itself, and what it
refuses on the host, all without a GPU. Few, because each takes most of a minute."""

from __future__ import annotations

import json
import subprocess
import time

import pytest

from fluxgen.cli import main
from fluxgen.codegen.render import render_kernel
from fluxgen.compiler.generated import Entry
from fluxgen.compiler.store import Store
from fluxgen.core.config import KernelConfig, Schedule
from fluxgen.core.errors import KernelError, StoreError
from fluxgen.core.problem import Signature
from fluxgen.core.settings import data_dir
from fluxgen.core.topology import parse_gpu
from fluxgen.kernels.sm90 import stage_count
from fluxgen.native import abi
from fluxgen.native.loader import FusedKernel
from fluxgen.runtime.session.kernels import fused_kernel, source_of, support_kernels

RS = Signature.of("gemm_rs", "fp16")
WIDE = KernelConfig(256, 192, 64, 2, 1, Schedule.COOPERATIVE)


pytestmark = [pytest.mark.nvcc, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def largest(tmp_path_factory, toolchain):
    """The kernel with the most accumulators: the first to spill if a header grows."""
    store = Store(tmp_path_factory.mktemp("store") / "s")
    rendered = Entry("sm90", RS, WIDE).render()
    artifact = store.build(source_of(rendered), toolchain)
    return artifact, FusedKernel(artifact.path, RS, WIDE)


def test_no_spills_no_serialised_wgmma(largest):
    artifact, _ = largest
    (facts,) = artifact.facts
    assert (facts.spill_stores, facts.spill_loads, facts.stack) == (0, 0, 0)
    assert facts.registers == 168, "384 threads of a 65536-register file"
    assert not facts.warnings


def test_the_library_describes_itself(largest):
    _, kernel = largest
    assert kernel.info.stages == stage_count(WIDE, parse_gpu("h200").smem_kb)
    assert kernel.info.smem_bytes <= 227 * 1024
    with pytest.raises(KernelError, match="expected"):
        FusedKernel(kernel.path, RS, KernelConfig(128, 192, 64, 2, 1, Schedule.COOPERATIVE))


def arguments(**changes):
    base = {"rows": 256, "n": 512, "k": 256, "a": 1 << 20, "b": 1 << 21, "half": 1 << 30}
    v = {**base, **changes}
    group = abi.Group(world=v.get("world", 4), rank=v.get("rank", 1), half_bytes=v["half"])
    group.stage_bytes = v.get("stage", 0)
    for peer in range(4):
        group.peers[peer] = v.get("peer", 1 << 22)
    args = abi.GemmArgs(group=group, rows=v["rows"], n=v["n"], k=v["k"], a=v["a"], b=v["b"])
    args.a_row_stride = v.get("lda", v["k"])
    args.b_row_stride = v.get("ldb", v["k"])
    args.chunk_size, args.chunk_axis = v.get("chunk_size", 0), v.get("chunk_axis", 0)
    args.span = v.get("span", 0)
    args.split, args.sends = v.get("split", 0), v.get("sends", 0)
    for i, size in enumerate(v.get("groups", ())):
        args.groups[i] = size
    args.group_count = len(v.get("groups", ()))
    return args


def test_a_good_call_passes_the_host_check(largest):
    largest[1].check(arguments())
    largest[1].check(arguments(lda=264, chunk_size=256))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": 36}, "n=36.*multiples of 8"),
        ({"k": 100}, "k=100.*multiples of 8"),
        ({"k": 4}, "k=4"),
        ({"rows": 0}, "zero size is never launched"),
        ({"k": 0}, "zero size is never launched"),
        ({"rows": 2**31}, "2\\^31"),
        ({"rows": 2**30, "half": 1 << 50}, "m="),
        ({"lda": 255}, "shorter than its row"),
        ({"lda": 257}, "row strides"),
        ({"ldb": 260}, "row strides"),
        ({"a": (1 << 20) + 2}, "multiples of 16 bytes"),
        ({"b": 0}, "non-null"),
        ({"world": 0}, "world"),
        ({"world": 17}, "world"),
        ({"rank": 4}, "rank 4 of world 4"),
        ({"peer": 0}, "workspace of rank 0"),
        ({"half": 1024}, "half_bytes"),
        ({"stage": 1000}, "stage_bytes"),
        ({"half": (1 << 30) + 8}, "half_bytes"),
        ({"chunk_size": 100}, "chunk_size=100"),
        ({"chunk_axis": 1, "chunk_size": 64}, "chunk_size=64"),
        ({"rows": 8192, "chunk_size": 256, "n": 8}, "more than 16 chunks"),
        ({"span": 3}, "span=3"),
        ({"split": 2}, "split=2.*only flat kernels"),
        ({"sends": 1}, "sends=1.*only flat kernels"),
        ({"span": 2, "rows": 128}, "span=2.*160 accumulators"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_on_the_host(largest, changes, words):
    """A05, A07, A09, A11, A17, B05, C01, D05: before any launch, with the values."""
    with pytest.raises(KernelError, match=words):
        largest[1].check(arguments(**changes))


def test_a_struct_of_another_version_is_refused(largest):
    args = arguments()
    args.abi_version = 1
    with pytest.raises(KernelError, match="version 1"):
        largest[1].check(args)
    args = arguments()
    args.struct_size -= 8
    with pytest.raises(KernelError, match="does not match"):
        largest[1].check(args)


def test_tiles_between_the_powers_of_two_get_their_own_wgmma(tmp_path, toolchain):
    """n = 160 as five instructions of n = 32 ran at 0.6 of the speed."""
    kernel = KernelConfig(64, 160, 64)
    source = tmp_path / "k.cu"
    source.write_text(render_kernel(Signature.of("ag_gemm"), "sm90", kernel).text)
    command = [str(toolchain.nvcc), "-std=c++17", "-DNDEBUG", "--expt-relaxed-constexpr", "-ptx"]
    command += ["-gencode=arch=compute_90a,code=compute_90a", f"-I{data_dir('templates')}/include"]
    command += [f"-I{path}" for path in (toolchain.cutlass, *toolchain.includes)]
    subprocess.run([*command, str(source), "-o", str(tmp_path / "k.ptx")], check=True)
    text = (tmp_path / "k.ptx").read_text()
    assert "wgmma.mma_async.sync.aligned.m64n160k16" in text
    assert "m64n32k16" not in text


@pytest.mark.usefixtures("toolchain")
def test_config_in_compiled_kernel_out(tmp_path, monkeypatch, capsys):
    """The whole pipeline as a user runs it: tune, build, build again, load."""
    monkeypatch.setenv("FLUXGEN_HOME", str(tmp_path / "h\u00f6me of fluxgen"))
    model = ["--model", "llama-3.1-8b", "--tp", "8", "--target", "h100-sxm", "--tokens", "4096"]
    out = ["--out", str(tmp_path / "generated"), "--json"]
    assert main(["tune", *model, "--evaluator", "predict", "--trials", "4", "--json"]) == 0
    tuned = json.loads(capsys.readouterr().out)
    assert main(["build", *model, "--limit", "1", *out]) == 0
    built = json.loads(capsys.readouterr().out)
    assert [k["status"] for k in built["kernels"]] == ["built", "built"]
    assert built["kernels"][0]["name"] == "support_sm90"

    start = time.monotonic()
    assert main(["build", *model, "--limit", "1", *out]) == 0
    assert time.monotonic() - start < 2.0
    again = json.loads(capsys.readouterr().out)
    assert [k["status"] for k in again["kernels"]] == ["cached", "cached"]
    assert again["changed"] == []
    assert main(["build", "--check", *out]) == 0
    capsys.readouterr()

    monkeypatch.setenv("PATH", "/nowhere")  # what is built needs no nvcc
    monkeypatch.setenv("FLUXGEN_NVCC", "/nowhere/nvcc")
    assert main(["build", *model, "--limit", "1", *out]) == 0
    assert {k["status"] for k in json.loads(capsys.readouterr().out)["kernels"]} == {"cached"}
    assert main(["build", *model, *out]) == 1, "the kernels beyond the limit are not built"
    assert "nvcc" in capsys.readouterr().err
    loaded = 0
    for record in tuned["records"]:
        if record["kernel"] is None:
            continue
        signature = Signature.of(record["problem"]["op"], "bf16")
        kernel = KernelConfig.from_dict(record["kernel"])
        try:
            found = fused_kernel(signature, kernel, "sm90")
        except StoreError as error:
            assert "fluxgen build" in str(error)
            continue
        assert found.info.tile_m == kernel.tile_m
        loaded += 1
    assert loaded >= 1
    support_kernels("sm90")
