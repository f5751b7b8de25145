"""What a ``model_type`` implies beyond its config's keys: one row per family.

Activation names do not tell a gated MLP from a plain one (Gemma's gelu is gated, StarCoder2's is
not), many biases have no key, and a nested ``text_config`` omits every key that equals its class
default. All that is written down here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fluxgen.shapes.keys import Section


@dataclass(frozen=True)
class Flag:
    """A boolean that is fixed (no ``key``) or read from a config key.

    Attributes:
        default: the fixed value, or the value of an absent key.
        key: the key's name. inverted: whether the key says the opposite (``no_bias``).
    """

    default: bool = False
    key: str = ""
    inverted: bool = False

    def read(self, config: Section) -> bool:
        """The flag's value for ``config``."""
        if not self.key:
            return self.default
        value = config.boolean(self.key, self.default != self.inverted)
        return value != self.inverted


OFF, ON = Flag(False), Flag(True)
ATTENTION_BIAS = Flag(False, "attention_bias")


@dataclass(frozen=True)
class Family:
    """The rules of one family of models.

    Attributes:
        gated: gate and up projections (three matrices) rather than fc1 and fc2.
        qkv_bias, o_bias, mlp_bias: which projections have a bias.
        ffn_defaults_to_4h: no ffn key, or null, means 4 * hidden.
        ffn_counts_both: the ffn key is gate and up together (Qwen v1).
        kv: how the number of kv heads is found: ``heads``, ``falcon``, ``multi_query``,
            ``chatglm`` or ``attn_config``.
        layout: ``nk`` as ``nn.Linear``, ``kn`` as GPT-2's Conv1D.
        parallel: attention and MLP read one normalised input and share one reduction.
        moe: which layers have experts: empty (none), ``all``, ``sparse_step``, ``first_k_dense``,
            ``llama4``, ``dbrx``, ``ernie``, ``hunyuan``, ``longcat``, ``granite_hybrid`` or
            ``nemotron_h``: see :mod:`fluxgen.shapes.mlp`.
        output_gate: q has twice the columns, the second half gates the attention's output.
        mixer: of layers without softmax attention: ``mamba2``, ``gated_delta`` or ``lightning``.
        layers: how a hybrid says which layers those are: ``types`` (a list of names), ``interval``,
            ``pattern`` (Nemotron-H), ``indices`` (of attention), ``attn_type_list``, ``both``
            (every layer has attention and the mixer).
        head_dim: class default of an absent head_dim, 0 for hidden / heads.
        nested: class defaults that a ``text_config`` may rely on.
        refused: why the family is not supported, empty if it is.
    """

    gated: bool = True
    qkv_bias: Flag = OFF
    o_bias: Flag = OFF
    mlp_bias: Flag = OFF
    ffn_defaults_to_4h: bool = False
    ffn_counts_both: bool = False
    kv: str = "heads"
    layout: str = "nk"
    parallel: Flag = OFF
    moe: str = ""
    output_gate: Flag = OFF
    mixer: str = ""
    layers: str = ""
    head_dim: int = 0
    nested: Mapping[str, int] = field(default_factory=dict)
    refused: str = ""


def _dims(
    hidden: int, inter: int, layers: int, heads: int, kv: int, vocab: int, **more: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        **more,
    }


_GATED = Family(qkv_bias=ATTENTION_BIAS, o_bias=ATTENTION_BIAS)
_LLAMA = replace(
    _GATED, mlp_bias=Flag(False, "mlp_bias"), nested=_dims(4096, 11008, 32, 32, 32, 32000)
)
_MISTRAL = Family(nested=_dims(4096, 14336, 32, 32, 8, 32000))
_QWEN2 = Family(qkv_bias=ON, nested=_dims(4096, 22016, 32, 32, 32, 151936))
_QWEN3 = replace(_GATED, head_dim=128, nested=_dims(4096, 22016, 32, 32, 32, 151936))
_QWEN3_MOE = replace(_GATED, moe="sparse_step")
_QWEN3_NEXT = replace(
    _QWEN3_MOE,
    output_gate=Flag(True, "attn_output_gate"),
    mixer="gated_delta",
    layers="interval",
    head_dim=256,
)
_GEMMA = replace(_GATED, head_dim=256)
_GEMMA3 = replace(_GEMMA, nested=_dims(2304, 9216, 26, 8, 4, 262208))
_GLM = Family(qkv_bias=ATTENTION_BIAS, head_dim=128)
_DEEPSEEK = replace(_GATED, moe="first_k_dense")
_PLAIN = Family(gated=False, qkv_bias=ON, o_bias=ON, mlp_bias=ON)
_GPT2 = replace(_PLAIN, ffn_defaults_to_4h=True)
_USE_BIAS = Flag(True, "use_bias")
_USE_BIAS_OFF = Flag(False, "use_bias")
_BIAS = Flag(False, "bias")
_FALCON = Family(
    gated=False,
    qkv_bias=_BIAS,
    o_bias=_BIAS,
    mlp_bias=_BIAS,
    ffn_defaults_to_4h=True,
    kv="falcon",
    parallel=Flag(True, "parallel_attn"),
)
_MPT_BIAS = Flag(False, "no_bias", inverted=True)
# transformers' and vLLM's modules of these names say which projections have a bias.
_MAMBA = replace(_GATED, mixer="mamba2", mlp_bias=Flag(False, "mlp_bias"))
_BAILING = Family(
    qkv_bias=Flag(False, "use_qkv_bias"),
    o_bias=_USE_BIAS_OFF,
    mlp_bias=_USE_BIAS_OFF,
    moe="first_k_dense",
)
_MINIMAX = Family(moe="all", mixer="lightning", layers="attn_type_list")
_ERNIE = Family(qkv_bias=_USE_BIAS_OFF, o_bias=_USE_BIAS_OFF, mlp_bias=_USE_BIAS_OFF)
_HUNYUAN = replace(_GATED, mlp_bias=Flag(False, "mlp_bias"))
_STATE_SPACE = Family(refused="its layers are state-space or recurrent blocks")
_ENCODER = Family(refused="it is an encoder or encoder-decoder, not a decoder-only model")

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "ministral3": _MISTRAL,
    "smollm3": replace(_LLAMA, nested={}),
    "granite": replace(_LLAMA, nested={}),
    "olmo": _GATED,
    "olmo2": _GATED,
    "olmo3": _GATED,
    "exaone": Family(),
    "exaone4": Family(),
    "baichuan": Family(),
    "minicpm": _GATED,
    "internlm": Family(qkv_bias=Flag(True, "bias"), o_bias=Flag(True, "bias")),
    "internlm2": Family(qkv_bias=_BIAS, o_bias=_BIAS),
    "internlm3": Family(qkv_bias=Flag(False, "qkv_bias"), o_bias=_BIAS, mlp_bias=_BIAS),
    "qwen": Family(
        qkv_bias=ON,
        o_bias=Flag(False, "no_bias", inverted=True),
        mlp_bias=Flag(False, "no_bias", inverted=True),
        ffn_counts_both=True,
    ),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": Family(qkv_bias=Flag(True, "qkv_bias"), moe="sparse_step"),
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": _QWEN3_MOE,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": replace(_QWEN3_NEXT, moe=""),
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA3,
    "gemma4_text": replace(_GEMMA, nested={"global_head_dim": 512}),
    "phi3": Family(),
    "phi": replace(_PLAIN, parallel=ON),
    "phi-msft": replace(_GPT2, parallel=ON),
    "phimoe": replace(_GATED, moe="all"),
    "gpt2": replace(_GPT2, layout="kn"),
    "openai-gpt": replace(_GPT2, layout="kn"),
    "gpt_bigcode": replace(_GPT2, kv="multi_query"),
    "gpt_neo": replace(_GPT2, qkv_bias=OFF),
    "gptj": replace(_GPT2, qkv_bias=OFF, o_bias=OFF, parallel=ON),
    "gpt_neox": replace(
        _PLAIN,
        qkv_bias=Flag(True, "attention_bias"),
        o_bias=Flag(True, "attention_bias"),
        parallel=Flag(True, "use_parallel_residual"),
    ),
    "opt": replace(
        _PLAIN,
        qkv_bias=Flag(True, "enable_bias"),
        o_bias=Flag(True, "enable_bias"),
        mlp_bias=Flag(True, "enable_bias"),
    ),
    "bloom": _GPT2,
    "falcon": _FALCON,
    "RefinedWeb": _FALCON,
    "RefinedWebModel": _FALCON,
    "mpt": Family(
        gated=False,
        qkv_bias=_MPT_BIAS,
        o_bias=_MPT_BIAS,
        mlp_bias=_MPT_BIAS,
        ffn_defaults_to_4h=True,
        kv="attn_config",
    ),
    "starcoder2": Family(gated=False, qkv_bias=_USE_BIAS, o_bias=_USE_BIAS, mlp_bias=_USE_BIAS),
    "stablelm": Family(
        qkv_bias=Flag(False, "use_qkv_bias"), parallel=Flag(False, "use_parallel_residual")
    ),
    "cohere": replace(_GATED, parallel=ON),
    "cohere2": replace(_GATED, parallel=ON),
    "chatglm": Family(
        qkv_bias=Flag(False, "add_qkv_bias"),
        o_bias=Flag(False, "add_bias_linear"),
        mlp_bias=Flag(False, "add_bias_linear"),
        kv="chatglm",
    ),
    "glm": _GLM,
    "glm4": _GLM,
    "glm4_moe": replace(_GLM, moe="first_k_dense"),
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "minicpm3": _GATED,
    "nemotron": replace(_GATED, gated=False, mlp_bias=Flag(False, "mlp_bias")),
    "nemotron_h": replace(_MAMBA, gated=False, layers="pattern", moe="nemotron_h"),
    "bamba": replace(_MAMBA, layers="indices"),
    "falcon_h1": replace(_MAMBA, layers="both"),
    "granitemoehybrid": replace(_MAMBA, layers="types", moe="granite_hybrid", mlp_bias=OFF),
    "minimax": _MINIMAX,
    "minimax_text_01": _MINIMAX,
    "minimax_m1": _MINIMAX,
    "ernie4_5": _ERNIE,
    "ernie4_5_moe": replace(_ERNIE, moe="ernie"),
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": replace(_HUNYUAN, moe="hunyuan"),
    "longcat_flash": replace(_GATED, moe="longcat"),
    "seed_oss": Family(
        qkv_bias=Flag(True, "attention_bias"),
        o_bias=Flag(False, "attention_out_bias"),
        mlp_bias=Flag(False, "mlp_bias"),
        head_dim=128,
    ),
    "apertus": replace(_GATED, gated=False, mlp_bias=Flag(False, "mlp_bias")),
    "dots1": _DEEPSEEK,
    "bailing_moe": _BAILING,
    "bailing_moe_v2": _BAILING,
    "mistral4": _DEEPSEEK,
    "gemma3n_text": replace(_GEMMA, nested=_dims(2048, 16384, 35, 8, 2, 262400)),
    "arcee": replace(_GATED, gated=False, mlp_bias=Flag(False, "mlp_bias")),
    "llama4_text": replace(
        _GATED,
        moe="llama4",
        head_dim=128,
        nested=_dims(
            5120, 8192, 48, 40, 8, 202048, intermediate_size_mlp=16384, num_local_experts=16
        ),
    ),
    "mixtral": Family(moe="all"),
    "olmoe": replace(_GATED, moe="all"),
    "granitemoe": replace(_GATED, moe="all"),
    "granitemoeshared": replace(_GATED, moe="all"),
    "gpt_oss": Family(
        qkv_bias=Flag(True, "attention_bias"),
        o_bias=Flag(True, "attention_bias"),
        moe="all",
        head_dim=64,
    ),
    "minimax_m2": Family(moe="all"),
    "dbrx": Family(kv="attn_config", moe="dbrx"),
    "jamba": _STATE_SPACE,
    "mamba": _STATE_SPACE,
    "mamba2": _STATE_SPACE,
    "falcon_mamba": _STATE_SPACE,
    "zamba": _STATE_SPACE,
    "zamba2": _STATE_SPACE,
    "rwkv": _STATE_SPACE,
    "recurrent_gemma": _STATE_SPACE,
    "t5": _ENCODER,
    "bart": _ENCODER,
    "whisper": _ENCODER,
    "bert": _ENCODER,
    "roberta": _ENCODER,
    "distilbert": _ENCODER,
    "deepseek_v4": Family(refused="its low-rank, grouped output projection is not implemented"),
}
"""The known values of ``model_type``."""

NESTED_TYPES: Mapping[str, str] = {
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "kimi_k25": "kimi_k2",
    "kimi_vl": "deepseek_v3",
    "qwen2_5_omni": "qwen2_5_vl_text",
    "qwen2_5_omni_thinker": "qwen2_5_vl_text",
    "gemma4_unified": "gemma4_text",
}
"""Family of a multi-modal model's language part where it is not the type with ``_text`` added."""

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Phi3ForCausalLM": "phi3",
    "GPT2LMHeadModel": "gpt2",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GPTJForCausalLM": "gptj",
    "OPTForCausalLM": "opt",
    "BloomForCausalLM": "bloom",
    "FalconForCausalLM": "falcon",
    "RWForCausalLM": "falcon",
    "ChatGLMModel": "chatglm",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
"""Family of a config without ``model_type``, by the first entry of ``architectures``."""
