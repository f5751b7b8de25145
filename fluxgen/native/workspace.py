"""The workspace of one rank: sizes, offsets, chunk sizes. Layout and protocol: ``protocol.cuh``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Transport
from fluxgen.core.errors import UsageError
from fluxgen.core.problem import Problem, ceil_div
from fluxgen.kernels.slabs import K_CHUNK_UNIT
from fluxgen.native import abi

_ALIGN = 1024
MAX_WORKSPACE_BYTES = 2**40
"""A workspace beyond this is a mistake in a size, not a workspace."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of the parts of a workspace.

    Attributes:
        stage: one slab (m/tp, k) of an ag_gemm, for peers to pull. half: one half of the inbox, W
            slabs of (m/tp, n) of a gemm_rs. gathered: the matrix (m, k) that peers push into.
        drained: the outbox (m, n) of a gemm_rs that copies drain, and the inbox that they fill.
        result: (m, n) of an all-reduce in two shots, which peers push their rows into.
        packets: one half of what takes packets: W slabs of 4 bytes an element.
    """

    stage: int = 0
    half: int = 0
    gathered: int = 0
    drained: int = 0
    result: int = 0
    packets: int = 0

    @property
    def total(self) -> int:
        """Of the whole workspace, control blocks included."""
        shared = self.gathered + 2 * self.drained + self.result
        return self.gathered_offset + shared + 2 * self.packets

    @property
    def gathered_offset(self) -> int:
        """Where the matrix lies."""
        return abi.DATA_OFFSET + self.stage + 2 * self.half

    def hold(self, other: Sizes) -> bool:
        """Whether a workspace of these sizes serves what needs the other ones."""
        return self | other == self

    def __or__(self, other: Sizes) -> Sizes:
        """Of a workspace that serves both."""
        return Sizes(
            max(self.stage, other.stage),
            max(self.half, other.half),
            max(self.gathered, other.gathered),
            max(self.drained, other.drained),
            max(self.result, other.result),
            max(self.packets, other.packets),
        )


def group_view(
    rank: int, addresses: Sequence[int], parts: Sizes, timeout_s: float, report: int
) -> abi.Group:
    """A group as C sees it.

    Args:
        rank: whose view. addresses: of the workspace of every rank, as this rank's GPU sees them.
        parts: of each workspace. timeout_s: deadline of waits on the device. report: address of
            what the device writes when one has passed.
    """
    group = abi.Group(
        world=len(addresses), rank=rank, stage_bytes=parts.stage, half_bytes=parts.half,
        gathered_bytes=parts.gathered, drained_bytes=parts.drained, result_bytes=parts.result,
        packet_bytes=parts.packets,
        timeout_ns=int(timeout_s * 1e9), report=report,
    )  # fmt: skip
    for peer, address in enumerate(addresses):
        group.peers[peer] = address
    return group


def sizes(problem: Problem, *transports: Transport) -> Sizes:
    """What ``problem`` needs, moved by any of ``transports``.

    Raises:
        UsageError: the workspace would exceed ``MAX_WORKSPACE_BYTES``.
    """
    if problem.op.scatters:
        row = problem.n * problem.signature.out_dtype.bytes
        shares = problem.op.shares
        whole = aligned(problem.tp * problem.m_local * row)
        every = aligned(problem.tp * problem.m * row)  # rows of every rank's, of one shot
        needed = Sizes()
        for transport in transports or (Transport.PEER_STORE,):
            if transport.in_one_shot and not shares:
                continue
            if transport.packed:
                needed |= Sizes(packets=2 * (every if transport.in_one_shot else whole))
            elif transport is Transport.PEER_BROADCAST:
                needed |= Sizes(half=every)
            elif transport is Transport.COPY_ENGINE_DRAIN:
                needed |= Sizes(drained=whole, result=whole if shares else 0)
            else:
                needed |= Sizes(half=whole, result=whole if shares else 0)
    else:
        slab = problem.m_local * problem.k * problem.signature.dtype.bytes
        pushes = [t.pushes for t in transports]
        needed = Sizes(
            stage=0 if all(pushes) else aligned(slab),
            gathered=aligned(problem.tp * slab) if any(pushes) else 0,
        )
    if needed.total > MAX_WORKSPACE_BYTES:
        raise UsageError(
            f"workspace: {problem.key} needs {needed.total} bytes, the limit of a workspace is "
            f"{MAX_WORKSPACE_BYTES}; split the call along m"
        )
    return needed


def aligned(size: int) -> int:
    """``size`` rounded up to what every part must be a multiple of."""
    return ceil_div(size, _ALIGN) * _ALIGN


def chunk_size(problem: Problem, kernel: KernelConfig, run: RunConfig) -> int:
    """Rows (M) of one chunk of a slab, or elements of K of the first; 0 when there is one chunk.

    Row chunks end at multiples of the tile, so that no output tile straddles two, and the last may
    be shorter; K chunks at multiples of ``K_CHUNK_UNIT``, see :attr:`RunConfig.chunks`. Where the
    slab is short there are fewer.
    """
    if run.chunks <= 1:
        return 0
    if run.chunk_axis is ChunkAxis.K:
        units = ceil_div(problem.k, K_CHUNK_UNIT)
        size = ceil_div(units, 2 ** (run.chunks - 1)) * K_CHUNK_UNIT
        return 0 if size >= problem.k else size
    unit = kernel.tile_m
    size = ceil_div(ceil_div(problem.m_local, unit), run.chunks) * unit
    return 0 if size >= problem.m_local else size
