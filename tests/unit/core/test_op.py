"""The table of ops is whole, and says what the public functions do."""

from __future__ import annotations

import itertools

import pytest

from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature


@pytest.mark.parametrize("op", Op)
def test_a_row_is_whole(op):
    assert op.compiled.compiled is op.compiled
    assert op.compiled.gathers is op.gathers
    assert op.gathers is not op.scatters
    assert op.transports and len(set(op.transports)) == len(op.transports)
    assert not (op.reduces and op.gathers)
    assert not (op.shares and not op.reduces)
    if op.backward is not None:
        assert op.backward.backward is op
        assert op.backward.gathers is not op.gathers
        assert op.backward.exchanges is op.exchanges


def test_ops_are_told_apart_by_their_traits():
    traits = [(op.gathers, op.exchanges, op.reduces, op.shares) for op in Op]
    assert len(set(traits)) == len(traits)
    assert {op.collective for op in Op} == {
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all",
    }  # fmt: skip
    assert Op.GEMM_RS.alone is Op.GEMM_AR and Op.AG_GEMM.alone is None


@pytest.mark.parametrize(
    ("op", "rows_in", "rows_out"),
    [
        ("ag_gemm", 4, 32),
        ("gemm_rs", 32, 4),
        ("gemm_ar", 32, 32),
        ("a2a_gemm", 32, 32),
        ("gemm_a2a", 32, 32),
    ],
)
def test_rows_that_a_rank_passes_and_gets(op, rows_in, rows_out):
    problem = Problem(Signature.of(op), 32, 64, 16, 8)
    assert (problem.rows_in, problem.rows_out) == (rows_in, rows_out)


def test_bytes_that_a_rank_gets_from_others():
    """Of A where it comes in, of D where it goes out, and twice where every rank gets the sum."""
    want = {"ag_gemm": 32 * 16, "a2a_gemm": 32 * 16, "gemm_rs": 32 * 64, "gemm_a2a": 32 * 64}
    want["gemm_ar"] = 2 * want["gemm_rs"]
    for op, elements in want.items():
        assert Problem(Signature.of(op), 32, 64, 16, 8).comm_bytes == elements * 2 * 7 / 8


def test_transports_carry_what_the_gemm_can_send():
    """Ops that share a GEMM share its transports, but for those of one's own reduction."""
    for one, other in itertools.combinations(Op, 2):
        assert bool(set(one.transports) & set(other.transports)) is (one.compiled is other.compiled)
