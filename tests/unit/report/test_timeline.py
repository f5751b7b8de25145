"""The simulated timeline of a call, and the page that shows it."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from html.parser import HTMLParser

import pytest

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Transport
from fluxgen.core.problem import Problem, Signature
from fluxgen.core.record import Environment, Provenance, Record
from fluxgen.core.topology import Topology
from fluxgen.predict import predict, predict_baseline
from fluxgen.predict.overlap import fused_gemm
from fluxgen.report.page import page
from fluxgen.report.timeline import LINK, fused_timeline, perfetto, unfused_timeline, walk
from tests.unit.protocol import host

TOPOLOGY = Topology.of("h200", "nvlink", 8)
KERNEL = KernelConfig(128, 192, 64, 2, 1)
AG = Problem(Signature.of("ag_gemm"), 4096, 6144, 12288, 8)
RS = Problem(Signature.of("gemm_rs"), 4096, 12288, 6144, 8)
STORE = Transport.PEER_STORE
RUNS = [
    (AG, RunConfig((1, 2, 5), 4)),
    (AG, RunConfig((4, 4), 0, ChunkAxis.K, 4)),
    (AG, RunConfig((8,), 1, ChunkAxis.M, 2)),
    (AG, RunConfig((8,), transport=Transport.SM_COPY)),
    (RS, RunConfig((7, 1), 1, transport=STORE)),
    (RS, RunConfig((8,), 4, ChunkAxis.M, 2, transport=STORE)),
]


@pytest.mark.parametrize("groups", [(8,), (1, 2, 5), (1,) * 8])
@pytest.mark.parametrize("panel", [0, 1, 3])
def test_the_walk_is_that_of_the_kernels(groups, panel):
    grid = fused_gemm(AG, TOPOLOGY, KERNEL, RunConfig(groups, panel)).grid
    ours = list(walk(grid, panel))
    _, device = host.walk(0, 8, 0, grid.rows, grid.columns, panel, groups, grid.cluster_m)
    assert len(ours) == len(device) == grid.total
    for (first, last), blocks in zip(ours, device, strict=True):
        assert first == blocks[0][2]
        assert last == max(slab for m, _, slab in blocks if m < grid.rows)


@pytest.mark.parametrize(("problem", "run"), RUNS)
def test_no_slot_does_two_things_and_the_end_is_near_the_prediction(problem, run):
    made = fused_timeline(problem, TOPOLOGY, KERNEL, run)
    tracks = defaultdict(list)
    for span in made.spans:
        assert span.begin_us <= span.end_us <= made.end_us + 1e-6
        tracks[span.track].append(span)
    for spans in tracks.values():
        spans.sort(key=lambda s: s.begin_us)
        for before, after in itertools.pairwise(spans):
            assert before.end_us <= after.begin_us + 1e-6
    assert made.end_us == pytest.approx(predict(problem, TOPOLOGY, KERNEL, run).time_us, rel=0.12)
    assert made.end_us > made.gemm_us


def test_tiles_wait_for_their_slab():
    made = fused_timeline(AG, TOPOLOGY, KERNEL, RunConfig((1,) * 8))
    arrived = {s.name.split(",")[0]: s.end_us for s in made.spans if s.track == LINK}
    for tile in (s for s in made.spans if s.kind == "tile"):
        slab = tile.name.removeprefix("tile of ")
        assert tile.begin_us >= arrived.get(slab, 0.0) - 1e-6
    waits = [s for s in made.spans if s.kind == "wait"]
    assert waits
    assert {s.end_us for s in waits} <= set(arrived.values()), "until it is there, and no longer"


def test_unfused_is_one_after_the_other():
    made = unfused_timeline(RS, TOPOLOGY)
    gemm, collective = sorted(made.spans, key=lambda s: s.begin_us)
    assert (gemm.kind, collective.kind) == ("gemm", "copy")
    assert collective.begin_us == gemm.end_us
    assert made.end_us == pytest.approx(predict_baseline(RS, TOPOLOGY).time_us)
    assert min(unfused_timeline(AG, TOPOLOGY).spans, key=lambda s: s.begin_us).kind == "copy"


def test_the_trace_is_what_perfetto_reads():
    timelines = {
        "fused": fused_timeline(AG, TOPOLOGY, KERNEL, RUNS[0][1]),
        "unfused": unfused_timeline(AG, TOPOLOGY),
    }
    events = json.loads(json.dumps(perfetto(timelines)))["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == set(timelines)
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == sum(len(t.spans) for t in timelines.values())
    assert all(e["dur"] >= 0 and {"ts", "pid", "tid", "name"} <= e.keys() for e in slices)
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in slices} == threads


def record(m, fused=True):
    environment = Environment("h200", 132, "0.1.0", "test")
    kernel, run = (KERNEL, RunConfig((8,))) if fused else (None, None)
    problem = Problem(AG.signature, m, 6144, 12288, 8)
    us = 80.0 if fused else 100.0
    return Record(problem, TOPOLOGY.key, kernel, run, us, 100.0, Provenance.EMULATED, environment)


class Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = defaultdict(int), []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        for name, value in attrs:
            assert name not in ("src", "href"), "self-contained"
            assert "://" not in (value or ""), "self-contained"

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_holds_everything_and_loads_nothing():
    records = [record(m, fused=m > 512) for m in (512, 1024, 2048)]
    searches = {"one <b>problem</b>": [100.0, None, 90.0, 80.0], "never": [None, None]}
    drawn = {"fused": fused_timeline(AG, TOPOLOGY, KERNEL, RUNS[0][1])}
    text = page("on <h200>", records, searches, drawn)
    reader = Reader()
    reader.feed(text)
    seen = "".join(reader.text)
    assert not {"script", "link", "img", "b"} & reader.tags.keys()
    assert "on <h200>" in seen
    assert "1.25" in seen
    assert "emulated" in seen
    assert "one <b>problem</b>, trial 4: best 80.0 us" in seen
    assert reader.tags["rect"] > 100
    assert text.count("<circle") == 3 + 4, "a point a record, and a trial from the first time on"


def test_a_page_of_nothing_says_so():
    assert "No records" in page("empty", [], {}, {})
    assert "No trial was finished" in page("empty", [], {"x": [None]}, {})
