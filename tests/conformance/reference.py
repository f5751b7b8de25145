"""One reference for all ops, made of their traits: what every rank must hold, of which inputs.

Inputs are integers so small that every sum, in whatever order and with whatever roundings on the
way, is exact in bf16 and fp16.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

import fluxgen
from fluxgen.core.dtypes import DType
from fluxgen.core.epilogue import Epilogue, Operand
from fluxgen.core.op import Op

FUNCTIONS = {
    Op.AG_GEMM: "all_gather_matmul",
    Op.GEMM_RS: "matmul_reduce_scatter",
    Op.GEMM_AR: "matmul_all_reduce",
    Op.A2A_GEMM: "all_to_all_matmul",
    Op.GEMM_A2A: "matmul_all_to_all",
}
EPILOGUES = [
    Epilogue(operands)
    for count in range(len(Operand) + 1)
    for operands in itertools.combinations(Operand, count)
]


def takes(op: Op, epilogue: Epilogue) -> bool:
    """Whether the op's public function has an argument for each operand."""
    known = inspect.signature(getattr(fluxgen, FUNCTIONS[op])).parameters
    return all(operand.value in known for operand in epilogue.operands)


CASES = [
    (op, dtype, epilogue)
    for op in Op
    for dtype in DType
    for epilogue in EPILOGUES
    if takes(op, epilogue)
]


def small(seed: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """-1, 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(dtype)


def inputs(op: Op, world: int, m: int, n: int, k: int, dtype: torch.dtype, seed: int) -> Any:
    """x and w of every rank; w is one where the ranks' products are of one sum."""
    rows = m // world if op.replicates else m
    xs = [small(seed + r, rows, k, dtype=dtype) for r in range(world)]
    ws = [small(seed + 100 + r, n, k, dtype=dtype) for r in range(world)]
    return xs, ws


def operands_of(
    op: Op, epilogue: Epilogue, world: int, m: int, n: int, dtype: torch.dtype, seed: int
) -> list[dict[Operand, torch.Tensor]]:
    """Of every rank; of a sum all have the same, else each its own."""
    found = []
    for rank in range(world):
        own = seed + (0 if op.reduces else rank)
        shapes = {Operand.BIAS: (n,), Operand.RESIDUAL: (m, n)}
        found.append({o: small(own + 200, *shapes[o], dtype=dtype) for o in epilogue.operands})
    return found


def exchanged(parts: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """What ``rank`` gets of every rank's rows."""
    return torch.cat([part.chunk(len(parts))[rank] for part in parts])


def reference(
    op: Op,
    epilogue: Epilogue,
    xs: Sequence[torch.Tensor],
    ws: Sequence[torch.Tensor],
    given: Sequence[Mapping[Operand, torch.Tensor]],
) -> list[torch.Tensor]:
    """What every rank must hold, in fp64 until the end."""
    world, dtype = len(xs), xs[0].dtype
    wide = [{operand: t.double() for operand, t in each.items()} for each in given]

    def product(x: torch.Tensor, rank: int) -> torch.Tensor:
        return x.double() @ ws[rank].double().T

    if op.gathers:
        left = [exchanged(xs, r) if op.exchanges else torch.cat(list(xs)) for r in range(world)]
        outs = [epilogue.apply(product(left[r], r), wide[r]) for r in range(world)]
    elif op.reduces:
        total = sum(product(xs[r], r) for r in range(world))
        whole = [epilogue.apply(total, wide[r]) for r in range(world)]
        outs = whole if op.shares else [whole[r].chunk(world)[r] for r in range(world)]
    else:
        sent = [epilogue.apply(product(xs[r], r), wide[r]) for r in range(world)]
        outs = [exchanged(sent, r) for r in range(world)]
    assert all((out.abs() <= 256).all() for out in outs), "exact in bf16"
    return [out.to(dtype) for out in outs]
