"""How long a warm lookup takes. Prints one JSON object; times in nanoseconds.

python tests/bench/bench_lookup.py [--records 2000] [--calls 2000] [--repeats 200]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fluxgen
from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Provenance, Record
from fluxgen.core.topology import Topology
from fluxgen.db.database import Database
from fluxgen.db.lookup import Lookup


def time_ns(call: Callable[[], object], calls: int, repeats: int) -> dict[str, float]:
    """Nanoseconds per call over ``repeats`` batches, the bare loop's time taken off."""

    def batch(work: Callable[[], object]) -> float:
        begin = time.perf_counter_ns()
        for _ in range(calls):
            work()
        return (time.perf_counter_ns() - begin) / calls

    empty = min(batch(lambda: None) for _ in range(20))
    times = sorted(batch(call) - empty for _ in range(repeats))
    return {
        "median": round(statistics.median(times), 1),
        "p99": round(times[int(0.99 * (len(times) - 1))], 1),
        "min": round(times[0], 1),
    }


def cpu_name() -> str:
    """The processor's model, or what the platform says."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return f"{names[0]} x {len(names)}" if names else platform.machine()


def main() -> None:
    """Fill a database, warm a Lookup, time it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()

    signature = Signature.of("ag_gemm")
    topology = Topology.of("h100-sxm", "nvlink", 8)
    kernel, run = KernelConfig(128, 128, 64), RunConfig()
    with tempfile.TemporaryDirectory() as folder:
        db = Database(Path(folder) / "tuning.sqlite3")
        db.put_many(
            Record(
                problem=Problem(signature, 1024 << (i % 5), 128 * (1 + i // 5), 8192, 8),
                topology=topology.key,
                kernel=kernel,
                run=run,
                time_us=100.0,
                baseline_us=150.0,
                provenance=Provenance.PREDICTED,
            )
            for i in range(args.records)
        )
        look = Lookup(db, None)
        exact = Problem(signature, 4096, 128, 8192, 8)
        near = Problem(signature, 3072, 128, 8192, 8)
        begin = time.perf_counter_ns()
        answers = [look(exact, topology), look(near, topology)]
        cold = time.perf_counter_ns() - begin
        other, other_topology = copy.deepcopy(exact), copy.deepcopy(topology)
        look(other, other_topology)
        os.environ["FLUXGEN_DB"] = str(db.path)

        def public() -> object:
            return fluxgen.lookup(
                "ag_gemm", 4096, 3584, 4096, tp=8, target="h100-sxm", link="nvlink"
            )

        public()
        result = {
            "command": shlex.join([Path(sys.executable).name, *sys.argv]),
            "fluxgen": fluxgen.__version__,
            "python": platform.python_version(),
            "cpu": cpu_name(),
            "records": args.records,
            "answers": [answer.reason.value for answer in answers],
            "first_lookup_ns": cold,
            # what the README calls, with its arguments: names, the environment and the files' state
            "public_warm_ns": time_ns(public, args.calls, args.repeats),
            "warm_exact_ns": time_ns(lambda: look(exact, topology), args.calls, args.repeats),
            "warm_bucket_ns": time_ns(lambda: look(near, topology), args.calls, args.repeats),
            "warm_new_problem_object_ns": time_ns(
                lambda: look(Problem(signature, 4096, 128, 8192, 8), topology),
                args.calls,
                args.repeats,
            ),
            # every object made anew for every call: found by value, not by identity
            "warm_all_objects_anew_ns": time_ns(
                lambda: look._slow(other, other_topology), args.calls, args.repeats
            ),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
