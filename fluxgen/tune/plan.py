"""Which candidate comes next: pure functions of what a study already knows.

The order: the baseline, known winners, then kernel after kernel (the predicted best first), each
with its predicted best run configurations and then what the sampler proposes, before another
kernel has to be built; what is left of the budget goes to the fastest kernel so far.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.tune.candidates import Candidates
from fluxgen.tune.decide import Candidate

RUNS_PER_KERNEL = 4
"""Run configurations tried on a kernel before the next kernel is built."""

RANKED_RUNS = 2
"""How many of them are the predicted best; the sampler proposes the others."""

HOPELESS = 1.3
"""A kernel predicted to take this much longer than the best one is not tried."""

GIVEN_UP = 1.25
"""A kernel whose best configuration so far took this much longer than the best of all gets no
further one. Of the 374 trials of GPT-3 175B on an H200 (``tests/bench/data``) 1.2 would have saved
21 and lost nothing, 1.15 would have lost 6.5 % once: knobs made a kernel up to 21 % faster."""


@dataclass
class History:
    """What is known of a problem's candidates.

    Attributes:
        times: finished candidates, microseconds (corrected for drift of the baseline).
        baselines: the baseline's time measured beside them, microseconds.
        failed: never to be proposed. dead: kernels of which every run configuration failed.
        open: being evaluated now. used: trials per kernel (None: the baseline).
    """

    times: dict[Candidate, float] = field(default_factory=dict)
    baselines: dict[Candidate, float] = field(default_factory=dict)
    failed: dict[Candidate, str] = field(default_factory=dict)
    dead: set[KernelConfig] = field(default_factory=set)
    open: set[Candidate] = field(default_factory=set)
    used: Counter[KernelConfig | None] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        """Trials that count against the budget."""
        return sum(self.used.values())

    def unseen(self, kernel: KernelConfig, run: RunConfig) -> bool:
        """Whether this candidate may still be proposed."""
        candidate = (kernel, run)
        return (
            kernel not in self.dead
            and candidate not in self.times
            and candidate not in self.failed
            and candidate not in self.open
        )

    def best_of(self, kernel: KernelConfig) -> float:
        """The kernel's best time so far, infinite if it has none."""
        own = (time for c, time in self.times.items() if c is not None and c[0] == kernel)
        return min(own, default=math.inf)

    def per_kernel(self) -> dict[KernelConfig, float]:
        """Each finished kernel's best time, microseconds."""
        return {kernel: self.best_of(kernel) for kernel in {c[0] for c in self.times if c}}


def shortlist(
    candidates: Candidates, chosen: Sequence[KernelConfig], trials: int
) -> tuple[KernelConfig, ...]:
    """Those of the ``chosen`` kernels worth trying on this problem, the predicted best first."""
    legal = [kernel for kernel in candidates.prior if kernel in chosen]
    if not legal:
        return ()
    bound = HOPELESS * candidates.prior[legal[0]]
    room = max(1, (trials - 1) // RUNS_PER_KERNEL)
    return tuple(kernel for kernel in legal if candidates.prior[kernel] <= bound)[:room]


def first_unseen(
    candidates: Candidates, history: History, kernel: KernelConfig
) -> RunConfig | None:
    """The predicted best run configuration of ``kernel`` that was not tried, or None."""
    if kernel in history.dead:
        return None
    runs = candidates.ranked_runs(kernel)
    return next((run for run in runs if history.unseen(kernel, run)), None)


def next_step(
    candidates: Candidates, history: History, kernels: Sequence[KernelConfig]
) -> tuple[KernelConfig, RunConfig, bool] | None:
    """The next kernel, its best untried run configuration, and whether to take just that.

    If the last is False the sampler may propose another one. None: everything was tried.
    """
    best = min((history.best_of(k) for k in kernels), default=math.inf)
    alive = [k for k in kernels if not history.used[k] or history.best_of(k) <= GIVEN_UP * best]
    fresh = [k for k in alive if history.used[k] < RUNS_PER_KERNEL]
    fastest = sorted(alive, key=lambda k: (history.best_of(k), k))
    for kernel in (*fresh, *fastest):
        run = first_unseen(candidates, history, kernel)
        if run is not None:
            return kernel, run, history.used[kernel] < RANKED_RUNS
    return None
