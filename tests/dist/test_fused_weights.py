"""Weights that fuse several projections, and checkpoints of sharded layers."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fluxgen.nn import (
    ColumnParallelLinear,
    Part,
    RowParallelLinear,
    full_state_dict,
    load_sharded_optimizer_state_dict,
    sharded_optimizer_state_dict,
    sharded_state_dict,
)
from tests.dist.numbers import integers, raised, same

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

HIDDEN, HEADS, KV_HEADS, HEAD = 12, 4, 2, 3
QKV = (Part(HEADS * HEAD, HEADS), Part(KV_HEADS * HEAD, KV_HEADS), Part(KV_HEADS * HEAD, KV_HEADS))
INNER = 8


class Mlp(torch.nn.Module):
    """SwiGLU on one fused [gate; up]."""

    def __init__(self, gate_up, down):
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up)


class Attention(torch.nn.Module):
    """Grouped queries on one fused [q; k; v]; ``heads`` and ``kv_heads`` are the rank's own."""

    def __init__(self, qkv, out, heads, kv_heads):
        super().__init__()
        self.qkv, self.out, self.heads, self.kv_heads = qkv, out, heads, kv_heads

    def forward(self, x):
        split = [n * HEAD for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (t.view(len(t), -1, HEAD).movedim(1, 0) for t in self.qkv(x).split(split, -1))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 0) for t in (k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return self.out(mixed.movedim(0, 1).flatten(1))


class Model(torch.nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.norm = torch.nn.LayerNorm(HIDDEN)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


def unsharded(dtype=torch.float64):
    torch.manual_seed(3)
    size = (HEADS + 2 * KV_HEADS) * HEAD
    attention = Attention(torch.nn.Linear(HIDDEN, size), torch.nn.Linear(HIDDEN, HIDDEN), HEADS,
                          KV_HEADS)  # fmt: skip
    mlp = Mlp(torch.nn.Linear(HIDDEN, 2 * INNER), torch.nn.Linear(INNER, HIDDEN))
    return Model(attention, mlp).to(dtype)


def sharded(full, group, **options):
    """The model on the ranks of a group, which all hold all tokens or their own."""
    tp = group.size()
    options = {"group": group, "sequence_parallel": False, **options}
    attention = Attention(
        ColumnParallelLinear.from_linear(full.attention.qkv, parts=QKV, **options),
        RowParallelLinear.from_linear(full.attention.out, **options),
        HEADS // tp, max(1, KV_HEADS // tp),
    )  # fmt: skip
    mlp = Mlp(
        ColumnParallelLinear.from_linear(full.mlp.gate_up, parts=(INNER, INNER), **options),
        RowParallelLinear.from_linear(full.mlp.down, **options),
    )
    model = Model(attention, mlp).to(full.norm.weight.dtype)
    model.norm.load_state_dict(full.norm.state_dict())
    return model


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)


def compare(model, full, value=lambda p: p):
    """Each parameter, or its gradient, with this rank's part of the unsharded model's."""
    whole = dict(full.named_parameters())
    layers = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        path, own = name.rsplit(".", 1)
        part = getattr(layers[path], "part", lambda _, tensor: tensor)
        close(value(parameter), part(own, value(whole[name])))


def adam(model, lr=0.05):
    # A large eps: the gradient of the bias of k is zero but for rounding, which Adam would amplify.
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-2)


def _step(model, x, optimizer):
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def _trains(groups, rank, name):
    if name not in groups:
        return
    full = unsharded()
    model = sharded(full, groups[name])
    compare(model, full)
    x = torch.randn(5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    close(model(x), full(x))
    pairs = [(m, adam(m)) for m in (model, full)]
    for _ in range(3):
        for each, optimizer in pairs:
            _step(each, x, optimizer)
        compare(model, full, lambda p: p.grad)
        compare(model, full)
    k = model.attention.qkv.cut.pieces[1]
    rows = model.attention.qkv.weight.detach().narrow(0, k.local, k.size).contiguous()
    every = [torch.empty_like(rows) for _ in range(groups[name].size())]
    dist.all_gather(every, rows, group=groups[name])
    for each in every[k.leader : k.leader + k.copies]:
        same(each, rows)


@pytest.mark.parametrize("name", ["w1", "w2", "w4", "reversed"])
def test_fused_weights_train_as_the_unsharded_ones(ranks, name):
    ranks(_trains, name)


def _sequence_parallel(groups, rank, compiled):
    """As the trial that found it: gate and up in one weight, tokens cut between two ranks."""
    group = groups["w4"]
    gate_up, down = torch.nn.Linear(16, 24).double(), torch.nn.Linear(12, 16).double()
    for i, parameter in enumerate([*gate_up.parameters(), *down.parameters()]):
        parameter.data.copy_(integers(i, *parameter.shape) / 4)
    full = Mlp(gate_up, down)
    mine = Mlp(
        ColumnParallelLinear.from_linear(gate_up, group=group, parts=[12, 12]),
        RowParallelLinear.from_linear(down, group=group),
    )
    x = integers(9, 8, 16).double()
    run = torch.compile(mine, backend="aot_eager", fullgraph=True) if compiled else mine
    y = run(x.chunk(4)[rank].clone())
    close(y, full(x).chunk(4)[rank])
    y.sum().backward()
    full(x).sum().backward()
    close(mine.gate_up.weight.grad, mine.gate_up.part("weight", gate_up.weight.grad))


@pytest.mark.parametrize("compiled", [False, True])
def test_gate_and_up_with_sequence_parallelism(ranks, compiled):
    ranks(_sequence_parallel, compiled)


def _copies_compiled(groups, rank):
    """The sum over copies is traced; bf16 gradients are summed in fp32."""
    group = groups["w4"]
    full = torch.nn.Linear(HIDDEN, 24)
    layer = ColumnParallelLinear.from_linear(full, group=group, parts=QKV, sequence_parallel=False)
    x = integers(1, 5, HIDDEN).float()
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sum().backward()
    k = layer.cut.copied[0]
    want = 2 * x.sum(0).expand(k.size, HIDDEN)
    same(layer.weight.grad.narrow(0, k.local, k.size), want.contiguous())
    same(layer.bias.grad.narrow(0, k.local, k.size), torch.full((k.size,), 10.0))
    half = ColumnParallelLinear.from_linear(full.bfloat16(), group=group, parts=QKV,
                                            sequence_parallel=False)  # fmt: skip
    half(x.bfloat16()).sum().backward()
    assert half.weight.grad.dtype == torch.bfloat16


def test_copies_under_compile_and_in_bf16(ranks):
    ranks(_copies_compiled)


def _loads(groups, rank):
    group, size = groups["w4"], 24
    full = {"weight": integers(1, size, HIDDEN), "bias": integers(2, size)}
    layer = ColumnParallelLinear(HIDDEN, size, group=group, parts=QKV)
    layer.load_state_dict(full)
    q, kv = HEAD, HEADS * HEAD + rank // 2 * HEAD
    rows = [*range(rank * q, rank * q + q), *range(kv, kv + HEAD), *range(kv + 6, kv + 6 + HEAD)]
    same(layer.weight.detach(), full["weight"][rows])
    same(layer.bias.detach(), full["bias"][rows])
    other = ColumnParallelLinear(HIDDEN, size, group=group, parts=QKV)
    other.load_state_dict(layer.state_dict())
    same(other.weight.detach(), layer.weight.detach())
    whole = full_state_dict(layer)
    assert list(whole) == ["weight", "bias"]
    same(whole["weight"], full["weight"])
    same(whole["bias"], full["bias"])
    torch.manual_seed(5)
    drawn = torch.nn.Linear(HIDDEN, size)
    torch.manual_seed(5)
    seeded = ColumnParallelLinear(HIDDEN, size, group=group, parts=QKV)
    same(seeded.weight.detach(), drawn.weight.detach()[rows])
    assert "parts=[12, 6, 6]" in repr(seeded)
    row = RowParallelLinear(size, 5, group=group, parts=(8, 16))
    weight = integers(3, 5, size)
    row.load_state_dict({"weight": weight, "bias": torch.zeros(5)})
    columns = [*range(rank * 2, rank * 2 + 2), *range(8 + rank * 4, 12 + rank * 4)]
    same(row.weight.detach(), weight[:, columns])
    same(full_state_dict(row)["weight"], weight)
    return {
        "sum": raised(lambda: ColumnParallelLinear(8, 24, group=group, parts=(8, 8))),
        "type": raised(lambda: ColumnParallelLinear(8, 24, group=group, parts=24)),
        "float": raised(lambda: ColumnParallelLinear(8, 24, group=group, parts=(12.0, 12))),
        "zero": raised(lambda: ColumnParallelLinear(8, 24, group=group, parts=(24, 0))),
        "heads": raised(lambda: ColumnParallelLinear(8, 24, group=group, parts=[Part(24, 5)])),
        "cut": raised(lambda: ColumnParallelLinear(8, 24, group=group, parts=(18, 6))),
        "three": raised(lambda: ColumnParallelLinear(8, 24, group=group, parts=[Part(24, 3)])),
        "copies": raised(lambda: RowParallelLinear(24, 8, group=group, parts=[Part(24, 2)])),
    }


def test_loading_and_what_is_refused(ranks):
    for found in ranks(_loads):
        words = {
            "sum": ("UsageError", "out_features=24", "(8, 8)", "sum is 16"),
            "type": ("UsageError", "list of positive sizes", "24"),
            "float": ("UsageError", "list of positive sizes", "12.0"),
            "zero": ("UsageError", "list of positive sizes", "0"),
            "heads": ("UsageError", "its 5 heads divide", "24"),
            "cut": (
                "ShardingError",
                "4 ranks do not divide each part of (18, 6)",
                "do: 1, 2, 3, 6",
            ),
            "three": ("ShardingError", "24 in 3 heads", "do: 1, 3, 6, 9, 12, 15"),
            "copies": ("ShardingError", "in_features", "24 in 2 heads", "do: 1, 2"),
        }
        for case, (kind, *parts) in words.items():
            assert found[case][0] == kind, (case, found[case])
            assert all(part in found[case][1] for part in parts), (case, found[case][1])


# Checkpoints. Every rank of the pool takes part, whatever group its layers are of.


def _pairs(groups, rank, names=("w2", "odd")):
    """Two groups that are no neighbours' share the four ranks; the rank's own."""
    return groups["even" if rank % 2 == 0 else "odd"]


def _saved(path, model, optimizer):
    state = {"model": sharded_state_dict(model),
             "optimizer": sharded_optimizer_state_dict(model, optimizer)}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path)


def _restored(path, model, optimizer):
    state = {"model": sharded_state_dict(model),
             "optimizer": sharded_optimizer_state_dict(model, optimizer)}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=path)
    load_sharded_optimizer_state_dict(model, optimizer, state["optimizer"])


def _batch():
    return torch.randn(5, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _reshards(groups, rank, path):
    """tp 2 -> tp 4 -> tp 1 -> nn.Linear -> tp 4, each a step further, as the unsharded model."""
    whole = unsharded()
    truth, x = adam(whole), _batch()
    pair = _pairs(groups, rank)
    first = sharded(unsharded(), pair)
    optimizer = adam(first)
    for model, opt in ((whole, truth), (first, optimizer)):
        _step(model, x, opt)
    _saved(f"{path}/2", first, optimizer)
    other = torch.nn.Module()  # the standard names and shapes
    plain = {"model": unsharded().state_dict()}
    dcp.load(plain, checkpoint_id=f"{path}/2")
    for name, value in whole.state_dict().items():
        close(plain["model"][name], value)
    del other
    before = f"{path}/2"
    for place, group in (("4", groups["w4"]), ("1", groups.get("w1")), ("2 again", pair)):
        start = unsharded()
        for parameter in start.parameters():
            parameter.data.fill_(float("nan"))
        if group is None:  # a group of one rank, as each of the other ranks has
            group = dist.new_group([rank], use_local_synchronization=True)
        model = sharded(start, group)
        optimizer = adam(model, lr=9.0)
        _restored(before, model, optimizer)
        compare(model, whole)
        assert optimizer.param_groups[0]["lr"] == 0.05
        for each, opt in ((whole, truth), (model, optimizer)):
            _step(each, x, opt)
        compare(model, whole)
        before = f"{path}/{place}"
        _saved(before, model, optimizer)
    fresh = sharded(unsharded(), groups["w4"])
    state = unsharded().state_dict()
    dcp.save(state, checkpoint_id=f"{path}/linear")  # by a model that is not sharded
    for parameter in fresh.parameters():
        parameter.data.fill_(float("nan"))
    mine = sharded_state_dict(fresh)
    dcp.load(mine, checkpoint_id=f"{path}/linear")
    compare(fresh, unsharded())
    kind, text = raised(lambda: mine["mlp.down.weight"] + 1)
    assert kind == "UsageError"
    assert "full_state_dict" in text
    same(mine["mlp.down.weight"].to_local(), fresh.mlp.down.weight.detach())
    assert tuple(mine["mlp.down.weight"].shape) == (HIDDEN, INNER)
    own = fresh.mlp.gate_up.sharded_state_dict("a.")
    assert sorted(own) == ["a.bias", "a.weight"]


def test_checkpoints_reshard(ranks, tmp_path):
    ranks(_reshards, str(tmp_path))


def _async_save(groups, rank, path):
    model = sharded(unsharded(), groups["w4"])
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        future = dcp.async_save({"model": sharded_state_dict(model)}, checkpoint_id=path)
        for parameter in model.parameters():
            parameter.data.fill_(float("nan"))
        future.result()
    dcp.load({"model": sharded_state_dict(model)}, checkpoint_id=path)
    for name, parameter in model.named_parameters():
        same(parameter.detach(), want[name])


def test_a_staged_save_has_the_values_of_its_time(ranks, tmp_path):
    ranks(_async_save, str(tmp_path))


def _fsdp(groups, rank, path):
    """FSDP2 over data-parallel ranks, each of them two tensor-parallel ones."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, x = unsharded(), _batch()
    truth = adam(whole)
    model = sharded(unsharded(), mesh.get_group("tp"))
    for layer in (model.attention.qkv, model.mlp, model):
        fully_shard(layer, mesh=mesh["dp"])
    optimizer = adam(model)
    for _ in range(2):
        _step(whole, x, truth)
        optimizer.zero_grad()
        model(x).square().sum().backward()  # both data-parallel ranks have the same batch
        optimizer.step()
    _saved(path, model, optimizer)
    full = full_state_dict(model)
    for name, value in whole.state_dict().items():
        close(full[name], value)
    alone = sharded(unsharded(), dist.new_group([rank], use_local_synchronization=True))
    other = adam(alone)
    _restored(path, alone, other)
    compare(alone, whole)
    for each, opt in ((whole, truth), (alone, other)):
        _step(each, x, opt)
    compare(alone, whole)
    again = sharded(unsharded(), mesh.get_group("tp"))
    fully_shard(again, mesh=mesh["dp"])
    last = adam(again)
    _restored(path, again, last)
    again(x).square().sum().backward()
    last.step()
    for name, value in full_state_dict(again).items():
        close(value, whole.state_dict()[name])


def test_fsdp_over_tensor_parallel_ranks(ranks, tmp_path):
    ranks(_fsdp, str(tmp_path))
