"""The time of a whole step: layers, stages, micro-batches, replicas, optimiser."""

from __future__ import annotations

from dataclasses import dataclass

from fluxgen.planning.cluster import Cluster
from fluxgen.planning.layout import Layout, stage_layers
from fluxgen.planning.model import Transformer
from fluxgen.planning.practice import Practice
from fluxgen.planning.timing import constants as c
from fluxgen.planning.timing.axonn import AxonnLayer
from fluxgen.planning.timing.collectives import Links
from fluxgen.planning.timing.fused import Fusion
from fluxgen.planning.timing.layer import Layer
from fluxgen.planning.timing.schedule import MOST_ROUNDS, pipeline
from fluxgen.planning.timing.times import Times
from fluxgen.predict.simulate import Timeline

__all__ = ["Step", "Stepper"]


@dataclass(frozen=True)
class Step:
    """A step of one layout, microseconds.

    Attributes:
        step_us: all of it. forward_us, backward_us: of one layer and micro-batch.
        parts: where the step goes: ``compute``, ``tp``, ``bubble``, ``stages``, ``replicas``,
            ``optimiser``, ``other``; they add up.
        overlapped_us: communication that something hides. exposed_us: that nothing does.
    """

    step_us: float
    forward_us: float
    backward_us: float
    parts: tuple[tuple[str, float], ...]
    overlapped_us: float
    exposed_us: float

    @property
    def exposed(self) -> float:
        """Share of the step in which communication is waited for."""
        return self.exposed_us / self.step_us if self.step_us else 0.0


class Stepper:
    """Steps of one model on one cluster; layers that occur again are simulated once.

    Args:
        seq: tokens of a sequence. batch: sequences of a step.
        phase: ``train``; ``prefill``, one forward of all tokens; ``decode``, one of a token of each
            sequence behind ``seq`` others.
    """

    def __init__(
        self,
        model: Transformer,
        cluster: Cluster,
        batch: int,
        seq: int,
        practice: Practice,
        fusion: Fusion,
        phase: str = "train",
    ) -> None:
        self.model, self.cluster, self.batch, self.seq = model, cluster, batch, seq
        self.practice, self.fusion, self.phase = practice, fusion, phase
        self.training = phase == "train"
        self.times, self.links = Times(cluster.gpu), Links(cluster, practice.rails)
        self._layers: dict[tuple[object, ...], tuple[Timeline, Timeline]] = {}

    def tokens(self, layout: Layout) -> int:
        """Of a micro-batch, on one rank's part of its sequences."""
        return layout.micro if self.phase == "decode" else layout.micro * self.seq // layout.cp

    def layer(self, layout: Layout) -> tuple[Timeline, Timeline]:
        """Forward and backward of one layer and micro-batch."""
        key = (
            layout.tp, layout.cp, layout.sp, layout.micro, layout.recompute, layout.grid,
        )  # fmt: skip
        if key not in self._layers:
            layer = Layer(
                self.model, layout, self.practice, self.tokens(layout), self.seq, self.times,
                self.links, self.fusion, self.phase == "decode",
            )  # fmt: skip
            of = AxonnLayer(layer) if layout.grid else layer
            empty = Timeline((), 0.0)
            self._layers[key] = of.forward(), of.backward() if self.training else empty
        return self._layers[key]

    def step(self, layout: Layout) -> Step:
        """The step of a layout that can run."""
        model = self.model
        forward, backward = self.layer(layout)
        layers = stage_layers(model, layout)
        rounds = self.batch // (layout.dp * layout.micro)
        overlapped = 0.0
        front, back = forward.end_us, backward.end_us
        each, hidden, sharded = self._sharded(layout, front, back)
        overlapped += hidden * layers * rounds
        stage = layers * (front + back) + layers * each
        first, last = self._ends(layout)
        longest = stage + first + last
        if layout.pp > 1:  # what its ends have less of layers, they have room for
            short = (layers * layout.pp - model.layers) / 2 * (front + back + each)
            longest = stage + max(0.0, first - short, last - short)
        total = model.layers * (front + back + each) + first + last
        bubble = max(0.0, total - longest) / layout.vp
        sends = self._sends(layout, rounds)
        replicas, beside = self._replicas(layout, layers, rounds, front, back)
        overlapped += beside
        optimiser = self._optimiser(layout) if self.training else 0.0
        other = c.STEP_US if self.training else 0.0
        tp = layers * rounds * sum(_exposed(each) for each in (forward, backward))
        compute = rounds * longest - tp - layers * each * rounds
        parts = (
            ("compute", compute), ("tp", tp), ("bubble", bubble), ("stages", sends),
            ("replicas", replicas + sharded + layers * each * rounds),
            ("optimiser", optimiser), ("other", other),
        )  # fmt: skip
        us = sum(part for _, part in parts)
        exposed = tp + sends + replicas + sharded + layers * each * rounds
        inside = layers * rounds * sum(_hidden(timeline) for timeline in (forward, backward))
        return Step(us, front, back, parts, overlapped + inside, exposed)

    def timelines(self, layout: Layout) -> dict[str, Timeline]:
        """A layer's forward and backward, and the step's micro-batches on its stages."""
        forward, backward = self.layer(layout)
        found = {"forward of a layer": forward}
        if self.training:
            found["backward of a layer"] = backward
        rounds = min(self.batch // (layout.dp * layout.micro), MOST_ROUNDS)
        if layout.pp > 1:
            layers = stage_layers(self.model, layout)
            first, last = self._ends(layout)
            front = [layers * forward.end_us] * layout.pp
            back = [layers * backward.end_us] * layout.pp
            front[0] += first
            back[-1] += last if self.training else 0.0
            name = "stages, each its layers at once" if layout.vp > 1 else "stages"
            found[name] = pipeline(front, back, rounds, self._send(layout))
        return found

    def _ends(self, layout: Layout) -> tuple[float, float]:
        """What the first and the last stage do beside their layers, of one micro-batch."""
        model, times = self.model, self.times
        tokens = self.tokens(layout)
        stream = 2.0 * tokens * model.hidden / (layout.tp if layout.sp else 1)
        columns = -(-model.vocab // layout.tp)
        head = times.gemm(tokens, columns, model.hidden)
        first = times.memory(3 * stream)
        if not self.training:
            return first, times.gemm(layout.micro, columns, model.hidden)
        ranks = self.links.ranks(layout.tp, 1)
        whole = 2.0 * tokens * model.hidden
        head += times.gemm(tokens, model.hidden, columns)
        head += times.gemm(columns, model.hidden, tokens)
        # Logits in fp32: converted, their largest, their exponents, their sum, the gradient.
        passes = 16 if self.practice.kernels == "compiled" else 30
        loss = times.memory(passes * float(tokens) * columns, 6)
        gathered = 3 * self.links.gather_us(whole, ranks) if layout.sp else 0.0
        if layout.tp > 1 and not layout.sp:
            gathered = self.links.reduce_us(whole, ranks)
        return first + times.memory(4 * stream), head + loss + gathered + times.memory(6 * stream)

    def _sends(self, layout: Layout, rounds: int) -> float:
        """Exchanges between stages that are waited for."""
        if layout.pp == 1:
            return 0.0
        us = self._send(layout)
        ways = 2 if self.training else 1
        waits = ways * layout.vp * rounds
        if self.practice.overlap_stages and layout.vp > 1:
            waits = ways * (layout.pp - 1)  # while the pipeline fills and empties
        return us * waits

    def _send(self, layout: Layout) -> float:
        """One exchange between two stages."""
        tokens = self.tokens(layout)
        size = 2.0 * tokens * self.model.hidden
        stride = layout.tp * layout.cp * layout.dp
        far = self.cluster.gpus > self.cluster.node and stride >= self.cluster.node
        us = self.links.send_us(size / layout.tp, far)
        if layout.tp > 1 and not layout.sp:  # each rank sends a part, which is gathered there
            us += self.links.gather_us(size, self.links.ranks(layout.tp, 1))
        return us

    def _replicated(self, layout: Layout) -> float:
        """Weights of one rank."""
        model = self.model
        tables = model.vocab * model.hidden * (1 if layout.pp > 1 or model.tied else 2)
        return (stage_layers(model, layout) * model.layer_params + tables) / layout.tp

    def _replicas(
        self, layout: Layout, layers: int, rounds: int, front: float, back: float
    ) -> tuple[float, float]:
        """Gradients, and with a shared optimiser weights, of the replicas: waited for, and not."""
        ranks = self.links.ranks(layout.dp * layout.cp, layout.tp)
        if ranks.count == 1 or layout.zero == 3 or not self.training:
            return 0.0, 0.0
        params = self._replicated(layout)
        grads = float(self.practice.grad_bytes) * params
        if layout.zero == 0:
            ways = [(self.links.reduce_us(grads, ranks), layers * back)]
        else:
            # Whoever keeps a part of the gradients alone has them scattered by each micro-batch.
            times = rounds if layout.zero == 2 else 1
            ways = [
                *[(self.links.gather_us(grads, ranks), layers * back)] * times,
                (self.links.gather_us(2 * params, ranks), layers * front),
            ]
        if not self.practice.overlap_replicas:
            return sum(us for us, _ in ways), 0.0
        waited = hidden = 0.0
        for us, window in ways:
            piece = us / layers  # the last layer's gradients, the first one's weights
            late = piece + max(0.0, us - piece - window * (layers - 1) / layers)
            waited += late + c.OVERLAP_LOSS * (us - late)
            hidden += us - late
        return waited, hidden

    def _sharded(self, layout: Layout, front: float, back: float) -> tuple[float, float, float]:
        """FSDP: what a layer and micro-batch wait for, what is hidden; and what the step waits."""
        if layout.zero != 3 or layout.dp * layout.cp == 1:
            return 0.0, 0.0, 0.0
        ranks = self.links.ranks(layout.dp * layout.cp, layout.tp)
        weights = 2.0 * self.model.layer_params / layout.tp
        gather = self.links.gather_us(weights, ranks)
        grads = weights / 2 * self.practice.grad_bytes
        scatter = self.links.gather_us(grads, ranks) if self.training else 0.0
        ways = [(gather, front)] + ([(gather + scatter, back)] if self.training else [])
        waited = hidden = 0.0
        for us, window in ways:
            if not self.practice.overlap_replicas:
                waited += us
                continue
            late = max(0.0, us - window)
            waited += late + c.OVERLAP_LOSS * (us - late)
            hidden += us - late
        tables = 2.0 * self.model.vocab * self.model.hidden / layout.tp
        ends = gather + scatter + 2 * self.links.gather_us(tables, ranks)
        return waited, hidden, ends

    def _optimiser(self, layout: Layout) -> float:
        params = self._replicated(layout)
        if layout.zero >= 1:
            params /= layout.dp * layout.cp
        return self.times.memory(c.ADAM_BYTES * params, 20)


def _exposed(timeline: Timeline) -> float:
    """Communication on a layer's critical path."""
    spans = [timeline.spans[place] for place in timeline.critical]
    return sum(s.end_us - s.begin_us for s in spans if s.kind == "collective")


def _hidden(timeline: Timeline) -> float:
    """Communication off it."""
    every = sum(s.end_us - s.begin_us for s in timeline.spans if s.kind == "collective")
    return every - _exposed(timeline)
