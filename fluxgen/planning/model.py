"""What a plan needs of a model: the sizes of a decoder whose layers are alike."""

from __future__ import annotations

from dataclasses import dataclass

from fluxgen.core.errors import UnsupportedError
from fluxgen.shapes import ModelDims

__all__ = ["Transformer"]


@dataclass(frozen=True)
class Transformer:
    """A dense decoder.

    Attributes:
        layers, hidden, vocab: as usual. heads, kv_heads: of queries; of keys and values.
        head_dim: elements of one head. ffn: width between the MLP's two GEMMs, of one of gate and
            up. gated: there are both. tied: the embedding's weight is the last layer's too.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    gated: bool
    vocab: int
    tied: bool = False

    @classmethod
    def of(cls, dims: ModelDims, tied: bool = False) -> Transformer:
        """A model as :func:`fluxgen.shapes.model_dims` has read it.

        Raises:
            UnsupportedError: experts, mixers, latent attention or layers of several kinds, which
                the step's model does not know.
        """
        why = ""
        if dims.mixers:
            why = "mixers beside attention"
        elif any(mlp.role != "dense" for mlp in dims.mlps):
            why = "experts"
        elif len({(m.width, m.gated) for m in dims.mlps}) != 1:
            why = "MLPs of several kinds"
        elif len({(a.heads, a.kv_heads, a.head_dim) for a in dims.attention}) != 1:
            why = "attention of several kinds"
        elif any(a.latent is not None for a in dims.attention):
            why = "latent attention"
        elif not dims.vocab:
            why = "no vocabulary's size in its config"
        if why:
            raise UnsupportedError(
                f"plan: {dims.name} has {why}; a plan is of dense decoders whose layers are alike"
            )
        attention, mlp = dims.attention[0], dims.mlps[0]
        return cls(
            dims.name, dims.layers, dims.hidden, attention.heads, attention.kv_heads,
            attention.head_dim, mlp.width, mlp.gated, dims.vocab, tied,
        )  # fmt: skip

    @property
    def qkv(self) -> int:
        """Columns of the projection to queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def fc1(self) -> int:
        """Columns of the MLP's first GEMM, gate and up together."""
        return self.ffn * (2 if self.gated else 1)

    @property
    def layer_params(self) -> int:
        """Weights of one layer's GEMMs and norms."""
        attention = self.hidden * self.qkv + self.heads * self.head_dim * self.hidden
        return attention + self.hidden * (self.fc1 + self.ffn) + 2 * self.hidden

    @property
    def params(self) -> int:
        """All weights."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_params + tables + self.hidden

    def flops(self, tokens: float, seq: int) -> float:
        """Of the model itself, forward and backward: 3 times the forward of ``tokens`` tokens.

        Attention counts all of the s x s scores, causal or not, as Megatron-LM's formula does
        (arXiv 2205.05198, appendix A); nothing that is computed again counts.
        """
        gemms = self.layers * (self.layer_params - 2 * self.hidden) + self.vocab * self.hidden
        scores = self.layers * 2 * seq * self.heads * self.head_dim
        return 3.0 * tokens * 2.0 * (gemms + scores)
