"""How long a persistent GEMM takes: tiles, waves, load traffic and memory traffic.

A fused kernel computes W slabs of (m / tp) x n, each padded to clusters of tiles on its own; the
plain GEMM computes one slab of m x n. Both are a :class:`Grid` of clusters walked in arrival
groups (``tile_order.cuh``: groups of slabs, panels of N inside a group, rows inside a panel).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp

from fluxgen.core.config import KernelConfig, Schedule
from fluxgen.core.topology import Gpu
from fluxgen.predict import constants as c

# Tiles that a vendor library would pick from, for the plain GEMM.
_LIBRARY_TILES = (
    KernelConfig(128, 256, 64, 2, 1, Schedule.COOPERATIVE),
    KernelConfig(256, 128, 64, 2, 1, Schedule.COOPERATIVE),
    KernelConfig(128, 192, 64, 2, 1, Schedule.COOPERATIVE),
    KernelConfig(128, 128, 64, 2, 1, Schedule.PINGPONG),
    KernelConfig(64, 256, 64, 1, 1, Schedule.PINGPONG),
    KernelConfig(64, 192, 64, 1, 1, Schedule.PINGPONG),
    KernelConfig(64, 128, 64, 1, 1, Schedule.PINGPONG),
    KernelConfig(64, 96, 64, 1, 1, Schedule.PINGPONG),
    KernelConfig(64, 64, 64, 1, 1, Schedule.PINGPONG),
)


@dataclass(frozen=True)
class Grid:
    """The clusters of one launch.

    Attributes:
        rows, columns: clusters of one slab along m and n. slabs: slabs (W, or 1 for a flat GEMM).
        slots: clusters resident on the GPU at a time.
    """

    rows: int
    columns: int
    slabs: int
    slots: int

    @property
    def total(self) -> int:
        """Clusters of all slabs."""
        return self.rows * self.columns * self.slabs

    @property
    def waves(self) -> int:
        """Rounds of clusters that the busiest slot computes."""
        return -(-self.total // self.slots)


@dataclass(frozen=True)
class GemmTime:
    """Prediction of one GEMM with all its data present.

    Attributes:
        grid: what is walked. time_us: the whole kernel, without its launch.
        wave_us: one wave, were memory infinitely fast. once_us: part of ``time_us`` outside waves.
    """

    grid: Grid
    time_us: float
    wave_us: float
    once_us: float

    def scaled(self, factor: float) -> GemmTime:
        """The same with every time multiplied by ``factor``."""
        return GemmTime(
            self.grid, self.time_us * factor, self.wave_us * factor, self.once_us * factor
        )

    def rest_us(self, position: int, done: float = 0.0) -> float:
        """Time from the start of cluster ``position`` of the walk to the kernel's end.

        Args:
            position: index in the walk. done: share of that cluster's own work already done.
        """
        left = self.grid.total - position
        compute = self.wave_us * (-(-left // self.grid.slots) - done)
        memory = (self.time_us - self.once_us) * (left / self.grid.total - done / self.grid.waves)
        return max(compute, memory) + self.once_us


def make_grid(rows: int, n: int, slabs: int, kernel: KernelConfig, sms: int) -> Grid:
    """The grid of ``slabs`` slabs of ``rows`` x ``n`` elements on ``sms`` SMs.

    Clusters of four do not fill GPCs of 18 SMs.
    """
    ctas = kernel.cluster_m * kernel.cluster_n
    usable = sms if ctas < 4 else max(ctas, sms // c.GPC_SMS * c.GPC_SMS)
    return Grid(
        rows=-(-rows // (kernel.tile_m * kernel.cluster_m)),
        columns=-(-n // (kernel.tile_n * kernel.cluster_n)),
        slabs=slabs,
        slots=max(1, usable // ctas),
    )


def tensor_share(gpu: Gpu, busy_us: float) -> float:
    """Share of the datasheet tensor rate that a kernel of ``busy_us`` sustains (clock falls)."""
    hot = c.COLD_RATE - (c.COLD_RATE - c.HOT_RATE) * min(1.0, gpu.tflops / c.FULL_POWER_TFLOPS)
    return hot + (c.COLD_RATE - hot) * exp(-busy_us / c.HEATING_US)


@lru_cache(maxsize=1024)
def tile_slowdown(kernel: KernelConfig) -> float:
    """How much slower than the tensor cores alone a tile is, for its loads (at least 1).

    A pipeline given explicitly shallower than 256 elements of K hides less latency.
    """
    area = kernel.tile_m * kernel.tile_n
    alone = kernel.tile_m + kernel.tile_n
    shared = kernel.tile_m / kernel.cluster_n + kernel.tile_n / kernel.cluster_m
    traffic = (alone - c.MULTICAST * (alone - shared)) / area
    slow = (1 + (traffic / c.TILE_TRAFFIC) ** c.TILE_TRAFFIC_NORM) ** (1 / c.TILE_TRAFFIC_NORM)
    slow *= 1 + c.CLUSTER_SYNC * (kernel.cluster_m * kernel.cluster_n - 1)
    depth = kernel.stages * kernel.tile_k
    if 0 < depth < 256:
        slow *= 1 + 0.15 * (256 - depth) / 256
    return float(slow)


def tile_overhead_us(kernel: KernelConfig, element: int) -> tuple[float, float]:
    """Microseconds of (each tile, the whole kernel) that MMAs do not fill: prologue, epilogue.

    A ping-pong kernel hides them behind the other warpgroup's tile, all but once.
    """
    store = kernel.tile_m * kernel.tile_n * element / (c.STORE_GBS_PER_SM * 1e3)
    exposed = c.FILL_US + store
    return (0.15 * store, exposed) if kernel.schedule is Schedule.PINGPONG else (exposed, 0.0)


def memory_bytes(
    grid: Grid, groups: Sequence[int], panel: int, kernel: KernelConfig, n: int, k: int,
    element: int, l2_bytes: float,
) -> float:  # fmt: skip
    """Bytes read from and written to device memory by a walk in ``groups`` and ``panel``.

    A group reads B once if a panel of B stays in L2, else once per wave; it reads A once if the
    group's rows stay in L2, else once per panel. Groups that share a wave share their reads of B,
    but for ``LOCKSTEP_LOSS``.
    """
    usable = l2_bytes * c.L2_USABLE
    row_bytes = kernel.tile_m * kernel.cluster_m * k * element
    column_bytes = kernel.tile_n * kernel.cluster_n * k * element
    b_bytes = n * k * element
    width = min(panel or grid.columns, grid.columns)
    total = 0.0
    for ranks in groups:
        rows = grid.rows * ranks
        # Several panels run at once when one does not fill the GPU.
        at_once = min(grid.columns, max(width, grid.slots // rows))
        a_reads = 1.0 if rows * row_bytes <= usable else max(1.0, grid.columns / at_once)
        b_reads = 1.0
        if width * column_bytes > usable:
            b_reads = max(1.0, rows * width / grid.slots)
        share = max(1.0, grid.slots / (rows * grid.columns)) if len(groups) > 1 else 1.0
        b_reads *= (1 + c.LOCKSTEP_LOSS * (share - 1)) / share
        total += a_reads * rows * row_bytes + b_reads * b_bytes
    written = grid.slabs * grid.rows * kernel.tile_m * kernel.cluster_m * n * element
    return total + written


@lru_cache(maxsize=65536)
def gemm_time(
    rows: int, n: int, k: int, slabs: int, groups: tuple[int, ...], panel: int,
    kernel: KernelConfig, gpu: Gpu, sms: int, element: int = 2,
) -> GemmTime:  # fmt: skip
    """Time of ``slabs`` slabs of ``rows`` x ``n`` x ``k`` walked in ``groups`` and ``panel``.

    Args:
        rows: rows of one slab, elements. groups: slabs per group (empty: one group).
        panel: clusters along n in one panel (0: all). sms: SMs taken (0: all).
        element: bytes of one element.
    """
    sms = min(sms or gpu.sm_count, gpu.sm_count)
    grid = make_grid(rows, n, slabs, kernel, sms)
    steps = -(-k // kernel.tile_k) * kernel.tile_k
    flops = 2.0 * kernel.tile_m * kernel.tile_n * steps
    per_sm = gpu.tflops * 1e6 / gpu.sm_count  # FLOP per microsecond at the datasheet rate
    ideal = flops / per_sm * tile_slowdown(kernel)
    each, once = tile_overhead_us(kernel, element)
    each += c.STEP_US * steps / kernel.tile_k
    waves = grid.waves
    share = tensor_share(gpu, waves * (ideal / c.COLD_RATE + each))
    compute = waves * (ideal / share + each)
    traffic = memory_bytes(grid, groups or (slabs,), panel, kernel, n, k, element, gpu.l2_mb * 1e6)
    memory = traffic / (gpu.mem_gbs * c.MEMORY_RATE * 1e3)
    p = c.MEMORY_NORM
    largest = max(compute, memory)
    both = largest * ((compute / largest) ** p + (memory / largest) ** p) ** (1 / p)
    return GemmTime(grid, both + once, compute / waves, once)


@lru_cache(maxsize=4096)
def library_gemm_us(m: int, n: int, k: int, gpu: Gpu, element: int = 2) -> float:
    """Time of the vendor library's plain GEMM of m x n x k, launch included, microseconds.

    Modelled as the best of common tiles on the flat problem, with split-K where few tiles would
    leave SMs idle.
    """
    best = float("inf")
    for kernel in _LIBRARY_TILES:
        for split in (1, 2, 4, 8):
            depth = -(-k // split)
            if split > 1 and depth < 4 * kernel.tile_k:
                break
            # A split is a slab of its own in time: the same output tile over a part of K.
            time = gemm_time(m, n, depth, split, (1,) * split, 8, kernel, gpu, 0, element).time_us
            if split > 1:
                partial = 2.0 * split * m * n * 4
                time += partial / (gpu.mem_gbs * c.SPLIT_K_GBS * 1e3) + c.LAUNCH_US / 2
            best = min(best, time)
    return best + c.LAUNCH_US
