"""Ranks that differ, stop or die: an error on every rank that is left, no hang, a usable GPU."""

from __future__ import annotations

import os
import signal
import time

import pytest

torch = pytest.importorskip("torch")

import fluxgen  # noqa: E402
from fluxgen.core.config import RunConfig  # noqa: E402
from fluxgen.core.problem import Problem  # noqa: E402
from fluxgen.runtime.ops import all_gather_matmul, matmul_reduce_scatter  # noqa: E402
from fluxgen.runtime.session.groups import check_timeouts, reset  # noqa: E402
from tests.dist.numbers import raised  # noqa: E402
from tests.gpu.ranks import (  # noqa: E402
    AG,
    AG_KN,
    AG_NK,
    Environment,
    database,
    integers,
    pool,
    product,
    record,
    shapes,
)


class PerRank:
    """Variables of each rank, some of them its own; picklable."""

    def __init__(self, *ranks: Environment) -> None:
        self.ranks = ranks

    def __call__(self, rank: int) -> dict[str, str]:
        return self.ranks[rank](rank)


def _foreign(groups, rank):
    group = groups["all"]
    x, w = integers(1, 129, 512), integers(2, 136, 512)
    found = [raised(lambda: all_gather_matmul(x, w, group=group)) for _ in range(2)]
    y = all_gather_matmul(integers(3, 1, 72), integers(4, 136, 72), group=group)  # the same there
    return found, list(y.shape)


@pytest.mark.parametrize("difference", ["kernel", "run", "missing"])
def test_another_database_is_named_on_every_rank(difference):  # J01, I07
    problem = Problem(AG, 258, 136, 512, 2)
    others = [r for r in shapes(2) if r.problem != problem]
    mine = record(problem, AG_NK, RunConfig())
    other = {
        "kernel": [record(problem, AG_KN, RunConfig())],
        "run": [record(problem, AG_NK, RunConfig(groups=(1, 1)))],
        "missing": [],
    }[difference]
    files = database([*others, mine]), database([*others, *other])
    ranks = PerRank(*map(Environment, files))
    with_ranks = pool(2, environment=ranks)
    try:
        results = with_ranks(_foreign)
    finally:
        with_ranks.close()
    for found, shape in results:
        assert shape == [2, 136]
        for kind, text in found:
            assert kind == "AgreementError"
            assert "chose different paths" in text
            assert "rank 0:" in text
            assert "rank 1:" in text
            assert {"kernel": "128x128x64", "run": "'groups': [1, 1]", "missing": "path unfused"}[
                difference
            ] in text
    assert results[0][0] == results[1][0]


def _in_step(groups, rank):
    x, w = integers(1, 72, 136), integers(2, 264, 136)
    # A short deadline starts with the first call; a context on a shared GPU takes seconds to make.
    torch.distributed.barrier(groups["all"])
    y = all_gather_matmul(x, w, group=groups["all"])
    z = matmul_reduce_scatter(integers(3, 72 * groups["all"].size(), 136), w, group=groups["all"])
    torch.cuda.synchronize()
    return list(y.shape), list(z.shape), os.getpid()


def _alone(groups, rank, gathers):
    """Calls that the missing rank does not make; then the GPU must still work."""
    group, world = groups["all"], groups["all"].size()
    if rank == world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x, w = integers(1, 72, 136), integers(2, 264, 136)
    a = integers(3, 72 * world, 136)
    start = time.perf_counter()

    def work():
        for _ in range(20):
            if gathers:
                all_gather_matmul(x, w, group=group)
            else:
                matmul_reduce_scatter(a, w, group=group)
        torch.cuda.synchronize()
        check_timeouts()

    found = raised(work)
    seconds = time.perf_counter() - start
    again = raised(lambda: all_gather_matmul(x, w, group=group))
    usable = bool(torch.equal(product(x, w), x.float() @ w.float().t()))
    return found, seconds, again, usable


@pytest.mark.parametrize("gathers", [True, False])
def test_a_killed_peer(gathers):  # H15
    ranks = pool(3, environment=Environment(database(shapes(3)), FLUXGEN_TIMEOUT_S="4"))
    try:
        ranks(_in_step)
        with pytest.raises(AssertionError, match="rank 2"):
            ranks(_alone, gathers)
        results = ranks.last
    finally:
        ranks.close()
    waited = 0
    for found, seconds, again, usable in results[:2]:
        kind, text = found
        assert kind == "CommTimeout"
        # Whoever waited first has told the other.
        waited += "of rank 2 past its deadline" in text
        assert "of rank 2 past its deadline" in text or "gave up" in text
        assert again == found, "the group stays broken until it is reset"
        assert seconds < 12
        assert usable
    assert waited >= 1


def _stopped(groups, rank):
    """Rank 1 skips a call, the others time out; after a reset by all they go on."""
    group, world = groups["all"], groups["all"].size()
    x, w = integers(1, 72, 136), integers(2, 264, 136)
    if rank == 1:
        time.sleep(4)
        kind = "none"
    else:

        def work():
            all_gather_matmul(x, w, group=group)
            torch.cuda.synchronize()
            check_timeouts()

        kind, text = raised(work)
        assert "rank 1" in text, text
    torch.distributed.barrier(group)
    reset(group)
    torch.distributed.barrier(group)
    whole = integers(5, 72 * world, 136)
    y = all_gather_matmul(whole.chunk(world)[rank].clone(), w, group=group)
    assert torch.equal(y, product(whole, w).bfloat16())
    return kind


def test_a_reset_after_a_timeout():
    ranks = pool(2, environment=Environment(database(shapes(2)), FLUXGEN_TIMEOUT_S="1.5"))
    try:
        ranks(_in_step)
        assert ranks(_stopped) == ["CommTimeout", "none"]
        assert len(ranks(_in_step)) == 2
    finally:
        ranks.close()


def test_the_package_says_how_to_check():
    assert fluxgen.check_timeouts is check_timeouts
    assert fluxgen.reset is reset
