"""Processes over gloo, started once and kept: each test is a function that all of them run.

Smaller worlds are subgroups, so a test of 3 ranks runs on ranks 0 to 2 of the four. A rank that
fails or does not answer in time fails the test, and the next test gets fresh processes.
"""

from __future__ import annotations

import datetime
import inspect
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

WORLD = 4
DEADLINE_S = 90.0
GROUPS: dict[str, list[int]] = {
    "w1": [0],
    "w2": [0, 1],
    "w3": [0, 1, 2],
    "w4": [0, 1, 2, 3],
    "even": [0, 2],
    "odd": [1, 3],
    "reversed": [1, 0],
}


class Pool:
    """``pool(function, *args)`` is ``function(groups, rank, *args)`` on every rank, as a list.

    Args:
        names: groups to make, as lists of ranks. ``groups`` above maps the names to those process
            groups that the rank belongs to. world: processes.
        environment: variables of the processes, for each rank if it is a function of the rank.
        setup: what each process runs first.
    """

    def __init__(
        self,
        names: dict[str, list[int]] = GROUPS,
        world: int = WORLD,
        environment: Callable[[int], dict[str, str]] | None = None,
        setup: Callable[[], None] | None = None,
    ) -> None:
        self._names, self._world = names, world
        self._environment, self._setup = environment, setup
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self.last: list[Any] = []  # answers of the last call, also of one that failed

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        results, failures = self._collect()
        self.last = results
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = os.path.join(tempfile.mkdtemp(prefix="fluxgen-dist-"), "store")
        for rank in range(self._world):
            ours, theirs = context.Pipe()
            extra = self._environment(rank) if self._environment else {}
            process = context.Process(
                target=_serve,
                args=(rank, self._world, self._names, store, extra, self._setup, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self) -> tuple[list[Any], list[str]]:
        end = time.monotonic() + DEADLINE_S
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            try:
                # Once one rank failed the others may wait for it: do not wait as long for them.
                left = 20.0 if failures else max(0.0, end - time.monotonic())
                if not pipe.poll(left):
                    failures.append(f"rank {rank}: no answer")
                    continue
                good, value = pipe.recv()
            except (EOFError, OSError):
                good, value = False, "died"
            results.append(value)
            if not good:
                failures.append(f"rank {rank}: {value}")
        return results, failures

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []


def _serve(
    rank: int,
    world: int,
    names: dict[str, list[int]],
    store: str,
    environment: dict[str, str],
    setup: Callable[[], None] | None,
    pipe: Any,
) -> None:
    os.environ.update(environment)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=45),
    )
    # Older versions of torch always sort a group's ranks; there "reversed" is in order.
    takes = inspect.signature(dist.new_group).parameters
    options = {"sort_ranks": False} if "sort_ranks" in takes else {}
    made = {name: dist.new_group(ranks, **options) for name, ranks in names.items()}
    groups = {name: group for name, group in made.items() if rank in names[name]}
    if setup is not None:
        setup()
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            answer = True, function(groups, rank, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        try:
            pipe.send(answer)
        except OSError:
            return
