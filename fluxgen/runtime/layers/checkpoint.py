"""State of sharded layers for ``torch.distributed.checkpoint`` (DCP), whatever the group's size.

The checkpoint holds the layout of the unsharded model under its usual names: every rank saves the
chunks that it holds of each full tensor, also of one that fuses several projections, and loads the
chunks that it needs. So a state that was saved with tp 2 loads with tp 4, with tp 1, or into
``nn.Linear``, and the other way round::

    state = {
        "model": sharded_state_dict(model),
        "optimizer": sharded_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=path)

    dcp.load(state, checkpoint_id=path)  # into the parameters themselves
    load_sharded_optimizer_state_dict(model, optimizer, state["optimizer"])

Parameters that ``fully_shard`` (FSDP2) has cut once more between data-parallel ranks are saved
likewise. Heads that several ranks hold are saved once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fluxgen.core.errors import UsageError
from fluxgen.runtime.layers.shards import ShardedLayer
from fluxgen.runtime.session.membership import resolve

__all__ = [
    "ShardedParameter",
    "full_state_dict",
    "load_sharded_optimizer_state_dict",
    "sharded_optimizer_state_dict",
    "sharded_state_dict",
]

# Prefixes of wrappers (DDP, torch.compile, activation checkpointing), which DCP's names lack.
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Chunk(NamedTuple):
    """A box of a full tensor: where it begins there, and the memory that holds it."""

    offsets: torch.Size
    data: torch.Tensor


class ShardedParameter(torch.Tensor):  # type: ignore[misc]  # torch is untyped to mypy here
    """This rank's chunks of a full tensor, as DCP asks for them: for saving and loading only.

    Its shape is the full tensor's. It shares memory with the parameter, so loading fills that.
    """

    chunks: tuple[Chunk, ...]
    whole: torch.Tensor

    @staticmethod
    def __new__(
        cls: Any, shape: tuple[int, ...], chunks: tuple[Chunk, ...], whole: torch.Tensor
    ) -> ShardedParameter:
        """A tensor of ``shape`` without memory but that of its chunks."""
        made: ShardedParameter = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=whole.dtype, device=whole.device
        )
        made.chunks, made.whole = chunks, whole
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        if func is torch.ops.aten.new_empty.default:  # how a staged save begins a copy
            return ShardedParameter(tuple(args[1]), (), args[0].whole)
        raise UsageError(
            f"{func}: expected a tensor to compute with; found the chunks of one in a sharded "
            "state, which torch.distributed.checkpoint saves and loads. Take to_local() of it, or "
            "fluxgen.nn.full_state_dict() in place of the sharded one"
        )

    def __repr__(self) -> str:
        return f"ShardedParameter({tuple(self.shape)}, {len(self.chunks)} chunk(s))"

    def to_local(self) -> torch.Tensor:
        """This rank's parameter, or state of the optimiser."""
        return self.whole

    # What DCP's planners ask of a tensor: torch.distributed._checkpointable._Checkpointable.

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=described,
                    properties=TensorProperties.create_from_tensor(chunk.data),
                    size=self.size(),
                ),
            )
            for chunk, described in zip(self.chunks, self.__create_chunk_list__(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(at, data.size()) for at, data in self.chunks]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        for chunk in self.chunks:
            if chunk.offsets == index.offset:
                return chunk.data
        own = [tuple(chunk.offsets) for chunk in self.chunks]
        raise UsageError(
            f"{index.fqn}: expected the offsets of this rank's chunks, {own}; found {index.offset}"
        )


def sharded_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """The state of a module whose layers are sharded, to be saved and loaded by DCP.

    Args:
        module: any, with layers of :mod:`fluxgen.nn` in it; all ranks of their groups save or load
            together, as DCP does.

    Returns:
        Names as in the unsharded model, each with a :class:`ShardedParameter` for what a rank holds
        a part of, and what ``state_dict()`` has for everything else.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state: dict[str, Any] = get_model_state_dict(module)
    for name, layer, own, parameter in _sharded(module):
        if name in state:  # a tied parameter stands under one of its names
            state[name] = _chunked(layer, own, parameter.detach())
    return state


def sharded_optimizer_state_dict(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """The state of an optimiser of such a module, likewise.

    State that has the shape of its parameter is cut as that is. An optimiser that has not made a
    step yet gets its state, to be loaded into.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    whole: dict[str, Any] = get_optimizer_state_dict(module, optimizer)
    states = dict(whole["state"])
    for name, layer, own, parameter in _sharded(module):
        if name in states:
            states[name] = {
                key: _chunked(layer, own, value) if _alike(value, parameter) else value
                for key, value in states[name].items()
            }
    return {**whole, "state": states}


def load_sharded_optimizer_state_dict(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    """Give an optimiser what DCP loaded into its :func:`sharded_optimizer_state_dict`."""
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    local = {
        name: {
            key: value.to_local() if isinstance(value, ShardedParameter) else value
            for key, value in each.items()
        }
        for name, each in state["state"].items()
    }
    set_optimizer_state_dict(module, optimizer, {**state, "state": local})


def full_state_dict(module: torch.nn.Module) -> dict[str, Any]:
    """The state of the unsharded model, on every rank: what ``nn.Linear`` layers would save.

    All ranks of the groups call it together; each gets all of the weights.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.tensor import DTensor

    state: dict[str, Any] = get_model_state_dict(module)
    for name, value in state.items():
        if isinstance(value, DTensor):
            state[name] = value.full_tensor()
    for name, layer, own, _ in _sharded(module):
        dim = layer.cut_dim_of(own)
        if name in state and dim is not None:
            local = state[name].detach().contiguous()
            every = [torch.empty_like(local) for _ in range(layer.tp)]
            dist.all_gather(every, local, group=resolve(layer.group_name))
            state[name] = layer.cut.join(every, dim)
    return state


def _sharded(
    module: torch.nn.Module,
) -> Iterator[tuple[str, ShardedLayer, str, torch.nn.Parameter]]:
    """Parameters of our layers: the name in DCP's states, the layer, its own name for it."""
    is_ddp = isinstance(module, torch.nn.parallel.DistributedDataParallel)
    for path, layer in (module.module if is_ddp else module).named_modules():
        if isinstance(layer, ShardedLayer):
            clean = [part for part in path.split(".") if part and part not in _WRAPPERS]
            for own, parameter in layer.named_parameters(recurse=False):
                yield ".".join([*clean, own]), layer, own, parameter


def _alike(value: Any, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape


def _chunked(layer: ShardedLayer, own: str, value: torch.Tensor) -> torch.Tensor:
    """A tensor of a parameter's shape as its chunks of the full one; itself if it is not cut."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    dim = layer.cut_dim_of(own)
    if dim is None:
        return value
    local, begin = value, [0] * value.dim()
    if isinstance(value, DTensor):
        local = value.to_local()
        _, begin = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
    chunks = []
    for piece in layer.cut.pieces:
        low = max(piece.local, begin[dim])
        high = min(piece.local + piece.size, begin[dim] + local.shape[dim])
        if low < high and local.numel():
            offsets = list(begin)
            offsets[dim] = piece.start + low - piece.local
            data = local.narrow(dim, low - begin[dim], high - low)
            chunks.append(Chunk(torch.Size(offsets), data))
    return ShardedParameter(layer.full_shape(own), tuple(chunks), value)
