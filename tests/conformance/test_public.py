"""Every op with every epilogue and type that its table has: the unfused path and the host's part of
the fused one, by the one reference."""

from __future__ import annotations

import contextlib

import pytest
import torch

import fluxgen
from fluxgen.core.epilogue import Operand
from fluxgen.core.op import Op
from fluxgen.runtime.session.dispatch import explain
from tests.conformance.reference import (
    CASES,
    EPILOGUES,
    FUNCTIONS,
    inputs,
    operands_of,
    reference,
    takes,
)
from tests.dist.host_library import host_library
from tests.dist.numbers import same
from tests.dist.pool import Pool

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

M, N, K = 48, 40, 16


@pytest.fixture(scope="module")
def pool():
    made = Pool()
    yield made
    made.close()


def test_the_tables_are_walked():
    assert {op for op, *_ in CASES} == set(Op) == set(FUNCTIONS)
    assert {e for *_, e in CASES} == set(EPILOGUES)
    assert all(takes(op, EPILOGUES[0]) for op in Op)
    assert {op for op in Op if takes(op, EPILOGUES[-1])} == {Op.GEMM_AR}


def _conforms(groups, rank, name, fused):
    """All cases on one group; returns which paths they took."""
    group = groups.get(name)
    if group is None:
        return None
    world, me = group.size(), group.rank()
    paths = set()
    for seed, (op, dtype, epilogue) in enumerate(CASES):
        torch_dtype = getattr(torch, dtype.torch_name)
        if fused and torch_dtype is not torch.bfloat16:
            continue  # the libraries of the host read bf16
        with host_library(group) if fused else contextlib.nullcontext(), explain() as seen:
            for again in range(3):  # the third takes the fast path
                here = 1000 * seed + 10 * again
                xs, ws = inputs(op, world, M, N, K, torch_dtype, here)
                given = operands_of(op, epilogue, world, M, N, torch_dtype, here)
                want = reference(op, epilogue, xs, ws, given)[me]
                mine = {operand.value: t for operand, t in given[me].items()}
                got = getattr(fluxgen, FUNCTIONS[op])(xs[me], ws[me], **mine, group=group)
                same(got, want)
        paths |= {(op, epilogue, decision.path) for decision in seen.decisions}
    return paths


@pytest.mark.parametrize("name", ["w2", "w3", "w4", "reversed"])
def test_unfused(pool, name):
    found = [paths for paths in pool(_conforms, name, False) if paths is not None]
    assert found and all(paths == found[0] for paths in found)
    assert {path for *_, path in found[0]} == {"unfused"}
    assert {op for op, *_ in found[0]} == set(Op)


@pytest.mark.parametrize("name", ["w2", "w3", "w4", "reversed"])
def test_fused_on_the_host(pool, name):
    found = [paths for paths in pool(_conforms, name, True) if paths is not None]
    assert found and all(paths == found[0] for paths in found)
    unfused = {(op, epilogue) for op, epilogue, path in found[0] if path != "fused"}
    # No kernel adds a bias before rows are sent.
    assert unfused == {(Op.GEMM_A2A, e) for e in EPILOGUES if e.operands == (Operand.BIAS,)}
