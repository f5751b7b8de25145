"""Every interleaving of the protocol, and proof that the search finds seeded bugs."""

from __future__ import annotations

import itertools

import pytest

from tests.unit.protocol.model import Bug, explore


@pytest.mark.parametrize("calls", ["".join(c) for c in itertools.product("AR", repeat=4)])
def test_two_ranks_every_mix_of_four_calls(calls):
    outcome = explore(2, calls)
    assert outcome.error is None
    assert outcome.states > 400, "the search must have visited interleavings"


@pytest.mark.parametrize("calls", ["".join(c) for c in itertools.product("APR", repeat=3)])
def test_two_ranks_every_mix_with_pushed_slabs(calls):
    outcome = explore(2, calls)
    assert outcome.error is None
    assert outcome.states > 100


@pytest.mark.parametrize("calls", ["".join(c) for c in itertools.product("ADR", repeat=3)])
def test_two_ranks_every_mix_with_drained_slabs(calls):
    outcome = explore(2, calls)
    assert outcome.error is None
    assert outcome.states > 100


@pytest.mark.parametrize("calls", ["".join(c) for c in itertools.product("ARS", repeat=3)])
def test_two_ranks_every_mix_with_all_reduces(calls):
    outcome = explore(2, calls)
    assert outcome.error is None
    assert outcome.states > 100


@pytest.mark.parametrize("calls", ["".join(c) for c in itertools.product("ALR", repeat=3)])
def test_two_ranks_every_mix_with_packets(calls):
    outcome = explore(2, calls)
    assert outcome.error is None
    assert outcome.states > 100


def test_packets_of_every_second_call():
    assert explore(2, "LLLL").error is None


@pytest.mark.parametrize(
    ("bug", "calls", "found"),
    [
        (Bug.TORN, "L", "read"),
        (Bug.SHORT_MARK, "LLL", "read"),
        (Bug.SINGLE_BUFFER, "LL", "deadlock"),
    ],
)
def test_seeded_bugs_of_packets_are_found(bug, calls, found):
    assert explore(2, calls, bug).error.startswith(found)


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["SS", "SR", "DS", "SP"])
def test_three_ranks_all_reduce(calls):
    assert explore(3, calls).error is None


@pytest.mark.parametrize("calls", ["FF", "FP", "PF", "FA", "AF", "FR"])
def test_three_ranks_forward_round_the_ring(calls):
    outcome = explore(3, calls)
    assert outcome.error is None
    assert outcome.states > 100


@pytest.mark.slow
def test_four_ranks_forward_round_the_ring():
    assert explore(4, "F").error is None


@pytest.mark.parametrize("bug", [Bug.NO_FORWARD, Bug.NO_ASKING, Bug.NO_FENCE])
def test_seeded_bugs_of_the_ring_are_found(bug):
    assert explore(3, "FF", bug).error is not None


@pytest.mark.parametrize("calls", ["PDP", "DPD", "DDDD"])
def test_drained_and_pushed_slabs(calls):
    assert explore(2, calls).error is None


@pytest.mark.slow
@pytest.mark.parametrize("calls", ["RRRR", "ARAR", "RAAR", "PPP", "PRP", "APA", "DD"])
def test_three_ranks_four_calls(calls):
    outcome = explore(3, calls)
    assert outcome.error is None
    assert outcome.states > 10_000


@pytest.mark.parametrize(
    ("bug", "calls"),
    [
        (Bug.SINGLE_BUFFER, "RRRR"),
        (Bug.NO_PULLED, "AAAA"),
        (Bug.NO_PULLED, "RAAR"),
        (Bug.NO_STAGED, "AAAA"),
        (Bug.NO_STAGED, "RARA"),
        (Bug.NO_FENCE, "RRRR"),
        (Bug.NO_FENCE, "AAAA"),
        (Bug.NO_READY, "AAAA"),
        (Bug.RS_SKIPS_WAITS, "RRRR"),
        (Bug.SHARED_FLAGS, "ARAR"),
        (Bug.NO_ASKING, "PP"),
        (Bug.NO_ASKING, "AP"),
        (Bug.LATE_EPOCH, "P"),
        (Bug.NO_FENCE, "PP"),
        (Bug.NO_CONSUMED, "DD"),
        (Bug.NO_SENT, "D"),
        (Bug.NO_FILLED, "D"),
        (Bug.NO_FENCE, "D"),
        (Bug.NO_REDUCED, "S"),
        (Bug.NO_FENCE, "S"),
        (Bug.RS_SKIPS_WAITS, "SS"),
    ],
)
def test_seeded_bugs_are_found(bug, calls):
    assert explore(2, calls, bug).error is not None


def test_single_buffer_overwrites_and_shared_flags_wake_too_early():
    assert "not" in explore(2, "RRRR", Bug.SINGLE_BUFFER).error
    assert "read" in explore(2, "ARAR", Bug.SHARED_FLAGS).error
