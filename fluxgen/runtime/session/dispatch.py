"""Which path an op takes and why: ``decide``, ``explain``, ``strict``.

A :class:`Decision` is ``fused`` where a record names a kernel that is compiled and legal for the
call; else ``unfused`` (the device library's matmul and the group's own collective), with the
reason. It follows from the call and the machine alone;
:mod:`fluxgen.runtime.session.groups` makes sure that all ranks of the group come to the same.

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
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch

from fluxgen.codegen.space import why_illegal
from fluxgen.core.config import KernelConfig, RunConfig, Transport
from fluxgen.core.dtypes import DType
from fluxgen.core.errors import FluxgenError, UnsupportedError
from fluxgen.core.op import Op
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.db.lookup import default_lookup
from fluxgen.db.result import LookupResult
from fluxgen.machine.device import devices
from fluxgen.machine.wiring import UNKNOWN, Wiring
from fluxgen.runtime.session import kernels

RECENT = 256
"""Decisions that :func:`explain` can look back on."""

__all__ = [
    "RECENT",
    "Call",
    "Cause",
    "Decision",
    "Explanation",
    "Winner",
    "decide",
    "explain",
    "note",
    "strict",
    "warn_once",
]

_log = logging.getLogger("fluxgen.runtime")


class Cause(str, enum.Enum):
    """Why a path ran, as one word."""

    FUSED = "fused"
    """A compiled kernel serves the call."""
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
    """A record names a kernel that is not compiled on this machine."""
    BIAS = "bias"
    """A bias that is part of one rank's product: no kernel adds it before that is sent."""
    UNEVEN = "uneven"
    """The ranks do not divide the rows or the weights evenly."""
    NO_PEERS = "no_peers"
    """The ranks cannot address each other's memory."""

    @property
    def falls_back(self) -> bool:
        """Whether a fused kernel could have had work to do: what ``strict`` refuses."""
        return self not in (Cause.FUSED, Cause.NOTHING_TO_DO, Cause.ONE_RANK)

    @property
    def surprises(self) -> bool:
        """Whether a user may expect otherwise and should be told once."""
        return self.falls_back and self is not Cause.BASELINE


@dataclass(frozen=True)
class Call:
    """One call of an op as a decision sees it: no data, no addresses.

    Attributes:
        op: which. m: global rows. k: columns of x. ns: n of each weight.
        layouts: ``nk`` or ``kn`` of each weight. dtype, device: of the operands. tp: ranks.
        cut: the dim of x that the ranks cut. sizes: x's but the last, with all rows of ``cut``.
        bias: of what reduces: ``none``, ``replicated`` or ``partial``.
        reduce_op: gemm_rs only. return_gathered: ag_gemm only.
        residual: gemm_ar only: whether one is added.
        wiring: of the ranks' GPUs.
    """

    op: Op
    m: int
    ns: tuple[int, ...]
    k: int
    dtype: torch.dtype
    device: torch.device
    tp: int
    layouts: tuple[str, ...] = ("nk",)
    cut: int = 0
    sizes: tuple[int, ...] = ()
    bias: str = "none"
    reduce_op: str = "sum"
    return_gathered: bool = False
    residual: bool = False
    wiring: Wiring = UNKNOWN

    @property
    def key(self) -> str:
        """``ag_gemm/bfloat16/m4096-n3584-k4096-tp8``."""
        name = str(self.dtype).removeprefix("torch.")
        kn = "" if set(self.layouts) == {"nk"} else "/" + ",".join(self.layouts)
        return f"{self.op.value}/{name}/m{self.m}-n{sum(self.ns)}-k{self.k}-tp{self.tp}{kn}"


@dataclass(frozen=True)
class Winner:
    """What a fused call runs.

    Attributes:
        problems: one for each weight. kernel, run: the configuration. arch: ``sm90``.
        artefacts: content keys of the libraries.
    """

    problems: tuple[Problem, ...]
    kernel: KernelConfig
    run: RunConfig
    arch: str
    artefacts: tuple[str, ...]


@dataclass(frozen=True)
class Decision:
    """What one call runs.

    Attributes:
        path: ``"fused"`` or ``"unfused"``. reason: why, one line. cause: the reason as one word.
        key: op, dtype, m, n, k and tp (m global, n and k local; several weights: their summed n).
        winner: what the fused path runs, None for the unfused one.
    """

    path: str
    reason: str
    key: str
    cause: Cause
    winner: Winner | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.key}: {self.path}: {self.reason}"

    def unfused(self, cause: Cause, reason: str) -> Decision:
        """The same call on the unfused path."""
        return Decision("unfused", reason, self.key, cause)


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


def note(decision: Decision) -> None:
    """Keep a decision that is about to be carried out for :func:`explain`.

    Raises:
        UnsupportedError: under :func:`strict`, when the call falls back.
    """
    _recent.append(decision)  # atomic
    if _listeners:
        with _lock:
            for listener in _listeners:
                listener.decisions.append(decision)
    if decision.winner is not None:
        return
    if _strict_depth > 0 and decision.cause.falls_back:
        raise UnsupportedError(
            f"{decision.key}: strict() allows no unfused path, and the fused one cannot run: "
            f"{decision.reason}"
        )
    if decision.cause.surprises:
        warn_once(decision.cause.value, f"{decision}")


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
def decide(call: Call) -> Decision:
    """The path of one call on this rank, from what this machine has."""
    cause, reason, winner = _why(call)
    return Decision("fused" if winner else "unfused", reason, call.key, cause, winner)


def _why(call: Call) -> tuple[Cause, str, Winner | None]:
    if min(call.m, *call.ns, call.k) == 0:
        return Cause.NOTHING_TO_DO, "a size is zero, nothing to communicate or multiply", None
    if call.tp == 1:
        return Cause.ONE_RANK, "one rank: a plain matmul, nothing to communicate", None
    if call.device.type != "cuda" or torch.version.cuda is None:
        return Cause.NO_GPU, f"no CUDA GPU: the tensors are on {call.device}", None
    if not call.op.shares and call.sizes and call.sizes[call.cut] % call.tp:
        reason = f"{call.tp} ranks do not divide {call.sizes[call.cut]} rows evenly"
        return Cause.UNEVEN, reason, None
    if call.bias == "partial" and not call.op.reduces:
        return Cause.BIAS, "no kernel adds a bias before the rows are sent", None
    if call.bias == "partial":
        return Cause.BIAS, "no kernel adds a bias before the reduction (bias_mode='partial')", None
    try:
        dtype = DType.parse(str(call.dtype))
    except FluxgenError as error:
        return Cause.DTYPE, str(error), None
    try:
        gpu = devices()[call.device.index or 0].gpu
        topology = call.wiring.topology(gpu, call.tp)
        found = _look_up(call, dtype, topology)
        if found.record is None and topology.islands > 1:
            # Tuned for one socket: right, if not the fastest.
            topology = replace(call.wiring, islands=1).topology(gpu, call.tp)
            found = _look_up(call, dtype, topology)
    except (FluxgenError, IndexError) as error:
        return Cause.DEVICE, f"the fused kernels cannot serve this device or group: {error}", None
    if found.record is None:
        return Cause.NO_RECORD, f"no record: {found.text}", None
    if found.kernel is None or found.run is None:
        return Cause.BASELINE, f"record says baseline: {found.text}", None
    return _winner(call, dtype, topology, found, found.kernel, found.run)


def _look_up(call: Call, dtype: DType, topology: Topology) -> LookupResult:
    """The record of the call's own signature, else of a near one.

    The layout of the weight and whether the gathered x is returned hardly change what is best, and
    models are tuned without them. What is best for an ag_gemm or a gemm_rs is not bad for the
    others that its kernel serves, either.
    """
    plain = Signature.of(call.op, dtype)
    near = [
        replace(plain, op=op, b_layout=layout, return_gathered=gathered)
        for op in (call.op, call.op.compiled)
        for layout in (call.layouts[0], plain.b_layout)
        for gathered in (call.return_gathered, False)
    ]
    return default_lookup().first(
        [Problem(s, call.m, sum(call.ns), call.k, call.tp) for s in dict.fromkeys(near)], topology
    )


def _winner(
    call: Call,
    dtype: DType,
    topology: Topology,
    found: LookupResult,
    kernel: KernelConfig,
    run: RunConfig,
) -> tuple[Cause, str, Winner | None]:
    plain = Signature.of(call.op, dtype)
    arch = topology.gpu.arch
    if call.return_gathered and run.transport.pushes:
        # A near record's: peers push into the workspace, of which nothing is given away.
        run = replace(run, transport=Transport.COPY_ENGINE_PULL)
    if run.transport not in call.op.transports:  # an ag_gemm's, for an a2a_gemm
        run = replace(run, transport=call.op.transports[0])
    problems, artefacts = [], []
    for n, layout in zip(call.ns, call.layouts, strict=True):
        problem = Problem(replace(plain, b_layout=layout), call.m, n, call.k, call.tp)
        # One of several weights is narrower than the record's n.
        fits = why_illegal(problem, topology, kernel, replace(run, panel=0))
        if fits is not None:
            uneven = call.m % call.tp != 0  # an all-reduce, whose record is of two shots
            reason = f"the record does not fit {problem.key}: {fits}"
            return Cause.UNEVEN if uneven else Cause.NO_RECORD, reason, None
        try:
            artefacts.append(kernels.artefact_key(problem.signature, kernel, arch))
        except FluxgenError as error:
            reason = f"{found.text}, which cannot be loaded: {error}"
            return Cause.NOT_BUILT, reason, None
        problems.append(problem)
    winner = Winner(tuple(problems), kernel, run, arch, tuple(artefacts))
    return Cause.FUSED, found.text, winner
