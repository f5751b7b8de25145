"""Epilogues as text and back, and what of a signature is compiled in."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from fluxgen.codegen.render import kernel_name
from fluxgen.compiler.generated import Entry
from fluxgen.core.config import KernelConfig
from fluxgen.core.dtypes import DType
from fluxgen.core.epilogue import NONE, Epilogue, Operand
from fluxgen.core.errors import UsageError
from fluxgen.core.op import Op
from fluxgen.core.problem import Signature
from fluxgen.native import abi


@pytest.mark.parametrize("text", ["none", "bias", "residual", "bias+residual"])
def test_an_epilogue_is_its_text(text):
    found = Epilogue.parse(text)
    assert found.key == text
    assert Epilogue.parse(found.key) == found


@pytest.mark.parametrize("text", ["", "relu", "residual+bias", "bias+bias", "bias+", "None", "+"])
def test_other_text_is_no_epilogue(text):
    with pytest.raises(UsageError, match="epilogue: expected"):
        Epilogue.parse(text)


def test_the_reference_adds_in_order():
    given = {Operand.BIAS: 2.0, Operand.RESIDUAL: 0.5}
    assert Epilogue.parse("bias+residual").apply(1.0, given) == 3.5
    assert Epilogue.parse("bias").apply(1.0, given) == 3.0
    assert NONE.apply(1.0, {}) == 1.0


def test_operands_have_places_in_the_abi():
    assert set(abi.OPERANDS) == {operand.value for operand in Operand}
    assert len(abi.GemmArgs().operands) == abi.LAYOUT.constants["FLUXGEN_OPERANDS"] >= len(Operand)
    assert set(abi.DTYPES) == {dtype.value for dtype in DType}


CHANGES = {
    "op": [Op.GEMM_RS],
    "dtype": [DType.FP16],
    "out_dtype": [DType.FP16],
    "b_layout": ["kn"],
    "epilogue": [Epilogue.parse("bias"), Epilogue.parse("bias+residual")],
    "scaling": [],  # there is but one
    "return_gathered": [True],
}


def statements(signature):
    """What a kernel's name, its line in a manifest and its library must say."""
    kernel = KernelConfig(128, 128, 64)
    entry = Entry("sm90", signature.compiled, kernel)
    return (
        kernel_name(signature, "sm90", kernel), entry.signature, abi.described(signature),
    )  # fmt: skip


def test_what_is_compiled_in_is_stated_once():
    """A change of a field shows in the name, in the manifest and in what is loaded, or in none."""
    assert set(CHANGES) == {field.name for field in fields(Signature)}
    usual = Signature.of(Op.AG_GEMM)
    for name, values in CHANGES.items():
        for value in values:
            other = replace(usual, **{name: value})
            compiled = other.compiled != usual.compiled
            assert compiled is (name != "return_gathered")
            for one, two in zip(statements(usual), statements(other), strict=True):
                assert (one != two) is compiled, name


def test_an_epilogue_of_the_reduction_is_no_part_of_a_gemm():
    for op in Op:
        with_bias = replace(Signature.of(op), epilogue=Epilogue.parse("bias"))
        assert (with_bias.compiled.epilogue == NONE) is op.scatters
        assert with_bias.compiled.op is op.compiled
