"""Files from strangers (Q29), the names of presets, and the problems of a model."""

from __future__ import annotations

import json
import os

import pytest

from fluxgen.core.dtypes import DType
from fluxgen.core.errors import ModelConfigError, ShardingError, UsageError
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.shapes import (
    counted_problems,
    load_config,
    model_dims,
    model_gemms,
    preset_names,
    problems,
    summary,
)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TEXT = json.dumps(LLAMA)


@pytest.fixture
def config(tmp_path):
    """Write text or bytes to a config.json and return its path."""

    def write(content):
        path = tmp_path / "config.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


BROKEN = {
    "comment": (TEXT.replace("{", "{ // a comment\n", 1), "line 1.*no comments"),
    "trailing comma": (TEXT.replace("}", ",}"), "trailing commas"),
    "single quotes": (TEXT.replace('"', "'"), "single quotes"),
    "nan": (TEXT.replace("4096", "NaN"), "NaN, which is not JSON"),
    "infinity": (TEXT.replace("4096", "-Infinity"), "-Infinity, which is not JSON"),
    "overflow": (TEXT.replace("4096", "1e999"), "1e999"),
    "duplicate": (TEXT.replace("{", '{"hidden_size": 1, ', 1), "'hidden_size' twice"),
    "nested duplicate": ('{"text_config": {"a": 1, "a": 1}}', "'a' twice"),
    "list": ("[1, 2]", "JSON object at the top level; found a list"),
    "string": ('"llama"', "found a string"),
    "number": ("4096", "found a number"),
    "null": ("null", "found null"),
    "empty": ("", "empty file"),
    "blank": (" \n\t", "empty file"),
    "truncated": (TEXT[:-9], "not valid JSON"),
    "two objects": (TEXT + TEXT, "not valid JSON"),
    "utf-16": (TEXT.encode("utf-16"), "UTF-8"),
    "binary": (b"\x80\x04\x95", "UTF-8 text; found byte 0x80"),
    "deep": ("[" * 100_000, "nesting"),
    "deep object": ('{"a":' * 3000, "nesting"),
    "huge integer": (TEXT.replace("4096", "9" * 5000), "thousands of digits"),
    "too big": (b" " * ((1 << 20) + 1), "1048576 bytes"),
    "text": (TEXT.replace("4096", '"4096"'), r"hidden_size: .*found '4096' \(text\)"),
    "float": (TEXT.replace("4096", "4096.0"), r"hidden_size: .*found 4096\.0"),
    "exponent": (TEXT.replace("4096", "4e3"), "hidden_size: .*found 4000"),
    "zero": (TEXT.replace("4096", "0"), "hidden_size: expected an integer from 1"),
    "negative": (TEXT.replace("4096", "-4096"), "hidden_size: .*found -4096"),
    "boolean": (TEXT.replace("4096", "true"), "hidden_size: .*found True"),
    "large": (TEXT.replace("4096", "9" * 30), "hidden_size: .*found 999"),
    "object": (TEXT.replace("4096", "{}"), "hidden_size: .*found {}"),
    "model_type": (TEXT.replace('"llama"', "5"), "model_type: expected text"),
    "null dimension": (TEXT.replace("4096", "null"), "key hidden_size .* is missing"),
    "empty object": ("{}", "hidden_size"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_q29_broken_files_give_one_error_with_the_path(config, case):
    content, words = BROKEN[case]
    path = config(content)
    with pytest.raises(ModelConfigError, match=words) as caught:
        model_gemms(path, 8)
    assert isinstance(caught.value, ValueError)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 3000


def test_q29_byte_order_mark_and_directory(config, tmp_path):
    path = config(b"\xef\xbb\xbf" + TEXT.encode())
    expected = model_gemms(LLAMA, 8)
    for model in (path, str(path), tmp_path, str(tmp_path)):
        assert model_gemms(model, 8) == expected
    assert model_dims(path).name == tmp_path.name


def test_q29_paths_that_are_no_file(tmp_path):
    with pytest.raises(ModelConfigError, match=r"expected a config\.json in it; found none"):
        model_dims(tmp_path)
    with pytest.raises(ModelConfigError, match="no such file"):
        model_dims(tmp_path / "config.json")
    os.mkfifo(tmp_path / "config.json")
    for path in (tmp_path, tmp_path / "config.json", "/dev/zero"):
        with pytest.raises(ModelConfigError, match="regular file"):
            model_dims(path)
    for odd in ("a\0b", "x" * 5000, "", "  ", "~nosuchuser/x.json"):
        with pytest.raises(ModelConfigError):
            model_dims(odd)
    with pytest.raises(ModelConfigError, match="found int"):
        model_dims(5)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_q29_unreadable_file(config):
    path = config(TEXT)
    path.chmod(0)
    with pytest.raises(ModelConfigError, match="Permission denied"):
        model_dims(path)


def test_preset_names_in_any_case(tmp_path, monkeypatch):
    expected = model_gemms("llama-3.1-8b", 8)
    for name in ("LLAMA-3.1-8B", "Llama_3.1_8b", " llama 3.1 8b ", "meta-llama/Llama-3.1-8B"):
        assert model_gemms(name, 8) == expected
        assert model_dims(name).name == "llama-3.1-8b"
    # What is on disk wins over publisher/name, but not over the bare name.
    folder = tmp_path / "mine" / "llama-3.1-8b"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(TEXT.replace("14336", "1024"))
    monkeypatch.chdir(tmp_path)
    assert model_gemms("mine/llama-3.1-8b", 8)[2].n == 256
    monkeypatch.chdir(tmp_path / "mine")
    assert model_gemms("./llama-3.1-8b", 8)[2].n == 256
    assert model_gemms("llama-3.1-8b", 8) == expected


@pytest.mark.parametrize("name", ["llama-3.1-8", "Llama-3.1-8B-Instruct", "meta/llama-3.1-8b-it"])
def test_unknown_name_lists_near_matches_and_all(name):
    with pytest.raises(ModelConfigError) as caught:
        load_config(name)
    message = str(caught.value)
    assert "Did you mean llama-3.1-8b" in message
    assert all(preset in message for preset in preset_names())


def test_presets_cannot_be_changed_from_outside():
    load_config("llama-4-scout").data["text_config"]["hidden_size"] = 1
    assert model_dims("llama-4-scout").hidden == 5120


def test_problems_of_a_model():
    found = problems("llama-3.1-8b", 8, 4096)
    ag, rs = Signature.of(Op.AG_GEMM), Signature.of(Op.GEMM_RS)
    assert found == (
        Problem(ag, 4096, 768, 4096, 8),
        Problem(rs, 4096, 4096, 512, 8),
        Problem(ag, 4096, 3584, 4096, 8),
        Problem(rs, 4096, 4096, 1792, 8),
    )
    only = problems("llama-3.1-8b", 8, [1, 2], "fp16", ops="gemm-rs")
    assert {(p.op, p.signature.dtype, p.m) for p in only} == {
        (Op.GEMM_RS, DType.FP16, 1),
        (Op.GEMM_RS, DType.FP16, 2),
    }
    assert len(problems("llama-3.1-8b", 8, [8, 8, 8])) == 4
    assert len(problems("llama-3.1-8b", 8, 8, include_lm_head=True)) == 5


def test_equal_gemms_of_one_model_are_one_problem_with_a_count():
    square = {**LLAMA, "intermediate_size": 4096, "num_key_value_heads": 32}
    found = counted_problems(square, 1, 64)
    rs = [i for i, p in enumerate(found) if p.op is Op.GEMM_RS]
    assert len(rs) == 1 and len(found) == 3
    assert found.counts[rs[0]] == 64 and found.names[rs[0]] == ("o", "down")
    entry = found.to_list()[rs[0]]
    assert (entry["count"], entry["names"], entry["m"]) == (64, ["o", "down"], 64)


def test_b03_zero_tokens_are_dropped_with_a_message(caplog):
    found = counted_problems("llama-3.1-8b", 8, [0, 8])
    assert {p.m for p in found} == {8}
    assert any("0 is dropped" in message for message in found.messages)
    assert counted_problems("llama-3.1-8b", 8, 0).problems == ()
    with caplog.at_level("WARNING"):
        assert problems("llama-3.1-8b", 8, [0]) == ()
    assert "0 is dropped" in caplog.text


def test_tokens_that_tp_does_not_divide_are_kept_and_noted():
    found = counted_problems("llama-3.1-8b", 8, [7, 16, 1023])
    assert {p.m for p in found} == {7, 16, 1023}
    (message,) = found.messages
    assert "7, 1023 not divisible by tp=8" in message
    assert counted_problems("llama-3.1-8b", 8, [8, 16]).messages == ()


@pytest.mark.parametrize("tokens", [-1, True, 1.0, "64", [64, "x"], [None], None, 2**31, {1: 2}])
def test_bad_tokens(tokens):
    with pytest.raises(UsageError, match="tokens: expected"):
        problems("llama-3.1-8b", 8, tokens)


def test_bad_dtype_ops_and_tp():
    with pytest.raises(UsageError, match="dtype"):
        problems("llama-3.1-8b", 8, 1, "fp32")
    with pytest.raises(UsageError, match="op: expected"):
        problems("llama-3.1-8b", 8, 1, ops=["all_reduce"])
    with pytest.raises(UsageError, match="ops: expected at least one"):
        problems("llama-3.1-8b", 8, 1, ops=[])
    with pytest.raises(UsageError, match="tp: expected an integer from 1 to 16; found 32"):
        problems("llama-3.1-8b", 32, 1)
    with pytest.raises(ShardingError):
        problems("llama-3.1-8b", 3, 1)


def test_summary_is_json_and_complete():
    found = summary("deepseek-v2-lite", 8, [0, 12])
    assert json.loads(json.dumps(found)) == found
    assert (found["model"], found["tp"], found["valid_tp"]) == (
        "deepseek-v2-lite",
        8,
        [1, 2, 4, 8, 16],
    )
    assert {"op": "ag_gemm", "n": 384, "k": 2048}.items() <= found["gemms"][0].items()
    assert (found["gemms"][0]["count"], found["gemms"][0]["names"]) == (27, ["q_proj"])
    assert [g["name"] for g in found["others"]] == ["kv_a", "kv_b", "expert_gate_up", "expert_down"]
    assert all(g["note"] for g in found["others"])
    assert len(found["problems"]) == 6 and {p["m"] for p in found["problems"]} == {12}
    assert any("0 is dropped" in n for n in found["notes"])
    assert any("12 not divisible" in n for n in found["notes"])
    assert summary("llama-3.1-8b", 8)["problems"] == []


def test_summary_beyond_the_kernels_ranks():
    found = summary("deepseek-r1", 32, 4096)
    assert found["problems"] == [] and found["gemms"]
    assert any("at most 16 ranks" in warning for warning in found["warnings"])


def test_sizes_beyond_a_tensor_map_are_refused():
    wide = {**LLAMA, "num_attention_heads": 8192, "num_key_value_heads": 8192, "head_dim": 2**20}
    with pytest.raises(ModelConfigError, match="qkv: expected sizes up to 2147483647"):
        model_gemms(wide, 1)
