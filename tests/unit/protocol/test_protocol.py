"""The protocol header on the host: real threads, real atomics; and where it lays things."""

from __future__ import annotations

import ctypes as ct

import pytest

from fluxgen.native import abi, workspace
from tests.unit.protocol.host import driver


@pytest.mark.parametrize(
    ("world", "chunks", "tiles", "late"),
    [(1, 1, 1, -1), (2, 1, 3, 0), (2, 4, 2, 1), (3, 2, 5, 1), (4, 1, 4, 3), (8, 2, 2, 5)],
)
def test_ranks_as_threads_read_what_was_written(world, chunks, tiles, late):
    first = 2**32 - 20  # the epoch wraps during the run
    calls = 120 if world < 8 else 60
    assert driver().run_ranks(world, calls, chunks, tiles, late, ct.c_uint32(first)) == 0


@pytest.mark.parametrize(("world", "late"), [(1, -1), (2, 0), (3, 2), (8, 5)])
def test_packets_of_any_bits_are_taken_whole_and_once(world, late):
    """Data are all bit patterns that could be taken for an epoch, NaNs among them."""
    first = ct.c_uint32(2**32 - 12)  # it wraps, past the epoch of an empty packet
    assert driver().run_packets(world, 100 if world < 8 else 40, 24, late, first) == 0


def test_packets_that_never_come_are_given_up():
    report = abi.Report()
    taken = driver().expire_packets(ct.c_uint64(200_000_000), ct.byref(report))
    assert taken == 0
    assert (report.code, report.op, report.rank, report.peer) == (1, 2, 0, 2)
    assert (report.expected, report.seen) == (7, 5)


@pytest.mark.parametrize(("blocks", "gemms"), [(1, 1), (4, 1), (3, 3)])
def test_gemms_beside_a_late_beginning_take_the_epoch_of_their_call(blocks, gemms):
    first = ct.c_uint32(2**32 - 10)  # it wraps
    assert driver().run_gathers(30, blocks, gemms, first) == 0


def test_epochs_compare_modulo_two_to_the_32():
    reached = driver().reached
    for seen, expected, result in [
        (1, 1, 1),
        (2, 1, 1),
        (0, 1, 0),
        (0, 2**32 - 1, 1),
        (2**32 - 1, 0, 0),
        (5, 2**32 - 5, 1),
    ]:
        assert reached(ct.c_uint32(seen), ct.c_uint32(expected)) == result


def test_a_wait_past_its_deadline_reports_and_gives_up_for_the_group():
    report, told = abi.Report(), abi.Report()
    second, arrived = ct.c_double(), ct.c_uint32()
    satisfied = driver().expire(
        ct.c_uint64(300_000_000),
        ct.byref(report),
        ct.byref(told),
        ct.byref(second),
        ct.byref(arrived),
    )
    assert satisfied == 0
    assert (report.code, report.op, report.rank, report.peer) == (1, 1, 2, 3)
    assert (report.chunk, report.expected, report.seen) == (5, 7, 6)
    assert second.value < 0.1, "a second wait of an aborted group must not spend a deadline again"
    assert (told.code, told.op, told.rank, told.peer, told.expected) == (2, 2, 3, 2, 9)
    assert arrived.value == 0, "an aborted rank raises no flag on another"


def test_parts_of_a_workspace_lie_where_the_header_says():
    layout = driver().layout
    assert layout(b"ready") == abi.READY_OFFSET
    assert layout(b"pulled_1") == abi.PULLED_OFFSET + 4
    assert layout(b"arrived_1_2") == abi.ARRIVED_OFFSET + 4 * (abi.MAX_CHUNKS + 2)
    assert layout(b"gathered_1_2") == abi.GATHERED_OFFSET + 4 * (abi.MAX_CHUNKS + 2)
    assert layout(b"counters") == abi.COUNTERS_OFFSET
    assert layout(b"filled_1_2") == abi.LAYOUT.constants["kFilledOffset"] + 4 * (abi.MAX_CHUNKS + 2)
    assert layout(b"consumed_1") == abi.CONSUMED_OFFSET + 4
    assert layout(b"reduced_1") == abi.REDUCED_OFFSET + 4
    assert layout(b"stage") == abi.DATA_OFFSET
    assert layout(b"inbox_epoch1_source2") == abi.DATA_OFFSET + 3072 + 2048 + 2 * 256
    sizes = workspace.Sizes(3072, 2048, gathered=1024, drained=4096, result=512, packets=1024)
    assert layout(b"matrix") == sizes.gathered_offset
    assert layout(b"drained_source2") == sizes.gathered_offset + 1024 + 2 * 256
    assert layout(b"outbox_owner1") == sizes.gathered_offset + 1024 + 4096 + 256
    assert layout(b"result_source2") == sizes.gathered_offset + 1024 + 2 * 4096 + 2 * 256
    assert layout(b"packets_epoch1_source2") == layout(b"result_source2") + 512 + 1024
    assert layout(b"packets_epoch1_source2") - 2 * 256 + 1024 == sizes.total
