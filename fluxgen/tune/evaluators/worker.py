"""The process that evaluates: ``python -m fluxgen.tune.evaluators.worker``, see :mod:`.process`."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from fluxgen.core.errors import FluxgenError, MachineError
from fluxgen.tune.evaluators.evaluator import Evaluator, versions_of


def _make(maker: str, options: Mapping[str, Any]) -> Evaluator:
    module, _, function = maker.partition(":")
    make: Callable[..., Evaluator] = getattr(importlib.import_module(module), function)
    return make(**options)


def _die_with_parent() -> None:
    """The kernel kills this process when the tuner ends, also by SIGKILL, also while it hangs."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def main(fd: int, maker: str) -> None:
    """Serve one tuner until its end of the pipe is closed."""
    _die_with_parent()
    pipe = Connection(fd)
    try:
        options = pipe.recv()
        try:
            evaluator = _make(maker, options)
        except FluxgenError as error:
            pipe.send(("raised", error))
            return
        about = evaluator.kind, evaluator.provenance, versions_of(evaluator)
        pipe.send(("done", about))
        while True:
            name, args = pipe.recv()
            try:
                answer = "done", getattr(evaluator, name)(*args)
            except MachineError as error:
                answer = "broken", str(error)
            except Exception as error:  # the candidate's fault; the tuner writes it down
                text = f"raised {type(error).__name__}: {error}"
                answer = "failed", text
            pipe.send(answer)
    except (EOFError, ConnectionError):
        pass  # the tuner is gone


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
