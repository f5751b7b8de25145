"""Optuna, by ask and tell: the only module that imports it.

One study per (problem, topology, evaluator, search space). A trial is committed by ``tell``, so
killing the process at any moment loses at most the candidate being evaluated. Optuna's heartbeat
does not cover ask and tell: a session fails the RUNNING trials of dead processes itself.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState

from fluxgen.core.config import KernelConfig
from fluxgen.core.errors import UsageError
from fluxgen.db.mounts import network_filesystem
from fluxgen.tune import plan
from fluxgen.tune.candidates import KNOBS, Candidates, Params
from fluxgen.tune.decide import Candidate
from fluxgen.tune.evaluators.evaluator import Measurement
from fluxgen.tune.owners import PREFIX, others_alive, this_owner

_log = logging.getLogger("fluxgen.tune")

BASELINE = "baseline"
BUSY_S = 120.0
"""How long a writer waits for other processes' transactions, each of a few milliseconds."""

STALE_AFTER = timedelta(hours=1)
"""No candidate takes this long: an older RUNNING trial is dead, whoever owned it."""

CLAIM_S = 5.0
"""How long a tuner may take to write down what it has just proposed, each value a transaction."""

VOID = "void"
"""Attribute of a trial that says nothing about its candidate: it was interrupted or died once."""

JOURNAL_GRACE_S = 10
"""Seconds after which a journal's lock is taken for one left behind by a killed tuner."""


def open_storage(url: str) -> Any:
    """An Optuna storage: ``memory``, ``journal:PATH``, or any URL that Optuna takes.

    SQLite files are put in WAL mode (readers block nobody), writers queue for up to ``BUSY_S``
    seconds, and a transaction takes the write lock at its start: upgrading a read lock later
    fails at once, with "database is locked", whatever the timeout.

    Raises:
        UsageError: the URL cannot be opened; says why.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Ctrl-C while a connection is closed is logged there with its traceback; it is raised as well.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    try:
        if url == "memory":
            return optuna.storages.InMemoryStorage()
        if url.startswith("journal:"):
            path = url.removeprefix("journal:")
            Path(path).resolve().parent.mkdir(parents=True, exist_ok=True)
            journal = optuna.storages.journal
            lock = journal.JournalFileSymlinkLock(path, grace_period=JOURNAL_GRACE_S)
            backend = journal.JournalFileBackend(path, lock_obj=lock)
            return optuna.storages.JournalStorage(backend)
        if url.startswith("sqlite:///"):
            return _open_sqlite(url)
        return optuna.storages.RDBStorage(url)
    except Exception as error:  # SQLAlchemy, drivers and Optuna each raise their own
        detail = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"storage: expected memory, journal:PATH, sqlite:///PATH or another SQLAlchemy URL "
            f"that can be opened; found {url!r}: {detail[0]}"
        ) from None


def _open_sqlite(url: str) -> Any:
    from sqlalchemy import event  # comes with optuna

    path = Path(url.removeprefix("sqlite:///").partition("?")[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = network_filesystem(path)
    if kind:
        _log.warning(
            "%s is on a network file system (%s): SQLite's locks may fail there", path, kind
        )
    # Creating the tables is not atomic: of many processes that start at once, some would fail.
    with FileLock(f"{path}.lock", timeout=BUSY_S):
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
        storage = optuna.storages.RDBStorage(
            url, engine_kwargs={"connect_args": {"timeout": BUSY_S}}
        )

    def connected(connection: Any, _: object) -> None:
        connection.isolation_level = None  # or the driver would begin transactions itself
        # In WAL mode this loses nothing when the process is killed, only when the host is.
        connection.execute("PRAGMA synchronous=NORMAL")

    event.listen(storage.engine, "connect", connected)
    event.listen(storage.engine, "begin", lambda c: c.exec_driver_sql("BEGIN IMMEDIATE"))
    storage.scoped_session.remove()
    storage.engine.dispose()  # so that connections opened so far are opened anew
    return storage


def progress(url: str, topology: str) -> dict[str, list[float | None]]:
    """The trials of every search on a topology, in their order: microseconds, None: failed.

    Args:
        url: of the storage. topology: its key.

    Raises:
        UsageError: the storage cannot be opened.
    """
    storage = open_storage(url)
    found: dict[str, list[float | None]] = {}
    for name in optuna.study.get_all_study_names(storage):
        problem, _, rest = name.partition("|")
        if rest.partition("|")[0] != topology:
            continue
        trials = optuna.load_study(study_name=name, storage=storage).get_trials(deepcopy=False)
        kind = rest.split("|")[2] if rest.count("|") >= 2 else ""
        found[f"{problem} ({kind})"] = [
            t.value if t.state == TrialState.COMPLETE else None
            for t in trials
            if t.state.is_finished() and VOID not in t.user_attrs
        ]
    return found


class _Sampler(optuna.samplers.BaseSampler):  # type: ignore[misc]
    """Gives a trial all its parameters at once, as the session's plan says."""

    def __init__(self, propose: Callable[[Any, Any], Params], space: dict[str, Any]) -> None:
        self._propose, self._space = propose, space

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return self._space

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> Params:
        return self._propose(study, trial)

    def sample_independent(self, study: Any, trial: Any, name: str, dist: Any) -> Any:
        return dist.choices[0]


class Session:
    """One problem's study, opened by this process.

    Args:
        storage: of :func:`open_storage`. name: the study's. candidates: the problem's space.
        kernels: those that may be tried, in order. seed: of the sampler. known: what is known to
            have failed elsewhere. known_good: configurations to try right after the baseline.
        on_failure: told of each candidate that must not be proposed again.
    """

    def __init__(
        self,
        storage: Any,
        name: str,
        candidates: Candidates,
        kernels: Sequence[KernelConfig],
        seed: int,
        known: plan.History,
        known_good: Sequence[Params] = (),
        on_failure: Callable[[Candidate, str, bool], None] = lambda *_: None,
    ) -> None:
        self.name, self.candidates, self.kernels, self.seed = name, candidates, kernels, seed
        self._known, self._on_failure = known, on_failure
        self._space = {"kernel": CategoricalDistribution((BASELINE, *candidates.by_name))}
        if candidates.kernels:
            for knob, values in candidates.choices.items():
                self._space[knob] = CategoricalDistribution(values)
        sampler = _Sampler(self._propose, self._space)
        self.study = optuna.create_study(
            storage=storage, sampler=sampler, study_name=name, load_if_exists=True
        )
        self._history = plan.History()
        self._owner = this_owner()
        self.study.set_user_attr(self._owner, _now().isoformat())
        self._recover()
        if not self._trials():
            for params in ({"kernel": BASELINE}, *known_good):
                self.study.enqueue_trial(params)

    def close(self) -> None:
        """Say that this process works on the study no more."""
        self.study.set_user_attr(self._owner, "")

    def _trials(self) -> list[Any]:
        trials: list[Any] = self.study.get_trials(deepcopy=False)
        return trials

    def _recover(self) -> None:
        """Fail the RUNNING trials of dead processes, and queue each candidate once more."""
        attributes = self.study.user_attrs.items()
        owners = [key for key, value in attributes if key.startswith(PREFIX) and value]
        shared = others_alive(owners, self._owner)
        trials = self._trials()
        retried = {trial.user_attrs.get("retry_of") for trial in trials}
        for trial in trials:
            if trial.state != TrialState.RUNNING:
                continue
            started = trial.datetime_start or datetime.now()
            if shared and datetime.now() - started < STALE_AFTER:
                continue
            params = trial.params or trial.system_attrs.get("fixed_params", {})
            if "retry_of" in trial.user_attrs:
                reason = "the process died twice while evaluating it"
                self._fail(trial.number, trial._trial_id, self._candidate(params), reason)
                continue
            self._note(trial._trial_id, VOID, "the process died")
            if params and trial.number not in retried:
                self.study.enqueue_trial(params, user_attrs={"retry_of": trial.number})
            self.study.tell(trial.number, state=TrialState.FAIL, skip_if_finished=True)

    def _candidate(self, params: Params) -> Candidate:
        if params.get("kernel", BASELINE) == BASELINE:
            return None
        defaults = {knob: self._space[knob].choices[0] for knob in KNOBS}
        return self.candidates.decode({**defaults, **params})

    def history(self) -> plan.History:
        """What all finished and running trials, of any process, say."""
        return self._read(self._trials())

    def baseline_pending(self) -> bool:
        """Whether another tuner is timing the baseline, which nobody has done yet.

        Or may be: a trial that has just been begun does not say yet what it is of.
        """
        trials = self._trials()
        history = self._read(trials)
        if None in history.times or None in history.failed:
            return False
        unnamed = any(
            trial.state == TrialState.RUNNING
            and VOID not in trial.user_attrs
            and not self._complete(trial.params)
            for trial in trials
        )
        return unnamed or None in history.open

    def _read(self, trials: Sequence[Any]) -> plan.History:
        known = self._known
        out = plan.History(failed=dict(known.failed), dead=set(known.dead))
        for trial in trials:
            if trial.state == TrialState.WAITING or VOID in trial.user_attrs or not trial.params:
                continue
            candidate = self._candidate(trial.params)
            out.used[candidate[0] if candidate else None] += 1
            if trial.state == TrialState.COMPLETE:
                out.times.setdefault(candidate, trial.value)
                beside = trial.user_attrs.get("baseline_us", trial.value)
                if candidate is None or "baseline_us" in trial.user_attrs:
                    out.baselines.setdefault(candidate, beside)
            elif trial.state == TrialState.FAIL:
                out.failed[candidate] = trial.user_attrs.get("reason", "")
                if candidate and trial.user_attrs.get("kernel_failed"):
                    out.dead.add(candidate[0])
            else:
                out.open.add(candidate)
        base = out.times.get(None, math.inf)
        for candidate, beside in out.baselines.items():
            if candidate is not None and math.isfinite(base) and beside > 0:
                out.times[candidate] *= base / beside
        return out

    def ask(self) -> Iterator[tuple[Any, Candidate, plan.History]]:
        """Trials to evaluate, each followed by a :meth:`tell`, until everything was tried."""
        while True:
            trials = self._trials()
            history = self._history = self._read(trials)
            queued = any(trial.state == TrialState.WAITING for trial in trials)
            if not queued and plan.next_step(self.candidates, history, self.kernels) is None:
                return
            trial = self.study.ask()
            try:
                kernel = trial.suggest_categorical("kernel", self._space["kernel"].choices)
                if kernel != BASELINE:
                    for knob in KNOBS:
                        trial.suggest_categorical(knob, self._space[knob].choices)
            except optuna.exceptions.UpdateFinishedTrialError:
                # On a busy machine this took so long that another tuner thinks its owner dead.
                continue
            candidate = self._candidate(trial.params)
            if candidate in history.times:
                self._tell(trial, history.times[candidate])
            elif candidate in history.failed or (candidate and candidate[0] in history.dead):
                reason = history.failed.get(candidate, "its kernel failed before")
                self._fail(trial.number, trial._trial_id, candidate, reason, report=False)
            elif self._taken(trial, candidate):
                self._note(trial._trial_id, VOID, "another tuner has it")
                self.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)
            else:
                yield trial, candidate, history

    def _taken(self, trial: Any, candidate: Candidate) -> bool:
        """Whether a trial of a lower number, of another tuner, is of this candidate.

        Two that ask at once may propose the same. Each has written down what it proposes before it
        looks; the higher number waits for what the lower ones, just begun, have yet to write.
        """
        deadline = time.monotonic() + CLAIM_S
        while True:
            writing = False
            for other in self._trials():
                if other.number >= trial.number or VOID in other.user_attrs:
                    continue
                if other.state == TrialState.WAITING:
                    continue
                if self._complete(other.params):
                    if self._candidate(other.params) == candidate:
                        return True
                elif other.state == TrialState.RUNNING and other.datetime_start is not None:
                    age = datetime.now() - other.datetime_start
                    writing |= age < timedelta(seconds=CLAIM_S)
            if not writing or time.monotonic() > deadline:
                return False
            time.sleep(0.005)

    def _complete(self, params: Params) -> bool:
        return params.get("kernel") == BASELINE or {"kernel", *KNOBS} <= params.keys()

    def _propose(self, study: Any, trial: Any) -> Params:
        """Parameters of a legal candidate that no trial has had."""
        history = self._history
        step = plan.next_step(self.candidates, history, self.kernels)
        if step is None:
            return {"kernel": BASELINE}
        kernel, run, exactly = step
        fallback = self.candidates.encode(kernel, run)
        if fallback is None:
            raise AssertionError(f"{kernel.name}: a ranked run outside its own space: {run}")
        if exactly:
            return fallback
        # Seeded by what is known, not by a generator's state, which a killed process would lose.
        draw = random.Random(f"{self.seed}/{self.name}/{history.size}")  # noqa: S311
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            tpe = optuna.samplers.TPESampler(
                seed=draw.randrange(2**31), multivariate=True, constant_liar=False,
                n_startup_trials=8,
            )  # fmt: skip
        space = {knob: self._space[knob] for knob in KNOBS}
        for _ in range(8):
            knobs = tpe.sample_relative(study, trial, space) or {
                knob: draw.choice(distribution.choices) for knob, distribution in space.items()
            }
            decoded = self.candidates.decode({"kernel": kernel.name, **knobs})
            if history.unseen(*decoded):
                return self.candidates.encode(*decoded) or fallback
        return fallback

    def tell(self, trial: Any, candidate: Candidate, measurement: Measurement) -> None:
        """Commit a measurement. A trial that another process has finished is left alone."""
        if measurement.ok and math.isfinite(measurement.time_us):
            base = self._history.times.get(None)
            if candidate is not None and base != measurement.baseline_us:
                self._note(trial._trial_id, "baseline_us", measurement.baseline_us)
            self._tell(trial, measurement.time_us)
            self._history.times.setdefault(candidate, measurement.time_us)
            return
        reason = measurement.reason or f"not a finite time: {measurement.time_us}"
        if measurement.kernel_failed:
            self._note(trial._trial_id, "kernel_failed", True)
        self._fail(trial.number, trial._trial_id, candidate, reason, measurement.kernel_failed)

    def abandon(self, trial: Any) -> None:
        """The evaluation was interrupted: the candidate is queued again, for a resume."""
        self._note(trial._trial_id, VOID, "interrupted")
        self.study.enqueue_trial(trial.params)
        self.study.tell(trial, state=TrialState.FAIL, skip_if_finished=True)

    def _note(self, trial_id: int, key: str, value: object) -> None:
        # Another process may have finished the trial meanwhile; then its word stands.
        with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
            self.study._storage.set_trial_user_attr(trial_id, key, value)

    def _tell(self, trial: Any, value: float) -> None:
        self.study.tell(trial, value, skip_if_finished=True)

    def _fail(
        self, number: int, trial_id: int, candidate: Candidate, reason: str,
        kernel_failed: bool = False, report: bool = True,
    ) -> None:  # fmt: skip
        self._note(trial_id, "reason", reason)
        self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)
        if report:
            self._on_failure(candidate, reason, kernel_failed)


def _now() -> datetime:
    return datetime.now(timezone.utc)
