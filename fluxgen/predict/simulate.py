"""What happens when: tasks on streams, each in its stream's order and behind what it waits for.

One simulator for a whole step, for a layer, and for the unfused path of a single op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Span", "Task", "Timeline", "simulate"]


@dataclass(frozen=True)
class Task:
    """One kernel, copy or collective.

    Attributes:
        stream: whose order it keeps. name: what, for people. kind: ``gemm``, ``attention``,
            ``memory``, ``copy``, ``collective``, ...
        us: how long it takes, microseconds. after: places of the tasks that it waits for.
    """

    stream: str
    name: str
    kind: str
    us: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class Span:
    """One thing on one track.

    Attributes:
        track: a stream; of a fused call ``slot 12``, ``link``, ... name: what, for people.
        kind: ``tile``, ``wait``, ``copy``, ``gemm``, ``reduce``, ...
        begin_us, end_us: when.
    """

    track: str
    name: str
    kind: str
    begin_us: float
    end_us: float


@dataclass(frozen=True)
class Timeline:
    """A whole call or step.

    Attributes:
        spans: in no order. end_us: of the last one.
        gemm_us: of a call the GEMM with all its data present: what lies beyond it is exposed.
        critical: places in ``spans`` of what the end waits for, in order; empty where not known.
    """

    spans: tuple[Span, ...]
    end_us: float
    gemm_us: float = 0.0
    critical: tuple[int, ...] = ()


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Run ``tasks``, which are in an order that every stream and every wait agrees with.

    The critical path goes back from the task that ends last, each time to what the task waited for:
    the last of those it is behind, or the one before it on its stream.
    """
    ends: list[float] = []
    cause: list[int] = []
    last: dict[str, int] = {}
    spans = []
    for place, task in enumerate(tasks):
        begin, by = 0.0, -1
        for other in (*task.after, last.get(task.stream, -1)):
            if other >= 0 and ends[other] > begin:
                begin, by = ends[other], other
        ends.append(begin + task.us)
        cause.append(by)
        last[task.stream] = place
        spans.append(Span(task.stream, task.name, task.kind, begin, ends[-1]))
    if not ends:
        return Timeline((), 0.0)
    at = max(range(len(ends)), key=ends.__getitem__)
    end, path = ends[at], []
    while at >= 0:
        path.append(at)
        at = cause[at]
    return Timeline(tuple(spans), end, critical=tuple(reversed(path)))
