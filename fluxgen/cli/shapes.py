"""``fluxgen shapes``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from fluxgen.cli.common import (
    Dtype,
    Json,
    Model,
    Tp,
    emit,
    integers,
    say,
    stdout,
)
from fluxgen.core.dtypes import DType


def shapes(
    model: Model,
    tp: Tp,
    tokens: Annotated[str, typer.Option("--tokens", help="Token counts to list.")] = "",
    dtype: Dtype = "bf16",
    lm_head: Annotated[bool, typer.Option("--lm-head", help="Include the lm_head.")] = False,
    as_json: Json = False,
) -> None:
    """The GEMMs of one layer, per op, with counts, each shape once."""
    from fluxgen.report.tables import print_table
    from fluxgen.shapes import summary

    counts = integers("tokens", tokens) if tokens else ()
    found = summary(model, tp, counts, DType.parse(dtype), lm_head)
    for warning in found["warnings"]:
        say(f"warning: {warning}")
    if as_json:
        emit(found)
        return
    title = f"{found['model']}, tp {tp} (valid: {', '.join(map(str, found['valid_tp']))})"
    print_table(
        stdout,
        title,
        ("op", "n", "k", "count", "names"),
        [[g["op"], g["n"], g["k"], g["count"], ", ".join(g["names"])] for g in found["gemms"]],
    )
    if found["others"]:
        print_table(
            stdout,
            "GEMMs that are no site of a fused op",
            ("n", "k", "count", "name", "why"),
            [[g["n"], g["k"], g["count"], g["name"], g["note"]] for g in found["others"]],
        )
    if found["problems"]:
        print_table(
            stdout,
            "problems",
            ("op", "m", "n", "k", "count"),
            [[p["op"], p["m"], p["n"], p["k"], p["count"]] for p in found["problems"]],
        )
    for note in found["notes"]:
        stdout.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
