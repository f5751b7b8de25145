"""A workspace in the host's memory, for GPUs that cannot reach each other's.

Each rank makes an anonymous file in memory, which its peers open by way of ``/proc``: it is gone
with the last process that has it, however that ends. All map all files and register them with
CUDA, so that kernels, copies and flags work by address as they do on a peer's memory; see
docs/adr/0015.
"""

from __future__ import annotations

import ctypes as ct
import mmap
import os
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fluxgen.core.errors import MachineError
from fluxgen.native.workspace import Sizes
from fluxgen.runtime.memory.mapped import Workspace

__all__ = ["HostPart", "SharedFile"]

_PORTABLE_AND_MAPPED = 0x1 | 0x2  # CU_MEMHOSTREGISTER_PORTABLE, _DEVICEMAP (cuda.h)


class SharedFile:
    """Zeroed memory of this process that others of the same user on the same host can map.

    Args:
        size: bytes.

    Attributes:
        ticket: names it to the others: process, descriptor, token, bytes.

    Raises:
        OSError: no memory.
    """

    def __init__(self, size: int) -> None:
        token = f"fluxgen-{uuid.uuid4().hex}"
        self._descriptor = os.memfd_create(token, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        os.posix_fallocate(self._descriptor, 0, size)  # here, not when a GPU touches a page
        self.ticket = [os.getpid(), self._descriptor, token, size]

    @staticmethod
    def map(ticket: Any) -> mmap.mmap:
        """The memory of a ticket, of this process or another.

        Raises:
            MachineError: it cannot be opened, or is not what the ticket names.
        """
        pid, descriptor, token, size = ticket
        path = f"/proc/{pid}/fd/{descriptor}"
        try:
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise MachineError(
                f"shared memory of process {pid}: {error.strerror or error}: the ranks of a host "
                "must run as one user, in one PID namespace (docker run --pid=host)"
            ) from error
        try:
            # Another process may have that number in another namespace.
            name = str(Path(f"/proc/self/fd/{opened}").readlink())
            found = os.fstat(opened).st_size
            known = name.removeprefix("/memfd:").removesuffix(" (deleted)")
            if known != token or found < size:
                raise MachineError(
                    f"shared memory of process {pid}: expected {size} bytes of {token}; found "
                    f"{found} of {name}: the ranks of a host must share one PID namespace"
                )
            return mmap.mmap(opened, size)
        finally:
            os.close(opened)


class HostPart:
    """What a rank allocates before the ranks map each other's; as ``SymmetricPart``.

    Raises:
        OSError, RuntimeError: no memory, on the host or on the GPU.
    """

    def __init__(self, device: torch.device, sizes: Sizes, scratch: int) -> None:
        self.device, self.sizes = device, sizes
        self.file = SharedFile(sizes.total)
        self.ticket: object = self.file.ticket
        self.scratch = torch.empty(max(16, scratch), dtype=torch.uint8, device=device)

    def join(
        self, group: dist.ProcessGroup, tickets: Sequence[object], prefix: str, timeout_s: float
    ) -> Workspace:
        """The workspace, with those of the peers; as ``SymmetricPart.join``.

        Raises:
            MachineError: a peer's memory cannot be mapped, or CUDA does not take it.
        """
        with torch.cuda.device(self.device):
            kept = [_Registered(SharedFile.map(ticket)) for ticket in tickets]
        addresses = [memory.address for memory in kept]
        return Workspace(
            group.rank(), self.sizes, addresses, self.scratch, timeout_s,
            (self.file, kept),
        )  # fmt: skip


class _Registered:
    """Mapped memory that CUDA knows, for as long as this object lives.

    Attributes:
        address: as the GPU sees it.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        cuda = ct.CDLL("libcuda.so.1")
        host = ct.addressof(ct.c_char.from_buffer(memory))
        status = cuda.cuMemHostRegister_v2(
            ct.c_void_p(host), ct.c_size_t(len(memory)), _PORTABLE_AND_MAPPED
        )
        if status:
            raise MachineError(
                f"shared memory of {len(memory)} bytes: expected CUDA to register it; "
                f"cuMemHostRegister returned {status}"
            )
        # The mapping goes with its last reference: this one, which ends after the registration.
        weakref.finalize(self, _unregister, cuda, host, memory)
        found = ct.c_uint64()
        status = cuda.cuMemHostGetDevicePointer_v2(ct.byref(found), ct.c_void_p(host), 0)
        if status:
            raise MachineError(
                f"shared memory: expected an address for the GPU; cuMemHostGetDevicePointer "
                f"returned {status}"
            )
        self.address = int(found.value)


def _unregister(cuda: ct.CDLL, host: int, memory: mmap.mmap) -> None:
    cuda.cuMemHostUnregister(ct.c_void_p(host))  # at the end of a process CUDA may be gone first
    del memory
