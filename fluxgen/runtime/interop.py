"""Torch's async tensor-parallel ops, run by ours: ``install``, ``uninstall``, ``matches``.

Torch defines ``torch.ops.symm_mem.fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``.
Frameworks call them, and Inductor's pass ``micro_pipeline_tp_pass`` writes them into graphs that
gather and multiply. :func:`install` puts kernels of ours, for CUDA and CPU, over torch's (which
exist for CUDA only); torch's Meta kernels stay, so shapes and strides are torch's own.

Shapes, with W ranks::

    fused_all_gather_matmul      A (S/W, ..., K), B (K, N)  ->  A (S, ..., K), y (S, ..., N)
    fused_matmul_reduce_scatter  A (S, ..., K),   B (K, N)  ->  y (S/W, ..., N)

What our ops do not take (the last dim, other reductions, other element types) goes to torch's own
functions, as if nothing were installed.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fluxgen.core.errors import UnsupportedError, UsageError
from fluxgen.runtime.ops import all_gather_matmul, matmul_reduce_scatter
from fluxgen.runtime.ops.checks import DTYPES
from fluxgen.runtime.ops.reduce_scatter import REDUCE_OPS
from fluxgen.runtime.session.membership import Group, group_of

__all__ = ["Matches", "install", "matches", "uninstall"]

_log = logging.getLogger("fluxgen.interop")

_GATHER = "fused_all_gather_matmul"
_SCATTER = "fused_matmul_reduce_scatter"
_GATHER_ARGS = "(Tensor A, Tensor[] Bs, int gather_dim, str group_name"
_SCHEMAS = {
    # Newest first; the second is that of torch before `return_A`.
    _GATHER: (
        f"symm_mem::{_GATHER}{_GATHER_ARGS}, *, bool return_A=True) -> (Tensor?, Tensor[])",
        f"symm_mem::{_GATHER}{_GATHER_ARGS}) -> (Tensor, Tensor[])",
    ),
    _SCATTER: (
        f"symm_mem::{_SCATTER}(Tensor A, Tensor B, str reduce_op, int scatter_dim, "
        "str group_name) -> Tensor",
    ),
}
_KEYS = ("CPU", "CUDA")
_PASS = "micro_pipeline_tp_pass"  # noqa: S105
_FLAG = "_micro_pipeline_tp"


@dataclass(frozen=True)
class Matches:
    """What Inductor's pass rewrote since :func:`install`.

    Attributes:
        all_gather_matmul, matmul_reduce_scatter: fused ops written into graphs.
        graphs: graphs the pass saw. 0 after a compilation: the pass did not run at all, because
            the graph came from Inductor's cache or was compiled on a thread without the flag.
    """

    all_gather_matmul: int = 0
    matmul_reduce_scatter: int = 0
    graphs: int = 0

    def __add__(self, other: Matches) -> Matches:
        return Matches(
            self.all_gather_matmul + other.all_gather_matmul,
            self.matmul_reduce_scatter + other.matmul_reduce_scatter,
            self.graphs + other.graphs,
        )


@dataclass(frozen=True)
class _Installed:
    """What :func:`uninstall` takes back: our kernels, our pass, and the flag as it was."""

    library: Any
    ours: Callable[[Any], Any]
    theirs: Callable[[Any], Any]
    flag: bool


_lock = threading.RLock()
_installed: _Installed | None = None
_matched = Matches()


def install(*groups: Group) -> None:
    """Run torch's two fused ops on ours, and let Inductor write them into compiled graphs.

    Call it before the first compilation: graphs compiled earlier stay as they are. While installed
    another call only enables the groups it names, and the flag for the thread it is made on.

    Args:
        groups: process groups (or their names) to enable for Inductor's pass, which passes over
            all others; none: the default group, if there is one.

    Raises:
        UsageError: not a group of this process. Nothing is installed.
        UnsupportedError: this torch has other schemas, or other insides of Inductor, than known
            here; says what was expected and found. Nothing is installed.
    """
    global _installed, _matched
    with _lock:
        if not groups and dist.is_initialized():
            groups = (dist.group.WORLD,)
        names = [group_of(group)[0] for group in groups]
        symm = _symmetric_memory()
        post_grad, config = _inductor()
        fresh = _installed is None
        if _installed is None:
            _check_schemas()
            theirs = getattr(post_grad, _PASS)
            ours = _reporting(theirs)
            _installed = _Installed(_register(), ours, theirs, bool(getattr(config, _FLAG)))
            _matched = Matches()
            setattr(post_grad, _PASS, ours)
        try:
            # Since torch 2.13 a thread's settings are its own, so each install() sets them.
            setattr(config, _FLAG, True)
            for name in names:
                _enable(symm, name)
        except BaseException:
            if fresh:
                uninstall()
            raise


def uninstall() -> None:
    """Give torch its own kernels, pass and flag back; without :func:`install` it does nothing.

    Groups stay enabled: torch has no way to disable one. Compiled graphs keep calling the fused
    ops, which are torch's own again (on a CPU: none).
    """
    global _installed
    with _lock:
        if _installed is None:
            return
        # The dispatcher keeps shadowed kernels, and a destroyed library uncovers them.
        _installed.library._destroy()
        post_grad, config = _inductor()
        if getattr(post_grad, _PASS) is _installed.ours:  # else somebody wrapped ours: leave that
            setattr(post_grad, _PASS, _installed.theirs)
        setattr(config, _FLAG, _installed.flag)
        _installed = None


def matches() -> Matches:
    """How many fused ops Inductor's pass has written since :func:`install`.

    0 of everything before it; the counts stay readable after :func:`uninstall`.
    """
    with _lock:
        return _matched


# Kernels. The dispatcher calls them below autograd, as it does torch's: no gradients.


def _gather_kernel(
    A: torch.Tensor,
    Bs: list[torch.Tensor],
    gather_dim: int,
    group_name: str,
    *,
    return_A: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    # Torch knows one negative dim, and only here.
    dim = _check_dim("gather_dim", gather_dim, A, lowest=-1)
    other = _not_ours(A, dim)
    if other or not Bs:
        _say_once(f"{_GATHER}: torch's own runs for {other or 'an empty list'}")
        theirs = _torchs(_GATHER, fallback=not A.is_cuda)
        # Torch before `return_A` always returns it.
        result: Any = theirs(A, Bs, dim, group_name, **({} if return_A else {"return_A": False}))
        return result[0], list(result[1])
    for index, B in enumerate(Bs):
        _check_right(f"Bs[{index}]", B, A)
    # With the cut dim in front, both outputs have torch's strides and nothing is copied.
    rows = A.movedim(dim, 0)
    with torch.no_grad():
        result = all_gather_matmul(
            rows, [B.t() for B in Bs], group=group_name, return_gathered=return_A
        )
    outs, gathered = result if return_A else (result, None)
    return (
        None if gathered is None else gathered.movedim(0, dim),
        [out.movedim(0, dim) for out in outs],
    )


def _scatter_kernel(
    A: torch.Tensor, B: torch.Tensor, reduce_op: str, scatter_dim: int, group_name: str
) -> Any:
    dim = _check_dim("scatter_dim", scatter_dim, A, lowest=-A.dim())
    known = reduce_op in REDUCE_OPS
    other = _not_ours(A, dim) or ("" if known else f"reduce_op {reduce_op!r}")
    if other:
        _say_once(f"{_SCATTER}: torch's own runs for {other}")
        # Its CUDA kernel reduces by sum and average only, its fallback by anything.
        theirs = _torchs(_SCATTER, fallback=not (A.is_cuda and known))
        return theirs(A, B, reduce_op, dim, group_name)
    _check_right("B", B, A)
    _, world = group_of(group_name)
    if A.shape[dim] % world:
        raise UsageError(  # torch's op has no uneven parts: its Meta kernel would lose rows
            f"A: expected a size of dim {dim} that the {world} ranks divide; found "
            f"{A.shape[dim]} in {tuple(A.shape)}"
        )
    with torch.no_grad():
        return matmul_reduce_scatter(
            A, B.t(), group=group_name, scatter_dim=dim, reduce_op=reduce_op
        )


def _not_ours(A: torch.Tensor, dim: int) -> str:
    """What our ops do not take, in words; empty if they do."""
    if dim == A.dim() - 1:
        return "the last dim"
    return "" if A.dtype in DTYPES else str(A.dtype)


def _torchs(name: str, fallback: bool) -> Any:
    return getattr(_symmetric_memory(), f"_{name}_fallback" if fallback else f"_{name}")


def _check_dim(name: str, dim: int, A: torch.Tensor, lowest: int) -> int:
    if A.dim() < 2:
        raise UsageError(f"A: expected (rows, ..., K); found {tuple(A.shape)}")
    if not lowest <= dim < A.dim():
        raise UsageError(
            f"{name}: expected {lowest} to {A.dim() - 1} for A of {tuple(A.shape)}; found {dim}"
        )
    return dim + int(A.dim()) if dim < 0 else dim


def _check_right(name: str, B: torch.Tensor, A: torch.Tensor) -> None:
    if B.dim() != 2 or B.shape[0] != A.shape[-1]:
        raise UsageError(
            f"{name}: expected (K, N) with K = {A.shape[-1]}, the last dim of A "
            f"{tuple(A.shape)}; found {tuple(B.shape)}"
        )


@functools.lru_cache(maxsize=64)
def _say_once(text: str) -> None:
    _log.info("%s", text)


# Registration.


def _symmetric_memory() -> ModuleType:
    try:
        # Imported when needed: it defines torch's ops.
        import torch.distributed._symmetric_memory as symm
    except ImportError as error:
        raise UnsupportedError(
            f"torch {torch.__version__}: expected torch.distributed._symmetric_memory; found "
            f"none: {error}"
        ) from error
    for name in (_GATHER, _SCATTER):
        for part in (f"_{name}", f"_{name}_fallback"):
            _expect(symm, part)
    return symm  # type: ignore[no-any-return]


def _inductor() -> tuple[ModuleType, ModuleType]:
    """The module that looks the pass up, and Inductor's settings."""
    import torch._inductor.config as config
    import torch._inductor.fx_passes.post_grad as post_grad

    _expect(post_grad, _PASS)
    _expect(config, _FLAG)
    return post_grad, config


def _expect(module: ModuleType, name: str) -> None:
    if not hasattr(module, name):
        raise UnsupportedError(
            f"torch {torch.__version__}: expected {name} in {module.__name__}; found none. "
            "Nothing was installed"
        )


def _check_schemas() -> None:
    for name, known in _SCHEMAS.items():
        try:
            found = str(getattr(torch.ops.symm_mem, name).default._schema)
        except AttributeError:
            found = "no such op"
        if found not in known:
            raise UnsupportedError(
                f"torch {torch.__version__}: torch.ops.symm_mem.{name}: expected the schema "
                f"{' or '.join(known)}; found {found}. Nothing was installed"
            )


def _register() -> Any:
    """Both kernels over torch's, or neither."""
    library = torch.library.Library("symm_mem", "IMPL")
    try:
        with warnings.catch_warnings():
            # That kernels are replaced is the purpose.
            warnings.simplefilter("ignore", UserWarning)
            for name, kernel in ((_GATHER, _gather_kernel), (_SCATTER, _scatter_kernel)):
                for key in _KEYS:
                    library.impl(name, kernel, key, allow_override=True)
    except BaseException:
        library._destroy()
        raise
    return library


def _enable(symm: Any, name: str) -> None:
    """Make Inductor's pass look at a group.

    Torch 2.11 to 2.13 call this deprecated and no longer needed, yet their pass still asks
    ``is_symm_mem_enabled_for_group``, which nothing else turns on. A torch without it needs none.
    """
    if _disabled([name]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            symm.enable_symm_mem_for_group(name)


def _disabled(names: list[str]) -> list[str]:
    """Those groups that Inductor's pass passes over."""
    asks = getattr(_symmetric_memory(), "is_symm_mem_enabled_for_group", None)
    return [] if asks is None else [name for name in names if not asks(name)]


# Reports of Inductor's pass.


@dataclass(frozen=True)
class _Census:
    """Nodes of a graph: collectives, fused ops, and the groups of the collectives."""

    gathers: int
    scatters: int
    fused: Matches
    groups: tuple[str, ...]


def _census(graph: Any) -> _Census:
    functional, symm = torch.ops._c10d_functional, torch.ops.symm_mem
    calls = [node for node in graph.nodes if node.op == "call_function"]

    def of(target: Any) -> list[Any]:
        return [node for node in calls if node.target is target]

    gathers = of(functional.all_gather_into_tensor.default)
    scatters = of(functional.reduce_scatter_tensor.default)
    # Both end with the group's name.
    last = (n.kwargs.get("group_name", n.args[-1] if n.args else "") for n in gathers + scatters)
    groups = {str(getattr(group, "group_name", group)) for group in last}
    fused = Matches(len(of(symm.fused_all_gather_matmul.default)),
                    len(of(symm.fused_matmul_reduce_scatter.default)))  # fmt: skip
    return _Census(len(gathers), len(scatters), fused, tuple(sorted(groups)))


def _reporting(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Inductor's pass, with its matches counted and one line logged for each graph."""

    @functools.wraps(theirs)
    def micro_pipeline_tp_pass(graph: Any) -> Any:
        global _matched
        before = _census(graph)
        result = theirs(graph)
        after = _census(graph).fused
        new = Matches(
            after.all_gather_matmul - before.fused.all_gather_matmul,
            after.matmul_reduce_scatter - before.fused.matmul_reduce_scatter,
            graphs=1,
        )
        with _lock:
            if _installed is None:  # somebody kept this function beyond uninstall()
                return result
            _matched += new
        _report(before, new)
        return result

    return micro_pipeline_tp_pass


def _report(before: _Census, new: Matches) -> None:
    text = (
        f"async TP: {new.all_gather_matmul} of {before.gathers} all-gathers and "
        f"{new.matmul_reduce_scatter} of {before.scatters} reduce-scatters of a graph were fused "
        "with matmuls"
    )
    if new.all_gather_matmul or new.matmul_reduce_scatter:
        _log.info("%s", text)
    elif before.gathers or before.scatters:
        _log.warning("%s. Likely reason: %s", text, _why_none(before))
    else:
        _log.info("%s: the graph has no such collective", text)


def _why_none(before: _Census) -> str:
    if not dist.is_nccl_available():
        return "this torch is built without NCCL, and Inductor's pass then does nothing"
    disabled = _disabled(list(before.groups))
    if disabled:
        return f"the group {', '.join(disabled)} is not enabled: pass it to install()"
    _, config = _inductor()
    if getattr(config, "reorder_for_compute_comm_overlap", False):
        return "reorder_for_compute_comm_overlap is set, and other matmuls hide the collectives"
    return (
        "no matmul has the gathered tensor as its left operand, or makes the scattered one for "
        "the collective alone; or the last dim is gathered and shorter than 1024"
    )
