"""Ask NVIDIA's matmul heuristics, as a process: ``python -m fluxgen.tune.heuristics_worker``.

The package is a foreign binary: version 0.1.0.27 ends in a segmentation fault when its descriptors
are collected, and also when asked for bf16 ("TST"). So it runs where that harms nobody, is asked
for "HSH" (16-bit operands, fp32 accumulation) whatever the type, and leaves without clean-up.

Reads one JSON document on stdin, ``{"gpu": "H200_SXM", "count": 4, "shapes": [[m, n, k, batch]]}``,
and prints one: a list per shape of [tile_m, tile_n, tile_k, cluster_m, cluster_n], best first.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

_ALIVE: list[object] = []
"""What must not be collected before the process ends."""


def ask(question: dict[str, Any]) -> list[list[list[int]]]:
    """The package's proposals for each shape; raises whatever the package raises."""
    api: Any = importlib.import_module("nvMatmulHeuristics")
    heuristics = api.NvMatmulHeuristicsInterface(
        api.NvMatmulHeuristicsTarget.CUTLASS3,
        precision="HSH",
        flags=api.NvMatmulHeuristicsFlags.PERF_MODEL_BASED_AUTO_TUNING,
    )
    hardware = heuristics.createHardwareDescriptor()
    _ALIVE.extend((heuristics, hardware))
    gpu = getattr(api.NvMatmulHeuristicsNvidiaGpu, question["gpu"])
    heuristics.setHardwarePredefinedGpu(hardware, gpu)
    layout = api.NvMatmulHeuristicsMatmulLayout.NT_ROW_MAJOR
    # Without an explicitly loaded discovery set the answers are those of a generic kernel.
    if not heuristics.loadInternalDiscoverySet(layout, hardware):
        return [[] for _ in question["shapes"]]
    names = ("cta_tile_m", "cta_tile_n", "cta_tile_k", "cluster_m", "cluster_n")
    answers = []
    for m, n, k, batch in question["shapes"]:
        asked = heuristics.makeNvMatmulHeuristicsProblem(m, n, k, layout, batch)
        found = heuristics.get(asked, question["count"], hardware)
        _ALIVE.extend((asked, found))
        kernels = [entry["kernel"] for entry in sorted(found, key=lambda e: float(e["runtime"]))]
        answers.append([[int(getattr(kernel, name)) for name in names] for kernel in kernels])
    return answers


def main() -> None:
    """Answer stdin on stdout and leave at once."""
    print(json.dumps(ask(json.load(sys.stdin))), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
