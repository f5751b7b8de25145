"""What a family of kernels is: see docs/adr/0021."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from fluxgen.core.config import KernelConfig, RunConfig, Schedule
from fluxgen.core.problem import Problem, ceil_div
from fluxgen.core.topology import Gpu, Topology

__all__ = ["Family", "panel_limit"]


class Family(ABC):
    """Kernels of one header: everything that differs between them and others.

    Attributes:
        archs: that it is compiled for, e.g. ``("sm80", "sm86", "sm89")``.
        schedules: that tell its kernels from others of the same architecture.
        header: the file in ``templates/include/fluxgen/families``.
        whole: whether it tiles the rows of all ranks as one, in one order and in whole slabs.
    """

    archs: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    header: str
    whole: bool

    @abstractmethod
    def kernels(self) -> Iterator[KernelConfig]:
        """All combinations of the knobs, in a fixed order, legal or not."""

    @abstractmethod
    def why_illegal_kernel(self, gpu: Gpu, kernel: KernelConfig, b_layout: str) -> str | None:
        """Why ``kernel`` cannot be compiled, or not run on ``gpu``; None if it can."""

    @abstractmethod
    def why_illegal_run(
        self, problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
    ) -> str | None:
        """Why ``kernel`` with ``run`` cannot compute ``problem``, or None.

        What no family can take is :func:`fluxgen.codegen.space.why_illegal`'s.
        """

    @abstractmethod
    def spans(self, problem: Problem, kernel: KernelConfig) -> tuple[int, ...]:
        """Spans worth trying."""

    @abstractmethod
    def runs(
        self, problem: Problem, topology: Topology, kernel: KernelConfig
    ) -> Iterator[RunConfig]:
        """All run-time configurations worth trying, in a fixed order, legal or not."""

    def before(self, kernel: KernelConfig) -> list[str]:
        """Lines of a source before its header."""
        del kernel
        return []

    def knobs(self, kernel: KernelConfig) -> list[str]:
        """Members of a source's ``Config`` beside the tile, the stages and the signature."""
        del kernel
        return []

    @abstractmethod
    def described(self, kernel: KernelConfig) -> dict[str, Any]:
        """Fields of ``KernelInfo`` as a library of ``kernel`` must fill them."""

    def step_depth(self, kernel: KernelConfig) -> int:
        """Elements of K that a block takes in at a step."""
        return kernel.tile_k


def panel_limit(problem: Problem, kernel: KernelConfig) -> int:
    """The widest panel: clusters along n."""
    return ceil_div(problem.n, kernel.cluster_n * kernel.tile_n)
