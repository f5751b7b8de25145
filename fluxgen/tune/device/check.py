"""Whether a candidate is right: every rank of the call, small integers, bit for bit, one rank late.

The ranks share the GPU, each with its part of the SMs; the transport, the flags and the epochs are
those of a real call.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from fluxgen.core.config import RunConfig
from fluxgen.core.problem import Problem
from fluxgen.native.loader import FusedKernel, SupportKernels
from fluxgen.tune.device.local_group import LocalGroup

LATE_CYCLES = 400_000
"""How late the late rank is, about 200 us."""

__all__ = ["Operands", "evened", "matmul", "wrong"]


def integers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Integers in [-3, 3]: products and fp32 sums are exact for every k below 1.8 million."""
    return torch.randint(-3, 4, shape, device="cuda", dtype=torch.int8).to(dtype)


def evened(problem: Problem) -> Problem:
    """With as many rows as the ranks share evenly: an uneven call's last slab is padded.

    An all-reduce has no slabs that need to be even.
    """
    if problem.op.shares:
        return problem
    return replace(problem, m=problem.m_local * problem.tp)


def matmul(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """a (m, k) times weight (n, k) transposed, summed in fp32 and rounded once."""
    backend = torch.backends.cuda.matmul
    backend.allow_bf16_reduced_precision_reduction = False
    backend.allow_fp16_reduced_precision_reduction = False
    return a @ weight.t()


@dataclass(frozen=True)
class Operands:
    """Inputs of all ranks; all ranks have the weight of one.

    Attributes:
        left: ag_gemm: each rank's x (m / tp, k); gemm_rs: each rank's a (m, k).
        weight: (n, k), or the transpose of a (k, n).
    """

    left: tuple[torch.Tensor, ...]
    weight: torch.Tensor

    @classmethod
    def of(cls, problem: Problem) -> Operands:
        """New random ones."""
        dtype = getattr(torch, problem.signature.dtype.torch_name)
        make = partial(integers, dtype=dtype)
        if problem.signature.b_layout == "kn":
            weight = make(problem.k, problem.n).t()
        else:
            weight = make(problem.n, problem.k)
        return cls(tuple(make(problem.rows_in, problem.k) for _ in range(problem.tp)), weight)

    def expected(self, problem: Problem) -> list[torch.Tensor]:
        """What each rank must hold, bit for bit, rounded where the kernel rounds."""
        if problem.op.gathers:
            return [matmul(torch.cat(self.left), self.weight)] * problem.tp
        partials = [matmul(a, self.weight).float() for a in self.left]
        total = partials[0]
        for other in partials[1:]:
            total += other
        rounded = total.to(self.weight.dtype)
        if problem.op.shares:
            return [rounded] * problem.tp
        return list(rounded.chunk(problem.tp))


def wrong(
    problem: Problem,
    kernel: FusedKernel,
    run: RunConfig,
    support: SupportKernels,
    timeout_s: float = 5.0,
) -> str | None:
    """What is wrong with a candidate, one line; None if two calls back to back are right.

    Raises:
        CommTimeout: a wait on the GPU passed its deadline. KernelError: it cannot be launched.
    """
    even = evened(problem)
    group = LocalGroup.for_problems(support, even, timeout_s=timeout_s)
    late = random.randrange(problem.tp)  # noqa: S311
    calls = []
    for _ in range(2):
        operands = Operands.of(even)
        outs = [
            torch.full(
                (even.rows_out, even.n), float("nan"), device="cuda", dtype=operands.weight.dtype
            )
            for _ in range(even.tp)
        ]
        calls.append((operands, outs))
    torch.cuda.synchronize()
    for operands, outs in calls:
        weights = [operands.weight] * even.tp
        group.run(kernel, even, run, operands.left, weights, outs, delay=_delay(late))
    group.synchronize()
    for operands, outs in calls:
        for rank, (got, want) in enumerate(zip(outs, operands.expected(even), strict=True)):
            differ = int((got != want).sum())  # NaN differs from everything
            if differ:
                missing = int(got.isnan().sum())
                return (
                    f"wrong result: rank {rank}: {differ} of {got.numel()} elements differ, "
                    f"{missing} were never written"
                )
    return None


def _delay(late: int) -> Callable[[int], None]:
    def delay(rank: int) -> None:
        if rank == late:
            torch.cuda._sleep(LATE_CYCLES)

    return delay
