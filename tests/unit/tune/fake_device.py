"""An evaluator that misbehaves as kernels on a GPU do, for a process of its own."""

from __future__ import annotations

import os
import signal
import sys
import time

from tuning_helpers import Fake

from fluxgen.core.errors import MachineError, UnsupportedError
from fluxgen.tune.evaluators import Measurement


class FakeDevice(Fake):
    """``faults``: what a candidate of so many tile columns (n96), or cut so (k2, m8), does."""

    kind = "fake-device"
    versions = {"driver": "13.0", "cuda": "12.9"}

    def __init__(self, faults: dict[str, str], log: str) -> None:
        super().__init__()
        self.faults, self.log = faults, log

    def measure(self, case) -> Measurement:
        kernel, run = case.kernel, case.run
        name, fault = "baseline", ""
        if kernel is not None:
            cut = f"{run.chunk_axis.value}{run.chunks}"
            name = f"{kernel.name}/{run.groups}/{run.panel}/{cut}".replace(" ", "")
            fault = self.faults.get(f"n{kernel.tile_n}", self.faults.get(cut, ""))
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"{os.getpid()} {name} {fault}\n")
        if fault == "crash":
            print("an illegal memory access was encountered", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "hang":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        if fault == "exit":
            sys.exit(3)
        if fault == "raise":
            raise ValueError("misaligned address")
        if fault == "broken":
            raise MachineError("the GPU is lost")
        return super().measure(case)


def make(faults=None, log=os.devnull) -> FakeDevice:
    return FakeDevice(faults or {}, log)


def refuse() -> FakeDevice:
    raise UnsupportedError("no GPU here")


def never_ready() -> FakeDevice:
    time.sleep(600)
    raise AssertionError


def die() -> FakeDevice:
    print("libcuda.so.1: cannot open shared object file", flush=True)
    os._exit(7)
