"""Numbers of the step's model, with their sources. Those of GEMMs and of links within a node are
:mod:`fluxgen.predict.constants`. None is fitted to a row of measured steps unless it says so.
"""

from __future__ import annotations

MODEL_VERSION = 1
"""Changes with every number here."""

MEMORY_RATE = 0.85
"""Share of the datasheet memory bandwidth of a kernel that only moves data (published: triad of
BabelStream on A100, 1.75 of 2.04 TB/s; on H100 2.9 of 3.35 TB/s)."""

KERNEL_US = 2.5
"""Start and end of a kernel behind another in a stream that never runs dry."""

IN_A_STEP = {"ampere": 0.86, "ada": 0.86, "hopper": 1.0}
"""Rate of a GEMM inside a step over that of one alone on a GPU that is as warm. Ampere's, by the
published times of one layer (arXiv 2205.05198, table 4: 22B, tp 8, forward 7.2 ms, backward 11.8
ms with sequence parallelism): a micro-fact, not a step. Hopper's GEMMs are measured warm already
(``predict.constants.HOT_RATE``)."""

SCORES_RATE = 0.66
"""Share of the memory bandwidth of kernels over score matrices. The same table: selective
recomputation, which runs them once more, adds 1.3 ms to a backward."""

FLASH = {
    "ampere": {"flash1": (0.40, 0.30), "flash2": (0.62, 0.54), "flash3": (0.62, 0.54)},
    "ada": {"flash1": (0.40, 0.30), "flash2": (0.62, 0.54), "flash3": (0.62, 0.54)},
    "hopper": {"flash1": (0.20, 0.15), "flash2": (0.40, 0.32), "flash3": (0.60, 0.48)},
}
"""Shares of the datasheet tensor rate that attention in one kernel reaches, forward and backward,
at 8k and more tokens, heads of 128, causal, of the half that is computed alone. FlashAttention-1:
30 to 50 % and 25 to 35 % on A100 (said in arXiv 2307.08691, section 1), no more on H100, whose
instructions it does not use. FlashAttention-2 (figures 4 to 6 there: 190 and 170 TFLOP/s of 312 on
A100; on H100 about 400 and 320 of 989), FlashAttention-3 and cuDNN (arXiv 2407.08608, figures 5
and 6: 600 and 480)."""

FLASH_RAMP = 700.0
"""Tokens by which shorter sequences fall behind: at 2k attention reaches s / (s + ramp) of the rate
(same figures: 0.75 at 2k, 0.85 at 4k)."""

BATCHED_RATE = 0.60
"""Share of the tensor rate of the two batched GEMMs of attention that is not in one kernel, before
their memory traffic bounds them: 128 x 128 tiles of K = one head."""

NETWORK_RATE = 0.90
"""Share of a network adapter's rate that NCCL reaches with many messages in flight (published:
nccl-tests between DGX A100 nodes, 185 to 190 of 200 GB/s for eight adapters)."""

NETWORK_FAR = 0.04
"""What that share falls by with each doubling of the nodes beyond 32: longer routes and links that
are shared. MegaScale (arXiv 2402.15627) and Llama 3 (arXiv 2407.21783) speak of it without numbers;
assumed."""

OVERLAP_LOSS = 0.06
"""How much longer GEMMs take beside a collective, whose kernels hold SMs and memory bandwidth
(published: 4 of 108 or 16 of 132 SMs and a few percent of memory traffic)."""

ADAM_BYTES = 34
"""Memory traffic of a mixed-precision Adam step, bytes a weight: the gradient is read for its norm
and again, weight and two moments are read and written in fp32, the 16-bit weight is written."""

STEP_US = 20000.0
"""Of a training loop beside its kernels: the loss and norm that the host waits for, and data."""

PIPE_WAIT_US = 60.0
"""One exchange between stages beside its bytes: launch, rendezvous of both sides, wait."""
