"""The command line: one file per command, each a thin layer over one module.

With ``--json`` a command prints one JSON document on stdout and nothing else there. People's
tables go to stdout too; progress, warnings and errors go to stderr. Exit codes: 0 done, 1 failed,
2 wrong usage.
"""

from __future__ import annotations

import logging
import signal
import sys
from typing import Annotated

import typer
from rich.markup import escape

import fluxgen
from fluxgen.cli import db
from fluxgen.cli.build import build
from fluxgen.cli.common import say, stderr
from fluxgen.cli.doctor import doctor
from fluxgen.cli.lookup import lookup
from fluxgen.cli.plan import plan
from fluxgen.cli.report import report
from fluxgen.cli.shapes import shapes
from fluxgen.cli.tune import tune
from fluxgen.core.errors import FluxgenError

app = typer.Typer(
    help="Generate, tune and look up fused communication-GEMM kernels for tensor parallelism.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (shapes, plan, tune, build, lookup, doctor, report):
    app.command()(_command)
app.add_typer(db.app, name="db")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    if version:
        print(f"fluxgen {fluxgen.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        raise typer.BadParameter("expected a command; see fluxgen --help")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        app(args=arguments, prog_name="fluxgen")
    except FluxgenError as error:
        stderr.print(f"error: {escape(str(error))}", highlight=False, soft_wrap=True)
        return error.exit_code
    except SystemExit as done:  # how typer ends, wrong usage (2) and Ctrl-C (130) included
        code = done.code if isinstance(done.code, int) else int(done.code is not None)
        return _interrupted() if code == 128 + signal.SIGINT else code
    except KeyboardInterrupt:
        return _interrupted()
    return 0


def _interrupted() -> int:
    text = "interrupted: what was finished is kept, nothing half-done is; run it again to go on"
    say(text)
    return 1


def run() -> None:
    """The ``fluxgen`` command."""
    # How a batch system ends a job: what Ctrl-C keeps is kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    raise SystemExit(main())
