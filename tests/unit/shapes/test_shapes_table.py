"""The published models: every dimension, valid tp and GEMM size, from a table of their configs.

The table is literal data, worked out by hand from the models' config files; nothing in it comes
from the code under test.
"""

# ruff: noqa: E501  (one row of the table per line)
from __future__ import annotations

import pytest

from fluxgen.core.errors import ShardingError
from fluxgen.core.op import Op
from fluxgen.shapes import analyse, model_dims, model_gemms, preset_names, valid_tp

# name | hidden | ffn width | heads/kv/head_dim | gated | bias qkv/o/mlp | vocab | valid tp among
# 1..8 and 16 | tp used below | qkv NxK | o NxK | gate_up or fc1 NxK | down or fc2 NxK
TABLE = """
llama-2-7b | 4096 | 11008 | 32/32/128 | y | 0/0/0 | 32000 | 1,2,4,8,16 | 8 | 1536x4096 | 4096x512 | 2752x4096 | 4096x1376
llama-2-13b | 5120 | 13824 | 40/40/128 | y | 0/0/0 | 32000 | 1,2,4,8 | 8 | 1920x5120 | 5120x640 | 3456x5120 | 5120x1728
llama-30b | 6656 | 17920 | 52/52/128 | y | 0/0/0 | 32000 | 1,2,4 | 4 | 4992x6656 | 6656x1664 | 8960x6656 | 6656x4480
llama-3.1-8b | 4096 | 14336 | 32/8/128 | y | 0/0/0 | 128256 | 1,2,4,8,16 | 8 | 768x4096 | 4096x512 | 3584x4096 | 4096x1792
llama-3.1-405b | 16384 | 53248 | 128/8/128 | y | 0/0/0 | 128256 | 1,2,4,8,16 | 8 | 2304x16384 | 16384x2048 | 13312x16384 | 16384x6656
llama-3.2-1b | 2048 | 8192 | 32/8/64 | y | 0/0/0 | 128256 | 1,2,4,8,16 | 8 | 384x2048 | 2048x256 | 2048x2048 | 2048x1024
llama-4-scout | 5120 | 8192 | 40/8/128 | y | 0/0/0 | 202048 | 1,2,4,8 | 8 | 896x5120 | 5120x640 | 2048x5120 | 5120x1024
llama-4-maverick | 5120 | 16384 | 40/8/128 | y | 0/0/0 | 202048 | 1,2,4,8 | 8 | 896x5120 | 5120x640 | 4096x5120 | 5120x2048
qwen2.5-1.5b | 1536 | 8960 | 12/2/128 | y | 1/0/0 | 151936 | 1,2,4 | 4 | 640x1536 | 1536x384 | 4480x1536 | 1536x2240
qwen2.5-7b | 3584 | 18944 | 28/4/128 | y | 1/0/0 | 152064 | 1,2,4 | 4 | 1152x3584 | 3584x896 | 9472x3584 | 3584x4736
qwen2.5-72b | 8192 | 29568 | 64/8/128 | y | 1/0/0 | 152064 | 1,2,4,8,16 | 8 | 1280x8192 | 8192x1024 | 7392x8192 | 8192x3696
qwen2.5-72b-awq | 8192 | 29696 | 64/8/128 | y | 1/0/0 | 152064 | 1,2,4,8,16 | 8 | 1280x8192 | 8192x1024 | 7424x8192 | 8192x3712
qwen3-8b | 4096 | 12288 | 32/8/128 | y | 0/0/0 | 151936 | 1,2,4,8,16 | 8 | 768x4096 | 4096x512 | 3072x4096 | 4096x1536
qwen3-32b | 5120 | 25600 | 64/8/128 | y | 0/0/0 | 151936 | 1,2,4,8,16 | 8 | 1280x5120 | 5120x1024 | 6400x5120 | 5120x3200
qwen3-235b-a22b | 4096 | 1536 | 64/4/128 | y | 0/0/0 | 151936 | 1,2,4,8,16 | 8 | 1280x4096 | 4096x1024 | 384x4096 | 4096x192
qwen3-coder-480b-a35b | 6144 | 2560 | 96/8/128 | y | 0/0/0 | 151936 | 1,2,4,8,16 | 8 | 1792x6144 | 6144x1536 | 640x6144 | 6144x320
qwen3.5-27b | 5120 | 17408 | 24/4/256 | y | 0/0/0 | 248320 | 1,2,4,8 | 8 | 2048x5120 | 5120x768 | 4352x5120 | 5120x2176
qwen-1.8b | 2048 | 5504 | 16/16/128 | y | 1/0/0 | 151936 | 1,2,4,8,16 | 8 | 768x2048 | 2048x256 | 1376x2048 | 2048x688
devstral-2-123b | 12288 | 28672 | 96/8/128 | y | 0/0/0 | 131072 | 1,2,4,8,16 | 8 | 1792x12288 | 12288x1536 | 7168x12288 | 12288x3584
mixtral-8x7b | 4096 | 14336 | 32/8/128 | y | 0/0/0 | 32000 | 1,2,4,8,16 | 8 | 768x4096 | 4096x512 | 3584x4096 | 4096x1792
gemma-2b | 2048 | 16384 | 8/1/256 | y | 0/0/0 | 256000 | 1,2,4,8 | 8 | 768x2048 | 2048x256 | 4096x2048 | 2048x2048
gemma-2-9b | 3584 | 14336 | 16/8/256 | y | 0/0/0 | 256000 | 1,2,4,8,16 | 8 | 1024x3584 | 3584x512 | 3584x3584 | 3584x1792
gemma-3-1b | 1152 | 6912 | 4/1/256 | y | 0/0/0 | 262144 | 1,2,4 | 4 | 768x1152 | 1152x256 | 3456x1152 | 1152x1728
gemma-3-4b | 2560 | 10240 | 8/4/256 | y | 0/0/0 | 262208 | 1,2,4,8 | 8 | 768x2560 | 2560x256 | 2560x2560 | 2560x1280
gemma-3-27b | 5376 | 21504 | 32/16/128 | y | 0/0/0 | 262208 | 1,2,4,8,16 | 8 | 1024x5376 | 5376x512 | 5376x5376 | 5376x2688
phi-3.5-mini | 3072 | 8192 | 32/32/96 | y | 0/0/0 | 32064 | 1,2,4,8,16 | 8 | 1152x3072 | 3072x384 | 2048x3072 | 3072x1024
phi-4-mini | 3072 | 8192 | 24/8/128 | y | 0/0/0 | 200064 | 1,2,4,8 | 8 | 640x3072 | 3072x384 | 2048x3072 | 3072x1024
phi-2 | 2560 | 10240 | 32/32/80 | n | 1/1/1 | 51200 | 1,2,4,8,16 | 8 | 960x2560 | 2560x320 | 1280x2560 | 2560x1280
gpt2-xl | 1600 | 6400 | 25/25/64 | n | 1/1/1 | 50257 | 1,5 | 5 | 960x1600 | 1600x320 | 1280x1600 | 1600x1280
gpt-j-6b | 4096 | 16384 | 16/16/256 | n | 0/0/1 | 50400 | 1,2,4,8,16 | 8 | 1536x4096 | 4096x512 | 2048x4096 | 4096x2048
gpt3-175b | 12288 | 49152 | 96/96/128 | n | 1/1/1 | 50257 | 1,2,3,4,6,8,16 | 8 | 4608x12288 | 12288x1536 | 6144x12288 | 12288x6144
opt-13b | 5120 | 20480 | 40/40/128 | n | 1/1/1 | 50272 | 1,2,4,5,8 | 8 | 1920x5120 | 5120x640 | 2560x5120 | 5120x2560
opt-175b | 12288 | 49152 | 96/96/128 | n | 1/1/1 | 50272 | 1,2,3,4,6,8,16 | 8 | 4608x12288 | 12288x1536 | 6144x12288 | 12288x6144
falcon-7b | 4544 | 18176 | 71/1/64 | n | 0/0/0 | 65024 | 1 | 1 | 4672x4544 | 4544x4544 | 18176x4544 | 4544x18176
falcon-180b | 14848 | 59392 | 232/8/64 | n | 0/0/0 | 65024 | 1,2,4,8 | 8 | 1984x14848 | 14848x1856 | 7424x14848 | 14848x7424
bloom-176b | 14336 | 57344 | 112/112/128 | n | 1/1/1 | 250880 | 1,2,4,7,8,16 | 8 | 5376x14336 | 14336x1792 | 7168x14336 | 14336x7168
starcoder2-7b | 4608 | 18432 | 36/4/128 | n | 1/1/1 | 49152 | 1,2,4 | 4 | 1408x4608 | 4608x1152 | 4608x4608 | 4608x4608
starcoder2-15b | 6144 | 24576 | 48/4/128 | n | 1/1/1 | 49152 | 1,2,4,8,16 | 8 | 1024x6144 | 6144x768 | 3072x6144 | 6144x3072
aya-23-8b | 4096 | 14336 | 32/8/128 | y | 0/0/0 | 256000 | 1,2,4,8,16 | 8 | 768x4096 | 4096x512 | 3584x4096 | 4096x1792
command-r-plus | 12288 | 33792 | 96/8/128 | y | 0/0/0 | 256000 | 1,2,4,8,16 | 8 | 1792x12288 | 12288x1536 | 8448x12288 | 12288x4224
glm-4-9b | 4096 | 13696 | 32/2/128 | y | 1/0/0 | 151552 | 1,2,4,8,16 | 8 | 768x4096 | 4096x512 | 3424x4096 | 4096x1712
internlm2-7b | 4096 | 14336 | 32/8/128 | y | 0/0/0 | 92544 | 1,2,4,8,16 | 8 | 768x4096 | 4096x512 | 3584x4096 | 4096x1792
internlm2-20b | 6144 | 16384 | 48/8/128 | y | 0/0/0 | 92544 | 1,2,4,8,16 | 8 | 1024x6144 | 6144x768 | 4096x6144 | 6144x2048
baichuan2-7b | 4096 | 11008 | 32/32/128 | y | 0/0/0 | 125696 | 1,2,4,8,16 | 8 | 1536x4096 | 4096x512 | 2752x4096 | 4096x1376
olmo2-7b | 4096 | 11008 | 32/32/128 | y | 0/0/0 | 100352 | 1,2,4,8,16 | 8 | 1536x4096 | 4096x512 | 2752x4096 | 4096x1376
olmo2-13b | 5120 | 13824 | 40/40/128 | y | 0/0/0 | 100352 | 1,2,4,8 | 8 | 1920x5120 | 5120x640 | 3456x5120 | 5120x1728
granite-3.1-2b | 2048 | 8192 | 32/8/64 | y | 0/0/0 | 49155 | 1,2,4,8,16 | 8 | 384x2048 | 2048x256 | 2048x2048 | 2048x1024
granite-3-8b | 4096 | 12800 | 32/8/128 | y | 0/0/0 | 49155 | 1,2,4,8,16 | 8 | 768x4096 | 4096x512 | 3200x4096 | 4096x1600
minimax-m2.5 | 3072 | 1536 | 48/8/128 | y | 0/0/0 | 200064 | 1,2,4,8,16 | 8 | 1024x3072 | 3072x768 | 384x3072 | 3072x192
nemotron-h-56b | 8192 | 32768 | 64/8/128 | n | 0/0/0 | 131072 | 1,2,4,8,16 | 8 | 1280x8192 | 8192x1024 | 4096x8192 | 8192x4096
smollm2-135m | 576 | 1536 | 9/3/64 | y | 0/0/0 | 49152 | 1,3 | 3 | 320x576 | 576x192 | 1024x576 | 576x512
smollm2-360m | 960 | 2560 | 15/5/64 | y | 0/0/0 | 49152 | 1,5 | 5 | 320x960 | 960x192 | 1024x960 | 960x512
tinyllama-1.1b | 2048 | 5632 | 32/4/64 | y | 0/0/0 | 32000 | 1,2,4,8,16 | 8 | 384x2048 | 2048x256 | 1408x2048 | 2048x704
"""

ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]

# One block of the hybrid's layers; its real pattern repeats such blocks.
NEMOTRON_H_56B = {
    "model_type": "nemotron_h",
    "hidden_size": 8192,
    "intermediate_size": 32768,
    "num_hidden_layers": 9,
    "hybrid_override_pattern": "M-M-M-M*-",
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "mlp_hidden_act": "relu2",
    "vocab_size": 131072,
}

EXPERTS_ONLY = {"qwen3-235b-a22b", "qwen3-coder-480b-a35b", "mixtral-8x7b", "minimax-m2.5"}

# Presets outside the table above: MLA models are in MLA, the rest equal or extend its rows.
OTHERS = {
    "llama-3.1-70b": (8, "1280x8192", "8192x1024", "7168x8192", "8192x3584"),
    "mistral-7b": (8, "768x4096", "4096x512", "3584x4096", "4096x1792"),
    "phi-4": (5, "1536x5120", "5120x1024", "7168x5120", "5120x3584"),
    "gpt-oss-120b": (8, "640x2880", "2880x512", "720x2880", "2880x360"),
}

# Per layer at tp 8: fused q_a and kv_a, q_b, kv_b, o, dense gate_up, dense down, shared gate_up,
# shared down, number of dense layers.
MLA = {
    "deepseek-v3": "2112x7168 3072x1536 4096x512 7168x2048 4608x7168 7168x2304 512x7168 7168x256 3",
    "deepseek-r1": "2112x7168 3072x1536 4096x512 7168x2048 4608x7168 7168x2304 512x7168 7168x256 3",
    "kimi-k2": "2112x7168 1536x1536 2048x512 7168x1024 4608x7168 7168x2304 512x7168 7168x256 1",
    "deepseek-v2-lite": "- - 512x512 2048x256 2736x2048 2048x1368 704x2048 2048x352 1",
    "glm-5": "2624x6144 2048x2048 3584x512 6144x2048 3072x6144 6144x1536 512x6144 6144x256 3",
    "deepseek-v2": "2112x5120 3072x1536 4096x512 5120x2048 3072x5120 5120x1536 768x5120 5120x384 1",
}


def config_of(name):
    return NEMOTRON_H_56B if name == "nemotron-h-56b" else name


def size(gemm):
    return f"{gemm.n}x{gemm.k}"


def by_name(gemms):
    return {gemm.name: gemm for gemm in gemms}


def test_the_table_covers_every_preset():
    covered = {row[0] for row in ROWS} | set(OTHERS) | set(MLA)
    assert set(preset_names()) == covered - {"nemotron-h-56b"}
    assert len(preset_names()) >= 45


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_dimensions_of_the_table(row):
    name, hidden, inter, heads, gated, bias, vocab = row[:7]
    dims = model_dims(config_of(name))
    block = dims.attention[0]
    role = {"llama-4-scout": "shared"}.get(name, "expert" if name in EXPERTS_ONLY else "dense")
    mlp = next(mlp for mlp in dims.mlps if mlp.role == role)
    assert dims.hidden == int(hidden)
    assert mlp.width == int(inter)
    assert f"{block.heads}/{block.kv_heads}/{block.head_dim}" == heads
    assert mlp.gated == (gated == "y")
    assert f"{block.qkv_bias:d}/{block.o_bias:d}/{mlp.bias:d}" == bias
    assert dims.vocab == int(vocab)
    assert dims.warnings == ()


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_gemms_and_tp_of_the_table(row):
    name, valid, tp, qkv, o, first, second = row[0], *row[7:]
    dims = model_dims(config_of(name))
    asked = (*range(1, 9), 16)
    assert ",".join(str(t) for t in asked if t in valid_tp(dims)) == valid
    found = analyse(dims, int(tp))
    gemms = by_name(found.gemms)
    assert size(gemms["qkv"]) == qkv and gemms["qkv"].op is Op.AG_GEMM
    assert size(gemms["o"]) == o and gemms["o"].op is Op.GEMM_RS
    prefix = {"llama-4-scout": "shared_"}.get(name, "")
    if name in EXPERTS_ONLY:
        # Expert GEMMs are grouped: reported, but no site of a fused op.
        assert set(gemms) == {"qkv", "o"}
        prefix, gemms = "expert_", by_name(found.others)
    names = ("gate_up", "down") if row[4] == "y" else ("fc1", "fc2")
    ag, rs = gemms[prefix + names[0]], gemms[prefix + names[1]]
    assert (size(ag), size(rs)) == (first, second)
    site = name not in EXPERTS_ONLY
    assert (ag.op, rs.op) == ((Op.AG_GEMM, Op.GEMM_RS) if site else (None, None))
    for t in set(asked) - set(valid_tp(dims)):
        with pytest.raises(ShardingError, match=f"tp={t}: .*Valid tp: 1"):
            model_gemms(dims, t)


@pytest.mark.parametrize("name", OTHERS)
def test_gemms_of_the_other_presets(name):
    tp, qkv, o, first, second = OTHERS[name]
    found = analyse(name, tp)
    gemms = by_name(found.gemms + found.others)
    prefix = "expert_" if name == "gpt-oss-120b" else ""
    names = ("qkv", "o", f"{prefix}gate_up", f"{prefix}down")
    assert [size(gemms[n]) for n in names] == [qkv, o, first, second]


@pytest.mark.parametrize("name", MLA)
def test_gemms_of_mla_models(name):
    *expected, dense = MLA[name].split()
    found = analyse(name, 8)
    sites, others = by_name(found.gemms), by_name(found.others)
    q_a, q_b, kv_b, o, gate_up, down, shared_gate_up, shared_down = expected
    if q_a == "-":
        assert size(sites["q_proj"]) == "384x2048" and sites["q_proj"].op is Op.AG_GEMM
        assert size(others["kv_a"]) == "576x2048" and not others["kv_a"].sharded
        assert "q_b" not in others
    else:
        assert size(others["fused_qkv_a"]) == q_a and not others["fused_qkv_a"].sharded
        assert size(others["q_b"]) == q_b
        assert "q_proj" not in sites
    assert size(others["kv_b"]) == kv_b
    assert size(sites["o"]) == o and sites["o"].op is Op.GEMM_RS
    assert size(sites["gate_up"]) == gate_up and size(sites["down"]) == down
    assert size(sites["shared_gate_up"]) == shared_gate_up
    assert size(sites["shared_down"]) == shared_down
    layers = found.dims.layers
    assert sites["down"].count == int(dense)
    assert sites["shared_down"].count == others["expert_down"].count == layers - int(dense)
    assert sites["o"].count == layers


NEGATIVE = [
    ("qwen2.5-7b", (8,), "1, 2, 4"),
    ("phi-4", (4, 8), "1, 2, 5, 10, 20, 40"),
    ("falcon-7b", range(2, 9), "1"),
    ("llama-30b", (8,), "1, 2, 4"),
    ("gpt2-xl", (2, 4, 8), "1, 5, 25"),
    ("smollm2-135m", (2, 4, 8), "1, 3"),
    ("smollm2-360m", (4,), "1, 5"),
    ("gemma-3-1b", (8,), "1, 2, 4"),
]


@pytest.mark.parametrize(("name", "sizes", "valid"), NEGATIVE, ids=[n[0] for n in NEGATIVE])
def test_refused_tp_lists_all_valid_sizes(name, sizes, valid):
    for tp in sizes:
        with pytest.raises(ShardingError) as caught:
            model_gemms(name, tp)
        assert str(caught.value).split("Valid tp: ")[1].split(" (")[0] == valid


def test_the_error_names_tensor_value_and_tp():
    with pytest.raises(ShardingError) as caught:
        model_gemms("llama-30b", 8)
    message = str(caught.value)
    assert "tp=8" in message
    assert "q_proj, o_proj: num_attention_heads 52 is not a multiple of 8" in message
    assert "k_proj, v_proj: num_key_value_heads 52 neither divides 8" in message
    assert message.count("Valid tp") == 1


def test_f05_64_heads_lists_divisors_up_to_64():
    with pytest.raises(ShardingError, match=r"Valid tp: 1, 2, 4, 8, 16, 32, 64 \(kernels span"):
        model_gemms("llama-3.1-70b", 3)


def test_smallest_odd_tp_models():
    assert [size(g) for g in model_gemms("smollm2-135m", 3)][:2] == ["320x576", "576x192"]
    assert [size(g) for g in model_gemms("smollm2-360m", 5)][:2] == ["320x960", "960x192"]
