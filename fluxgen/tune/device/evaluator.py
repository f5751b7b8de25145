"""The evaluator ``device``: a candidate is checked, then timed beside the unfused path.

Runs in a process of its own (:mod:`fluxgen.tune.evaluators.process`): what breaks the GPU's
context ends the process. On one GPU NVLink is imitated, see :mod:`.rank`; over PCIe the peers are
the host's memory, see :mod:`.pcie`. Either way the figures are ``emulated``.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# Before CUDA starts: with fewer hardware queues than streams, independent streams wait for each
# other, and the ranks of a check are streams that wait for each other's kernels.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import torch

from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.errors import (
    CommTimeout,
    KernelError,
    MachineError,
    StoreError,
    UsageError,
)
from fluxgen.core.problem import Problem
from fluxgen.core.record import Baseline, Provenance
from fluxgen.core.topology import Gpu, LinkKind, Topology
from fluxgen.machine.device import devices
from fluxgen.native.loader import FusedKernel
from fluxgen.predict.constants import COPY_US
from fluxgen.runtime.session.kernels import fused_kernel, support_kernels
from fluxgen.tune.device import schedule
from fluxgen.tune.device.alone import Queue
from fluxgen.tune.device.check import Operands, evened, matmul, wrong
from fluxgen.tune.device.emulated_link import emulated_link
from fluxgen.tune.device.pcie import OverPcie
from fluxgen.tune.device.rank import OneRank
from fluxgen.tune.device.timing import MOST, ROUND, Stopwatch
from fluxgen.tune.evaluators.evaluator import Case, Evaluator, Measurement

METHOD_VERSION = 6
"""Part of the name of every study: times of another method are not mixed in."""

FEW_TOKENS = 512
"""Below so many rows the way of each flag to the host and back, about 20 us, would be most of what
is measured: nothing of the link is imitated there, its time is added in full."""

FINISH_S = 20.0
"""No round of timings takes this long."""


@dataclass
class _Bench:
    """What is kept between the candidates of one problem."""

    problem: Problem
    rank: OneRank | OverPcie
    topology: Topology
    left: torch.Tensor
    weight: torch.Tensor
    want: torch.Tensor
    library: torch.Tensor  # output of the unfused GEMM
    best_us: float = math.inf


class DeviceEvaluator(Evaluator):
    """Measures on the current GPU, one problem after the other.

    Args:
        gpu: what the candidates are for: must be this machine's.
        store: of compiled kernels, None for ``Settings.store``. check: compare results first.
        brief: one round of timings only, for sweeps of thousands.

    Raises:
        UsageError: another GPU, or none. StoreError: the libraries are not built.
    """

    provenance = Provenance.EMULATED

    def __init__(
        self, gpu: Gpu, store: Path | None = None, check: bool = True, brief: bool = False
    ) -> None:
        found = devices()
        if not torch.cuda.is_available() or not found:
            raise UsageError("evaluator 'device': expected a GPU that Torch can use; found none")
        here = found[torch.cuda.current_device()].gpu
        if here != gpu:
            raise UsageError(
                f"evaluator 'device': expected the target {gpu.name} on this machine; found "
                f"{here.name}. Measure there, or use --evaluator predict"
            )
        self.kind = f"device{METHOD_VERSION}"
        self.versions = {
            "driver": found[torch.cuda.current_device()].driver,
            "cuda": str(torch.version.cuda),
        }
        self._arch = f"sm{gpu.cc}"
        self._store, self._check = store, check
        self._most = ROUND if brief else MOST
        torch.zeros(1, device="cuda")  # the context, before any library looks for one
        self._support = support_kernels(self._arch, store)
        self._link = emulated_link(self._arch, store)
        self._watch = Stopwatch(self._finish)
        self._bench: _Bench | None = None

    def method(self, topology: Topology) -> str:
        """How the link is imitated, and at what rate."""
        if topology.link.over_pcie:
            own = "; its own workspace there, too" * (topology.link is LinkKind.HOST)
            return (
                "one GPU, its own PCIe link, pinned host memory as the peers, as many bytes the "
                f"other way{own}; unfused: cuBLAS and plain copies; cold L2, interleaved, medians"
            )
        return (
            f"one GPU, flags of a link of {topology.bandwidth_gbs:g} GB/s, "
            f"{topology.latency_us:g} us, {COPY_US:g} us a copy, no bytes moved; of fewer than "
            f"{FEW_TOKENS} rows flags are up and the link's time is added in full; unfused: cuBLAS "
            "and the bytes at that rate; cold L2, interleaved with cuBLAS, medians"
        )

    def baseline(self, problem: Problem, topology: Topology) -> Baseline | None:
        """Over NVLink a bound of both that are used, see :func:`.schedule.unfused_us`."""
        return Baseline.COPIES if topology.link.over_pcie else Baseline.LINK_BOUND

    def measure(self, case: Case) -> Measurement:
        """Check one candidate and time it, interleaved with the baseline.

        Raises:
            MachineError: its kernel is not compiled. Anything that leaves the GPU unusable ends
            the process, with the reason as its last line.
        """
        try:
            return self._measure(case.problem, case.topology, case.kernel, case.run)
        except (StoreError, MachineError) as error:
            raise MachineError(str(error)) from error
        except (CommTimeout, KernelError) as error:
            self._drop()
            return Measurement.failure(self.provenance, f"{type(error).__name__}: {error}")
        except torch.cuda.OutOfMemoryError as error:
            self._drop()
            text = str(error).splitlines()[0]
            return Measurement.failure(self.provenance, f"out of memory: {text}")
        except RuntimeError as error:  # CUDA: the context may be gone, and with it all that is left
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                _end(error)
            raise

    def _measure(
        self,
        problem: Problem,
        topology: Topology,
        kernel: KernelConfig | None,
        run: RunConfig | None,
    ) -> Measurement:
        bench = self._of(problem, topology)
        # Over PCIe the unfused path is timed whole.
        link_us = 0.0 if topology.link.over_pcie else schedule.unfused_us(problem, topology)
        library = self._unfused(bench)
        if kernel is None or run is None:
            timing = self._watch.interleaved({"unfused": library})["unfused"]
            whole = timing.median_us + link_us
            bench.best_us = min(bench.best_us, whole)
            return Measurement(whole, whole, self.provenance, spread=timing.spread)
        loaded = fused_kernel(problem.signature, kernel, self._arch, self._store)
        if self._check:
            reason = wrong(problem, loaded, run, self._support)
            if reason:
                return Measurement.failure(self.provenance, reason)
        out = torch.full_like(bench.want, float("nan"))
        queue, added_us = self._fused(bench, loaded, run, out)
        try:
            timings = self._watch.interleaved(
                {"fused": queue, "unfused": library}, bench.best_us - added_us, "fused",
                most=self._most,
            )  # fmt: skip
        except (CommTimeout, KernelError) as error:
            # Streams may wait for flags that nobody raises any more: the next candidate gets
            # another process.
            _end(error)
        if self._check and problem.op.gathers and not torch.equal(out, bench.want):
            return Measurement.failure(self.provenance, "wrong result in the call that was timed")
        fused = timings["fused"]
        fused_us = fused.median_us + added_us
        bench.best_us = min(bench.best_us, fused_us)
        whole = timings["unfused"].median_us + link_us
        return Measurement(fused_us, whole, self.provenance, spread=fused.spread)

    def _of(self, problem: Problem, topology: Topology) -> _Bench:
        bench = self._bench
        if bench is None or (bench.problem, bench.topology) != (problem, topology):
            bench = None  # its memory goes before that of the next one comes
            self._drop()
            even = evened(problem)
            operands = Operands.of(even)
            left = torch.cat(operands.left) if problem.op.gathers else operands.left[0]
            partial = matmul(left, operands.weight)
            rank = self._rank(even, topology, left)
            want = partial[: even.rows_out].contiguous()
            library = torch.empty_like(partial)
            bench = _Bench(problem, rank, topology, left, operands.weight, want, library)
            self._bench = bench
            self._watch.warm(self._unfused(bench)[1])
        return bench

    def _rank(self, problem: Problem, topology: Topology, left: torch.Tensor) -> OneRank | OverPcie:
        over_pcie = topology.link.over_pcie
        # Imitated peers exchange no rows, and pinned host memory stands in for one slab of each.
        if problem.op.exchanges or (over_pcie and problem.op.shares):
            raise UsageError(
                f"{problem.key}: {problem.op.value} is not measured over {topology.link.value} "
                "yet; use --evaluator predict, or the records of "
                f"{problem.op.compiled.value}, which serve it"
            )
        if over_pcie:
            over = OverPcie(problem, self._support, topology.link is LinkKind.HOST)
            if problem.op.gathers:
                over.stage(left)
            return over
        rank = OneRank(problem, topology, self._support, self._link)
        rank.present(problem.m < FEW_TOKENS)
        return rank

    def _fused(
        self, bench: _Bench, kernel: FusedKernel, run: RunConfig, out: torch.Tensor
    ) -> tuple[Queue, float]:
        """The call, and what is to be added to its time."""
        rank, problem = bench.rank, bench.problem
        if isinstance(rank, OverPcie):
            return rank.call(kernel, run, bench.left, bench.weight, out), 0.0
        few = problem.m < FEW_TOKENS
        call = rank.call(kernel, run, bench.left, bench.weight, out, present=few)
        if not few:
            return call, 0.0
        return call, schedule.unhidden_us(problem, bench.topology, kernel.kernel, run)

    def _unfused(self, bench: _Bench) -> Queue:
        """The library's GEMM; over PCIe with the copies."""
        if isinstance(bench.rank, OverPcie):
            return bench.rank.unfused(bench.left, bench.weight, bench.library)
        left, weight, out = bench.left, bench.weight.t(), bench.library
        return _nothing, lambda: torch.mm(left, weight, out=out)

    def _finish(self) -> None:
        if self._bench is None:
            torch.cuda.synchronize()
        else:
            self._bench.rank.finish(FINISH_S)

    def _drop(self) -> None:
        self._bench = None
        torch.cuda.empty_cache()


def _nothing() -> None:
    pass


def _end(error: Exception) -> NoReturn:
    """End this process, with the reason as its last line."""
    print(f"{type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    os._exit(70)


def make(
    gpu: Gpu, store: Path | None = None, check: bool = True, brief: bool = False
) -> DeviceEvaluator:
    """For :class:`~fluxgen.tune.evaluators.process.ProcessEvaluator`."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return DeviceEvaluator(gpu, store, check, brief)


__all__ = ["METHOD_VERSION", "DeviceEvaluator", "make"]
