"""Records to test with, and files that are no databases."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

from fluxgen.core.config import KernelConfig, RunConfig, Transport
from fluxgen.core.dtypes import DType
from fluxgen.core.epilogue import Epilogue
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Environment, Provenance, Record
from fluxgen.core.topology import Topology

NVLINK8 = Topology.of("h100-sxm", "nvlink", 8)
AG = Signature.of(Op.AG_GEMM)
KERNEL = KernelConfig(128, 128, 64)
SMALL = KernelConfig(64, 96, 64)

# One other value for each field: each must make another key.
OTHER_SIGNATURES = [
    replace(AG, op=Op.GEMM_RS),
    replace(AG, dtype=DType.FP16),
    replace(AG, out_dtype=DType.FP16),
    replace(AG, b_layout="kn"),
    replace(AG, epilogue=Epilogue.parse("bias")),
    replace(AG, return_gathered=True),
]


def problem(m=4096, n=6144, k=12288, tp=8, signature=AG):
    return Problem(signature, m, n, k, tp)


def record(
    m=4096,
    *,
    n=6144,
    k=12288,
    tp=8,
    signature=AG,
    topology=None,
    kernel=KERNEL,
    run=None,
    time_us=100.0,
    baseline_us=150.0,
    provenance=Provenance.MEASURED,
    created="2026-01-02T03:04:05Z",
    environment=None,
    baseline=None,
):
    if kernel is not None and run is None:
        rs = signature.op is Op.GEMM_RS
        run = RunConfig(transport=Transport.PEER_STORE if rs else Transport.COPY_ENGINE_PULL)
    return Record(
        problem=Problem(signature, m, n, k, tp),
        topology=topology or f"h100-sxm-nvlink-tp{tp}",
        kernel=kernel,
        run=None if kernel is None else run,
        time_us=time_us,
        baseline_us=baseline_us,
        provenance=provenance,
        environment=environment or Environment(gpu="NVIDIA H100 80GB HBM3", sm_count=132),
        created=created,
        baseline=baseline,
    )


def baseline(m, **kwargs):
    return record(m, kernel=None, time_us=150.0, **kwargs)


def raw(path, *statements):
    """Run SQL on a file directly, as another program would."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for sql, *values in statements:
            connection.execute(sql, values)
    finally:
        connection.close()


def bytes_of(path):
    """Every file beside ``path`` but the empty scratch files that a reader of SQLite leaves."""
    found = {p.name: p.read_bytes() for p in Path(path).parent.iterdir() if p.is_file()}
    return {
        name: content
        for name, content in found.items()
        if not name.endswith("-shm") and not (name.endswith("-wal") and not content)
    }
