"""A real compile of a flat kernel: what ptxas says of the tightest, what is refused on the host."""

from __future__ import annotations

import pytest

from fluxgen.compiler.generated import Entry
from fluxgen.compiler.store import Store
from fluxgen.core.config import KernelConfig, Schedule
from fluxgen.core.errors import KernelError
from fluxgen.core.problem import Signature
from fluxgen.core.topology import parse_gpu
from fluxgen.kernels.sm90_flat import stage_count
from fluxgen.native import abi
from fluxgen.native.loader import FusedKernel
from fluxgen.runtime.session.kernels import source_of
from tests.nvcc.test_kernels import arguments

RS = Signature.of("gemm_rs", "fp16")
WIDE = KernelConfig(128, 192, 64, 1, 1, Schedule.FLAT)

pytestmark = [pytest.mark.nvcc, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def widest(tmp_path_factory, toolchain):
    """The kernel with the most accumulators and the fewest registers a thread."""
    store = Store(tmp_path_factory.mktemp("store") / "s")
    artifact = store.build(source_of(Entry("sm90", RS, WIDE).render()), toolchain)
    return artifact, FusedKernel(artifact.path, RS, WIDE)


def test_no_spills_no_serialised_wgmma(widest):
    (facts,) = widest[0].facts
    assert (facts.spill_stores, facts.spill_loads, facts.stack) == (0, 0, 0)
    assert facts.registers <= 65536 // (3 * 128 + 32) // 8 * 8
    assert not facts.warnings


def test_the_library_describes_itself(widest):
    _, kernel = widest
    assert kernel.info.flat == 1
    assert kernel.info.stages == stage_count(WIDE, parse_gpu("h200").smem_kb)
    assert kernel.info.smem_bytes <= 227 * 1024
    with pytest.raises(KernelError, match="expected"):
        FusedKernel(kernel.path, RS, KernelConfig(128, 192, 64, 1, 1, Schedule.PINGPONG))


def flat_arguments(**changes: int) -> abi.GemmArgs:
    args = arguments(rows=4, span=4, **{k: v for k, v in changes.items() if k == "k"})
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def test_a_good_call_passes_the_host_check(widest):
    widest[1].check(flat_arguments())
    widest[1].check(flat_arguments(split=4))
    widest[1].check(flat_arguments(sends=abi.TO_ALL, rows=13, span=1))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"split": 3}, "split=3: expected 1, 2, 4 or 8"),
        ({"split": 8}, "split=8.*of its 4 tiles"),
        ({"split": 16, "k": 4096}, "split=16"),
        ({"split": -1}, "split=-1"),
        ({"span": 2}, "span=2: a flat kernel tiles all 4 slabs as one"),
        ({"span": 1}, "span=1"),
        ({"chunk_size": 128}, "chunk_size=128"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_on_the_host(widest, changes, words):
    with pytest.raises(KernelError, match=words):
        widest[1].check(flat_arguments(**changes))
