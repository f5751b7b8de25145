"""An evaluator that is cheap, counts, fails and dies on demand; runs as a program too."""

from __future__ import annotations

import math
import os
import signal
import sys
import time

from fluxgen.codegen.space import why_illegal
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Baseline, Provenance
from fluxgen.core.topology import Topology
from fluxgen.tune import Evaluator, Measurement, tune

TOPOLOGY = Topology.of("h100-sxm", "nvlink", 2)
PROBLEM = Problem(Signature.of("ag_gemm"), 2048, 1024, 1024, 2)
OTHER = Problem(Signature.of("gemm_rs"), 2048, 1024, 1024, 2)


class Fake(Evaluator):
    """Deterministic made-up times; every candidate beats the baseline unless told otherwise."""

    kind = "fake"
    provenance = Provenance.EMULATED

    def __init__(self, *, base: float = 1000.0, fail=None, die_at: int = 0, stop_at: int = 0,
                 sleep: float = 0.0) -> None:  # fmt: skip
        self.base, self.fail, self.die_at, self.stop_at = base, fail, die_at, stop_at
        self.sleep = sleep
        self.calls: list[tuple] = []

    def method(self, topology) -> str:
        return "made up"

    def baseline(self, problem, topology):
        return Baseline.COPIES

    def measure(self, case) -> Measurement:
        problem, topology, kernel, run = case.problem, case.topology, case.kernel, case.run
        self.calls.append((problem, kernel, run))
        if len(self.calls) == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(self.calls) == self.stop_at:
            raise KeyboardInterrupt
        time.sleep(self.sleep)
        if kernel is None:
            return Measurement(self.base, self.base, self.provenance)
        reason = why_illegal(problem, topology, kernel, run)
        assert reason is None, reason
        failure = self.fail(kernel, run) if self.fail else None
        if failure is not None:
            return failure
        knobs = math.sin(hash((kernel.tile_n, kernel.tile_m, run.panel, run.chunks, run.groups)))
        return Measurement(500 + 100 * knobs, self.base, self.provenance)

    @property
    def asked(self) -> list[tuple]:
        return [(kernel, run) for _, kernel, run in self.calls]


def main() -> None:
    storage, trials, die_at, sleep = sys.argv[1:5]
    evaluator = Fake(die_at=int(die_at), sleep=float(sleep))
    result = tune([PROBLEM], TOPOLOGY, evaluator=evaluator, trials=int(trials), storage=storage)
    print(result.evaluated, result.records[0].kernel.name)


if __name__ == "__main__":
    main()
