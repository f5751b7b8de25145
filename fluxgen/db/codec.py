"""A Record to and from JSON, strictly: the text may come from strangers.

One record is one line of canonical JSON (sorted keys, no spaces, ASCII), so that equal records are
equal bytes, a diff can be reviewed and a hash can be compared between ranks.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import unicodedata
from collections.abc import Mapping
from typing import Any, NoReturn

from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.dtypes import DType
from fluxgen.core.epilogue import Epilogue
from fluxgen.core.errors import UsageError
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Baseline, Environment, Provenance, Record, Status
from fluxgen.db.keys import split_topology

MAX_TIME_US = 1e12
"""Longest credible time, microseconds (eleven days)."""
MAX_TEXT = 512
"""Longest text of an environment field, characters."""
MAX_LINE_BYTES = 16 * 1024
"""Longest line of a pack: about ten times a real record."""

_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_RECORD_KEYS = tuple(Record.__dataclass_fields__)
_PROBLEM_KEYS = (*Signature.__dataclass_fields__, "m", "n", "k", "tp")
_ENVIRONMENT_KEYS = tuple(Environment.__dataclass_fields__)


def record_to_json_line(record: Record) -> str:
    """The canonical line of ``record``, without a newline.

    Raises:
        UsageError: the record holds what :func:`record_from_dict` would refuse, so that nothing
            is ever written that cannot be read back.
    """
    line = canonical_json(
        {
            **record.to_dict(),
            # 12 and 12.0 are the same time: they must be the same bytes
            "time_us": _time("time_us", record.time_us),
            "baseline_us": _time("baseline_us", record.baseline_us),
        }
    )
    if len(line) > MAX_LINE_BYTES:
        raise UsageError(f"record: expected at most {MAX_LINE_BYTES} bytes; found {len(line)}")
    record_from_json(line)
    return line


def canonical_json(data: Any) -> str:
    """Plain values as compact ASCII JSON with sorted keys.

    Raises:
        UsageError: a value that JSON has no form for.
    """
    try:
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"record: expected plain JSON values; {error}") from None


def record_from_json(text: str | bytes) -> Record:
    """Read one line.

    Raises:
        UsageError: not UTF-8, not JSON, a duplicate key, or anything :func:`record_from_dict`
            refuses.
    """
    return record_from_dict(json_value(text))


def json_value(text: str | bytes) -> Any:
    """Decode strict JSON: no NaN, no Infinity, no duplicate keys, no byte-order mark.

    Raises:
        UsageError: for anything else.
    """
    if len(text) > MAX_LINE_BYTES:
        raise UsageError(f"record: expected at most {MAX_LINE_BYTES} bytes; found {len(text)}")
    try:
        decoded = text if isinstance(text, str) else text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"record: expected UTF-8 text; found a bad byte at {error.start}"
        ) from None
    try:
        return json.loads(decoded, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except UsageError:
        raise
    except RecursionError:
        raise UsageError("record: expected a flat JSON object; found deep nesting") from None
    except ValueError as error:
        raise UsageError(f"record: expected one JSON object; {error}") from None


def record_from_dict(data: object) -> Record:
    """Read what ``Record.to_dict`` wrote.

    Only the environment, the time of creation and the kind of baseline may be incomplete: what is
    missing or null there is unknown, which never makes a record unusable.

    Raises:
        UsageError: a key is missing or unknown, a value has the wrong type or is out of range;
            the message names the key.
    """
    fields = _object("record", data, _RECORD_KEYS, optional=("environment", "created", "baseline"))
    problem = problem_from_dict(fields["problem"])
    _, _, world, _ = split_topology(fields["topology"])
    if world != problem.tp:
        raise UsageError(
            f"topology: expected one of tp{problem.tp}, the problem's tp; "
            f"found {fields['topology']!r}"
        )
    kernel, run = fields["kernel"], fields["run"]
    if (kernel is None) != (run is None):
        raise UsageError(
            "kernel, run: expected both, or null for both (the unfused path wins); found "
            f"{'kernel' if run is None else 'run'} alone"
        )
    return Record(
        problem=problem,
        topology=fields["topology"],
        kernel=None if kernel is None else KernelConfig.from_dict(kernel),
        run=None if run is None else RunConfig.from_dict(run),
        time_us=_time("time_us", fields["time_us"]),
        baseline_us=_time("baseline_us", fields["baseline_us"]),
        provenance=_enum("provenance", Provenance, fields["provenance"]),
        environment=_environment(fields.get("environment")),
        status=_enum("status", Status, fields["status"]),
        created=created_from(fields.get("created", "")),
        baseline=_baseline(fields.get("baseline")),
    )


def problem_from_dict(data: object) -> Problem:
    """Read what ``Problem.to_dict`` wrote.

    Raises:
        UsageError: as :func:`record_from_dict`.
    """
    fields = _object("problem", data, _PROBLEM_KEYS)
    gathered = fields["return_gathered"]
    if not isinstance(gathered, bool):
        raise UsageError(
            f"problem.return_gathered: expected true or false; found {_shown(gathered)}"
        )
    for key in ("b_layout", "epilogue", "scaling"):
        if not isinstance(fields[key], str):
            raise UsageError(f"problem.{key}: expected text; found {_shown(fields[key])}")
    signature = Signature(
        op=_enum("problem.op", Op, fields["op"]),
        dtype=_enum("problem.dtype", DType, fields["dtype"]),
        out_dtype=_enum("problem.out_dtype", DType, fields["out_dtype"]),
        b_layout=fields["b_layout"],
        epilogue=Epilogue.parse(fields["epilogue"]),
        scaling=fields["scaling"],
        return_gathered=gathered,
    )
    return Problem(signature, *(fields[key] for key in ("m", "n", "k", "tp")))


def _environment(data: object) -> Environment:
    if data is None:
        return Environment()
    fields = _object("environment", data, _ENVIRONMENT_KEYS, optional=_ENVIRONMENT_KEYS)
    known: dict[str, Any] = {}
    for key, value in fields.items():
        if value is None:
            continue
        if key == "sm_count":
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 4096:
                raise UsageError(
                    f"environment.sm_count: expected an integer from 0 to 4096; "
                    f"found {_shown(value)}"
                )
            known[key] = value
        else:
            known[key] = _text(f"environment.{key}", value)
    return Environment(**known)


def _baseline(value: object) -> Baseline | None:
    return None if value is None else _enum("baseline", Baseline, value)


def _text(key: str, value: object) -> str:
    # These texts are printed: control and format characters could forge a terminal's output.
    if (
        not isinstance(value, str)
        or len(value) > MAX_TEXT
        or any(unicodedata.category(c) in ("Cc", "Cf", "Cs") for c in value)
    ):
        raise UsageError(
            f"{key}: expected text of at most {MAX_TEXT} characters without control characters; "
            f"found {_shown(value)}"
        )
    return value


def _time(key: str, value: object) -> float:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not 0 < value <= MAX_TIME_US or not math.isfinite(value):  # type: ignore[operator,arg-type]
        raise UsageError(
            f"{key}: expected microseconds above 0 and up to {MAX_TIME_US:g}; found {_shown(value)}"
        )
    return float(value)  # type: ignore[arg-type]


def created_from(value: object) -> str:
    """UTC time as ``2026-12-01T12:00:00Z``, one form only so that text order is time order.

    Raises:
        UsageError: for any other form; null and empty are unknown, which is older than anything.
    """
    if value is None or value == "":
        return ""
    if isinstance(value, str) and _CREATED.fullmatch(value) and value.isascii():
        try:
            datetime.datetime.strptime(value, "%Y-%m-%dT%H:%M:%S%z")
        except ValueError:
            pass
        else:
            return value
    raise UsageError(
        f"created: expected UTC time like 2026-12-01T12:00:00Z, or empty; found {_shown(value)}"
    )


def _enum(key: str, kind: type[Any], value: object) -> Any:
    for member in kind:
        if isinstance(value, str) and member.value == value:
            return member
    raise UsageError(
        f"{key}: expected one of {', '.join(m.value for m in kind)}; found {_shown(value)}"
    )


def _object(
    what: str, data: object, keys: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise UsageError(f"{what}: expected a JSON object; found {_shown(data)}")
    unknown = sorted(str(key) for key in data if key not in keys)
    if unknown:
        raise UsageError(
            f"{what}: unknown key {_shown(unknown[0])}; expected {', '.join(keys)}. A newer "
            "fluxgen may have written it: update fluxgen"
        )
    missing = [key for key in keys if key not in data and key not in optional]
    if missing:
        raise UsageError(f"{what}: key {missing[0]!r} is missing")
    return data


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise UsageError("record: expected each key once; found a duplicate key")
    return result


def _no_constant(name: str) -> NoReturn:
    raise UsageError(f"record: expected finite numbers; found {name}")


def _shown(value: object) -> str:
    """Short, printable form of a stranger's value."""
    text = ascii(value) if not isinstance(value, int) or abs(value) < 10**40 else "a huge integer"
    return text if len(text) <= 80 else text[:77] + "..."
