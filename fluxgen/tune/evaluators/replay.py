"""Recorded trials: kept while something evaluates, and evaluated again without it.

A file holds one trial a line, as JSON, in the order in which they were made: what was asked, the
figures, how they were obtained. So a search can be tested, and compared with another or with an
exhaustive sweep, on measured times and without a GPU.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.errors import UsageError
from fluxgen.core.problem import Problem
from fluxgen.core.record import Baseline, Provenance
from fluxgen.core.topology import Topology
from fluxgen.tune.evaluators.evaluator import Case, Evaluator, Measurement, versions_of

__all__ = ["Recorder", "ReplayEvaluator"]

_Key = tuple[str, str, str, str]


class Recorder(Evaluator):
    """An evaluator that appends each trial of another to a file.

    Args:
        evaluator: whose. path: a JSON Lines file; what is there stays.

    Raises:
        UsageError: the file cannot be written.
    """

    def __init__(self, evaluator: Evaluator, path: Path | str) -> None:
        self._evaluator, self._path = evaluator, Path(path)
        # Asked once: they may be another process's to say.
        self._methods: dict[Topology, str] = {}
        self._baselines: dict[tuple[Problem, Topology], Baseline | None] = {}
        self.kind, self.provenance = evaluator.kind, evaluator.provenance
        self.versions = versions_of(evaluator)
        try:
            with self._path.open("a", encoding="utf-8"):
                pass
        except OSError as error:
            raise UsageError(f"record trials: cannot write {path}: {error}") from None

    def method(self, topology: Topology) -> str:
        """The evaluator's own."""
        if topology not in self._methods:
            self._methods[topology] = self._evaluator.method(topology)
        return self._methods[topology]

    def baseline(self, problem: Problem, topology: Topology) -> Baseline | None:
        """The evaluator's own."""
        if (problem, topology) not in self._baselines:
            self._baselines[problem, topology] = self._evaluator.baseline(problem, topology)
        return self._baselines[problem, topology]

    def measure(self, case: Case) -> Measurement:
        """The evaluator's own."""
        problem, topology, kernel, run = case.problem, case.topology, case.kernel, case.run
        found = self._evaluator.measure(case)
        baseline = self.baseline(problem, topology)
        trial = {
            "problem": problem.key,
            "topology": topology.key,
            "kernel": None if kernel is None else kernel.to_dict(),
            "run": None if run is None else run.to_dict(),
            "time_us": found.time_us if math.isfinite(found.time_us) else None,
            "baseline_us": found.baseline_us if math.isfinite(found.baseline_us) else None,
            "spread": found.spread,
            "provenance": found.provenance.value,
            "method": self.method(topology),
            "baseline": None if baseline is None else baseline.value,
            "reason": found.reason,
            "kernel_failed": found.kernel_failed,
        }
        line = (json.dumps(trial, sort_keys=True) + "\n").encode()
        # One write to a file opened for appending: tuners side by side mix lines, never within one.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
        return found


class ReplayEvaluator(Evaluator):
    """Trials out of a file of :class:`Recorder`; of one asked twice, the last.

    What was not recorded fails and says so. The ratio to the baseline is the recorded one: a trial
    brings the baseline that was timed beside it.

    Attributes:
        kind: holds a digest of the file, so that studies of different recordings are kept apart.
        provenance: of the recorded trials. trials: how many different ones there are.

    Raises:
        UsageError: the file cannot be read, a line is no trial (named by its number), there is
            none, or trials of different provenance are mixed.
    """

    def __init__(self, path: Path | str) -> None:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(f"replay: cannot read {path}: {error}") from None
        self._found: dict[_Key, Measurement] = {}
        self._methods: dict[str, str] = {}
        self._baselines: dict[tuple[str, str], Baseline | None] = {}
        for number, line in enumerate(content.splitlines(), 1):
            try:
                trial = json.loads(line)
                key, measurement = _read(trial)
                self._methods[trial["topology"]] = str(trial["method"])
                stated = trial.get("baseline")  # older files have none
                self._baselines[key[:2]] = None if stated is None else Baseline(stated)
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"replay: {path}:{number}: expected a recorded trial; found {line[:80]!r}: "
                    f"{type(error).__name__}: {error}"
                ) from None
            self._found[key] = measurement
        provenances = {measurement.provenance for measurement in self._found.values()}
        if len(provenances) != 1:
            names = ", ".join(sorted(p.value for p in provenances)) or "none"
            raise UsageError(f"replay: {path}: expected trials of one provenance; found {names}")
        (self.provenance,) = provenances
        self.kind = f"replay-{hashlib.sha256(content).hexdigest()[:10]}"
        self.trials = len(self._found)

    def method(self, topology: Topology) -> str:
        """That of the recorded trials."""
        return self._methods.get(topology.key, "no trial recorded")

    def baseline(self, problem: Problem, topology: Topology) -> Baseline | None:
        """That of the recorded trials; None where none was stated."""
        return self._baselines.get((problem.key, topology.key))

    def measure(self, case: Case) -> Measurement:
        """The recorded figures of one candidate."""
        key = (case.problem.key, case.topology.key, _text(case.kernel), _text(case.run))
        found = self._found.get(key)
        return found or Measurement.failure(self.provenance, "not among the recorded trials")


def _text(config: KernelConfig | RunConfig | None) -> str:
    return "" if config is None else json.dumps(config.to_dict(), sort_keys=True)


def _read(trial: dict[str, Any]) -> tuple[_Key, Measurement]:
    kernel = None if trial["kernel"] is None else KernelConfig.from_dict(trial["kernel"])
    run = None if trial["run"] is None else RunConfig.from_dict(trial["run"])
    key = (str(trial["problem"]), str(trial["topology"]), _text(kernel), _text(run))
    provenance = Provenance(trial["provenance"])
    if trial["time_us"] is None:
        reason, dead = str(trial["reason"]), bool(trial["kernel_failed"])
        return key, Measurement.failure(provenance, reason, kernel_failed=dead)
    spread = float(trial.get("spread", 0.0))  # older files have none
    times = float(trial["time_us"]), float(trial["baseline_us"])
    return key, Measurement(*times, provenance, spread=spread)
