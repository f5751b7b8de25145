"""The flat tiles' header, compiled for the host, against what it must be token by token."""

from __future__ import annotations

import ctypes as ct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.protocol.host import driver


def flat(world: int, rows: int, n: int, tile_m: int, tile_n: int, one_shot: bool):
    fixed = (world, ct.c_int64(rows), ct.c_int64(n), tile_m, tile_n, int(one_shot))
    total = driver().walk_flat(*fixed, None, None)
    out = np.full((total, 5), -7, dtype=np.int32)
    counts = np.zeros(world, dtype=np.uint32)
    pointers = (array.ctypes.data_as(ct.c_void_p) for array in (out, counts))
    assert driver().walk_flat(*fixed, *pointers) == total
    return out, counts


@settings(deadline=None, max_examples=200)
@given(
    world=st.integers(1, 16), rows=st.integers(1, 70), n=st.integers(1, 80).map(lambda x: 8 * x),
    tile_m=st.sampled_from([16, 32, 64, 128]), tile_n=st.sampled_from([64, 128, 192, 256]),
    one_shot=st.booleans(),
)  # fmt: skip
def test_every_token_once_and_every_owner_counted(world, rows, n, tile_m, tile_n, one_shot):
    out, counts = flat(world, rows, n, tile_m, tile_n, one_shot)
    tokens = rows if one_shot else rows * world
    columns = -(-n // tile_n)
    seen = np.zeros((tokens, columns), dtype=int)
    touched = np.zeros(world, dtype=int)
    for m, column, count, first, end in out:
        seen[m * tile_m : m * tile_m + count, column] += 1
        owners = {token // rows for token in range(m * tile_m, m * tile_m + count)}
        assert set(range(first, end)) == (set(range(world)) if one_shot else owners)
        touched[first:end] += 1
    assert (seen == 1).all()
    assert touched.tolist() == counts.tolist(), "a flag goes up when so many tiles are counted"


def test_tiles_that_share_columns_come_one_behind_the_other():
    out, _ = flat(8, 10, 256, 16, 64, False)
    assert out[:, 1].tolist() == sorted(out[:, 1])
    assert out[:5, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_parts_of_k_are_whole_ordered_and_equal(parts):
    for steps in range(parts, 100):
        ends = [driver().split_at(steps, part, parts) for part in range(parts + 1)]
        sizes = np.diff(ends)
        assert (ends[0], ends[-1]) == (0, steps)
        assert sizes.min() >= 1
        assert sizes.max() - sizes.min() <= 1
