"""What a search is doing, while it does it: one row a problem, and how long it may still take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from fluxgen.core.problem import Problem

ROWS = 18
"""Problems shown at once: those around the one that is being searched."""


def _us(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "-"


class TuneTable:
    """Problem, trials, best and unfused time, speedup; time left.

    On a terminal the table is redrawn in place. Elsewhere, such as in a log, each problem is one
    line when its search ends.

    Args:
        console: where to. title: above the table. problems: in the order of the search.
        trials: of each problem. clock: seconds, for tests.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        problems: Sequence[Problem],
        trials: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._title, self._trials = console, title, trials
        self._problems, self._clock = list(dict.fromkeys(problems)), clock
        self._began = clock()
        self._rows: dict[int, tuple[int, float, float]] = {}
        self._first_done: int | None = None
        self._ended: set[int] = set()
        self._live = Live(
            get_renderable=self.render, console=console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> TuneTable:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def update(self, index: int, total: int, done: int, best: float, base: float) -> None:
        """A trial has ended; the arguments are those of ``search.Progress``."""
        if self._first_done is None:
            # What earlier runs did took none of this run's time.
            self._first_done = index * self._trials + done - 1
        self._rows[index] = (done, best, base)
        if not self._console.is_terminal and done >= self._trials and index not in self._ended:
            self._ended.add(index)
            self._console.print(
                f"{index + 1}/{total} {self._name(index)}: best {_us(best)} us, "
                f"unfused {_us(base)} us",
                highlight=False, markup=False,
            )  # fmt: skip

    def left_s(self) -> float | None:
        """Seconds that the rest will take, at this run's pace so far; None before it has one."""
        if not self._rows or self._first_done is None:
            return None
        index = max(self._rows)
        done = index * self._trials + self._rows[index][0]
        new = done - self._first_done
        if new <= 0:
            return None
        rest = len(self._problems) * self._trials - done
        return max(0.0, (self._clock() - self._began) / new * rest)

    def render(self) -> RenderableType:
        """The table as it is now."""
        left = self.left_s()
        ends = "" if left is None else f", about {left // 60:.0f} min {left % 60:.0f} s left"
        spent = self._clock() - self._began
        table = Table(
            title=f"{self._title}: {spent // 60:.0f} min {spent % 60:.0f} s{ends}",
            title_justify="left",
        )
        table.add_column("problem")
        for name in ("trials", "best us", "unfused us", "speedup"):
            table.add_column(name, justify="right")
        now = max(self._rows, default=0)
        first = max(0, min(now - ROWS + 3, len(self._problems) - ROWS))
        for index in range(first, min(first + ROWS, len(self._problems))):
            done, best, base = self._rows.get(index, (0, math.inf, math.inf))
            speedup = base / best if math.isfinite(best) and math.isfinite(base) else math.nan
            table.add_row(
                ("> " if index == now else "  ") + self._name(index),
                f"{done}/{self._trials}" if done else "-",
                _us(best),
                _us(base),
                f"{speedup:.2f}" if math.isfinite(speedup) else "-",
            )
        return table

    def _name(self, index: int) -> str:
        p = self._problems[index] if index < len(self._problems) else None
        return "?" if p is None else f"{p.op.value} m={p.m} n={p.n} k={p.k}"
