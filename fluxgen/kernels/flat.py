"""Flat kernels, which tile the rows of all ranks as one, for the few tokens of decoding."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from itertools import product
from typing import Any

from fluxgen.core.config import KernelConfig, RunConfig, Transport
from fluxgen.core.problem import Problem
from fluxgen.core.topology import Topology
from fluxgen.kernels.family import Family
from fluxgen.kernels.transports import default_transport

MIN_TILE_M = 16
"""Tokens of the shortest tile, which may be mostly padding."""
MAX_TOKENS = 256
"""Rows of all ranks above which tiles of one rank's slab are the better ones: at 512 flat kernels
took 1.78 times cuBLAS (H200, data present, 2026-12-03), those of one rank's slab 1.01 to 1.20."""
MAX_PACKET_TOKENS = 64
"""Rows above which packets, at twice the bytes, are not tried: what they save is one flag's way."""
SPLITS = (1, 2, 4, 8)
"""Parts of K worth trying: blocks of a cluster, of which any Hopper GPU holds eight."""


class FlatFamily(Family):
    """What all of them share."""

    whole = True

    @abstractmethod
    def why_illegal_split(
        self, problem: Problem, kernel: KernelConfig, run: RunConfig
    ) -> str | None:
        """Why K cannot be split as ``run`` says, or None."""

    def why_illegal_run(
        self, problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
    ) -> str | None:
        """What tiles of all ranks' rows refuse."""
        del topology
        if problem.m > MAX_TOKENS:
            return f"m={problem.m}: flat kernels are for at most {MAX_TOKENS} tokens"
        if kernel.tile_m > MIN_TILE_M and kernel.tile_m >= 2 * problem.m:
            return f"tiles of {kernel.tile_m} tokens are at least half padding for m={problem.m}"
        if run.span != problem.tp or run.groups not in ((), (problem.tp,)) or run.panel or run.sms:
            return (
                f"span {run.span}, groups {run.groups}, panel {run.panel}, sms {run.sms}: a flat "
                f"kernel tiles all {problem.tp} slabs as one, in one order, on all SMs"
            )
        if run.chunks != 1:
            return f"chunks {run.chunks}: a flat kernel has whole slabs"
        if run.transport is Transport.COPY_ENGINE_DRAIN:
            return "transport copy_engine_drain: a flat kernel stores to the owners; use peer_store"
        if run.transport.packed and problem.m > MAX_PACKET_TOKENS:
            return (
                f"transport {run.transport.value} with m={problem.m}: packets are twice the bytes, "
                f"for at most {MAX_PACKET_TOKENS} tokens; use one that raises flags"
            )
        return self.why_illegal_split(problem, kernel, run)

    def spans(self, problem: Problem, kernel: KernelConfig) -> tuple[int, ...]:
        """All ranks."""
        del kernel
        return (problem.tp,)

    def runs(
        self, problem: Problem, topology: Topology, kernel: KernelConfig
    ) -> Iterator[RunConfig]:
        """All transports and splits."""
        del kernel
        carriers: list[Transport]
        if problem.op.gathers:
            carriers = [default_transport(problem.signature, topology.link)]
            carriers += [t for t in problem.op.transports if t is Transport.SM_COPY]
        else:
            carriers = [t for t in problem.op.transports if t is not Transport.COPY_ENGINE_DRAIN]
            carriers.sort(key=lambda transport: not transport.in_one_shot)
        for moved, split in product(carriers, SPLITS):
            yield RunConfig((problem.tp,), transport=moved, span=problem.tp, split=split)

    def described(self, kernel: KernelConfig) -> dict[str, Any]:
        """Flat; of how many warps is the architecture's own matter."""
        del kernel
        return {"cooperative": False, "flat": True}
