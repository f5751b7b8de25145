"""What one GPU must hold, bytes: weights, their state, activations, workspace.

Activations follow arXiv 2205.05198 (section 4): what each layer keeps for its backward, tensor by
tensor, cut over tp inside a block and, with sequence parallelism, between blocks too.
"""

from __future__ import annotations

from dataclasses import dataclass

from fluxgen.planning.layout import Layout, stage_layers
from fluxgen.planning.model import Transformer
from fluxgen.planning.practice import Practice

__all__ = ["Memory", "memory"]

RESERVED = 3.0e9
"""Context, libraries, NCCL's buffers and what an allocator cannot use."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest GPU.

    Attributes:
        weights, gradients, optimiser, activations: as named. workspace: of the fused ops, of
            logits and of weights that were gathered. total: of all, and what is reserved.
    """

    weights: float
    gradients: float
    optimiser: float
    activations: float
    workspace: float

    @property
    def total(self) -> float:
        """Of all, and what is reserved."""
        parts = self.weights + self.gradients + self.optimiser + self.activations
        return parts + self.workspace + RESERVED


def memory(
    model: Transformer,
    layout: Layout,
    practice: Practice,
    batch: int,
    seq: int,
    training: bool = True,
    fused: bool = False,
) -> Memory:
    """The fullest stage's: the first one, which has the most micro-batches in flight."""
    shards = layout.dp * layout.cp
    tokens = layout.micro * seq // layout.cp
    layers = stage_layers(model, layout)
    tables = model.vocab * model.hidden * (1 if layout.pp > 1 or model.tied else 2)
    params = (layers * model.layer_params + tables) / layout.tp
    logits = tokens * model.vocab / layout.tp * (2 if training else 0)
    gathered = 2.0 * 2 * tokens * model.hidden if fused and layout.tp > 1 else 0.0
    if not training:
        heads = model.kv_heads * model.head_dim / min(layout.tp, model.kv_heads) / layout.cp
        cache = 2.0 * 2 * layers * (batch // layout.dp) * seq * heads
        return Memory(2 * params, 0.0, 0.0, cache, gathered)
    of_optimiser = 12.0 * params / (shards if layout.zero >= 1 else 1)
    gradients = float(practice.grad_bytes) * params / (shards if layout.zero >= 2 else 1)
    weights = 2.0 * params
    workspace = logits + gathered
    if layout.zero == 3:  # fp32 shards are the weights; two layers' are gathered
        weights = 0.0
        gradients = 4.0 * params / shards
        workspace += 2 * 2.0 * max(model.layer_params, model.vocab * model.hidden) / layout.tp
    rounds = batch // (layout.dp * layout.micro)
    flight = min(rounds, layout.pp)
    stages = flight * (1 + (layout.pp - 1) / (layout.pp * layout.vp) if layout.vp > 1 else 1)
    kept = layers * layer_activations(model, layout, practice, tokens, seq)
    return Memory(weights, gradients, of_optimiser, kept * stages, workspace)


def layer_activations(
    model: Transformer, layout: Layout, practice: Practice, tokens: int, seq: int
) -> float:
    """Bytes that one layer keeps of one micro-batch."""
    between = layout.tp if layout.sp else 1
    within = layout.tp
    if layout.grid:
        x, y, depth = layout.grid
        tokens, between, within = tokens // depth, x, y
    if layout.recompute == "full":
        return 2.0 * tokens * model.hidden / between
    masks = 2 if practice.dropout else 0
    stream = (4 * 2 + masks) * model.hidden / between
    inner = 2 * (model.qkv + model.heads * model.head_dim + model.fc1 + model.ffn) / within
    scores = 0.0
    if practice.attention == "unfused" and layout.recompute == "none":
        scores = (2 + (3 if practice.dropout else 0)) * model.heads * seq / within
    return tokens * (stream + inner + scores)
