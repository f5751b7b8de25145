"""What a decoder's layer consists of, out of the parallel linear layers: an MLP, and attention's
projections. Each gathers its input once, however many projections share it::

    ParallelMLP                   (S/W, ..., H) -> gather -> act(gate) * up -> down -> (S/W, ..., H)
    ParallelAttentionProjections  (S/W, ..., H) -> gather -> q, k, v ... project -> (S/W, ..., H)
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from fluxgen.core.errors import UsageError
from fluxgen.runtime.layers.activations import activation_of
from fluxgen.runtime.layers.nn import ColumnParallelLinear, RowParallelLinear
from fluxgen.runtime.layers.shards import Part
from fluxgen.runtime.session.membership import Group

__all__ = ["GatedColumnParallelLinear", "ParallelAttentionProjections", "ParallelMLP"]

_Gated = TypeVar("_Gated", bound="GatedColumnParallelLinear")


class GatedColumnParallelLinear(ColumnParallelLinear):
    """``act(x @ gate.T) * (x @ up.T)``: (S/W, ..., in) -> (S, ..., inner/W), one gather for both.

    ``weight`` is this rank's part of [gate; up], (2 inner/W, in), and ``bias`` likewise: the state
    is that of one ``nn.Linear`` of both, in this order.

    Args:
        in_features: of the input. inner_features: of gate and of up, each.
        activation: of the gate, by name (:mod:`.activations`). bias: of both.
        options: as for :class:`ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        inner_features: int,
        *,
        group: Group,
        activation: str = "silu",
        bias: bool = False,
        **options: Any,
    ) -> None:
        if activation_of(activation) is None:
            raise UsageError("activation: expected the name of one for the gate; found None")
        super().__init__(
            in_features, 2 * inner_features, group=group, bias=bias,
            parts=(inner_features, inner_features), **options,
        )  # fmt: skip
        self.gate_activation = activation

    @classmethod
    def from_linear(
        cls: type[_Gated], linear: torch.nn.Linear, *, group: Group, **options: Any
    ) -> _Gated:
        """This rank's part of an ordinary layer of [gate; up], copied."""
        if linear.out_features % 2:
            raise UsageError(
                f"linear: expected gate and up, one below the other; found {linear.out_features} "
                "outputs"
            )
        return cls._copied(linear, (linear.in_features, linear.out_features // 2), group, options)

    @classmethod
    def from_linears(
        cls: type[_Gated],
        gate: torch.nn.Linear,
        up: torch.nn.Linear,
        *,
        group: Group,
        **options: Any,
    ) -> _Gated:
        """This rank's part of two ordinary layers, copied."""
        return cls.from_linear(stacked(gate, up), group=group, **options)

    def forward(self, x: torch.Tensor, gather_size: int | None = None) -> Any:
        """(S/W, ..., in) -> (S, ..., inner/W)."""
        gate, up = super().forward(x, gather_size).chunk(2, dim=-1)
        activation = activation_of(self.gate_activation)
        assert activation is not None
        return activation(gate) * up


class ParallelMLP(torch.nn.Module):  # type: ignore[misc]  # torch is untyped to mypy here
    """An MLP: ``up``, gated or not, then ``down``: (S/W, ..., hidden) -> (S/W, ..., hidden).

    Args:
        hidden, inner: widths, unsharded. group: the tensor-parallel group.
        activation: by name. gated: gate and up projections rather than one. bias: of all.
        sequence_dim, sequence_parallel: as for the linear layers. device, dtype: of parameters.
    """

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        group: Group,
        activation: str = "silu",
        gated: bool = True,
        bias: bool = False,
        sequence_dim: int = 0,
        sequence_parallel: bool = True,
        save_gathered: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kind = GatedColumnParallelLinear if gated else ColumnParallelLinear
        common: dict[str, Any] = {
            "group": group, "bias": bias, "sequence_dim": sequence_dim,
            "sequence_parallel": sequence_parallel, "device": device, "dtype": dtype,
        }  # fmt: skip
        self.up: ColumnParallelLinear = kind(
            hidden, inner, activation=activation, save_gathered=save_gathered, **common
        )
        self.down = RowParallelLinear(inner, hidden, **common)

    @classmethod
    def from_linears(
        cls,
        gate: torch.nn.Linear | None,
        up: torch.nn.Linear,
        down: torch.nn.Linear,
        *,
        group: Group,
        activation: str = "silu",
        **options: Any,
    ) -> ParallelMLP:
        """This rank's part of an ordinary MLP's layers, copied; ``gate`` None: there is none."""
        made = cls(
            up.in_features, up.out_features, group=group, activation=activation,
            gated=gate is not None, bias=up.bias is not None, device="meta",
            dtype=up.weight.dtype, **options,
        )  # fmt: skip
        shared: dict[str, Any] = {
            "sequence_dim": made.down.sequence_dim,
            "sequence_parallel": made.down.sequence_parallel,
        }
        kept = {**shared, "save_gathered": made.up.save_gathered, "activation": activation}
        if gate is not None:
            made.up = GatedColumnParallelLinear.from_linears(gate, up, group=group, **kept)
        else:
            made.up = ColumnParallelLinear.from_linear(up, group=group, **kept)
        made.down = RowParallelLinear.from_linear(down, group=group, **shared)
        return made

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """(S/W, ..., hidden) -> the same; ``residual``, of the result's shape, is added last."""
        return self.down(self.up(x), residual)


class ParallelAttentionProjections(torch.nn.Module):  # type: ignore[misc]  # untyped to mypy
    """The projections around attention: q, k and v in one gather, and the one behind it.

    What lies between is the model's: ``q, k, v = layer(x)``, attention over this rank's heads, then
    ``layer.project(mixed)``. Where there are more ranks than kv heads, several hold the same.

    Args:
        hidden: of the input and the result. heads, kv_heads, head_dim: of attention, unsharded.
        bias: of q, k and v. out_bias: of the last one. Others as for the linear layers.

    Raises:
        ShardingError: the group does not divide the heads; lists the sizes that do.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        group: Group,
        bias: bool = False,
        out_bias: bool = False,
        sequence_dim: int = 0,
        sequence_parallel: bool = True,
        save_gathered: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        sizes = heads * head_dim, kv_heads * head_dim
        parts = Part(sizes[0], heads), Part(sizes[1], kv_heads), Part(sizes[1], kv_heads)
        common: dict[str, Any] = {
            "group": group, "sequence_dim": sequence_dim, "device": device, "dtype": dtype,
            "sequence_parallel": sequence_parallel,
        }  # fmt: skip
        self.qkv = ColumnParallelLinear(
            hidden, sum(part.size for part in parts), bias=bias, parts=parts,
            save_gathered=save_gathered, **common,
        )  # fmt: skip
        self.o = RowParallelLinear(
            sizes[0], hidden, bias=out_bias, parts=(Part(sizes[0], heads),), **common
        )

    @classmethod
    def from_linears(
        cls,
        q: torch.nn.Linear,
        k: torch.nn.Linear,
        v: torch.nn.Linear,
        o: torch.nn.Linear,
        *,
        head_dim: int,
        group: Group,
        **options: Any,
    ) -> ParallelAttentionProjections:
        """This rank's part of four ordinary layers, copied."""
        made: ParallelAttentionProjections = cls(
            q.in_features, q.out_features // head_dim, k.out_features // head_dim, head_dim,
            group=group, bias=q.bias is not None, out_bias=o.bias is not None, device="meta",
            dtype=q.weight.dtype, **options,
        ).to_empty(device=q.weight.device)  # fmt: skip
        made.qkv.load_state_dict(stacked(q, k, v).state_dict())
        made.o.load_state_dict(o.state_dict())
        return made

    def forward(self, x: torch.Tensor, gather_size: int | None = None) -> tuple[torch.Tensor, ...]:
        """(S/W, ..., hidden) -> q, k and v, (S, ..., this rank's heads, head_dim) each."""
        every = self.qkv(x, gather_size)
        sizes = [piece.size for piece in self.qkv.cut.pieces]
        return tuple(part.unflatten(-1, (-1, self.head_dim)) for part in every.split(sizes, -1))

    def project(self, mixed: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """(S, ..., this rank's heads, head_dim) -> (S/W, ..., hidden), plus ``residual``."""
        return self.o(mixed.flatten(-2), residual)


def stacked(*layers: torch.nn.Linear) -> torch.nn.Linear:
    """One ordinary layer of several that share an input: their rows, one below the other.

    Raises:
        UsageError: they do not share it, or some have a bias and others not.
    """
    first = layers[0]
    for each in layers[1:]:
        same = each.in_features == first.in_features, (each.bias is None) == (first.bias is None)
        if not all(same):
            raise UsageError(
                "layers: expected one number of inputs, and a bias in all or in none; found "
                + ", ".join(f"{e.in_features} (bias {e.bias is not None})" for e in layers)
            )
    made = torch.nn.Linear(
        first.in_features, sum(each.out_features for each in layers), first.bias is not None,
        device="meta", dtype=first.weight.dtype,
    ).to_empty(device=first.weight.device)  # fmt: skip
    with torch.no_grad():
        made.weight.copy_(torch.cat([each.weight for each in layers]))
        if made.bias is not None:
            made.bias.copy_(torch.cat([each.bias for each in layers]))
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(all(getattr(each, name).requires_grad for each in layers))
    return made.train(first.training)
