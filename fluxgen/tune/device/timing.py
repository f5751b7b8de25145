"""Times of queued work: interleaved with the baseline, cold, until the median is known well enough.

Kernels of one run are compared, never of two: the clock falls under load, and a kernel timed after
another looks up to 10 % different from itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fluxgen.tune.device.alone import Queue

ROUND = 6
"""Timings of each candidate between two looks at the spread."""

MOST = 48
"""Timings of each candidate, at most."""

PRECISION = 0.003
"""Wanted: half of the interval that holds the median nineteen times in twenty, over the median."""

HOPELESS = 1.2
"""A candidate is not timed beyond its first round when it takes this much longer than the best."""

IN_FLIGHT = 48
"""Timings of few launches that are queued at once. With about 1000 launches queued the driver makes
the host wait, and with it the thread that raises the flags that the GPU waits for."""

_FLUSH_BYTES = 256 << 20  # several times any L2


@dataclass(frozen=True)
class Timing:
    """Microseconds of several runs.

    Attributes:
        median_us: their median. spread: half of its confidence interval, over the median.
        count: how many.
    """

    median_us: float
    spread: float
    count: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Timing:
        """The median of ``times`` and how well it is known (from the quartiles)."""
        median = statistics.median(times)
        low, _, high = statistics.quantiles(times, n=4) if len(times) > 1 else (median,) * 3
        # Of a normal distribution: sigma = range of quartiles / 1.349, of the median 1.253 sigma.
        half = 1.96 * 1.253 * (high - low) / 1.349 / len(times) ** 0.5
        return cls(median, half / median if median > 0 else 0.0, len(times))


class Stopwatch:
    """Times candidates on the current stream of the current device.

    Args:
        finish: called to wait for the GPU after each round; raises what went wrong there.
        in_flight: timings that are queued at once.
    """

    def __init__(self, finish: Callable[[], None], in_flight: int = IN_FLIGHT) -> None:
        self._finish, self._in_flight = finish, in_flight
        self._flushed = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def warm(self, work: Callable[[], None], ms: float = 30.0) -> None:
        """Keep the GPU busy with ``work`` for about so long, so that its clock is a loaded one."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        spent = 0.0
        while spent < ms:
            begin.record()
            for _ in range(8):
                work()
            end.record()
            end.synchronize()
            spent += max(begin.elapsed_time(end), 0.01)

    def interleaved(
        self,
        candidates: Mapping[str, Queue],
        best_us: float = float("inf"),
        judged: str = "",
        precision: float = PRECISION,
        most: int = MOST,
    ) -> dict[str, Timing]:
        """Time all candidates in turn, each after a flush of L2, until all are known well enough.

        Args:
            best_us: with ``judged``, the candidate that is given up after the first round if it is
                hopeless beside this.
        """
        times: dict[str, list[float]] = {name: [] for name in candidates}
        while True:
            for name, measured in self.round(candidates).items():
                times[name] += measured
            timings = {name: Timing.of(found) for name, found in times.items()}
            if judged and timings[judged].median_us > HOPELESS * best_us:
                return timings
            known = all(timing.spread <= precision for timing in timings.values())
            if known or min(map(len, times.values())) >= most:
                return timings

    def round(self, candidates: Mapping[str, Queue]) -> dict[str, list[float]]:
        """``ROUND`` times of each candidate, in microseconds, all in turn, each with a cold L2."""
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {}
        torch.cuda._sleep(400_000)  # so that the host is ahead of the GPU
        queued = 0
        for turn in range(ROUND + 1):
            for name, (before, work) in candidates.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self._flushed.zero_()
                before()
                begin.record()
                work()
                end.record()
                queued += 1
                if queued % self._in_flight == 0:
                    self._finish()
                if turn:  # the first one of each finds an idle or a changed GPU
                    events.setdefault(name, []).append((begin, end))
        self._finish()
        return {
            name: [1000 * begin.elapsed_time(end) for begin, end in pairs]
            for name, pairs in events.items()
        }
