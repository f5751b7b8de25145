"""``fluxgen doctor``."""

from __future__ import annotations

import typer

import fluxgen
from fluxgen.cli.common import (
    Json,
    emit,
    stdout,
)


def doctor(as_json: Json = False) -> None:
    """Each part of this machine: found, or what is missing and how to get it."""
    from fluxgen.report.doctor import examine
    from fluxgen.report.tables import print_table

    checks = examine()
    if as_json:
        emit({"fluxgen": fluxgen.__version__, "checks": [check.to_dict() for check in checks]})
    else:
        rows = [[check.name, check.state, check.detail] for check in checks]
        print_table(stdout, f"fluxgen {fluxgen.__version__}", ("part", "state", "detail"), rows)
    if any(check.state == "broken" for check in checks):
        raise typer.Exit(1)
