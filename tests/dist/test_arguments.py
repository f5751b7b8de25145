"""What the five ops take as tensors, dims and groups; and torch.func over them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

import fluxgen
from fluxgen import interop
from fluxgen.nn import ColumnParallelLinear, RowParallelLinear
from fluxgen.runtime.ops.all_reduce import matmul_of_replicated
from tests.dist.numbers import integers, raised, same

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "matmul_all_to_all",
       "all_to_all_matmul")  # fmt: skip


def calls(group):
    """Every function that takes (x, w, bias)."""
    named = {name: getattr(fluxgen, name) for name in OPS}
    named["replicated"] = matmul_of_replicated
    return {
        name: lambda x, w, bias=None, call=call: call(x, w, bias, group=group)
        for name, call in named.items()
    }


def _odd_tensors(groups, rank):
    group = groups["w4"]
    mesh = dist.init_device_mesh("cpu", (4,))
    x, w, b = integers(1, 8, 4), integers(2, 3, 4), integers(3, 3)
    found = {}
    for name, call in calls(group).items():
        call(x, w, b)  # known from here on
        odd = {
            "dtensor": lambda t: DTensor.from_local(t, mesh, [Shard(0)]),
            "coo": torch.Tensor.to_sparse,
            "quantized": lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8),
            "integers": torch.Tensor.int,
            "complex": lambda t: t.to(torch.complex64),
            "list": torch.Tensor.tolist,
            "numpy": lambda t: t.numpy(),
            "none": lambda t: None,
            "meta": lambda t: t.to("meta"),
        }
        for kind, make in odd.items():
            found[name, kind, "x"] = raised(lambda c=call, m=make: c(m(x), w, b))
            if (
                kind not in ("list", "numpy") or name != "all_gather_matmul"
            ):  # which takes lists of weights
                found[name, kind, "w"] = raised(lambda c=call, m=make: c(x, m(w), b))
            if kind not in ("none", "list", "numpy"):
                found[name, kind, "bias"] = raised(lambda c=call, m=make: c(x, w, m(b)))
        found[name, "csr", "x"] = raised(lambda c=call: c(x.to_sparse_csr(), w))
        found[name, "csr", "w"] = raised(lambda c=call: c(x, w.to_sparse_csr()))
        nested = torch.nested.nested_tensor([x, x])
        jagged = torch.nested.nested_tensor([x, x], layout=torch.jagged)
        found[name, "nested", "x"] = raised(lambda c=call, n=nested: c(n, w))
        found[name, "jagged", "x"] = raised(lambda c=call, j=jagged: c(j, w))
        same(call(x, w, b), call(x, w, b))  # in step
    residual = raised(lambda: fluxgen.matmul_all_reduce(x, w, residual=x.to_sparse(), group=group))
    found["matmul_all_reduce", "coo", "residual"] = residual
    layer = ColumnParallelLinear(4, 12, group=group)
    d = DTensor.from_local(x, mesh, [Shard(0)])
    found["layer", "dtensor", "x"] = raised(lambda: layer(d))
    row = RowParallelLinear(16, 3, group=group)
    found["layer", "coo", "x"] = raised(lambda: row(x.to_sparse()))
    return found


def test_what_is_no_plain_tensor_is_refused_with_what_to_do(ranks):
    words = {
        "dtensor": ("a DTensor of (Shard(dim=0),)", ".to_local()"),
        "coo": ("torch.sparse_coo", ".to_dense()"),
        "csr": ("torch.sparse_csr", ".to_dense()"),
        "nested": ("nested",),
        "jagged": ("nested",),
        "quantized": ("quantized", ".dequantize()"),
        "integers": ("torch.int32",),
        "complex": ("torch.complex64",),
        "list": ("expected a tensor",),
        "numpy": ("expected a tensor",),
        "none": ("expected a tensor",),
        "meta": ("meta",),
    }
    for found in ranks(_odd_tensors):
        for (op, kind, argument), (error, text) in found.items():
            if kind == "meta" and argument == "x" and error == "UsageError":
                continue  # then it is the weight that is on another device
            assert error == "UsageError", (op, kind, argument, error, text)
            assert text.startswith(argument), (op, kind, argument, text)
            for word in words[kind]:
                assert word in text, (op, kind, argument, text)


def _meta(groups, rank):
    """All on the meta device: shapes, and nothing is sent."""
    group = groups["w4"]
    x, w = torch.empty(8, 4, device="meta"), torch.empty(3, 4, device="meta")
    shapes = [tuple(call(x, w).shape) for call in calls(group).values()]
    assert shapes == [(32, 3), (2, 3), (8, 3), (8, 3), (8, 3), (8, 3)]
    with torch.device("meta"):
        layer = ColumnParallelLinear(4, 12, group=group)
    assert tuple(layer(x).shape) == (32, 3)


def test_meta_tensors_give_shapes(ranks):
    ranks(_meta)


def _odd_dims(groups, rank):
    group = groups["w4"]
    x, w = integers(1, 8, 2, 4), integers(2, 3, 4)
    found = {}
    for dim in ("0", 1.0, True, None, [0], 0j, torch.tensor(0), 2, -1, -4, 10**30):
        found["gather_dim", str(dim)] = raised(
            lambda d=dim: fluxgen.all_gather_matmul(x, w, group=group, gather_dim=d)
        )
        found["scatter_dim", str(dim)] = raised(
            lambda d=dim: fluxgen.matmul_reduce_scatter(x, w, group=group, scatter_dim=d)
        )
    layer = ColumnParallelLinear(4, 12, group=group, sequence_dim="0")
    found["gather_dim", "of a layer"] = raised(lambda: layer(x))
    return found


def test_a_dim_is_an_integer(ranks):
    for found in ranks(_odd_dims):
        for (name, dim), (error, text) in found.items():
            assert error == "UsageError", (name, dim, error, text)
            assert text.startswith(f"{name}: expected "), text
            assert "0 to 1 of x (8, 2, 4)" in text, text


def _meshes(groups, rank):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = dist.init_device_mesh("cpu", (4,))
    tp = mesh.get_group("tp")
    x, w = integers(1, 8, 4), integers(2, 3, 4)
    for name, call in calls(tp).items():
        want = call(x, w)
        for group in (mesh["tp"], (mesh, "tp"), (mesh, 1), tp.group_name):
            for _ in range(2):
                same(calls(group)[name](x, w), want)
        assert calls(line)[name](x, w).dim() == 2
    layer = ColumnParallelLinear(4, 6, group=(mesh, "tp"))
    assert (layer.tp, layer.rank, layer.group_name) == (2, rank % 2, tp.group_name)
    compiled = torch.compile(
        lambda x: fluxgen.matmul_all_reduce(x, w, group=mesh["tp"]), backend="aot_eager",
        fullgraph=True,
    )  # fmt: skip
    same(compiled(x), fluxgen.matmul_all_reduce(x, w, group=tp))
    compiled = torch.compile(
        lambda x: fluxgen.matmul_all_reduce(x, w, group=(mesh, "tp")), backend="aot_eager",
        fullgraph=True,
    )  # fmt: skip
    same(compiled(x), fluxgen.matmul_all_reduce(x, w, group=tp))
    interop.install(mesh["tp"], (mesh, "dp"))
    interop.uninstall()
    fluxgen.reset(mesh["tp"])
    same(fluxgen.matmul_all_reduce(x, w, group=(mesh, -1 + 2)), compiled(x))
    return {
        str(i): raised(lambda g=group: fluxgen.all_gather_matmul(x, w, group=g))
        for i, group in enumerate(
            (mesh, (mesh, "pp"), (mesh, 2), (mesh, True), (tp, 0), (mesh,), [0, 1], None, 3, "none")
        )
    }


def test_a_group_may_be_a_mesh(ranks):
    words = ("(mesh, dim)", "'pp'", "found 2", "found True", "(DeviceMesh, dim)",
             "(DeviceMesh, dim)", "a process group", "found None", "found 3", "'none'")  # fmt: skip
    for found in ranks(_meshes):
        for (error, text), word in zip(found.values(), words, strict=True):
            assert error == "UsageError", text
            assert text.startswith("group:"), text
            assert word in text, (word, text)


def _func(groups, rank, name):
    """Gradients by torch.func are those of eager autograd, bit for bit."""
    group = groups["w4"]
    x, w, b = integers(rank, 8, 4), integers(10 + rank, 3, 4), integers(20, 3)

    def call(x, w, b):
        return calls(group)[name](x, w, b)

    leaves = [t.clone().requires_grad_() for t in (x, w, b)]
    y = call(*leaves)
    seed = integers(30, *y.shape)
    y.backward(seed)

    def loss(x, w, b):
        return (call(x, w, b) * seed).sum()

    value, pull = torch.func.vjp(call, x, w, b)
    same(value, y.detach())
    for got in (torch.func.grad(loss, argnums=(0, 1, 2))(x, w, b), pull(seed)):
        for mine, leaf in zip(got, leaves, strict=True):
            same(mine, leaf.grad)
    same(torch.func.grad(loss)(x, w, b), leaves[0].grad)  # of x alone
    again, auxiliary = torch.func.grad_and_value(loss)(x, w, b)
    same(again, leaves[0].grad)
    same(auxiliary, (y * seed).sum().detach())

    def twice(x):  # a gradient of a gradient: of each, so that all ranks communicate alike
        return torch.func.grad(lambda x: call(x, w, b).square().sum() / 2)(x).square().sum()

    inner = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(call(inner, w, b).square().sum() / 2, inner, create_graph=True)
    (want,) = torch.autograd.grad(first.square().sum(), inner)
    same(torch.func.grad(twice)(x), want)


@pytest.mark.parametrize("name", [*OPS, "replicated"])
def test_torch_func_differentiates(ranks, name):
    ranks(_func, name)


def _lists(groups, rank):
    """Several weights, some with a bias, and the gathered x."""
    group = groups["w4"]
    x, ws, b = integers(rank, 2, 4), [integers(5, 3, 4), integers(6, 2, 4)], integers(7, 2)

    def loss(x, ws, b):
        (y, z), whole = fluxgen.all_gather_matmul(x, ws, [None, b], group=group,
                                                  return_gathered=True)  # fmt: skip
        return y.sum() + (z * z).sum() + whole.sum()

    leaves = x.clone().requires_grad_(), [w.clone().requires_grad_() for w in ws]
    bias = b.clone().requires_grad_()
    loss(*leaves, bias).backward()
    dx, dws, db = torch.func.grad(loss, argnums=(0, 1, 2))(x, ws, b)
    same(dx, leaves[0].grad)
    same(db, bias.grad)
    for dw, leaf in zip(dws, leaves[1], strict=True):
        same(dw, leaf.grad)


def test_torch_func_of_several_weights(ranks):
    ranks(_lists)


def _functional_call(groups, rank):
    group = groups["w4"]
    block = torch.nn.Sequential(
        ColumnParallelLinear(8, 8, group=group, parts=(4, 4)), torch.nn.GELU(),
        RowParallelLinear(8, 8, group=group),
    ).double()  # fmt: skip
    x = torch.randn(3, 8, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in block.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(block, parameters, (x,)).square().sum()

    found = torch.func.grad(loss)(parameters)
    block(x).square().sum().backward()
    for name, parameter in block.named_parameters():
        same(found[name], parameter.grad)
    kind, _ = raised(lambda: torch.func.jvp(lambda x: block(x), (x,), (x,)))
    assert kind == "UnsupportedError"


def test_torch_func_of_layers(ranks):
    ranks(_functional_call)
