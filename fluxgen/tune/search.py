"""Tuning a whole model: few kernels, each problem's best configuration among them.

1. The model (:mod:`fluxgen.predict`) ranks every legal kernel for every problem.
2. At most ``max_kernels`` are chosen that together serve all problems (:mod:`.cover`).
3. Each problem is searched within them (:mod:`.plan`, :mod:`.study`), the baseline first.
4. Winners become records; where the baseline wins, the record says so.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from fluxgen.core.config import KernelConfig
from fluxgen.core.errors import MachineError, UsageError
from fluxgen.core.problem import Problem, Signature, check_int
from fluxgen.core.record import Environment, Provenance, Record
from fluxgen.core.settings import Settings
from fluxgen.core.topology import Topology
from fluxgen.core.version import __version__
from fluxgen.db.database import Database
from fluxgen.predict import predict_baseline
from fluxgen.tune.candidates import Candidates, Params
from fluxgen.tune.cover import Costs, choose_kernels
from fluxgen.tune.decide import Candidate, decide
from fluxgen.tune.evaluators.evaluator import Case, Evaluator, Measurement, versions_of
from fluxgen.tune.plan import History, shortlist
from fluxgen.tune.seeds import heuristic_tiles, seed_kernels

if TYPE_CHECKING:
    from fluxgen.tune.compiled import CompiledKernels
    from fluxgen.tune.study import Session

DEFAULT_TRIALS = 16
"""Candidates per problem: a trial costs about 30 ms of Optuna and SQLite, and the prediction has
ranked all candidates before."""

KNOWN_GOOD = 3
"""Winners of the same family (all but m equal) that are tried right after the baseline."""

BASELINE_S = 120.0
"""How long a tuner that has used up its trials waits for another one to time the baseline."""

PREDICTED_MARGIN = 0.05
"""A fused kernel must be predicted to save this share of the baseline's time to replace it: the
model's errors are of this size, and a kernel slower than the unfused path must not be shipped."""

MEASURED_MARGIN = 0.01
"""The same for measured times: about what two measurements of one kernel differ by."""

_log = logging.getLogger("fluxgen.tune")

Progress = Callable[[int, int, int, float, float], None]
"""Called after each trial: problem's index, problems, trials done, best and baseline in us."""


@dataclass(frozen=True)
class TuneResult:
    """What a tuning run found.

    Attributes:
        records: one per tuned problem, in the order given.
        kernels: distinct kernels that the records use (what has to be compiled).
        dropped: problems not tuned, and why. failed: problems without even a baseline, and why.
        unfinished: problems whose search was cut short (by a timeout or Ctrl-C); they may have a
            record all the same. evaluated: candidates evaluated by this call.
        interrupted: whether Ctrl-C ended it; the same call with the same storage resumes.
    """

    records: tuple[Record, ...]
    kernels: tuple[KernelConfig, ...]
    dropped: tuple[tuple[Problem, str], ...] = ()
    failed: tuple[tuple[Problem, str], ...] = ()
    unfinished: tuple[Problem, ...] = ()
    evaluated: int = 0
    interrupted: bool = False


@dataclass
class _Task:
    candidates: Candidates
    weight: int
    known: History = field(default_factory=History)
    known_good: list[tuple[KernelConfig, Params]] = field(default_factory=list)
    history: History = field(default_factory=History)
    done: bool = False

    @property
    def problem(self) -> Problem:
        return self.candidates.problem


def default_storage() -> str:
    """The SQLite file of all studies, under ``FLUXGEN_HOME``."""
    return f"sqlite:///{Settings.load().home / 'studies.sqlite3'}"


def searches(storage: str, topology: str) -> dict[str, list[float | None]]:
    """How the searches on a topology went: see ``study.progress``.

    Raises:
        UsageError: Optuna is not installed, or the storage cannot be opened.
    """
    try:
        from fluxgen.tune.study import progress
    except ImportError as error:
        raise UsageError(
            f"searches need Optuna: pip install 'fluxgen-kernels[tune]' ({error})"
        ) from None
    return progress(storage, topology)


def study_name(candidates: Candidates, kind: str) -> str:
    """The study of a problem: everything that makes old trials incomparable is in its name."""
    topology = candidates.topology
    link = f"{topology.bandwidth_gbs:g}GBs-{topology.latency_us:g}us"
    return f"{candidates.problem.key}|{topology.key}|{link}|{kind}|{candidates.version}"


def tune(
    problems: Iterable[Problem],
    topology: Topology,
    *,
    evaluator: Evaluator,
    trials: int = DEFAULT_TRIALS,
    timeout: float | None = None,
    storage: str | None = None,
    db: Database | None = None,
    seed: int = 0,
    max_kernels: int = 24,
    counts: Mapping[Problem, int] | None = None,
    progress: Progress | None = None,
    sink: Callable[[Record], object] | None = None,
    compiled: CompiledKernels | None = None,
    known: Sequence[Record] = (),
) -> TuneResult:
    """Find the best configuration of each problem.

    Args:
        problems: what to tune; duplicates are tuned once. topology: where it will run.
        evaluator: times candidates. trials: candidates per problem, over all runs of its study
            and with the baseline. timeout: seconds for the whole call.
        storage: of Optuna (see ``study.open_storage``); None: ``default_storage()``.
        db: known winners and failures are read from it, new failures written to it.
        seed: of the sampler: the same seed gives the same trials, resumed or not.
        max_kernels: most distinct kernels of all records. counts: how often each problem occurs
            (default: as often as it is given). progress: see :data:`Progress`.
        sink: takes each record, e.g. ``Database.put``.
        compiled: for an evaluator that runs kernels: compiles those chosen, ahead of it.
        known: records beside those of ``db``, e.g. of shipped packs, whose winners are tried first.

    Ctrl-C returns what was found, with ``interrupted`` set; every finished trial is kept, also when
    a :class:`MachineError` ends the call.

    Raises:
        UsageError: a nonsensical argument, a problem of another tp than the topology's world, a
            storage that cannot be opened, or Optuna is not installed.
        MachineError: the evaluator cannot go on; the candidate at hand is not blamed for it.
    """
    check_int("trials", trials, 1, 1_000_000)
    check_int("max_kernels", max_kernels, 1, 10_000)
    check_int("seed", seed, 0)
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout: expected seconds above 0, or None; found {timeout!r}")
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        from fluxgen.tune.study import Session, open_storage
    except ImportError as error:
        raise UsageError(
            f"tuning needs Optuna: pip install 'fluxgen-kernels[tune]' ({error})"
        ) from None
    backend = open_storage(storage or default_storage())
    tasks, dropped = _tasks(problems, topology, counts)
    interrupted, evaluated = False, 0
    try:
        for task in tasks:
            _consult(task, topology, db, known)
            if compiled is not None:
                _leave_out(task, compiled)
        chosen = _choose(tasks, topology, max_kernels)
        if compiled is not None:
            compiled.expect(_wanted(tasks, chosen, trials))
        for index, task in enumerate(tasks):
            if deadline is not None and time.monotonic() >= deadline:
                break
            session = Session(
                backend,
                study_name(task.candidates, evaluator.kind),
                task.candidates,
                _shortlist(task, chosen, trials),
                seed,
                task.known,
                [params for kernel, params in task.known_good if kernel in chosen],
                _failure_sink(task.problem, topology, db),
            )
            try:
                report = None if progress is None else _reporter(progress, index, len(tasks))
                evaluated += _search(
                    session, task, topology, evaluator, trials, deadline, report, compiled
                )
            finally:
                task.history = session.history()
                session.close()
    except KeyboardInterrupt:
        interrupted = True
    records, failed = _records(tasks, topology, evaluator, max_kernels)
    for record in records:
        if sink is not None:
            sink(record)
    used = tuple(dict.fromkeys(r.kernel for r in records if r.kernel is not None))
    return TuneResult(
        records=tuple(records),
        kernels=used,
        dropped=tuple(dropped),
        failed=tuple(failed),
        unfinished=tuple(task.problem for task in tasks if not task.done),
        evaluated=evaluated,
        interrupted=interrupted,
    )


def _tasks(
    problems: Iterable[Problem], topology: Topology, counts: Mapping[Problem, int] | None
) -> tuple[list[_Task], list[tuple[Problem, str]]]:
    given = Counter(problems)
    tasks, dropped = [], []
    for problem, times in given.items():
        if problem.tp != topology.world:
            raise UsageError(
                f"problem {problem.key}: expected tp to be the topology's world "
                f"{topology.world}; found {problem.tp}"
            )
        if problem.m == 0 or problem.k == 0:
            reason = f"m={problem.m}, k={problem.k}: nothing to compute, not tuned"
            _log.warning("%s: %s", problem.key, reason)
            dropped.append((problem, reason))
            continue
        weight = times if counts is None else counts.get(problem, times)
        tasks.append(_Task(Candidates(problem, topology), check_int("count", weight, 0)))
    return tasks, dropped


def _consult(task: _Task, topology: Topology, db: Database | None, known: Sequence[Record]) -> None:
    """Read what is known of a problem: failures, and winners of its family, the nearest m first."""
    problem, found = task.problem, list(known)
    if db is not None:
        for failure in db.failures(problem, topology):
            if failure.run is None:
                task.known.dead.add(failure.kernel)
            else:
                task.known.failed[failure.kernel, failure.run] = failure.reason
        found = [*db.find(problem, topology), *known]
    family = [r for r in found if replace(r.problem, m=problem.m) == problem]
    for record in sorted(family, key=lambda r: (abs(r.problem.m - problem.m), r.problem.m)):
        if record.kernel is None or record.run is None or record.topology != topology.key:
            continue
        params = task.candidates.encode(record.kernel, record.run)
        good = None if params is None else (record.kernel, params)
        if good is None or good in task.known_good:
            continue
        if task.known.unseen(record.kernel, record.run):
            task.known_good.append(good)
        if len(task.known_good) == KNOWN_GOOD:
            break


def _leave_out(task: _Task, compiled: CompiledKernels) -> None:
    """Do not try what cannot be had on this machine; it is not remembered as failed."""
    for kernel in task.candidates.kernels:
        if compiled.unusable(task.problem.signature, kernel):
            task.known.dead.add(kernel)


def _shortlist(
    task: _Task, chosen: Sequence[KernelConfig], trials: int
) -> tuple[KernelConfig, ...]:
    alive = [kernel for kernel in chosen if kernel not in task.known.dead]
    return shortlist(task.candidates, alive, trials)


def _wanted(
    tasks: Sequence[_Task], chosen: Sequence[KernelConfig], trials: int
) -> list[tuple[Signature, KernelConfig]]:
    """What will be compiled, in the order in which the search needs it."""
    return [
        (task.problem.signature, kernel)
        for task in tasks
        for kernel in _shortlist(task, chosen, trials)
    ]


def _choose(
    tasks: Sequence[_Task], topology: Topology, max_kernels: int
) -> tuple[KernelConfig, ...]:
    costs = []
    hints: Counter[KernelConfig] = Counter()
    tiles = heuristic_tiles([task.problem for task in tasks], topology)
    for task in tasks:
        prior = {k: t for k, t in task.candidates.prior.items() if k not in task.known.dead}
        baseline = predict_baseline(task.problem, topology).time_us
        # Where prediction favours the baseline a kernel is still tried if there is room for it:
        # it may measure better, and the baseline is a candidate anyway.
        costs.append(
            Costs(max(baseline, 1.02 * min(prior.values(), default=0)), task.weight, prior)
        )
        hints.update(kernel for kernel, _ in task.known_good)
        hints.update(seed_kernels(tiles.get(task.problem, ()), tuple(prior)))
    preferred = sorted(hints, key=lambda kernel: (-hints[kernel], kernel))[: max_kernels // 2]
    return choose_kernels(costs, max_kernels, preferred)


def _search(
    session: Session, task: _Task, topology: Topology, evaluator: Evaluator, trials: int,
    deadline: float | None, report: Callable[[History, int], None] | None,
    compiled: CompiledKernels | None,
) -> int:  # fmt: skip
    """Evaluate candidates until the study has ``trials`` of them; returns how many were new."""
    evaluated = 0
    history = session.history()
    if history.size < trials:
        for trial, candidate, before in session.ask():
            try:
                measurement = _evaluate(evaluator, task.problem, topology, candidate, compiled)
            except BaseException:
                session.abandon(trial)
                raise
            session.tell(trial, candidate, measurement)
            evaluated += 1
            size = before.size + 1
            if report is not None:
                report(before, size)
            if size >= trials or (candidate is None and not measurement.ok):
                break  # without a baseline nothing can be known to be faster
            if deadline is not None and time.monotonic() >= deadline:
                return evaluated
    elif report is not None:
        report(history, history.size)
    patience = time.monotonic() + BASELINE_S
    while session.baseline_pending() and time.monotonic() < min(patience, deadline or math.inf):
        time.sleep(0.05)
    task.done = True
    return evaluated


def _evaluate(
    evaluator: Evaluator,
    problem: Problem,
    topology: Topology,
    candidate: Candidate,
    compiled: CompiledKernels | None,
) -> Measurement:
    kernel, run = candidate if candidate is not None else (None, None)
    if kernel is not None and compiled is not None:
        reason = compiled.wait(problem.signature, kernel)
        if reason:
            return Measurement.failure(evaluator.provenance, reason, kernel_failed=True)
    try:
        return evaluator.measure(Case(problem, topology, kernel, run))
    except MachineError:
        raise
    except Exception as error:  # one bad candidate must not end the run
        return Measurement.failure(evaluator.provenance, f"{type(error).__name__}: {error}")


def _reporter(progress: Progress, index: int, total: int) -> Callable[[History, int], None]:
    def report(history: History, size: int) -> None:
        best = min(history.times.values(), default=float("inf"))
        progress(index, total, size, best, history.times.get(None, float("inf")))

    return report


def _failure_sink(
    problem: Problem, topology: Topology, db: Database | None
) -> Callable[[Candidate, str, bool], None]:
    def failed(candidate: Candidate, reason: str, kernel_failed: bool) -> None:
        if db is not None and candidate is not None:
            kernel, run = candidate
            db.put_failure(problem, topology, kernel, None if kernel_failed else run, reason)

    return failed


def _records(
    tasks: Sequence[_Task], topology: Topology, evaluator: Evaluator, max_kernels: int
) -> tuple[list[Record], list[tuple[Problem, str]]]:
    """Each problem's winner, with at most ``max_kernels`` kernels among them."""
    ready = [task for task in tasks if None in task.history.times]
    winners = [decide([task.history.times])[0] for task in ready]
    allowed = {winner[0] for winner in winners if winner is not None}
    if len(allowed) > max_kernels:
        costs = [
            Costs(task.history.times[None], task.weight, task.history.per_kernel())
            for task in ready
        ]
        allowed = set(choose_kernels(costs, max_kernels))
    environment = Environment(
        gpu=topology.gpu.name,
        sm_count=topology.gpu.sm_count,
        fluxgen=__version__,
        method=evaluator.method(topology),
        **versions_of(evaluator),
    )
    created = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    records = []
    for task in ready:
        times = {c: t for c, t in task.history.times.items() if c is None or c[0] in allowed}
        if len(times) == 1 and not task.done:
            continue  # only the baseline was timed before the search was cut short
        winner, time_us = decide([times])
        predicted = evaluator.provenance is Provenance.PREDICTED
        margin = PREDICTED_MARGIN if predicted else MEASURED_MARGIN
        if time_us > (1 - margin) * times[None]:
            winner, time_us = None, times[None]
        kernel, run = winner if winner is not None else (None, None)
        records.append(
            Record(
                task.problem,
                topology.key,
                kernel,
                run,
                time_us,
                times[None],
                evaluator.provenance,
                environment,
                created=created,
                baseline=evaluator.baseline(task.problem, topology),
            )
        )
    failed = [
        (task.problem, task.history.failed.get(None, "the baseline was not timed"))
        for task in tasks
        if task.done and None not in task.history.times
    ]
    return records, failed
