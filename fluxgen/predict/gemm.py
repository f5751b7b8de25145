"""How long a persistent GEMM takes: tiles, waves, load traffic and memory traffic.

A fused kernel computes W slabs of (m / tp) x n, each padded to tiles on its own (or W / span slabs
of span times the rows); the plain GEMM computes one slab of m x n. Both are a :class:`Grid` of
clusters walked in arrival groups (``tile_order.cuh``: groups of slabs, panels of N inside a group,
rows inside a panel; a cluster takes consecutive rows of its group, also across two slabs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, inf

from fluxgen.core.config import KernelConfig, Schedule
from fluxgen.core.problem import ceil_div
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


class Grid:
    """The clusters of one launch, in the order of their walk.

    Attributes:
        rows: tiles of one slab along m. columns: clusters along n.
        groups: slabs of each arrival group. cluster_m: tiles of a cluster along m.
        slots: clusters resident on the GPU at a time.
        starts: cluster rows before each group, then all of them. total: clusters of the walk.
        waves: rounds of clusters that the busiest slot computes.
    """

    __slots__ = ("cluster_m", "columns", "groups", "rows", "slots", "starts", "total", "waves")

    def __init__(
        self, rows: int, columns: int, groups: Sequence[int], cluster_m: int, slots: int
    ) -> None:
        self.rows, self.columns, self.groups = rows, columns, tuple(groups)
        self.cluster_m, self.slots = cluster_m, slots
        starts = [0]
        for slabs in groups:
            # Only the last cluster row of a group is padded: a cluster may span two slabs.
            starts.append(starts[-1] + ceil_div(slabs * rows, cluster_m))
        self.starts = tuple(starts)
        self.total = starts[-1] * columns
        self.waves = ceil_div(self.total, slots)


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

    def rest_us(self, position: int, done: float = 0.0) -> float:
        """Time from the start of cluster ``position`` of the walk to the kernel's end.

        Args:
            position: index in the walk. done: share of that cluster's own work already done.
        """
        left = self.grid.total - position
        compute = self.wave_us * (ceil_div(left, self.grid.slots) - done)
        memory = (self.time_us - self.once_us) * (left / self.grid.total - done / self.grid.waves)
        return max(compute, memory) + self.once_us


def make_grid(rows: int, n: int, groups: Sequence[int], kernel: KernelConfig, sms: int) -> Grid:
    """The grid of slabs of ``rows`` x ``n`` elements, walked in ``groups``, on ``sms`` SMs."""
    ctas = kernel.cluster_m * kernel.cluster_n
    usable = sms if ctas < 4 else max(ctas, sms * c.CLUSTER4_SMS)
    return Grid(
        rows=ceil_div(rows, kernel.tile_m),
        columns=ceil_div(n, kernel.tile_n * kernel.cluster_n),
        groups=groups,
        cluster_m=kernel.cluster_m,
        slots=max(1, int(usable // ctas)),
    )


def tensor_share(gpu: Gpu, busy_us: float) -> float:
    """Share of the datasheet tensor rate that a kernel of ``busy_us`` sustains (clock falls)."""
    hot = c.COLD_RATE - (c.COLD_RATE - c.HOT_RATE) * min(1.0, gpu.tflops / c.FULL_POWER_TFLOPS)
    return hot + (c.COLD_RATE - hot) * exp(-busy_us / c.HEATING_US)


@lru_cache(maxsize=1024)
def tile_loads(kernel: KernelConfig) -> float:
    """Time of a tile's loads over that of its MMAs at the datasheet rate.

    Clusters share what they load by multicast: A along n, B along m.
    """
    alone = kernel.tile_m + kernel.tile_n
    shared = kernel.tile_m / kernel.cluster_n + kernel.tile_n / kernel.cluster_m
    traffic = (alone - c.MULTICAST * (alone - shared)) / (kernel.tile_m * kernel.tile_n)
    return traffic / c.TILE_TRAFFIC


@lru_cache(maxsize=1024)
def tile_slowdown(kernel: KernelConfig) -> float:
    """How much slower than its MMAs and loads a tile's main loop is (at least 1).

    A pipeline given explicitly shallower than 256 elements of K hides less latency.
    """
    slow = 1 + c.CLUSTER_SYNC * (kernel.cluster_m * kernel.cluster_n - 1)
    depth = kernel.stages * kernel.tile_k
    if 0 < depth < 256:
        slow *= 1 + 0.15 * (256 - depth) / 256
    return slow


def tile_overhead_us(
    kernel: KernelConfig, element: int, signal_us: float = 0.0
) -> tuple[float, float]:
    """Microseconds of (each tile, the whole kernel) that MMAs do not fill: prologue, epilogue.

    A ping-pong kernel hides them behind the other warpgroup's tile, all but once.
    """
    store = kernel.tile_m * kernel.tile_n * element / (c.STORE_GBS_PER_SM * 1e3)
    exposed = c.FILL_US + store + signal_us
    return (0.0, exposed) if kernel.schedule is Schedule.PINGPONG else (exposed, 0.0)


def memory_bytes(
    grid: Grid, panel: int, kernel: KernelConfig, n: int, k: int, element: int, l2_bytes: float
) -> float:
    """Bytes read from and written to device memory by a walk in panels of ``panel`` clusters.

    A group reads B once if a panel of B stays in L2, else once per wave; it reads A once if the
    group's rows stay in L2, else once per panel. Groups that share a wave share their reads of B,
    but for ``LOCKSTEP_LOSS``.
    """
    usable = l2_bytes * c.L2_USABLE
    a_bytes = grid.rows * kernel.tile_m * k * element  # of one slab
    b_bytes = n * k * element
    width = min(panel or grid.columns, grid.columns)
    panel_bytes = width * kernel.tile_n * kernel.cluster_n * k * element
    alone = len(grid.groups) == 1
    total = 0.0
    for slabs, begin, end in zip(grid.groups, grid.starts, grid.starts[1:], strict=False):
        rows = end - begin
        a_group = a_bytes * slabs
        a_reads = b_reads = 1.0
        if a_group > usable:
            # Several panels run at once when one does not fill the GPU.
            at_once = max(width, grid.slots // rows)
            a_reads = max(1.0, grid.columns / at_once)
        if panel_bytes > usable:
            b_reads = min(rows, max(1.0, rows * width / grid.slots))
        if not alone:
            share = max(1.0, grid.slots / (rows * grid.columns))
            b_reads *= (1 + c.LOCKSTEP_LOSS * (share - 1)) / share
        total += a_reads * a_group + b_reads * b_bytes
    written = sum(grid.groups) * grid.rows * kernel.tile_m * n * element
    return total + written


def soft_max(first: float, second: float, norm: float) -> float:
    """The p-norm of two positive times: their maximum, rounded off where they are close."""
    low, high = (first, second) if first < second else (second, first)
    return float(high * (1 + (low / high) ** norm) ** (1 / norm))


@lru_cache(maxsize=65536)
def gemm_time(
    rows: int, n: int, k: int, slabs: int, groups: tuple[int, ...], panel: int,
    kernel: KernelConfig, gpu: Gpu, sms: int, element: int = 2, signal_us: float = 0.0,
    sustained: bool = False,
) -> GemmTime:  # fmt: skip
    """Time of ``slabs`` slabs of ``rows`` x ``n`` x ``k`` walked in ``groups`` and ``panel``.

    Args:
        rows: rows of one slab, elements. groups: slabs per group (empty: one group).
        panel: clusters along n in one panel (0: all). sms: SMs taken (0: all).
        element: bytes of one element. signal_us: time from a stored tile to its signal.
        sustained: the GPU is busy all the time, as in a step: its clock has fallen already.
    """
    sms = min(sms or gpu.sm_count, gpu.sm_count)
    grid = make_grid(rows, n, groups or (slabs,), kernel, sms)
    steps = ceil_div(k, kernel.tile_k) * kernel.tile_k
    flops = 2.0 * kernel.tile_m * kernel.tile_n * steps
    ideal = flops / (gpu.tflops * 1e6 / gpu.sm_count)  # microseconds at the datasheet rate
    loads = ideal * tile_loads(kernel)
    slow = tile_slowdown(kernel)
    each, once = tile_overhead_us(kernel, element, signal_us)
    each += c.STEP_US * steps / 64
    waves = grid.waves

    def wave_us(share: float) -> float:
        # Loads come from L2, whose clock does not fall with that of the SMs.
        return slow * soft_max(ideal / share, loads, c.TILE_TRAFFIC_NORM) + each

    busy_us = inf if sustained else waves * wave_us(c.COLD_RATE)
    compute = waves * wave_us(tensor_share(gpu, busy_us))
    traffic = memory_bytes(grid, panel, kernel, n, k, element, gpu.l2_mb * 1e6)
    memory = traffic / (gpu.mem_gbs * c.MEMORY_RATE * 1e3)
    time = soft_max(compute, memory, c.MEMORY_NORM)
    return GemmTime(grid, time + once, compute / waves, once)


@lru_cache(maxsize=4096)
def flat_gemm_time(
    m: int, n: int, k: int, split: int, depth: int, kernel: KernelConfig, gpu: Gpu,
    element: int = 2, signal_us: float = 0.0,
) -> GemmTime:  # fmt: skip
    """Time of a flat kernel over all ``m`` tokens, K in ``split`` parts: loads, or the memory.

    Args:
        depth: elements of K that a block takes in at a step.
        element: bytes of one element. signal_us: time from a stored tile to its signal.
    """
    grid = Grid(
        ceil_div(m, kernel.tile_m), ceil_div(n, kernel.tile_n), (1,), 1, gpu.sm_count // split
    )
    steps = ceil_div(ceil_div(k, depth), split)
    stage = (kernel.tile_m + kernel.tile_n) * depth * element
    flops = 2.0 * kernel.tile_m * kernel.tile_n * depth * steps
    ideal = flops / (gpu.tflops * 1e6 / gpu.sm_count * c.COLD_RATE)
    loads = steps * stage / (c.FLAT_SM_GBS * 1e3)
    wave = max(ideal, loads) + steps * c.STEP_US + c.FILL_US
    once = signal_us + (c.FLAT_SPLIT_US if split > 1 else 0.0)
    once += kernel.tile_m * kernel.tile_n * element / (split * c.STORE_GBS_PER_SM * 1e3)
    traffic = element * (n * k + m * k + m * n)
    memory = traffic / (gpu.mem_gbs * c.MEMORY_RATE * 1e3)
    time = soft_max(grid.waves * wave, memory, c.MEMORY_NORM)
    return GemmTime(grid, time + once, wave, once)


@lru_cache(maxsize=4096)
def library_gemm_us(
    m: int, n: int, k: int, gpu: Gpu, element: int = 2, sustained: bool = False
) -> float:
    """Time of the vendor library's plain GEMM of m x n x k, launch included, microseconds.

    Modelled as the best of common tiles on the flat problem, with split-K where few tiles would
    leave SMs idle. ``sustained`` as in :func:`gemm_time`.
    """
    best = float("inf")
    for kernel in _LIBRARY_TILES:
        for split in (1, 2, 4, 8):
            depth = ceil_div(k, split)
            if split > 1 and depth < 4 * kernel.tile_k:
                break
            # A split is a slab of its own in time: the same output tile over a part of K.
            time = gemm_time(
                m, n, depth, split, (1,) * split, 8, kernel, gpu, 0, element, 0.0, sustained
            ).time_us
            if split > 1:
                partial = 2.0 * split * m * n * 4
                time += partial / (gpu.mem_gbs * c.SPLIT_K_GBS * 1e3) + c.LAUNCH_US / 2
            best = min(best, time)
    return best + c.LAUNCH_US
