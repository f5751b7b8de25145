"""Rendering: golden texts, StrictUndefined, determinism."""

from __future__ import annotations

from pathlib import Path

import pytest

from fluxgen.codegen.render import kernel_name, render_kernel, render_support, render_template
from fluxgen.core.config import KernelConfig, Schedule
from fluxgen.core.errors import RenderError, UnsupportedError
from fluxgen.core.problem import Signature

GOLDEN = Path(__file__).parents[2] / "golden"

CASES = [
    (Signature.of("ag_gemm", "bf16"), KernelConfig(128, 192, 64, 2, 1, Schedule.PINGPONG)),
    (Signature.of("gemm_rs", "fp16"), KernelConfig(256, 128, 64, 1, 2, Schedule.COOPERATIVE, 4)),
    (Signature.of("ag_gemm", "bf16"), KernelConfig(128, 160, 64, 2, 1, Schedule.PINGPONG)),
]


@pytest.mark.parametrize(("signature", "kernel"), CASES)
def test_golden_text(signature, kernel):
    rendered = render_kernel(signature, "sm90", kernel)
    golden = GOLDEN / f"{rendered.name}.cu"
    assert rendered.text == golden.read_text(), (
        f"the template changed; if that is meant, write the new text to {golden}"
    )


def test_golden_support():
    assert render_support("sm90").text == (GOLDEN / "support_sm90.cu").read_text()


def test_sources_only_instantiate():
    """About twenty lines: one include, one Config, one export; nothing to maintain twice."""
    for signature, kernel in CASES:
        lines = render_kernel(signature, "sm90", kernel).text.splitlines()
        assert len(lines) <= 28
        assert sum(line.startswith("#include") for line in lines) == 1
        assert "{{" not in "".join(lines)


def test_same_call_same_bytes_and_every_field_matters():
    signature, kernel = CASES[0]
    assert render_kernel(signature, "sm90", kernel) == render_kernel(signature, "sm90", kernel)
    names = {kernel_name(s, "sm90", k) for s, k in CASES}
    for changed in [
        KernelConfig(64, 192, 64, 2, 1),
        KernelConfig(128, 96, 64, 2, 1),
        KernelConfig(128, 192, 128, 2, 1),
        KernelConfig(128, 192, 64, 1, 1),
        KernelConfig(128, 192, 64, 2, 2),
        KernelConfig(128, 192, 64, 2, 1, stages=3),
        KernelConfig(128, 192, 64, 2, 1, Schedule.COOPERATIVE),
    ]:
        rendered = render_kernel(signature, "sm90", changed)
        assert rendered.name not in names
        names.add(rendered.name)
        assert rendered.text != render_kernel(signature, "sm90", kernel).text
    assert len(names) == len(CASES) + 7


def test_a_missing_value_is_an_error(tmp_path):
    (tmp_path / "x.cu.j2").write_text("int a = {{ missing }};")
    with pytest.raises(RenderError, match="missing"):
        render_template("x.cu.j2", {}, tmp_path)
    with pytest.raises(RenderError, match=r"nothere\.cu\.j2"):
        render_template("nothere.cu.j2", {}, tmp_path)
    (tmp_path / "broken.cu.j2").write_text("{% if %}")
    with pytest.raises(RenderError, match="Syntax"):
        render_template("broken.cu.j2", {}, tmp_path)


def test_ampere_is_refused_until_it_exists():
    with pytest.raises(UnsupportedError, match="sm80"):
        render_kernel(CASES[0][0], "sm80", CASES[0][1])
