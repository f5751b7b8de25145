"""``python -m fluxgen``."""

from fluxgen.cli import run

run()
