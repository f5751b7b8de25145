"""The workspace of one rank: sizes, offsets, chunk sizes. Layout and protocol: ``protocol.cuh``."""

from __future__ import annotations

from fluxgen.codegen.space import K_CHUNK_UNIT
from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig
from fluxgen.core.errors import UsageError
from fluxgen.core.problem import Op, Problem, ceil_div
from fluxgen.runtime import abi

_ALIGN = 1024
MAX_WORKSPACE_BYTES = 2**40
"""A workspace beyond this is a mistake in a size, not a workspace."""


def stage_bytes(problem: Problem) -> int:
    """Bytes of the stage that ``problem`` needs: one slab (m/tp, k) for ag_gemm, else none.

    Raises:
        UsageError: the workspace would exceed ``MAX_WORKSPACE_BYTES``.
    """
    if problem.op is not Op.AG_GEMM:
        return 0
    return _checked(problem, problem.m_local * problem.k * problem.signature.dtype.bytes)


def half_bytes(problem: Problem) -> int:
    """Bytes of one half of the inbox: W slabs of (m/tp, n) for gemm_rs, else none.

    Raises:
        UsageError: the workspace would exceed ``MAX_WORKSPACE_BYTES``.
    """
    if problem.op is not Op.GEMM_RS:
        return 0
    slab = problem.m_local * problem.n * problem.signature.dtype.bytes
    return _checked(problem, problem.tp * slab)


def _checked(problem: Problem, size: int) -> int:
    size = aligned(size)
    if workspace_bytes(size, size) > MAX_WORKSPACE_BYTES:
        raise UsageError(
            f"workspace: {problem.key} needs buffers of {size} bytes, the limit of a workspace is "
            f"{MAX_WORKSPACE_BYTES}; split the call along m"
        )
    return size


def aligned(size: int) -> int:
    """``size`` rounded up to what a stage or half must be a multiple of."""
    return ceil_div(size, _ALIGN) * _ALIGN


def workspace_bytes(stage: int, half: int) -> int:
    """Bytes of a whole workspace: control blocks, the stage, and the inbox's two halves."""
    return abi.DATA_OFFSET + stage + 2 * half


def chunk_size(problem: Problem, kernel: KernelConfig, run: RunConfig) -> int:
    """Rows (M) or elements of K of one chunk of a slab; 0 when the slab is one chunk.

    Row chunks end at multiples of the tile, so that no output tile straddles two; K chunks at
    multiples of ``K_CHUNK_UNIT``. The last chunk may be shorter.
    """
    if run.chunks <= 1:
        return 0
    unit = K_CHUNK_UNIT if run.chunk_axis is ChunkAxis.K else kernel.tile_m
    extent = problem.k if run.chunk_axis is ChunkAxis.K else problem.m_local
    size = ceil_div(ceil_div(extent, unit), run.chunks) * unit
    return 0 if size >= extent else size
