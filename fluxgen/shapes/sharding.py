"""Which tensor-parallel sizes a model can be split over."""

from __future__ import annotations

from dataclasses import dataclass

from fluxgen.core.errors import ShardingError
from fluxgen.core.problem import MAX_WORLD, check_int
from fluxgen.shapes.architecture import ModelDims

MAX_TP = 64
"""Largest tensor-parallel size that shapes are worked out for.

Above ``MAX_WORLD`` they are for information: no fused kernel spans so many ranks.
"""


@dataclass(frozen=True)
class Constraint:
    """Something of a layer that is dealt out to the ranks in whole units.

    Attributes:
        tensor: the weights that are cut, e.g. ``q_proj, o_proj``.
        quantity: what is counted. value: how many there are.
        replicable: fewer units than ranks may be copied, if the ranks are a multiple of them.
    """

    tensor: str
    quantity: str
    value: int
    replicable: bool = False

    def allows(self, tp: int) -> bool:
        """Whether ``tp`` ranks can share the units evenly."""
        return self.value % tp == 0 or (self.replicable and tp % self.value == 0)

    def complaint(self, tp: int) -> str:
        """Why ``tp`` is not allowed."""
        what = f"{self.tensor}: {self.quantity} {self.value}"
        if self.replicable:
            return f"{what} neither divides {tp} nor is a multiple of it"
        return f"{what} is not a multiple of {tp}"


def check_tp(tp: object) -> int:
    """Return ``tp`` if it is an integer from 1 to :data:`MAX_TP`.

    Raises:
        UsageError: for anything else; called before a model is read.
    """
    return check_int("tp", tp, 1, MAX_TP)


def constraints(dims: ModelDims) -> tuple[Constraint, ...]:
    """Everything that limits the tensor-parallel sizes of ``dims``, without repetition.

    Routed experts are no limit: they may be placed whole.
    """
    found: dict[Constraint, None] = {}
    for block in dims.attention:
        q, kv = (
            ("q_b_proj, kv_b_proj, o_proj", "") if block.latent else ("q_proj, o_proj", "k_proj")
        )
        found[Constraint(q, "num_attention_heads", block.heads)] = None
        if kv:
            tensor = kv if block.shared_kv else "k_proj, v_proj"
            found[Constraint(tensor, "num_key_value_heads", block.kv_heads, True)] = None
    for mixer in dims.mixers:
        names = ", ".join(f"{mixer.name}_{name}" for name, _ in (*mixer.inputs, ("out", ())))
        for quantity, value in mixer.quantities:
            if value > 1:  # a single group is copied to every rank
                found[Constraint(names, quantity, value)] = None
    for mlp in dims.mlps:
        if mlp.role != "expert":
            names = "gate_up_proj, down_proj" if mlp.gated else "fc1, fc2"
            width = "shared expert width" if mlp.role == "shared" else "intermediate_size"
            found[Constraint(names, width, mlp.width)] = None
    return tuple(found)


def valid_tp(dims: ModelDims, limit: int = MAX_TP) -> tuple[int, ...]:
    """All tensor-parallel sizes from 1 to ``limit`` that every layer of ``dims`` allows."""
    limits = constraints(dims)
    return tuple(tp for tp in range(1, limit + 1) if all(c.allows(tp) for c in limits))


def require_tp(dims: ModelDims, tp: int) -> None:
    """Check that ``dims`` can be split over ``tp`` ranks.

    Raises:
        ShardingError: naming each tensor and value that does not fit, and all valid sizes.
    """
    broken = [c.complaint(tp) for c in constraints(dims) if not c.allows(tp)]
    if not broken:
        return
    sizes = valid_tp(dims)
    text = ", ".join(map(str, sizes))
    beyond = f" (kernels span at most {MAX_WORLD} ranks)" if sizes[-1] > MAX_WORLD else ""
    raise ShardingError(
        f"{dims.name}: cannot be split over tp={tp}: {'; '.join(broken)}. Valid tp: {text}{beyond}"
    )
