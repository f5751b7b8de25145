"""The search space: which kernels may be compiled, which run-time knobs may be set on them.

What holds for all kernels is stated here, once, in :func:`why_illegal_kernel` (what the compiler or
the chip refuses) or in :func:`why_illegal` (what a problem on a topology refuses), and its reason
is the text returned; the rest is the family's (:mod:`fluxgen.kernels`). ``None`` means legal.
"""

from __future__ import annotations

from collections.abc import Iterator

from fluxgen.core.config import KernelConfig, RunConfig
from fluxgen.core.problem import MAX_WORLD, Problem, Signature
from fluxgen.core.topology import Gpu, Topology
from fluxgen.kernels.family import Family
from fluxgen.kernels.registry import families, family_of
from fluxgen.kernels.transports import why_illegal_transport

TMA_ALIGN = 8
"""16-bit elements in the 16 bytes that TMA strides and addresses must be multiples of."""


def why_illegal_kernel(signature: Signature, gpu: Gpu, kernel: KernelConfig) -> str | None:
    """Why ``kernel`` cannot be compiled for ``signature`` on ``gpu``, or None if it can."""
    known = families(gpu.arch)
    if not known:
        return (
            f"{gpu.name} is {gpu.arch}: kernels are generated for sm80 to sm89 and for sm90; use "
            "the unfused path"
        )
    if signature.compiled.epilogue.operands:
        return f"epilogue {signature.epilogue.key}: no GEMM has a fused epilogue yet"
    if signature.dtype is not signature.out_dtype:
        return (
            f"output type {signature.out_dtype.value} differs from input type "
            f"{signature.dtype.value}: kernels write the input type"
        )
    family = family_of(gpu.arch, kernel.schedule)
    if family is None:
        valid = ", ".join(schedule.value for each in known for schedule in each.schedules)
        return f"schedule {kernel.schedule.value}: {gpu.arch} has no such kernels; use {valid}"
    return family.why_illegal_kernel(gpu, kernel, signature.b_layout)


def kernel_space(signature: Signature, gpu: Gpu) -> Iterator[KernelConfig]:
    """Every legal kernel (sm90: with automatic stages), in a fixed order; flat ones last."""
    proposed = (kernel for family in families(gpu.arch) for kernel in family.kernels())
    return (k for k in proposed if why_illegal_kernel(signature, gpu, k) is None)


def why_illegal_problem(problem: Problem) -> str | None:
    """Why no fused kernel can take ``problem``, or None: the full constraint, with values."""
    element_bytes = problem.signature.dtype.bytes
    if problem.m == 0 or problem.k == 0:
        return f"m={problem.m}, k={problem.k}: nothing to launch; a zero size is never launched"
    if problem.m % problem.tp and not problem.op.shares:
        return f"m={problem.m} is not a multiple of tp={problem.tp}; pad m or use the unfused path"
    for name, value in (("n", problem.n), ("k", problem.k)):
        if value % TMA_ALIGN:
            return (
                f"{name}={value}: TMA needs rows of a multiple of 16 bytes, {name} % {TMA_ALIGN} "
                f"== 0 for {element_bytes}-byte elements; pad {name} or use the unfused path"
            )
    return None


def why_illegal(
    problem: Problem, topology: Topology, kernel: KernelConfig, run: RunConfig
) -> str | None:
    """Why ``kernel`` with ``run`` cannot compute ``problem`` on ``topology``, or None."""
    reason = why_illegal_kernel(problem.signature, topology.gpu, kernel) or why_illegal_problem(
        problem
    )
    if reason:
        return reason
    world = problem.tp
    if world != topology.world or world > MAX_WORLD:
        return f"tp={world} is not the topology's world {topology.world} (at most {MAX_WORLD})"
    if run.groups and (sum(run.groups) != world or min(run.groups) < 1):
        return f"groups {run.groups} do not sum to the {world} ranks with at least one in each"
    return why_illegal_transport(problem, topology, run) or _family(
        topology, kernel
    ).why_illegal_run(problem, topology, kernel, run)


def run_space(problem: Problem, topology: Topology, kernel: KernelConfig) -> Iterator[RunConfig]:
    """Every legal run-time configuration of ``kernel`` for ``problem``, in a fixed order."""
    proposed = _family(topology, kernel).runs(problem, topology, kernel)
    return (run for run in proposed if why_illegal(problem, topology, kernel, run) is None)


def span_choices(problem: Problem, topology: Topology, kernel: KernelConfig) -> tuple[int, ...]:
    """Spans worth trying."""
    return _family(topology, kernel).spans(problem, kernel)


def _family(topology: Topology, kernel: KernelConfig) -> Family:
    """The family of a kernel that is legal there."""
    family = family_of(topology.gpu.arch, kernel.schedule)
    assert family is not None, (topology.key, kernel.name)
    return family
