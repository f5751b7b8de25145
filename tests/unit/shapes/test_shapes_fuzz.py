"""Configs nobody has written: whatever comes in, only deliberate errors come out."""

from __future__ import annotations

import copy

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluxgen.core.errors import FluxgenError
from fluxgen.shapes import analyse, load_config, preset_names, summary, valid_tp
from fluxgen.shapes.families import FAMILIES
from fluxgen.shapes.keys import EXPERTS, FFN, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS
from fluxgen.shapes.reader import parse_json

KEYS = [
    *HIDDEN, *HEADS, *LAYERS, *KV_HEADS, *HEAD_DIM, *FFN, *EXPERTS,
    "model_type", "architectures", "text_config", "language_config", "vision_config", "vocab_size",
    "quantization_config", "layer_types", "multi_query", "multi_query_group_num", "attn_config",
    "ffn_config", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim",
    "moe_intermediate_size", "first_k_dense_replace", "moe_layer_freq", "mlp_only_layers",
    "decoder_sparse_step", "n_shared_experts", "hybrid_override_pattern", "attention_bias",
    "block_configs", "global_head_dim", "expansion_ratio", "hidden_act", "weight_block_size",
    "group_size", "modules_to_not_convert", "quant_method", "num_nextn_predict_layers",
]  # fmt: skip

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, 2, 3, 8, 12, 64, 128, 4096, -1, 2**31, 10**400]),
    st.integers(),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from([*FAMILIES, "full_attention", "linear_attention", "M-*", "silu", "gptq"]),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)
    ),
    max_leaves=8,
)
objects = st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=4)), values, max_size=8)
fast = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


def survives(config, tp):
    """Whether the config is understood; checks the result's invariants if it is."""
    try:
        found = analyse(config, tp)
        summary(config, tp, [0, 1, 7])
    except FluxgenError as error:
        assert 10 < len(str(error)) < 4000
        return False
    assert tp in valid_tp(found.dims) and valid_tp(found.dims)[0] == 1
    for gemm in found.gemms + found.others:
        assert gemm.n >= 1 and gemm.k >= 1 and 1 <= gemm.count <= found.dims.layers
        assert sum(gemm.parts) == gemm.n
        assert gemm.op is not None or gemm.note
    return True


@fast
@given(objects, st.sampled_from([1, 2, 8]))
def test_random_objects_give_only_deliberate_errors(config, tp):
    assert survives(config, tp) in (True, False)


@fast
@given(
    st.sampled_from(preset_names()),
    st.lists(st.tuples(st.sampled_from(KEYS), values), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4, 8]),
)
def test_mutated_configs_give_only_deliberate_errors(name, changes, tp):
    config = copy.deepcopy(dict(load_config(name).data))
    target = config.get("text_config", config)
    target.update(changes)
    assert survives(config, tp) in (True, False)


@fast
@given(st.sampled_from(preset_names()), st.data())
def test_configs_with_missing_keys_give_only_deliberate_errors(name, data):
    config = copy.deepcopy(dict(load_config(name).data))
    target = config.get("text_config", config)
    for key in data.draw(st.lists(st.sampled_from(sorted(target)), max_size=3, unique=True)):
        del target[key]
    assert survives(config, 1) in (True, False)


@fast
@given(st.one_of(st.binary(max_size=60), st.text('{}[]":,0129eE.-+ntfalsrue \\NI', max_size=60)))
def test_random_text_gives_only_deliberate_errors(text):
    raw = text if isinstance(text, bytes) else text.encode()
    try:
        assert isinstance(parse_json(raw, "here"), dict)
    except FluxgenError as error:
        assert str(error).startswith("here: ")


@fast
@given(
    heads=st.integers(1, 64),
    groups=st.integers(1, 8),
    head_dim=st.sampled_from([32, 64, 96, 128]),
    width=st.integers(1, 4096),
    hidden=st.integers(1, 4096),
)
def test_shards_of_all_ranks_make_up_the_whole(heads, groups, head_dim, width, hidden):
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": width,
        "num_hidden_layers": 2, "num_attention_heads": heads * groups,
        "num_key_value_heads": heads, "head_dim": head_dim,
    }  # fmt: skip
    whole = {gemm.name: gemm for gemm in analyse(config, 1).gemms}
    for tp in analyse(config, 1).valid_tp:
        part = {gemm.name: gemm for gemm in analyse(config, tp).gemms}
        assert part["gate_up"].n * tp == whole["gate_up"].n
        assert part["down"].k * tp == whole["down"].k
        assert part["o"].k * tp == whole["o"].k
        assert part["qkv"].parts[0] * tp == whole["qkv"].parts[0]
        # k and v are cut, or copied whole heads.
        assert part["qkv"].parts[1] * tp >= whole["qkv"].parts[1]
        assert part["qkv"].parts[1] == max(head_dim, whole["qkv"].parts[1] // tp)
