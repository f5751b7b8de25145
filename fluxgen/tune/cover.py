"""Few kernels for many problems: compiling one takes most of a minute, so problems share them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fluxgen.core.config import KernelConfig

MIN_TOTAL_GAIN = 0.0005
"""A kernel is worth compiling if it saves this share of the whole model's time, ..."""

MIN_OWN_GAIN = 0.01
"""... or this share of one problem's: short problems count for little in the sum."""


@dataclass(frozen=True)
class Costs:
    """What one problem costs.

    Attributes:
        baseline_us: unfused, microseconds. weight: how often it occurs.
        kernels: microseconds at each kernel's best run configuration.
    """

    baseline_us: float
    weight: float
    kernels: Mapping[KernelConfig, float]


def choose_kernels(
    costs: Sequence[Costs], limit: int, preferred: Iterable[KernelConfig] = ()
) -> tuple[KernelConfig, ...]:
    """At most ``limit`` kernels that together make the model fast, in the order they were taken.

    Greedy: the saved time is submodular in the set of kernels, so greedy is within 1 - 1/e of the
    best set. First by the total time saved over all problems, then, with what is left of
    ``limit``, by the largest share saved of one problem.

    Args:
        costs: of each problem. preferred: taken first where they help any problem (known winners).
    """
    best = [cost.baseline_us for cost in costs]
    total = sum(cost.weight * cost.baseline_us for cost in costs)
    chosen: list[KernelConfig] = []

    def savings(kernel: KernelConfig) -> list[float]:
        return [
            max(0.0, now - cost.kernels.get(kernel, now))
            for cost, now in zip(costs, best, strict=True)
        ]

    def whole(kernel: KernelConfig) -> float:
        saved = savings(kernel)
        gain = sum(cost.weight * s for cost, s in zip(costs, saved, strict=True))
        return gain / total if total > 0 else 0.0

    def own(kernel: KernelConfig) -> float:
        shares = zip(savings(kernel), best, strict=True)
        return max((s / now for s, now in shares if now > 0), default=0.0)

    def take(kernel: KernelConfig) -> None:
        chosen.append(kernel)
        for i, saved in enumerate(savings(kernel)):
            best[i] -= saved

    candidates = sorted({kernel for cost in costs for kernel in cost.kernels})
    for kernel in preferred:
        if len(chosen) < limit and kernel in candidates and kernel not in chosen:
            take(kernel)
    for gain, least in ((whole, MIN_TOTAL_GAIN), (own, MIN_OWN_GAIN)):
        while len(chosen) < limit:
            left = [kernel for kernel in candidates if kernel not in chosen]
            # max() keeps the first of equals, and candidates are sorted: deterministic.
            if not left or gain(top := max(left, key=gain)) < least:
                break
            take(top)
    return tuple(chosen)
