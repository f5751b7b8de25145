"""An MLP and attention's projections: as the ordinary layers that they are made of."""

from __future__ import annotations

import copy

import pytest
import torch

from fluxgen.nn import (
    ColumnParallelLinear,
    GatedColumnParallelLinear,
    ParallelAttentionProjections,
    ParallelMLP,
    RowParallelLinear,
)
from fluxgen.runtime.layers.activations import ACTIVATIONS
from tests.dist.numbers import integers, raised, same

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

H, INNER, HEADS, KV, DIM = 12, 24, 12, 6, 4
CLOSE = {"rtol": 1e-10, "atol": 1e-11}


def linear(inputs, outputs, bias=False):
    return torch.nn.Linear(inputs, outputs, bias).double()


def whole_mlp(gate, up, down, activation, x):
    act = ACTIVATIONS[activation]
    return down(act(up(x)) if gate is None else act(gate(x)) * up(x))


def _mlp(groups, rank, name, gated, activation, bias, sp):
    if name not in groups:
        return
    group = groups[name]
    world, me = group.size(), group.rank()
    torch.manual_seed(0)
    gate = linear(H, INNER, bias) if gated else None
    up, down = linear(H, INNER, bias), linear(INNER, H, bias)
    x = torch.randn(4 * world, 3, H, dtype=torch.float64)
    grad, residual = torch.randn_like(x), torch.randn_like(x)
    full = x.clone().requires_grad_()
    want = whole_mlp(gate, up, down, activation, full) + residual
    want.backward(grad)
    layer = ParallelMLP.from_linears(
        gate, up, down, group=group, activation=activation, sequence_parallel=sp
    )
    rows = slice(4 * me, 4 * (me + 1)) if sp else slice(None)
    mine = x[rows].clone().requires_grad_()
    got = layer(mine, residual[rows])
    torch.testing.assert_close(got.detach(), want.detach()[rows], **CLOSE)
    got.backward(grad[rows])
    torch.testing.assert_close(mine.grad, full.grad[rows], **CLOSE)
    ups = [up.weight.grad] if gate is None else [gate.weight.grad, up.weight.grad]
    part = torch.cat([w.chunk(world)[me] for w in ups])
    torch.testing.assert_close(layer.up.weight.grad, part, **CLOSE)
    torch.testing.assert_close(
        layer.down.weight.grad, down.weight.grad.chunk(world, 1)[me], **CLOSE
    )


@pytest.mark.parametrize("name", ["w1", "w2", "w3", "w4", "reversed"])
@pytest.mark.parametrize(
    ("gated", "activation", "bias", "sp"),
    [(True, "silu", False, True), (True, "gelu_tanh", True, True), (False, "relu2", True, True),
     (False, "gelu", False, False), (True, "silu", True, False)],
)  # fmt: skip
def test_an_mlp_is_its_ordinary_layers(ranks, name, gated, activation, bias, sp):
    ranks(_mlp, name, gated, activation, bias, sp)


def attention(q, k, v):
    """Causal, over dim 0, with each kv head serving as many q heads; (S, B, heads, dim)."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed.permute(2, 0, 1, 3)


def _attention(groups, rank, name, kv, sp):
    if name not in groups:
        return
    group = groups[name]
    world, me = group.size(), group.rank()
    if (kv % world and world % kv) or HEADS % world:
        return
    torch.manual_seed(1)
    q, k, v = linear(H, HEADS * DIM, True), linear(H, kv * DIM, True), linear(H, kv * DIM, True)
    o = linear(HEADS * DIM, H)
    x = torch.randn(4 * world, 2, H, dtype=torch.float64)
    grad = torch.randn_like(x)
    full = x.clone().requires_grad_()
    parts = (each(full).unflatten(-1, (-1, DIM)) for each in (q, k, v))
    want = o(attention(*parts).flatten(-2))
    want.backward(grad)
    layer = ParallelAttentionProjections.from_linears(
        q, k, v, o, head_dim=DIM, group=group, sequence_parallel=sp
    )
    rows = slice(4 * me, 4 * (me + 1)) if sp else slice(None)
    mine = x[rows].clone().requires_grad_()
    mine_q, mine_k, mine_v = layer(mine)
    assert mine_q.shape[-2:] == (HEADS // world, DIM)
    assert mine_k.shape == mine_v.shape
    got = layer.project(attention(mine_q, mine_k, mine_v))
    torch.testing.assert_close(got.detach(), want.detach()[rows], **CLOSE)
    got.backward(grad[rows])
    torch.testing.assert_close(mine.grad, full.grad[rows], **CLOSE)


@pytest.mark.parametrize("name", ["w1", "w2", "w3", "w4", "reversed"])
@pytest.mark.parametrize(("kv", "sp"), [(KV, True), (HEADS, True), (1, True), (2, False)])
def test_attentions_projections_are_the_ordinary_layers(ranks, name, kv, sp):
    ranks(_attention, name, kv, sp)


def _states(groups, rank):
    group = groups["w4"]
    gate, up = linear(H, INNER, True), linear(H, INNER, True)
    for index, t in enumerate((gate.weight, up.weight, gate.bias, up.bias)):
        t.data.copy_(integers(index, *t.shape, dtype=torch.float64))
    layer = GatedColumnParallelLinear.from_linears(gate, up, group=group)
    full = {"weight": torch.cat([gate.weight, up.weight]), "bias": torch.cat([gate.bias, up.bias])}
    other = GatedColumnParallelLinear(H, INNER, group=group, bias=True, dtype=torch.float64)
    other.load_state_dict(full)  # the state of one ordinary layer of both
    for key, value in layer.state_dict().items():
        same(other.state_dict()[key], value)
    mine = [w.chunk(4)[group.rank()] for w in (gate.weight, up.weight)]
    same(layer.weight.detach(), torch.cat(mine).detach())
    again = copy.deepcopy(other)
    again.load_state_dict(layer.state_dict())
    same(again.weight.detach(), layer.weight.detach())
    assert "parts=[24, 24]" in repr(layer)


def test_a_gated_layers_state_is_that_of_gate_and_up_in_one(ranks):
    ranks(_states)


def _compiled(groups, rank):
    if "w2" not in groups:
        return
    group = groups["w2"]
    torch.manual_seed(2)
    layer = ParallelMLP(H, INNER, group=group, dtype=torch.float64)
    x = torch.randn(8, H, dtype=torch.float64)
    want = layer(x)
    got = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got.detach(), want.detach(), **CLOSE)


def test_a_compiled_mlp_is_one_graph(ranks):
    ranks(_compiled)


def _refused(groups, rank):
    group = groups["w4"]
    return [
        raised(lambda: ColumnParallelLinear(H, INNER, group=group, activation="swish")),
        raised(lambda: GatedColumnParallelLinear(H, INNER, group=group, activation=None)),
        raised(lambda: GatedColumnParallelLinear.from_linear(linear(H, 9), group=group)),
        raised(lambda: GatedColumnParallelLinear.from_linears(
            linear(H, 8), linear(H, 8, True), group=group)),
        raised(lambda: ParallelAttentionProjections(H, 6, 6, DIM, group=group)),
        raised(lambda: ParallelMLP(H, 6, group=group)),
        raised(lambda: RowParallelLinear(INNER, H, group=group)(
            torch.zeros(8, INNER // 4), torch.zeros(8, H))),
    ]  # fmt: skip


def test_what_does_not_fit_is_said(ranks):
    (found, *others) = ranks(_refused)
    assert all(other == found for other in others)
    for (kind, text), (wanted, words) in zip(
        found,
        [
            ("UsageError", "activation: expected one of relu, relu2"),
            ("UsageError", "activation: expected the name"),
            ("UsageError", "found 9 outputs"),
            ("UsageError", "bias in all or in none"),
            ("ShardingError", "heads"),
            ("ShardingError", "6"),
            ("UsageError", "residual: expected (2, 12)"),
        ],
        strict=True,
    ):
        assert (kind, words in text) == (wanted, True), text


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations_are_what_their_names_say(name):
    x = torch.linspace(-4, 4, 41, dtype=torch.float64)
    want = {
        "relu": x.clamp(min=0), "relu2": x.clamp(min=0) ** 2, "sigmoid": 1 / (1 + (-x).exp()),
        "gelu": x * 0.5 * (1 + torch.erf(x / 2**0.5)), "silu": x / (1 + (-x).exp()),
        "gelu_tanh": 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
        "quick_gelu": x / (1 + (-1.702 * x).exp()),
    }[name]  # fmt: skip
    torch.testing.assert_close(ACTIVATIONS[name](x), want)
