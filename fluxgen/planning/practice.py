"""How the software that runs a step does things, which matters as much as the layout."""

from __future__ import annotations

from dataclasses import dataclass

from fluxgen.core.errors import UsageError

__all__ = ["PRACTICES", "Practice", "practice"]


@dataclass(frozen=True)
class Practice:
    """What training or serving software overlaps and fuses.

    Attributes:
        name: of the row below. attention: ``unfused``, or ``flash1`` to ``flash3``.
        dropout: whether there is any. kernels: of norms and activations: ``hand`` written,
            ``compiled`` together, or ``eager``, one for each operation.
        selective: what selective recomputation computes again: ``attention`` between its GEMMs, or
            ``operations``: every second GEMM and all between them.
        overlap_weight: collectives of tp beside the GEMMs of weight gradients.
        overlap_ring: collectives of tp beside the GEMMs that they feed, in pieces.
        overlap_replicas: gradients of replicas beside backward, weights beside forward.
        overlap_stages: sends between stages beside compute.
        grad_bytes: of a gradient that replicas exchange.
        rails: a collective between nodes uses the adapters of all its ranks of a node.
    """

    name: str
    attention: str = "flash3"
    dropout: bool = False
    kernels: str = "compiled"
    selective: str = "attention"
    overlap_weight: bool = True
    overlap_ring: bool = False
    overlap_replicas: bool = True
    overlap_stages: bool = True
    grad_bytes: int = 4
    rails: bool = True


PRACTICES = {
    each.name: each
    for each in (
        Practice("modern"),
        # arXiv 2104.04473: no overlap at all; fp16 gradients.
        Practice(
            "megatron-2021", "unfused", True, "hand", overlap_weight=False,
            overlap_replicas=False, overlap_stages=False, grad_bytes=2,
        ),
        # DeepSpeed's ZeRO-3 of 2021: one adapter's rate, as the 174.6B rows of table 2 of arXiv
        # 2104.04473 have it (fitted to these); kernels of Megatron-LM.
        Practice(
            "zero3-2021", "unfused", True, "hand", overlap_weight=False, overlap_stages=False,
            grad_bytes=2, rails=False,
        ),
        # arXiv 2205.05198: sequence parallelism, its collectives beside weight gradients.
        Practice(
            "megatron-2022", "unfused", True, "hand", overlap_replicas=False, overlap_stages=False,
        ),
        # NeMo on H100: TransformerEngine, cuDNN attention, user buffers under tp.
        Practice("nemo", overlap_ring=True),
        # torchtitan: FSDP2, SDPA; "-compile" with torch.compile, "-async" with async TP too.
        Practice(
            "torchtitan", "flash2", False, "eager", "operations", overlap_weight=False,
            overlap_stages=False,
        ),
        Practice(
            "torchtitan-compile", "flash2", False, "compiled", "operations", overlap_weight=False,
            overlap_stages=False,
        ),
        Practice(
            "torchtitan-async", "flash2", False, "compiled", "operations", overlap_weight=False,
            overlap_ring=True, overlap_stages=False,
        ),
        # MaxText: XLA, its own fused attention.
        Practice("maxtext"),
        # LLM Foundry of 2023: FSDP1, FlashAttention-1 in Triton, no compiler.
        Practice("llm-foundry", "flash1", False, "eager", overlap_weight=False, grad_bytes=2),
    )
}  # fmt: skip
"""By name. ``modern`` is what a plan assumes unless told otherwise."""


def practice(name: str) -> Practice:
    """A row by name.

    Raises:
        UsageError: there is none such.
    """
    if name not in PRACTICES:
        raise UsageError(f"practice: expected one of {', '.join(PRACTICES)}; found {name!r}")
    return PRACTICES[name]
