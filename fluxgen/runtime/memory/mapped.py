"""One rank's workspace, and where it sees those of its peers, whatever memory they lie in."""

from __future__ import annotations

import ctypes as ct
from collections.abc import Sequence
from typing import Any

import torch

from fluxgen.core.errors import CommTimeout
from fluxgen.native import abi
from fluxgen.native.workspace import Sizes, group_view

__all__ = ["Workspace", "zeroed"]


def zeroed(size: int, device: torch.device, in_host: bool) -> torch.Tensor:
    """``size`` zero bytes that kernels can address: on the GPU, or pinned in the host's memory."""
    if in_host:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    return torch.zeros(size, dtype=torch.uint8, device=device)


class Workspace:
    """A zeroed workspace of this rank, and the addresses of its peers'.

    After construction the caller must make sure that every rank has got here before any uses it.

    Args:
        rank: this one. sizes: of the parts of each workspace. addresses: of each
            rank's, as this rank's GPU sees them. scratch: a buffer of this rank's GPU alone.
        timeout_s: deadline of waits on the device. keep: what must live as long as the addresses.

    Attributes:
        sizes: of its parts. scratch, scratch_at: the local buffer and its address.
        gathered_at: the address of the matrix that peers push into.
        group: the C view, for argument structs. report: what the device writes on a timeout.
        captured: whether a CUDA graph holds its addresses.
    """

    def __init__(
        self,
        rank: int,
        sizes: Sizes,
        addresses: Sequence[int],
        scratch: torch.Tensor,
        timeout_s: float,
        keep: Any,
    ) -> None:
        self.sizes, self.scratch = sizes, scratch
        self.scratch_at = int(scratch.data_ptr())
        self.captured = False
        self._keep = keep
        self._report_memory = torch.zeros(
            ct.sizeof(abi.Report) // 4, dtype=torch.int32, pin_memory=True
        )
        self.report = abi.Report.from_address(self._report_memory.data_ptr())
        self.group = group_view(rank, addresses, sizes, timeout_s, self._report_memory.data_ptr())
        self.gathered_at = addresses[rank] + sizes.gathered_offset

    @property
    def timed_out(self) -> bool:
        """Whether a wait on the device has passed its deadline; reads host memory only."""
        return bool(self.report.code)

    def timeout(self) -> CommTimeout:
        """What was reported first, as an error."""
        return abi.as_error(self.report)
