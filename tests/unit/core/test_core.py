"""The nouns: names, ranges, round trips."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxgen.core.config import ChunkAxis, KernelConfig, RunConfig, Schedule, Transport
from fluxgen.core.dtypes import DType
from fluxgen.core.epilogue import Epilogue
from fluxgen.core.errors import CommTimeout, UsageError
from fluxgen.core.op import Op
from fluxgen.core.problem import MAX_DIM, Problem, Signature, ceil_div
from fluxgen.core.settings import Settings, data_dir
from fluxgen.core.topology import GPUS, Gpu, LinkKind, Topology, normalise_name, parse_gpu
from fluxgen.db.keys import split_topology, topology_of


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"), ("NVIDIA_H100_80GB_HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"), ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"), ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA H800", "h800-sxm"), ("NVIDIA H200", "h200"), ("NVIDIA H20", "h20"),
        ("NVIDIA L20", "l20"), ("NVIDIA L40S", "l40s"), ("NVIDIA A30", "a30"),
        ("NVIDIA A40", "a40"), ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"), ("H100 SXM", "h100-sxm"),
        ("NVIDIA_RTX_6000_Ada_Generation", "rtx-6000-ada-generation"),
        ("NVIDIA A100 MIG 1g.18gb", "a100-mig-1g.18gb"), ("GPU/with slash", "gpu-with-slash"),
        ("显卡", "unknown-gpu"), ("", "unknown-gpu"), ("NVIDIA L2", "l2"), ("H2000", "h2000"),
    ],
)  # fmt: skip
def test_device_names_normalise_once(name, slug):
    """J11: one rule for every use of a device's name."""
    assert normalise_name(name) == slug
    assert normalise_name(slug) == slug


@given(st.text(max_size=200))
def test_normalising_is_idempotent_and_safe_as_a_path(name):
    slug = normalise_name(name)
    assert normalise_name(slug) == slug
    assert slug
    assert "/" not in slug
    assert slug not in (".", "..")
    assert len(slug) <= 64


def test_every_named_target_is_there():
    named = [
        *("a100-sxm-40gb", "a100-sxm-80gb", "a100-pcie-40gb", "a100-pcie-80gb", "a30", "a40"),
        *("a6000", "l20", "l40s", "rtx-4090", "h20", "h100-sxm", "h100-pcie", "h100-nvl"),
        *("h800-sxm", "h200"),
    ]
    assert set(named) <= set(GPUS)
    same_sms = {g.name for g in GPUS.values() if g.sm_count == 132}
    assert {"h100-sxm", "h100-nvl", "h800-sxm", "h200"} <= same_sms, "SM count is no identity"


@pytest.mark.parametrize("sms", [1, 114, 120, 128, 500])
def test_any_sm_count_works_by_its_properties(sms):
    """F17: no whitelist."""
    gpu = Gpu.from_properties("Mystery", (9, 0), sms, 1700, 227, 80)
    assert gpu.arch == "sm90"
    assert gpu.tflops == pytest.approx(sms * 1.7e9 * 4096 / 1e12, abs=0.1)
    assert parse_gpu(f"mystery:cc=9.0,sms={sms},clock=1700,smem=227,mem=80") == gpu


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("h900", "h100-sxm"), ("", "expected"), ("x:cc=9.0", "missing"),
        ("x:bogus=1", "bogus"), ("x:cc=nan,sms=1,clock=1,smem=1,mem=1", "number"),
        ("x:cc=7.5,sms=1,clock=1000,smem=96,mem=1", "8.0"),
        ("x:cc=9.0,sms=0,clock=1,smem=1,mem=1", "sm_count"),
    ],
)  # fmt: skip
def test_bad_targets_name_what_is_expected(text, word):
    with pytest.raises(UsageError, match=word):
        parse_gpu(text)


def test_topology():
    topology = Topology.of("h200", "nvlink", 8)
    assert topology.key == "h200-nvlink-tp8"
    assert topology.link is LinkKind.NVLINK
    with pytest.raises(UsageError, match="no NVLink"):
        Topology.of("l20", "nvlink", 2)
    with pytest.raises(UsageError, match="world"):
        Topology.of("h200", "nvlink", 17)


@pytest.mark.parametrize("text", ["bf16", "bfloat16", "torch.bfloat16", "BF16"])
def test_dtype_aliases(text):
    assert DType.parse(text) is DType.BF16


@pytest.mark.parametrize("text", ["fp32", "int8", "", "None", "fp8"])
def test_other_dtypes_are_refused(text):
    with pytest.raises(UsageError, match="bf16, fp16"):
        DType.parse(text)


@pytest.mark.parametrize(
    "changes",
    [{"m": -1}, {"n": 0}, {"k": -8}, {"tp": 0}, {"tp": 17}, {"m": 1.5}, {"tp": "8"}, {"m": True},
     {"n": MAX_DIM + 1}],
)  # fmt: skip
def test_problems_refuse_nonsense_with_the_value(changes):
    fields = {"m": 1024, "n": 512, "k": 256, "tp": 8, **changes}
    with pytest.raises(UsageError, match=str(next(iter(changes.values())))):
        Problem(Signature.of("ag_gemm"), **fields)


def test_every_field_of_a_signature_is_in_its_key():
    """J03: two calls that differ must not share a record."""
    base = Signature.of("ag_gemm")
    others = [
        Signature.of("gemm_rs"), Signature.of("ag_gemm", "fp16"),
        Signature(Op.AG_GEMM, DType.BF16, DType.FP16), Signature(Op.AG_GEMM, b_layout="kn"),
        Signature(Op.AG_GEMM, epilogue=Epilogue.parse("bias")),
        Signature(Op.AG_GEMM, return_gathered=True),
    ]  # fmt: skip
    assert len({s.key for s in [base, *others]}) == 7
    problems = [Problem(base, *mnkt) for mnkt in [(8, 8, 8, 1), (16, 8, 8, 1), (8, 16, 8, 1),
                                                  (8, 8, 16, 1), (8, 8, 8, 2)]]  # fmt: skip
    assert len({p.key for p in problems}) == 5


def test_communication_bytes():
    ag = Problem(Signature.of("ag_gemm"), 1024, 512, 256, 8)
    rs = Problem(Signature.of("gemm_rs"), 1024, 512, 256, 8)
    assert ag.comm_bytes == 1024 * 256 * 2 * 7 / 8
    assert rs.comm_bytes == 1024 * 512 * 2 * 7 / 8
    assert Problem(Signature.of("ag_gemm"), 1023, 8, 8, 8).m_local == 128
    assert ceil_div(7, 8) == 1


@given(
    st.builds(
        RunConfig,
        st.lists(st.integers(1, 8), max_size=8).map(tuple),
        st.integers(0, 64), st.sampled_from(ChunkAxis), st.integers(1, 16), st.integers(0, 132),
        st.sampled_from(Transport), st.integers(1, 8),
    )
)  # fmt: skip
def test_run_configs_round_trip(run):
    assert RunConfig.from_dict(run.to_dict()) == run


def test_kernel_configs_round_trip_and_refuse_other_keys():
    kernel = KernelConfig(128, 192, 64, 2, 1, Schedule.COOPERATIVE, 4)
    assert KernelConfig.from_dict(kernel.to_dict()) == kernel
    for broken in (
        {**kernel.to_dict(), "extra": 1}, {**kernel.to_dict(), "tile_m": "128"},
        {**kernel.to_dict(), "tile_m": True}, {**kernel.to_dict(), "schedule": "x"}, [], None,
    ):  # fmt: skip
        with pytest.raises(UsageError):
            KernelConfig.from_dict(broken)


def test_comm_timeout_carries_its_values_across_processes():
    error = CommTimeout("gemm_rs", 1, 3, 0, 7, 6)
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, again.peer, again.expected, again.seen) == (1, 3, 7, 6)
    assert "rank 1" in str(again)
    assert "rank 3" in str(again)


def test_settings_need_no_home_and_create_nothing(tmp_path):
    settings = Settings.load({})
    assert settings.db.name == "tuning.sqlite3"
    settings = Settings.load({"FLUXGEN_HOME": str(tmp_path / "x")})
    assert settings.store == tmp_path / "x" / "store"
    assert not (tmp_path / "x").exists()
    with pytest.raises(UsageError, match="FLUXGEN_TIMEOUT_S"):
        Settings.load({"FLUXGEN_TIMEOUT_S": "-1"})


def test_data_directories_exist():
    for name in ("templates", "generated", "tuning_db"):
        assert data_dir(name).is_dir()


@pytest.mark.parametrize(("text", "kind", "islands"), [
    ("nvlink", LinkKind.NVLINK, 1), ("pcie", LinkKind.PCIE, 1), (" PCIe2 ", LinkKind.PCIE, 2),
    ("pcie8", LinkKind.PCIE, 8), ("host", LinkKind.HOST, 1),
])  # fmt: skip
def test_a_link_may_name_its_sockets(text, kind, islands):
    assert LinkKind.with_islands(text) == (kind, islands)
    topology = Topology.of("h100-sxm", kind, 8, islands)
    assert topology_of(topology.key) == topology
    assert Topology.of("h100-sxm", text, 8) == topology


@pytest.mark.parametrize("text", ["pcie1", "pcie9", "nvlink2", "pcie22", "host2", "2", ""])
def test_links_that_are_none(text):
    with pytest.raises(UsageError, match="nvlink, pcie or host"):
        LinkKind.with_islands(text)


@pytest.mark.parametrize(("link", "world", "islands"), [
    ("nvlink", 8, 2), ("pcie", 6, 4), ("pcie", 8, 0), ("pcie", 8, 9),
])  # fmt: skip
def test_sockets_have_as_many_ranks_each(link, world, islands):
    with pytest.raises(UsageError, match="islands"):
        Topology.of("h100-sxm", link, world, islands)


@pytest.mark.parametrize("key", ["l20-pcie3-tp8", "l20-pcie1-tp8", "h200-nvlink2-tp8"])
def test_keys_of_no_topology(key):
    with pytest.raises(UsageError, match="topology"):
        split_topology(key)


def test_nothing_is_assumed_of_an_unknown_gpu():
    with pytest.raises(UsageError, match=r"Nothing is assumed of 'rtx-pro-6000'"):
        topology_of("rtx-pro-6000-pcie-tp8")
    with pytest.raises(UsageError, match=r"8.x or 9.0; found compute capability 12.0"):
        topology_of("rtx-pro-6000-pcie-tp8", cc=120)
    assert topology_of("someones-pcie-tp8", cc=86).gpu.cc == 80
    hopper = topology_of("someones-nvlink-tp8", sm_count=99, cc=90)
    assert (hopper.gpu.name, hopper.gpu.cc, hopper.gpu.sm_count) == ("someones", 90, 99)
