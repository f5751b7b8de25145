"""The measuring evaluator without a GPU: schedules of the imitated link, statistics, compiling."""

from __future__ import annotations

import math
import random
import threading
import time

import pytest
from tuning_helpers import Fake

from fluxgen.compiler.nvcc import CompileError
from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Transport
from fluxgen.core.errors import UsageError
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.topology import Topology
from fluxgen.predict.constants import COPY_US
from fluxgen.predict.link import copy_arrivals, store_rate, transfer_us
from fluxgen.tune import CompiledKernels, compiled, tune
from fluxgen.tune.candidates import Candidates
from fluxgen.tune.device import schedule

TOPOLOGY = Topology.of("h200", "nvlink", 8)
KERNEL = KernelConfig(128, 192, 64, 2, 1)
AG = Problem(Signature.of("ag_gemm"), 4096, 6144, 12288, 8)
RS = Problem(Signature.of("gemm_rs"), 4096, 12288, 6144, 8)


@pytest.mark.parametrize("groups", [(8,), (1, 3, 4)])
@pytest.mark.parametrize(("axis", "chunks"), [("m", 1), ("m", 4), ("k", 2), ("k", 4)])
def test_arrivals_are_those_of_the_prediction(axis, chunks, groups):
    run = RunConfig(groups, 0, ChunkAxis(axis), chunks)
    slab = AG.m_local * AG.k * 2
    want = copy_arrivals(slab, run, TOPOLOGY, run.shares)
    got = schedule.arrivals(AG, TOPOLOGY, KERNEL, run)
    assert [(t.visit, t.chunk) for t in got] == [(visit, chunk) for visit, chunk, _ in want]
    for time_us, (_, _, predicted) in zip(got, want, strict=True):
        assert time_us.us + TOPOLOGY.latency_us == pytest.approx(predicted)


def test_uneven_chunks_and_the_sm_copy():
    run = RunConfig((8,), 0, ChunkAxis.K, 4)
    odd = Problem(AG.signature, 4096, 6144, 1000, 8)
    shares = schedule.chunk_sizes(odd, KERNEL, run)
    assert shares == [0.128, 0.128, 0.256, 0.488]
    times = schedule.arrivals(odd, TOPOLOGY, KERNEL, run)
    whole = schedule.unfused_us(odd, TOPOLOGY) - TOPOLOGY.latency_us
    assert times[-1].us == pytest.approx(whole + len(times) * COPY_US)
    at_once = schedule.arrivals(AG, TOPOLOGY, KERNEL, RunConfig((8,), transport=Transport.SM_COPY))
    assert {t.us for t in at_once} == {at_once[0].us}
    assert at_once[0].us + TOPOLOGY.latency_us == pytest.approx(schedule.unfused_us(AG, TOPOLOGY))


def link_ends(times, done):
    """When the link has sent each chunk, all of which are whole at ``done(visit, chunk)``."""
    sent, ends = 0.0, {}
    for t in times:
        sent = max(done(t.visit, t.chunk) + t.tail_us, sent + t.busy_us)
        ends[t.visit, t.chunk] = sent
    return ends


@pytest.mark.parametrize("groups", [(8,), (7, 1), (1,) * 8, (4, 2, 1, 1), (2, 2, 2, 2)])
@pytest.mark.parametrize("panel", [0, 1, 4])
@pytest.mark.parametrize("chunks", [1, 4])
def test_every_stored_byte_leaves_once(groups, panel, chunks):
    run = RunConfig(groups, panel, ChunkAxis.M, chunks, transport=Transport.PEER_STORE)
    times = schedule.departures(RS, TOPOLOGY, KERNEL, run)
    assert sorted((t.visit, t.chunk) for t in times) == [
        (visit, chunk) for visit in range(1, 8) for chunk in range(chunks)
    ]
    stores = transfer_us(RS.comm_bytes, TOPOLOGY, store_rate(TOPOLOGY, run.transport))
    assert sum(t.busy_us for t in times) == pytest.approx(stores)
    assert stores > schedule.unfused_us(RS, TOPOLOGY) - TOPOLOGY.latency_us, "stores are slower"
    assert all(t.busy_us >= 0 and 0 < t.tail_us < stores for t in times)


def test_slabs_that_end_together_have_mostly_left():
    """In one group with narrow panels all are whole at the end, but their tiles left before."""
    ends = {}
    for name, groups, panel in [("together", (8,), 1), ("one by one", (1,) * 8, 0)]:
        run = RunConfig(groups, panel, transport=Transport.PEER_STORE)
        times = schedule.departures(RS, TOPOLOGY, KERNEL, run)
        at = 1000.0 if name == "together" else 0.0
        ends[name] = link_ends(times, lambda visit, chunk, at=at: max(at, 125.0 * visit))
        assert [t.visit for t in times] == list(range(1, 8))
    last = max(t.tail_us for t in times)
    assert max(ends["together"].values()) <= 1000 + 2 * last, "the link is not the bound"
    assert max(ends["one by one"].values()) <= 875 + last


def test_what_is_still_to_be_sent_is_the_wave_of_the_last_tile():
    """Four rows of 64 clusters, each of two slabs, on 66 slots: the waves begin at 0, 66, 132, 198,
    and the last row is clusters 192 to 255, of slab 7 and of this rank's own."""
    problem = Problem(RS.signature, 1024, 12288, 6144, 8)
    kernel = KernelConfig(128, 192, 64, 2, 1)
    slab = transfer_us(128 * 12288 * 2, TOPOLOGY, store_rate(TOPOLOGY, Transport.PEER_STORE))
    run = RunConfig((8,), 0, transport=Transport.PEER_STORE)
    found = schedule.departures(problem, TOPOLOGY, kernel, run)
    assert [(t.visit, t.busy_us) for t in found] == [
        (visit, pytest.approx(share * slab))
        for visit, share in [(1, 2), (2, 0), (3, 2), (4, 0), (5, 2), (6, 0), (7, 1)]
    ]
    ends, begins = {2: 64, 4: 128, 6: 192}, {2: 0, 4: 66, 6: 132}
    for t in found:
        if t.visit in ends:
            assert t.tail_us == pytest.approx((ends[t.visit] - begins[t.visit]) / 64 * 2 * slab)
    assert found[-1].tail_us == pytest.approx((256 - 198) / 64 * slab)


def test_a_spanned_tile_leaves_to_all_its_owners():
    short = Problem(RS.signature, 512, 12288, 6144, 8)  # slabs of 64 rows
    for groups in ((8,), (4, 4), (2, 4, 2)):
        run = RunConfig(groups, 2, transport=Transport.PEER_STORE, span=2)
        times = schedule.departures(short, TOPOLOGY, KERNEL, run)
        assert sorted(t.visit for t in times) == list(range(1, 8))
        after = times[[t.visit for t in times].index(1) + 1 :]
        assert all(t.busy_us == 0 for t in after), "owner 1 shares a tile with the own slab"
        stores = transfer_us(short.comm_bytes, TOPOLOGY, store_rate(TOPOLOGY, run.transport))
        assert sum(t.busy_us for t in times) == pytest.approx(stores)
    alone = Topology.of("h200", "nvlink", 1)
    assert schedule.unfused_us(Problem(RS.signature, 64, 64, 64, 1), alone) == 0


def test_what_the_link_takes_when_nothing_is_hidden():
    """Of every transport its own bytes, shots and copies."""
    from dataclasses import replace

    reduce = Problem(Signature.of("gemm_ar"), 16, 12288, 6144, 8)
    rate = store_rate(TOPOLOGY, Transport.PEER_STORE)
    row = 12288 * 2

    def unhidden(problem, transport, **more):
        run = RunConfig((8,), transport=transport, span=8, **more)
        return schedule.unhidden_us(problem, TOPOLOGY, KERNEL, run)

    flags = unhidden(reduce, Transport.PEER_BROADCAST)
    assert flags == pytest.approx(2 + transfer_us(7 * 16 * row, TOPOLOGY, rate))
    packets = unhidden(reduce, Transport.BROADCAST_PACKETS)
    assert packets - 2 == pytest.approx(2 * (flags - 2)), "twice the bytes, one latency"
    in_two = unhidden(reduce, Transport.PEER_STORE)
    assert in_two == pytest.approx(2 * (2 + transfer_us(7 * 2 * row, TOPOLOGY, rate)))
    few = replace(AG, m=64)
    by_sms = unhidden(few, Transport.SM_COPY)
    assert by_sms == pytest.approx(schedule.unfused_us(few, TOPOLOGY))
    pushed = unhidden(few, Transport.COPY_ENGINE_PUSH)
    assert pushed == pytest.approx(by_sms + 7 * COPY_US)
    few = replace(RS, m=64)
    stored = unhidden(few, Transport.PEER_STORE)
    assert unhidden(few, Transport.PEER_PACKETS) - 2 == pytest.approx(2 * (stored - 2))
    assert unhidden(few, Transport.PEER_STORE) > schedule.unfused_us(few, TOPOLOGY)
    assert schedule.unhidden_us(replace(few, tp=1), TOPOLOGY, KERNEL, RunConfig()) == 0


def test_how_well_a_median_is_known():
    pytest.importorskip("torch")
    from fluxgen.tune.device.timing import Timing

    rng = random.Random(1)
    inside = 0
    for _ in range(300):
        times = [rng.gauss(100, 2) for _ in range(24)]
        timing = Timing.of(times)
        inside += abs(timing.median_us - 100) <= timing.spread * timing.median_us
    assert 0.90 <= inside / 300 <= 0.99, "the interval holds the median about 19 times in 20"
    assert Timing.of([5.0]).spread == 0
    assert Timing.of([5.0] * 9 + [500.0]).median_us == 5.0


class Store:
    """What CompiledKernels uses of a store: some kernels are there, some fail, some take long."""

    def __init__(self, there=(), broken=()):
        self.there, self.broken = set(there), set(broken)
        self.built, self.lock = [], threading.Lock()

    def find(self, source):
        libraries = ("support", "emulated_link")
        return (
            source.name if source.name.startswith(libraries) or source.name in self.there else None
        )

    def build(self, source, tools, *, cancel):
        time.sleep(0.01)
        if any(part in source.name for part in self.broken):
            raise CompileError(f"{source.name}: registers spill\nand more")
        with self.lock:
            self.built.append(source.name)


def search(store, tools, **more):
    evaluator = Fake()
    problems = [Problem(AG.signature, m, 1024, 1024, 8) for m in (1024, 2048)]
    with CompiledKernels("sm90", store, tools, jobs=2) as kernels:
        found = tune(
            problems, Topology.of("h100-sxm", "nvlink", 8), evaluator=evaluator, trials=9,
            storage="memory", compiled=kernels, **more,
        )  # fmt: skip
    return found, evaluator


def test_chosen_kernels_are_compiled_before_they_are_measured():
    store = Store()
    found, _ = search(store, object(), max_kernels=3)
    kernels = [name for name in store.built if name.startswith("ag_gemm")]
    assert 1 <= len(kernels) <= 3, "only those that were chosen, each once"
    assert len(set(kernels)) == len(kernels)
    assert len(found.records) == 2


def test_a_kernel_that_does_not_compile_is_left_out():
    every = Candidates(Problem(AG.signature, 1024, 1024, 1024, 8), TOPOLOGY).kernels
    found, _ = search(Store(broken=[kernel.name for kernel in every]), object())
    assert {record.kernel for record in found.records} == {None}
    assert all(math.isfinite(record.time_us) for record in found.records)


def test_without_a_compiler_only_what_is_there_is_tried(tmp_path):
    from fluxgen.codegen.render import kernel_name
    from fluxgen.db.database import Database

    one = KernelConfig(128, 128, 64, 2, 1)
    store = Store(there=[kernel_name(AG.signature, "sm90", one)])
    db = Database(tmp_path / "db.sqlite3")
    found, _ = search(store, None, db=db)
    assert {record.kernel for record in found.records} <= {one, None}
    topology = Topology.of("h100-sxm", "nvlink", 8)
    for record in found.records:
        assert not db.failures(record.problem, topology), "what is not compiled has not failed"


def test_the_libraries_have_to_be_there():
    store = Store()
    store.find = lambda source: None
    with pytest.raises(UsageError, match="support_sm90: not compiled"):
        CompiledKernels("sm90", store, None)


def test_compiling_uses_the_store_of_the_tuner():
    assert compiled.Store.__module__ == "fluxgen.compiler.store"
