"""Memory that the processes of one host share: zero, seen by all, gone with the last of them."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from fluxgen.core.errors import MachineError
from fluxgen.runtime.memory.hosted import SharedFile

pytestmark = [pytest.mark.dist]
SIZE = (1 << 20) + 8


def _owner(pipe):
    memory = SharedFile(SIZE)
    mine = SharedFile.map(memory.ticket)
    pipe.send((memory.ticket, mine[:] == bytes(SIZE)))
    pipe.recv()
    pipe.send(bytes(mine[-3:]))
    pipe.recv()


@pytest.fixture
def owner():
    """A process with shared memory, and its end of a pipe."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_owner, args=(theirs,))
    process.start()
    yield process, pipe
    process.kill()
    process.join()


def test_what_one_writes_the_other_reads_and_it_outlives_its_owner(owner):
    process, pipe = owner
    ticket, zero = pipe.recv()
    assert zero
    memory = SharedFile.map(ticket)
    assert memory[:] == bytes(SIZE)
    memory[-3:] = b"abc"
    pipe.send("go")
    assert pipe.recv() == b"abc"
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert memory[-3:] == b"abc"
    memory[:3] = b"def"
    with pytest.raises(MachineError, match="one PID namespace"):
        SharedFile.map(ticket)  # no name is left behind


def test_another_file_under_the_same_number_is_refused(owner):
    _, pipe = owner
    (pid, descriptor, token, size), _ = pipe.recv()
    for wrong in ([pid, descriptor, token[:-1], size], [pid, descriptor, token, size + 1]):
        with pytest.raises(MachineError, match=f"process {pid}: expected {wrong[3]} bytes"):
            SharedFile.map(wrong)
    with pytest.raises(MachineError, match="run as one user"):
        SharedFile.map([pid, 4096, token, size])


def test_dropped_memory_is_closed():
    memory = SharedFile(4096)
    descriptor = memory.ticket[1]
    assert os.fstat(descriptor).st_size == 4096
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
