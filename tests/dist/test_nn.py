"""The layers: loading, and training a block as the unsharded one trains."""

from __future__ import annotations

import pytest
import torch

from fluxgen.nn import ColumnParallelLinear, RowParallelLinear
from tests.dist.numbers import integers, raised, same

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]


class Block(torch.nn.Module):
    def __init__(self, up, down):
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def _train(groups, rank, name, shape, dim, save_gathered):
    if name not in groups:
        return
    group = groups[name]
    world, me = group.size(), group.rank()
    torch.manual_seed(0)
    full = torch.nn.Sequential(
        *[Block(torch.nn.Linear(8, 24), torch.nn.Linear(24, 8)) for _ in range(2)]
    ).double()
    kwargs = {"group": group, "sequence_dim": dim}
    sharded = torch.nn.Sequential(
        *[
            Block(
                ColumnParallelLinear.from_linear(b.up, save_gathered=save_gathered, **kwargs),
                RowParallelLinear.from_linear(b.down, **kwargs),
            )
            for b in full
        ]
    )
    x, target = torch.randn(2, *shape, 8, dtype=torch.float64)
    models = (
        (full, x, target),
        (sharded, x.chunk(world, dim)[me], target.chunk(world, dim)[me]),
    )
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.05) for model, *_ in models]
    for _ in range(3):
        losses = []
        for (model, inputs, wanted), optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = (model(inputs) - wanted).square().sum() / target.numel()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.distributed.all_reduce(losses[1], group=group)
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    for block, mine in zip(full, sharded, strict=True):
        for layer, part in ((block.up, mine.up), (block.down, mine.down)):
            for key, value in layer.state_dict().items():
                torch.testing.assert_close(
                    part.state_dict()[key], part.part(key, value), rtol=1e-9, atol=1e-12
                )


@pytest.mark.parametrize(
    ("name", "shape", "dim", "save_gathered"),
    [
        ("w1", (12,), 0, False),
        ("w2", (12, 2), 0, True),
        ("w3", (2, 12), 1, False),
        ("w4", (12, 2), 0, False),
        ("odd", (12,), 0, True),
    ],
)
def test_trains_as_the_unsharded_block(ranks, name, shape, dim, save_gathered):
    ranks(_train, name, shape, dim, save_gathered)


def _load(groups, rank):
    group = groups["w4"]
    linear = torch.nn.Linear(8, 12)
    full = {"weight": integers(1, 12, 8), "bias": integers(2, 12)}
    linear.load_state_dict(full)
    column = ColumnParallelLinear(8, 12, group=group)
    row = RowParallelLinear(8, 12, group=group)
    for layer, cut in ((column, 0), (row, 1)):
        layer.load_state_dict(full)
        same(layer.weight.detach(), full["weight"].chunk(4, cut)[rank])
        same(layer.bias.detach(), full["bias"].chunk(4)[rank] if cut == 0 else full["bias"])
        saved = layer.state_dict()
        other = type(layer)(8, 12, group=group)
        other.load_state_dict(saved)
        same(other.weight, layer.weight)
        # Its own memory, not a view that keeps the full weight alive.
        same(type(layer).from_linear(linear, group=group).weight, layer.weight)
        kind, text = raised(lambda layer=layer: layer.load_state_dict({
            "weight": torch.ones(12, 9), "bias": full["bias"]}))  # fmt: skip
        assert kind == "UsageError"
        assert "(12, 9)" in text
        assert "weight" in text
    nested = torch.nn.Sequential(column, row)
    nested.load_state_dict({f"{i}.{k}": v for i in (0, 1) for k, v in full.items()})
    assert full["weight"].shape == (12, 8)
    linear.weight.requires_grad_(False)
    frozen = RowParallelLinear.from_linear(linear, group=group)
    assert not frozen.weight.requires_grad
    assert frozen.bias.requires_grad
    plain = torch.nn.Linear(8, 12, bias=False)
    assert ColumnParallelLinear.from_linear(plain, group=group).bias is None
    kind, text = raised(lambda: RowParallelLinear(10, 4, group=group))
    assert kind == "ShardingError"
    assert "in_features: 4 ranks do not divide 10" in text
    assert "1, 2, 5, 10" in text
    torch.manual_seed(7)
    drawn = torch.nn.Linear(8, 12)
    torch.manual_seed(7)
    seeded = RowParallelLinear(8, 12, group=group)
    same(seeded.weight.detach(), drawn.weight.detach().chunk(4, 1)[rank])
    same(seeded.bias.detach(), drawn.bias.detach())
    assert f"rank={rank}, tp=4" in repr(seeded)


def test_loads_what_nn_linear_saves(ranks):  # F03, F05
    ranks(_load)
