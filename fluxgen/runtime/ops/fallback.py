"""The unfused path: the device library's matmul and the group's own collective.

Shapes, with S the size of the cut dim over all ranks, ``...`` any other leading dims (none for
2-D), W ranks::

    all_gather_matmul      x (S/W, ..., K)  -> gathered (S, ..., K)  -> y (S, ..., N)
    matmul_reduce_scatter  x (S, ..., K)    -> partial  (S, ..., N)  -> y (S/W, ..., N)
    matmul_all_reduce      x (..., K)       -> partial  (..., N)     -> y (..., N)

Collectives carry the input's own dtype, so the reduction adds in whatever way the group's backend
does: not in fp32 for 16-bit types. An average is the sum, divided afterwards by W.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fluxgen.runtime.session.dispatch import warn_once

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_to_all",
    "equal_parts",
    "gather_into",
    "linear",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "split_sizes",
]

# Torch 2.13 renamed both and warns of the old names.
gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather_matmul(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    dim: int,
    size: int,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Each ``gathered @ w.T + bias``, and the gathered x itself (x, if the group has one rank).

    Args:
        x: (..., S/W at ``dim``, ..., K), this rank's part. weights: of (N_i, K). size: S.
        biases: (N_i,) or None for each weight, this rank's own. dim: not the last.
    """
    gathered = all_gather(x, group, dim, size)
    pairs = zip(weights, biases, strict=True)
    return [linear(gathered, w, b) for w, b in pairs], gathered


def matmul_reduce_scatter(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    dim: int,
    reduce_op: str,
    bias_mode: str,
) -> torch.Tensor:
    """This rank's part along ``dim`` of the sum or average over ranks of ``x @ w.T``.

    Args:
        x: (..., S at ``dim``, ..., K). w: (N, K). dim: not the last.
        bias: (N,). bias_mode: ``replicated`` adds it after the reduction, ``partial`` before.
    """
    replicated = bias_mode == "replicated"
    partial = linear(x, w, None if replicated else bias)
    out = reduce_scatter(partial, group, dim, reduce_op)
    if bias is not None and replicated:
        out = out + bias
    return out


def matmul_all_reduce(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """The sum over ranks of ``x @ w.T``, then ``+ bias + residual``.

    Args:
        x: (..., K). w: (N, K). bias: (N,). residual: (..., N).
    """
    out = linear(x, w, None).contiguous()
    if group.size() > 1 and out.numel():
        dist.all_reduce(out, group=group)
    for added in (bias, residual):
        if added is not None:
            out.add_(added)
    return out


def split_sizes(size: int, world: int) -> list[int]:
    """How many of ``size`` rows each rank has: the first ``size % world`` ranks one more.

    As ``torch.tensor_split``: 10 rows on 4 ranks are 3, 3, 2 and 2.
    """
    return [size // world + (rank < size % world) for rank in range(world)]


def all_gather(x: torch.Tensor, group: dist.ProcessGroup, dim: int, size: int) -> torch.Tensor:
    """x of every rank, in the group's order, one behind the other along ``dim``: S = ``size``."""
    world = group.size()
    if world == 1:
        return x
    rows = x.movedim(dim, 0)
    if not rows.is_contiguous():
        warn_once("strides", f"x: strides {x.stride()} of shape {tuple(x.shape)}, copied first")
        rows = rows.contiguous()
    sizes = split_sizes(size, world)
    rows = _padded(rows, sizes[0])  # collectives carry equal parts
    out = rows.new_empty((world * rows.shape[0], *rows.shape[1:]))
    if out.numel():
        gather_into(out, rows, group=group)
    if size % world:
        parts = zip(out.chunk(world), sizes, strict=True)
        out = torch.cat([part[:length] for part, length in parts])
    return out.movedim(0, dim)


def reduce_scatter(
    x: torch.Tensor, group: dist.ProcessGroup, dim: int, reduce_op: str
) -> torch.Tensor:
    """This rank's part along ``dim`` of the sum (or average) of every rank's x."""
    world = group.size()
    if world == 1:
        return x
    rows = x.movedim(dim, 0)
    part = split_sizes(rows.shape[0], world)[group.rank()]
    rows = equal_parts(rows, world).contiguous()
    out = rows.new_empty((rows.shape[0] // world, *rows.shape[1:]))
    if out.numel():
        _reduce_into(out, rows, group=group)
        if reduce_op == "avg":
            out.div_(world)
    return out[:part].movedim(0, dim)


def all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup,
    outs: Sequence[int] | None,
    ins: Sequence[int] | None,
) -> torch.Tensor:
    """Rows of dim 0, ``ins[j]`` of them for rank j, for ``outs[j]`` of its; None: equal parts."""
    x = x.contiguous()
    rows = x.shape[0] if outs is None else sum(outs)
    out = x.new_empty((rows, *x.shape[1:]))
    if group.size() == 1:
        return out.copy_(x)
    # Each rank knows its own sizes only: whether all have nothing to send, none can tell.
    dist.all_to_all_single(
        out, x, None if outs is None else list(outs), None if ins is None else list(ins),
        group=group,
    )  # fmt: skip
    return out


def equal_parts(rows: torch.Tensor, world: int) -> torch.Tensor:
    """``rows`` with each rank's part padded to the longest one, for a collective to cut."""
    if rows.shape[0] % world == 0:
        return rows
    sizes = split_sizes(rows.shape[0], world)
    return torch.cat([_padded(part, sizes[0]) for part in rows.split(sizes)])


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    """``rows`` with zeros behind, ``length`` in all."""
    if rows.shape[0] == length:
        return rows
    return torch.cat([rows, rows.new_zeros((length - rows.shape[0], *rows.shape[1:]))])


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x @ w.T + bias`` in the operands' own type, as fakes have it, autocast or not."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return torch.nn.functional.linear(x, w, bias)
    with torch.autocast(x.device.type, enabled=False):
        return torch.nn.functional.linear(x, w, bias)
