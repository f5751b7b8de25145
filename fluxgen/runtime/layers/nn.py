"""Tensor-parallel linear layers with Megatron-style sequence parallelism.

Between layers, activations are cut along the sequence, 1/W on each rank; a
:class:`ColumnParallelLinear` gathers them and a :class:`RowParallelLinear` reduces and cuts them
again::

    (S/W, ..., H) -> ColumnParallelLinear -> (S, ..., F/W) -> RowParallelLinear -> (S/W, ..., H)

With ``sequence_parallel=False`` every rank holds all activations between layers, (S, ..., H): the
first layer sends nothing and the second all-reduces, as decoding a few tokens wants it.

Both load what ``nn.Linear`` saves: :meth:`from_linear` takes a layer, ``load_state_dict`` a
state with the full weight (each rank keeps its part) or one with this rank's part. ``state_dict``
holds this rank's part. ``torch.distributed.checkpoint`` takes equal names of such plain tensors for
copies of one and saves one rank's: give it :func:`fluxgen.nn.sharded_state_dict` in its place.

A weight that fuses several projections, as [gate; up] or [q; k; v], needs ``parts``, or a rank
would hold rows of the wrong ones::

    ColumnParallelLinear.from_linear(gate_up, group=group, parts=(inner, inner))
    ColumnParallelLinear.from_linear(
        qkv, group=group, parts=(Part(q, heads=32), Part(kv, heads=8), Part(kv, heads=8))
    )
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch

from fluxgen.core.errors import UsageError
from fluxgen.runtime import ops
from fluxgen.runtime.layers.activations import activation_of
from fluxgen.runtime.layers.checkpoint import sharded_state_dict
from fluxgen.runtime.layers.shards import Cut, Parts, ShardedLayer, sum_over_copies
from fluxgen.runtime.ops.all_reduce import matmul_all_reduce, matmul_of_replicated
from fluxgen.runtime.ops.fallback import split_sizes
from fluxgen.runtime.session.membership import Group, member_of

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]

_Layer = TypeVar("_Layer", bound="_ParallelLinear")


class _ParallelLinear(ShardedLayer):
    """The weight of one rank and how it is cut from the full one.

    Args:
        in_features, out_features: of the unsharded layer.
        group: the tensor-parallel group. bias: whether there is one.
        sequence_dim: the dim of the activations that is cut between ranks, not the last.
        sequence_parallel: whether it is cut; else every rank holds all of them.
        parts: of a fused weight, in its order: sizes along the dim that is cut, or
            :class:`~fluxgen.runtime.layers.shards.Part` where heads stay whole. None: one
            plain chunk.
        device, dtype: of the parameters.

    Attributes:
        cut: how the full weight's dim ``cut_dim`` is cut for this rank.

    Raises:
        UsageError: parts that are not of the layer's size in all.
        ShardingError: the group does not divide the layer; lists the sizes that do.
    """

    cut_dim: int
    """The dim of the (out, in) weight that is cut."""
    cuts_bias: bool
    copies_heads: bool
    """Whether several ranks may hold the same head."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        sequence_dim: int = 0,
        sequence_parallel: bool = True,
        parts: Parts | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.sequence_dim, self.sequence_parallel = sequence_dim, sequence_parallel
        self.group_name, self.tp, self.rank = member_of(group)
        shape = [out_features, in_features]
        self.cut = Cut.of(
            ("out_features", "in_features")[self.cut_dim],
            shape[self.cut_dim],
            parts,
            self.tp,
            self.rank,
            self.copies_heads,
        )
        shape[self.cut_dim] = self.cut.local_size
        factory = {"device": device, "dtype": dtype}
        self.weight = torch.nn.Parameter(torch.empty(*shape, **factory))
        self.bias: torch.nn.Parameter | None = None
        if bias:
            size = shape[0] if self.cuts_bias else out_features
            self.bias = torch.nn.Parameter(torch.empty(size, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start values, as ``nn.Linear`` draws them, of which each rank keeps its part.

        Every rank draws the full layer, so ranks that were seeded alike together hold exactly
        what the unsharded layer would, and a bias that is not cut is the same on all of them.
        Seed them alike.
        """
        if self.weight.is_meta:
            return
        full = self.weight.new_empty(self.out_features, self.in_features)
        with torch.no_grad():
            torch.nn.init.kaiming_uniform_(full, a=math.sqrt(5))
            self.weight.copy_(self.part("weight", full))
            if self.bias is not None:
                bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
                drawn = self.weight.new_empty(self.out_features).uniform_(-bound, bound)
                self.bias.copy_(self.part("bias", drawn))

    @classmethod
    def from_linear(
        cls: type[_Layer],
        linear: torch.nn.Linear,
        *,
        group: Group,
        sequence_dim: int = 0,
        **options: Any,
    ) -> _Layer:
        """This rank's part of an ordinary layer, copied; device and dtype are the layer's.

        Args:
            linear: the full layer. group, sequence_dim, options: as for the class.

        Raises:
            ShardingError: the group does not divide the layer; lists the sizes that do.
        """
        sizes = linear.in_features, linear.out_features
        return cls._copied(linear, sizes, group, {"sequence_dim": sequence_dim, **options})

    @classmethod
    def _copied(
        cls: type[_Layer],
        linear: torch.nn.Linear,
        sizes: tuple[int, int],
        group: Group,
        options: dict[str, Any],
    ) -> _Layer:
        """A layer of ``sizes`` with this rank's part of ``linear``'s parameters."""
        layer: _Layer = cls(
            *sizes,
            group=group,
            bias=linear.bias is not None,
            device="meta",
            dtype=linear.weight.dtype,
            **options,
        ).to_empty(device=linear.weight.device)
        layer.load_state_dict(linear.state_dict())
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(getattr(linear, name).requires_grad)
        layer.train(linear.training)
        return layer

    def part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the full layer's ``weight`` or ``bias``; a view of a single part."""
        dim = self.cut_dim_of(name)
        return full if dim is None else self.cut.take(full, dim)

    def cut_dim_of(self, name: str) -> int | None:
        """The dim of the full ``weight`` or ``bias`` that is cut; None: each rank holds all."""
        if name == "weight":
            return self.cut_dim
        return 0 if self.cuts_bias else None

    def full_shape(self, name: str) -> tuple[int, ...]:
        """The shape of the unsharded layer's ``weight`` or ``bias``."""
        return (self.out_features, self.in_features)[: 2 if name == "weight" else 1]

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        """The parameters for ``torch.distributed.checkpoint``: see :mod:`.checkpoint`."""
        return {prefix + name: value for name, value in sharded_state_dict(self).items()}

    def extra_repr(self) -> str:
        """As ``nn.Linear``, and the group's size."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank={self.rank}, tp={self.tp}"
            + (f", parts={[part.size for part in self.cut.parts]}" if self.cut.parts[1:] else "")
            + ("" if self.sequence_parallel else ", sequence_parallel=False")
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A copy: the caller's state, which other layers read too, stays as it is.
        parts = dict(state_dict)
        for name, parameter in self.named_parameters(recurse=False):
            given = state_dict.get(prefix + name)
            if given is None or given.shape == parameter.shape:
                continue
            if tuple(given.shape) != self.full_shape(name):
                raise UsageError(
                    f"{prefix}{name}: expected the full {self.full_shape(name)} or this rank's "
                    f"{tuple(parameter.shape)}; found {tuple(given.shape)}"
                )
            parts[prefix + name] = self.part(name, given)
        super()._load_from_state_dict(parts, prefix, *args, **kwargs)


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer cut along its outputs: (S/W, ..., in) -> (S, ..., out/W).

    ``weight`` is (out/W, in) and ``bias`` (out/W,), the rank's own. Arguments as for ``nn.Linear``
    with the full sizes, and ``group``, ``sequence_dim`` (the dim of the activations that is cut
    between ranks); ``activation`` is applied to the result, by name (:mod:`.activations`);
    ``save_gathered`` keeps the gathered input for the backward in place of
    gathering it again. With ``sequence_parallel=False``: (S, ..., in) -> (S, ..., out/W).

    ``parts`` says what a fused weight consists of, in its order; the output of a rank then holds
    its share of each part, one behind the other (split it at ``[piece.size for piece in
    layer.cut.pieces]``). Where there are more ranks than heads of a part, several ranks hold the
    same head, out/W is larger, and backward adds the gradients of the copies, so that they stay
    equal; a norm over all ranks' gradients counts a copied head once for each of them. A weight
    that is stored head by head, q, k and v of each in a row, is a single part.
    """

    cut_dim = 0
    cuts_bias = True
    copies_heads = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        sequence_dim: int = 0,
        sequence_parallel: bool = True,
        save_gathered: bool = False,
        parts: Parts | None = None,
        activation: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        activation_of(activation)  # refuse early
        super().__init__(
            in_features,
            out_features,
            group=group,
            bias=bias,
            sequence_dim=sequence_dim,
            sequence_parallel=sequence_parallel,
            parts=parts,
            device=device,
            dtype=dtype,
        )
        self.save_gathered, self.activation = save_gathered, activation

    def forward(self, x: torch.Tensor, gather_size: int | None = None) -> Any:
        """(S/W, ..., in) -> (S, ..., out/W); ``gather_size`` is S where W does not divide it."""
        activation = activation_of(self.activation)
        y = self._product(x, gather_size)
        return y if activation is None else activation(y)

    def _product(self, x: torch.Tensor, gather_size: int | None) -> Any:
        weight, bias = self.weight, self.bias
        if self.cut.copied:
            weight = sum_over_copies(weight, self.cut, self.group_name)
            bias = None if bias is None else sum_over_copies(bias, self.cut, self.group_name)
        if not self.sequence_parallel:
            if gather_size is not None:
                raise UsageError(
                    "gather_size: expected None with sequence_parallel=False, where nothing is "
                    f"gathered; found {gather_size!r}"
                )
            return matmul_of_replicated(x, weight, bias, group=self.group_name)
        return ops.all_gather_matmul(
            x,
            weight,
            bias,
            group=self.group_name,
            gather_dim=self.sequence_dim,
            gather_size=gather_size,
            save_gathered=self.save_gathered,
        )


class RowParallelLinear(_ParallelLinear):
    """A linear layer cut along its inputs: (S, ..., in/W) -> (S/W, ..., out).

    ``weight`` is (out, in/W); ``bias`` is (out,), the same on every rank and added once, after
    the reduction. Its gradient is that of the unsharded layer on every rank: do not reduce it
    over the group again. With ``sequence_parallel=False``: (S, ..., in/W) -> (S, ..., out).
    ``residual``, of the result's shape, is added to it: in passing, before the rounding, without
    sequence parallelism, else to the rounded result.

    ``parts`` says what the input of the full layer consists of, where that is several outputs of
    other layers one behind the other; no head is held twice, for it would be added twice.
    """

    cut_dim = 1
    cuts_bias = False
    copies_heads = False

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """(S, ..., in/W) -> (S/W, ..., out)."""
        if not self.sequence_parallel:
            return matmul_all_reduce(x, self.weight, self.bias, residual, group=self.group_name)
        if residual is not None:
            shape = list(x.shape)
            shape[self.sequence_dim] = split_sizes(x.shape[self.sequence_dim], self.tp)[self.rank]
            shape[-1] = self.out_features
            if list(residual.shape) != shape:
                raise UsageError(
                    f"residual: expected {tuple(shape)}, the shape of this rank's result; found "
                    f"{tuple(residual.shape)}"
                )
        y = ops.matmul_reduce_scatter(
            x, self.weight, self.bias, group=self.group_name, scatter_dim=self.sequence_dim
        )
        return y if residual is None else y + residual
