"""What ranks compare, as a pure function; and the exchange over a store of threads."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")

from fluxgen.core.errors import AgreementError  # noqa: E402
from fluxgen.runtime.session.agreement import Statement, compare  # noqa: E402


def statement(local="1", why="", common=None, **choice):
    return Statement(common or {"op": "all_gather", "m": "8"}, {"n": local}, choice, why)


def test_equal_statements_agree():
    assert compare("x", [statement(path="fused", kernel="a")] * 3) is True


def test_other_sizes_are_no_error_whatever_was_chosen():
    assert compare("x", [statement("1", path="fused"), statement("2", path="unfused")]) is False


def test_other_calls_are_an_error_that_lists_only_what_differs():
    others = {"op": "all_gather", "m": "16"}
    with pytest.raises(AgreementError) as caught:
        compare("ag", [statement(), statement(), statement(common=others)])
    text = str(caught.value)
    assert "rank 0: m 8; rank 1: m 8; rank 2: m 16" in text
    assert "op all_gather" not in text


def test_other_choices_name_the_reason_of_each_rank():
    ranks = [
        statement(why="record of a.sqlite3", path="fused", kernel="128x128x64"),
        statement(why="not compiled", path="unfused"),
    ]
    with pytest.raises(AgreementError) as caught:
        compare("ag", ranks)
    text = str(caught.value)
    assert "rank 0: path fused, kernel 128x128x64, because record of a.sqlite3" in text
    assert "rank 1: path unfused, kernel none, because not compiled" in text
    assert "FLUXGEN_DB" in text


class _Group:
    def __init__(self, rank, size):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def test_the_nth_exchange_meets_the_nth(monkeypatch):
    """Ranks as threads over one store: a slow rank, many exchanges, keys that are cleared up."""
    import random
    import time

    import torch.distributed as dist

    from fluxgen.runtime.session.agreement import Ledger

    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_process_group_store", lambda group: store)
    # What an earlier group of the same name left behind.
    for rank in range(4):
        store.set(f"fluxgen/hello/{rank}", f"old{rank}")
        store.set(f"fluxgen/answer/{rank}", "old0")
    store.set("fluxgen/welcome", '["old0", ["old0", "old1", "old2", "old3"]]')
    store.set("fluxgen/old0/verdict", "met")
    store.set("fluxgen/old0/0/2", "[7]")
    results = [[] for _ in range(4)]
    prefixes = set()

    def work(rank):
        ledger = Ledger(_Group(rank, 4), 20.0)
        ledger.meet("call")
        prefixes.add(ledger.prefix)
        rng = random.Random(rank)
        for i in range(50):
            if rng.random() < 0.1:
                time.sleep(0.005)
            results[rank].append(ledger.exchange("call", [i, rank]))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(r == [[[i, rank] for rank in range(4)] for i in range(50)] for r in results)
    assert len(prefixes) == 1
    assert prefixes != {"old0"}
    assert store.num_keys() <= 11 + 60, "of 50 exchanges the verdicts, and the last statements"
