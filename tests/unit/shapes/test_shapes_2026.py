"""Configs of 2025 and 2026: hybrids, shared experts, lists by layer; keys that no rule uses.

Sizes are those that transformers' and vLLM's modules of each type make from the same keys.
"""

from __future__ import annotations

import pytest

from fluxgen.core.errors import ModelConfigError, ShardingError, UnsupportedError
from fluxgen.shapes import analyse, model_dims, summary

BASE = {
    "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 4096, "vocab_size": 32000,
}  # fmt: skip


def config(model_type, **more):
    return {**BASE, "model_type": model_type, **more}


def listed(model, tp):
    """op, n, k and layers of each GEMM by name."""
    found = analyse(model, tp)
    return {g.name: (g.op and g.op.value, g.n, g.k, g.count) for g in (*found.gemms, *found.others)}


ERNIE = config(
    "ernie4_5_moe", moe_num_experts=64, moe_k=6, moe_intermediate_size=1536,
    moe_num_shared_experts=2, moe_layer_start_index=1, moe_layer_end_index=6, moe_layer_interval=1,
    use_bias=False,
)  # fmt: skip
MAMBA = {
    "mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128,
    "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256, "mamba_proj_bias": False,
}  # fmt: skip
IN_1_OF_8 = 2 * 2048 // 8 + 2 * 128 + 32 // 8  # z and x; B and C of the single group; dt
QKV_8 = ("ag_gemm", (16 + 2 * 8) // 8 * 64, 1024)
O_8 = ("gemm_rs", 1024, 16 // 8 * 64)
LINEAR = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip


CASES = {
    "ernie4_5_moe": (ERNIE, {
        "qkv": (*QKV_8, 8), "o": (*O_8, 8),
        "gate_up": ("ag_gemm", 1024, 1024, 2), "down": ("gemm_rs", 1024, 512, 2),
        "shared_gate_up": ("ag_gemm", 768, 1024, 6), "shared_down": ("gemm_rs", 1024, 384, 6),
        "expert_gate_up": (None, 384, 1024, 6), "expert_down": (None, 1024, 192, 6),
    }),
    "granite, attention alone": (config(
        "granitemoehybrid", layer_types=["attention"] * 8, num_local_experts=0,
        shared_intermediate_size=8192, **MAMBA,
    ), {
        "qkv": (*QKV_8, 8), "o": (*O_8, 8),
        "gate_up": ("ag_gemm", 2048, 1024, 8), "down": ("gemm_rs", 1024, 1024, 8),
    }),
    "granite, mixed, with experts": (config(
        "granitemoehybrid", layer_types=["mamba"] * 6 + ["attention"] * 2, num_local_experts=62,
        num_experts_per_tok=6, intermediate_size=512, shared_intermediate_size=1024, **MAMBA,
    ), {
        "qkv": (*QKV_8, 2), "o": (*O_8, 2),
        "mamba_in": ("ag_gemm", IN_1_OF_8, 1024, 6), "mamba_out": ("gemm_rs", 1024, 256, 6),
        "shared_gate_up": ("ag_gemm", 256, 1024, 8), "shared_down": ("gemm_rs", 1024, 128, 8),
        "expert_gate_up": (None, 128, 1024, 8), "expert_down": (None, 1024, 64, 8),
    }),
    "bamba": (config("bamba", attn_layer_indices=[3, 7], **MAMBA), {
        "qkv": (*QKV_8, 2), "o": (*O_8, 2),
        "mamba_in": ("ag_gemm", IN_1_OF_8, 1024, 6), "mamba_out": ("gemm_rs", 1024, 256, 6),
        "gate_up": ("ag_gemm", 1024, 1024, 8), "down": ("gemm_rs", 1024, 512, 8),
    }),
    "falcon_h1": (config("falcon_h1", **{**MAMBA, "mamba_d_ssm": 2048, "mamba_n_groups": 8}), {
        "qkv": (*QKV_8, 8), "o": (*O_8, 8),
        "mamba_in": ("ag_gemm", 512 + 2 * 128 + 4, 1024, 8), "mamba_out": ("gemm_rs", 1024, 256, 8),
        "gate_up": ("ag_gemm", 1024, 1024, 8), "down": ("gemm_rs", 1024, 512, 8),
    }),
    "nemotron_h with experts": (config(
        "nemotron_h", hybrid_override_pattern="MEM*EM-E", mamba_num_heads=64, mamba_head_dim=64,
        n_groups=8, ssm_state_size=128, n_routed_experts=128, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, n_shared_experts=1, num_experts_per_tok=6,
    ), {
        "qkv": (*QKV_8, 1), "o": (*O_8, 1),
        "mamba_in": ("ag_gemm", 2 * 512 + 2 * 128 + 8, 1024, 3),
        "mamba_out": ("gemm_rs", 1024, 512, 3),
        "fc1": ("ag_gemm", 512, 1024, 1), "fc2": ("gemm_rs", 1024, 512, 1),
        "shared_fc1": ("ag_gemm", 464, 1024, 3), "shared_fc2": ("gemm_rs", 1024, 464, 3),
        "expert_fc1": (None, 232, 1024, 3), "expert_fc2": (None, 1024, 232, 3),
    }),
    "qwen3_next": (config(
        "qwen3_next", num_experts=512, moe_intermediate_size=512, decoder_sparse_step=1,
        shared_expert_intermediate_size=512, num_experts_per_tok=10, **LINEAR,
    ), {
        "qkv": ("ag_gemm", 2 * 128 + 2 * 64, 1024, 2), "o": (*O_8, 2),
        "linear_qkvz": ("ag_gemm", 2 * 256 + 2 * 512, 1024, 6),
        "linear_ba": ("ag_gemm", 8, 1024, 6),
        "linear_out": ("gemm_rs", 1024, 512, 6),
        "shared_gate_up": ("ag_gemm", 128, 1024, 8), "shared_down": ("gemm_rs", 1024, 64, 8),
        "expert_gate_up": (None, 128, 1024, 8), "expert_down": (None, 1024, 64, 8),
    }),
    "hunyuan, lists": (config(
        "hunyuan_v1_moe", num_experts=64, moe_intermediate_size=[3072] * 8, moe_topk=[8] * 8,
        num_shared_expert=[1] * 8, use_mixed_mlp_moe=True, intermediate_size=3072,
    ), {
        "qkv": (*QKV_8, 8), "o": (*O_8, 8),
        "shared_gate_up": ("ag_gemm", 768, 1024, 8), "shared_down": ("gemm_rs", 1024, 384, 8),
        "expert_gate_up": (None, 768, 1024, 8), "expert_down": (None, 1024, 384, 8),
    }),
    "minimax": (config(
        "minimax", num_local_experts=32, layer_types=["linear_attention", "full_attention"] * 4,
        num_experts_per_tok=2,
    ), {
        "qkv": (*QKV_8, 4), "o": (*O_8, 4),
        "linear_qkv": ("ag_gemm", 3 * 128, 1024, 4), "linear_gate": ("ag_gemm", 128, 1024, 4),
        "linear_out": ("gemm_rs", 1024, 128, 4),
        "expert_gate_up": (None, 1024, 1024, 8), "expert_down": (None, 1024, 512, 8),
    }),
    "seed_oss": (config("seed_oss", attention_bias=True, attention_out_bias=False), {
        "qkv": (*QKV_8, 8), "o": (*O_8, 8),
        "gate_up": ("ag_gemm", 1024, 1024, 8), "down": ("gemm_rs", 1024, 512, 8),
    }),
    "apertus": (config("apertus", hidden_act="xielu"), {
        "qkv": (*QKV_8, 8), "o": (*O_8, 8),
        "fc1": ("ag_gemm", 512, 1024, 8), "fc2": ("gemm_rs", 1024, 512, 8),
    }),
    "dots1": (config(
        "dots1", n_routed_experts=128, n_shared_experts=2, moe_intermediate_size=1408,
        first_k_dense_replace=1, num_experts_per_tok=6, n_group=1, topk_group=1,
    ), {
        "qkv": (*QKV_8, 8), "o": (*O_8, 8),
        "gate_up": ("ag_gemm", 1024, 1024, 1), "down": ("gemm_rs", 1024, 512, 1),
        "shared_gate_up": ("ag_gemm", 704, 1024, 7), "shared_down": ("gemm_rs", 1024, 352, 7),
        "expert_gate_up": (None, 352, 1024, 7), "expert_down": (None, 1024, 176, 7),
    }),
    "bailing_moe_v2": (config(
        "bailing_moe_v2", num_experts=256, num_shared_experts=1, moe_intermediate_size=512,
        first_k_dense_replace=1, use_qkv_bias=False, use_bias=False, moe_router_topk_scaling=2.5,
    ), {
        "qkv": (*QKV_8, 8), "o": (*O_8, 8),
        "gate_up": ("ag_gemm", 1024, 1024, 1), "down": ("gemm_rs", 1024, 512, 1),
        "shared_gate_up": ("ag_gemm", 128, 1024, 7), "shared_down": ("gemm_rs", 1024, 64, 7),
        "expert_gate_up": (None, 128, 1024, 7), "expert_down": (None, 1024, 64, 7),
    }),
    "mistral4": (config(
        "mistral4", n_routed_experts=128, n_shared_experts=1, moe_intermediate_size=2048,
        first_k_dense_replace=0, kv_lora_rank=256, q_lora_rank=1024, qk_rope_head_dim=64,
        qk_nope_head_dim=64, v_head_dim=128, rope_interleave=True,
    ), {
        "fused_qkv_a": (None, 1024 + 320, 1024, 8), "q_b": (None, 256, 1024, 8),
        "kv_b": (None, 2 * 192, 256, 8), "o": ("gemm_rs", 1024, 256, 8),
        "shared_gate_up": ("ag_gemm", 512, 1024, 8), "shared_down": ("gemm_rs", 1024, 256, 8),
        "expert_gate_up": (None, 512, 1024, 8), "expert_down": (None, 1024, 256, 8),
    }),
    "longcat_flash": ({
        "model_type": "longcat_flash", "hidden_size": 1024, "num_layers": 4, "num_hidden_layers": 8,
        "num_attention_heads": 16, "ffn_hidden_size": 4096, "expert_ffn_hidden_size": 512,
        "n_routed_experts": 64, "zero_expert_num": 32, "moe_topk": 12, "q_lora_rank": 512,
        "kv_lora_rank": 256, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "vocab_size": 32000,
    }, {
        "fused_qkv_a": (None, 512 + 320, 1024, 8), "q_b": (None, 2 * 192, 512, 8),
        "kv_b": (None, 2 * 256, 256, 8), "o": ("gemm_rs", 1024, 256, 8),
        "gate_up": ("ag_gemm", 1024, 1024, 8), "down": ("gemm_rs", 1024, 512, 8),
        "expert_gate_up": (None, 128, 1024, 4), "expert_down": (None, 1024, 64, 4),
    }),
    "gemma3n": ({
        "model_type": "gemma3n", "text_config": {
            "model_type": "gemma3n_text", "hidden_size": 2048, "num_hidden_layers": 4,
            "intermediate_size": [8192, 8192, 16384, 16384], "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "num_kv_shared_layers": 2,
            "altup_num_inputs": 4, "laurel_rank": 64, "hidden_size_per_layer_input": 256,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0], "vocab_size": 262400,
        },
    }, {
        "qkv": ("ag_gemm", (2 + 2) * 256, 2048, 4), "o": ("gemm_rs", 2048, 512, 4),
        "gate_up": ("ag_gemm", 4096, 2048, 2), "down": ("gemm_rs", 2048, 2048, 2),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gemms(name):
    model, wanted = CASES[name]
    tp = 4 if name == "gemma3n" else 8
    assert model_dims(model).warnings == ()
    found = listed(model, tp)
    if name == "gemma3n":  # two widths: the wider ones
        wide = [g for g in analyse(model, tp).gemms if g.name == "gate_up"]
        assert [(g.n, g.count) for g in wide] == [(4096, 2), (8192, 2)]
        found["gate_up"], found["down"] = wanted["gate_up"], wanted["down"]
    assert found == wanted


def test_gemma3n_says_what_it_leaves_out():
    (note,) = [n for n in model_dims(CASES["gemma3n"][0]).notes if "not listed" in n]
    assert all(word in note for word in ("altup", "laurel", "per-layer"))


def test_minimaxs_older_config_says_the_same():
    model, wanted = CASES["minimax"]
    older = {**model, "model_type": "minimax_text_01", "attn_type_list": [0, 1] * 4,
             "shared_intermediate_size": 0}  # fmt: skip
    del older["layer_types"]
    assert listed(older, 8) == wanted


def test_nemotrons_newer_config_says_the_same():
    model, wanted = CASES["nemotron_h with experts"]
    names = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
    newer = {**model, "layers_block_type": [names[c] for c in model["hybrid_override_pattern"]]}
    del newer["hybrid_override_pattern"]
    assert listed(newer, 8) == wanted


def test_ernies_other_layouts():
    shared = {**ERNIE, "moe_num_shared_experts": 0}
    assert "shared_gate_up" not in listed(shared, 8)
    every = {
        **ERNIE,
        "moe_layer_start_index": 0,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 2,
    }
    counts = {name: count for name, (_, _, _, count) in listed(every, 8).items()}
    assert (counts["gate_up"], counts["shared_gate_up"]) == (4, 4)
    dense = {**config("ernie4_5"), "use_bias": False}
    assert set(listed(dense, 8)) == {"qkv", "o", "gate_up", "down"}


def test_hunyuans_widths_by_layer():
    model = {**CASES["hunyuan, lists"][0], "moe_intermediate_size": [3072] * 3 + [1536] * 5,
             "moe_layer_num_skipped": 1, "num_shared_expert": [1] * 4 + [2] * 4}  # fmt: skip
    found = [(g.name, g.n, g.count) for g in (*analyse(model, 8).gemms, *analyse(model, 8).others)]
    assert ("gate_up", 768, 1) in found
    assert ("shared_gate_up", 768, 3) in found
    assert ("shared_gate_up", 1536, 4) in found
    assert ("expert_gate_up", 768, 2) in found
    assert ("expert_gate_up", 384, 5) in found
    short = {**model, "moe_intermediate_size": [3072] * 7}
    with pytest.raises(ModelConfigError, match="moe_intermediate_size: expected one entry"):
        analyse(short, 8)


@pytest.mark.parametrize(("tp", "words"), [(64, "mamba heads 32"), (16, "mamba groups 8")])
def test_mamba_heads_and_groups_limit_tp(tp, words):
    model = config("bamba", attn_layer_indices=[3], **{**MAMBA, "mamba_n_groups": 8})
    with pytest.raises(ShardingError, match=words):
        analyse(model, tp)


def test_the_single_group_is_copied():
    model, _ = CASES["bamba"]
    (gemm,) = [g for g in analyse(model, 8).gemms if g.name == "mamba_in"]
    assert gemm.parts == (256, 256, 128, 128, 4)
    assert "copied" in gemm.note
    assert not [g for g in analyse(model, 1).gemms if g.note]


def test_a_contradictory_mamba_is_refused():
    with pytest.raises(ModelConfigError, match="inner width"):
        analyse(config("falcon_h1", **{**MAMBA, "mamba_d_ssm": 1000}), 8)
    with pytest.raises(ModelConfigError, match="mamba_n_groups"):
        analyse(config("bamba", attn_layer_indices=[3], mamba_n_heads=32), 8)
    with pytest.raises(ModelConfigError, match="layer numbers below 8"):
        analyse(config("bamba", attn_layer_indices=[8], **MAMBA), 8)
    with pytest.raises(ModelConfigError, match="attn_type_list"):
        analyse(config("minimax_m1", attn_type_list=[0, 2] * 4, num_local_experts=2), 8)
    with pytest.raises(UnsupportedError, match="'conv'"):
        analyse(config("granitemoehybrid", layer_types=["conv"] * 8, **MAMBA), 8)


# Keys that no rule uses.


UNUSED = {
    "shared experts by a new name": {"num_common_shared_experts": 2},
    "a residual MLP": {"residual_mlp_intermediate": 4096},
    "low-rank queries": {"query_lora_rank": 512},
    "q by the usual name": {"q_lora_rank": 512},
    "wide shared experts": {"shared_expert_ffn_width": 8192},
    "expert width": {"expert_hidden_size": 512},
    "a second number of kv heads": {"swa_num_key_value_heads": 4},
    "mamba": {"mamba_inner_width": 512},
    "altup": {"altup_num_inputs": 4},
}


@pytest.mark.parametrize("name", UNUSED)
@pytest.mark.parametrize("model_type", ["llama", "somebodys_new_moe"])
def test_a_telling_key_that_no_rule_uses_is_named(model_type, name):
    more = UNUSED[name]
    if model_type != "llama":
        more = {**more, "num_experts": 8, "moe_intermediate_size": 512, "hidden_act": "silu"}
    (key,) = UNUSED[name]
    found = [w for w in model_dims(config(model_type, **more)).warnings if key in w]
    assert len(found) == 1, model_dims(config(model_type, **more)).warnings
    assert "not listed" in found[0]


OF_UNKNOWN_TYPES = {
    "use_residual": True, "parallel_attn_mlp_res": True, "moe_use_residual": True,
    "use_shared_expert": True, "decoder_sparse_step": 2, "mlp_only_layers": [0],
    "num_dense_layers": 2, "dense_layers": [0, 1], "q_rank": 64, "query_compression_dim": 512,
    "expert_interval": 2, "moe_layer_start_index": 1, "num_experts_shared": 1,
}  # fmt: skip


@pytest.mark.parametrize("key", OF_UNKNOWN_TYPES)
def test_more_keys_are_telling_where_the_type_is_unknown(key):
    model = config("somebodys_moe", num_experts=8, moe_intermediate_size=512, hidden_act="silu")
    found = model_dims({**model, key: OF_UNKNOWN_TYPES[key]}).warnings
    assert [w for w in found if key in w and "not listed" in w]


def test_an_unknown_types_shared_experts_and_dense_layers_are_listed_where_the_names_are_known():
    """What ernie4_5_moe looked like to rules that did not know it."""
    model = {**ERNIE, "model_type": "ernie_6_moe"}
    warnings = " ".join(model_dims(model).warnings)
    assert "shared_gate_up" in listed(model, 8)
    assert "moe_layer_start_index" in warnings
    assert "moe_layer_end_index" in warnings


HARMLESS = {
    "num_experts_per_tok": 8, "router_aux_loss_coef": 0.01, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "n_group": 8, "topk_group": 4, "aux_loss_alpha": 0.01, "ep_size": 8, "moe_dropout": 0.1,
    "residual_multiplier": 0.22, "resid_pdrop": 0.1, "output_router_logits": True,
    "router_jitter_noise": 0.1, "mamba_chunk_size": 256, "layernorm_epsilon": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize("key", HARMLESS)
def test_what_changes_no_shape_is_not_named(key):
    assert model_dims(config("llama", **{key: HARMLESS[key]})).warnings == ()


# Quantisation that a config describes by groups of modules.

WEIGHTS = {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group", "symmetric": True}


def grouped(quantization):
    return {
        "model_type": "qwen2", "hidden_size": 8192, "num_hidden_layers": 80, "vocab_size": 152064,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 29568,
        "quantization_config": quantization,
    }  # fmt: skip


PLACES = {
    "plain": {"quant_method": "gptq", "group_size": 128},
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    },
    "several groups": {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"targets": ["q"], "weights": {**WEIGHTS, "group_size": 32}},
            "group_1": {"targets": ["down"], "weights": WEIGHTS, "input_activations": None},
        },
    },
    "blocks": {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": {"strategy": "block", "block_structure": [128, 128]}}},
    },
    "blocks as text": {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": {"block_structure": "128x128", "group_size": None}}},
    },
    "quark": {"quant_method": "quark", "global_quant_config": {"weight": {"group_size": 128}}},
    "quark, a list": {
        "quant_method": "quark", "global_quant_config": {"weight": [{"group_size": 128}]},
    },
    "quark, by layer": {
        "quant_method": "quark", "layer_quant_config": {"*down*": {"weight": {"group_size": 128}}},
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "W4A16", "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "group_size": 128}}}},
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_block_of_scales_that_a_shard_cuts_is_named(place):
    warnings = summary(grouped(PLACES[place]), 8)["warnings"]
    (cut,) = [w for w in warnings if w.startswith("down:")]
    assert "3696" in cut
    assert "block 128" in cut


@pytest.mark.parametrize("weights", [
    {"strategy": "channel"}, {"group_size": None}, {"group_size": -1}, None, {"group_size": 16},
])  # fmt: skip
def test_scales_that_no_shard_cuts_give_no_such_warning(weights):
    found = grouped(
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": weights}}}
    )
    assert not [w for w in summary(found, 8)["warnings"] if w.startswith("down:")]


def test_a_broken_group_is_a_clear_error():
    bad = grouped(
        {"quant_method": "x", "config_groups": {"a": {"weights": {"block_structure": "8"}}}}
    )
    with pytest.raises(ModelConfigError, match="block_structure: expected two positive integers"):
        summary(bad, 8)
    with pytest.raises(ModelConfigError, match="group_size"):
        summary(grouped({"quant_method": "x", "config_groups": {"a": {"weights": {
            "group_size": "128"}}}}), 8)  # fmt: skip
