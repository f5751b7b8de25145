"""The workspace of one rank: sizes, offsets, chunk sizes. Layout and protocol: ``protocol.cuh``."""

from __future__ import annotations

from fluxgen.codegen.space import K_CHUNK_UNIT
from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig
from fluxgen.core.errors import UsageError
from fluxgen.core.problem import Op, Problem, ceil_div
from fluxgen.runtime import abi

_HALF_ALIGN = 1024
MAX_WORKSPACE_BYTES = 2**40
"""A workspace beyond this is a mistake in a size, not a workspace."""


def half_bytes(problem: Problem) -> int:
    """Bytes of one data half for ``problem``: W slabs of (m/tp, k) for AG, (m/tp, n) for RS.

    Raises:
        UsageError: the whole workspace would exceed ``MAX_WORKSPACE_BYTES``.
    """
    width = problem.k if problem.op is Op.AG_GEMM else problem.n
    size = problem.tp * problem.m_local * width * problem.signature.dtype.bytes
    size = max(_HALF_ALIGN, ceil_div(size, _HALF_ALIGN) * _HALF_ALIGN)
    if workspace_bytes(size) > MAX_WORKSPACE_BYTES:
        raise UsageError(
            f"workspace: {problem.key} needs halves of {size} bytes, the limit of a workspace is "
            f"{MAX_WORKSPACE_BYTES}; split the call along m"
        )
    return size


def workspace_bytes(half: int) -> int:
    """Bytes of a whole workspace: control blocks and two halves."""
    return abi.DATA_OFFSET + 2 * half


def gathered_offset(source: int, chunk: int) -> int:
    """Byte offset of the flag "chunk of source was pulled into my half"."""
    return abi.GATHERED_OFFSET + 4 * (source * abi.MAX_CHUNKS + chunk)


def slab_offset(half: int, epoch: int, source: int, slab: int) -> int:
    """Byte offset of the slab of ``source``, ``slab`` bytes long, in the call of ``epoch``."""
    return abi.DATA_OFFSET + epoch % 2 * half + source * slab


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


def chunk_bounds(extent: int, size: int) -> list[tuple[int, int]]:
    """Begin and end of each chunk of ``extent`` rows or columns cut every ``size`` (0: whole)."""
    step = size or extent
    return [(begin, min(begin + step, extent)) for begin in range(0, extent, step)]
