"""Every fitted number of the model, with its source. Change one, and bump ``MODEL_VERSION``.

"Measured" means on one H200 (132 SMs, 989 TFLOP/s bf16 by the datasheet, 4.8 TB/s), bf16, tp=8,
kernels interleaved with cuBLAS in one run, medians; links were imitated by raising flags on
schedule, or were the real PCIe link to pinned host memory. "Fitted to the sweep" means to the
ratios to cuBLAS of 970 configurations of 10 problems with all data present
(``tests/bench/calibrate.py`` compares); ratios, because the power limit moved the sweep's absolute
times by up to 14 % from those of the single runs that the clock's constants come from. Other GPUs
are scaled by their datasheet values; nothing here was measured on them.
"""

from __future__ import annotations

MODEL_VERSION = 8
"""Part of the name of every study of predicted times, so that old times are not mixed in."""

COLD_RATE = 0.94
"""Share of the datasheet tensor rate of a short kernel: cuBLAS reaches 816 TFLOP/s at
2048x6144x12288 (0.379 ms), the rest is waves (3 %), loads, barriers and the falling clock."""

HOT_RATE = 0.69
"""The same for a long one, whose clock falls under load: 677 TFLOP/s at 8192x6144x12288
(1.828 ms), 754 at 4096 (0.820 ms)."""

HEATING_US = 1200.0
"""Time constant between the two; fitted to the 0.38, 0.62, 0.82 and 1.83 ms points."""

FULL_POWER_TFLOPS = 989.0
"""Datasheet rate at which the clock falls as above; a slower chip falls less, in proportion."""

TILE_TRAFFIC = 0.020
"""Elements loaded per multiply-add, (tile_m / cluster_n + tile_n / cluster_m) / (tile_m tile_n), at
which loads take as long as the MMAs at the datasheet rate. Fitted to the sweep: 64-row tiles take
1.09 to 1.17 (64x192) and 1.03 to 1.07 (64x256) of the time of 128x192 at equal waves, less the
longer the kernel runs, since the clock of L2 does not fall with that of the SMs."""

MULTICAST = 0.46
"""Share of a cluster's saved loads that is saved in time (every SM still takes in whole tiles).
Fitted to the sweep: 2x1 clusters gain 1.5 to 3 % in short kernels and nothing in long ones."""

CLUSTER_SYNC = 0.003
"""Slowdown for each CTA of a cluster beyond the first: a stage is free when all have read it.
Fitted to the sweep (128x192 at m=4096: 2x1 takes 1 % more than 1x1)."""

STEP_US = 0.019
"""Barrier handling of 64 elements of K that the MMAs do not hide, about 30 clocks: it makes 128x128
tiles 3 % slower than 128x192, and 64x64 tiles slow, which have only 128 clocks of MMAs a step.
Fitted to the sweep, which has no tile_k of 128: those are assumed to save nothing."""

CLUSTER4_SMS = 0.91
"""Share of the SMs that clusters of four can take: GPCs lose SMs to yield, and not in fours. 30 of
33 such clusters fit: 64x256 4x1 needs 4 waves for 96 of them (RS m=512) and 7 for 192."""

TILE_TRAFFIC_NORM = 3.6
"""Exponent of the p-norm that joins load and MMA time of a tile (soft maximum). Fitted to the
sweep."""

MEMORY_RATE = 0.92
"""Share of the datasheet memory bandwidth under a GEMM's access pattern. Fitted to the sweep: with
panels of all N, 64x192 tiles read B once per row of clusters, at 3.8 to 4.1 TB/s."""

MEMORY_NORM = 4.4
"""Exponent of the p-norm that joins compute and memory time. Fitted to the sweep,
where panels of all N cost 0 to 30 % as their traffic comes to equal the compute time."""

LOCKSTEP_LOSS = 0.35
"""Groups that run in the same wave share reads of B through L2, but drift apart: this share of
their reads misses. Rank-major order takes 1.83x of cuBLAS at RS 512x12288x6144, 1.04x at
m=2048."""

L2_USABLE = 0.9
"""Share of L2 that a reused operand may fill before it is evicted: in the sweep panels of 8
clusters of 192 columns (38 of 50 MB) are as fast as narrower ones."""

FILL_US = 0.6
"""Latency from a tile's first TMA load to its first MMA; once per tile for cooperative kernels,
once per kernel for ping-pong ones, which hide it. Fitted to the sweep."""

SIGNAL_US = 3.7
"""gemm_rs: waiting for a tile's stores to complete, fence and release at system scope, before the
next tile of a cooperative kernel; ping-pong hides it. Fitted to the sweep: 128x256 equals 128x192
as ag_gemm (m=4096) but takes 7 % more as gemm_rs, whose tiles are half as long."""

STORE_GBS_PER_SM = 65.0
"""Rate at which one SM converts and stores a finished tile, GB/s, when nothing hides it. Fitted to
the sweep; about twice the device memory's rate over 132 SMs, since stores end in L2."""

LAUNCH_US = 4.0
"""Launch, first instruction and drain of one kernel in a stream."""

SPLIT_K_GBS = 0.5
"""Share of memory bandwidth that cuBLAS's split-K partial sums (fp32, written and read) reach."""

FLAT_SM_GBS = 70.0
"""What one SM takes in of a flat kernel's stages, GB/s. Fitted to the two best runs of the five
best kernels of 84 problems of m = 8 to 512 (H200, 2026-12-03): the model is 3 % short of them, with
a spread of 19 %."""

FLAT_SPLIT_US = 2.0
"""Parts of K: the barrier of a cluster and the reads of the others' parts (same points)."""

NCCL_RATE = 0.92
"""NCCL's share of the link rate that large copies reach (nccl-tests on 8 GPUs over NVLink report
a bus bandwidth of about 360 of the 396 GB/s assumed for copies). Published, not measured here."""

NCCL_LAUNCH_US = 8.0
"""Launch of an NCCL collective and its completion; each ring step adds the link's latency."""

ONE_SHOT_US = 6.0
"""A one-shot all-reduce beside its bytes: its launch and the two rounds of flags. Published for 8
GPUs over NVLink and a few tokens: 6 to 9 us. Not measured here."""

ONE_SHOT_WORLD = 8
"""Most ranks that servers run one among (vLLM: 2, 4, 6 or 8 GPUs that all meet over NVLink)."""

COPY_US = 1.5
"""Cost of each copy-engine operation with its flag write, beside its bytes."""

COPY_PCIE_US = 5.0
"""The same over PCIe: AG 4096x6144x12288 took 5 % longer in 28 copies than in 14 (H200)."""

SOCKET_GBS = 40.0
"""What the GPUs of one socket receive from those of another, GB/s, all together (assumed: two or
three links of 20.8 GB/s; not measured)."""

FUSED_FIXED_US = 5.0
"""Forking to the copy stream and joining it again, once per fused call."""

STORE_RATE_NVLINK = 0.9
"""Share of the link's copy rate that TMA stores to a peer reach over NVLink (assumed)."""

STORE_RATE_PCIE = 0.73
"""The same over PCIe: 40 of 55 GB/s, RS 8192x12288x6144 with direct stores took 4.44 ms."""

REDUCE_RATE = 0.88
"""Share of memory bandwidth of the reduction pass. Fitted to 10, 13, 20, 32 and 60 us for 8 slabs
of 64 to 1024 rows of 12288 columns, eight sources in flight (H200, 2026-12-03)."""

REDUCE_US = 2.6
"""Fixed time of the reduction kernel beside its launch (same points)."""

SCATTER_FIXED_US = 16.4
"""gemm_rs: what a call takes beyond its parts: the median of the best emulated calls of the H200 of
14 problems of m = 512 (method 5, 2026-12-03; of m = 1024 it is 3 us), part of it the imitation's
own way through the host. Of 42 problems up to m = 2048 the model then decides 31 as the emulation
does; with 13.4 us, as before, 28, with 9.5, the median of both, 25."""
