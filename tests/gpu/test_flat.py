"""Flat kernels on one GPU: tiles of all ranks' rows, K split over clusters, bit-exact."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from fluxgen.core.config import RunConfig, Transport  # noqa: E402
from fluxgen.core.errors import KernelError  # noqa: E402
from fluxgen.core.op import Op  # noqa: E402
from fluxgen.core.problem import Problem, ceil_div  # noqa: E402
from fluxgen.kernels.flat import MAX_PACKET_TOKENS, SPLITS  # noqa: E402
from fluxgen.tune.device.local_group import LocalGroup  # noqa: E402
from tests.gpu.kernels import first_of, kernel_names, load_kernel, load_support  # noqa: E402
from tests.gpu.test_fused import (  # noqa: E402
    K_GRID,
    N_GRID,
    all_rows,
    check,
    check_all_reduce,
    check_exchanges,
    exact_matmul,
    exchanged,
    expected,
    integers,
    operands,
    shared,
)

FLAT = sorted(name for name in kernel_names() if "_flat_" in name)
GATHERS = (
    Transport.SM_COPY, Transport.COPY_ENGINE_PUSH, Transport.COPY_ENGINE_PULL,
    Transport.COPY_ENGINE_RING,
)  # fmt: skip


def flat_run(problem: Problem, split: int, transport: Transport | None = None) -> RunConfig:
    usual = Transport.SM_COPY if problem.op is Op.AG_GEMM else Transport.PEER_STORE
    return RunConfig((problem.tp,), transport=transport or usual, span=problem.tp, split=split)


def splits_of(kernel, k: int) -> list[int]:
    if kernel.info.warps:  # Ampere's
        return [1]
    return [split for split in SPLITS if split <= ceil_div(k, kernel.kernel.tile_k)]


SIZES = [(1, 8, 8), (1, 136, 1032), (2, 264, 4096), (3, 1368, 360), (7, 72, 520), (16, 768, 2048),
         (37, 120, 72), (64, 2112, 1000)]  # fmt: skip
"""(rows of a rank, n, k): odd sizes, tails of every tile, fewer steps of k than parts."""


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("name", FLAT)
def test_exact_for_every_world(name: str, world: int) -> None:
    kernel = load_kernel(name)
    rng = random.Random(f"{name}/{world}")
    problems = [Problem(kernel.signature, r * world, n, k, world) for r, n, k in SIZES]
    group = LocalGroup.for_problems(load_support(), *problems)
    for problem in problems:
        splits = splits_of(kernel, problem.k)
        for split in {splits[-1], rng.choice(splits)}:
            check(group, kernel, problem, flat_run(problem, split))
        if problem.op is Op.GEMM_RS and problem.m <= MAX_PACKET_TOKENS:
            check(group, kernel, problem, flat_run(problem, splits[-1], Transport.PEER_PACKETS))
        push = Transport.COPY_ENGINE_PUSH if problem.op is Op.AG_GEMM else None
        check_exchanges(group, kernel, problem, flat_run(problem, splits[0], push))
        if problem.op is Op.AG_GEMM:
            check(group, kernel, problem, flat_run(problem, splits[0], rng.choice(GATHERS)))


GRID = [
    f"{op}_{kind}"
    for op in ("ag_gemm", "gemm_rs")
    for kind in ("bf16_sm90_16x64", "bf16_kn_sm90", "fp16_sm90", "bf16_sm80_16x16", "bf16_kn_sm80",
                 "fp16_sm80")
]  # fmt: skip
TOKENS = (1, 2, 7, 8, 9, 37, 63, 64, 65, 127, 128, 129)


@pytest.mark.parametrize("world", [3, 8])
@pytest.mark.parametrize("prefix", GRID)
def test_the_grid_of_sizes_for_all_five_ops(prefix: str, world: int) -> None:
    """Every n, k and number of tokens that 16-byte accesses can take, in mixed pairs."""
    kernel = load_kernel(first_of(prefix, FLAT))
    sizes = [(TOKENS[i % 12], n, K_GRID[i * 5 % 17]) for i, n in enumerate(N_GRID)]
    sizes += [(TOKENS[i * 5 % 12], N_GRID[i * 2 % 13], k) for i, k in enumerate(K_GRID[:-1])]
    sizes += [(8, 136, K_GRID[-1]), *((m, 136, 192) for m in TOKENS)]
    problems = [Problem(kernel.signature, ceil_div(m, world) * world, n, k, world)
                for m, n, k in sizes]  # fmt: skip
    reduces = [] if kernel.signature.op is Op.AG_GEMM else [
        as_all_reduce(kernel, m, n, k, world) for m, n, k in sizes
    ]  # fmt: skip
    group = LocalGroup.for_problems(load_support(), *problems, *reduces)
    for i, problem in enumerate(problems):
        splits = splits_of(kernel, problem.k)
        split = splits[-1] if i % 2 else splits[len(splits) // 2]
        run = flat_run(problem, split)
        check(group, kernel, problem, run)
        if problem.op is Op.AG_GEMM:
            run = flat_run(problem, split, Transport.COPY_ENGINE_PUSH)
            check(group, kernel, problem, run)
        check_exchanges(group, kernel, problem, run)
    for i, problem in enumerate(reduces):
        few = problem.m <= MAX_PACKET_TOKENS and i % 2
        by = Transport.BROADCAST_PACKETS if few else Transport.PEER_BROADCAST
        check_all_reduce(group, kernel, problem, flat_run(problem, 1, by))


@pytest.mark.parametrize("op", ["ag_gemm_bf16_sm90_16x64", "gemm_rs_bf16_sm90_16x64"])
def test_every_split_of_many_tiles(op: str) -> None:
    """More tiles than clusters: barriers and stages go round, shared memory is used again."""
    kernel = load_kernel(first_of(op, FLAT))
    world, tile_k, stages = 2, kernel.kernel.tile_k, kernel.info.stages
    depths = (8, stages - 1, stages, stages + 1, 3 * stages + 1)
    problems = [Problem(kernel.signature, 40, 64 * 150 - 8, d * tile_k, world) for d in depths]
    group = LocalGroup.for_problems(load_support(), *problems)
    for problem in problems:
        for split in splits_of(kernel, problem.k):
            check(group, kernel, problem, flat_run(problem, split))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_delayed_rank_and_back_to_back(world: int) -> None:
    """Flat and tiled calls in turn on one workspace, new data each call, each rank late in turn."""
    names = [
        "ag_gemm_bf16_sm90_16x64x128_1x1_flat_auto", "gemm_rs_bf16_sm90_16x64x128_1x1_flat_auto",
    ]  # fmt: skip
    pair = [load_kernel(name) for name in names]
    problems = [Problem(kernel.signature, 5 * world, 264, 1032, world) for kernel in pair]
    group = LocalGroup.for_problems(load_support(), *problems)
    data = [[operands(problem) for problem in problems] for _ in range(8)]
    torch.cuda.synchronize()
    for repeat, batch in enumerate(data):
        late = repeat % world
        for kernel, problem, (left, weights, out) in zip(pair, problems, batch, strict=True):
            group.run(
                kernel, problem, flat_run(problem, SPLITS[repeat % 4]), left, weights, out,
                delay=lambda r, late=late: torch.cuda._sleep(3_000_000) if r == late else None,
            )  # fmt: skip
    group.synchronize()
    for repeat, batch in enumerate(data):
        for problem, (left, weights, out) in zip(problems, batch, strict=True):
            for got, want in zip(out, expected(problem, left, weights), strict=True):
                assert torch.equal(got, want), f"{problem.key} round {repeat}"


REDUCES = [name for name in FLAT if name.startswith("gemm_rs")]


def as_all_reduce(kernel, m: int, n: int, k: int, world: int) -> Problem:
    return Problem(replace(kernel.signature, op=Op.GEMM_AR), m, n, k, world)


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("name", REDUCES)
def test_all_reduce_in_one_shot_and_in_two(name: str, world: int) -> None:
    """In one shot of any number of rows, one among them."""
    kernel = load_kernel(name)
    dtype = getattr(torch, kernel.signature.dtype.torch_name)
    sizes = [(1, 136, 1032), (world, 264, 4096), (2 * world + 1, 1368, 360), (37, 768, 520)]
    problems = [as_all_reduce(kernel, m, n, k, world) for m, n, k in sizes]
    group = LocalGroup.for_problems(load_support(), *problems)
    for i, problem in enumerate(problems):
        for by in (Transport.PEER_BROADCAST, Transport.BROADCAST_PACKETS, Transport.PEER_STORE):
            if by is Transport.PEER_STORE and problem.m % world:
                continue
            left = [integers(problem.m, problem.k, dtype=dtype) for _ in range(world)]
            weights = operands(problem)[1]
            residual = integers(problem.m, problem.n, dtype=dtype) if i % 2 else None
            out = all_rows(problem)
            run = flat_run(problem, splits_of(kernel, problem.k)[-1], by)
            torch.cuda.synchronize()
            group.run(kernel, problem, run, left, weights, out, residual=residual)
            group.synchronize()
            want = shared(problem, left, weights, residual)
            for rank, got in enumerate(out):
                assert torch.equal(got, want), f"{problem.key} {by} rank {rank}"


def posed(kernel, op: Op, m: int, n: int, k: int, world: int) -> Problem:
    return Problem(replace(kernel.signature, op=op), m, n, k, world)


def wanted(problem: Problem, left, weights):
    """What each rank must hold of any op, bit for bit."""
    world = problem.tp
    if problem.op is Op.GEMM_AR:
        return [shared(problem, left, weights, None)] * world
    if problem.op is Op.A2A_GEMM:
        rows = [exchanged(left, rank) for rank in range(world)]
        return [exact_matmul(a, b).to(b.dtype) for a, b in zip(rows, weights, strict=True)]
    if problem.op is Op.GEMM_A2A:
        products = [exact_matmul(a, b).to(b.dtype) for a, b in zip(left, weights, strict=True)]
        return [exchanged(products, rank) for rank in range(world)]
    return expected(problem, left, weights)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_all_kinds_of_call_in_turn(world: int) -> None:
    """1,000 calls of all five ops on one workspace, each rank late in turn."""
    gather = load_kernel("ag_gemm_bf16_sm90_16x64x128_1x1_flat_auto")
    reduce = load_kernel("gemm_rs_bf16_sm90_16x64x128_1x1_flat_auto")
    kinds = [
        (gather, Problem(gather.signature, 2 * world, 264, 1032, world), Transport.SM_COPY),
        (reduce, Problem(reduce.signature, 2 * world, 1368, 520, world), Transport.PEER_STORE),
        (reduce, Problem(reduce.signature, 3 * world, 264, 520, world), Transport.PEER_PACKETS),
        (reduce, as_all_reduce(reduce, 3, 1368, 520, world), Transport.PEER_BROADCAST),
        (reduce, as_all_reduce(reduce, 5, 1368, 520, world), Transport.BROADCAST_PACKETS),
        (reduce, as_all_reduce(reduce, 2, 264, 1032, world), Transport.BROADCAST_PACKETS),
        (reduce, as_all_reduce(reduce, 3 * world, 264, 1032, world), Transport.PEER_STORE),
        (reduce, posed(reduce, Op.GEMM_A2A, world, 264, 520, world), Transport.PEER_STORE),
        (gather, posed(gather, Op.A2A_GEMM, world, 264, 520, world), Transport.COPY_ENGINE_PUSH),
    ]
    group = LocalGroup.for_problems(load_support(), *(problem for _, problem, _ in kinds))
    rng = random.Random(world)
    for batch in range(25):
        calls = [kinds[rng.randrange(len(kinds))] for _ in range(40)]
        data = []
        for _, problem, _ in calls:
            left, weights, out = operands(problem)
            if problem.op not in (Op.AG_GEMM, Op.GEMM_RS):
                out = all_rows(problem)
            data.append((left, weights, out))
        torch.cuda.synchronize()
        for i, ((kernel, problem, by), (left, weights, out)) in enumerate(
            zip(calls, data, strict=True)
        ):
            late = i % world if i % 8 == 0 else -1
            group.run(
                kernel, problem, flat_run(problem, SPLITS[i % 3], by), left, weights, out,
                delay=lambda r, late=late: torch.cuda._sleep(300_000) if r == late else None,
            )  # fmt: skip
        group.synchronize()
        for i, ((_, problem, _), (left, weights, out)) in enumerate(zip(calls, data, strict=True)):
            want = wanted(problem, left, weights)
            for rank in range(world):
                assert torch.equal(out[rank], want[rank]), f"batch {batch} call {i} rank {rank}"


def test_what_a_flat_kernel_refuses() -> None:
    kernel = load_kernel("gemm_rs_bf16_sm90_16x64x128_1x1_flat_auto")
    problem = Problem(kernel.signature, 8, 64, 256, 2)
    group = LocalGroup.for_problems(load_support(), problem)
    left, weights, out = operands(problem)
    for run in (
        flat_run(problem, 4),  # of two tiles of k
        flat_run(problem, 3),
        RunConfig((1, 1), transport=Transport.PEER_STORE),
    ):
        with pytest.raises(KernelError):
            group.run(kernel, problem, run, left, weights, out)
