"""How long the kernels of one rank take, microseconds."""

from __future__ import annotations

from functools import lru_cache

from fluxgen.core.topology import Gpu
from fluxgen.planning.timing import constants as c
from fluxgen.predict.gemm import library_gemm_us

__all__ = ["Times"]


@lru_cache(maxsize=65536)
def _gemm(m: int, n: int, k: int, gpu: Gpu) -> float:
    alone = library_gemm_us(m, n, k, gpu, 2, True)
    return alone / c.IN_A_STEP[gpu.generation]


class Times:
    """Kernels of one GPU, 16-bit elements."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._rate = gpu.mem_gbs * c.MEMORY_RATE * 1e3  # bytes a microsecond
        self._scores = gpu.mem_gbs * c.SCORES_RATE * 1e3

    def gemm(self, m: int, n: int, k: int) -> float:
        """Of the device's library."""
        return _gemm(max(1, m), max(1, n), max(1, k), self.gpu)

    def memory(self, size: float, kernels: int = 1) -> float:
        """``size`` bytes read or written by so many kernels."""
        return kernels * c.KERNEL_US + size / self._rate

    def flash(self, kind: str, flops: float, seq: int, backward: bool) -> float:
        """Attention in one kernel; ``flops`` are those of the half that is computed."""
        rate = c.FLASH[self.gpu.generation][kind][backward] * seq / (seq + c.FLASH_RAMP)
        return c.KERNEL_US + flops / (self.gpu.tflops * rate * 1e6)

    def batched(self, flops: float, size: float) -> float:
        """One of the batched GEMMs of attention that is not in one kernel."""
        compute = flops / (self.gpu.tflops * c.BATCHED_RATE * 1e6)
        return c.KERNEL_US + max(compute, size / self._scores)

    def scores(self, size: float) -> float:
        """A kernel over score matrices: softmax, dropout, their gradients."""
        return c.KERNEL_US + size / self._scores
