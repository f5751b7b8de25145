"""The tile-order header, compiled for the host: every cluster exactly once, in arrival order."""

from __future__ import annotations

import ctypes as ct
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxgen.core.op import Op
from fluxgen.kernels.slabs import group_choices
from tests.unit.protocol.host import driver, walk

AG, RS = 0, 1


def assert_exactly_once(out, world, tiles_m, tiles_n):
    tiles = out.reshape(-1, 3)
    real = tiles[tiles[:, 0] < tiles_m]
    linear = (real[:, 2] * tiles_m + real[:, 0]) * tiles_n + real[:, 1]
    assert np.array_equal(np.sort(linear), np.arange(world * tiles_m * tiles_n))


def padding(groups, world, tiles_m, tiles_n, cluster_m):
    return sum(-(g * tiles_m) % cluster_m for g in (groups or (world,))) * tiles_n


@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("op", [AG, RS])
@pytest.mark.parametrize("cluster_m", [1, 2])
def test_every_tile_exactly_once(op, world, cluster_m):
    choices = group_choices(Op.AG_GEMM if op == AG else Op.GEMM_RS, world)
    for groups, panel, (tm, tn), rank in itertools.product(
        [(), *choices], [0, 1, 3, 8], [(1, 1), (1, 7), (3, 5), (4, 16), (5, 33)], range(world)
    ):
        count, out = walk(op, world, rank, tm, tn, panel, groups, cluster_m)
        assert_exactly_once(out, world, tm, tn)
        padded = padding(groups, world, tm, tn, cluster_m)
        assert count * cluster_m == world * tm * tn + padded, "no padding but inside a cluster"


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_grouping_once_and_in_arrival_order(data):
    world = data.draw(st.integers(1, 16))
    rank = data.draw(st.integers(0, world - 1))
    op = data.draw(st.sampled_from([AG, RS]))
    cuts = sorted(data.draw(st.sets(st.integers(1, world), max_size=world)) | {world})
    groups = tuple(b - a for a, b in zip([0, *cuts], cuts, strict=False))
    tm, tn = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 21))
    panel, cluster_m = data.draw(st.integers(0, 23)), data.draw(st.sampled_from([1, 2, 4]))
    count, out = walk(op, world, rank, tm, tn, panel, groups, cluster_m)
    assert_exactly_once(out, world, tm, tn)
    assert np.all(out[:, :, 1] == out[:, :1, 1]), "blocks of a cluster share B"
    first = rank if op == AG else (rank + 1) % world
    visit = start = 0
    for size in groups:
        ranks = {(first + visit + i) % world for i in range(size)}
        clusters = -(-size * tm // cluster_m) * tn
        rows = out[start : start + clusters]
        assert set(rows[:, :, 2].ravel().tolist()) == ranks, "a group visits its ranks, no others"
        width = min(panel or tn, tn)
        assert np.all(np.diff(rows[:, 0, 1] // width) >= 0), "panels of a group never come back"
        visit += size
        start += clusters
    assert start == count


def test_clusters_span_slabs_of_one_row():
    """A slab of one row of tiles shares a cluster, and so B, with the next rank's slab."""
    count, out = walk(AG, 8, 3, 1, 2, 0, (), 2)
    assert count == 8
    assert out[0].tolist() == [[0, 0, 3], [0, 0, 4]]


def test_own_slab_first_for_ag_and_last_for_rs():
    _, out = walk(AG, 4, 2, 2, 3, 0, (1, 1, 1, 1))
    assert [int(x) for x in out[::6, 0, 2]] == [2, 3, 0, 1]
    _, out = walk(RS, 4, 2, 2, 3, 0, (1, 1, 1, 1))
    assert [int(x) for x in out[::6, 0, 2]] == [3, 0, 1, 2]


def test_the_drawing_in_the_header():
    _, out = walk(AG, 4, 2, 2, 5, 2, (1, 3))
    order = {tuple(map(int, c)): i for i, c in enumerate(out[:, 0])}
    assert [order[(0, n, 2)] for n in range(5)] == [0, 1, 4, 5, 8]
    assert [order[(1, n, 2)] for n in range(5)] == [2, 3, 6, 7, 9]
    assert [order[(0, n, 3)] for n in range(5)] == [10, 11, 22, 23, 34]
    assert [order[(0, n, 0)] for n in range(5)] == [14, 15, 26, 27, 36]


@pytest.mark.parametrize(
    ("world", "rank", "tm", "tn", "panel", "groups"),
    [
        (0, 0, 1, 1, 0, ()),
        (17, 0, 1, 1, 0, ()),
        (4, 4, 1, 1, 0, ()),
        (4, -1, 1, 1, 0, ()),
        (4, 0, 0, 1, 0, ()),
        (4, 0, 1, 0, 0, ()),
        (4, 0, 1, 1, -1, ()),
        (4, 0, 1, 1, 0, (1, 2)),
        (4, 0, 1, 1, 0, (5,)),
        (4, 0, 1, 1, 0, (4, 0)),
        (4, 0, 1, 1, 0, (-1, 5)),
        (16, 0, 2**16, 2**16, 0, ()),
    ],
)
def test_bad_arguments_are_refused(world, rank, tm, tn, panel, groups):
    array = (ct.c_int32 * max(1, len(groups)))(*groups)
    assert (
        driver().walk(
            AG, world, rank, ct.c_int64(tm), ct.c_int64(tn), 1, panel, array, len(groups), None
        )
        == -1
    )
