"""A model of the epoch protocol and an exhaustive search of its interleavings.

What is modelled: W ranks, each with a main stream and a copy stream, over a list of calls. A write
to another rank's memory, or by a copy engine, is first *pending* and becomes visible later; plain
writes become visible in any order, a *release* write only when every earlier write of the same
stream is visible. Data carries the tag (epoch, op, source) of who wrote it, so that every read can
be checked: a wrong tag is a lost update, an overwrite of unread data, or a stale read.

A state is a tuple; the search visits every reachable one. ``Bug`` switches off one part of the
protocol at a time, to show that the search would find its absence.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Bug(enum.Enum):
    NONE = "none"
    SINGLE_BUFFER = "one half instead of two"
    NO_FENCE = "flags may become visible before the data they announce"
    NO_READY = "copies do not wait for the peer's slab"
    RS_SKIPS_WAITS = "the reduction does not wait for all sources"
    SHARED_FLAGS = "copies and peers write the same block of flags"
    NO_PULLED = "the stage is overwritten before the peers have pulled it"
    NO_STAGED = "a GEMM takes the epoch that it finds, though its call has not begun"
    NO_ASKING = "slabs are pushed into a matrix that may still be read"
    LATE_EPOCH = "copies that are pushed take their epoch like those that are pulled"
    NO_CONSUMED = "an inbox is drained into that may still be read"
    NO_SENT = "a drained call ends before its copies have taken their epoch"
    NO_FILLED = "copies do not wait for the tiles that they send"
    NO_FORWARD = "a slab is forwarded before it has come"
    TORN = "a packet's epoch and its data are written apart"
    SHORT_MARK = "packets carry one bit of their epoch, and nobody empties them"
    NO_REDUCED = "a peer's rows of an all-reduce are taken before they have come"


@dataclass(frozen=True)
class Outcome:
    states: int
    error: str | None


# One step of a stream:
#   ("write", key, tag)     visible at once: own memory, in stream order
#   ("send", key, tag)      pending plain write
#   ("release", key, epoch) pending release write
#   ("wait", key, epoch)    enabled once the flag has reached the epoch
#   ("overtake", key, key)  enabled while the first word is above the second
#   ("read", key, tag)      the data must carry the tag
#   ("copy", src, dst, tag) read src (must carry the tag), pending plain write to dst
#   ("take", key, tag)      enabled once the packet's epoch is the tag's: it must be the tag, and is
#                           emptied
#   ("fork",) / ("join",)   the copy stream may run / must have finished this call; what the stream
#                           before the event wrote has become visible
#
# Calls: A is an ag_gemm whose slabs are pulled, P one whose slabs are pushed, F one whose slabs are
# forwarded round the ring, R a gemm_rs, D one whose partial slabs are drained, S one whose reduced
# rows all ranks get. What tells these apart from others is not modelled: P is an a2a_gemm, too, and
# R whatever reads all slabs of an inbox: an all-reduce in one shot, a gemm_a2a. L is an all-reduce
# in packets, two from each rank to each.
def program(rank: int, world: int, calls: str, bug: Bug):
    main: list[tuple] = []
    copy: list[tuple] = []
    peers = [(rank + i) % world for i in range(1, world)]
    staged = begun = drained = 0
    for epoch, op in enumerate(calls, start=1):
        half = 0 if bug is Bug.SINGLE_BUFFER else epoch % 2
        gathered = "arrived" if bug is Bug.SHARED_FLAGS else "gathered"
        if op == "A":
            # The call begins on the copy stream, beside its GEMM, whose own slab is the caller's.
            main.append(("fork", epoch))
            copy.append(("start", epoch))
            if staged and bug is not Bug.NO_PULLED:
                copy += [("wait", ("pulled", rank, p), staged) for p in peers]
            copy.append(("write", ("stage", rank), (epoch, op, rank)))
            copy.append(("write", ("begun", rank), epoch))
            copy += [("release", ("ready", p, rank), epoch) for p in peers]
            for p in peers:
                if bug is not Bug.NO_READY:
                    copy.append(("wait", ("ready", rank, p), epoch))
                copy.append(("copy", ("stage", p), ("whole", rank, p), (epoch, op, p)))
                copy.append(("release", (gathered, rank, p), epoch))
                copy.append(("release", ("pulled", p, rank), epoch))
            taken = epoch if bug is not Bug.NO_STAGED else begun
            if taken:
                main.append(("wait", ("begun", rank), taken))
            for s in peers:
                if taken:
                    main.append(("wait", (gathered, rank, s), taken))
                main.append(("read", ("whole", rank, s), (epoch, op, s)))
            main.append(("join", len(copy)))
            staged = begun = epoch
        elif op == "F":
            before = (rank - 1) % world
            main.append(("write", ("begun", rank), epoch))
            main += [("release", ("ready", p, rank), epoch) for p in peers]
            main.append(("fork", epoch))
            copy.append(("start", epoch))
            if bug is not Bug.NO_ASKING:
                copy.append(("wait", ("ready", rank, before), epoch))
            copy.append(("send", ("whole", before, rank), (epoch, op, rank)))
            copy.append(("release", ("gathered", before, rank), epoch))
            for s in peers[:-1]:
                if bug is not Bug.NO_FORWARD:
                    copy.append(("wait", ("gathered", rank, s), epoch))
                copy.append(("copy", ("whole", rank, s), ("whole", before, s), (epoch, op, s)))
                copy.append(("release", ("gathered", before, s), epoch))
            for s in peers:
                main.append(("wait", ("gathered", rank, s), epoch))
                main.append(("read", ("whole", rank, s), (epoch, op, s)))
            main.append(("write", ("multiplied", rank), epoch))
            main.append(("join", len(copy)))
            begun = epoch
        elif op == "P":
            # Begun on the main stream, as nothing is staged: then the copies, and the GEMM.
            main.append(("write", ("begun", rank), epoch))
            main += [("release", ("ready", p, rank), epoch) for p in peers]
            main.append(("fork", epoch))
            copy.append(("start", epoch))
            for p in reversed(peers):
                if bug is not Bug.NO_ASKING:
                    copy.append(("wait", ("ready", rank, p), epoch))
                if bug is Bug.LATE_EPOCH:  # as of a call that the GEMM has not ended
                    copy.append(("overtake", ("begun", rank), ("multiplied", rank)))
                copy.append(("send", ("whole", p, rank), (epoch, op, rank)))
                copy.append(("release", ("gathered", p, rank), epoch))
            for s in peers:
                main.append(("wait", ("gathered", rank, s), epoch))
                main.append(("read", ("whole", rank, s), (epoch, op, s)))
            main.append(("write", ("multiplied", rank), epoch))
            main.append(("join", len(copy)))
            begun = epoch
        elif op == "D":
            # The word that copies take their epoch from is advanced at the end, here "ended".
            main.append(("fork", epoch))
            copy.append(("start", epoch))
            for p in peers:
                main.append(("write", ("outbox", rank, p), (epoch, op, rank)))
                main.append(("write", ("filled", rank, p), epoch))
                if drained and bug is not Bug.NO_CONSUMED:
                    copy.append(("wait", ("consumed", rank, p), drained))
                if bug is not Bug.NO_FILLED:
                    copy.append(("overtake", ("filled", rank, p), ("ended", rank)))
                copy.append(("copy", ("outbox", rank, p), ("drained", p, rank), (epoch, op, rank)))
                copy.append(("release", ("arrived", p, rank), epoch))
            copy.append(("write", ("sent", rank), epoch))
            main.append(("write", ("drained", rank, rank), (epoch, op, rank)))
            main += [("wait", ("arrived", rank, s), epoch) for s in peers]
            main += [("read", ("drained", rank, s), (epoch, op, s)) for s in range(world)]
            main += [("release", ("consumed", p, rank), epoch) for p in peers]
            if bug is not Bug.NO_SENT:
                main.append(("wait", ("sent", rank), epoch))
            main.append(("write", ("ended", rank), epoch))
            main.append(("join", len(copy)))
            drained = epoch
        elif op == "L":
            packets = [(s, i) for s in [*peers, rank] for i in range(2)]
            for p, i in packets:
                to = ("packet", p, half, rank, i)
                if bug is Bug.TORN:
                    main.append(("send", ("mark", p, half, rank, i), epoch))
                main.append(("write" if p == rank else "send", to, (epoch, op, rank)))
            for s, i in packets:
                at = ("packet", rank, half, s, i)
                tag = (epoch, op, s)
                if bug is Bug.TORN:
                    main.append(("wait", ("mark", rank, half, s, i), epoch))
                    main.append(("read", at, tag))
                elif bug is Bug.SHORT_MARK:
                    main.append(("wait", at, (0,)))
                    main.append(("read", at, tag))
                else:
                    main.append(("take", at, tag))
        else:
            for p in peers:
                main.append(("send", ("inbox", p, half, rank), (epoch, op, rank)))
                main.append(("release", ("arrived", p, rank), epoch))
            main.append(("write", ("inbox", rank, half, rank), (epoch, op, rank)))
            sources = sorted([rank, *peers])
            waited = sources[:1] if bug is Bug.RS_SKIPS_WAITS else sources
            main += [("wait", ("arrived", rank, s), epoch) for s in waited if s != rank]
            main += [("read", ("inbox", rank, half, s), (epoch, op, s)) for s in sources]
            if op == "S":
                for p in peers:
                    main.append(("send", ("result", p, rank), (epoch, op, rank)))
                    main.append(("release", ("reduced", p, rank), epoch))
                for s in peers:
                    if bug is not Bug.NO_REDUCED:
                        main.append(("wait", ("reduced", rank, s), epoch))
                    main.append(("read", ("result", rank, s), (epoch, op, s)))
        if op != "D":
            main.append(("write", ("ended", rank), epoch))
    return tuple(main), tuple(copy)


def _set(row: tuple, index: int, value) -> tuple:
    return (*row[:index], value, *row[index + 1 :])


def _push(pending: tuple, stream: int, slot: int, value, release: bool) -> tuple:
    return _set(pending, stream, (*pending[stream], (slot, value, release)))


_MEMORY = (
    "stage", "begun", "multiplied", "whole", "inbox", "ready", "pulled", "arrived", "gathered",
    "outbox", "filled", "drained", "consumed", "sent", "ended", "result",
    "reduced", "packet", "mark",
)  # fmt: skip
_INVISIBLE = ("send", "release", "fork", "start", "join", "wait")


def explore(world: int, calls: str, bug: Bug = Bug.NONE, limit: int = 3_000_000) -> Outcome:
    """Visit every interleaving; the first violation or deadlock ends the search."""
    streams = [s for r in range(world) for s in program(r, world, calls, bug)]
    keys: dict[tuple, int] = {}
    for stream in streams:
        for step in stream:
            for part in step[1:3]:
                if isinstance(part, tuple) and part and part[0] in _MEMORY:
                    keys.setdefault(part, len(keys))
    fenced = bug is not Bug.NO_FENCE
    # state: (pcs, forked epoch per rank, memory, pending writes per stream)
    start = (
        (0,) * len(streams),
        (0,) * world,
        (0,) * len(keys),
        ((),) * len(streams),
    )
    seen, stack = {start}, [start]
    while stack:
        state = stack.pop()
        pcs, forked, memory, pending = state
        successors = []
        for i, stream in enumerate(streams):
            if pcs[i] == len(stream):
                continue
            step = stream[pcs[i]]
            kind = step[0]
            next_pcs = (*pcs[:i], pcs[i] + 1, *pcs[i + 1 :])
            enabled = True
            after = (next_pcs, forked, memory, pending)
            if kind == "wait":
                value = memory[keys[step[1]]]
                enabled = bool(value) and value >= step[2]
            elif kind == "overtake":
                enabled = memory[keys[step[1]]] > memory[keys[step[2]]]
            elif kind == "take":
                found = memory[keys[step[1]]]
                enabled = bool(found) and found[0] == step[2][0]
                if enabled and found != step[2]:
                    return Outcome(len(seen), f"take {step[1]}: {found}, not {step[2]}")
                after = (next_pcs, forked, _set(memory, keys[step[1]], 0), pending)
            elif kind in ("read", "copy"):
                tag = step[-1]
                if memory[keys[step[1]]] != tag:
                    found = memory[keys[step[1]]]
                    return Outcome(len(seen), f"{kind} {step[1]}: {found}, not {tag}")
                if kind == "copy":
                    after = (next_pcs, forked, memory, _push(pending, i, keys[step[2]], tag, False))
            elif kind == "write":
                after = (next_pcs, forked, _set(memory, keys[step[1]], step[2]), pending)
            elif kind in ("send", "release"):
                grown = _push(pending, i, keys[step[1]], step[2], kind == "release")
                after = (next_pcs, forked, memory, grown)
            elif kind == "fork":  # an event: what this stream wrote before it is visible
                enabled = not pending[i]
                after = (next_pcs, _set(forked, i // 2, step[1]), memory, pending)
            elif kind == "start":
                enabled = forked[i // 2] >= step[1]
            else:  # join: the copy stream has finished this call, its writes included
                enabled = pcs[i + 1] >= step[1] and not pending[i + 1]
            if not enabled:
                continue
            if kind in _INVISIBLE:
                # Nothing another stream does depends on when this step is taken, so taking it
                # alone, now, loses no behaviour (a persistent set of one step).
                successors = [after]
                break
            successors.append(after)
        else:
            for i in range(len(streams)):
                for j, (slot, value, release) in enumerate(pending[i]):
                    if release and fenced and j > 0:
                        continue
                    rest = pending[i][:j] + pending[i][j + 1 :]
                    successors.append(
                        (pcs, forked, _set(memory, slot, value), _set(pending, i, rest))
                    )
        if not successors and any(pc < len(s) for pc, s in zip(pcs, streams, strict=True)):
            blocked = [s[pc] for pc, s in zip(pcs, streams, strict=True) if pc < len(s)]
            return Outcome(len(seen), f"deadlock at {blocked}")
        for successor in successors:
            if successor not in seen:
                seen.add(successor)
                stack.append(successor)
        if len(seen) > limit:
            raise RuntimeError(f"more than {limit} states: shrink the model")
    return Outcome(len(seen), None)
