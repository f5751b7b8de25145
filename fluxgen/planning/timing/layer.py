"""One layer of one rank as tasks on streams, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fluxgen.planning.layout import Layout
from fluxgen.planning.model import Transformer
from fluxgen.planning.practice import Practice
from fluxgen.planning.timing import constants as c
from fluxgen.planning.timing.collectives import Links
from fluxgen.planning.timing.fused import Fusion
from fluxgen.planning.timing.times import Times
from fluxgen.predict.simulate import Task, Timeline, simulate

__all__ = ["Layer"]

COMPUTE, LINK = "compute", "tp"
E = 2
"""Bytes of an activation."""


class _Tasks(list[Task]):
    """Tasks in the order in which they are queued."""

    def add(
        self, kind: str, name: str, us: float, stream: str = COMPUTE, after: Iterable[int] = ()
    ) -> int:
        """Queue one; its place."""
        self.append(Task(stream, name, kind, us, tuple(after)))
        return len(self) - 1

    @property
    def last(self) -> tuple[int, ...]:
        """What the next task of another stream has to wait for."""
        return (len(self) - 1,) if self else ()


@dataclass(frozen=True)
class Layer:
    """A decoder's layer on one rank.

    Attributes:
        model, layout, practice: as they are called. tokens: of a micro-batch, on this rank's cp
            part. seq: tokens of a sequence. times, links: of the machine.
        fusion: which of the layer's collectives are fused with their GEMMs.
        decode: each of the tokens is one of a sequence of ``seq`` whose keys and values are kept.
    """

    model: Transformer
    layout: Layout
    practice: Practice
    tokens: int
    seq: int
    times: Times
    links: Links
    fusion: Fusion
    decode: bool = False

    def forward(self) -> Timeline:
        """Of one micro-batch."""
        tasks = _Tasks()
        self._forward(tasks)
        return simulate(tasks)

    def backward(self) -> Timeline:
        """Of one micro-batch, with what is computed again before it."""
        tasks = _Tasks()
        if self.layout.recompute == "full":
            self._forward(tasks)
        elif self.layout.recompute == "selective" and self.practice.selective == "operations":
            self._half_forward(tasks)
        self._mlp_backward(tasks)
        self._attention_backward(tasks)
        return simulate(tasks)

    # Sizes. Between the GEMMs of a block all tokens are there, elsewhere this rank's part of them.

    @property
    def _own(self) -> int:
        return self.tokens // self.layout.tp if self.layout.sp else self.tokens

    @property
    def _stream_bytes(self) -> float:
        """One pass over the residual stream."""
        return float(self._own * self.model.hidden * E)

    @property
    def _whole_bytes(self) -> float:
        return float(self.tokens * self.model.hidden * E)

    def _forward(self, tasks: _Tasks) -> None:
        model, tp = self.model, self.layout.tp
        inner = model.heads * model.head_dim // tp
        self._norm(tasks)
        self._column(tasks, "qkv", model.qkv // tp)
        self._attention(tasks)
        self._row(tasks, "o", inner)
        self._residual(tasks)
        self._norm(tasks)
        self._column(tasks, "fc1", model.fc1 // tp)
        self._activation(tasks)
        self._row(tasks, "fc2", model.ffn // tp)
        self._residual(tasks)

    def _half_forward(self, tasks: _Tasks) -> None:
        """Every second GEMM again, and all that is neither GEMM nor attention."""
        again = _Tasks()
        self._forward(again)
        for task in again:
            share = {"gemm": 0.5, "fused": 0.5, "ring": 0.5, "collective": 0.5, "attention": 0.0}
            us = task.us * share.get(task.kind, 1.0)
            tasks.add(task.kind, f"again {task.name}", us)

    def _norm(self, tasks: _Tasks) -> None:
        # RMSNorm of a gated model, operation by operation in fp32: about nine kernels.
        eager = self.practice.kernels == "eager" and self.model.gated
        passes, kernels = (15, 9) if eager else (2, 1)
        tasks.add("memory", "norm", self.times.memory(passes * self._stream_bytes, kernels))

    def _residual(self, tasks: _Tasks) -> None:
        passes = 3.5 if self.practice.dropout else 3.0
        tasks.add("memory", "residual", self.times.memory(passes * self._stream_bytes))

    def _activation(self, tasks: _Tasks, backward: bool = False) -> None:
        width = self.tokens * self.model.ffn / self.layout.tp * E
        gated = self.model.gated
        passes = (5 if gated else 3) if backward else (3 if gated else 2)
        kernels = 1
        if gated and self.practice.kernels == "eager":  # silu and the product apart
            passes, kernels = (passes + (4 if backward else 2)), 2
        tasks.add("memory", "activation", self.times.memory(passes * width, kernels))

    def _gathered(self, tasks: _Tasks, name: str, beside: bool = False) -> None:
        """The collective before a column-parallel GEMM."""
        if self.layout.tp == 1 or not self.layout.sp:
            return
        us = self.links.gather_us(self._whole_bytes, self.links.ranks(self.layout.tp, 1))
        tasks.add("collective", f"all-gather {name}", us, LINK, () if beside else tasks.last)

    def _summed(self, tasks: _Tasks, name: str) -> int | None:
        """The collective behind a row-parallel GEMM; its place."""
        if self.layout.tp == 1:
            return None
        ranks = self.links.ranks(self.layout.tp, 1)
        if self.layout.sp:
            us = self.links.gather_us(self._whole_bytes, ranks)
            return tasks.add("collective", f"reduce-scatter {name}", us, LINK, tasks.last)
        us = self.links.reduce_us(self._whole_bytes, ranks)
        if self.decode:
            us = min(us, self.links.one_shot_us(self._whole_bytes, ranks))
        return tasks.add("collective", f"all-reduce {name}", us, LINK, tasks.last)

    def _with_gemm(self, gemm: float, comm: float) -> float:
        """A GEMM whose collective runs beside it, in pieces of a rank's part."""
        return max(gemm * (1 + c.OVERLAP_LOSS), comm) + min(gemm, comm) / self.layout.tp

    def _fused(
        self, tasks: _Tasks, name: str, gathers: bool, n: int, k: int, kn: bool = False
    ) -> bool:
        """A collective and its GEMM in one, if the machine or the practice has that."""
        layout = self.layout
        if layout.tp == 1 or not layout.sp:
            return False
        share = self.fusion.share(gathers, self.tokens, n, k, layout.tp, kn)
        if share is None and not self.practice.overlap_ring:
            return False
        comm = self.links.gather_us(self._whole_bytes, self.links.ranks(layout.tp, 1))
        gemm = self.times.gemm(self.tokens, n, k)
        if share is None:
            tasks.add("ring", name, self._with_gemm(gemm, comm))
        else:
            tasks.add("fused", name, share * (gemm + comm))
        return True

    def _column(self, tasks: _Tasks, name: str, n: int) -> None:
        k = self.model.hidden
        if self._fused(tasks, name, True, n, k):
            return
        self._gathered(tasks, name)
        tasks.add("gemm", name, self.times.gemm(self.tokens, n, k), after=tasks.last)

    def _row(self, tasks: _Tasks, name: str, k: int) -> None:
        n = self.model.hidden
        if self._fused(tasks, name, False, n, k):
            return
        tasks.add("gemm", name, self.times.gemm(self.tokens, n, k))
        place = self._summed(tasks, name)
        if place is not None:
            tasks.add("wait", name, 0.0, after=(place,))

    # Attention.

    def _scores(self) -> float:
        """Elements of all score matrices of this rank."""
        return self.tokens * self.seq * self.model.heads / self.layout.tp

    def _attention(self, tasks: _Tasks) -> None:
        model, layout = self.model, self.layout
        head = model.head_dim
        heads = (model.heads + model.kv_heads) // layout.tp
        tasks.add("memory", "positions", self.times.memory(self._rotated(heads)))
        scores = self._scores()
        if self.decode:
            kept = 2 * E * self.tokens * self.seq / layout.cp * model.head_dim
            kept *= max(1.0, model.kv_heads / layout.tp)
            tasks.add("attention", "attention", self.times.memory(kept, 2))
        elif self.practice.attention != "unfused":
            us = self._flash(2 * scores * head, False)
            self._exchange(tasks, us)
            tasks.add("attention", "attention", us)
        else:
            self._core(tasks)

    def _flash(self, flops: float, backward: bool) -> float:
        """Attention in one kernel, or of the parts of a sequence in turn."""
        part = self.seq // self.layout.cp
        extra = (self.layout.cp - 1) * c.KERNEL_US
        return extra + self.times.flash(self.practice.attention, flops, part, backward)

    def _rotated(self, heads: int) -> float:
        """Bytes of rotary positions: in place, or operation by operation in complex fp32."""
        passes = 10 if self.practice.kernels == "eager" and self.model.gated else 2
        return float(passes * E * self.tokens * heads * self.model.head_dim)

    def _exchange(self, tasks: _Tasks, us: float, times: int = 1) -> None:
        """Keys and values of the other parts of a sequence, beside attention of the part before."""
        layout = self.layout
        if layout.cp == 1:
            return
        size = 2 * E * self.tokens * self.model.kv_heads * self.model.head_dim / layout.tp * times
        ranks = self.links.ranks(layout.cp, layout.tp)
        comm = self.links.gather_us(size * layout.cp, ranks)
        hidden = us * (layout.cp - 1) / layout.cp
        tasks.add("collective", "keys and values", max(0.0, comm - hidden))

    def _core(self, tasks: _Tasks) -> None:
        scores, head, times = self._scores(), self.model.head_dim, self.times
        tasks.add("attention", "scores", times.batched(2 * scores * head, E * scores))
        tasks.add("memory", "softmax", times.scores(2 * E * scores))
        if self.practice.dropout:
            tasks.add("memory", "dropout", times.scores((2 * E + 1) * scores))
        tasks.add("attention", "values", times.batched(2 * scores * head, E * scores))

    def _core_backward(self, tasks: _Tasks) -> None:
        scores, head, times = self._scores(), self.model.head_dim, self.times
        for name in ("d values", "d probabilities"):
            tasks.add("attention", name, times.batched(2 * scores * head, E * scores))
        if self.practice.dropout:
            tasks.add("memory", "d dropout", times.scores((2 * E + 1) * scores))
        tasks.add("memory", "d softmax", times.scores(3 * E * scores))
        for name in ("d queries", "d keys"):
            tasks.add("attention", name, times.batched(2 * scores * head, E * scores))

    # Backward.

    def _mlp_backward(self, tasks: _Tasks) -> None:
        model, tp = self.model, self.layout.tp
        self._residual_backward(tasks)
        self._row_backward(tasks, "fc2", model.ffn // tp)
        self._activation(tasks, backward=True)
        self._column_backward(tasks, "fc1", model.fc1 // tp)
        self._norm_backward(tasks)

    def _attention_backward(self, tasks: _Tasks) -> None:
        model, layout = self.model, self.layout
        head, inner = model.head_dim, model.heads * model.head_dim // layout.tp
        self._residual_backward(tasks)
        self._row_backward(tasks, "o", inner)
        if self.practice.attention == "unfused":
            if layout.recompute == "selective":
                self._core(tasks)
            self._core_backward(tasks)
        else:
            scores = self._scores()
            us = self._flash(5 * scores * head, True)
            self._exchange(tasks, us, times=2)
            tasks.add("attention", "d attention", us)
        heads = (model.heads + model.kv_heads) // layout.tp
        tasks.add("memory", "d positions", self.times.memory(self._rotated(heads)))
        self._column_backward(tasks, "qkv", model.qkv // layout.tp)
        self._norm_backward(tasks)

    def _residual_backward(self, tasks: _Tasks) -> None:
        if self.practice.dropout:
            tasks.add("memory", "d residual", self.times.memory(2.5 * self._stream_bytes))

    def _norm_backward(self, tasks: _Tasks) -> None:
        # The gradients of the branch and of the stream are added: of a compiled norm by itself.
        passes, kernels = {"compiled": (4, 2), "hand": (7, 3), "eager": (7, 3)}[
            self.practice.kernels
        ]
        if self.practice.kernels == "eager" and self.model.gated:
            passes, kernels = 22, 15
        tasks.add("memory", "d norm", self.times.memory(passes * self._stream_bytes, kernels))

    def _row_backward(self, tasks: _Tasks, name: str, k: int) -> None:
        """dX = gather(dY) W; dW = gather(dY).T X."""
        n = self.model.hidden
        if not self._fused(tasks, f"d {name}", True, k, n, kn=True):
            self._gathered(tasks, f"d {name}")
            tasks.add("gemm", f"d {name}", self.times.gemm(self.tokens, k, n), after=tasks.last)
        tasks.add("gemm", f"dw {name}", self.times.gemm(n, k, self.tokens))

    def _column_backward(self, tasks: _Tasks, name: str, n: int) -> None:
        """dX = scatter(dY W); dW = dY.T gather(X), which is gathered again."""
        k, beside = self.model.hidden, self.practice.overlap_weight
        before = tasks.last
        place: int | None = None
        if self.layout.tp > 1 and self.layout.sp:
            us = self.links.gather_us(self._whole_bytes, self.links.ranks(self.layout.tp, 1))
            place = tasks.add("collective", f"all-gather {name}", us, LINK, before)
            if not beside:
                tasks.add("wait", name, 0.0, after=(place,))
        if not self._fused(tasks, f"d {name}", False, k, n, kn=True):
            tasks.add("gemm", f"d {name}", self.times.gemm(self.tokens, k, n))
            summed = self._summed(tasks, f"d {name}")
            if summed is not None and not beside:
                tasks.add("wait", name, 0.0, after=(summed,))
        else:
            summed = None
        tasks.add(
            "gemm", f"dw {name}", self.times.gemm(n, k, self.tokens),
            after=() if place is None else (place,),
        )  # fmt: skip
        if summed is not None and beside:
            tasks.add("wait", name, 0.0, after=(summed,))
