"""The shipped JSON schema of a record says what the code says."""

from __future__ import annotations

import json
from dataclasses import replace

import jsonschema
import pytest
from dbtools import AG, KERNEL, baseline, record

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.dtypes import DType
from fluxgen.core.epilogue import Epilogue
from fluxgen.core.errors import UsageError
from fluxgen.core.op import Op
from fluxgen.core.problem import MAX_WORLD, Signature
from fluxgen.core.record import Environment, Provenance, Record, Status
from fluxgen.core.settings import data_dir
from fluxgen.core.topology import MAX_ISLANDS, LinkKind
from fluxgen.db.codec import MAX_TEXT, MAX_TIME_US, record_from_dict, record_to_json_line
from fluxgen.db.packs import pack_files

SCHEMA = json.loads((data_dir("tuning_db") / "schema/record.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
PARTS = SCHEMA["properties"]


def errors(data) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(data)]


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_shipped_record_fits():
    count = 0
    for path in pack_files(data_dir("tuning_db")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert errors(json.loads(line)) == [], f"{path.name}:{number}"
            count += 1
    assert count > 900


@pytest.mark.parametrize(
    ("part", "name", "kind"),
    [
        ("problem", "op", Op), ("problem", "dtype", DType), ("problem", "out_dtype", DType),
        ("kernel", "schedule", Schedule), ("run", "transport", Transport),
        ("run", "chunk_axis", ChunkAxis), ("", "provenance", Provenance), ("", "status", Status),
    ],
)  # fmt: skip
def test_its_names_are_those_of_the_enums(part, name, kind):
    listed = (PARTS[part]["properties"] if part else PARTS)[name]["enum"]
    assert sorted(listed) == sorted(member.value for member in kind)


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("kernel", KernelConfig.__dataclass_fields__), ("run", RunConfig.__dataclass_fields__),
        ("environment", Environment.__dataclass_fields__), ("", Record.__dataclass_fields__),
        ("problem", {**Signature.__dataclass_fields__, "m": 0, "n": 0, "k": 0, "tp": 0}),
    ],
)  # fmt: skip
def test_its_keys_are_the_fields(part, fields):
    schema = PARTS[part] if part else SCHEMA
    if "op" in fields:
        fields = {name: 0 for name in fields if name != "signature"}
    assert sorted(schema["properties"]) == sorted(fields)
    assert schema["additionalProperties"] is False
    assert set(schema.get("required", ())) <= set(fields)


def test_its_bounds_are_the_codecs():
    assert PARTS["problem"]["properties"]["tp"]["maximum"] == MAX_WORLD
    assert PARTS["time_us"]["maximum"] == MAX_TIME_US
    assert PARTS["environment"]["properties"]["gpu"]["maxLength"] == MAX_TEXT


LINKS = ["nvlink", "pcie", "host", *(f"pcie{n}" for n in range(2, MAX_ISLANDS + 1))]
GOOD = [
    *(record(topology=f"someones-gpu-1.5-{link}-tp{tp}", tp=tp)
      for link in LINKS for tp in (8, 16) if tp % LinkKind.with_islands(link)[1] == 0),
    *(record(kernel=replace(KERNEL, schedule=schedule)) for schedule in Schedule),
    *(record(run=RunConfig((1, 3, 4), 2, ChunkAxis.K, 3, 100, transport, 2, 4))
      for transport in Transport),
    *(record(provenance=provenance) for provenance in Provenance),
    *(record(signature=Signature.of(op, dtype)) for op in Op for dtype in DType),
    record(signature=replace(AG, epilogue=Epilogue.parse("bias"), b_layout="kn")),
    record(signature=replace(AG, return_gathered=True)),
    baseline(1), record(created=""), record(environment=Environment()), record(m=0),
]  # fmt: skip


@pytest.mark.parametrize("value", GOOD, ids=range(len(GOOD)))
def test_whatever_the_codec_writes_fits(value):
    data = json.loads(record_to_json_line(value))
    assert errors(data) == []
    assert record_from_dict(data) == value


def changed(**changes):
    data = json.loads(record_to_json_line(record()))
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = data
        for parent in parents:
            place = place[parent]
        if value is ...:
            del place[name]
        else:
            place[name] = value
    return data


BAD = [
    *(changed(topology=key) for key in (
        "h100-sxm-infiniband-tp8", "h100-sxm-nvlink-tp17", "h100-sxm-pcie9-tp8", "h100-host2-tp8",
        "H100-nvlink-tp8", "-nvlink-tp8", "h100-nvlink-tp0", 8, None)),
    *(changed(**{name: value}) for name in ("time_us", "baseline_us")
      for value in (0, -1, "1", None, 1e13, ..., True)),
    *(changed(**{f"problem__{name}": ...}) for name in ("op", "m", "dtype", "return_gathered")),
    *(changed(**{f"problem__{name}": value}) for name in ("m", "n", "k", "tp")
      for value in (-1, 1.5, "8", None, 2**31, True)),
    *(changed(**{f"kernel__{name}": value}) for name in ("tile_m", "stages")
      for value in (-1, "8", None, 1.5)),
    changed(kernel__schedule="other"), changed(run__transport="pigeon"), changed(run__panel=-1),
    changed(run__groups="11"), changed(run__groups=[1.5]), changed(run__chunk_axis="n"),
    changed(problem__op="ag"), changed(problem__extra=1), changed(extra=1), changed(run__extra=1),
    changed(provenance="guessed"), changed(status="fine"), changed(created="yesterday"),
    changed(environment__gpu=8), changed(environment__gpu="x" * 513), changed(problem=[]),
    changed(environment__sm_count=-1), changed(problem__b_layout="mn"), [], None, "record",
]  # fmt: skip


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_what_it_refuses_the_codec_refuses_and_the_other_way_round(data):
    assert errors(data), data
    with pytest.raises(UsageError):
        record_from_dict(data)
