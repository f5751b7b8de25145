"""Torch's async-TP ops run by ours: values, shapes, what is installed and what comes back."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config
import torch._inductor.fx_passes.post_grad as post_grad
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed._symmetric_memory as symm
from torch._subclasses.fake_tensor import FakeTensorMode

from fluxgen import explain, interop
from fluxgen.core.errors import UnsupportedError, UsageError
from fluxgen.runtime import interop as inside
from tests.dist.async_tp import check_layers
from tests.dist.numbers import integers, raised, same

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

GATHER, SCATTER = "symm_mem::fused_all_gather_matmul", "symm_mem::fused_matmul_reduce_scatter"
# Torch 2.13 renamed both and warns of the old names.
all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


@contextlib.contextmanager
def installed(*groups):
    interop.install(*groups)
    try:
        yield torch.ops.symm_mem
    finally:
        interop.uninstall()


def dumps() -> dict[str, str]:
    """What the dispatcher has: every kernel of both ops, the shadowed ones too, and schemas."""
    return {name: torch._C._dispatch_dump(name) for name in (GATHER, SCATTER)}


def keys(name: str) -> set[str]:
    return {key for key in ("CPU", "CUDA", "Meta")
            if torch._C._dispatch_has_kernel_for_dispatch_key(name, key)}  # fmt: skip


def state() -> tuple[object, ...]:
    return dumps(), post_grad.micro_pipeline_tp_pass, inductor_config._micro_pipeline_tp


@pytest.fixture(autouse=True)
def clean():
    before = state()
    yield
    interop.uninstall()
    assert state() == before


# Values. All ranks' operands are known from seeds, so the reference needs no communication.


def _gather_cases(groups, rank):
    with installed(groups["w4"]) as ops:
        name = groups["w4"].group_name
        for shape, dim in (
            ((2, 6), 0),
            ((3, 2, 6), 0),
            ((3, 2, 6), 1),
            ((2, 3, 2, 6), 2),
            ((2, 6), 1),
            ((3, 2, 6), 2),
            ((2, 6), -1),
        ):
            for dtype in (torch.float32, torch.bfloat16):
                _gather_case(ops, name, rank, shape, dim, dtype)


def _gather_case(ops, name, rank, shape, dim, dtype):
    parts = [integers(r, *shape, dtype=dtype) for r in range(4)]
    whole = torch.cat(parts, dim)
    k = whole.shape[-1]
    bs = [
        integers(11, k, 5, dtype=dtype),
        integers(12, 3, k, dtype=dtype).t(),
        integers(13, k, 8, dtype=dtype)[:, ::2],
    ]
    with explain() as seen:
        a, outs = ops.fused_all_gather_matmul(parts[rank], bs, dim, name)
        none, same_outs = ops.fused_all_gather_matmul(
            parts[rank], bs[1:2], dim, name, return_A=False
        )
    assert len(seen.decisions) == (0 if dim in (-1, len(shape) - 1) else 2)
    assert none is None
    assert type(a) is torch.Tensor
    same(a, whole)
    for out, b in zip([*outs, *same_outs], [*bs, bs[1]], strict=True):
        same(out, (whole.double() @ b.double()).to(dtype))


def test_all_gather_matmul_is_torchs(ranks):
    ranks(_gather_cases)


def _scatter_cases(groups, rank):
    with installed(groups["w4"]) as ops:
        name = groups["w4"].group_name
        for shape, dim, n in (
            ((8, 6), 0, 5),
            ((8, 2, 6), 0, 5),
            ((3, 8, 6), 1, 5),
            ((3, 8, 6), -2, 5),
            ((2, 3, 4, 6), 2, 5),
            ((3, 6), 1, 8),
            ((2, 3, 6), 2, 8),
            ((2, 3, 6), -1, 8),
        ):
            for reduce_op in ("sum", "avg", "max"):
                for dtype in (torch.float32, torch.bfloat16):
                    _scatter_case(ops, name, rank, shape, dim, n, reduce_op, dtype)


def _scatter_case(ops, name, rank, shape, dim, n, reduce_op, dtype):
    # Of -1, 0 and 1, so that bf16 holds every partial sum.
    parts = [integers(r, *shape).sign() for r in range(4)]
    bs = [integers(20 + r, n, 6).sign() for r in range(4)]
    partial = torch.stack([a @ b.t() for a, b in zip(parts, bs, strict=True)])
    whole = {"sum": partial.sum(0), "avg": partial.sum(0) / 4, "max": partial.amax(0)}[reduce_op]
    with explain() as seen:
        out = ops.fused_matmul_reduce_scatter(
            parts[rank].to(dtype), bs[rank].to(dtype).t(), reduce_op, dim, name
        )
    ours = reduce_op != "max" and dim % len(shape) != len(shape) - 1
    assert len(seen.decisions) == ours
    assert type(out) is torch.Tensor
    assert out.is_contiguous()
    same(out, whole.chunk(4, dim)[rank].to(dtype))


def test_matmul_reduce_scatter_is_torchs(ranks):
    ranks(_scatter_cases)


def _layers(groups, rank):
    del rank
    group = groups["w4"]

    def equal(got, want, what):
        assert torch.equal(got, want), what

    with installed(group), explain() as seen:
        check_layers(group, integers, equal, 6, 10, 8)
    # A gather, a scatter and a gather of each column-parallel layer, two of the row-parallel one.
    assert len(seen.decisions) == 3 + 3 + 2


def test_layers_that_call_torchs_names_train(ranks):
    ranks(_layers)


def _more_calls(groups, rank):
    name = groups["w4"].group_name
    x, b = integers(rank, 4, 6), integers(9, 6, 5)
    with installed() as ops:
        # Other element types go to torch's own functions; no B leaves the gather.
        a, (y,) = ops.fused_all_gather_matmul(x.int(), [b.int()], 0, name)
        same(y, a @ b.int())
        whole, none = ops.fused_all_gather_matmul(x, [], 0, name)
        assert none == []
        same(whole, torch.cat([integers(r, 4, 6) for r in range(4)]))
        # One rank: the gathered A is no alias of A.
        alone = groups.get("w1")
        if alone is not None:
            a, (y,) = ops.fused_all_gather_matmul(x, [b], 0, alone.group_name)
            same(y, x @ b)
            assert a.data_ptr() != x.data_ptr()
            same(ops.fused_matmul_reduce_scatter(x, b, "avg", 0, alone.group_name), x @ b)
        # No autograd formula, as with torch's own kernels: torch warns and leaves no gradient.
        y = ops.fused_matmul_reduce_scatter(x.requires_grad_(), b, "sum", 0, name)
        with pytest.warns(UserWarning, match="autograd kernel was not registered"):
            y.sum().backward()
        assert x.grad is None
        x = x.detach()
        errors = {
            "A:": lambda: ops.fused_all_gather_matmul(x[0], [b], 0, name),
            "Bs[1]: expected (K, N) with K = 6": lambda: ops.fused_all_gather_matmul(
                x, [b, b.t()], 0, name
            ),
            "gather_dim: expected -1 to 1": lambda: ops.fused_all_gather_matmul(x, [b], -2, name),
            "B: ": lambda: ops.fused_matmul_reduce_scatter(x, b[0], "sum", 0, name),
            "scatter_dim: ": lambda: ops.fused_matmul_reduce_scatter(x, b, "sum", 2, name),
            "found 3": lambda: ops.fused_matmul_reduce_scatter(x[:3], b, "sum", 0, name),
        }
        for part, call in errors.items():
            kind, text = raised(call)
            assert kind == "UsageError", (part, kind, text)
            assert part in text, (part, text)


def test_other_calls_and_errors(ranks):
    ranks(_more_calls)


def _shapes(groups, rank):
    name = groups["w4"].group_name
    with installed() as ops:
        for shape, dim in (((4, 8), 0), ((4, 8, 8), 0), ((4, 8, 8), 1), ((4, 8, 8), 2)):
            k = 8 * (4 if dim == len(shape) - 1 else 1)
            a, b, wide = integers(1, *shape), integers(2, 5, k).t(), integers(3, 8, 12)

            def gather(a, b, dim=dim):
                whole, outs = ops.fused_all_gather_matmul(a, [b, b], dim, name)
                return [
                    whole,
                    *outs,
                    *ops.fused_all_gather_matmul(a, [b], dim, name, return_A=0)[1],
                ]

            def scatter(a, b, dim=dim):
                return [
                    ops.fused_matmul_reduce_scatter(a, b, op, dim, name) for op in ("sum", "avg")
                ]

            for call, right in ((gather, b), (scatter, wide)):
                real = call(a, right)
                with FakeTensorMode() as mode:
                    fake = call(mode.from_tensor(a), mode.from_tensor(right))
                meta = call(a.to("meta"), right.to("meta"))
                for one, *others in zip(real, fake, meta, strict=True):
                    for other in others:
                        assert other.shape == one.shape
                        assert other.stride() == one.stride()
                        assert other.dtype == one.dtype


def test_shapes_and_strides_are_those_of_torchs_meta_kernels(ranks):
    ranks(_shapes)


# What install and uninstall change.


def test_install_and_uninstall():
    before = state()
    assert keys(GATHER) == keys(SCATTER) == {"CUDA", "Meta"}
    schemas = [str(getattr(torch.ops.symm_mem, n.split("::")[1]).default._schema)
               for n in (GATHER, SCATTER)]  # fmt: skip
    interop.uninstall()
    assert state() == before
    interop.install()
    once = state()
    assert keys(GATHER) == keys(SCATTER) == {"CPU", "CUDA", "Meta"}
    assert once[1] is not before[1]
    assert once[2] is True
    for name, text in dumps().items():
        assert text.count("(inactive)") == 1, text  # torch's CUDA kernel, below ours
        assert schemas[name == SCATTER] in text
    interop.install()
    assert state() == once
    interop.uninstall()
    assert state() == before
    with pytest.raises(NotImplementedError):
        torch.ops.symm_mem.fused_matmul_reduce_scatter(torch.ones(2, 2), torch.ones(2, 2), "sum",
                                                       0, "none")  # fmt: skip


def test_the_flag_is_given_back_as_it_was():
    with inductor_config.patch(_micro_pipeline_tp=True):
        interop.install()
        interop.uninstall()
        assert inductor_config._micro_pipeline_tp is True


def test_another_thread_gets_the_flag_by_installing_too():
    seen = []

    def other():
        interop.install()
        seen.append(inductor_config._micro_pipeline_tp)

    interop.install()
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [True]


def test_somebody_elses_wrapper_of_the_pass_stays():
    before = post_grad.micro_pipeline_tp_pass
    interop.install()

    def wrapper(graph, inner=post_grad.micro_pipeline_tp_pass):
        return inner(graph)

    try:
        post_grad.micro_pipeline_tp_pass = wrapper
        interop.uninstall()
        assert post_grad.micro_pipeline_tp_pass is wrapper
        wrapper(torch.fx.Graph())  # ours inside still passes on, and counts no more
        assert interop.matches().graphs == 0
    finally:
        post_grad.micro_pipeline_tp_pass = before


@pytest.mark.parametrize("failing", range(4))
def test_a_registration_that_fails_leaves_nothing(failing):
    before = state()
    real, calls = torch.library.Library.impl, []

    def impl(self, *args, **kwargs):
        calls.append(args)
        if len(calls) > failing:
            raise RuntimeError("no")
        return real(self, *args, **kwargs)

    with mock.patch.object(torch.library.Library, "impl", impl), pytest.raises(RuntimeError):
        interop.install()
    assert len(calls) == failing + 1
    assert state() == before


@pytest.mark.parametrize("name", ["fused_all_gather_matmul", "fused_matmul_reduce_scatter"])
def test_another_schema_is_named_and_nothing_installed(name):
    before = state()
    known = {**inside._SCHEMAS, name: ("f(Tensor A) -> Tensor",)}
    with (
        mock.patch.object(inside, "_SCHEMAS", known),
        pytest.raises(UnsupportedError) as error,
    ):
        interop.install()
    text = str(error.value)
    assert "expected the schema f(Tensor A) -> Tensor; found symm_mem::" + name in text
    assert "Nothing was installed" in text
    assert state() == before


def test_an_inductor_without_the_pass_is_named_and_nothing_installed():
    before = state()
    with mock.patch.object(inside, "_PASS", "no_such_pass"), pytest.raises(UnsupportedError) as e:
        interop.install()
    assert "no_such_pass" in str(e.value)
    assert state() == before


def test_the_kernels_serve_the_schema_without_return_a():
    # Torch before `return_A` calls the kernel without it and expects A.
    library = torch.library.Library("fluxgen_test", "DEF")
    try:
        library.define("old(Tensor A, Tensor[] Bs, int gather_dim, str group_name)"
                       " -> (Tensor, Tensor[])")  # fmt: skip
        library.impl("old", inside._gather_kernel, "CPU")
        seen = []

        def old(a, bs, dim, name):
            seen.append((dim, name))
            return a, [a @ b for b in bs]

        with mock.patch.object(symm, "_fused_all_gather_matmul_fallback", old):
            a, outs = torch.ops.fluxgen_test.old(torch.ones(2, 3), [torch.ones(3, 4)], 1, "g")
        assert seen == [(1, "g")]
        same(a, torch.ones(2, 3))
        same(outs[0], torch.full((2, 4), 3.0))
    finally:
        library._destroy()


def _groups(groups, rank):
    before = state()
    if rank == 0:
        kind, text = raised(lambda: interop.install("none such"))
        assert (kind, "none such" in text) == ("UsageError", True)
    else:
        assert raised(lambda: interop.install(dist.GroupMember.NON_GROUP_MEMBER))[0] == "UsageError"
    assert state() == before
    pair = groups["even" if rank % 2 == 0 else "odd"]
    world = dist.group.WORLD.group_name
    with installed(pair, groups["w4"].group_name):
        assert symm.is_symm_mem_enabled_for_group(pair.group_name)
        assert symm.is_symm_mem_enabled_for_group(groups["w4"].group_name)
        interop.install()
        assert symm.is_symm_mem_enabled_for_group(world)
    assert symm.is_symm_mem_enabled_for_group(world)  # torch cannot disable a group
    with installed():
        pass
    assert state() == before


def test_groups_are_enabled_over_gloo(ranks):
    ranks(_groups)


def test_importing_fluxgen_imports_no_torch():
    code = "import sys, fluxgen; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# Inductor.


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append((record.levelname, record.getMessage()))


@contextlib.contextmanager
def _logged():
    logger, handler = logging.getLogger("fluxgen.interop"), _Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _block(name, dim):
    def block(x, w1, w2, w3):
        whole = all_gather(x, dim, name)
        y = (whole @ w1).relu() * (whole @ w2)
        return reduce_scatter(y @ w3, "sum", dim, name)

    return block


def _compiled(name, dim, shape, rank, nccl):
    """Eager and compiled results, what explain() saw of the compiled run, and the log."""
    arguments = (integers(rank, *shape), integers(5, 6, 8), integers(6, 6, 8),
                 integers(7 + rank, 8, 6))  # fmt: skip
    block = _block(name, dim)
    eager = block(*arguments)
    torch._dynamo.reset()
    with (
        # A graph from the cache was compiled in another process: the pass would not run.
        inductor_config.patch(force_disable_caches=True),
        mock.patch.object(dist, "is_nccl_available", lambda: nccl),
        _logged() as lines,
        torch.no_grad(),
        explain() as seen,
    ):
        out = torch.compile(block, fullgraph=True)(*arguments)
    same(out, eager + 0)
    return [decision.key.split("/kn")[0] for decision in seen.decisions], lines


def _inductor(groups, rank):
    if rank >= 2:
        return
    group = groups["w2"]
    name = group.group_name

    with installed(group):
        # Inductor's pass asks for NCCL before anything else, so a torch without it never fuses.
        decisions, lines = _compiled(name, 0, (4, 6), rank, nccl=False)
        assert decisions == []
        assert interop.matches() == interop.Matches(0, 0, graphs=1)
        ((level, line),) = lines
        assert level == "WARNING"
        assert "0 of 1 all-gathers and 0 of 1 reduce-scatters" in line
        assert "without NCCL" in line

        # Told that NCCL is there it rewrites CPU graphs as well, and ours run over gloo.
        decisions, lines = _compiled(name, 0, (4, 6), rank, nccl=True)
        assert decisions == ["ag_gemm/float32/m8-n16-k6-tp2", "gemm_rs/float32/m8-n6-k8-tp2"]
        assert interop.matches() == interop.Matches(1, 1, graphs=2)
        ((level, line),) = lines
        assert level == "INFO"
        assert "1 of 1 all-gathers and 1 of 1 reduce-scatters" in line

        total = interop.Matches(1, 1, graphs=2)
        # Torch before that name cannot trace its own all-gather along another dim.
        if hasattr(funcol, "all_gather_single"):
            decisions, lines = _compiled(name, 1, (3, 4, 6), rank, nccl=True)
            assert decisions == ["ag_gemm/float32/m24-n16-k6-tp2", "gemm_rs/float32/m24-n6-k8-tp2"]
            total += interop.Matches(1, 1, graphs=1)
        assert interop.matches() == total
    assert interop.matches() == total
    interop.install(group)
    interop.uninstall()
    assert interop.matches() == interop.Matches()


def test_inductors_pass_writes_our_ops_into_compiled_graphs(ranks):
    ranks(_inductor)


def _training(groups, rank):
    if rank >= 2:
        return
    group = groups["w2"]

    def block(x, w):
        return all_gather(x, 0, group.group_name) @ w

    grads = []
    with (
        installed(group),
        inductor_config.patch(force_disable_caches=True),
        mock.patch.object(dist, "is_nccl_available", lambda: True),
    ):
        torch._dynamo.reset()
        for run in (block, torch.compile(block, fullgraph=True)):
            leaves = [t.requires_grad_() for t in (integers(rank, 4, 6), integers(5, 6, 8))]
            with explain() as seen:
                y = run(*leaves)
                y.backward(integers(30 + rank, 8, 8))
            grads.append([y.detach(), *(leaf.grad for leaf in leaves)])
        assert [d.key.split("/kn")[0] for d in seen.decisions] == [
            "ag_gemm/float32/m8-n8-k6-tp2",
            "gemm_rs/float32/m8-n6-k8-tp2",
        ]
        assert interop.matches() == interop.Matches(1, 1, graphs=2)
    for eager, compiled in zip(*grads, strict=True):
        same(compiled, eager + 0)


@pytest.mark.skipif(
    not hasattr(funcol, "all_gather_single"), reason="functional collectives without gradients"
)
def test_forward_and_backward_graphs_are_rewritten_after_the_split(ranks):
    ranks(_training)


def _reasons(groups, rank):
    if rank >= 2:
        return
    w2 = groups["w2"].group_name
    with (
        installed(groups["w2"]),
        _logged() as lines,
        mock.patch.object(dist, "is_nccl_available", lambda: True),
    ):
        functional = torch.ops._c10d_functional
        for group, needs in ((w2, "no matmul"), ("never enabled", "never enabled")):
            graph = torch.fx.Graph()
            x = graph.placeholder("x")
            x.meta["val"] = torch.ones(2, 2)
            gathered = graph.call_function(functional.all_gather_into_tensor.default, (x, 2, group))
            graph.output(graph.call_function(functional.wait_tensor.default, (gathered,)))
            post_grad.micro_pipeline_tp_pass(graph)
            assert needs in lines[-1][1], lines
            assert lines[-1][0] == "WARNING"
        graph = torch.fx.Graph()
        graph.output(graph.placeholder("x"))
        post_grad.micro_pipeline_tp_pass(graph)
        assert "no such collective" in lines[-1][1]
        assert lines[-1][0] == "INFO"
        assert len(lines) == 3


def test_the_log_says_why_nothing_matched(ranks):
    ranks(_reasons)


def test_usage_errors_are_value_errors():
    with pytest.raises(UsageError):
        interop.install(3)
    assert issubclass(UnsupportedError, ValueError)
