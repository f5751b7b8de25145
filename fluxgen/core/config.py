"""How a problem is computed: what is compiled (KernelConfig) and what is not (RunConfig)."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any

from fluxgen.core.errors import UsageError


class Schedule(str, enum.Enum):
    """How the warps of a block share the work (``cutlass/gemm/dispatch_policy.hpp``)."""

    PINGPONG = "pingpong"
    COOPERATIVE = "cooperative"
    """sm90: ``KernelTmaWarpSpecializedPingpong`` and ``...Cooperative``."""
    MULTISTAGE_4 = "multistage4"
    MULTISTAGE_8 = "multistage8"
    """sm80: ``MainloopSm80CpAsync`` with so many warps, which load and multiply in turn."""
    FLAT = "flat"
    """Tiles span the rows of all ranks, operands swapped; K is split over a cluster's blocks
    (sm90) or a block's warps (sm80)."""


class Transport(str, enum.Enum):
    """How bytes and flags move between ranks."""

    COPY_ENGINE_PULL = "copy_engine_pull"
    """ag_gemm: a copy engine pulls each peer's slab, chunk by chunk, then raises its flag."""
    COPY_ENGINE_PUSH = "copy_engine_push"
    """ag_gemm: a copy engine pushes this rank's slab to each peer: x is read where it lies, nothing
    is staged. The gathered x is then the workspace's and cannot be returned."""
    COPY_ENGINE_RING = "copy_engine_ring"
    """ag_gemm: each rank forwards to the one before it: its slab, then those that come to it. Over
    PCIe each slab so crosses the link between two sockets once."""
    SM_COPY = "sm_copy"
    """ag_gemm of few tokens: one kernel pulls all slabs at once, before the GEMM."""
    PEER_STORE = "peer_store"
    """gemm_rs: the epilogue's TMA stores go straight into the peer's inbox."""
    PEER_BROADCAST = "peer_broadcast"
    """gemm_ar of few tokens, in one shot: the epilogue stores into the inboxes of all ranks, and
    each of them reduces all rows."""
    PEER_PACKETS = "peer_packets"
    BROADCAST_PACKETS = "broadcast_packets"
    """The same two of the fewest tokens, in packets of 32 bits of data and their epoch: they need
    neither flags nor fences, at twice the bytes (NCCL's LL)."""
    COPY_ENGINE_DRAIN = "copy_engine_drain"
    """gemm_rs over PCIe: tiles are stored locally, a copy engine ships finished chunks."""

    @property
    def copies(self) -> bool:
        """Whether copy engines move the slabs, beside the GEMM."""
        return self in (
            Transport.COPY_ENGINE_PULL, Transport.COPY_ENGINE_PUSH, Transport.COPY_ENGINE_RING,
            Transport.COPY_ENGINE_DRAIN,
        )  # fmt: skip

    @property
    def stores(self) -> bool:
        """Whether the GEMM itself stores what it computes into other ranks."""
        return self is Transport.PEER_STORE or self.in_one_shot or self.packed

    @property
    def in_one_shot(self) -> bool:
        """Whether every rank gets all rows of every rank, and reduces them all."""
        return self in (Transport.PEER_BROADCAST, Transport.BROADCAST_PACKETS)

    @property
    def packed(self) -> bool:
        """Whether data travel in packets that carry their epoch."""
        return self in (Transport.PEER_PACKETS, Transport.BROADCAST_PACKETS)

    @property
    def bytes_each(self) -> int:
        """Bytes that move for each byte of data."""
        return 2 if self.packed else 1

    @property
    def pushes(self) -> bool:
        """Whether slabs of an ag_gemm come into the matrix of each rank's workspace."""
        return self in (Transport.COPY_ENGINE_PUSH, Transport.COPY_ENGINE_RING)


class ChunkAxis(str, enum.Enum):
    """Along which axis of A (AG) or D (RS) a slab is cut into chunks."""

    M = "m"
    K = "k"


@dataclass(frozen=True, order=True)
class KernelConfig:
    """Everything that is compiled in, beside the signature and the architecture.

    Attributes:
        tile_m, tile_n, tile_k: the CTA tile, elements.
        cluster_m, cluster_n: CTAs of a cluster along M and N.
        schedule: ping-pong or cooperative consumer warpgroups (sm90), or warps (sm80).
        stages: shared-memory pipeline stages, 0 for as many as fit (sm90).
    """

    tile_m: int
    tile_n: int
    tile_k: int
    cluster_m: int = 1
    cluster_n: int = 1
    schedule: Schedule = Schedule.PINGPONG
    stages: int = 0

    @property
    def name(self) -> str:
        """``128x192x64_2x1_pingpong_auto``."""
        stages = "auto" if self.stages == 0 else f"s{self.stages}"
        return (
            f"{self.tile_m}x{self.tile_n}x{self.tile_k}_{self.cluster_m}x{self.cluster_n}_"
            f"{self.schedule.value}_{stages}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "schedule": self.schedule.value}

    @classmethod
    def from_dict(cls, data: object) -> KernelConfig:
        """Read what :meth:`to_dict` wrote.

        Raises:
            UsageError: for missing, extra or mistyped fields.
        """
        fields = _fields(data, "kernel", cls.__dataclass_fields__)
        ints = {key: _int("kernel", key, fields[key]) for key in fields if key != "schedule"}
        return cls(**ints, schedule=_enum("kernel", "schedule", Schedule, fields["schedule"]))


@dataclass(frozen=True, order=True)
class RunConfig:
    """Everything chosen at run time on a compiled kernel.

    Attributes:
        groups: arrival groups, ranks per group in arrival order (they sum to the world; empty
            means one group). Ranks of a group share one pass over B.
        panel: width of a panel of N inside a group, in clusters (0: all of N).
        chunk_axis, chunks: how each rank's slab is cut for the transport: rows (M) into equal
            chunks; K into chunks of which each after the first is as long as all before it.
        sms: SMs the persistent kernel may take (0: all).
        span: adjacent ranks whose slabs are tiled as one, so that slabs shorter than a tile
            fill it; it divides the world and every group.
        transport: how bytes and flags move.
        split: flat kernels: parts that K is computed in.
    """

    groups: tuple[int, ...] = ()
    panel: int = 0
    chunk_axis: ChunkAxis = ChunkAxis.M
    chunks: int = 1
    sms: int = 0
    transport: Transport = Transport.COPY_ENGINE_PULL
    span: int = 1
    split: int = 1

    @property
    def cut(self) -> int:
        """Slabs, from the own one on, that K chunks cut: of the groups up to the first remote one.

        The first tiles need those early; later slabs come whole. 0: all.
        """
        slabs = 0
        for size in self.groups:
            slabs += size
            if slabs > 1:
                return slabs
        return 0

    @property
    def shares(self) -> tuple[float, ...]:
        """Each chunk's share of its slab, where the sizes of chunks do not matter."""
        if self.chunk_axis is ChunkAxis.M or self.chunks < 2:
            return (1.0 / max(self.chunks, 1),) * self.chunks
        first = 0.5 ** (self.chunks - 1)
        return (first, *(first * 2**i for i in range(self.chunks - 1)))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``split`` where it is not 1, as records from before it have none."""
        split = {} if self.split == 1 else {"split": self.split}
        return {
            "groups": list(self.groups),
            "panel": self.panel,
            "chunk_axis": self.chunk_axis.value,
            "chunks": self.chunks,
            "sms": self.sms,
            "transport": self.transport.value,
            "span": self.span,
            **split,
        }

    @classmethod
    def from_dict(cls, data: object) -> RunConfig:
        """Read what :meth:`to_dict` wrote.

        Raises:
            UsageError: for missing, extra or mistyped fields.
        """
        if isinstance(data, dict):
            data = {"split": 1, **data}
        fields = _fields(data, "run", cls.__dataclass_fields__)
        groups = fields["groups"]
        if not isinstance(groups, list) or len(groups) > 64:
            raise UsageError(f"run.groups: expected a short list of integers; found {groups!r}")
        return cls(
            groups=tuple(_int("run", "groups", g) for g in groups),
            panel=_int("run", "panel", fields["panel"]),
            chunk_axis=_enum("run", "chunk_axis", ChunkAxis, fields["chunk_axis"]),
            chunks=_int("run", "chunks", fields["chunks"]),
            sms=_int("run", "sms", fields["sms"]),
            transport=_enum("run", "transport", Transport, fields["transport"]),
            span=_int("run", "span", fields["span"]),
            split=_int("run", "split", fields["split"]),
        )


def _fields(data: object, what: str, names: Any) -> dict[str, Any]:
    if not isinstance(data, dict) or set(data) != set(names):
        found = sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise UsageError(f"{what}: expected exactly the keys {sorted(names)}; found {found}")
    return data


def _int(what: str, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise UsageError(f"{what}.{key}: expected a non-negative integer; found {value!r}")
    return value


def _enum(what: str, key: str, kind: type[Any], value: object) -> Any:
    try:
        return kind(value)
    except ValueError:
        valid = ", ".join(member.value for member in kind)
        raise UsageError(f"{what}.{key}: expected one of {valid}; found {value!r}") from None
