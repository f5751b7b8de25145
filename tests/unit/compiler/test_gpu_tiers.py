"""What the two tiers of GPU tests compile."""

from __future__ import annotations

from fluxgen.core.config import Schedule
from tests.gpu.build_kernels import entries

SM90 = (Schedule.PINGPONG, Schedule.COOPERATIVE, Schedule.FLAT)
SM80 = (Schedule.MULTISTAGE_4, Schedule.MULTISTAGE_8, Schedule.FLAT)


def test_the_core_tier_has_every_schedule_of_every_architecture_for_both_kernels():
    core = entries("core")
    assert len(core) <= 24
    found = {(e.arch, e.kernel.schedule, e.signature.op.value) for e in core}
    wanted = {("sm90", schedule) for schedule in SM90} | {("sm80", schedule) for schedule in SM80}
    assert found == {(*each, op) for each in wanted for op in ("ag_gemm", "gemm_rs")}
    assert {schedule for _, schedule in wanted} == set(Schedule), "a new schedule belongs there too"


def test_the_core_tier_has_every_type_and_layout_of_the_weight():
    found = {(e.signature.dtype.value, e.signature.b_layout) for e in entries("core")}
    assert found == {("bf16", "nk"), ("bf16", "kn"), ("fp16", "nk")}


def test_the_full_tier_begins_with_the_core():
    core, full = entries("core"), entries("full")
    assert full[: len(core)] == core
    assert len(set(full)) == len(full)
