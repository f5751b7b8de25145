"""All ranks of a group make the same call and take the same path: compared once, through the store.

A path chosen by each rank alone hangs as soon as two choose differently, so what a rank is about
to do for a *new* call (op and shape) is written to the group's own key-value store and compared
with what the others wrote, before anything is sent or launched. The n-th comparison of one rank
meets the n-th of every other, whatever they are about: so ranks that call different shapes find
out, each of them, and a rank that does not come is named within the deadline.

Whether all came in time is one verdict of the group, not of each rank: a rank that comes after
another has given up is told so, and all stay in step.

It runs on the host, needs no collective, and is not repeated for a call that was compared before.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fluxgen.core.errors import AgreementError

__all__ = ["Ledger", "Statement", "compare"]

_POLL_S = 0.002


@dataclass(frozen=True)
class Statement:
    """What one rank is about to do.

    Attributes:
        common: what must be equal on every rank, or the call is wrong.
        local: sizes that may differ (a layer that the ranks do not divide evenly); the ranks then
            all take the unfused path.
        choice: what the rank chose: equal wherever the local sizes are. why: its reason.
    """

    common: Mapping[str, str]
    local: Mapping[str, str]
    choice: Mapping[str, str]
    why: str = ""


def compare(what: str, statements: Sequence[Statement]) -> bool:
    """Whether the local sizes of all ranks are equal.

    Args:
        what: names the call in errors. statements: of each rank, in the group's order.

    Raises:
        AgreementError: the calls differ, or equal calls chose differently. Names every rank and
            only what differs. The same on every rank.
    """
    differ = _differing([s.common for s in statements])
    if differ:
        raise AgreementError(
            f"{what}: the ranks of the group make different calls: {_listed(differ)}. All of it "
            "must be equal. A bias that not every rank has needs bias_mode='partial' on every rank"
        )
    if _differing([s.local for s in statements]):
        return False
    differ = _differing([s.choice for s in statements])
    if differ:
        reasons = [{**part, "because": s.why} for part, s in zip(differ, statements, strict=True)]
        raise AgreementError(
            f"{what}: the ranks of the group chose different paths for the same call: "
            f"{_listed(reasons)}. Give all ranks the same tuning database (FLUXGEN_DB), kernel "
            "store (FLUXGEN_STORE) and version of fluxgen"
        )
    return True


def _differing(parts: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Of each rank, the entries that are not the same on all; [] if all are."""
    keys = dict.fromkeys(key for part in parts for key in part)
    odd = [key for key in keys if len({part.get(key, "none") for part in parts}) > 1]
    return [{key: part.get(key, "none") for key in odd} for part in parts] if odd else []


def _listed(parts: Sequence[Mapping[str, str]]) -> str:
    return "; ".join(
        f"rank {rank}: " + ", ".join(f"{key} {value}" for key, value in part.items())
        for rank, part in enumerate(parts)
    )


class Ledger:
    """What the ranks of one group have compared so far.

    Args:
        group: the process group. deadline_s: how long to wait for another rank.

    Attributes:
        prefix: of this ledger's keys. No other ledger has had it, not even one of a group of the
            same name in the same store, before ``torch.distributed`` was set up again.
    """

    def __init__(self, group: dist.ProcessGroup, deadline_s: float) -> None:
        self.rank, self.world = group.rank(), group.size()
        self.deadline_s = deadline_s
        self.prefix = ""
        self._store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._count = 0

    def meet(self, what: str) -> None:
        """Agree on a prefix that only this meeting of the ranks has; before the first exchange.

        Old keys may lie in the store, so a rank is only believed once it has answered to a word of
        this meeting: rank 0 gathers a fresh word of each rank under a new prefix, and each rank
        answers with the prefix once it has found its own word there.

        Raises:
            AgreementError: a rank did not come within the deadline, or the store is gone.
        """
        mine = uuid.uuid4().hex
        hello = [f"fluxgen/hello/{rank}" for rank in range(self.world)]
        answers = [f"fluxgen/answer/{rank}" for rank in range(self.world)]
        end = time.monotonic() + self.deadline_s
        name, verdict = mine if self.rank == 0 else "", ""
        late = list(range(1, self.world)) if self.rank == 0 else [0]
        try:
            self._store.set(hello[self.rank], mine)
            while not verdict and time.monotonic() < end:
                if self.rank == 0:
                    words = [self._peek(key) for key in hello]
                    self._store.set("fluxgen/welcome", json.dumps([mine, words]))
                    late = [r for r in range(1, self.world) if self._peek(answers[r]) != mine]
                    verdict = "" if late else self._decide(name, "met")
                elif not name:
                    offered, words = json.loads(self._peek("fluxgen/welcome") or '["", []]')
                    if len(words) == self.world and words[self.rank] == mine:
                        name = offered
                        self._store.set(answers[self.rank], name)
                else:
                    verdict = self._peek(f"fluxgen/{name}/verdict")
                if not verdict:
                    time.sleep(_POLL_S)
            if name:
                verdict = verdict or self._decide(name, json.dumps(late))
        except RuntimeError as error:
            raise _gone(what, error) from error
        if verdict != "met":
            late = json.loads(verdict) if verdict else late
            raise self._late(what, "the group's first comparison", late)
        self.prefix = name

    def _decide(self, base: str, verdict: str) -> str:
        """What the first of all ranks to come here has decided."""
        found = self._store.compare_set(f"fluxgen/{base}/verdict", "", verdict)
        return str(found.decode())

    def exchange(self, what: str, mine: Any) -> list[Any]:
        """The JSON value that each rank hands to its exchange of this number.

        Raises:
            AgreementError: a rank did not come within the deadline, or the store is gone. On
                every rank, also on the one that came too late.
        """
        number, self._count = self._count, self._count + 1
        base = f"{self.prefix}/{number}"
        keys = [f"fluxgen/{base}/{rank}" for rank in range(self.world)]
        try:
            self._store.set(keys[self.rank], json.dumps(mine))
            try:
                self._store.wait(keys, timedelta(seconds=self.deadline_s))
                late: list[int] = []
            except RuntimeError:  # DistStoreError, DistNetworkError
                late = [rank for rank in range(self.world) if not self._store.check([keys[rank]])]
            # The first to write decides for all.
            late = json.loads(self._decide(base, json.dumps(late)))
            if not late:
                found = [json.loads(self._store.get(key)) for key in keys]
                if number:
                    # Whoever wrote this number has read the one before.
                    self._store.delete_key(f"fluxgen/{self.prefix}/{number - 1}/{self.rank}")
                return found
        except RuntimeError as error:
            raise _gone(what, error) from error
        raise self._late(what, f"comparison {number}", late)

    def settle(self, what: str, mine: Statement) -> bool:
        """Compare with all ranks; see :func:`compare`."""
        every = self.exchange(what, {"what": what, **asdict(mine)})
        statements = [
            Statement({"op": s["what"], **s["common"]}, s["local"], s["choice"], s["why"])
            for s in every
        ]
        return compare(what, statements)

    def _peek(self, key: str) -> str:
        """The value of ``key``, empty if there is none."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _late(self, what: str, meeting: str, late: list[int]) -> AgreementError:
        return AgreementError(
            f"{what}: rank {', '.join(map(str, late))} of the group did not come to {meeting} "
            f"within {self.deadline_s:g} s. Is it alive, and does it make the same calls in the "
            "same order? (FLUXGEN_TIMEOUT_S sets the deadline)"
        )


def _gone(what: str, error: Exception) -> AgreementError:
    return AgreementError(
        f"{what}: the store of the process group does not answer ({error}). Is the process that "
        "holds it (rank 0) alive?"
    )
