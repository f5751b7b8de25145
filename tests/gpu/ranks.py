"""Processes that share one GPU as the ranks of a group, with a tuning database for the tests.

The processes take turns on the GPU (no MPS), so a wait for a peer costs a time slice: the tests
keep their calls few.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Provenance, Record
from fluxgen.core.topology import LinkKind, Topology
from fluxgen.db.database import Database
from fluxgen.machine.device import devices
from tests.dist.pool import Pool
from tests.gpu.conftest import KERNELS

PP = Schedule.PINGPONG
AG_NK, AG_KN = KernelConfig(64, 96, 64, 2, 1, PP), KernelConfig(128, 128, 64, 1, 1, PP)
RS_NK, RS_KN = KernelConfig(64, 96, 64, 2, 1, PP), KernelConfig(128, 128, 64, 1, 1, PP)
PULL = RunConfig(chunks=3, chunk_axis=ChunkAxis.K)
PULL_ROWS = RunConfig(chunks=2)
PUSH, PUSH_ROWS = (replace(run, transport=Transport.COPY_ENGINE_PUSH) for run in (PULL, PULL_ROWS))
SM_COPY = RunConfig(transport=Transport.SM_COPY)
STORE = RunConfig(transport=Transport.PEER_STORE)
DRAIN = RunConfig(transport=Transport.COPY_ENGINE_DRAIN)

AG, RS = Signature.of("ag_gemm"), Signature.of("gemm_rs")
AR = Signature.of("gemm_ar")
FLAT = KernelConfig(16, 64, 128, 1, 1, Schedule.FLAT)
FEW = {3: Transport.BROADCAST_PACKETS, 5: Transport.PEER_BROADCAST, 16: Transport.BROADCAST_PACKETS}
"""Tokens of an all-reduce in one shot."""
FEW_NK = 1368, 520
AG_T, RS_T = replace(AG, b_layout="kn"), replace(RS, b_layout="kn")


def record(
    problem: Problem, kernel: KernelConfig | None, run: RunConfig | None,
    link: LinkKind = LinkKind.NVLINK,
) -> Record:  # fmt: skip
    """A record that makes the ops run ``kernel``; its figures stand for nothing."""
    gpu = devices()[0].gpu
    topology = Topology.of(gpu, link, problem.tp)
    time = 1.0 if kernel else 2.0
    return Record(problem, topology.key, kernel, run, time, 2.0, Provenance.PREDICTED)


def database(records: Iterable[Record], path: str | None = None) -> str:
    """A database file that holds ``records``."""
    path = path or os.path.join(tempfile.mkdtemp(prefix="fluxgen-ops-"), "tuning.sqlite3")
    Database(path).put_many(records)
    return path


def shapes(tp: int) -> list[Record]:
    """What the tests call, for groups of ``tp``: every size with every transport that fits it."""
    out = []
    for m, transport in FEW.items():
        run = RunConfig((tp,), transport=transport, span=tp, split=4)
        out.append(record(Problem(AR, m, *FEW_NK, tp), FLAT, run))
    for rows, n, k in SIZES:
        m = rows * tp
        by_k, by_rows = (PULL, PULL_ROWS) if rows % 2 else (PUSH, PUSH_ROWS)
        copies = by_k if k >= 256 else by_rows if rows > 64 else RunConfig()
        run = SM_COPY if rows < 64 else copies
        out.append(record(Problem(AG, m, n, k, tp), AG_NK, run))
        sends = replace(DRAIN, chunks=2 if rows > RS_NK.tile_m else 1) if rows % 2 else STORE
        out.append(record(Problem(RS, m, n, k, tp), RS_NK, sends))
        if rows > 64:
            # The backward of both ops multiplies with the transposed weight.
            whole = replace(PUSH_ROWS, chunks=1)
            run = PUSH_ROWS if rows > AG_KN.tile_m else whole
            out.append(record(Problem(AG_T, m, k, n, tp), AG_KN, run))
            sends = replace(DRAIN, chunks=2) if rows % 2 else STORE
            out.append(record(Problem(RS_T, m, k, n, tp), RS_KN, sends))
    return out


def trained(tp: int) -> list[Record]:
    """What ``tests.dist.async_tp`` calls beside :func:`shapes`: of two weights, and gradients."""
    rows, n, k = TRAINED
    m = rows * tp
    whole = replace(PUSH_ROWS, chunks=1)
    return [
        record(Problem(AG, m, 2 * n, k, tp), AG_NK, PUSH_ROWS),
        record(Problem(RS_T, m, k, 2 * n, tp), RS_KN, STORE),
        record(Problem(AG_T, k, n, m, tp), AG_KN, whole),
        record(Problem(AG_T, k, 2 * n, m, tp), AG_KN, whole),
    ]


def hosted(records: Iterable[Record]) -> list[Record]:
    """The same over the host's memory, pulled and stored where they are pushed and drained."""
    other = {
        Transport.COPY_ENGINE_PUSH: Transport.COPY_ENGINE_PULL,
        Transport.COPY_ENGINE_DRAIN: Transport.PEER_STORE,
    }
    out = []
    for each in records:
        assert each.run is not None
        run = replace(each.run, transport=other.get(each.run.transport, each.run.transport))
        out.append(record(each.problem, each.kernel, run, LinkKind.HOST))
    return out


TRAINED = (72, 264, 136)
"""Rows, n and k of the layers under Torch's names, of two ranks."""

SIZES = [
    (1, 136, 72),
    (36, 264, 136),
    (37, 264, 1000),
    (64, 96, 64),
    (72, 264, 136),
    (129, 136, 512),
    (200, 1368, 360),
]


def on_the_gpu() -> None:
    """First thing in each process."""
    import faulthandler

    import torch

    faulthandler.dump_traceback_later(550, exit=True)
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False


class Environment:
    """The variables of one rank; picklable."""

    def __init__(self, path: str, **more: str) -> None:
        self.path, self.more = path, more

    def __call__(self, rank: int) -> dict[str, str]:
        del rank
        return {
            "FLUXGEN_DB": self.path,
            "FLUXGEN_STORE": str(Path(KERNELS).resolve()),
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
            **self.more,
        }


def pool(
    world: int,
    groups: dict[str, list[int]] | None = None,
    environment: Callable[[int], dict[str, str]] | None = None,
) -> Pool:
    """``world`` ranks on this GPU; the group of all of them is ``groups["all"]``."""
    names = {"all": list(range(world)), **(groups or {})}
    sizes = {len(ranks) for ranks in names.values() if len(ranks) > 1}
    records = [r for tp in sorted(sizes) for r in shapes(tp)] + trained(2)
    return Pool(names, world, environment or Environment(database(records)), on_the_gpu)


def integers(seed: int, *shape: int) -> Any:
    """Small integers of bf16 on the GPU, the same on every rank for one seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(torch.bfloat16).cuda()


def product(a: Any, b: Any) -> Any:
    """a (m, k) times b (n, k) transposed: exact in fp32 for these integers."""
    return a.float() @ b.float().t()


def scattered(partials: list[Any], rank: int, scale: float = 1.0, bias: Any = None) -> Any:
    """What rank keeps: partial sums rounded where the kernel rounds, added in rank order."""
    import torch

    total = torch.zeros_like(partials[0], dtype=torch.float32)
    for partial in partials:
        total += partial.to(torch.bfloat16).float()
    total = total * scale
    if bias is not None:
        total = total + bias.float()
    return total.chunk(len(partials))[rank].to(torch.bfloat16)
