"""Whether the ranks' split sizes fit each other: known on every rank before anything is sent.

Split sizes are a rank's own and may change at every call, so what was compared once says nothing
about the next call: a rank that skipped the comparison would leave another one waiting in it. They
are therefore exchanged at each call, ``2 W + 1`` integers of each rank by the group's own
all-gather. Calls of equal parts have none of their own; on a GPU, where the exchange would cost as
much as the call, they go without it, and it is the first call of each kind that tells whether all
ranks give sizes or none.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fluxgen.core.errors import AgreementError, CaptureError
from fluxgen.runtime.ops.fallback import gather_into
from fluxgen.runtime.session.dispatch import Call
from fluxgen.runtime.session.groups import state_of

__all__ = ["compare_splits", "tell_refused"]

_REFUSED = -1

_Sizes = Sequence[int] | None


def compare_splits(
    group: dist.ProcessGroup,
    what: str,
    x: torch.Tensor,
    outs: _Sizes,
    ins: _Sizes,
    describe: Callable[[], Call],
) -> None:
    """Compare this call's split sizes with those of the other ranks.

    Args:
        what: names the op in errors. x: (S, ...), whose rows are sent. describe: the call.
        outs, ins: rows that come from each rank and go to each, None for equal parts.

    Raises:
        AgreementError: on every rank: the sizes do not fit, or some ranks have given none; or a
            rank did not come within the deadline.
        CaptureError: inside a CUDA graph capture, these sizes have not been compared outside.
    """
    world = group.size()
    if world == 1:
        return
    state, given = state_of(group), outs is not None
    sizes = (what, x.dtype, x.device, tuple(outs or ()), tuple(ins or ()))
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        if given and sizes not in state.splits:
            raise CaptureError(
                f"{what}: a CUDA graph is being captured, and these split sizes have not been "
                "compared with the other ranks', which cannot be captured. Call the op once with "
                "the same sizes before the capture"
            )
        return
    equal = [x.shape[0] // world] * world
    mine = [int(given), *(ins or equal), *(outs or equal)]
    every = _exchanged(group, what, x, given, mine, describe)
    if every is not None:
        _check(what, every, world)
        if x.is_cuda:
            state.remember_splits(sizes)


def tell_refused(
    group: dist.ProcessGroup, what: str, x: torch.Tensor, given: bool, describe: Callable[[], Call]
) -> None:
    """Tell the other ranks, which are about to compare, that this rank's sizes were refused."""
    if group.size() > 1 and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        with contextlib.suppress(AgreementError):  # this rank has an error of its own to raise
            _exchanged(group, what, x, given, [_REFUSED] * (2 * group.size() + 1), describe)


def _exchanged(
    group: dist.ProcessGroup,
    what: str,
    x: torch.Tensor,
    given: bool,
    mine: list[int],
    describe: Callable[[], Call],
) -> list[list[int]] | None:
    """The integers of each rank; None where such calls are not compared each time."""
    state = state_of(group)
    common = {
        "dtype": str(x.dtype),
        "device": x.device.type,
        "dims": str(x.dim()),
        "split sizes": "given" if given else "none",
    }
    state.compare_kind((what, x.dtype, x.device, x.dim()), what, common, describe)
    if x.is_cuda and not given:
        return None
    sent = torch.tensor(mine, dtype=torch.int64, device=x.device)
    come = sent.new_empty(group.size() * len(mine))
    try:
        work = gather_into(come, sent, group=group, async_op=True)
        work.wait(datetime.timedelta(seconds=state.timeout_s))
    except RuntimeError as error:  # which says which rank has gone, where the backend knows
        raise AgreementError(
            f"{what}: the ranks did not come together to compare split sizes within "
            f"{state.timeout_s:g} s: {error}. Are all alive, and do they make the same calls in "
            "the same order? (FLUXGEN_TIMEOUT_S sets the deadline)"
        ) from error
    found: list[list[int]] = come.view(group.size(), -1).tolist()
    return found


def _check(what: str, every: list[list[int]], world: int) -> None:
    modes = [given for given, *_ in every]
    if _REFUSED in modes:
        ranks = [rank for rank, given in enumerate(modes) if given == _REFUSED]
        raise AgreementError(
            f"{what}: nothing was sent, for rank {', '.join(map(str, ranks))} was refused its own "
            "split sizes; its error says why"
        )
    ins = [row[1 : world + 1] for row in every]
    outs = [row[world + 1 :] for row in every]
    if len(set(modes)) > 1:
        listed = "; ".join(
            f"rank {rank}: {f'input {ins[rank]}, output {outs[rank]}' if given else 'none'}"
            for rank, given in enumerate(modes)
        )
        raise AgreementError(
            f"{what}: expected split sizes on all ranks or on none; found {listed}"
        )
    wrong = [
        f"rank {source} sends {ins[source][target]} rows to rank {target}, which expects "
        f"{outs[target][source]}"
        for source in range(world)
        for target in range(world)
        if ins[source][target] != outs[target][source]
    ]
    if wrong:
        shown = "; ".join(wrong[:8]) + ("; ..." if len(wrong) > 8 else "")
        of = "split sizes" if modes[0] else "numbers of rows in dim 0 of x"
        raise AgreementError(
            f"{what}: the ranks' {of} do not fit each other: {shown}. Rank j's "
            "output_split_sizes[i] is rank i's input_split_sizes[j]"
        )
