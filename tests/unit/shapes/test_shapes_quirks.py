"""One test for each way in which real configs differ from the plain Llama form (Q01 to Q30)."""

from __future__ import annotations

import json

import pytest

from fluxgen.core.errors import ModelConfigError, ShardingError, UnsupportedError, UsageError
from fluxgen.core.op import Op
from fluxgen.shapes import (
    analyse,
    load_config,
    model_dims,
    model_gemms,
    preset_names,
    problems,
    summary,
    valid_tp,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def without(config, *keys, **more):
    return {**{k: v for k, v in config.items() if k not in keys}, **more}


def sizes(config, tp=1):
    return {gemm.name: (gemm.n, gemm.k) for gemm in model_gemms(config, tp)}


def attention(config):
    (block,) = model_dims(config).attention
    return block


def dense(config):
    (mlp,) = [mlp for mlp in model_dims(config).mlps if mlp.role == "dense"]
    return mlp


def biases(config):
    block, mlp = attention(config), model_dims(config).mlps[0]
    return block.qkv_bias, block.o_bias, mlp.bias


@pytest.mark.parametrize("key", ["n_embd", "n_embed", "d_model"])
def test_q01_hidden_aliases(key):
    config = without(LLAMA, "hidden_size", **{key: 4096})
    assert sizes(config) == sizes(LLAMA)
    assert model_dims({**LLAMA, key: 4096}).hidden == 4096
    with pytest.raises(ModelConfigError, match=f"hidden_size and {key} mean the same.*4096.*2048"):
        model_dims({**LLAMA, key: 2048})


@pytest.mark.parametrize("key", ["n_head", "n_heads", "num_heads"])
def test_q02_heads_aliases(key):
    config = without(LLAMA, "num_attention_heads", **{key: 32})
    assert sizes(config) == sizes(LLAMA)
    with pytest.raises(ModelConfigError, match="num_attention_heads and"):
        model_dims({**LLAMA, key: 16})


@pytest.mark.parametrize("key", ["n_layer", "n_layers", "num_layers"])
def test_q03_layers_aliases(key):
    config = without(LLAMA, "num_hidden_layers", **{key: 17})
    assert model_dims(config).layers == 17
    assert {gemm.count for gemm in model_gemms(config, 1)} == {17}


def falcon(**more):
    return {
        "model_type": "falcon",
        "hidden_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        **more,
    }


def test_q04_kv_heads():
    assert attention(without(LLAMA, "num_key_value_heads")).kv_heads == 32
    assert attention({**LLAMA, "num_key_value_heads": None}).kv_heads == 32
    # Falcon 7B names 71 kv heads and has one; 40B and 180B have multi_query true and eight.
    assert attention("falcon-7b").kv_heads == 1
    assert attention("falcon-180b").kv_heads == 8
    assert attention(falcon(multi_query=False)).kv_heads == 64
    assert attention(falcon(multi_query=False, num_kv_heads=8)).kv_heads == 64
    grouped = falcon(new_decoder_architecture=True, multi_query=True, n_head_kv=8)
    assert attention(grouped).kv_heads == 8
    bigcode = {"model_type": "gpt_bigcode", "n_embd": 512, "n_head": 8, "n_layer": 2}
    assert attention({**bigcode, "multi_query": True}).kv_heads == 1
    assert attention({**bigcode, "multi_query": False}).kv_heads == 8
    chatglm = {
        "model_type": "chatglm",
        "hidden_size": 4096,
        "num_layers": 40,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "ffn_hidden_size": 13696,
        "multi_query_group_num": 2,
        "padded_vocab_size": 151552,
    }
    assert attention({**chatglm, "multi_query_attention": True}).kv_heads == 2
    assert attention({**chatglm, "multi_query_attention": False}).kv_heads == 32
    with pytest.raises(ModelConfigError, match="32 heads and 5 kv heads"):
        model_dims({**LLAMA, "num_key_value_heads": 5})


def test_q05_ffn_width():
    assert dense(without(LLAMA, "intermediate_size", ffn_dim=99)).width == 99
    assert dense("opt-13b").width == 20480
    assert dense("phi-2").width == 10240
    assert dense("bloom-176b").width == 57344
    assert dense(falcon()).width == 16384
    assert dense(falcon(ffn_hidden_size=9000)).width == 9000
    mpt = {"model_type": "mpt", "d_model": 512, "n_heads": 8, "n_layers": 2}
    assert dense({**mpt, "expansion_ratio": 3}).width == 1536
    assert dense(mpt).width == 2048
    # No guess of 4 * hidden where the family has none.
    with pytest.raises(ModelConfigError, match=r"key intermediate_size .* is missing"):
        model_dims(without(LLAMA, "intermediate_size"))


def test_q06_qwen_v1_width_counts_gate_and_up():
    assert dense("qwen-1.8b").width == 5504
    config = dict(load_config("qwen-1.8b").data)
    with pytest.raises(ModelConfigError, match="even number"):
        model_dims({**config, "intermediate_size": 11007})


@pytest.mark.parametrize("name", ["minimax-m2.5", "mixtral-8x7b", "gpt-oss-120b"])
def test_q07_intermediate_size_is_the_experts_width(name):
    config = load_config(name).data
    found = analyse(name, 1)
    assert [gemm.name for gemm in found.gemms] == ["qkv", "o"]
    (expert,) = found.dims.mlps
    assert (expert.role, expert.width) == ("expert", config["intermediate_size"])
    assert all("grouped GEMM" in gemm.note for gemm in found.others)
    granite = without(LLAMA, model_type="granitemoe", num_local_experts=40)
    assert [mlp.role for mlp in model_dims(granite).mlps] == ["expert"]


def test_q08_intermediate_size_that_no_layer_uses():
    found = analyse("qwen3-235b-a22b", 8)
    assert found.dims.hidden == 4096 and load_config("qwen3-235b-a22b").data["intermediate_size"]
    assert {gemm.name for gemm in found.gemms} == {"qkv", "o"}
    assert any("intermediate_size is not used" in note for note in found.notes)
    config = {**load_config("qwen3-235b-a22b").data, "mlp_only_layers": [0, 5]}
    assert dense(config).count == 2 and dense(config).width == 12288


def test_q09_dense_and_expert_layers_mixed():
    counts = {gemm.name: gemm.count for gemm in model_gemms("deepseek-v3", 8)}
    assert (counts["gate_up"], counts["shared_gate_up"], counts["o"]) == (3, 58, 61)
    maverick = {gemm.name: gemm for gemm in model_gemms("llama-4-maverick", 8)}
    assert (maverick["gate_up"].count, maverick["gate_up"].n) == (24, 4096)
    assert (maverick["shared_gate_up"].count, maverick["shared_gate_up"].n) == (24, 2048)
    base = dict(load_config("deepseek-v3").data)
    # Layers 4, 6, ..., 60 have experts when every second one does.
    roles = {m.role: m.count for m in model_dims({**base, "moe_layer_freq": 2}).mlps}
    assert roles == {"dense": 32, "shared": 29, "expert": 29}
    listed = {**base, "first_k_dense_replace": None, "moe_layer_freq": [0] * 11 + [1] * 50}
    assert {m.role: m.count for m in model_dims(listed).mlps}["dense"] == 11
    with pytest.raises(ModelConfigError, match="moe_layer_freq"):
        model_dims({**base, "moe_layer_freq": [0, 1]})
    sparse = {**load_config("qwen3-235b-a22b").data, "decoder_sparse_step": 2}
    assert {m.role: m.count for m in model_dims(sparse).mlps} == {"dense": 47, "expert": 47}
    # The last of each group has experts, so an incomplete group has none.
    odd = {**sparse, "num_hidden_layers": 5, "decoder_sparse_step": 3}
    assert {m.role: m.count for m in model_dims(odd).mlps} == {"dense": 4, "expert": 1}
    scout = dict(load_config("llama-4-scout").data["text_config"])
    odd = {**scout, "num_hidden_layers": 5, "interleave_moe_layer_step": 2}
    roles = {m.role: m.count for m in model_dims(odd).mlps}
    assert roles == {"dense": 3, "shared": 2, "expert": 2}
    moe_list = {**load_config("llama-4-scout").data["text_config"], "moe_layers": [1, 3]}
    assert {m.role: m.count for m in model_dims(moe_list).mlps}["dense"] == 46


def test_q10_explicit_head_dim_wins():
    assert sizes("qwen3-32b", 8)["o"] == (5120, 1024)
    assert attention({**LLAMA, "head_dim": 64}).head_dim == 64
    assert attention({**LLAMA, "head_dim": None}).head_dim == 128
    assert attention(without(LLAMA, model_type="qwen3", hidden_size=2048)).head_dim == 128
    qwen3 = without(LLAMA, model_type="qwen3", hidden_size=2048, head_dim=None)
    assert attention(qwen3).head_dim == 64
    assert attention({**LLAMA, "kv_channels": 96}).head_dim == 96
    assert attention({**LLAMA, "attention_head_dim": 80}).head_dim == 80
    with pytest.raises(ModelConfigError, match="hidden 4097 and 32 heads"):
        model_dims({**LLAMA, "hidden_size": 4097})


def test_q11_mla_ignores_head_dim_and_kv_heads():
    base = dict(load_config("glm-5").data)
    assert base["head_dim"] == 64
    odd = {**base, "head_dim": 7, "num_key_value_heads": 3}
    assert sizes(odd, 8) == sizes("glm-5", 8)
    assert sizes("glm-5", 8)["o"] == (6144, 2048)
    with pytest.raises(ModelConfigError, match="v_head_dim is missing"):
        model_dims(without(base, "v_head_dim"))


def test_q12_mla_without_q_lora_rank():
    base = dict(load_config("deepseek-v2-lite").data)
    assert base["q_lora_rank"] is None
    for config in (base, without(base, "q_lora_rank")):
        found = analyse(config, 8)
        assert [g.name for g in found.gemms][:2] == ["q_proj", "o"]
        assert {g.name for g in found.others} >= {"kv_a", "kv_b"}
    assert "q_proj" not in sizes("deepseek-v3", 8)


@pytest.mark.parametrize("key", ["text_config", "language_config", "llm_config"])
def test_q13_nested_text_config(key):
    nested = {
        "model_type": "wrapper",
        key: LLAMA,
        "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "intermediate_size": 1},
    }
    assert sizes(nested, 8) == sizes(LLAMA, 8)
    deep = {"model_type": "omni", "thinker_config": {"model_type": "thinker", **nested}}
    assert sizes({**deep, "hidden_size": None}, 8) == sizes(LLAMA, 8)
    both = {**nested, "hidden_size": 1152}
    assert model_dims(both).hidden == 4096
    assert any("the nested value is used" in w for w in model_dims(both).warnings)
    with pytest.raises(ModelConfigError, match="text_config: expected an object"):
        model_dims({"model_type": "gemma3", "text_config": [1]})


def test_q13_multi_modal_type_with_the_text_keys_on_top():
    flat = {**load_config("kimi-k2").data, "model_type": "kimi_k25", "vision_config": {"a": 1}}
    assert model_gemms(flat, 8) == model_gemms("kimi-k2", 8)
    assert not any("unknown" in warning for warning in model_dims(flat).warnings)
    vl = without(LLAMA, model_type="qwen3_vl", hidden_size=2048)
    assert attention(vl).head_dim == 128 and not model_dims(vl).warnings


def test_m07_vision_config_is_never_read():
    only_vision = {"model_type": "llava", "vision_config": LLAMA}
    with pytest.raises(ModelConfigError, match="hidden_size"):
        model_dims(only_vision)
    both = {"model_type": "x", "text_config": LLAMA, "vision_config": {"num_attention_heads": 1}}
    assert attention(both).heads == 32


def test_q14_class_defaults_of_a_sparse_text_config():
    block = attention("gemma-3-4b")
    assert (block.heads, block.kv_heads, block.head_dim) == (8, 4, 256)
    assert any("class defaults" in note for note in model_dims("gemma-3-4b").notes)
    llava = {
        "model_type": "llava",
        "text_config": {"_name_or_path": "lmsys/vicuna-7b-v1.5", "vocab_size": 32064},
        "vision_config": {"hidden_size": 1024, "num_attention_heads": 16},
    }
    dims = model_dims(llava)
    assert (dims.hidden, dims.layers, dims.vocab) == (4096, 32, 32064)
    assert sizes(llava, 8) == sizes("llama-2-7b", 8)
    gemma_12b = {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
        },
    }
    assert attention(gemma_12b).head_dim == 256
    # A top-level config is always complete, so a missing key there is a damaged file.
    for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"):
        with pytest.raises(ModelConfigError, match=f"key {key} .* is missing"):
            model_dims(without(LLAMA, key))
    with pytest.raises(ModelConfigError, match="hidden_size"):
        model_dims({"model_type": "new", "text_config": {"model_type": "new_text"}})


def test_q15_gated_by_family_not_by_activation():
    assert set(sizes("starcoder2-7b")) == {"qkv", "o", "fc1", "fc2"}
    assert set(sizes("gemma-2b")) == {"qkv", "o", "gate_up", "down"}
    assert set(sizes("gpt-j-6b")) == {"qkv", "o", "fc1", "fc2"}
    gelu = {**LLAMA, "hidden_act": "gelu"}
    assert set(sizes(gelu)) == {"qkv", "o", "gate_up", "down"}
    starcoder = dict(load_config("starcoder2-7b").data)
    with pytest.raises(UnsupportedError, match="mlp_type"):
        model_dims({**starcoder, "mlp_type": "gated"})


def as_type(model_type, **more):
    return without(LLAMA, model_type=model_type, **more)


BIASES = [
    (as_type("llama", attention_bias=True), (1, 1, 0)),
    (as_type("llama", mlp_bias=True), (0, 0, 1)),
    (as_type("glm", attention_bias=True), (1, 0, 0)),
    (as_type("glm", attention_bias=False), (0, 0, 0)),
    (as_type("qwen2"), (1, 0, 0)),
    (as_type("qwen3", qkv_bias=True), (0, 0, 0)),
    (as_type("qwen3_moe", qkv_bias=True, num_experts=0), (0, 0, 0)),
    (as_type("qwen2_moe", num_experts=0), (1, 0, 0)),
    (as_type("qwen2_moe", num_experts=0, qkv_bias=False), (0, 0, 0)),
    (as_type("qwen", no_bias=True), (1, 0, 0)),
    (as_type("qwen", no_bias=False), (1, 1, 1)),
    (as_type("internlm", bias=True), (1, 1, 0)),
    (as_type("internlm", bias=False), (0, 0, 0)),
    (as_type("falcon", bias=True), (1, 1, 1)),
    (as_type("starcoder2", use_bias=False), (0, 0, 0)),
    (as_type("starcoder2"), (1, 1, 1)),
    (as_type("stablelm", use_qkv_bias=True), (1, 0, 0)),
    (as_type("chatglm", add_qkv_bias=True, add_bias_linear=False), (1, 0, 0)),
    (as_type("chatglm", add_bias_linear=True), (0, 1, 1)),
    (as_type("opt", enable_bias=False), (0, 0, 0)),
    (as_type("opt"), (1, 1, 1)),
    (as_type("mpt", no_bias=True), (0, 0, 0)),
    (as_type("mpt", no_bias=False), (1, 1, 1)),
    (as_type("gptj"), (0, 0, 1)),
]


@pytest.mark.parametrize(("config", "expected"), BIASES, ids=lambda v: str(v)[:40])
def test_q16_biases(config, expected):
    assert biases(config) == tuple(map(bool, expected))
    with pytest.raises(ModelConfigError, match="expected true or false"):
        model_dims({**LLAMA, "attention_bias": "yes"})


def test_q17_fused_weights_have_the_same_gemm_and_conv1d_is_kn():
    qkv = model_gemms("phi-3.5-mini", 8)[0]
    assert qkv.parts == (384, 384, 384) and sum(qkv.parts) == qkv.n
    assert {gemm.weight_layout for gemm in model_gemms("gpt2-xl", 5)} == {"kn"}
    assert any("Conv1D" in note for note in model_dims("gpt2-xl").notes)
    assert {gemm.weight_layout for gemm in model_gemms("bloom-176b", 8)} == {"nk"}
    # The kernels take (n, k) only, so a problem never asks for the stored layout.
    assert {p.signature.b_layout for p in problems("gpt2-xl", 5, 10)} == {"nk"}


def test_q18_parallel_attention_is_not_counted_twice():
    for name in ("falcon-180b", "gpt-j-6b", "phi-2", "aya-23-8b"):
        dims = model_dims(name)
        assert dims.parallel
        assert [g.count for g in model_gemms(dims, 1)] == [dims.layers] * 4
        assert any("share one all-gather" in note for note in dims.notes)
    assert not model_dims(falcon(parallel_attn=False)).parallel
    assert not model_dims(LLAMA).parallel
    neox = as_type("gpt_neox")
    assert model_dims(neox).parallel
    assert not model_dims({**neox, "use_parallel_residual": False}).parallel


@pytest.mark.parametrize(
    ("name", "tp", "qkv"),
    [
        ("gemma-2b", 8, 768),
        ("glm-4-9b", 8, 768),
        ("qwen3-235b-a22b", 8, 1280),
        ("gemma-2b", 1, 2560),
    ],
)
def test_q19_kv_heads_are_replicated(name, tp, qkv):
    gemm = model_gemms(name, tp)[0]
    assert gemm.n == qkv
    block = attention(name)
    assert ("replicated" in gemm.note) == (block.kv_heads < tp)
    assert gemm.parts[1] == gemm.parts[2] == max(1, block.kv_heads // tp) * block.head_dim


def test_q20_kv_heads_that_fit_no_way():
    for tp in (4, 8):
        with pytest.raises(ShardingError, match=r"num_key_value_heads 10 .*Valid tp: 1, 2, 5, 10"):
            model_gemms("phi-4", tp)
    assert sizes("phi-4", 5)["qkv"] == ((8 + 2 * 2) * 128, 5120)


@pytest.mark.parametrize(
    ("vocab", "tp", "n"),
    [(50257, 8, 6336), (49155, 8, 6208), (122753, 8, 15360), (32003, 1, 32064), (32000, 4, 8000)],
)
def test_q21_lm_head_only_on_request_and_padded(vocab, tp, n):
    config = {**LLAMA, "vocab_size": vocab}
    assert "lm_head" not in sizes(config, tp)
    head = analyse(config, tp, include_lm_head=True).gemms[-1]
    assert (head.name, head.op, head.n, head.k, head.count) == ("lm_head", Op.AG_GEMM, n, 4096, 1)
    assert (n * tp) % (64 * tp) == 0 and 0 <= n * tp - vocab < 64 * tp
    assert (f"padded to {n * tp}" in head.note) == (n * tp != vocab)
    with pytest.raises(ModelConfigError, match="vocab_size"):
        analyse(without(config, "vocab_size"), tp, include_lm_head=True)


@pytest.mark.parametrize("value", [True, False, None, "absent", "nonsense"])
def test_q22_tied_embeddings_do_not_matter(value):
    config = LLAMA if value == "absent" else {**LLAMA, "tie_word_embeddings": value}
    assert sizes(config, 8) == sizes(LLAMA, 8)


def test_q23_heterogeneous_layers():
    nas = {
        "model_type": "nemotron-nas",
        "hidden_size": 8192,
        "intermediate_size": None,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": None,
        "block_configs": [{"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.3}}] * 2,
    }
    with pytest.raises(UnsupportedError, match="block_configs"):
        model_gemms(nas, 8)
    hybrid = as_type("nemotron_h", num_hidden_layers=9, hybrid_override_pattern="M-M-M-M*-")
    assert {g.name: g.count for g in model_gemms(hybrid, 8)} == {
        "qkv": 1,
        "o": 1,
        "fc1": 4,
        "fc2": 4,
    }
    with pytest.raises(ModelConfigError, match="9 letters"):
        model_gemms({**hybrid, "num_hidden_layers": 10}, 8)
    with pytest.raises(ModelConfigError, match="hybrid_override_pattern"):
        model_gemms(without(hybrid, "hybrid_override_pattern"), 8)
    counts = {g.name: g.count for g in model_gemms("qwen3.5-27b", 8)}
    assert counts == {"qkv": 16, "o": 16, "gate_up": 64, "down": 64}
    assert any(
        "48 of 64 layers have linear attention" in n for n in model_dims("qwen3.5-27b").notes
    )
    with pytest.raises(ModelConfigError, match="layer_types"):
        model_dims({**LLAMA, "layer_types": ["full_attention"]})
    with pytest.raises(UnsupportedError, match="mamba"):
        model_dims({**LLAMA, "layer_types": ["mamba"] * 32})


def test_q23_global_layers_of_their_own_size():
    gemma4 = {
        "model_type": "gemma4",
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size": 2816,
            "intermediate_size": 2112,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 256,
            "global_head_dim": 512,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        },
    }
    gemms = {g.name: (g.n, g.k, g.count) for g in model_gemms(gemma4, 2)}
    assert gemms["qkv"] == ((8 + 4 + 4) * 256, 2816, 5)
    assert gemms["o"] == (2816, 8 * 256, 5)
    assert gemms["qkv_global"] == ((8 + 1) * 512, 2816, 1)
    assert gemms["o_global"] == (2816, 8 * 512, 1)
    text = without(gemma4["text_config"], "layer_types")
    with pytest.raises(UnsupportedError, match="without layer_types"):
        model_dims({"model_type": "gemma4", "text_config": text})
    shared = {**gemma4["text_config"], "num_kv_shared_layers": 2}
    with pytest.raises(UnsupportedError, match="num_kv_shared_layers"):
        model_dims(shared)


def test_q24_output_gate_doubles_q():
    # 24 heads of 256 over 8 ranks: 2 * 3 + 1 + 1 heads.
    assert sizes("qwen3.5-27b", 8)["qkv"] == (2048, 5120)
    config = dict(load_config("qwen3.5-27b").data["text_config"])
    assert sizes({**config, "attn_output_gate": False}, 8)["qkv"] == (1280, 5120)
    assert sizes("qwen3.5-27b", 8)["o"] == (5120, 768)


def test_q24_qwen3_next_gates_without_a_key():
    config = {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 512,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }
    gemms = {g.name: (g.n, g.k, g.count) for g in model_gemms(config, 8)}
    assert attention({**config, "num_hidden_layers": 7}).count == 1
    # 2 * 2 + 1 + 1 heads of 256 in every fourth layer; a shared expert in every layer.
    assert gemms == {
        "qkv": (1536, 2048, 12),
        "o": (2048, 512, 12),
        "shared_gate_up": (128, 2048, 48),
        "shared_down": (2048, 64, 48),
    }


def test_q25_word_embed_proj_dim_is_not_the_hidden_size():
    opt_350m = {
        "model_type": "opt",
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "word_embed_proj_dim": 512,
        "vocab_size": 50272,
    }
    assert {gemm.k for gemm in model_gemms(opt_350m, 1) if gemm.op is Op.AG_GEMM} == {1024}
    assert any("word_embed_proj_dim 512" in note for note in model_dims(opt_350m).notes)


def quantised(**config):
    return {**LLAMA, "quantization_config": config}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 in blocks of 128 x 128"),
        ({"quant_method": "fp8", "weight_block_size": None}, "fp8;"),
        ({"quant_method": "gptq", "group_size": 128}, "gptq in blocks of 1 x 128"),
        ({"quant_method": "gptq", "group_size": -1}, "gptq;"),
        ({"quant_method": "mxfp4"}, "mxfp4 in blocks of 1 x 32"),
    ],
)
def test_q26_quantisation_is_reported_and_shapes_stay(config, words):
    found = analyse(quantised(**config), 8)
    assert sizes(quantised(**config), 8) == sizes(LLAMA, 8)
    (warning,) = found.warnings
    assert "unsupported quantisation" in warning and words in warning


def test_q26_quantisation_elsewhere(tmp_path):
    nested = {"model_type": "mistral3", "text_config": quantised(quant_method="fp8")}
    assert model_dims(nested).quantization.method == "fp8"
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    side = {"quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["x"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(side))
    found = model_dims(tmp_path).quantization
    assert (found.method, found.block_k, found.skipped) == ("nvfp4", 16, ("x",))
    for broken in ({"weight_block_size": [128]}, {"weight_block_size": "128"}, {"group_size": "a"}):
        with pytest.raises(ModelConfigError, match="quantization_config"):
            model_dims(quantised(quant_method="fp8", **broken))


def test_q26_modules_left_in_16_bits_are_not_complained_about():
    warnings = analyse("gpt-oss-120b", 8).warnings
    assert any(w.startswith("expert_down: a rank's 360 along K") for w in warnings)
    config = {**LLAMA, "intermediate_size": 11264}
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 256]}

    def cut(**more):
        found = analyse({**config, "quantization_config": {**blocks, **more}}, 8)
        return [w.split(":")[0] for w in found.warnings[1:]]

    assert cut() == ["down"]
    assert cut(modules_to_not_convert=["model.layers.*.mlp"]) == []
    assert cut(modules_to_not_convert=["model.layers.3.mlp", "model.layers.*.mlp.gate"]) == ["down"]


def test_m01_qwen72b_quantised_groups():
    plain = dict(load_config("qwen2.5-72b").data)
    for tp in (2, 4, 8):
        assert sizes("qwen2.5-72b", tp)["down"] == (8192, 29568 // tp)
        gptq = {**plain, "quantization_config": {"quant_method": "gptq", "group_size": 128}}
        warnings = analyse(gptq, tp).warnings
        assert any(w.startswith(f"down: a rank's {29568 // tp} along K") for w in warnings)
        assert len(analyse("qwen2.5-72b-awq", tp).warnings) == 1


def test_m03_deepseek_r1_at_tp_32_cuts_blocks():
    warnings = analyse("deepseek-r1", 32).warnings
    assert any(w.startswith("down: a rank's 576 along K") for w in warnings)
    assert any(w.startswith("gate_up: a rank's 576 along N") for w in warnings)
    assert not any(
        w.split(":")[0] in ("down", "gate_up") for w in analyse("deepseek-r1", 8).warnings
    )


def test_m05_an_unsharded_weight_may_end_in_a_partial_block():
    found = analyse("deepseek-r1", 8)
    (fused,) = [g for g in found.others if g.name == "fused_qkv_a"]
    assert fused.n == 2112 and fused.n % 128 == 64
    assert not any("fused_qkv_a" in w for w in found.warnings)
    # At tp 1 nothing is cut at all.
    odd = quantised(quant_method="fp8", weight_block_size=[128, 100])
    assert len(analyse(odd, 1).warnings) == 1


def test_m09_mtp_layers_have_the_main_layers_shapes():
    base = dict(load_config("deepseek-v3").data)
    assert base["num_nextn_predict_layers"] == 1
    without_mtp = without(base, "num_nextn_predict_layers")
    assert model_gemms(base, 8) == model_gemms(without_mtp, 8)
    assert any("multi-token-prediction" in note for note in model_dims(base).notes)
    assert not any("multi-token" in note for note in model_dims(without_mtp).notes)
    assert problems(base, 8, 64) == problems(without_mtp, 8, 64)


def test_q27_legacy_and_unknown_model_types():
    refined = {"model_type": "RefinedWeb", "hidden_size": 8192, "n_layer": 60, "n_head": 128}
    assert attention({**refined, "n_head_kv": 8}).kv_heads == 8
    small = {**refined, "model_type": "RefinedWebModel", "multi_query": True, "n_head_kv": 71}
    assert attention(small).kv_heads == 1
    assert model_dims("phi-2").model_type == "phi-msft"
    by_architecture = without(LLAMA, "model_type", architectures=["LlamaForCausalLM"])
    assert model_dims(by_architecture).warnings == ()
    assert model_dims(by_architecture).model_type == "llama"

    unknown = without(LLAMA, model_type="brand_new")
    found = model_dims(unknown)
    assert sizes(unknown, 8) == sizes(LLAMA, 8)
    assert any("'brand_new' is unknown: generic rules" in w for w in found.warnings)
    plain = {**unknown, "hidden_act": "relu"}
    assert set(sizes(plain)) == {"qkv", "o", "fc1", "fc2"}
    assert model_dims(without(LLAMA, "model_type")).warnings
    for key in set(LLAMA) - {"model_type", "vocab_size"}:
        with pytest.raises(ModelConfigError, match=f"unknown.*{key}"):
            model_dims(without(unknown, key))
    with pytest.raises(UnsupportedError, match="experts"):
        model_dims({**unknown, "num_experts": 8})
    with pytest.raises(UnsupportedError, match="mamba"):
        model_dims({**LLAMA, "model_type": "mamba"})
    with pytest.raises(UnsupportedError, match="encoder"):
        model_dims({**LLAMA, "is_encoder_decoder": True})


def test_q28_native_params_json(tmp_path):
    native = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "hidden_dim": 14336}
    path = tmp_path / "params.json"
    path.write_text(json.dumps(native))
    with pytest.raises(ModelConfigError, match="not a Hugging Face config") as caught:
        model_dims(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ModelConfigError, match=r"params\.json, the native format"):
        model_dims(tmp_path)


def test_deepseek_v4_is_unsupported_not_a_key_error():
    v4 = {
        "model_type": "deepseek_v4",
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "o_lora_rank": 1024,
        "o_groups": 8,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
    }
    for config in (v4, without(v4, "o_lora_rank"), {**v4, "model_type": "other"}):
        with pytest.raises(UnsupportedError):
            model_gemms(config, 8)


# Q29, problems of the file itself, is tested in test_shapes_reader.py.


def test_q30_equal_models_pose_equal_problems():
    names = ("llama-3.1-8b", "mistral-7b", "internlm2-7b")
    found = [problems(name, 8, [64, 4096]) for name in names]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 8
    merged = dict.fromkeys(p for name in names for p in problems(name, 8, [64, 4096]))
    assert len(merged) == 8
    everything = [
        p
        for name in preset_names()
        if 8 in valid_tp(model_dims(name))
        for p in problems(name, 8, 1)
    ]
    assert len(set(everything)) < len(everything)
    assert len(set(problems("llama-4-maverick", 8, 1))) == len(problems("llama-4-maverick", 8, 1))


@pytest.mark.parametrize("tp", [0, -1, 1.5, "8", True, None, 65, [8]])
def test_tp_is_checked_before_the_model_is_read(tp):
    for call in (model_gemms, analyse, lambda m, t: problems(m, t, 1), summary):
        with pytest.raises(UsageError, match="tp: expected an integer") as caught:
            call("/no/such/model", tp)
        assert not isinstance(caught.value, ModelConfigError)
