"""Tensor-parallel linear layers with Megatron-style sequence parallelism.

Between layers, activations are cut along the sequence, 1/W on each rank; a
:class:`ColumnParallelLinear` gathers them and a :class:`RowParallelLinear` reduces and cuts them
again::

    (S/W, ..., H) -> ColumnParallelLinear -> (S, ..., F/W) -> RowParallelLinear -> (S/W, ..., H)

With ``sequence_parallel=False`` every rank holds all activations between layers, (S, ..., H): the
first layer sends nothing and the second all-reduces, as decoding a few tokens wants it.

Both load what ``nn.Linear`` saves: :meth:`from_linear` takes a layer, ``load_state_dict`` a
state with the full weight (each rank keeps its part) or one with this rank's part. ``state_dict``
holds this rank's part.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch

from fluxgen.core.errors import ShardingError, UsageError
from fluxgen.core.problem import MAX_WORLD
from fluxgen.runtime import ops
from fluxgen.runtime.all_reduce import matmul_all_reduce, matmul_of_replicated

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]

_Layer = TypeVar("_Layer", bound="_ParallelLinear")


class _ParallelLinear(torch.nn.Module):  # type: ignore[misc]  # torch is untyped to mypy here
    """The weight of one rank and how it is cut from the full one.

    Args:
        in_features, out_features: of the unsharded layer.
        group: the tensor-parallel group. bias: whether there is one.
        sequence_dim: the dim of the activations that is cut between ranks, not the last.
        sequence_parallel: whether it is cut; else every rank holds all of them.
        device, dtype: of the parameters.
    """

    cut_dim: int
    """The dim of the (out, in) weight that is cut."""
    cuts_bias: bool

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: ops.Group,
        bias: bool = True,
        sequence_dim: int = 0,
        sequence_parallel: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.sequence_dim, self.sequence_parallel = sequence_dim, sequence_parallel
        self.group_name, self.tp, self.rank = ops.member_of(group)
        shape = [out_features, in_features]
        size = shape[self.cut_dim]
        if size % self.tp:
            what = ("out_features", "in_features")[self.cut_dim]
            valid = ", ".join(str(tp) for tp in range(1, MAX_WORLD + 1) if size % tp == 0)
            raise ShardingError(
                f"{what}: {self.tp} ranks do not divide {size}; sizes of the group that do: {valid}"
            )
        shape[self.cut_dim] = size // self.tp
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
        group: ops.Group,
        sequence_dim: int = 0,
        **options: Any,
    ) -> _Layer:
        """This rank's part of an ordinary layer, copied; device and dtype are the layer's.

        Args:
            linear: the full layer. group, sequence_dim, options: as for the class.

        Raises:
            ShardingError: the group does not divide the layer; lists the sizes that do.
        """
        layer: _Layer = cls(
            linear.in_features,
            linear.out_features,
            group=group,
            bias=linear.bias is not None,
            sequence_dim=sequence_dim,
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
        """This rank's part, a view, of the full layer's ``weight`` or ``bias``."""
        if name == "bias" and not self.cuts_bias:
            return full
        return full.chunk(self.tp, dim=self.cut_dim if name == "weight" else 0)[self.rank]

    def extra_repr(self) -> str:
        """As ``nn.Linear``, and the group's size."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, rank={self.rank}, tp={self.tp}"
            + ("" if self.sequence_parallel else ", sequence_parallel=False")
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        full = {
            "weight": (self.out_features, self.in_features),
            "bias": (self.out_features,),
        }
        # A copy: the caller's state, which other layers read too, stays as it is.
        parts = dict(state_dict)
        for name, parameter in self.named_parameters(recurse=False):
            given = state_dict.get(prefix + name)
            if given is None or given.shape == parameter.shape:
                continue
            if tuple(given.shape) != full[name]:
                raise UsageError(
                    f"{prefix}{name}: expected the full {full[name]} or this rank's "
                    f"{tuple(parameter.shape)}; found {tuple(given.shape)}"
                )
            parts[prefix + name] = self.part(name, given)
        super()._load_from_state_dict(parts, prefix, *args, **kwargs)


class ColumnParallelLinear(_ParallelLinear):
    """A linear layer cut along its outputs: (S/W, ..., in) -> (S, ..., out/W).

    ``weight`` is (out/W, in) and ``bias`` (out/W,), the rank's own. Arguments as for ``nn.Linear``
    with the full sizes, and ``group``, ``sequence_dim`` (the dim of the activations that is cut
    between ranks); ``save_gathered`` keeps the gathered input for the backward in place of
    gathering it again. With ``sequence_parallel=False``: (S, ..., in) -> (S, ..., out/W).
    """

    cut_dim = 0
    cuts_bias = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: ops.Group,
        bias: bool = True,
        sequence_dim: int = 0,
        sequence_parallel: bool = True,
        save_gathered: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            group=group,
            bias=bias,
            sequence_dim=sequence_dim,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
        )
        self.save_gathered = save_gathered

    def forward(self, x: torch.Tensor, gather_size: int | None = None) -> Any:
        """(S/W, ..., in) -> (S, ..., out/W); ``gather_size`` is S where W does not divide it."""
        if not self.sequence_parallel:
            if gather_size is not None:
                raise UsageError(
                    "gather_size: expected None with sequence_parallel=False, where nothing is "
                    f"gathered; found {gather_size!r}"
                )
            return matmul_of_replicated(x, self.weight, self.bias, group=self.group_name)
        return ops.all_gather_matmul(
            x,
            self.weight,
            self.bias,
            group=self.group_name,
            gather_dim=self.sequence_dim,
            gather_size=gather_size,
            save_gathered=self.save_gathered,
        )


class RowParallelLinear(_ParallelLinear):
    """A linear layer cut along its inputs: (S, ..., in/W) -> (S/W, ..., out).

    ``weight`` is (out, in/W); ``bias`` is (out,), the same on every rank and added once, after
    the reduction. Its gradient is that of the unsharded layer on every rank: do not reduce it
    over the group again. With ``sequence_parallel=False``: (S, ..., in/W) -> (S, ..., out), to
    which a residual may be added in passing.
    """

    cut_dim = 1
    cuts_bias = False

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """(S, ..., in/W) -> (S/W, ..., out)."""
        if not self.sequence_parallel:
            return matmul_all_reduce(x, self.weight, self.bias, residual, group=self.group_name)
        if residual is not None:
            raise UsageError(
                "residual: expected None with sequence parallelism, where it is cut as the result "
                f"is: add it yourself; found {tuple(residual.shape)}"
            )
        return ops.matmul_reduce_scatter(
            x, self.weight, self.bias, group=self.group_name, scatter_dim=self.sequence_dim
        )
