"""The candidates of one problem: named choices that always decode to a legal configuration.

The sampler sees six categorical parameters (kernel, groups, panel, cut, span, split); a transport
other than the usual one is a value of cut. Whatever it picks is moved to the nearest legal
configuration of that kernel, so an illegal one cannot be asked.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product

from fluxgen.codegen.space import kernel_space, run_space, span_choices, why_illegal
from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Transport
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Gpu, Topology
from fluxgen.kernels.registry import with_schedule
from fluxgen.kernels.slabs import group_choices
from fluxgen.kernels.transports import default_transport
from fluxgen.predict import predict

FINALISTS = 12
"""Kernels whose every run-time configuration is predicted; the others get a few typical ones."""

Params = dict[str, str | int]
"""Values of the six parameters."""

SM_COPY = "sm"
"""The value of ``cut`` that is no cut: SMs copy whole slabs, all at once."""

STORE = "store"
"""Where slabs are usually drained: the kernel stores into its peers, in whole slabs."""

RING = "ring-"
"""In front of a cut: round the ring, where GPUs hang from several sockets."""

BROADCAST = "broadcast"
"""gemm_ar: the kernel stores to all ranks, in one shot."""

PACKETS = "packets"
BROADCAST_PACKETS = "broadcast-packets"
"""Stores of a gemm_rs, and in one shot of a gemm_ar, in packets whose data carry their epoch."""

_OTHER = {
    SM_COPY: Transport.SM_COPY, STORE: Transport.PEER_STORE, BROADCAST: Transport.PEER_BROADCAST,
    PACKETS: Transport.PEER_PACKETS, BROADCAST_PACKETS: Transport.BROADCAST_PACKETS,
}  # fmt: skip
"""Values of ``cut`` that name a transport."""

KNOBS = ("groups", "panel", "cut", "span", "split")
"""The parameters that are not compiled in."""


@lru_cache(maxsize=64)
def _kernels(signature: Signature, gpu: Gpu) -> tuple[KernelConfig, ...]:
    return tuple(kernel_space(signature, gpu))


@dataclass(frozen=True)
class Candidates:
    """Every legal fused configuration of ``problem`` on ``topology``."""

    problem: Problem
    topology: Topology

    @cached_property
    def kernels(self) -> tuple[KernelConfig, ...]:
        """Kernels with at least one legal run configuration, in the space's order."""
        return tuple(
            kernel
            for kernel in _kernels(self.problem.signature, self.topology.gpu)
            if self.spans(kernel)
        )

    def spans(self, kernel: KernelConfig) -> tuple[int, ...]:
        """Spans with which ``kernel`` is legal: some tiles fit the slabs only with one."""
        if with_schedule(kernel.schedule).whole:
            return tuple({run.span for run in run_space(self.problem, self.topology, kernel)})
        return tuple(
            span
            for span in span_choices(self.problem, self.topology, kernel)
            if why_illegal(
                self.problem, self.topology, kernel, RunConfig(transport=self._usual, span=span)
            )
            is None
        )

    @cached_property
    def _usual(self) -> Transport:
        return default_transport(self.problem.signature, self.topology.link)

    @cached_property
    def choices(self) -> dict[str, tuple[str | int, ...]]:
        """Each knob's values, over all kernels.

        Groups, panels and cuts are those of the smallest cluster, which allows what the others
        do, and splits those of the smallest flat kernel; spans depend on the tile's rows in both
        directions, so they are those of any kernel.
        """
        flat = [kernel for kernel in self.kernels if with_schedule(kernel.schedule).whole]
        others = [kernel for kernel in self.kernels if kernel not in flat]
        loosest = [
            min(kernels, key=lambda k: (k.tile_m * k.cluster_m, k.tile_n * k.cluster_n, k))
            for kernels in (others, flat)
            if kernels
        ]
        usual = self._usual
        runs = [run for kernel in loosest for run in run_space(self.problem, self.topology, kernel)]
        texts = [_encode(run, usual) for run in runs]
        choices = {knob: tuple(dict.fromkeys(text[knob] for text in texts)) for knob in KNOBS}
        spans = {span for kernel in self.kernels for span in self.spans(kernel)}
        return {**choices, "span": tuple(sorted(spans))}

    @cached_property
    def version(self) -> str:
        """Digest of all choices: a study of another search space must not be continued."""
        if not self.kernels:
            return "none"
        text = repr(([kernel.name for kernel in self.kernels], sorted(self.choices.items())))
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @cached_property
    def by_name(self) -> dict[str, KernelConfig]:
        """Kernels by :attr:`KernelConfig.name`."""
        return {kernel.name: kernel for kernel in self.kernels}

    @cached_property
    def _cache(self) -> dict[KernelConfig, tuple[RunConfig, ...]]:
        return {}

    def ranked_runs(self, kernel: KernelConfig) -> tuple[RunConfig, ...]:
        """Every legal run configuration of ``kernel``, the predicted fastest first."""
        if kernel not in self._cache:
            runs = list(run_space(self.problem, self.topology, kernel))
            times = {run: self._predict(kernel, run) for run in runs}
            self._cache[kernel] = tuple(sorted(runs, key=times.__getitem__))
        return self._cache[kernel]

    @cached_property
    def prior(self) -> dict[KernelConfig, float]:
        """Predicted microseconds of each kernel at its best run configuration, fastest first.

        Two stages: typical run configurations of all kernels, then all those of the finalists.
        """
        rough = {
            kernel: min(self._predict(kernel, run) for run in self._typical(kernel))
            for kernel in self.kernels
        }
        finalists = sorted(rough, key=rough.__getitem__)[:FINALISTS]
        for kernel in finalists:
            rough[kernel] = self._predict(kernel, self.ranked_runs(kernel)[0])
        return dict(sorted(rough.items(), key=lambda item: item[1]))

    def _typical(self, kernel: KernelConfig) -> list[RunConfig]:
        if with_schedule(kernel.schedule).whole:
            return list(self.ranked_runs(kernel))  # they are few
        transport = self._usual
        shapes = group_choices(self.problem.op, self.problem.tp)
        cuts = ((ChunkAxis.M, 1), (ChunkAxis.K, 2))
        ring = [Transport.COPY_ENGINE_RING] * (self.topology.islands > 1)
        runs = [
            RunConfig(groups, panel, axis, chunks, 0, moved, span)
            for groups, panel, (axis, chunks), moved, span in product(
                shapes, (0, 4), cuts, (transport, *ring), self.spans(kernel)
            )
        ]
        whole = (self.problem.tp,)
        runs += [RunConfig(whole, transport=Transport.SM_COPY, span=s) for s in self.spans(kernel)]
        return [r for r in runs if why_illegal(self.problem, self.topology, kernel, r) is None]

    def _predict(self, kernel: KernelConfig, run: RunConfig) -> float:
        return predict(self.problem, self.topology, kernel, run).time_us

    def encode(self, kernel: KernelConfig, run: RunConfig) -> Params | None:
        """The parameters of a configuration, or None if it lies outside the space."""
        if kernel.name not in self.by_name or run not in self.ranked_runs(kernel):
            return None
        return {"kernel": kernel.name, **_encode(run, self._usual)}

    def decode(self, params: Params) -> tuple[KernelConfig, RunConfig]:
        """The legal configuration nearest to ``params``.

        A span that the kernel or the groups do not allow becomes its smallest one, a panel that
        is too wide all of n; too many chunks become fewer until they fit.
        """
        kernel = self.by_name[str(params["kernel"])]
        legal = self.ranked_runs(kernel)
        groups = tuple(int(g) for g in str(params["groups"]).split("-"))
        cut = str(params["cut"])
        transport = self._usual
        axis, left = ChunkAxis.M, 1
        if cut in _OTHER:
            transport = _OTHER[cut]
            groups = (self.problem.tp,) if cut in (SM_COPY, BROADCAST) else groups
        else:
            if cut.startswith(RING):
                transport, cut = Transport.COPY_ENGINE_RING, cut.removeprefix(RING)
            axis, left = ChunkAxis(cut[0]), int(cut[1:])
        cuts = []
        while left > 1:
            cuts.append((axis, left))
            left = left - 1 if axis is ChunkAxis.K else left // 2
        cuts.append((ChunkAxis.M, 1))
        if with_schedule(kernel.schedule).whole:  # one group of whole slabs, in one order
            groups, cuts = (self.problem.tp,), [(ChunkAxis.M, 1)]
        spans = dict.fromkeys((int(params["span"]), *self.spans(kernel)))
        split = int(params["split"])
        for span, panel, parts in product(spans, (int(params["panel"]), 0), (split, 1)):
            for axis, chunks in cuts:
                run = RunConfig(groups, panel, axis, chunks, 0, transport, span, parts)
                if run in legal:
                    return kernel, run
        return kernel, legal[0]


def _encode(run: RunConfig, usual: Transport) -> Params:
    others = {transport: cut for cut, transport in _OTHER.items() if transport is not usual}
    cut = f"{run.chunk_axis.value}{run.chunks}"
    if run.transport is Transport.COPY_ENGINE_RING:
        cut = RING + cut
    return {
        "groups": "-".join(map(str, run.groups)),
        "panel": run.panel,
        "cut": others.get(run.transport, cut),
        "span": run.span,
        "split": run.split,
    }
