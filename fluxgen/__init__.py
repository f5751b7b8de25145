"""fluxgen: generated, tuned, fused communication-GEMM kernels for tensor parallelism.

Importing this package imports neither Torch, nor Optuna, nor Jinja2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fluxgen.core.version import __version__

if TYPE_CHECKING:
    from fluxgen.db.live import LiveLookup
    from fluxgen.db.result import LookupResult
    from fluxgen.planning.result import Plan

__all__ = ["__version__", "lookup", "plan"]

_NEED_TORCH = {
    "all_gather_matmul": "fluxgen.runtime.ops",
    "all_to_all_matmul": "fluxgen.runtime.ops",
    "matmul_all_reduce": "fluxgen.runtime.ops",
    "matmul_all_to_all": "fluxgen.runtime.ops",
    "matmul_reduce_scatter": "fluxgen.runtime.ops",
    "explain": "fluxgen.runtime.session.dispatch",
    "strict": "fluxgen.runtime.session.dispatch",
    "check_timeouts": "fluxgen.runtime.session.groups",
    "reset": "fluxgen.runtime.session.groups",
}


def __getattr__(name: str) -> Any:
    """The PyTorch side (docs/ops.md), imported when first asked for."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'fluxgen' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_NEED_TORCH[name]), name)


def lookup(
    op: str, m: int, n: int, k: int, *, tp: int, target: str, link: str = "nvlink",
    dtype: str = "bf16",
) -> LookupResult:  # fmt: skip
    """The tuned configuration of one fused op: which kernel, how fast, how known, and why.

    Args:
        op: ``ag_gemm``, ``gemm_rs``, ``gemm_ar``... m: global tokens. n, k: local GEMM sizes.
        tp: tensor-parallel ranks. target: a GPU's name (``h100-sxm``, or as the driver reports
            it). link: ``nvlink`` or ``pcie``. dtype: ``bf16`` or ``fp16``.

    Returns:
        A :class:`fluxgen.db.result.LookupResult`; its ``kernel`` is None for the unfused path.

    Raises:
        fluxgen.core.errors.UsageError: an argument is not valid; the message says what is.

    A call that was made before takes about a microsecond. Another ``FLUXGEN_DB`` counts from the
    next call on, and what any process puts into the database 10 ms later: :mod:`fluxgen.db.live`.
    The rule for m between and beyond tuned sizes: :mod:`fluxgen.db.lookup`.
    """
    look = _live if _live is not None else _make_live()
    return look(op, m, n, k, tp, target, link, dtype)


def plan(model: Any, **how: Any) -> Plan:
    """The best layouts of a model's step on a cluster, predicted, with no GPU.

    Arguments, result and errors: :func:`fluxgen.planning.search.plan`.
    """
    from fluxgen.planning.search import plan as search

    return search(model, **how)


_live: LiveLookup | None = None


def _make_live() -> LiveLookup:
    global _live
    from fluxgen.db.live import LiveLookup

    _live = LiveLookup()
    return _live
