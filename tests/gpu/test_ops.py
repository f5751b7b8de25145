"""The ops on the fused path: processes as ranks on one GPU, bit-exact against fp32 references."""

from __future__ import annotations

import collections
import time
from unittest import mock

import pytest

torch = pytest.importorskip("torch")


from fluxgen.runtime.ops import all_gather_matmul, matmul_reduce_scatter  # noqa: E402
from fluxgen.runtime.ops.all_reduce import matmul_all_reduce  # noqa: E402
from fluxgen.runtime.session import launches as runs  # noqa: E402
from fluxgen.runtime.session.dispatch import Cause, explain, strict  # noqa: E402
from fluxgen.runtime.session.groups import check_timeouts, reset, state_of  # noqa: E402
from tests.dist.async_tp import check_layers  # noqa: E402
from tests.gpu.ranks import (  # noqa: E402
    FEW,
    FEW_NK,
    SIZES,
    TRAINED,
    Environment,
    database,
    integers,
    pool,
    product,
    scattered,
    shapes,
)

WORLDS = (2, 4, 8)
GROUPS = {
    4: {"pair": [0, 1], "even": [0, 2], "odd": [1, 3], "reversed": [3, 1], "three": [1, 2, 3]},
    8: {"five": [0, 1, 2, 3, 4], "seven": [1, 2, 3, 4, 5, 6, 7], "six": [0, 1, 2, 4, 5, 6]},
}


@pytest.fixture(scope="module")
def pools():
    made = {}

    def get(world):
        # Idle processes cost the GPU memory only; starting eight takes most of a test's time.
        if world not in made:
            made[world] = pool(world, GROUPS.get(world))
        return made[world]

    yield get
    for each in made.values():
        each.close()


def check(got, want, what=""):
    wrong = int((got != want).sum())  # NaN differs from everything
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert wrong == 0, f"{what}: {wrong} of {got.numel()} differ, {int(got.isnan().sum())} are NaN"


def both(group, rows, n, k, seed, bias=False, avg=False):
    """One call of each op with fresh inputs, checked bit for bit."""
    world, me = group.size(), group.rank()
    x, w = integers(seed, rows * world, k), integers(seed + 1 + me, n, k)
    b = integers(seed + 50, n) if bias else None
    y, gathered = all_gather_matmul(
        x.chunk(world)[me].clone(), w, b, group=group, return_gathered=True
    )
    check(gathered, x, "gathered")
    want = product(x, w).bfloat16()
    check(y, want if b is None else want + b, f"ag {rows} {n} {k}")
    xs = [integers(seed + 100 + r, rows * world, k) for r in range(world)]
    ws = [integers(seed + 200 + r, n, k) for r in range(world)]
    reduce_op = "avg" if avg else "sum"
    y = matmul_reduce_scatter(xs[me], ws[me], b, group=group, reduce_op=reduce_op)
    partials = [product(a, c) for a, c in zip(xs, ws, strict=True)]
    check(y, scattered(partials, me, 1 / world if avg else 1.0, b), f"rs {rows} {n} {k}")


def _forward(groups, rank, name):
    group = groups.get(name)
    if group is None:
        return None
    with strict(), explain() as seen:
        for i, (rows, n, k) in enumerate(SIZES):
            # 1 / W is exact for powers of two only, and the kernel fuses the addition of the bias.
            avg = i % 3 == 0 and group.size() in (2, 4, 8)
            both(group, rows, n, k, 1000 * i, bias=i % 2 == 0, avg=avg)
    assert {d.cause for d in seen.decisions} == {Cause.FUSED}, str(seen)
    return state_of(group).fused.workspace.group.world


@pytest.mark.parametrize(
    ("world", "name"),
    [
        (2, "all"), (4, "all"), (4, "pair"), (4, "reversed"), (4, "three"),
        (8, "all"), (8, "five"), (8, "six"), (8, "seven"),
    ],
)  # fmt: skip
def test_forward_is_exact_in_every_world(pools, world, name):  # F01, F11, E01, E03
    start = time.perf_counter()
    results = [r for r in pools(world)(_forward, name) if r is not None]
    size = len(GROUPS.get(world, {}).get(name, range(world)))
    assert results == [size] * size
    print(f"world {world} {name}: {time.perf_counter() - start:.1f} s")


def _all_reduced(groups, rank):
    group, world = groups["all"], groups["all"].size()
    with explain() as seen:
        for i, (rows, n, k) in enumerate(SIZES):
            lead = (world, rows) if i % 2 else (rows * world,)
            xs = [integers(900 * i + r, *lead, k) for r in range(world)]
            ws = [integers(900 * i + 100 + r, n, k) for r in range(world)]
            partials = [product(a.flatten(0, -2), c) for a, c in zip(xs, ws, strict=True)]
            bias, residual = integers(900 * i + 50, n), integers(900 * i + 51, *lead, n)
            with strict():
                y = matmul_all_reduce(xs[rank], ws[rank], bias, residual, group=group)
            total = sum(p.bfloat16().float() for p in partials).view(*lead, n) + bias.float()
            check(y, (total + residual.float()).bfloat16(), f"ar {rows} {n} {k}")
        x, w = integers(7, 1, 16), integers(8 + rank, 136, 16)  # decoding: unfused
        y = matmul_all_reduce(x, w, group=group)
        total = sum(product(x, integers(8 + r, 136, 16)) for r in range(world))
        check(y, total.bfloat16(), "one token")
    return [d.cause for d in seen.decisions]


@pytest.mark.parametrize("world", [2, 4])
def test_all_reduce(pools, world):
    for causes in pools(world)(_all_reduced):
        assert causes == [Cause.FUSED] * len(SIZES) + [Cause.NO_RECORD]


def _few_all_reduced(groups, rank):
    """In one shot, in packets and with flags, in turn; then replayed, other inputs each time."""
    group, world = groups["all"], groups["all"].size()
    n, k = FEW_NK
    w = integers(50 + rank, n, k)
    weights = [integers(50 + r, n, k) for r in range(world)]

    def inputs(seed, m):
        return [integers(1000 * seed + 10 * m + r, m, k) for r in range(world)]

    def wanted(xs):
        partials = [product(x, c) for x, c in zip(xs, weights, strict=True)]
        return sum(p.bfloat16().float() for p in partials).bfloat16()

    with strict():
        for seed in range(4):
            if seed % world == rank:
                time.sleep(0.05)
            ys = {m: matmul_all_reduce(inputs(seed, m)[rank], w, group=group) for m in FEW}
            for m, y in ys.items():
                check(y, wanted(inputs(seed, m)), f"{m} tokens, call {seed}")
        static = {m: torch.empty(m, k, dtype=w.dtype, device="cuda") for m in FEW}
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = {m: matmul_all_reduce(x, w, group=group) for m, x in static.items()}
        for seed in range(10, 13):  # an odd number of calls in each
            for m, x in static.items():
                x.copy_(inputs(seed, m)[rank])
                outs[m].fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            for m, y in outs.items():
                check(y, wanted(inputs(seed, m)), f"{m} tokens, replay {seed}")


@pytest.mark.parametrize("world", [2, 4])
def test_all_reduces_of_few_tokens(pools, world):
    pools(world)(_few_all_reduced)


def _several_and_dims(groups, rank):
    """Several weights, other dims, bias, padded, transposed and misaligned operands."""
    group, world = groups["all"], groups["all"].size()
    x = integers(1, 72 * world, 136)
    mine = x.chunk(world)[rank].clone()
    ws = [integers(10 * rank + i, 264 // 3, 136) for i in range(3)]
    biases = [integers(5, 88), None, integers(6, 88)]
    with strict():
        ys = all_gather_matmul(mine, ws, biases, group=group)
    for y, w, b in zip(ys, ws, biases, strict=True):
        want = product(x, w).bfloat16()
        check(y, want if b is None else want + b, "one of three weights")

    # (B, S/W, K) along dim 1; each batch's rows are not contiguous.
    batch = integers(2, 2, 36 * world, 136)
    w = integers(30 + rank, 264, 136)
    with strict():
        y, gathered = all_gather_matmul(
            batch.chunk(world, 1)[rank].clone(), w, group=group, gather_dim=1, return_gathered=True
        )
        check(gathered, batch, "gathered along dim 1")
        check(y, product(batch.flatten(0, 1), w).bfloat16().view(2, -1, 264), "dim 1")
        xs = [integers(40 + r, 2, 36 * world, 136) for r in range(world)]
        wr = [integers(60 + r, 264, 136) for r in range(world)]
        y = matmul_reduce_scatter(xs[rank], wr[rank], group=group, scatter_dim=1)
    partials = [
        product(a.flatten(0, 1), c).view(2, -1, 264).transpose(0, 1).contiguous()
        for a, c in zip(xs, wr, strict=True)
    ]
    check(y, scattered(partials, rank).transpose(0, 1), "scattered along dim 1")

    buffer = torch.full((72, 144), float("nan"), device="cuda", dtype=torch.bfloat16)
    buffer[:, :136] = mine
    flat = torch.full((1 + 72 * 136,), float("nan"), device="cuda", dtype=torch.bfloat16)
    flat[1:] = mine.flatten()
    wide = torch.full((264, 137), float("nan"), device="cuda", dtype=torch.bfloat16)
    wide[:, :136] = w
    want = product(x, w).bfloat16()
    with strict():
        for name, a, c in (  # A07, A17, D01, D05, D07
            ("padded rows", buffer[:, :136], w),
            ("misaligned x", flat[1:].view(72, 136), w),
            ("transposed x", mine.t().contiguous().t(), w),
            ("odd stride of w", mine, wide[:, :136]),
            ("expanded", mine[:1].expand(72, 136), w),
        ):
            y = all_gather_matmul(a, c, group=group)
            rows = slice(rank * 72, rank * 72 + 72)
            if name == "expanded":
                check(y[rows], product(a.contiguous(), w).bfloat16(), name)
            else:
                check(y, want, name)


def test_operands_of_every_kind(pools):
    pools(4)(_several_and_dims)


def _unfit(groups, rank):
    """What no kernel takes runs unfused, on every rank, and says why."""
    group, world = groups["all"], groups["all"].size()
    with explain() as seen:
        for m, n, k in [(2, 36, 64), (2, 64, 100), (0, 64, 64), (3, 8, 8)]:  # A09, B01
            x, w = integers(1, m * world, k), integers(2, n, k)
            y = all_gather_matmul(x.chunk(world)[rank].clone() if m else x, w, group=group)
            check(y, product(x, w).bfloat16(), f"{m} {n} {k}")
    causes = [d.cause for d in seen.decisions]
    assert causes == [Cause.NO_RECORD] * 2 + [Cause.NOTHING_TO_DO, Cause.NO_RECORD]
    # A rank's own bias is reduced with its product, on whichever ranks have one.
    x, w = integers(3, 8 * world, 64), integers(4, 16, 64)
    bias = integers(5, 16)
    y = matmul_reduce_scatter(x, w, bias if rank == 1 else None, group=group, bias_mode="partial")
    want = (product(x, w) * world + bias.float()).chunk(world)[rank]
    assert (y.float() - want).abs().max() <= want.abs().max() / 64
    both(group, 72, 264, 136, 7)  # still in step


def test_what_does_not_fit_runs_unfused(pools):
    pools(4)(_unfit)


def _backward(groups, rank):
    """Gradients of both ops are bit-exact; every matmul with communication is fused."""
    group, world = groups["all"], groups["all"].size()
    rows, n, k = 72, 264, 136
    x, w = integers(1, rows * world, k), [integers(10 + r, n, k) for r in range(world)]
    dy = [integers(20 + r, rows * world, n) for r in range(world)]
    mine, mw = x.chunk(world)[rank].clone().requires_grad_(), w[rank].clone().requires_grad_()
    with explain() as seen:
        for keep in (False, True):
            mine.grad = mw.grad = None
            all_gather_matmul(mine, mw, group=group, save_gathered=keep).backward(dy[rank])
            partials = [product(g, c.t()) for g, c in zip(dy, w, strict=True)]
            check(mine.grad, scattered(partials, rank), "dx of the gather")
            check(mw.grad, product(dy[rank].t(), x.t()).bfloat16(), "dw of the gather")
    assert [d.cause for d in seen.decisions] == [Cause.FUSED] * 4, str(seen)
    xs = [integers(30 + r, rows * world, k) for r in range(world)]
    bias = integers(40, n).requires_grad_()
    mine, mw = xs[rank].clone().requires_grad_(), w[rank].clone().requires_grad_()
    g = integers(50, rows * world, n)
    with explain() as seen:
        y = matmul_reduce_scatter(mine, mw, bias, group=group)
        y.backward(g.chunk(world)[rank].clone())
    assert [d.cause for d in seen.decisions] == [Cause.FUSED] * 2, str(seen)
    check(mine.grad, product(g, mw.detach().t()).bfloat16(), "dx of the scatter")
    check(mw.grad, product(g.t(), mine.detach().t()).bfloat16(), "dw of the scatter")
    want = g.float().sum(0)
    assert (bias.grad.float() - want).abs().max() <= want.abs().max() / 64


def test_backward_is_fused_too(pools):  # E05
    pools(4)(_backward)


def _late(groups, rank, repeats):
    """H01, H03: back to back without a synchronisation, each rank late in turn."""
    group, world = groups["all"], groups["all"].size()
    rows, n, k = 72, 264, 136
    data = []
    for i in range(repeats):
        x, w = integers(i, rows * world, k), integers(9, n, k)
        xs = [integers(1000 + i * world + r, rows * world, k) for r in range(world)]
        data.append((x, w, xs))
    torch.cuda.synchronize()
    outs = []
    for i, (x, w, xs) in enumerate(data):
        if i % world == rank:
            torch.cuda._sleep(2_000_000)
        outs.append(
            (
                all_gather_matmul(x.chunk(world)[rank], w, group=group),
                matmul_reduce_scatter(xs[rank], w, group=group),
                all_gather_matmul(x.chunk(world)[rank], w, group=group),
            )
        )
    torch.cuda.synchronize()
    for i, ((x, w, xs), (first, second, third)) in enumerate(zip(data, outs, strict=True)):
        check(first, product(x, w).bfloat16(), f"call {i} gather")
        check(third, product(x, w).bfloat16(), f"call {i} gather again")
        check(second, scattered([product(a, w) for a in xs], rank), f"call {i} scatter")


@pytest.mark.parametrize("world", WORLDS)
def test_back_to_back_with_a_late_rank(pools, world):
    pools(world)(_late, 12 if world < 8 else 8)


def _graphs(groups, rank, replays):
    """Graphs of two sizes, one with an odd number of gathers, on one workspace; eager between."""
    group, world = groups["all"], groups["all"].size()
    n, k = 264, 136
    w = integers(3, n, k)
    fresh, other = integers(77, 1, 64), integers(78, 96, 64)
    message = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            all_gather_matmul(fresh, other, group=group)
    except RuntimeError as error:
        message = f"{type(error).__name__}: {error}"
    torch.cuda.synchronize()
    made = []
    for rows in (72, 36):
        x = torch.zeros(rows, k, device="cuda", dtype=torch.bfloat16)
        a = torch.zeros(rows * world, k, device="cuda", dtype=torch.bfloat16)

        def step(x=x, a=a, odd=rows == 72):
            y = all_gather_matmul(x, w, group=group)
            z = matmul_reduce_scatter(a, w, group=group)
            return (y, z, all_gather_matmul(x, w, group=group) if odd else None)

        step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = step()
        made.append((rows, x, a, graph, outs))
    for i in range(replays):
        rows, x, a, graph, (y, z, again) = made[i % 3 % 2]
        whole = integers(5000 + i, rows * world, k)
        parts = [integers(9000 + i * world + r, rows * world, k) for r in range(world)]
        x.copy_(whole.chunk(world)[rank])
        a.copy_(parts[rank])
        y.fill_(float("nan"))
        z.fill_(float("nan"))
        graph.replay()
        check(y, product(whole, w).bfloat16(), f"replay {i}")
        if again is not None:
            check(again, y, f"replay {i} again")
        check(z, scattered([product(p, w) for p in parts], rank), f"replay {i} scatter")
        if i % 10 == 0:
            both(group, 72, n, k, 100 * i)
    # A larger call makes a new workspace; the graphs keep theirs.
    both(group, 200, 1368, 360, 1)
    made[0][3].replay()
    torch.cuda.synchronize()
    return message


def test_graphs(pools):  # G01, G03, G05
    for message in pools(2)(_graphs, 60):
        assert message.startswith("CaptureError")
        assert "once with the same shapes before the capture" in message


def _grown(groups, rank):
    """A workspace that no graph has captured is replaced, then a call that used it is captured."""
    group, world = groups["all"], groups["all"].size()
    reset(group)
    torch.distributed.barrier(group)
    small, large = integers(1, 36 * world, 136), integers(2, 200 * world, 360)
    w, v = integers(3, 264, 136), integers(4, 1368, 360)
    for _ in range(3):
        all_gather_matmul(small.chunk(world)[rank], w, group=group)
        matmul_reduce_scatter(small, w, group=group)
    check(all_gather_matmul(large.chunk(world)[rank], v, group=group), product(large, v).bfloat16())
    torch.cuda.synchronize()
    mine = small.chunk(world)[rank].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = all_gather_matmul(mine, w, group=group)
        z = matmul_reduce_scatter(small, w, group=group)
    graph.replay()
    check(y, product(small, w).bfloat16(), "captured after growing")
    check(z, scattered([product(small, w)] * world, rank), "captured after growing")
    both(group, 36, 264, 136, 5)


def test_a_capture_after_the_workspace_grew(pools):
    pools(2)(_grown)


def _thousand_replays(groups, rank):
    group, world = groups["all"], groups["all"].size()
    rows, n, k = 72, 264, 136
    w = integers(3, n, k)
    counter = torch.zeros(1, device="cuda", dtype=torch.bfloat16)
    wrong = torch.zeros(1, device="cuda")
    ones = torch.ones(rows * world, k, device="cuda", dtype=torch.bfloat16)

    def step():
        counter.add_(1).remainder_(7)
        a = ones * counter
        y = all_gather_matmul(a[:rows], w, group=group)
        z = matmul_reduce_scatter(a, w, group=group)
        want = (ones * counter).float() @ w.float().t()
        summed = (want.bfloat16().float() * world).bfloat16()[:rows]
        wrong.add_((y != want.bfloat16()).sum() + (z != summed).sum())

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(1000):
        graph.replay()
    torch.cuda.synchronize()
    check_timeouts()
    return int(wrong)


@pytest.mark.slow
def test_a_thousand_replays(pools):  # G03, G07
    assert pools(2)(_thousand_replays) == [0, 0]


def _operands_in_turn(groups, rank, rows, n, k, room):
    """More operands than graphs are kept of a call, over and over; what is not kept is replaced."""
    group, world = groups["all"], groups["all"].size()
    reset(group)
    torch.distributed.barrier(group)
    x, a = integers(1, rows * world, k), integers(2, rows * world, k)
    mine = x.chunk(world)[rank].clone()
    ws = [integers(100 + i, n, k) for i in range(room + 4)]
    with mock.patch.object(runs, "GRAPHS", room), torch.no_grad():
        for i, w in enumerate([*ws] * 4):
            y, gathered = all_gather_matmul(mine, w, group=group, return_gathered=True)
            z = all_gather_matmul(mine, w, group=group)
            s = matmul_reduce_scatter(a, w, group=group)
            want = product(x, w).bfloat16()
            check(y, want, f"call {i}")
            check(z, want, f"call {i} without the gathered x")
            check(gathered, x, f"call {i}, gathered")
            check(s, scattered([product(a, w)] * world, rank), f"call {i}, scattered")
            del y, gathered, z, s, want  # so that the next ones lie where these did
        made = [len(graphs) for graphs in state_of(group).fused._of_runs]
        held = collections.deque(maxlen=5)
        for i, w in enumerate([*ws[:3]] * 8):  # outputs that move
            held.append(all_gather_matmul(mine, w, group=group, return_gathered=True))
            check(held[-1][0], product(x, w).bfloat16(), f"call {i}, moved")
            check(held[-1][1], x, f"call {i}, moved, gathered")
        for _, gathered in held:
            check(gathered, x, "a gathered x that was kept")
    return made


@pytest.mark.parametrize(("rows", "n", "k"), [(72, 264, 136), (129, 136, 512)])
def test_operands_in_turn(pools, rows, n, k):
    for made in pools(2)(_operands_in_turn, rows, n, k, 8):
        assert made == [8, 8, 8], "of the two kinds of gather and the scatter"


def test_one_hardware_queue():
    """What Megatron sets: nothing that spins may be queued before what it waits for."""
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "FLUXGEN_TIMEOUT_S": "6"}
    ranks = pool(2, environment=Environment(database(shapes(2)), **one))
    try:
        assert ranks(_forward, "all") == [2, 2]
        ranks(_late, 12)
        ranks(_graphs, 12)
    finally:
        ranks.close()


def _compiled(groups, rank):
    group, world = groups["all"], groups["all"].size()
    rows, n, k = 72, 264, 136
    x, w1 = integers(1, rows * world, k), integers(2 + rank, n, k)
    w2 = integers(20 + rank, k, n)

    def block(x, w1, w2):
        y = torch.relu(all_gather_matmul(x, w1, group=group)).clamp(max=1)
        return matmul_reduce_scatter(y, w2, group=group)

    mine = x.chunk(world)[rank].clone()
    want = block(mine, w1, w2)
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(mine, w1, w2)
    check(got, want, "compiled")
    torch.library.opcheck(
        torch.ops.fluxgen.all_gather_matmul.default,
        (mine, [w1], [], [False], group.group_name, world, 0, rows * world, True),
    )


def test_compiles_and_passes_opcheck(pools):
    pools(2)(_compiled)


def _two_groups(groups, rank, calls):
    """Two groups that share ranks, in turn; F09."""
    world = groups["all"].size()
    pair = groups.get("even") or groups["odd"]
    rows, n, k = 1, 136, 72
    w = integers(3, n, k)
    xs = [integers(i, rows * world, k) for i in range(7)]
    outs = []
    for i in range(calls):
        if i % 2:
            part = xs[i % 7][: rows * 2]
            outs.append(all_gather_matmul(part.chunk(2)[pair.rank()], w, group=pair))
        else:
            outs.append(all_gather_matmul(xs[i % 7].chunk(world)[rank], w, group=groups["all"]))
    torch.cuda.synchronize()
    wants = [product(x, w).bfloat16() for x in xs]
    for i, y in enumerate(outs):
        check(y, wants[i % 7][: rows * 2] if i % 2 else wants[i % 7], f"call {i}")


def test_two_groups_in_turn(pools):
    pools(4)(_two_groups, 1000)


def _threads(groups, rank):
    """H07, G15: calls of two threads on streams of their own, in one order."""
    import threading

    group, world = groups["all"], groups["all"].size()
    w = integers(3, 136, 72)
    xs = [integers(i, world, 72) for i in range(20)]
    outs = [None] * 20
    turn = threading.Condition()
    state = {"next": 0}

    def work(parity):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        for i in range(parity, 20, 2):
            with turn, torch.cuda.stream(stream):
                turn.wait_for(lambda i=i: state["next"] == i)
                outs[i] = all_gather_matmul(xs[i].chunk(world)[rank], w, group=group)
                state["next"] += 1
                turn.notify_all()

    threads = [threading.Thread(target=work, args=(p,)) for p in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    for i, y in enumerate(outs):
        check(y, product(xs[i], w).bfloat16(), f"call {i}")


def test_threads_and_streams(pools):
    pools(2)(_threads)


def _errors(groups, rank):
    """Random operands against fp64: no error beyond the roundings that the contract names."""
    group, world = groups["all"], groups["all"].size()
    rows, n, k = 72, 264, 136
    torch.manual_seed(5)  # the same draw on every rank
    eps = torch.finfo(torch.bfloat16).eps  # a rounding is off by half of it at most
    xs = torch.randn(world, rows * world, k, device="cuda").bfloat16()
    ws = torch.randn(world, n, k, device="cuda").bfloat16()
    exact = xs.double() @ ws.double().transpose(1, 2)
    # fp32 accumulation of k products: far below a rounding to bf16.
    slack = 2.0**-20 * (xs.double().abs() @ ws.double().abs().transpose(1, 2))
    y = all_gather_matmul(xs[0].chunk(world)[rank], ws[0], group=group)
    assert ((y.double() - exact[0]).abs() <= eps / 2 * exact[0].abs() + slack[0]).all()
    y = matmul_reduce_scatter(xs[rank], ws[rank], group=group)
    total, mine = exact.sum(0).chunk(world)[rank], slice(rank * rows, (rank + 1) * rows)
    bound = eps / 2 * exact[:, mine].abs().sum(0) * (1 + eps) + eps / 2 * total.abs()
    assert ((y.double() - total).abs() <= bound + 2 * slack[:, mine].sum(0)).all()
    again = [matmul_reduce_scatter(xs[rank], ws[rank], group=group) for _ in range(3)]
    assert all(torch.equal(y, other) for other in again), "the same bits on every run"


@pytest.mark.parametrize("world", [2, 8])
def test_errors_against_fp64(pools, world):
    pools(world)(_errors)


def _freed(groups, rank):
    """G05: graphs outlive every Python reference to what they use."""
    import gc

    group, world = groups["all"], groups["all"].size()
    w, x = integers(3, 264, 136), integers(4, 72 * world, 136)
    mine = x.chunk(world)[rank].clone()
    all_gather_matmul(mine, w, group=group)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = all_gather_matmul(mine, w, group=group)
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    for _ in range(3):
        y.fill_(float("nan"))
        graph.replay()
        check(y, product(x, w).bfloat16(), "replay after gc")
    del junk


def test_graphs_keep_what_they_use(pools):
    pools(2)(_freed)


def _interop(groups, rank):
    """Torch's own op names, ours underneath: its B is (K, N)."""
    from fluxgen import interop

    group, world = groups["all"], groups["all"].size()
    x, b = integers(1, 72 * world, 264), integers(2 + rank, 264, 136)
    xs = [integers(20 + r, 72 * world, 264) for r in range(world)]
    bs = [integers(30 + r, 264, 136) for r in range(world)]
    interop.install(group)
    try:
        ops, name = torch.ops.symm_mem, group.group_name
        with strict(), explain() as seen:
            a, (y,) = ops.fused_all_gather_matmul(x.chunk(world)[rank].clone(), [b], 0, name)
            z = ops.fused_matmul_reduce_scatter(xs[rank], bs[rank], "sum", 0, name)
    finally:
        interop.uninstall()
    assert [d.cause for d in seen.decisions] == [Cause.FUSED] * 2
    check(a, x, "gathered")
    check(y, product(x, b.t()).bfloat16(), "torch's gather")
    partials = [product(p, q.t()) for p, q in zip(xs, bs, strict=True)]
    check(z, scattered(partials, rank), "torch's scatter")


def test_under_torchs_names(pools):
    pools(2)(_interop)


def _trained(groups, rank):
    """Layers that call Torch's names: every product of forward and backward is fused."""
    from fluxgen import interop

    del rank
    group = groups["all"]
    interop.install(group)
    try:
        with strict(), explain() as seen:
            check_layers(group, integers, check, *TRAINED)
    finally:
        interop.uninstall()
    assert [d.cause for d in seen.decisions] == [Cause.FUSED] * 8


def test_layers_under_torchs_names_train(pools):
    pools(2)(_trained)
