"""An evaluator in a process of its own, which may crash or hang without ending the search.

    search -> ProcessEvaluator -> pipe -> python -m (worker.py) -> an Evaluator made there

A candidate that kills or hangs the process has failed, with the reason; the search writes it down
and asks for it never again. The next candidate gets a new process, and with it a new context on the
GPU. A process that cannot even start means a broken machine and ends the search.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection, Pipe
from typing import IO, Any

from fluxgen.core.errors import MachineError
from fluxgen.core.problem import Problem
from fluxgen.core.record import Baseline
from fluxgen.core.topology import Topology
from fluxgen.tune.evaluators.evaluator import Case, Evaluator, Measurement

START_S = 180.0
"""Until a process is ready: it imports Torch, makes a context and checks the GPU."""

KILLED_S = 30.0
"""Until a killed process is gone. One that the driver holds may never be."""

_TAIL = 2000
"""Bytes of the process's output that an error shows the last line of."""

_WORKER = "fluxgen.tune.evaluators.worker"

__all__ = ["START_S", "ProcessEvaluator"]


class ProcessEvaluator(Evaluator):
    """An :class:`~fluxgen.tune.evaluators.Evaluator` that lives in another process.

    Args:
        maker: ``module:function`` that returns the evaluator there, called with ``options``.
        options: picklable keyword arguments. timeout_s: seconds for one candidate.
        start_s: seconds until the process is ready.

    Attributes:
        kind, provenance, versions: the evaluator's own.
        started: processes started so far.

    Raises:
        MachineError: the process does not come up. FluxgenError: what ``maker`` itself raises.
    """

    def __init__(
        self,
        maker: str,
        options: Mapping[str, Any] | None = None,
        *,
        timeout_s: float,
        start_s: float = START_S,
    ) -> None:
        self._maker, self._options = maker, dict(options or {})
        self._timeout_s, self._start_s = timeout_s, start_s
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._output: IO[bytes] | None = None
        self.started = 0
        self.versions: dict[str, str]
        self._start()

    def __enter__(self) -> ProcessEvaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; the next question starts another."""
        self._end()

    def method(self, topology: Topology) -> str:
        """The evaluator's own.

        Raises:
            MachineError: the process ended or does not answer.
        """
        return str(self._told("method", topology))

    def baseline(self, problem: Problem, topology: Topology) -> Baseline | None:
        """The evaluator's own.

        Raises:
            MachineError: the process ended or does not answer.
        """
        value = self._told("baseline", problem, topology)
        return None if value is None else Baseline(value)

    def measure(self, case: Case) -> Measurement:
        """Time one candidate; it fails if the process dies or takes longer than ``timeout_s``.

        Raises:
            MachineError: no new process comes up, one that hangs cannot be killed, or the evaluator
            says that the machine is broken.
        """
        outcome, value = self._ask("measure", case)
        if outcome == "done":
            assert isinstance(value, Measurement)
            return value
        return Measurement.failure(self.provenance, f"the process that evaluated it {value}")

    def _told(self, name: str, *args: Any) -> Any:
        """The answer to a question that has nothing to do with a candidate."""
        outcome, value = self._ask(name, *args)
        if outcome != "done":
            raise MachineError(f"the evaluator's process {value}")
        return value

    def _ask(self, name: str, *args: Any) -> tuple[str, Any]:
        if self._process is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send((name, args))
            outcome, value = self._receive(self._timeout_s)
        except BaseException:  # Ctrl-C too: what it is doing now nobody will ask for
            self._end()
            raise
        if outcome == "broken":
            self._end()
            raise MachineError(value)
        return outcome, value

    def _start(self) -> None:
        ours, theirs = Pipe()
        self._pipe, self._output = ours, tempfile.TemporaryFile()  # noqa: SIM115
        command = [
            sys.executable,
            "-m",
            _WORKER,
            str(theirs.fileno()),
            self._maker,
        ]
        # A session of its own: Ctrl-C is the tuner's to deal with.
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.started += 1
        theirs.close()
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended: said below
                ours.send(self._options)
            outcome, value = self._receive(self._start_s)
        except BaseException:
            self._end()
            raise
        if outcome == "raised":
            self._end()
            raise value
        if outcome != "done":
            self._end()
            raise MachineError(f"the evaluator's process {value} before it was ready")
        self.kind, self.provenance, self.versions = value

    def _receive(self, seconds: float) -> tuple[str, Any]:
        """What the process answers, or ``died`` or ``hung`` and how that was; then it is ended.

        Raises:
            MachineError: it hangs and cannot be killed.
        """
        assert self._pipe is not None
        try:
            if self._pipe.poll(seconds):
                answer: tuple[str, Any] = self._pipe.recv()
                return answer
        except (EOFError, ConnectionError):
            return "died", self._how_it_ended()
        pid = self._process.pid if self._process is not None else 0
        if not self._end():
            raise MachineError(
                f"the evaluator's process {pid} did not answer for {seconds:g} s, and was there "
                f"{KILLED_S:g} s after it was killed: the driver holds it. Measure on another GPU, "
                "or restart the machine; all finished trials are kept"
            )
        return "hung", f"did not answer for {seconds:g} s and was killed"

    def _how_it_ended(self) -> str:
        process, output = self._process, self._output
        assert process is not None
        assert output is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - _TAIL))
        lines = output.read().decode("utf-8", "replace").strip().splitlines()
        code = process.poll()
        if code is None:
            how = "closed its pipe"
        elif code < 0:
            how = f"died of {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        self._end()
        return f"{how}: {lines[-1]}" if lines else how

    def _end(self) -> bool:
        """Kill the process, if there is one; whether it is gone."""
        process, self._process = self._process, None
        gone = True
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(KILLED_S)
            except subprocess.TimeoutExpired:
                gone = False
        for resource in (self._pipe, self._output):
            if resource is not None:
                resource.close()
        self._pipe = self._output = None
        return gone
