"""What a backward poses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.shapes import counted_problems
from fluxgen.shapes.problems import backward

AG, RS = Signature.of("ag_gemm"), Signature.of("gemm_rs")


def test_the_other_op_with_the_weight_transposed():
    forward = Problem(AG, 4096, 768, 4096, 8)
    assert backward(forward) == Problem(replace(RS, b_layout="kn"), 4096, 4096, 768, 8)
    assert backward(Problem(RS, 64, 16, 8, 2)) == Problem(replace(AG, b_layout="kn"), 64, 8, 16, 2)
    assert backward(forward).flops == forward.flops


@pytest.mark.parametrize("ops", [("ag_gemm",), ("gemm_rs",), ("ag_gemm", "gemm_rs")])
def test_training_adds_the_backward_of_every_gemm(ops):
    every = counted_problems("llama-3.1-8b", 8, [512, 4096])
    found = counted_problems("llama-3.1-8b", 8, [512, 4096], ops=ops, training=True)
    wanted = {Op(op) for op in ops}
    expected = {p for p in every if p.op in wanted}
    expected |= {backward(p) for p in every if backward(p).op in wanted}
    assert set(found) == expected
    kn = [p for p in found if p.signature.b_layout == "kn"]
    assert len(kn) == len(expected) // 2
    names = dict(zip(found.problems, found.names, strict=True))
    assert all(name.endswith(".backward") for p in kn for name in names[p])
    assert sum(found.counts) == sum(
        count * ((p.op in wanted) + (backward(p).op in wanted))
        for p, count in zip(every.problems, every.counts, strict=True)
    )
