"""Fused kernels on one GPU: W in-process ranks, real flags, bit-exact against fp32 references."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from fluxgen.core.config import ChunkAxis, RunConfig, Transport  # noqa: E402
from fluxgen.core.errors import CommTimeout, KernelError  # noqa: E402
from fluxgen.core.op import Op  # noqa: E402
from fluxgen.core.problem import Problem  # noqa: E402
from fluxgen.kernels.sm90 import MAX_SPAN_ACCUMULATORS, accumulator_registers, epilogue_tile  # noqa: E402
from fluxgen.native.workspace import Sizes, sizes  # noqa: E402
from fluxgen.tune.device.local_group import LocalGroup  # noqa: E402
from tests.gpu import kernels  # noqa: E402
from tests.gpu.kernels import kernel_names, load_kernel, load_support  # noqa: E402

KERNELS = [name for name in kernel_names() if "_flat_" not in name]
SUPPORT = load_support
PUSH, PULL = Transport.COPY_ENGINE_PUSH, Transport.COPY_ENGINE_PULL
DRAIN, SM_COPY = Transport.COPY_ENGINE_DRAIN, Transport.SM_COPY
RING = Transport.COPY_ENGINE_RING


def integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Integers in [-3, 3]: products and fp32 sums are exact for every k used here."""
    return torch.randint(-3, 4, shape, device="cuda").to(dtype)


def exact_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a (m, k) times b (n, k) transposed, exact for integers, in fp32 without TF32."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return a.float() @ b.float().t()


def operands(problem: Problem):
    """Fresh inputs and NaN-poisoned outputs of every rank."""
    dtype = getattr(torch, problem.signature.dtype.torch_name)
    w, rows = problem.tp, problem.m_local
    if problem.signature.b_layout == "kn":
        weights = [integers(problem.k, problem.n, dtype=dtype).t() for _ in range(w)]
    else:
        weights = [integers(problem.n, problem.k, dtype=dtype) for _ in range(w)]
    if problem.op is Op.AG_GEMM:
        left = [integers(rows, problem.k, dtype=dtype) for _ in range(w)]
        out = [
            torch.full((problem.m, problem.n), float("nan"), device="cuda", dtype=dtype)
            for _ in range(w)
        ]
    else:  # of a gemm_ar without its outputs
        left = [integers(problem.m, problem.k, dtype=dtype) for _ in range(w)]
        out = [
            torch.full((rows, problem.n), float("nan"), device="cuda", dtype=dtype)
            for _ in range(w)
        ]
    return left, weights, out


def expected(problem: Problem, left, weights):
    """What each rank must hold, bit for bit: fp32 sums, rounded where the kernel rounds."""
    dtype = getattr(torch, problem.signature.dtype.torch_name)
    if problem.op is Op.AG_GEMM:
        gathered = torch.cat(left)
        return [exact_matmul(gathered, b).to(dtype) for b in weights]
    partials = [exact_matmul(a, b).to(dtype).float() for a, b in zip(left, weights, strict=True)]
    total = partials[0].clone()
    for partial in partials[1:]:
        total += partial
    rows = problem.m_local
    return [total[r * rows : (r + 1) * rows].to(dtype) for r in range(problem.tp)]


def run_config(
    problem: Problem, groups=(), panel=0, axis="m", chunks=1, span=1, by=PUSH
) -> RunConfig:
    """``by`` as far as it carries the op: else slabs are pushed, or stored into the peers."""
    drains = by is DRAIN
    if problem.op is Op.AG_GEMM:
        transport = PUSH if drains else by
    else:
        transport = DRAIN if drains else Transport.PEER_STORE
    return RunConfig(tuple(groups), panel, ChunkAxis(axis), chunks, 0, transport, span)


def check(group, kernel, problem, run, delay=None):
    left, weights, out = operands(problem)
    torch.cuda.synchronize()
    group.run(kernel, problem, run, left, weights, out, delay=delay)
    group.synchronize()
    for rank, (got, want) in enumerate(zip(out, expected(problem, left, weights), strict=True)):
        wrong = (got != want).sum().item()
        assert wrong == 0, (
            f"{problem.key} {kernel.kernel.name} {run}: rank {rank}: {wrong} of {got.numel()} "
            f"elements differ, {torch.isnan(got).sum().item()} of them never written"
        )


def sizes_for(world: int):
    """(rows, n, k): odd sizes, tails of every tile, one element above and below."""
    return [
        (1, 8, 8),
        (37, 136, 72),
        (64, 120, 64),
        (65, 1368, 360),
        (128, 256, 128),
        (129, 72, 1000),
        (200, 2112, 192),
        (256, 768, 512),
    ]


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_exact_for_every_world(name: str, world: int) -> None:
    kernel = load_kernel(name)
    rng = random.Random(f"{name}/{world}")
    problems = [
        Problem(kernel.signature, rows * world, n, k, world) for rows, n, k in sizes_for(world)
    ]
    group = LocalGroup.for_problems(SUPPORT(), *problems)
    for problem in problems:
        groups = rng.choice([(), (world,), (1,) * world, (1, world - 1) if world > 1 else (1,)])
        axis = rng.choice(["m", "k"]) if problem.op is Op.AG_GEMM else "m"
        run = run_config(problem, groups, rng.choice([0, 1, 2, 5]), axis, rng.choice([1, 2, 4]))
        check(group, kernel, problem, run)
        if problem.op is Op.AG_GEMM:
            check(group, kernel, problem, replace(run, transport=PULL))
            check(group, kernel, problem, run_config(problem, groups, by=SM_COPY))
            check(group, kernel, problem, replace(run, transport=RING))
        else:
            check(group, kernel, problem, replace(run, transport=DRAIN))
        if problem.op is Op.AG_GEMM and world > 1:
            span = rng.choice([s for s in range(2, world + 1) if world % s == 0])
            groups = rng.choice([(), (span,) * (world // span)])
            check(group, kernel, problem, run_config(problem, groups, 2, axis, 2, span))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("op", ["ag_gemm_bf16_sm90", "gemm_rs_bf16_sm90", "ag_gemm_bf16_sm80",
                                "gemm_rs_bf16_sm80"])  # fmt: skip
def test_workspaces_in_the_hosts_memory(op: str, world: int) -> None:
    """Where no GPU reaches another's: flags, counters, stages and inboxes behind PCIe."""
    kernel = load_kernel(first_of(op))
    problems = [
        Problem(kernel.signature, rows * world, n, k, world) for rows, n, k in sizes_for(world)
    ]
    group = LocalGroup.for_problems(SUPPORT(), *problems, in_host=True)
    for i, problem in enumerate(problems):
        by = [PULL, SM_COPY][i % 2]
        run = run_config(problem, panel=i % 3, chunks=1 if by is SM_COPY else 1 + i % 2, by=by)
        for _ in range(2):
            check(group, kernel, problem, run)


def first_of(prefix: str) -> str:
    return kernels.first_of(prefix, KERNELS)


N_GRID = (8, 16, 72, 120, 128, 136, 1368, 2112, 2752, 2880, 3424, 3696, 6656)
K_GRID = (8, 16, 24, 40, 64, 72, 96, 128, 192, 360, 512, 1000, 1368, 1376, 1712, 2112, 3696, 147456)
ROWS_GRID = (1, 2, 7, 8, 9, 37, 63, 64, 65, 127, 128, 129, 777)


@pytest.mark.parametrize(
    "op",
    [
        "ag_gemm_bf16_sm90",
        "gemm_rs_bf16_sm90",
        "ag_gemm_bf16_kn_sm90",
        "gemm_rs_bf16_kn_sm90",
        "ag_gemm_bf16_sm80",
        "gemm_rs_bf16_sm80",
        "ag_gemm_bf16_kn_sm80",
        "gemm_rs_bf16_kn_sm80",
        "ag_gemm_fp16",
        "gemm_rs_fp16",
    ],
)
@pytest.mark.parametrize("world", [3, 8])
def test_the_grid_of_sizes(op: str, world: int) -> None:
    """A05, A15: every n, k and row count of the cases that TMA can take, in mixed pairs."""
    kernel = load_kernel(first_of(op))
    sizes = [(ROWS_GRID[i % len(ROWS_GRID)], n, K_GRID[i * 5 % 17]) for i, n in enumerate(N_GRID)]
    sizes += [(ROWS_GRID[i * 3 % 13], N_GRID[i * 2 % 13], k) for i, k in enumerate(K_GRID)]
    sizes += [(rows, 136, 192) for rows in ROWS_GRID]
    problems = [Problem(kernel.signature, rows * world, n, k, world) for rows, n, k in sizes]
    group = LocalGroup.for_problems(SUPPORT(), *problems)
    for i, problem in enumerate(problems):
        run = run_config(problem, panel=i % 3, chunks=1 + i % 2)
        check(group, kernel, problem, run)
        if i % 3 == 0:  # the other ops that the kernel serves
            push = PUSH if problem.op is Op.AG_GEMM else run.transport
            check_exchanges(group, kernel, problem, replace(run, transport=push))
            if problem.op is Op.GEMM_RS:
                check_all_reduce(group, kernel, problem, run)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_pipeline_depths(name: str) -> None:
    """K tiles around the number of stages, with more than one tile per block."""
    kernel = load_kernel(name)
    stages, tile_k = kernel.info.stages, kernel.kernel.tile_k
    rows = kernel.kernel.tile_m * 2
    n = kernel.kernel.tile_n * 80
    depths = [stages - 1, stages, stages + 1, 2 * stages + 1]
    problems = [Problem(kernel.signature, rows * 2, n, d * tile_k, 2) for d in depths]
    group = LocalGroup.for_problems(SUPPORT(), *problems)
    for problem in problems:
        check(group, kernel, problem, run_config(problem))


@pytest.mark.parametrize(
    ("op", "m", "n", "k", "world"),
    [
        ("ag_gemm_bf16_sm90", 8192, 6656, 16384, 8), ("gemm_rs_bf16_sm90", 8192, 8192, 3696, 8),
        ("ag_gemm_bf16_sm90", 4096, 20480, 5120, 1), ("gemm_rs_bf16_sm90", 1024, 1024, 1024, 8),
        ("gemm_rs_fp16", 1024, 1024, 1024, 8), ("ag_gemm_bf16_sm90", 1680, 1024, 512, 7),
    ],
)  # fmt: skip
def test_reported_shapes(op: str, m: int, n: int, k: int, world: int) -> None:
    """A13, A19, E01, F01: shapes that hung, threw or were wrong elsewhere."""
    kernel = load_kernel(first_of(op))
    problem = Problem(kernel.signature, m, n, k, world)
    group = LocalGroup.for_problems(SUPPORT(), problem)
    check(group, kernel, problem, run_config(problem, panel=4))


@pytest.mark.parametrize("world", [2, 4, 6, 8])
@pytest.mark.parametrize("name", [n for n in sorted(KERNELS) if n.startswith("gemm_rs")])
def test_spanned_owners(name: str, world: int) -> None:
    """gemm_rs tiles whose rows belong to several owners."""
    kernel = load_kernel(name)
    if "_sm80_" in name:
        pytest.skip("any span of any rows: the next test")
    if accumulator_registers(kernel.kernel) > MAX_SPAN_ACCUMULATORS:
        pytest.skip("too many accumulators for span; refused on the host")
    unit = epilogue_tile(kernel.kernel)[0]
    spans = [
        s
        for s in range(2, world + 1)
        if world % s == 0
        and kernel.kernel.tile_m % s == 0
        and kernel.kernel.tile_m // s % unit == 0
    ]
    if not spans:
        pytest.skip(f"no span of {world} ranks fills a {kernel.kernel.tile_m}-row tile")
    for span in spans:
        rows = kernel.kernel.tile_m // span
        for n, k in [(8, 8), (264, 200), (1368, 512)]:
            problem = Problem(kernel.signature, rows * world, n, k, world)
            group = LocalGroup.for_problems(SUPPORT(), problem)
            for groups in [(), (span,) * (world // span)]:
                check(group, kernel, problem, run_config(problem, groups, 2, span=span))
                check(group, kernel, problem, run_config(problem, groups, 2, span=span, by=DRAIN))


@pytest.mark.parametrize(
    "name", [n for n in sorted(KERNELS) if n.startswith("gemm_rs") and "_sm80_" in n]
)
def test_any_span_of_any_rows_on_ampere(name: str) -> None:
    """Its epilogue stores row by row, so slabs need not fill a tile."""
    kernel = load_kernel(name)
    for world, span, rows in [(2, 2, 37), (4, 2, 96), (4, 4, 1), (8, 4, 129), (6, 3, 64)]:
        problem = Problem(kernel.signature, rows * world, 264, 200, world)
        group = LocalGroup.for_problems(SUPPORT(), problem)
        for groups in [(), (span,) * (world // span)]:
            check(group, kernel, problem, run_config(problem, groups, 2, span=span))
            check(group, kernel, problem, run_config(problem, groups, 2, span=span, by=DRAIN))


@pytest.mark.parametrize("name", [n for n in sorted(KERNELS) if n.startswith("gemm_rs")])
def test_drained_chunks(name: str) -> None:
    """Every cut of a slab, the last chunk short, both transports in turn on one workspace."""
    kernel = load_kernel(name)
    tile, world = kernel.kernel.tile_m, 4
    problems = [
        Problem(kernel.signature, rows * world, n, 192, world)
        for rows, n in [(tile, 264), (3 * tile + 8, 1368), (16 * tile, 136)]
    ]
    group = LocalGroup.for_problems(SUPPORT(), *problems)
    for problem in problems:
        for chunks, groups in [(1, (4,)), (2, (2, 1, 1)), (3, (1,) * 4), (16, ()), (8, (3, 1))]:
            check(group, kernel, problem, run_config(problem, groups, 3, chunks=chunks, by=DRAIN))
            check(group, kernel, problem, run_config(problem, groups, 0, chunks=chunks))


@pytest.mark.parametrize("world", [2, 4, 8])
def test_delayed_rank_and_back_to_back(world: int) -> None:
    """H01: AG, RS, AG, RS... on one workspace, new data each call, each rank late in turn."""
    pair = [
        load_kernel(first_of("ag_gemm_bf16_sm90")),
        load_kernel(first_of("gemm_rs_bf16_sm90")),
    ]
    rows, n, k = 72, 264, 136
    problems = [Problem(kern.signature, rows * world, n, k, world) for kern in pair]
    group = LocalGroup.for_problems(SUPPORT(), *problems)
    rounds = 8
    data = []
    for _ in range(rounds):
        data.append([operands(p) for p in problems])
    torch.cuda.synchronize()
    for repeat in range(rounds):
        for kernel, problem, (left, weights, out) in zip(pair, problems, data[repeat], strict=True):
            late = repeat % world
            group.run(
                kernel,
                problem,
                run_config(problem, by=(PUSH, PULL, RING, DRAIN)[4 * repeat // rounds]),
                left,
                weights,
                out,
                delay=lambda r, late=late: torch.cuda._sleep(3_000_000) if r == late else None,
            )
    group.synchronize()
    for repeat in range(rounds):
        for problem, (left, weights, out) in zip(problems, data[repeat], strict=True):
            for got, want in zip(out, expected(problem, left, weights), strict=True):
                assert torch.equal(got, want), f"{problem.key} round {repeat}"


def exchanged(parts, rank: int):
    """What a rank gets of every rank's rows."""
    return torch.cat([part.chunk(len(parts))[rank] for part in parts])


def check_exchanges(group, kernel, problem: Problem, run: RunConfig) -> None:
    """The all-to-all that the kernel serves, of new data; outputs are NaN before."""
    dtype = getattr(torch, problem.signature.dtype.torch_name)
    world = problem.tp
    op = Op.A2A_GEMM if problem.op is Op.AG_GEMM else Op.GEMM_A2A
    posed = replace(problem, signature=replace(problem.signature, op=op))
    left = [integers(problem.m, problem.k, dtype=dtype) for _ in range(world)]
    weights = operands(problem)[1]
    out = all_rows(problem)
    torch.cuda.synchronize()
    group.run(kernel, posed, run, left, weights, out)
    group.synchronize()
    products = [exact_matmul(a, b).to(dtype) for a, b in zip(left, weights, strict=True)]
    for rank, got in enumerate(out):
        if op is Op.A2A_GEMM:
            want = exact_matmul(exchanged(left, rank), weights[rank]).to(dtype)
        else:
            want = exchanged(products, rank)
        assert torch.equal(got, want), f"{posed.key} {run} rank {rank}"


def check_all_reduce(group, kernel, problem: Problem, run: RunConfig) -> None:
    """The all-reduce of the rows of a gemm_rs, by its kernel, of new data."""
    posed = replace(problem, signature=replace(problem.signature, op=Op.GEMM_AR))
    dtype = getattr(torch, problem.signature.dtype.torch_name)
    left = [integers(problem.m, problem.k, dtype=dtype) for _ in range(problem.tp)]
    weights, out = operands(problem)[1], all_rows(posed)
    torch.cuda.synchronize()
    group.run(kernel, posed, run, left, weights, out)
    group.synchronize()
    want = shared(posed, left, weights, None)
    for rank, got in enumerate(out):
        assert torch.equal(got, want), f"{posed.key} {run} rank {rank}"


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize(
    "prefix", ["gemm_rs_bf16_sm90_128x192x64_2x1", "ag_gemm_bf16_sm90_128x192x64_2x1",
               "gemm_rs_bf16_sm80_128x256x32", "ag_gemm_bf16_kn_sm90"]
)  # fmt: skip
def test_all_to_all_in_every_world(prefix: str, world: int) -> None:
    kernel = load_kernel(first_of(prefix))
    problems = [Problem(kernel.signature, r * world, n, k, world) for r, n, k in sizes_for(world)]
    group = LocalGroup.for_problems(SUPPORT(), *problems)
    for i, problem in enumerate(problems):
        ways = (PUSH,) if problem.op is Op.AG_GEMM else (PUSH, DRAIN)
        for by in ways:
            run = run_config(problem, panel=i % 3, chunks=1 + i % 2, by=by)
            check_exchanges(group, kernel, problem, run)


SHARING = [
    "gemm_rs_bf16_sm90_128x192x64_2x1", "gemm_rs_fp16_sm90_64x160x64_2x2",
    "gemm_rs_bf16_kn_sm90_128x128x64_1x1", "gemm_rs_bf16_sm80_128x256x32",
]  # fmt: skip


def shared(problem: Problem, left, weights, residual):
    """What every rank of an all-reduce must hold."""
    dtype = getattr(torch, problem.signature.dtype.torch_name)
    total = sum(exact_matmul(a, b).to(dtype).float() for a, b in zip(left, weights, strict=True))
    return (total if residual is None else total + residual.float()).to(dtype)


def all_rows(problem: Problem):
    """NaN-poisoned outputs of an all-reduce."""
    dtype = getattr(torch, problem.signature.dtype.torch_name)
    size = problem.m, problem.n
    return [torch.full(size, float("nan"), device="cuda", dtype=dtype) for _ in range(problem.tp)]


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("prefix", SHARING)
def test_all_reduce_in_every_world(prefix: str, world: int) -> None:
    kernel = load_kernel(first_of(prefix))
    dtype = getattr(torch, kernel.signature.dtype.torch_name)
    signature = replace(kernel.signature, op=Op.GEMM_AR)
    problems = [Problem(signature, r * world, n, k, world) for r, n, k in sizes_for(world)]
    group = LocalGroup.for_problems(SUPPORT(), *problems)
    for i, problem in enumerate(problems):
        for by in (PUSH, DRAIN):
            left, weights, _ = operands(problem)
            residual = integers(problem.m, problem.n, dtype=dtype) if i % 2 else None
            out = all_rows(problem)
            torch.cuda.synchronize()
            group.run(
                kernel, problem, run_config(problem, chunks=1 + i % 2, by=by), left, weights, out,
                residual=residual,
            )  # fmt: skip
            group.synchronize()
            want = shared(problem, left, weights, residual)
            for rank, got in enumerate(out):
                assert torch.equal(got, want), f"{problem.key} {by} rank {rank}"


@pytest.mark.parametrize("world", [2, 4, 8])
def test_all_reduces_among_other_calls(world: int) -> None:
    """Back to back on one workspace, sizes in turn, new data each call, each rank late in turn."""
    pair = [load_kernel(first_of(f"{op}_bf16_sm90")) for op in ("ag_gemm", "gemm_rs")]
    problems = [
        Problem(kernel.signature, rows * world, n, 136, world)
        for rows, n in ((72, 264), (8, 1368))
        for kernel in pair
    ]
    group = LocalGroup.for_problems(SUPPORT(), *problems)
    for begin in (0, 12):
        queued = []
        for call in range(begin, begin + 12):
            kind = call % 3  # ag_gemm, gemm_rs, all-reduce
            problem = problems[2 * (call // 2 % 2) + min(kind, 1)]
            left, weights, out = operands(problem)
            if kind == 2:
                problem = replace(problem, signature=replace(problem.signature, op=Op.GEMM_AR))
                out = all_rows(problem)
            queued.append((problem, left, weights, out, kind))
        torch.cuda.synchronize()
        for call, (problem, left, weights, out, kind) in enumerate(queued, begin):
            late = call % world
            group.run(
                pair[min(kind, 1)], problem,
                run_config(problem, by=(PUSH, PULL, DRAIN)[call // 2 % 3]), left, weights, out,
                delay=lambda r, late=late: torch.cuda._sleep(3_000_000) if r == late else None,
            )  # fmt: skip
        group.synchronize()
        for call, (problem, left, weights, out, kind) in enumerate(queued, begin):
            want = (
                [shared(problem, left, weights, None)] * world if kind == 2
                else expected(problem, left, weights)
            )  # fmt: skip
            for rank in range(world):
                assert torch.equal(out[rank], want[rank]), f"call {call}, rank {rank}"


@pytest.mark.slow
def test_thousand_calls() -> None:
    """1,000 back-to-back mixed calls; the last of every ten is checked, all inputs differ."""
    world, rows, n, k = 4, 64, 128, 128
    pair = [
        load_kernel(first_of("ag_gemm_bf16_sm90")),
        load_kernel(first_of("gemm_rs_bf16_sm90")),
    ]
    problems = [Problem(kern.signature, rows * world, n, k, world) for kern in pair]
    group = LocalGroup.for_problems(SUPPORT(), *problems)
    checked = 0
    for batch in range(100):
        data = [operands(problems[i % 2]) for i in range(10)]
        torch.cuda.synchronize()
        for i, (left, weights, out) in enumerate(data):
            run = run_config(problems[i % 2], by=(SM_COPY, PUSH, RING, DRAIN, DRAIN)[i % 5])
            group.run(pair[i % 2], problems[i % 2], run, left, weights, out)
        group.synchronize()
        for i, (left, weights, out) in enumerate(data):
            for got, want in zip(out, expected(problems[i % 2], left, weights), strict=True):
                assert torch.equal(got, want), f"batch {batch} call {i}"
            checked += 1
    assert checked == 1000
    for workspace in group.workspaces:
        assert workspace[:4].view(torch.int32).item() == 1000, "one epoch a call"


@pytest.mark.parametrize("by", [PUSH, DRAIN])
def test_missing_peer_times_out_and_the_gpu_stays_usable(by) -> None:
    """A rank that never starts: the others report which wait passed its deadline."""
    kernel = load_kernel(first_of("gemm_rs_bf16_sm90"))
    problem = Problem(kernel.signature, 128, 128, 128, 2)
    group = LocalGroup.for_problems(SUPPORT(), problem, timeout_s=0.5)
    left, weights, out = operands(problem)
    group.world = 1  # only rank 0 is driven; its peer table still names rank 1
    group.run(kernel, problem, run_config(problem, by=by), left, weights, out)
    group.world = 2
    with pytest.raises(CommTimeout) as caught:
        group.synchronize()
    assert (caught.value.rank, caught.value.peer, caught.value.chunk) == (0, 1, 0)
    assert (caught.value.expected, caught.value.seen) == (1, 0)
    again = LocalGroup.for_problems(SUPPORT(), problem)
    check(again, kernel, problem, run_config(problem, by=by))


@pytest.mark.parametrize(
    ("n", "k", "word"), [(36, 64, "n=36"), (64, 100, "k=100"), (64, 4, "k=4"), (1026, 64, "n=1026")]
)
def test_what_tma_cannot_do_is_refused_before_launch(n: int, k: int, word: str) -> None:
    """A05, A09, A11: the full constraint with the values, on the host."""
    kernel = load_kernel(sorted(KERNELS)[0])
    problem = Problem(kernel.signature, 128, n, k, 1)
    group = LocalGroup(1, SUPPORT(), Sizes(1 << 20, 1 << 20))
    args = group._gemm_args(0, problem, kernel.kernel, run_config(problem))
    _left, weights, _out = operands(problem)
    args.a = args.b = args.d = weights[0].data_ptr()
    args.a_row_stride = args.b_row_stride = max(n, k)
    args.d_row_stride = n
    with pytest.raises(KernelError, match=word):
        kernel.launch(args, 0)
    torch.cuda.synchronize()


def test_padded_rows_and_misaligned_views() -> None:
    """A07, A17, D05, D07: aligned padded strides are taken as they are, others refused."""
    name = first_of("gemm_rs_bf16_sm90")
    kernel = load_kernel(name)
    problem = Problem(kernel.signature, 256, 264, 96, 2)
    group = LocalGroup.for_problems(SUPPORT(), problem)
    left, weights, out = operands(problem)
    padded = []
    for a in left:
        buffer = torch.full((problem.m, 104), float("nan"), device="cuda", dtype=a.dtype)
        buffer[:, :96] = a
        padded.append(buffer[:, :96])
    torch.cuda.synchronize()
    group.run(kernel, problem, run_config(problem), padded, weights, out)
    group.synchronize()
    for got, want in zip(out, expected(problem, left, weights), strict=True):
        assert torch.equal(got, want)

    args = group._gemm_args(0, problem, kernel.kernel, run_config(problem))
    args.a, args.a_row_stride = padded[0].data_ptr(), 103
    args.b, args.b_row_stride = weights[0].data_ptr(), 96
    with pytest.raises(KernelError, match="row strides"):
        kernel.launch(args, 0)
    args.a, args.a_row_stride = padded[0].data_ptr() + 2, 104
    with pytest.raises(KernelError, match="16 bytes"):
        kernel.launch(args, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("m", "world"), [(262144, 2), (262152, 8)])
def test_huge_m_ag(m: int, world: int) -> None:
    """C05: a gathered buffer of 2^31 elements and more; the last rows are checked."""
    kernel = load_kernel(first_of("ag_gemm_bf16_sm90"))
    problem = Problem(kernel.signature, m, 64, 8192, world)
    group = LocalGroup.for_problems(SUPPORT(), problem)
    left, weights, out = operands(problem)
    torch.cuda.synchronize()
    group.run(kernel, problem, run_config(problem, chunks=2), left, weights, out)
    group.synchronize()
    for rank, (got, weight) in enumerate(zip(out, weights, strict=True)):
        assert not torch.isnan(got).any(), "every row is written"
        for rows in (slice(0, 200), slice(m // world - 100, m // world), slice(m - 300, m)):
            gathered = torch.cat(left)[rows] if world == 2 else _rows(left, rows)
            want = exact_matmul(gathered, weight).to(got.dtype)
            assert torch.equal(got[rows], want), f"rank {rank} rows {rows}"


def _rows(slabs, rows: slice) -> torch.Tensor:
    size = slabs[0].shape[0]
    return torch.stack([slabs[i // size][i % size] for i in range(rows.start, rows.stop)])


@pytest.mark.slow
def test_huge_rs() -> None:
    """C01, C03: m x n of 3.2e9 elements, strides beyond 2^31."""
    kernel = load_kernel(first_of("gemm_rs_bf16_sm90"))
    problem = Problem(kernel.signature, 49152, 65536, 64, 2)
    group = LocalGroup(2, SUPPORT(), sizes(problem, Transport.PEER_STORE))
    left, weights, out = operands(problem)
    torch.cuda.synchronize()
    group.run(kernel, problem, run_config(problem), left, weights, out)
    group.synchronize()
    rows = problem.m_local
    for rank, got in enumerate(out):
        assert not torch.isnan(got).any()
        for part in (slice(0, 128), slice(rows - 200, rows)):
            block = slice(rank * rows + part.start, rank * rows + part.stop)
            partial = [
                exact_matmul(a[block], b).to(got.dtype).float()
                for a, b in zip(left, weights, strict=True)
            ]
            assert torch.equal(got[part], (partial[0] + partial[1]).to(got.dtype))
