"""What this process keeps for each process group: agreed decisions, and the fused path's state.

    call -> decide (this rank) -> agree (all ranks, once per call) -> prepare (workspace) -> Entry

An :class:`Entry` is kept, so a call that was seen before costs one dictionary access.
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from fluxgen.core.errors import AgreementError, CaptureError, FluxgenError, UsageError
from fluxgen.core.settings import Settings
from fluxgen.core.version import __version__
from fluxgen.machine.device import devices
from fluxgen.machine.wiring import Wiring, islands, nvlinked
from fluxgen.native import abi
from fluxgen.runtime.session import dispatch
from fluxgen.runtime.session.agreement import Ledger, Statement
from fluxgen.runtime.session.dispatch import Call, Cause, Decision
from fluxgen.runtime.session.fused import SHARED_GPU_SMS, Fused
from fluxgen.runtime.session.launches import run_of
from fluxgen.runtime.session.membership import Group, group_of, resolve

__all__ = ["Entry", "GroupState", "check_timeouts", "known_state", "reset", "state_of"]

MAX_ENTRIES = 16384
"""Kinds of calls of one group that are remembered; more start over and are compared again."""

_NEVER_FUSED = (Cause.NO_GPU, Cause.DTYPE, Cause.DEVICE, Cause.NOTHING_TO_DO)


@dataclass(frozen=True)
class Entry:
    """A call that the ranks agreed on.

    Attributes:
        decision: what they agreed on. run: its launches (see ``runs``), None on the unfused path.
    """

    decision: Decision
    run: Any = None


class GroupState:
    """One live process group; shared by all threads.

    Args:
        group: whose.

    Attributes:
        lock: held while ranks compare, so that comparisons of two threads do not mix.
        fused: the fused path's resources, None until a call needs them.
        wiring: how the ranks' GPUs reach each other, known once the ranks have met.
        fast: launches, by whatever cheaper key the ops look them up with, None where there are
            none to go straight to; see ``ops``.
        splits: split sizes that were compared outside of a capture; see ``splits``.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.world = group.size()
        self.lock = threading.RLock()
        self.fused: Fused | None = None
        self.fast: dict[Hashable, Callable[..., Any] | None] = {}
        self.splits: set[Hashable] = set()
        settings = Settings.load()
        self.timeout_s = settings.timeout_s
        self.wiring = Wiring(peers=settings.p2p)
        self._group = weakref.ref(group)
        self._ledger: Ledger | None = None
        self._entries: dict[Hashable, Entry] = {}
        self._compared: set[Hashable] = set()
        self._uneven: set[Hashable] = set()
        self._kinds: set[Hashable] = set()
        self._no_peers = self._why = ""
        self._workspaces = 0

    def entry(self, key: Hashable, describe: Callable[[], Call]) -> Entry:
        """The agreed decision for a call.

        Args:
            key: identifies the call, cheap to hash. describe: the call, asked for when it is new.

        Raises:
            AgreementError: the ranks differ. CaptureError: a CUDA graph is being captured and this
            call has not run outside of one.
        """
        found = self._entries.get(key)
        return found if found is not None else self._new_entry(key, describe())

    def find(self, key: Hashable) -> Entry | None:
        """The entry of an agreed call, None if there is none."""
        return self._entries.get(key)

    def compare_kind(
        self,
        kind: Hashable,
        what: str,
        common: Mapping[str, str],
        describe: Callable[[], Call],
    ) -> None:
        """Compare a kind of call, of whatever sizes, the first time that it is made.

        Args:
            kind: identifies it. what: names it. common: what must be equal on all ranks.
            describe: the call that is made.

        Raises:
            AgreementError: the ranks differ.
        """
        if kind in self._kinds:
            return
        with self.lock:
            if self._ledger is None:
                self._meet(describe())
            assert self._ledger is not None
            self._ledger.settle(what, Statement(common, {}, {}))
            self._kinds.add(kind)

    def remember_splits(self, sizes: Hashable) -> None:
        """Split sizes that a capture may use."""
        if len(self.splits) >= MAX_ENTRIES:
            self.splits.clear()
        self.splits.add(sizes)

    def _new_entry(self, key: Hashable, call: Call) -> Entry:
        on_gpu = call.device.type == "cuda"
        if self._ledger is None and self.world > 1 and on_gpu and not _capturing(call.device):
            with self.lock:
                if self._ledger is None:
                    self._meet(call)
        call = replace(call, wiring=self.wiring)
        decision = dispatch.decide(call)
        if self._why and decision.cause in (Cause.NO_RECORD, Cause.NOT_BUILT):
            reason = f"{self._why}by way of the host's memory: {decision.reason}"
            decision = decision.unfused(Cause.NO_PEERS, reason)
        if self.world == 1:
            return self._keep(key, Entry(decision))
        shared = (
            call.op, call.dtype, call.device.type, call.sizes, call.cut, call.bias,
            call.reduce_op, len(call.ns), call.ns[0] if call.op.scatters else call.k,
            call.residual,
        )  # fmt: skip
        hopeless = decision.cause in _NEVER_FUSED
        if on_gpu and not hopeless and _capturing(call.device):
            raise CaptureError(
                f"{call.key}: a CUDA graph is being captured, and this call has not run yet on "
                "this group: comparing it with the other ranks and allocating its workspace "
                "cannot be captured. Call the op once with the same shapes before the capture"
            )
        with self.lock:
            # Where no kernel can serve any size, one comparison of what all ranks share is enough;
            # and ranks whose layers do not divide evenly may come upon a new size alone.
            known = hopeless and shared in self._compared
            even = shared not in self._uneven and (known or self._agree(call, decision))
            self._compared.add(shared)
            if not even:
                self._uneven.add(shared)
                if decision.path == "fused":
                    reason = "the ranks hold weights of different sizes or layouts"
                    decision = decision.unfused(Cause.UNEVEN, reason)
            elif decision.path == "fused":
                decision = self._prepare(call, decision)
                if self.wiring != call.wiring:  # no peers, found out here: all ranks decide again
                    return self._new_entry(key, call)
            run = None
            if decision.winner is not None:
                assert self.fused is not None
                run = run_of(self.fused, call, decision)
            return self._keep(key, Entry(decision, run))

    def _keep(self, key: Hashable, entry: Entry) -> Entry:
        if len(self._entries) >= MAX_ENTRIES:
            # Both, or a rank that still finds a call in one would skip a comparison.
            self._entries.clear()
            self.fast.clear()
        self._entries[key] = entry
        return entry

    def _agree(self, call: Call, decision: Decision) -> bool:
        if self._ledger is None:
            self._meet(call)
        assert self._ledger is not None
        gathers = call.op.gathers
        elsewhere = decision.path == "fused" and self._on_another_gpu(call)
        common = {
            "dtype": str(call.dtype),
            "device": call.device.type,
            "GPU": "another than before" if elsewhere else "as before",
            "cut dim": str(call.cut),
            "leading sizes": str(list(call.sizes)),
            "width": str(call.k if gathers else call.ns[0]),
            "weights": str(len(call.ns)),
            "bias": "rank's own" if gathers else call.bias,
            "reduce_op": call.reduce_op,
            "residual": "given" if call.residual else "none",
        }
        local = {"weight sizes": f"{call.ns} {call.k}", "weight layouts": str(call.layouts)}
        choice = {"path": decision.path}
        winner = decision.winner
        if winner is not None:
            choice |= {
                "kernel": winner.kernel.name,
                "run": str(winner.run.to_dict()),
                "artefacts": ",".join(winner.artefacts),
            }
        name = call.op.collective
        agreed = self._ledger.settle(name, Statement(common, local, choice, decision.reason))
        if agreed and elsewhere:  # on all ranks, or they would not have agreed
            assert self.fused is not None
            raise UsageError(
                f"{call.key}: this group's fused calls have run on {self.fused.device}; found x on "
                f"{call.device}. A rank of a group uses one GPU: make another group for the other"
            )
        return agreed

    def _on_another_gpu(self, call: Call) -> bool:
        return self.fused is not None and call.device != self.fused.device

    def _meet(self, call: Call) -> None:
        """The group's first comparison: versions, and where the ranks are."""
        ledger = Ledger(self._live_group(), self.timeout_s)
        ledger.meet(call.key)
        here = {"version": __version__, "abi": f"{abi.ABI_VERSION}.{abi.CALLS_VERSION}"}
        address, node = _place(call.device)
        mine = {"host": socket.gethostname(), "peers": self.wiring.peers, "here": here}
        every = ledger.exchange(call.key, {**mine, "address": address, "node": node})
        if any(each["here"] != every[0]["here"] for each in every):
            listed = "; ".join(f"rank {r}: {each['here']}" for r, each in enumerate(every))
            raise AgreementError(
                f"{call.key}: the ranks run different versions of fluxgen: {listed}. Install the "
                "same on all"
            )
        if len({each["peers"] for each in every}) > 1:
            where = [rank for rank, each in enumerate(every) if not each["peers"]]
            raise AgreementError(
                f"{call.key}: FLUXGEN_P2P_DISABLE=1 is set on ranks {where} only: set it on all "
                "ranks of the group, or on none"
            )
        hosts = [each["host"] for each in every]
        if len(set(hosts)) > 1:
            self._no_peers = f"the group spans hosts {', '.join(dict.fromkeys(hosts))}"
        addresses = [each["address"] for each in every]
        known = len(set(hosts)) == 1 and all(addresses)
        # Of all: containers of one machine need not all show NVML.
        answers = ledger.exchange(call.key, nvlinked(addresses) if known else None)
        apart = known and len(set(addresses)) == len(addresses)
        self.wiring = replace(
            self.wiring,
            nvlink=None if None in answers else all(answers),
            islands=islands([each["node"] for each in every]) if apart else 1,
        )
        # Not before: if this fails it does so on all ranks, and they meet again.
        self._ledger = ledger

    def _prepare(self, call: Call, decision: Decision) -> Decision:
        """Resources for a fused call; by all ranks together, with the same outcome on all."""
        winner, ledger = decision.winner, self._ledger
        assert winner is not None
        assert ledger is not None
        if not self._no_peers and (self.fused is None or self.fused.needs_workspace(winner)):
            self._workspaces += 1
            prefix = f"{ledger.prefix}/memory/{self._workspaces}"
            # In two steps, each with the outcome of all: a rank that has no memory must not leave
            # the others in the rendezvous. The second also makes sure that every workspace is zero
            # before any rank uses one.
            gpu, made, failed, ticket = "", None, "", None
            try:
                gpu = str(torch.cuda.get_device_properties(call.device).uuid)
                fused = self.fused or Fused(call.device, winner.arch)
                local = fused.allocate(winner, not self.wiring.peers)
                ticket = local.ticket
            except Exception as error:  # whatever Torch or the driver raises must reach all ranks
                failed = f"{type(error).__name__}: {error}"
            every = ledger.exchange(call.key, [gpu, failed, ticket])
            if not any(text for _, text, _ in every):
                tickets = [each for *_, each in every]
                try:
                    made = local.join(self._live_group(), tickets, prefix, self.timeout_s)
                except Exception as error:
                    failed = f"{type(error).__name__}: {error}"
                every = ledger.exchange(call.key, [gpu, failed, None])
            if any(text for _, text, _ in every):
                texts = enumerate(text for _, text, _ in every)
                listed = "; ".join(f"rank {rank}: {text}" for rank, text in texts if text)
                if not self.wiring.peers or self.fused is not None:
                    self._no_peers = f"no memory that the ranks share: {self._why}{listed}"
                else:  # by way of the host's memory, then
                    self.wiring = replace(self.wiring, peers=False)
                    self._why = f"no symmetric memory: {listed}; "
            else:
                assert made is not None
                fused.adopt(made)
                if sum(each == gpu for each, *_ in every) > 1:
                    fused.reserved = SHARED_GPU_SMS
                self.fused = fused
        if self._no_peers:
            return decision.unfused(Cause.NO_PEERS, self._no_peers)
        return decision

    def _live_group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise UsageError("group: this process group has been destroyed")
        return group


def _capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return bool(torch.cuda.is_current_stream_capturing())


def _place(device: torch.device) -> tuple[str, int]:
    """PCI address and NUMA node of a GPU; empty where the driver does not say."""
    if device.type != "cuda":
        return "", 0
    try:
        found = devices()[device.index or 0]
    except (FluxgenError, IndexError):
        return "", 0
    return found.address, found.numa


# By identity, which is several times faster than a weak dictionary; a group's end removes its own.
_states: dict[int, GroupState] = {}
_states_lock = threading.Lock()


def state_of(group: dist.ProcessGroup) -> GroupState:
    """The state of a group, made at first use."""
    found = known_state(group)
    if found is None:
        with _states_lock:
            found = known_state(group) or _keep_state(group, GroupState(group))
    return found


def known_state(group: object) -> GroupState | None:
    """The state of a group, if it has one."""
    found = _states.get(id(group))
    return found if found is not None and found._group() is group else None


def _keep_state(group: dist.ProcessGroup, state: GroupState) -> GroupState:
    _states[id(group)] = state
    weakref.finalize(group, _states.pop, id(group), None)
    return state


def check_timeouts() -> None:
    """Raise the :class:`CommTimeout` of any group whose device-side wait passed its deadline.

    Reads host memory and waits for nothing: synchronise first to know about all that was queued.
    """
    for state in list(_states.values()):
        if state.fused is not None:
            state.fused.check()


def reset(group: Group) -> None:
    """Forget a group's workspace and agreements, after a :class:`CommTimeout`.

    Every rank of the group must call it, and none may have a call in flight. The next call makes a
    new workspace together with the other ranks; graphs captured before are void.
    """
    live = resolve(group_of(group)[0])
    with _states_lock:
        _keep_state(live, GroupState(live))
