"""One rank's workspace in memory that all ranks of its group can address.

The memory is Torch's symmetric memory (CUDA backend: peers' allocations mapped into this process);
the layout is ``protocol.cuh``'s. A workspace is made by all ranks together and never resized: a
larger call makes a new one, and the old one is kept for as long as a captured graph may replay.
"""

from __future__ import annotations

import ctypes as ct
import itertools
import re
import weakref
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fluxgen.core.errors import CommTimeout
from fluxgen.runtime import abi
from fluxgen.runtime.workspace import workspace_bytes

__all__ = ["SymmetricWorkspace"]


class SymmetricWorkspace:
    """A zeroed workspace of this rank, and the addresses of its peers'.

    Collective: every rank of ``group`` makes one with the same sizes. After construction the
    caller must make sure that every rank has got here before any rank uses it, since a peer's
    flags may otherwise be written before they are zero.

    Args:
        group: the process group. device: this rank's GPU. stage, half: bytes, see ``workspace``.
        timeout_s: deadline of device-side waits.

    Attributes:
        stage, half: as given. group: the C view, for argument structs. captured: whether a CUDA
            graph holds its addresses.

    Raises:
        RuntimeError: Torch cannot map the peers' memory.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        stage: int,
        half: int,
        timeout_s: float,
    ) -> None:
        from torch.distributed import _symmetric_memory as symm_mem

        self.stage, self.half, self.captured = stage, half, False
        size = workspace_bytes(stage, half)
        self._memory = symm_mem.empty(size, dtype=torch.uint8, device=device)
        self._memory.zero_()
        # Zeroed on whatever stream is current here; peers write on theirs (H05).
        torch.cuda.synchronize(device)
        self._handle: Any = _rendezvous(self._memory, group)
        self._report_memory = torch.zeros(
            ct.sizeof(abi.Report) // 4, dtype=torch.int32, pin_memory=True
        )
        self._report = abi.Report.from_address(self._report_memory.data_ptr())
        self.group = abi.Group(
            world=group.size(),
            rank=group.rank(),
            stage_bytes=stage,
            half_bytes=half,
            timeout_ns=int(timeout_s * 1e9),
            report=self._report_memory.data_ptr(),
        )
        for peer, address in enumerate(self._handle.buffer_ptrs):
            self.group.peers[peer] = address

    @property
    def timed_out(self) -> bool:
        """Whether a wait on the device has passed its deadline; reads host memory only."""
        return bool(self._report.code)

    def timeout(self) -> CommTimeout:
        """The report of the first wait that passed its deadline, as an error."""
        r = self._report
        return CommTimeout(
            abi.OP_NAMES.get(r.op, str(r.op)), r.rank, r.peer, r.chunk, r.expected, r.seen
        )


_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Workspaces of each live group so far: the same on all of its ranks, which make them together."""

_names = itertools.count()


def _rendezvous(memory: torch.Tensor, group: dist.ProcessGroup) -> Any:
    """Map the peers' memory, through a group name and a store of our own."""
    from torch._C._distributed_c10d import (
        ProcessGroup,
        _register_process_group,
        _SymmetricMemory,
        _unregister_process_group,
    )

    name = f"fluxgen/{group.group_name}/{next(_names)}"
    number = _made[group] = _made.get(group, 0) + 1
    store = _OwnNumbers(dist.distributed_c10d._get_process_group_store(group), f"memory/{number}")
    # Torch takes rank, size and store from a group registered under the name, or from the group
    # info of that name, depending on its version.
    stand_in = ProcessGroup(store, group.rank(), group.size())
    _register_process_group(name, stand_in)
    try:
        _SymmetricMemory.set_group_info(name, group.rank(), group.size(), store)
        return _SymmetricMemory.rendezvous(memory, name)
    finally:
        _unregister_process_group(name)


class _OwnNumbers(dist.Store):  # type: ignore[misc]
    """A view of a store in which the exchanges of one rendezvous are numbered from zero.

    Torch's symmetric memory numbers its exchanges for the whole process, whatever the group: two
    ranks that have not made as many of them before (in other groups) wait for each other's keys
    until the store's timeout. Seen with torch 2.11 and overlapping groups.
    """

    _kept: ClassVar[list[dist.Store]] = []
    """C++ holds the store, but not this object, whose methods it calls."""

    def __init__(self, store: dist.Store, prefix: str) -> None:
        super().__init__()
        self._store: Any = store
        self._prefix = f"fluxgen/{prefix}"
        self._order: dict[str, int] = {}
        self._kept.append(self)

    def _key(self, key: str) -> str:
        found = re.fullmatch(r"(.*)/(\d+)/(\d+)", key)
        if found is None:
            return f"{self._prefix}/{key}"
        prefix, number, rank = found.groups()
        own = self._order.setdefault(number, len(self._order))
        return f"{self._prefix}/{prefix}/{own}/{rank}"

    def set(self, key: str, value: Any) -> None:
        """Store a value."""
        self._store.set(self._key(key), value)

    def get(self, key: str) -> Any:
        """Wait for a value."""
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """Wait for values."""
        self._store.wait([self._key(key) for key in keys], *timeout)

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""
        return bool(self._store.check([self._key(key) for key in keys]))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        return int(self._store.add(self._key(key), amount))
