"""AxoNN's 4D family: each weight cut in two dims and in depth, and replicas (arXiv 2502.08145).

Of a matrix I (m, k) x W (k, n) on a grid Gx x Gy x Gz, a rank holds m / Gz rows of I and k / Gx of
its columns, and gathers over Gz a (k / Gx, n / Gy) part of W. Partial sums of the product are added
over Gx, those of the gradient of I over Gy, and the gradient of W is scattered over Gz. The next
matrix has Gx and Gy in each other's places, so that its input lies as this one's output::

    forward     gather W over z -> multiply -> add over x
    backward    gather W over z -> dI -> add over y    beside: dW -> scatter over z

Weights are gathered while the layer before is computed, sums of dI are beside dW (section 4 there).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fluxgen.planning.layout import Layout, divisors
from fluxgen.planning.model import Transformer
from fluxgen.planning.timing.collectives import Links, Ranks
from fluxgen.planning.timing.layer import COMPUTE, LINK, E, Layer
from fluxgen.predict.simulate import Task, Timeline, simulate

__all__ = ["AxonnLayer", "grids", "layer_volume", "matrix_volume"]

DEPTH = "depth"
"""The stream of collectives over Gz, which are ahead of the compute or behind it."""


def matrix_volume(m: float, k: float, n: float, x: int, y: int, z: int, data: int) -> float:
    """Elements that a rank sends for one matrix, forward and backward, in rings.

    Args:
        m: rows of one replica. k, n: of the whole matrix. x, y, z: the grid. data: replicas.
    """

    def gather(whole: float, ranks: int) -> float:
        return whole * (ranks - 1) / ranks

    weights = k * n / (x * y)
    rows = m / z
    sums = 2 * gather(rows * n / y, x) + 2 * gather(rows * k / x, y)
    depth = 3 * gather(weights, z)  # gathered in both passes, scattered in the second
    return sums + depth + 2 * gather(weights / z, data)


def matrices(model: Transformer) -> list[tuple[str, int, int]]:
    """(name, k, n) of a layer's matrices, in their order."""
    inner = model.heads * model.head_dim
    return [
        ("qkv", model.hidden, model.qkv), ("o", inner, model.hidden),
        ("fc1", model.hidden, model.fc1), ("fc2", model.ffn, model.hidden),
    ]  # fmt: skip


def layer_volume(model: Transformer, tokens: float, grid: tuple[int, ...], data: int) -> float:
    """Elements that a rank sends for a layer: every second matrix has x and y exchanged."""
    x, y, z = grid
    return sum(
        matrix_volume(tokens, k, n, *((x, y) if i % 2 == 0 else (y, x)), z, data)
        for i, (_, k, n) in enumerate(matrices(model))
    )


def grids(model: Transformer, ranks: int) -> Iterator[tuple[int, int, int]]:
    """All (Gx, Gy, Gz) of so many ranks that divide the model's matrices."""
    for x in divisors(ranks):
        for y in divisors(ranks // x):
            if model.hidden % (x * y) or model.ffn % (x * y) or model.heads % max(x, y):
                continue
            yield x, y, ranks // (x * y)


@dataclass(frozen=True)
class AxonnLayer:
    """A layer of one rank of a grid; ``layer`` has the machine, the model and the tokens."""

    layer: Layer

    @property
    def _grid(self) -> tuple[int, ...]:
        return self.layer.layout.grid

    @property
    def _rows(self) -> int:
        return max(1, self.layer.tokens // self._grid[2])

    def forward(self) -> Timeline:
        """Of one micro-batch."""
        return simulate(self._forward([]))

    def backward(self) -> Timeline:
        """Of one micro-batch, with what is computed again before it."""
        tasks: list[Task] = []
        if self.layer.layout.recompute == "full":
            self._forward(tasks)
        for i in reversed(range(4)):
            name, k, n = matrices(self.layer.model)[i]
            if name == "o":
                self._between(tasks, "mlp", True)
            x, y = self._axes(i)
            place = self._weights(tasks, name, k, n)
            local = self._rows, k // x, n // y
            gemm = self.layer.times.gemm
            us = gemm(local[0], local[1], local[2])
            tasks.append(Task(COMPUTE, f"d {name}", "gemm", us, place))
            summed = self._sum(tasks, f"d {name}", self._rows * k / x, axis=1 if i % 2 == 0 else 0)
            tasks.append(Task(COMPUTE, f"dw {name}", "gemm", gemm(local[2], local[1], local[0])))
            whole = E * k * n / (x * y)
            us = self._links.gather_us(whole * 2, self._ranks(2))  # in fp32
            tasks.append(Task(DEPTH, f"scatter {name}", "collective", us, (len(tasks) - 1,)))
            if summed is not None:
                tasks.append(Task(COMPUTE, f"wait {name}", "wait", 0.0, (summed,)))
            if name == "o":
                self._between(tasks, "attention", True)
        self._between(tasks, "norms", True)
        return simulate(tasks)

    def _forward(self, tasks: list[Task]) -> list[Task]:
        self._between(tasks, "norms", False)
        for i, (name, k, n) in enumerate(matrices(self.layer.model)):
            x, y = self._axes(i)
            place = self._weights(tasks, name, k, n)
            us = self.layer.times.gemm(self._rows, n // y, k // x)
            tasks.append(Task(COMPUTE, name, "gemm", us, place))
            summed = self._sum(tasks, name, self._rows * n / y, axis=0 if i % 2 == 0 else 1)
            if summed is not None:
                tasks.append(Task(COMPUTE, f"wait {name}", "wait", 0.0, (summed,)))
            if name == "qkv":
                self._between(tasks, "attention", False)
            if name == "fc1":
                self._between(tasks, "mlp", False)
        return tasks

    @property
    def _links(self) -> Links:
        return self.layer.links

    def _axes(self, i: int) -> tuple[int, int]:
        """Ranks along k and along n of the i-th matrix."""
        x, y, _ = self._grid
        return (x, y) if i % 2 == 0 else (y, x)

    def _ranks(self, axis: int) -> Ranks:
        stride = 1
        for before in self._grid[:axis]:
            stride *= before
        return self._links.ranks(self._grid[axis], stride)

    def _weights(self, tasks: list[Task], name: str, k: int, n: int) -> tuple[int, ...]:
        """Gather a part of a weight over z, on a stream that is ahead."""
        x, y, z = self._grid
        if z == 1:
            return ()
        us = self._links.gather_us(E * k * n / (x * y), self._ranks(2))
        tasks.append(Task(DEPTH, f"gather {name}", "collective", us))
        return (len(tasks) - 1,)

    def _sum(self, tasks: list[Task], name: str, elements: float, axis: int) -> int | None:
        """Add partial sums over x (0) or y (1); the task's place."""
        if self._grid[axis] == 1:
            return None
        us = self._links.reduce_us(E * elements, self._ranks(axis))
        tasks.append(Task(LINK, f"all-reduce {name}", "collective", us, (len(tasks) - 1,)))
        return len(tasks) - 1

    def _between(self, tasks: list[Task], part: str, backward: bool) -> None:
        """What is no GEMM, as a layer of one rank has it, of this rank's rows and heads."""
        x, y, _ = self._grid
        alone = replace(
            self.layer, tokens=self._rows, layout=replace(Layout(), recompute="none", sp=False)
        )
        share = {"norms": x, "attention": y, "mlp": y}[part]
        timeline = alone.backward() if backward else alone.forward()
        kinds = {
            "norms": ("norm", "residual"), "attention": ("positions", "attention", "scores",
            "softmax", "dropout", "values", "queries", "keys", "probabilities"),
            "mlp": ("activation",),
        }[part]  # fmt: skip
        for span in timeline.spans:
            if span.kind in ("memory", "attention") and span.name.removeprefix("d ") in kinds:
                us = (span.end_us - span.begin_us) / share
                tasks.append(Task(COMPUTE, span.name, span.kind, us))
