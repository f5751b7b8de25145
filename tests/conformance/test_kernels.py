"""Every op by a kernel of every family, of every type, with every epilogue: on one GPU, by the one
reference. Runs with the other GPU tests' kernels."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from fluxgen.codegen.space import run_space  # noqa: E402
from fluxgen.core.dtypes import DType  # noqa: E402
from fluxgen.core.epilogue import Operand  # noqa: E402
from fluxgen.core.op import Op  # noqa: E402
from fluxgen.core.problem import Problem, Signature  # noqa: E402
from fluxgen.core.topology import GPUS, LinkKind, Topology  # noqa: E402
from fluxgen.kernels.registry import FAMILIES, families  # noqa: E402
from tests.conformance.reference import (  # noqa: E402
    CASES,
    inputs,
    operands_of,
    reference,
)
from tests.gpu import kernels as compiled  # noqa: E402
from tests.gpu.conftest import KERNELS  # noqa: E402

missing = ""
if not torch.cuda.is_available():
    missing = "no CUDA GPU"
elif not KERNELS.is_dir():
    missing = f"no compiled kernels in {KERNELS}: run `make gpu-kernels`"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(missing), reason=missing or "-")]

ON = {"sm90": "h200", "sm80": "a100-sxm-80gb"}
N, K = 136, 16


def kernel_of(family, signature):
    """The first compiled kernel of a family, or a skip: a tier need not have each."""
    arch = family.archs[0]
    for name in compiled.kernel_names():
        stem, _, tile = name.partition(f"_{arch}_")
        if stem == signature.name and tile and ("_flat_" in tile) is family.whole:
            return compiled.load_kernel(name)
    pytest.skip(f"the tier has no {signature.name} of {type(family).__name__}")


def test_families_are_walked():
    assert {family for arch in ON for family in families(arch)} == set(FAMILIES)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("op", Op)
def test_an_op_by_a_family(op, dtype, family, world):
    from fluxgen.tune.device.local_group import LocalGroup

    kernel = kernel_of(family, Signature.of(op, dtype))
    m = 8 * world if family.whole else 72 * world
    problem = Problem(Signature.of(op, dtype), m, N, K, world)
    topology = Topology.of(GPUS[ON[family.archs[0]]], LinkKind.NVLINK, world)
    run = next(run_space(problem, topology, kernel.kernel))
    group = LocalGroup.for_problems(compiled.load_support(), problem)
    torch_dtype = getattr(torch, dtype.torch_name)
    for seed, (_, _, epilogue) in enumerate(c for c in CASES if c[:2] == (op, dtype)):
        if Operand.BIAS in epilogue.operands:
            continue  # the group of one process passes none
        for again in range(3):
            here = 1000 * seed + 10 * again
            xs, ws = inputs(op, world, m, N, K, torch_dtype, here)
            given = operands_of(op, epilogue, world, m, N, torch_dtype, here)
            want = reference(op, epilogue, xs, ws, given)
            residual = given[0].get(Operand.RESIDUAL)
            more = {} if residual is None else {"residual": residual.cuda()}
            outs = [
                torch.full((problem.rows_out, N), float("nan"), device="cuda", dtype=torch_dtype)
                for _ in range(world)
            ]
            left, weights = [x.cuda() for x in xs], [w.cuda() for w in ws]
            torch.cuda.synchronize()
            group.run(kernel, problem, run, left, weights, outs, **more)
            group.synchronize()
            for rank, (got, expected) in enumerate(zip(outs, want, strict=True)):
                assert torch.equal(got.cpu(), expected), f"{problem.key} {run} rank {rank}"
