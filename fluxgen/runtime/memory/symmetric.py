"""A workspace in device memory that all ranks of its group can address.

The memory is Torch's symmetric memory (CUDA backend: peers' allocations mapped into this process);
the layout is ``protocol.cuh``'s. A workspace is made by all ranks together and never resized: a
larger call makes a new one, and the old one is kept for as long as a captured graph may replay.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fluxgen.native.workspace import Sizes
from fluxgen.runtime.memory.mapped import Workspace

__all__ = ["SymmetricPart"]


class SymmetricPart:
    """What a rank allocates before the ranks map each other's memory; may fail on one rank alone.

    The memory is outside of the caching allocator's pools, so that whoever makes the first call (a
    warm-up of CUDA graphs, with a pool of its own) does not own it.

    Args:
        device: this rank's GPU. sizes: of the workspace. scratch: bytes of a buffer that is this
            rank's alone.

    Attributes:
        ticket: what the peers need to know of it: nothing, Torch exchanges that.

    Raises:
        RuntimeError: no memory, or no symmetric memory on this machine.
    """

    ticket: object = None

    def __init__(self, device: torch.device, sizes: Sizes, scratch: int) -> None:
        from torch.distributed import _symmetric_memory as symm_mem

        self.sizes = sizes
        self.memory = symm_mem.empty(sizes.total, dtype=torch.uint8, device=device)
        self.scratch = symm_mem.empty(max(1, scratch), dtype=torch.uint8, device=device)
        self.memory.zero_()
        # Zeroed on whatever stream is current here; peers write on theirs (H05).
        torch.cuda.synchronize(device)

    def join(
        self, group: dist.ProcessGroup, tickets: Sequence[object], prefix: str, timeout_s: float
    ) -> Workspace:
        """The workspace, with those of the peers. Collective: every rank of ``group``.

        Args:
            group: the process group. tickets: of all its ranks. prefix: of the store's keys, the
                same on all ranks and used for no other workspace. timeout_s: deadline of waits,
                here for the peers and on the device.

        Raises:
            RuntimeError: Torch cannot map the peers' memory, or a peer does not come.
        """
        handle: Any = _rendezvous(self.memory, group, prefix, timeout_s)
        return Workspace(
            group.rank(), self.sizes, [int(a) for a in handle.buffer_ptrs],
            self.scratch, timeout_s, (self.memory, handle),
        )  # fmt: skip


_names = itertools.count()


def _rendezvous(
    memory: torch.Tensor, group: dist.ProcessGroup, prefix: str, timeout_s: float
) -> Any:
    """Map the peers' memory, through a group name and a view of the store of our own."""
    from torch._C._distributed_c10d import (
        ProcessGroup,
        _register_process_group,
        _SymmetricMemory,
        _unregister_process_group,
    )

    name = f"fluxgen/{group.group_name}/{next(_names)}"
    inner = dist.distributed_c10d._get_process_group_store(group)
    store = _OwnNumbers(inner, prefix, timeout_s)
    # Torch takes rank, size and store from a group registered under the name, or from the group
    # info of that name, depending on its version.
    stand_in = ProcessGroup(store, group.rank(), group.size())
    _register_process_group(name, stand_in)
    try:
        _SymmetricMemory.set_group_info(name, group.rank(), group.size(), store)
        return _SymmetricMemory.rendezvous(memory, name)
    finally:
        _unregister_process_group(name)
        store.close()


class _OwnNumbers(dist.Store):  # type: ignore[misc]
    """A view of a store in which the exchanges of one rendezvous are numbered from zero.

    Torch's symmetric memory numbers its exchanges for the whole process, whatever the group: two
    ranks that have not made as many of them before (in other groups) wait for each other's keys
    until the store's timeout. Seen with torch 2.11 and overlapping groups.
    """

    _kept: ClassVar[list[dist.Store]] = []
    """C++ holds the store, but not this object, whose methods it calls."""

    def __init__(self, store: dist.Store, prefix: str, timeout_s: float) -> None:
        super().__init__()
        self._store: Any = store
        self._prefix = f"fluxgen/{prefix}"
        self._timeout = timedelta(seconds=timeout_s)
        self._order: dict[str, int] = {}
        self._kept.append(self)

    def _key(self, key: str) -> str:
        found = re.fullmatch(r"(.*)/(\d+)/(\d+)", key)
        if found is None:
            return f"{self._prefix}/{key}"
        prefix, number, rank = found.groups()
        own = self._order.setdefault(number, len(self._order))
        return f"{self._prefix}/{prefix}/{own}/{rank}"

    def close(self) -> None:
        """Let go of the store: Torch keeps this view for as long as the process lives."""
        self._store = None

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self._store.set(self._key(key), value)

    def get(self, key: str) -> Any:
        """Wait for a value."""
        self.wait([key])
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """Wait for values."""
        self._store.wait([self._key(key) for key in keys], *(timeout or (self._timeout,)))

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return bool(self._store.check([self._key(key) for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return int(self._store.add(self._key(key), amount))
