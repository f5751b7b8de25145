"""All ranks of a group make the same call and take the same path: compared once, through the store.

A path chosen by each rank alone hangs as soon as two choose differently, so what a rank is about
to do for a *new* call (op and shape) is written to the group's own key-value store and compared
with what the others wrote, before anything is sent or launched. The n-th comparison of one rank
meets the n-th of every other, whatever they are about: so ranks that call different shapes find
out, each of them, and a rank that does not come is named within the deadline.

It runs on the host, needs no collective, and is not repeated for a call that was compared before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fluxgen.core.errors import AgreementError

__all__ = ["Ledger", "Statement", "compare"]


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
        group: the process group. deadline_s: how long to wait for another rank's statement.
        generation: tells the ledgers of one group apart, made one after the other.
    """

    def __init__(self, group: dist.ProcessGroup, deadline_s: float, generation: int = 0) -> None:
        self.rank, self.world = group.rank(), group.size()
        self._store: Any = dist.distributed_c10d._get_process_group_store(group)
        self._deadline = deadline_s
        self._prefix = f"fluxgen/{generation}"
        self._count = 0

    def exchange(self, what: str, mine: Any) -> list[Any]:
        """The JSON value that each rank hands to its exchange of this number.

        Raises:
            AgreementError: a rank did not come within the deadline, or the store is gone.
        """
        number, self._count = self._count, self._count + 1
        keys = [f"{self._prefix}/{number}/{rank}" for rank in range(self.world)]
        late: list[int] = []
        try:
            self._store.set(keys[self.rank], json.dumps(mine))
            try:
                self._store.wait(keys, timedelta(seconds=self._deadline))
            except RuntimeError:  # DistStoreError, DistNetworkError
                late = [rank for rank in range(self.world) if not self._store.check([keys[rank]])]
                if not late:
                    raise
            else:
                found = [json.loads(self._store.get(key)) for key in keys]
                if number:
                    # Whoever wrote this number has read the one before.
                    self._store.delete_key(f"{self._prefix}/{number - 1}/{self.rank}")
                return found
        except RuntimeError as error:
            raise AgreementError(
                f"{what}: the store of the process group does not answer ({error}). Is the "
                "process that holds it (rank 0) alive?"
            ) from error
        raise AgreementError(
            f"{what}: rank {', '.join(map(str, late))} of the group did not come to comparison "
            f"{number} within {self._deadline:g} s. Is it alive, and does it make the same calls "
            "in the same order? (FLUXGEN_TIMEOUT_S sets the deadline)"
        )

    def settle(self, what: str, mine: Statement) -> bool:
        """Compare with all ranks; see :func:`compare`."""
        every = self.exchange(what, {"what": what, **asdict(mine)})
        statements = [
            Statement({"op": s["what"], **s["common"]}, s["local"], s["choice"], s["why"])
            for s in every
        ]
        return compare(what, statements)
