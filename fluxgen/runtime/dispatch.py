"""Which path an op takes and why: ``decide``, ``explain``, ``strict``.

Only the unfused path exists for the ops so far: the matmul of the device's own library and the
group's own collective. So every :class:`Decision` says ``unfused``, and its ``reason`` says what
stood in the way of anything else: there is no GPU, no record, the record says that the baseline
wins, or there is a winner that the ops cannot run yet.

Settings here hold for the whole process, not for one thread: backward passes run on threads of
autograd's own, and a rank that decides otherwise there than in its forward would be a surprise.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import torch

from fluxgen.core.dtypes import DType
from fluxgen.core.errors import FluxgenError, UnsupportedError
from fluxgen.core.problem import Op, Problem, Signature
from fluxgen.core.topology import LinkKind, Topology
from fluxgen.db.lookup import default_lookup
from fluxgen.runtime.device import devices

RECENT = 256
"""Decisions that :func:`explain` can look back on."""

__all__ = ["RECENT", "Cause", "Decision", "Explanation", "decide", "explain", "strict"]

_log = logging.getLogger("fluxgen.runtime")


class Cause(str, enum.Enum):
    """Why the unfused path ran, as one word."""

    NOTHING_TO_DO = "nothing_to_do"
    """A size is zero."""
    ONE_RANK = "one_rank"
    """A group of one has nothing to communicate."""
    NO_GPU = "no_gpu"
    """The tensors are not on a CUDA GPU."""
    DTYPE = "dtype"
    """No fused kernel computes this element type."""
    DEVICE = "device"
    """The GPU or the group is none that kernels exist for."""
    NO_RECORD = "no_record"
    """Nothing usable is tuned for this problem."""
    BASELINE = "baseline"
    """A record says that the unfused path is the fastest here."""
    NOT_BUILT = "not_built"
    """A record names a kernel, but the ops cannot run kernels yet."""

    @property
    def falls_back(self) -> bool:
        """Whether a fused kernel could have had work to do: what ``strict`` refuses."""
        return self not in (Cause.NOTHING_TO_DO, Cause.ONE_RANK)

    @property
    def surprises(self) -> bool:
        """Whether a user may expect otherwise and should be told once."""
        return self.falls_back and self is not Cause.BASELINE


@dataclass(frozen=True)
class Decision:
    """What one call runs.

    Attributes:
        path: ``"unfused"``, the only path of the ops so far. reason: why, one line.
        key: op, dtype, m, n, k and tp (m global, n and k local). cause: the reason as one word.
    """

    path: str
    reason: str
    key: str
    cause: Cause

    def __str__(self) -> str:
        return f"{self.key}: {self.path}: {self.reason}"


class Explanation:
    """Decisions, as an object to print and as a context manager that collects them.

    Attributes:
        decisions: one for each call, in order.
    """

    def __init__(self, decisions: tuple[Decision, ...] = ()) -> None:
        self.decisions: list[Decision] = list(decisions)

    def __enter__(self) -> Explanation:
        self.decisions.clear()
        with _lock:
            _listeners.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _lock:
            _listeners[:] = [other for other in _listeners if other is not self]

    def __str__(self) -> str:
        """One line for each different decision, with how often it was taken."""
        if not self.decisions:
            return "no call of a fluxgen op yet"
        counts = collections.Counter(self.decisions)
        return "\n".join(f"{decision} ({count}x)" for decision, count in counts.items())


_lock = threading.Lock()
_recent: collections.deque[Decision] = collections.deque(maxlen=RECENT)
_listeners: list[Explanation] = []
_told: set[str] = set()
_strict_depth = 0


def explain() -> Explanation:
    """Which path ran, and why.

    ``print(explain())`` shows the last ``RECENT`` decisions of this process; ``with explain() as
    seen:`` collects those of the block (of every thread, so a backward inside it counts).
    """
    with _lock:
        return Explanation(tuple(_recent))


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Raise :class:`UnsupportedError` in place of falling back to the unfused path.

    Holds for the whole process while the block runs. A group of one rank and a size of zero do
    not fall back from anything and pass. Ranks that make the same call raise alike, since the
    decision depends on the call and the machine only, and nothing was sent before.
    """
    global _strict_depth
    with _lock:
        _strict_depth += 1
    try:
        yield
    finally:
        with _lock:
            _strict_depth -= 1


def decide(
    op: Op, m: int, n: int, k: int, *, dtype: torch.dtype, device: torch.device, tp: int
) -> Decision:
    """The path of one call, noted for :func:`explain`.

    Args:
        op: which op. m: global rows. n, k: local GEMM sizes (several weights: their summed n).
        dtype, device: of the operands. tp: ranks of the group.

    Raises:
        UnsupportedError: under :func:`strict`, when the call would fall back.
    """
    decision = _decide(op, m, n, k, dtype, device, tp)
    with _lock:
        _recent.append(decision)
        for listener in _listeners:
            listener.decisions.append(decision)
        refuse = _strict_depth > 0 and decision.cause.falls_back
    if refuse:
        raise UnsupportedError(
            f"{decision.key}: strict() allows no unfused path, and the fused one cannot run: "
            f"{decision.reason}"
        )
    if decision.cause.surprises:
        warn_once(decision.cause.value, f"{decision}")
    return decision


def warn_once(about: str, message: str) -> None:
    """Log ``message`` as a warning the first time that ``about`` comes up, else for debugging.

    The log rather than ``warnings``: those may be turned into exceptions, and one rank raising
    in the middle of a collective leaves its peers waiting.
    """
    with _lock:
        first = about not in _told
        _told.add(about)
    _log.log(logging.WARNING if first else logging.DEBUG, "%s", message)


@functools.lru_cache(maxsize=4096)
def _decide(
    op: Op, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, tp: int
) -> Decision:
    cause, reason = _why(op, m, n, k, dtype, device, tp)
    name = str(dtype).removeprefix("torch.")
    return Decision("unfused", reason, f"{op.value}/{name}/m{m}-n{n}-k{k}-tp{tp}", cause)


def _why(
    op: Op, m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, tp: int
) -> tuple[Cause, str]:
    if min(m, n, k) == 0:
        return Cause.NOTHING_TO_DO, "a size is zero, nothing to communicate or multiply"
    if tp == 1:
        return Cause.ONE_RANK, "one rank: a plain matmul, nothing to communicate"
    if device.type != "cuda" or torch.version.cuda is None:
        return Cause.NO_GPU, f"no CUDA GPU: the tensors are on {device}"
    try:
        the_dtype = DType.parse(str(dtype))
    except FluxgenError as error:
        return Cause.DTYPE, str(error)
    try:
        gpu = devices()[device.index or 0].gpu
        link = LinkKind.NVLINK if gpu.nvlink_gbs > 0 else LinkKind.PCIE
        topology = Topology.of(gpu, link, tp)
        problem = Problem(Signature.of(op, the_dtype), m, n, k, tp)
    except (FluxgenError, IndexError) as error:
        return Cause.DEVICE, f"the fused kernels cannot serve this device or group: {error}"
    found = default_lookup()(problem, topology)
    if found.record is None:
        return Cause.NO_RECORD, f"no record: {found.text}"
    if found.kernel is None:
        return Cause.BASELINE, f"record says baseline: {found.text}"
    return Cause.NOT_BUILT, f"the fused path of the ops is not built yet; found {found.text}"
