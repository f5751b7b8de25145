"""Every error fluxgen raises on purpose.

Each message says what was expected, what was found and what to do. ``exit_code`` is what the
command line returns for it: 1 for "failed", 2 for "wrong usage".
"""

from __future__ import annotations


class FluxgenError(Exception):
    """Base class of all deliberate errors."""

    exit_code = 1


class UsageError(FluxgenError, ValueError):
    """The caller asked for something that is not a valid request (exit code 2)."""

    exit_code = 2


class ModelConfigError(UsageError):
    """A model's ``config.json`` cannot be read, is not an HF config, or lacks a key."""


class ShardingError(UsageError):
    """A model cannot be sharded at the given tensor-parallel size; lists the valid sizes."""


class UnsupportedError(UsageError):
    """The request is valid but not implemented, e.g. an architecture without a kernel."""


class IllegalConfigError(UsageError):
    """A kernel or run configuration breaks a constraint; the message is the reason."""


class RenderError(FluxgenError):
    """A template could not be rendered."""


class ToolchainError(FluxgenError):
    """nvcc, CUTLASS or another build tool is missing or of the wrong version."""


class BuildError(FluxgenError):
    """nvcc or ptxas refused a kernel; the message holds the first compiler error."""


class StoreError(FluxgenError):
    """The artefact store cannot be used: not private, not writable, or damaged."""


class DatabaseError(FluxgenError):
    """A tuning database or pack cannot be used: corrupt, foreign or of a newer schema."""


class KernelError(FluxgenError):
    """A compiled kernel refused its arguments or failed to launch.

    Attributes:
        code: the C ABI's status code (``templates/include/fluxgen/abi.h``).
    """

    def __init__(self, message: str, code: int = -1) -> None:
        super().__init__(message)
        self.code = code


class MachineError(FluxgenError):
    """What evaluates candidates cannot go on: no fault of a candidate, so none is blamed."""


class AgreementError(UsageError):
    """The ranks of a group do not make the same call, or chose differently; names the ranks."""


class CaptureError(FluxgenError, RuntimeError):
    """A call inside a CUDA graph capture needs what only a call outside can prepare."""


class CommTimeout(FluxgenError):
    """A device-side wait of the group passed its deadline.

    Attributes:
        op, rank, peer, chunk: which wait; expected, seen: the epoch waited for and the one found.
        by_peer: not this rank's wait passed it but ``peer``'s, which has told this one: what this
            rank computed in its last calls may be wrong.
    """

    def __init__(
        self,
        op: str,
        rank: int,
        peer: int,
        chunk: int,
        expected: int,
        seen: int,
        by_peer: bool = False,
    ) -> None:
        self.op, self.rank, self.peer, self.chunk = op, rank, peer, chunk
        self.expected, self.seen, self.by_peer = expected, seen, by_peer
        if by_peer:
            super().__init__(
                f"{op}: rank {peer} of the group waited past its deadline and gave up; rank {rank} "
                f"found that in the call of epoch {expected}, and its last results may be wrong. "
                f"The error of rank {peer} says for whom it waited"
            )
            return
        super().__init__(
            f"{op}: rank {rank} waited for chunk {chunk} of rank {peer} past its deadline: "
            f"expected epoch {expected}, found {seen}. Is rank {peer} alive, and did it make the "
            f"same call?"
        )

    def __reduce__(
        self,
    ) -> tuple[type[CommTimeout], tuple[str, int, int, int, int, int, bool]]:
        return type(self), (
            self.op,
            self.rank,
            self.peer,
            self.chunk,
            self.expected,
            self.seen,
            self.by_peer,
        )
