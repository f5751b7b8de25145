"""What of the headers a compiled library depends on."""

from __future__ import annotations

import shutil

import pytest

from fluxgen.codegen.render import render_emulated_link, render_kernel, render_support
from fluxgen.compiler.headers import headers_hash, include_dir
from fluxgen.core.problem import Signature
from fluxgen.kernels.registry import FAMILIES
from fluxgen.native import abi
from fluxgen.runtime.session import kernels

GEMMS = [
    render_kernel(Signature.of(op), family.archs[0], next(iter(family.kernels())))
    for family in FAMILIES
    for op in ("ag_gemm", "gemm_rs")
]
SUPPORT = [render_support("sm90"), render_emulated_link("sm90")]


@pytest.fixture
def changed(tmp_path):
    """The hash of a source's headers, after a comment was added to one of them."""
    include = tmp_path / "include"
    shutil.copytree(include_dir(), include)

    def hashes(header, rendered):
        path = include / "fluxgen" / header
        before, text = headers_hash(rendered.text, include), path.read_text()
        path.write_text(text + "// changed\n")
        after = headers_hash(rendered.text, include)
        path.write_text(text)
        return before != after

    return hashes


@pytest.mark.parametrize(
    "header",
    ["calls.h", "support/reduce.cuh", "support/copies.cuh", "support/transport.cuh",
     "support/graphs.cuh", "support/begin.cuh", "epilogue/finish.cuh"],
)  # fmt: skip
def test_a_change_of_a_transport_recompiles_no_gemm(changed, header):
    assert changed(header, SUPPORT[0])
    assert not any(changed(header, gemm) for gemm in GEMMS)


def test_a_change_of_one_family_recompiles_no_other(changed):
    for family in FAMILIES:
        header = f"families/{family.header}"
        touched = [gemm.name for gemm in GEMMS if changed(header, gemm)]
        own = next(iter(family.kernels()))
        assert touched == [
            f"{op}_bf16_{family.archs[0]}_{own.name}" for op in ("ag_gemm", "gemm_rs")
        ]
        assert not changed(header, SUPPORT[0])


def test_a_change_of_the_protocol_recompiles_all_that_speak_it(changed):
    assert all(changed("protocol/layout.cuh", rendered) for rendered in (*GEMMS, *SUPPORT))
    assert all(changed("abi.h", rendered) for rendered in (*GEMMS, *SUPPORT))


def test_the_version_of_the_calls_is_no_part_of_a_gemms_key(monkeypatch):
    gemm, support = kernels.source_of(GEMMS[0]), kernels.source_of(SUPPORT[0])
    monkeypatch.setattr(abi, "CALLS_VERSION", abi.CALLS_VERSION + 1)
    assert kernels.source_of(GEMMS[0]) == gemm
    assert kernels.source_of(SUPPORT[0]) != support
