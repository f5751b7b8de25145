"""The store that a rendezvous gets, without a GPU: own numbers, whatever the process did before."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist

from fluxgen.runtime.memory.symmetric import _OwnNumbers

pytestmark = [pytest.mark.dist]


def test_ranks_with_other_histories_find_each_other():
    """Torch counts its exchanges for the whole process: one rank has made 7, another 2."""
    shared = dist.HashStore()
    first, second = (
        dist.PrefixStore("group", _OwnNumbers(shared, "memory/1", 5.0)) for _ in range(2)
    )
    for step, word in enumerate([b"a", b"b"]):
        first.set(f"Allocator/{7 + step}/0", word)
        second.set(f"Allocator/{2 + 3 * step}/1", word * 2)
    for step, word in enumerate([b"a", b"b"]):
        first.wait([f"Allocator/{7 + step}/1"])
        assert first.get(f"Allocator/{7 + step}/1") == word * 2
        assert second.get(f"Allocator/{2 + 3 * step}/0") == word
    assert not first.check(["Allocator/99/1"])


def test_a_second_workspace_reads_nothing_of_the_first():
    shared = dist.HashStore()
    _OwnNumbers(shared, "memory/1", 5.0).set("Allocator/0/0", b"old")
    assert not _OwnNumbers(shared, "memory/2", 5.0).check(["Allocator/3/0"])
    store = _OwnNumbers(shared, "memory/2", 5.0)
    assert store.add("count", 2) == 2
    assert store.add("count", 1) == 3


def test_a_peer_that_does_not_come_is_waited_for_until_the_deadline_only():
    store = _OwnNumbers(dist.HashStore(), "memory/1", 0.3)
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        store.get("Allocator/0/1")
    assert 0.2 < time.monotonic() - begin < 5


def test_a_closed_view_keeps_no_store_alive():
    shared = dist.HashStore()
    store = _OwnNumbers(shared, "memory/1", 5.0)
    store.close()
    assert store._store is None
