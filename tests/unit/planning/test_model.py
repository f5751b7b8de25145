"""The parts of a predicted step: against published figures, closed forms and brute force."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from fluxgen.core.errors import UnsupportedError, UsageError
from fluxgen.core.topology import GPUS, LinkKind
from fluxgen.planning.cluster import Cluster, parse_between
from fluxgen.planning.layout import Fixed, Layout, layouts, stage_layers, why_not
from fluxgen.planning.memory import layer_activations, memory
from fluxgen.planning.model import Transformer
from fluxgen.planning.practice import PRACTICES, practice
from fluxgen.planning.timing.axonn import grids, layer_volume, matrices, matrix_volume
from fluxgen.planning.timing.collectives import Links
from fluxgen.planning.timing.fused import Fusion
from fluxgen.planning.timing.schedule import order, pipeline
from fluxgen.planning.timing.step import Stepper
from fluxgen.shapes import model_dims

GPT22B = Transformer("22b", 48, 6144, 64, 64, 96, 24576, False, 51200, True)
A100, H100 = GPUS["a100-sxm-80gb"], GPUS["h100-sxm"]
MEGATRON = PRACTICES["megatron-2022"]


def test_sizes_of_known_models():
    llama = Transformer.of(model_dims("llama-3.1-70b"))
    assert llama.params == pytest.approx(70.55e9, rel=1e-3)
    assert Transformer.of(model_dims("llama-3.1-8b")).params == pytest.approx(8.03e9, rel=1e-3)
    assert GPT22B.params == pytest.approx(22.0e9, rel=0.03)


def test_flops_are_the_published_formula():
    """72 B L s h^2 (1 + s / 6h + V / 12hL) of arXiv 2205.05198, appendix A."""
    m, s, b = GPT22B, 2048, 4
    h, layers, v = m.hidden, m.layers, m.vocab
    formula = 72 * b * layers * s * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert m.flops(b * s, s) == pytest.approx(formula, rel=1e-6)


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek-v3"])
def test_layers_that_are_not_known_are_refused(model):
    with pytest.raises(UnsupportedError, match="dense decoders"):
        Transformer.of(model_dims(model))


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("sp", [True, False])
def test_activations_are_the_published_formulas(tp, sp):
    """sbh (10 + 24 / t + 5as / ht), all of it over t with sequence parallelism: table 2 of arXiv
    2205.05198; without the scores where attention is computed again."""
    layout = Layout(tp=tp, sp=sp and tp > 1, dp=8 // tp, micro=4)
    tokens, s, h, a = 4 * 2048, 2048, GPT22B.hidden, GPT22B.heads
    between = tp if layout.sp else 1
    want = tokens * h * (10 / between + 24 / tp + 5 * a * s / (h * tp))
    assert layer_activations(GPT22B, layout, MEGATRON, tokens, s) == pytest.approx(want)
    again = replace(layout, recompute="selective")
    want = tokens * h * (10 / between + 24 / tp)
    assert layer_activations(GPT22B, again, MEGATRON, tokens, s) == pytest.approx(want)
    full = replace(layout, recompute="full")
    assert layer_activations(GPT22B, full, MEGATRON, tokens, s) == 2 * tokens * h / between


def test_memory_falls_as_more_is_shared():
    batch, seq, modern = 64, 4096, PRACTICES["modern"]
    model = Transformer.of(model_dims("llama-3.1-8b"))
    totals = [memory(model, Layout(dp=8, zero=zero), modern, batch, seq).total for zero in range(4)]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] - totals[1] == pytest.approx(12 * model.params * 7 / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("sp", "recompute", "forward_ms", "backward_ms"),
    [
        (False, "none", 7.7, 11.9),
        (True, "none", 7.2, 11.8),
        (False, "full", 7.7, 19.5),
        (False, "selective", 7.7, 13.2),
        (True, "selective", 7.2, 13.1),
    ],
)
def test_a_layer_takes_as_long_as_published(sp, recompute, forward_ms, backward_ms):
    """Table 4 of arXiv 2205.05198: 22B, tp 8, micro-batch 4, one A100 node."""
    cluster = Cluster.of(A100, 8)
    stepper = Stepper(GPT22B, cluster, 4, 2048, MEGATRON, Fusion(cluster))
    forward, backward = stepper.layer(Layout(tp=8, sp=sp, recompute=recompute, micro=4))
    assert forward.end_us / 1e3 == pytest.approx(forward_ms, rel=0.05)
    assert backward.end_us / 1e3 == pytest.approx(backward_ms, rel=0.05)


# --- the pipeline ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("stages", "rounds"), [(1, 1), (2, 5), (4, 4), (4, 13), (8, 3)])
def test_one_forward_one_backward_takes_what_the_formula_says(stages, rounds):
    forward, backward = [10.0] * stages, [20.0] * stages
    found = pipeline(forward, backward, rounds, 0.0)
    assert found.end_us == (rounds + stages - 1) * 30
    on_path = sum(found.spans[i].end_us - found.spans[i].begin_us for i in found.critical)
    assert on_path == pytest.approx(found.end_us)


def test_a_longer_last_stage_sets_the_pace():
    found = pipeline([10, 10, 15], [20, 20, 25], 12, 0.0)
    assert found.end_us == pytest.approx(12 * 40 + 60, abs=10)
    assert pipeline([10.0, 10.0], [20.0, 20.0], 4, 3.0).end_us > 150


def test_every_micro_batch_is_done_once_and_at_most_stages_are_kept():
    for stages, rounds in itertools.product((1, 2, 5), (1, 2, 9)):
        for stage in range(stages):
            steps = order(stage, stages, rounds)
            assert sorted(steps) == sorted(
                (kind, i) for kind in ("backward", "forward") for i in range(rounds)
            )
            kept = most = 0
            for kind, _ in steps:
                kept += 1 if kind == "forward" else -1
                most = max(most, kept)
            assert most == min(rounds, stages - stage)


# --- collectives ----------------------------------------------------------------------------------


def test_ranks_share_nodes_as_they_are_placed():
    links = Links(Cluster.of(H100, 64))
    assert links.ranks(8, 1).near == 8
    assert links.ranks(8, 8).near == 1
    assert links.ranks(16, 4).near == 2
    assert links.ranks(12, 2).near == 4
    assert links.ranks(1, 64).near == 1


def test_a_collective_takes_the_slowest_link_and_grows_with_its_bytes():
    links = Links(Cluster.of(H100, 64))
    near, far = links.ranks(8, 1), links.ranks(8, 8)
    size = 1e9
    assert links.gather_us(size, near) == pytest.approx(size * 7 / 8 / (364.3e3), rel=0.02)
    assert links.gather_us(size, far) == pytest.approx(size * 7 / 8 / 45e3, rel=0.02)
    assert links.gather_us(2 * size, far) > links.gather_us(size, far)
    assert links.gather_us(size, links.ranks(64, 1)) < links.gather_us(size, far)
    one_adapter = Links(Cluster.of(H100, 64), rails=False)
    assert one_adapter.gather_us(size, links.ranks(64, 1)) > 0.9 * size / 45e3
    assert links.gather_us(size, links.ranks(1, 1)) == links.gather_us(0, near) == 0.0
    few = links.reduce_us(1e3, links.ranks(64, 1))
    assert few < 63 * 2 * 5.0, "a tree's depth, not a ring's length"


@pytest.mark.parametrize(
    ("text", "want"),
    [("50GB/s,5us", (50.0, 5.0)), (" 12.5 gb/s ", (12.5, 5.0)), ("400GB/s , 1.5 us", (400.0, 1.5))],
)
def test_a_network_in_words(text, want):
    assert parse_between(text) == want


@pytest.mark.parametrize("text", ["", "fast", "0GB/s", "50", "50GB/s,", "50GB/s,5ms", "-1GB/s"])
def test_other_networks_are_refused(text):
    with pytest.raises(UsageError, match="50GB/s,5us"):
        parse_between(text)


def test_a_cluster_says_what_would_do():
    with pytest.raises(UsageError, match="56 or 64 would do"):
        Cluster.of(H100, 63)
    assert Cluster.of(H100, 4).node == 4
    assert Cluster.of(GPUS["l40s"], 8).link is LinkKind.PCIE


# --- layouts --------------------------------------------------------------------------------------


def test_layouts_are_those_of_all_that_can_run():
    """Every combination of small numbers, tried one by one."""
    model = Transformer("small", 4, 64, 4, 2, 16, 128, True, 256)
    cluster, batch, seq = Cluster.of(H100, 8, 4), 8, 16
    found = list(layouts(model, cluster, batch, seq, Fixed()))
    assert len(found) == len(set(found))
    want = set()
    for tp, cp, pp, vp, dp, zero, micro in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8), range(4), (1, 2, 4, 8)
    ):
        for recompute in ("none", "selective", "full"):
            layout = Layout(tp, cp, pp, vp, dp, zero, recompute, micro, tp > 1)
            if why_not(model, cluster, layout, batch, seq) is None:
                want.add(layout)
    assert set(found) >= want - {each for each in want if each.vp > 4}
    assert all(why_not(model, cluster, layout, batch, seq) is None for layout in found)


def test_uneven_stages_have_at_most_two_layers_less():
    llama = Transformer.of(model_dims("llama-3.1-405b"))
    assert llama.layers == 126
    assert stage_layers(llama, Layout(pp=16, vp=8)) == 8
    cluster = Cluster.of(H100, 128)
    layout = Layout(tp=8, pp=16, vp=8)
    assert why_not(llama, cluster, layout, 64, 8192) is None
    assert "stages" in (why_not(llama, cluster, replace(layout, vp=5), 64, 8192) or "")


# --- AxoNN ----------------------------------------------------------------------------------------


def sent_by_hand(m, k, n, x, y, z, data):
    """Elements that rank 0 sends, counted on index sets, block by block."""
    rows, inner, columns = np.arange(m), np.arange(k), np.arange(n)
    my_rows = np.array_split(rows, z)[0]
    my_k, my_n = np.array_split(inner, x)[0], np.array_split(columns, y)[0]
    whole = len(my_k) * len(my_n)
    own = [len(part) for part in np.array_split(np.arange(whole), z)]

    def ring_gather(parts):  # each sends every part but the one that it is given last
        return sum(parts) - parts[1 % len(parts)] if len(parts) > 1 else 0

    product, gradient = len(my_rows) * len(my_n), len(my_rows) * len(my_k)

    def ring_reduce(size, ranks):  # scatter, then gather
        parts = [len(part) for part in np.array_split(np.arange(size), ranks)]
        return 2 * ring_gather(parts)

    return (
        ring_reduce(product, x) + ring_reduce(gradient, y) + 3 * ring_gather(own)
        + ring_reduce(own[0], data)
    )  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_volumes_and_the_best_grid_against_brute_force(ranks):
    m, k, n, data = 64, 32, 128, 2
    by_hand, by_formula = {}, {}
    for x, y in itertools.product((1, 2, 4, 8, 16), repeat=2):
        if ranks % (x * y) == 0:
            grid = x, y, ranks // (x * y)
            by_hand[grid] = sent_by_hand(m, k, n, *grid, data)
            by_formula[grid] = matrix_volume(m, k, n, *grid, data)
    assert by_formula == pytest.approx(by_hand, rel=1e-9)
    assert min(by_hand.values()) == pytest.approx(by_hand[min(by_formula, key=by_formula.get)])


def test_grids_divide_the_model_and_fill_the_ranks():
    model = Transformer.of(model_dims("llama-3.1-8b"))
    for ranks in (1, 4, 16, 64):
        found = list(grids(model, ranks))
        assert found and len(found) == len(set(found))
        assert all(math.prod(grid) == ranks for grid in found)
        volumes = [layer_volume(model, 8192, grid, 1) for grid in found]
        assert min(volumes) < max(volumes) or ranks == 1


def test_a_grid_of_one_rank_is_a_layer_of_one_rank():
    """No collective is left, and the same GEMMs."""
    model = Transformer.of(model_dims("llama-3.1-8b"))
    cluster = Cluster.of(H100, 1)
    stepper = Stepper(model, cluster, 1, 4096, PRACTICES["modern"], Fusion(cluster))
    plain = stepper.layer(Layout(sp=False))
    grid = stepper.layer(Layout(sp=False, grid=(1, 1, 1)))
    for one, other in zip(plain, grid, strict=True):
        assert other.end_us == pytest.approx(one.end_us, rel=1e-6)
        assert not [s for s in other.spans if s.kind == "collective" and s.end_us > s.begin_us]
    assert [name for name, *_ in matrices(model)] == ["qkv", "o", "fc1", "fc2"]


def test_practices_are_named():
    assert practice("modern") is PRACTICES["modern"]
    with pytest.raises(UsageError, match="megatron-2022"):
        practice("none")
