"""Families are told apart by architecture and schedule, and nobody else asks for either."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest

import fluxgen
from fluxgen.compiler.headers import include_dir
from fluxgen.core.config import Schedule
from fluxgen.kernels.registry import ARCHS, FAMILIES, families, family_of, with_schedule

PACKAGE = Path(fluxgen.__file__).parent


def test_an_architecture_and_a_schedule_name_one_family():
    for one, other in combinations(FAMILIES, 2):
        shared = set(one.archs) & set(other.archs)
        assert not shared or not set(one.schedules) & set(other.schedules), (one, other)
    for schedule in Schedule:
        assert schedule in with_schedule(schedule).schedules
    assert ARCHS == ("sm80", "sm86", "sm89", "sm90")
    assert families("sm100") == ()
    assert family_of("sm80", Schedule.PINGPONG) is None


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: type(family).__name__)
def test_a_family_is_whole(family):
    assert (include_dir() / "fluxgen/families" / family.header).is_file()
    kernels = list(family.kernels())
    assert kernels and len(set(kernels)) == len(kernels)
    assert {kernel.schedule for kernel in kernels} == set(family.schedules)
    for kernel in kernels[::97]:
        assert family.step_depth(kernel) % kernel.tile_k == 0
        assert family.described(kernel)["flat"] is family.whole


def test_families_that_share_a_schedule_describe_themselves_alike():
    """A library is loaded by its schedule alone."""
    for one, other in combinations(FAMILIES, 2):
        for schedule in set(one.schedules) & set(other.schedules):
            assert one.whole is other.whole
            kernel = next(k for k in one.kernels() if k.schedule is schedule)
            assert one.described(kernel) == other.described(kernel)


def asked(question, allowed):
    """Lines of the package that match, by module, but for those of ``allowed`` modules."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if not name.startswith(tuple(allowed)):
            lines = [
                line.strip() for line in path.read_text().splitlines() if question.search(line)
            ]
            found |= {name: lines} if lines else {}
    return found


def test_no_other_module_asks_which_op_it_is():
    asks = re.compile(r"\bis (not )?Op\.|[!=]= Op\.|\bin \(?Op\.|\{\s*Op\.|^\s+Op\.[A-Z_0-9]+:")
    assert not asked(asks, ("core/op.py", "runtime/ops/"))


def test_no_other_module_draws_conclusions_from_a_schedule_or_an_architecture():
    asks = re.compile(r"\bSchedule\.[A-Z]|\bcc\s*([<>!=]=|<|>)|arch\s*[!=]=\s*\"sm")
    allowed = {
        "core/config.py",  # a kernel's default schedule
        "core/topology.py",  # makes arch out of cc
        "db/keys.py",  # takes an unknown GPU for the best of its architecture
        "predict/gemm.py",  # a ping-pong kernel hides its epilogue
        "machine/device.py",  # compares a GPU with its preset
    }
    assert not asked(asks, ("kernels/", *allowed))
