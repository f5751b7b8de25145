"""The GEMMs of a model's layers on one tensor-parallel rank, and the problems they pose.

With ``tp`` ranks and sequence parallelism, a layer is::

    x (m/tp, hidden) -> all-gather + qkv     -> attention -> o    + reduce-scatter
                     -> all-gather + gate_up -> act * up  -> down + reduce-scatter -> (m/tp, hidden)

so the column-parallel GEMMs are ``ag_gemm`` and the row-parallel ones ``gemm_rs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxgen.core.errors import ModelConfigError
from fluxgen.core.op import Op
from fluxgen.core.problem import MAX_DIM, ceil_div
from fluxgen.shapes.architecture import ModelDims, model_dims
from fluxgen.shapes.attention import Attention
from fluxgen.shapes.mixers import Mixer
from fluxgen.shapes.mlp import Mlp
from fluxgen.shapes.quantization import Quantization
from fluxgen.shapes.reader import RawConfig
from fluxgen.shapes.sharding import check_tp, require_tp, valid_tp


@dataclass(frozen=True)
class LayerGemm:
    """One weight GEMM of a layer, as one rank computes it: D (m, n) = A (m, k) times B (n, k)^T.

    Attributes:
        name: the field's name: ``qkv``, ``o``, ``gate_up``, ``down``, ``fc1``, ``fc2``, ...
        op: the fused op it is a site of, or None where no collective of its size is next to it.
        n, k: local sizes in elements. parts: columns of each matrix fused along n; they sum to n.
        count: layers that have it.
        sharded: whether ranks hold different parts of the weight.
        bias: whether the layer adds a bias. weight_layout: ``nk`` or ``kn``, as stored.
        note: why it is no site, or what to mind.
    """

    name: str
    op: Op | None
    n: int
    k: int
    count: int
    parts: tuple[int, ...]
    sharded: bool = True
    bias: bool = False
    weight_layout: str = "nk"
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "op": None if self.op is None else self.op.value,
            "n": self.n,
            "k": self.k,
            "count": self.count,
            "parts": list(self.parts),
            "sharded": self.sharded,
            "bias": self.bias,
            "weight_layout": self.weight_layout,
            "note": self.note,
        }


@dataclass(frozen=True)
class ModelGemms:
    """All weight GEMMs of a model's layers at one tensor-parallel size.

    Attributes:
        dims: the model. tp: ranks. valid_tp: the sizes it can be split over, up to 64.
        gemms: the sites of fused ops, in the layer's order.
        others: GEMMs that are no such sites (experts, latent projections), each with its reason.
        notes: facts worth knowing. warnings: what may be wrong.
    """

    dims: ModelDims
    tp: int
    valid_tp: tuple[int, ...]
    gemms: tuple[LayerGemm, ...]
    others: tuple[LayerGemm, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def model_gemms(
    config: str | Path | Mapping[str, Any] | RawConfig | ModelDims, tp: int
) -> tuple[LayerGemm, ...]:
    """The sites of fused ops in a model's layers on one of ``tp`` ranks.

    Args:
        config: a preset's name, a path, a config's object, or a model's dimensions.
        tp: tensor-parallel size, 1 to 64.

    Raises:
        UsageError: for an invalid ``tp``, before the model is read.
        ModelConfigError: if the config cannot be read or lacks a key.
        UnsupportedError: for an architecture whose shapes would be a guess.
        ShardingError: if the model cannot be split over ``tp``.
    """
    return analyse(config, tp).gemms


def analyse(
    config: str | Path | Mapping[str, Any] | RawConfig | ModelDims,
    tp: int,
    include_lm_head: bool = False,
) -> ModelGemms:
    """As :func:`model_gemms`, with the other GEMMs, notes and warnings.

    ``include_lm_head`` adds the output projection, its vocabulary padded to 64 * tp.

    Raises:
        UsageError, ModelConfigError, UnsupportedError, ShardingError: as :func:`model_gemms`.
    """
    check_tp(tp)
    dims = config if isinstance(config, ModelDims) else model_dims(config)
    require_tp(dims, tp)
    found: list[LayerGemm] = []
    for block in dims.attention:
        found += _latent(block, dims, tp) if block.latent else _softmax(block, dims, tp)
    for mixer in dims.mixers:
        found += _mixer(mixer, dims, tp)
    for mlp in dims.mlps:
        found += _mlp(mlp, dims, tp)
    if include_lm_head:
        found.append(_lm_head(dims, tp))
    for gemm in found:
        if max(gemm.n, gemm.k) > MAX_DIM:
            raise ModelConfigError(
                f"{dims.where}: {gemm.name}: expected sizes up to {MAX_DIM}; "
                f"found {gemm.n} x {gemm.k}"
            )
    notes, warnings = list(dims.notes), list(dims.warnings)
    if any(gemm.bias and gemm.op is not None and gemm.op.reduces for gemm in found):
        notes.append("the bias of o or down/fc2 is added once, after the reduction")
    if dims.quantization is not None:
        warnings.append(
            f"unsupported quantisation: {dims.quantization.describe()}; fused kernels multiply "
            "16-bit types, so the shapes are those of the 16-bit form"
        )
        warnings += _cut_blocks(dims.quantization, found, tp)
    return ModelGemms(
        dims=dims,
        tp=tp,
        valid_tp=valid_tp(dims),
        gemms=tuple(gemm for gemm in found if gemm.op is not None),
        others=tuple(gemm for gemm in found if gemm.op is None),
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _softmax(block: Attention, dims: ModelDims, tp: int) -> list[LayerGemm]:
    label = f"_{block.label}" if block.label else ""
    q = block.heads // tp * block.head_dim
    # Fewer kv heads than ranks: each is copied to several ranks, and none gets less than one.
    kv = max(1, block.kv_heads // tp) * block.head_dim
    parts = (q * (2 if block.gated else 1), *([kv] if block.shared_kv else [kv, kv]))
    notes = []
    if block.kv_heads < tp:
        notes.append(f"kv heads are replicated {tp // block.kv_heads} times")
    if block.gated:
        notes.append("q includes the output gate")
    if block.shared_kv:
        notes.append("k and v share one projection")
    return [
        LayerGemm(
            f"qkv{label}", Op.AG_GEMM, sum(parts), dims.hidden, block.count, parts,
            bias=block.qkv_bias, weight_layout=dims.layout, note="; ".join(notes),
        ),
        LayerGemm(
            f"o{label}", Op.GEMM_RS, dims.hidden, q, block.count, (dims.hidden,),
            bias=block.o_bias, weight_layout=dims.layout,
        ),
    ]  # fmt: skip


def _mixer(mixer: Mixer, dims: ModelDims, tp: int) -> list[LayerGemm]:
    copied = any(columns.units == 1 and tp > 1 for _, each in mixer.inputs for columns in each)
    note = "the single group of B and C is copied to every rank" if copied else ""
    result = []
    for name, columns in mixer.inputs:
        parts = tuple(each.local(tp) for each in columns)
        result.append(
            LayerGemm(
                f"{mixer.name}_{name}",
                Op.AG_GEMM,
                sum(parts),
                dims.hidden,
                mixer.count,
                parts,
                bias=mixer.bias,
                note=note,
            )
        )
    out = f"{mixer.name}_out"
    depth, columns_out = mixer.output.local(tp), (dims.hidden,)
    result.append(
        LayerGemm(out, Op.GEMM_RS, dims.hidden, depth, mixer.count, columns_out, bias=mixer.bias)
    )
    return result


def _latent(block: Attention, dims: ModelDims, tp: int) -> list[LayerGemm]:
    latent, count = block.latent, block.count
    assert latent is not None
    heads = block.heads // tp
    q = heads * (latent.nope + latent.rope)
    kv_a = latent.kv_rank + latent.rope
    kv_b = heads * (latent.nope + latent.v)
    small = "its input is the small replicated latent: nothing of hidden's width is gathered"
    result = []
    if latent.q_rank:
        parts = (latent.q_rank, kv_a)
        result += [
            LayerGemm(
                "fused_qkv_a", None, sum(parts), dims.hidden, count, parts,
                sharded=False, bias=block.qkv_bias, note="not sharded: every rank computes all",
            ),
            LayerGemm("q_b", None, q, latent.q_rank, count, (q,), note=small),
        ]  # fmt: skip
    else:
        result += [
            LayerGemm("q_proj", Op.AG_GEMM, q, dims.hidden, count, (q,)),
            LayerGemm(
                "kv_a", None, kv_a, dims.hidden, count, (kv_a,),
                sharded=False, bias=block.qkv_bias, note="not sharded: every rank computes all",
            ),
        ]  # fmt: skip
    result.append(LayerGemm("kv_b", None, kv_b, latent.kv_rank, count, (kv_b,), note=small))
    result.append(
        LayerGemm(
            "o", Op.GEMM_RS, dims.hidden, heads * latent.v, count, (dims.hidden,), bias=block.o_bias
        )
    )
    return result


def _mlp(mlp: Mlp, dims: ModelDims, tp: int) -> list[LayerGemm]:
    first, second = ("gate_up", "down") if mlp.gated else ("fc1", "fc2")
    prefix = "" if mlp.role == "dense" else f"{mlp.role}_"
    site, note, local = True, "", mlp.width // tp
    if mlp.role == "expert":
        site = False
        note = f"grouped GEMM over {mlp.experts} experts: not a site of a fused op"
        if mlp.width % tp:
            local = mlp.width
            note += f"; width {mlp.width} is not shardable over {tp} ranks, listed whole"
    parts = (local, local) if mlp.gated else (local,)
    sharded = local != mlp.width or tp == 1
    return [
        LayerGemm(
            prefix + first, Op.AG_GEMM if site else None, sum(parts), dims.hidden, mlp.count, parts,
            sharded=sharded, bias=mlp.bias, weight_layout=dims.layout, note=note,
        ),
        LayerGemm(
            prefix + second, Op.GEMM_RS if site else None, dims.hidden, local, mlp.count,
            (dims.hidden,), sharded=sharded, bias=mlp.bias, weight_layout=dims.layout, note=note,
        ),
    ]  # fmt: skip


def _lm_head(dims: ModelDims, tp: int) -> LayerGemm:
    if not dims.vocab:
        raise ModelConfigError(f"{dims.where}: key vocab_size is missing; lm_head needs it")
    unit = 64 * tp
    padded = ceil_div(dims.vocab, unit) * unit
    note = "" if padded == dims.vocab else f"vocabulary {dims.vocab} padded to {padded} (64 * tp)"
    n = padded // tp
    return LayerGemm("lm_head", Op.AG_GEMM, n, dims.hidden, 1, (n,), note=note)


def _cut_blocks(quantization: Quantization, gemms: list[LayerGemm], tp: int) -> list[str]:
    """Where a shard's edge cuts a block of scales; a whole weight may end in part of one."""
    warnings = []
    for gemm in gemms:
        if tp == 1 or not gemm.sharded or not quantization.affects(*_modules(gemm.name)):
            continue
        along_n = gemm.name not in _ROW_PARALLEL
        sizes = set(gemm.parts) if along_n else {gemm.k}
        block = quantization.block_n if along_n else quantization.block_k
        cut = sorted(size for size in sizes if block and size % block)
        if cut:
            warnings.append(
                f"{gemm.name}: a rank's {', '.join(map(str, cut))} along {'N' if along_n else 'K'} "
                f"is not a multiple of the {quantization.method} block {block}: "
                f"quantised, this is not shardable at tp={tp}"
            )
    return warnings


def _modules(name: str) -> tuple[str, ...]:
    """What a config may call the modules of a GEMM in its list of unquantised ones."""
    if name == "lm_head":
        return ("lm_head",)
    if name in _ATTENTION_GEMMS:
        return ("self_attn", "attn", "attention", f"{name}_proj")
    role, _, matrix = name.rpartition("_") if not name.endswith("gate_up") else (name[:-8], "", "")
    owner = {"shared": ("shared_expert", "shared_experts"), "expert": ("experts",)}.get(role, ())
    return ("mlp", "feed_forward", *owner, f"{matrix or 'gate_up'}_proj")


_ATTENTION_GEMMS = frozenset(
    (
        "mamba_in",
        "mamba_out",
        "linear_qkvz",
        "linear_ba",
        "linear_qkv",
        "linear_gate",
        "linear_out",
        "qkv",
        "o",
        "qkv_global",
        "o_global",
        "fused_qkv_a",
        "q_b",
        "q_proj",
        "kv_a",
        "kv_b",
    )
)
_ROW_PARALLEL = frozenset(
    (
        "o",
        "o_global",
        "mamba_out",
        "linear_out",
        "down",
        "fc2",
        "shared_down",
        "shared_fc2",
        "expert_down",
        "expert_fc2",
    )
)
