"""Every fitted number of the model, with its source. Change one, and bump ``MODEL_VERSION``.

"Measured" means on one H200 (132 SMs, 989 TFLOP/s bf16 by the datasheet, 4.8 TB/s), bf16, tp=8,
kernels interleaved with cuBLAS in one run, medians; links were imitated by raising flags on
schedule, or were the real PCIe link to pinned host memory. Other GPUs are scaled by their
datasheet values; nothing here was measured on them.
"""

from __future__ import annotations

MODEL_VERSION = 1
"""Part of the name of every study of predicted times, so that old times are not mixed in."""

COLD_RATE = 0.93
"""Share of the datasheet tensor rate of a short kernel: cuBLAS reaches 816 TFLOP/s at
2048x6144x12288 (0.379 ms), of which 3 % is wave quantisation and 2 % prologue and epilogue."""

HOT_RATE = 0.69
"""The same for a long one, whose clock falls under load: 677 TFLOP/s at 8192x6144x12288
(1.828 ms), 754 at 4096 (0.820 ms)."""

HEATING_US = 1100.0
"""Time constant between the two; fitted to the 0.38, 0.62, 0.82 and 1.83 ms points."""

FULL_POWER_TFLOPS = 989.0
"""Datasheet rate at which the clock falls as above; a slower chip falls less, in proportion."""

TILE_TRAFFIC = 0.022
"""Elements loaded per multiply-add, (tile_m / cluster_n + tile_n / cluster_m) / (tile_m tile_n),
at which loads take as long as the MMAs. Fitted to 64x256 within 3 % of cuBLAS at m=512 and to
128x128 being slower than 128x256 as a GEMM."""

MULTICAST = 0.6
"""Share of a cluster's saved loads that is saved in time (multicast waits for the slowest CTA;
assumed)."""

CLUSTER_SYNC = 0.012
"""Slowdown for each CTA of a cluster beyond the first: a stage is free when all have read it
(assumed)."""

STEP_US = 0.012
"""Barrier handling of one tile_k step that the MMAs do not hide, about 20 clocks: it makes
64x64 tiles slow, where a step has only 128 clocks of MMAs (assumed)."""

CLUSTER4_SMS = 0.91
"""Share of the SMs that clusters of four can take: GPCs lose SMs to yield, and not in fours. 30 of
33 such clusters fit: 64x256 4x1 needs 4 waves for 96 of them (RS m=512) and 7 for 192."""

PINGPONG_STORE = 0.15
"""Share of a tile's store that ping-pong does not hide behind the other warpgroup's MMAs."""

TILE_TRAFFIC_NORM = 4.0
"""Exponent of the p-norm that joins load and MMA time of a tile (soft maximum)."""

MEMORY_RATE = 0.65
"""Share of the datasheet memory bandwidth under a GEMM's access pattern: rank-major order at
RS 512x12288x6144 takes 1.83x of cuBLAS and is bound by reading B once per rank."""

MEMORY_NORM = 8.0
"""Nearly a hard maximum of compute and memory time: rank-major costs 1.83x at m=512 but only
1.04x at m=1024, where the same traffic just hides behind twice the compute."""

LOCKSTEP_LOSS = 0.25
"""Groups that run in the same wave share reads of B through L2, but drift apart: this share of
their reads misses. Same two points as ``MEMORY_NORM``."""

L2_USABLE = 0.5
"""Share of L2 that a reused operand may fill before it is evicted (streaming traffic beside it)."""

FILL_US = 1.2
"""Latency from a tile's first TMA load to its first MMA (about two memory round trips); once per
tile for cooperative kernels, once per kernel for ping-pong ones, which hide it."""

STORE_GBS_PER_SM = 35.0
"""Rate at which one SM converts and stores a finished tile, GB/s, when nothing hides it:
device-memory rate over 132 SMs."""

LAUNCH_US = 4.0
"""Launch, first instruction and drain of one kernel in a stream."""

SPLIT_K_GBS = 0.5
"""Share of memory bandwidth that cuBLAS's split-K partial sums (fp32, written and read) reach."""

NCCL_RATE = 0.92
"""NCCL's share of the link rate that large copies reach (nccl-tests on 8 GPUs over NVLink report
a bus bandwidth of about 360 of the 396 GB/s assumed for copies). Published, not measured here."""

NCCL_LAUNCH_US = 8.0
"""Launch of an NCCL collective and its completion; each ring step adds the link's latency."""

COPY_US = 1.5
"""Cost of each copy-engine operation with its flag write, beside its bytes."""

FUSED_FIXED_US = 5.0
"""Forking to the copy stream and joining it again, once per fused call."""

STORE_RATE_NVLINK = 0.9
"""Share of the link's copy rate that TMA stores to a peer reach over NVLink (assumed)."""

STORE_RATE_PCIE = 0.73
"""The same over PCIe: 40 of 55 GB/s, RS 8192x12288x6144 with direct stores took 4.44 ms."""

REDUCE_RATE = 0.85
"""Share of memory bandwidth of the reduction pass, a streaming kernel (assumed)."""

FUSED_GEMM_OVERHEAD = 1.01
"""Flags, signals and our tile order with all data present: 1.00 to 1.03 of the plain kernel."""
