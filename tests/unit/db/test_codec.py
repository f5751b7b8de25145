from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
from dbtools import baseline, record
from hypothesis import given, settings
from hypothesis import strategies as st

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.dtypes import DType
from fluxgen.core.epilogue import Epilogue
from fluxgen.core.errors import FluxgenError, UsageError
from fluxgen.core.op import Op
from fluxgen.core.problem import MAX_DIM, Problem, Signature
from fluxgen.core.record import Baseline, Environment, Provenance, Record, Status
from fluxgen.db.codec import record_from_dict, record_from_json, record_to_json_line

SCHEMA = json.loads((Path(__file__).parents[3] / "tuning_db/schema/record.schema.json").read_text())

counts = st.integers(0, 2**31 - 1)
times = st.floats(min_value=1e-9, max_value=1e12, allow_nan=False)
texts = st.text(st.characters(exclude_categories=("Cc", "Cf", "Cs")), max_size=40)
signatures = st.builds(
    Signature,
    st.sampled_from(Op),
    st.sampled_from(DType),
    st.sampled_from(DType),
    st.sampled_from(["nk", "kn"]),
    st.sampled_from(["none", "bias", "bias+residual"]).map(Epilogue.parse),
    st.just("none"),
    st.booleans(),
)
kernels = st.builds(
    KernelConfig, counts, counts, counts, counts, counts, st.sampled_from(Schedule), counts
)
runs = st.builds(
    RunConfig,
    st.lists(counts, max_size=16).map(tuple),
    counts,
    st.sampled_from(ChunkAxis),
    counts,
    counts,
    st.sampled_from(Transport),
)


@st.composite
def records(draw):
    tp = draw(st.integers(1, 16))
    fused = draw(st.booleans())
    return Record(
        problem=Problem(
            draw(signatures),
            draw(st.integers(0, MAX_DIM)),
            draw(st.integers(1, MAX_DIM)),
            draw(st.integers(0, MAX_DIM)),
            tp,
        ),
        topology=f"{draw(st.from_regex(r'[a-z0-9][a-z0-9.-]{0,20}', fullmatch=True))}-pcie-tp{tp}",
        kernel=draw(kernels) if fused else None,
        run=draw(runs) if fused else None,
        time_us=draw(times),
        baseline_us=draw(times),
        provenance=draw(st.sampled_from(Provenance)),
        environment=Environment(
            draw(texts), draw(st.integers(0, 4096)), *(draw(texts) for _ in range(6))
        ),
        status=draw(st.sampled_from(Status)),
        created=draw(st.sampled_from(["", "2026-12-01T12:00:00Z"])),
        baseline=draw(st.sampled_from([None, *Baseline])),
    )


@given(records())
@settings(max_examples=150, deadline=None)
def test_round_trip(value):
    assert record_from_dict(value.to_dict()) == value
    line = record_to_json_line(value)
    assert record_from_json(line) == value
    assert "\n" not in line and line.isascii()
    assert record_to_json_line(record_from_json(line)) == line
    assert not schema_faults(SCHEMA, json.loads(line))


def test_equal_records_are_equal_bytes():
    assert record_to_json_line(record(time_us=12)) == record_to_json_line(record(time_us=12.0))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@st.composite
def mutations(draw):
    data = copy.deepcopy(draw(st.sampled_from([record(), baseline(7)])).to_dict())
    target = data
    while True:
        key = draw(st.sampled_from(sorted(target)))
        if isinstance(target[key], dict) and draw(st.booleans()):
            target = target[key]
            continue
        kind = draw(st.sampled_from(["replace", "delete", "add"]))
        if kind == "replace":
            target[key] = draw(json_values)
        elif kind == "delete":
            del target[key]
        else:
            target[draw(st.text(max_size=8))] = draw(json_values)
        return data


@given(mutations())
@settings(max_examples=300, deadline=None)
def test_a_mutated_record_is_read_or_refused_as_the_schema_says(data):
    faults = schema_faults(SCHEMA, data)
    try:
        value = record_from_dict(data)
    except FluxgenError as error:
        assert str(error)
        # Two rules between fields, and two about text, are beyond the schema.
        beyond = ("kernel, run", "topology", "environment", "created")
        assert faults or str(error).startswith(beyond)
    else:
        assert not faults
        assert record_from_dict(value.to_dict()) == value


@given(st.binary(max_size=200) | json_values.map(lambda v: json.dumps(v).encode()))
@settings(max_examples=300, deadline=None)
def test_only_deliberate_errors_escape(line):
    with pytest.raises(FluxgenError):
        record_from_json(line)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_line_is_read_or_refused(data):
    line = bytearray(record_to_json_line(record()).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    line = line[: data.draw(st.integers(0, len(line)))]
    try:
        record_from_json(bytes(line))
    except FluxgenError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("time_us", float("nan"), "time_us"),
        ("time_us", float("inf"), "time_us"),
        ("time_us", 0, "time_us"),
        ("time_us", -1.0, "time_us"),
        ("time_us", True, "time_us"),
        ("time_us", "12", "time_us"),
        ("time_us", 10**400, "time_us"),
        ("baseline_us", None, "baseline_us"),
        ("provenance", "guessed", "provenance"),
        ("provenance", ["measured"], "provenance"),
        ("status", "OK", "status"),
        ("surprise", 1, "surprise"),
        ("problem.surprise", 1, "surprise"),
        ("problem.m", 1.0, "m"),
        ("problem.m", True, "m"),
        ("problem.m", -1, "m"),
        ("problem.n", 0, "n"),
        ("problem.tp", 17, "tp"),
        ("problem.op", "AG", "problem.op"),
        ("problem.op", {}, "problem.op"),
        ("problem.b_layout", [], "b_layout"),
        ("problem.epilogue", "relu", "epilogue"),
        ("problem.return_gathered", 1, "return_gathered"),
        ("problem.dtype", "fp8", "problem.dtype"),
        ("topology", "../../etc-nvlink-tp8", "topology"),
        ("topology", "h100-sxm-nvlink-tp8\n", "topology"),
        ("topology", "h100-sxm-nvlink-tp4", "topology"),
        ("topology", "h100-sxm-nvlink-tp08", "topology"),
        ("topology", "h100-sxm-nvlink-tp\u0668", "topology"),
        ("topology", "H100 SXM-nvlink-tp8", "topology"),
        ("topology", 8, "topology"),
        ("kernel", None, "kernel"),
        ("run", None, "run"),
        ("kernel.tile_m", 128.0, "tile_m"),
        ("kernel.schedule", {}, "schedule"),
        ("run.groups", "8", "groups"),
        ("run.transport", "carrier_pigeon", "transport"),
        ("run.span", True, "span"),
        ("run.span", -1, "span"),
        ("environment.gpu", "a\x1b[2Jb", "environment.gpu"),
        ("environment.gpu", "\ud800", "environment.gpu"),
        ("environment.gpu", "x" * 513, "environment.gpu"),
        ("environment.sm_count", "132", "sm_count"),
        ("environment.extra", "", "extra"),
        ("environment", [], "environment"),
        ("created", "yesterday", "created"),
        ("created", "2026-13-01T12:00:00Z", "created"),
        ("created", "2026-12-01T12:00:00+00:00", "created"),
    ],
)
def test_a_bad_value_is_refused_by_name(path, value, named):
    data = record().to_dict()
    *parents, key = path.split(".")
    target = data
    for parent in parents:
        target = target[parent]
    target[key] = value
    with pytest.raises(UsageError, match=re.escape(named)) as caught:
        record_from_dict(data)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1,"a":2}',
        '{"time_us":NaN}',
        "[" * 10_000,
        "1" * 10_000,
        "{}" + " " * 20_000,
        b"\xef\xbb\xbf{}",
        b"\xff\xfe",
        "null",
        "[]",
        "",
    ],
)
def test_bad_json_is_refused(text):
    with pytest.raises(UsageError):
        record_from_json(text)


@pytest.mark.parametrize("value", [None, "missing"])
def test_unknown_environment_never_makes_a_record_unusable(value):  # J05
    data = record().to_dict()
    for key in Environment.__dataclass_fields__:
        if value is None:
            data["environment"][key] = None
        else:
            del data["environment"][key]
    assert record_from_dict(data).environment == Environment()
    data["environment"] = None
    assert record_from_dict(data).environment == Environment()


def test_an_invalid_record_is_never_written():
    with pytest.raises(UsageError, match="time_us"):
        record_to_json_line(record(time_us=float("nan")))
    with pytest.raises(UsageError, match="topology"):
        record_to_json_line(record(topology="H100 SXM/8"))


def test_a_record_without_its_baseline_keeps_its_bytes():
    """Those written before there was a choice: they are read, say so, and are not rewritten."""
    old = record()
    assert old.baseline is None
    assert "baseline" not in json.loads(record_to_json_line(old))
    stated = record(baseline=Baseline.ONE_SHOT)
    assert record_from_json(record_to_json_line(stated)).baseline is Baseline.ONE_SHOT
    assert record_from_dict({**old.to_dict(), "baseline": None}) == old
    with pytest.raises(UsageError, match="baseline: expected one of nccl, one_shot_all_reduce"):
        record_from_dict({**old.to_dict(), "baseline": "mpi"})


def test_the_schema_lists_what_the_codec_reads():
    assert set(SCHEMA["properties"]) == set(record(baseline=Baseline.NCCL).to_dict())
    assert SCHEMA["properties"]["baseline"]["enum"] == [*(b.value for b in Baseline), None]
    for name in ("problem", "kernel", "run", "environment"):
        optional = {"split"} if name == "run" else set()
        written = set(record().to_dict()[name])
        assert set(SCHEMA["properties"][name]["properties"]) == written | optional
        assert set(SCHEMA["properties"][name].get("required", written)) == written
    of = SCHEMA["properties"]
    for where, kind in [
        (of["problem"]["properties"]["op"], Op),
        (of["problem"]["properties"]["dtype"], DType),
        (of["problem"]["properties"]["out_dtype"], DType),
        (of["kernel"]["properties"]["schedule"], Schedule),
        (of["run"]["properties"]["chunk_axis"], ChunkAxis),
        (of["run"]["properties"]["transport"], Transport),
        (of["provenance"], Provenance),
        (of["status"], Status),
    ]:
        assert sorted(where["enum"]) == sorted(member.value for member in kind)


TYPES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, (int, float)) and not isinstance(v, bool),
}
KNOWN = {
    *("$schema", "title", "description", "type", "enum", "pattern", "maxLength", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "items", "properties", "required"),
    "additionalProperties",
}


def schema_faults(schema, value):
    """What the part of JSON Schema that our schema uses finds wrong with a value."""
    assert set(schema) <= KNOWN, f"teach this checker {set(schema) - KNOWN}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(TYPES[kind](value) for kind in kinds):
        return [f"{value!r} is not {kinds}"]
    faults = []
    if "enum" in schema and not any(value == e and isinstance(value, str) for e in schema["enum"]):
        faults.append(f"{value!r} not in enum")
    if isinstance(value, str):
        pattern = schema.get("pattern", "")
        if not re.search(pattern.replace("$", r"\Z"), value):
            faults.append(f"{value!r} does not match {pattern}")
        if len(value) > schema.get("maxLength", 10**9):
            faults.append("too long")
    if TYPES["number"](value) and (
        not value >= schema.get("minimum", float("-inf"))
        or not value <= schema.get("maximum", float("inf"))
        or not value > schema.get("exclusiveMinimum", float("-inf"))
    ):
        faults.append(f"{value!r} out of range")
    if isinstance(value, list):
        if len(value) > schema.get("maxItems", 10**9):
            faults.append("too many items")
        for item in value:
            faults += schema_faults(schema.get("items", {}), item)
    if isinstance(value, dict):
        faults += [f"{key} missing" for key in schema.get("required", []) if key not in value]
        for key, item in value.items():
            if key in schema.get("properties", {}):
                faults += schema_faults(schema["properties"][key], item)
            elif not schema.get("additionalProperties", True):
                faults.append(f"{key} unknown")
    return faults
