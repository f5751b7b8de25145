"""Templates to text: the only importer of Jinja2.

A rendered source only includes a header, names one configuration and exports it. Rendering is a
pure function of its arguments: the same call gives the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jinja2

from fluxgen.core.config import KernelConfig
from fluxgen.core.errors import RenderError, UnsupportedError
from fluxgen.core.problem import Signature
from fluxgen.core.settings import data_dir
from fluxgen.kernels.registry import ARCHS, family_of


@dataclass(frozen=True)
class Rendered:
    """One generated source.

    Attributes:
        name: file stem and kernel id, e.g. ``ag_gemm_bf16_sm90_128x192x64_2x1_pingpong_auto``.
        text: the ``.cu`` source.
        arch: ``sm90``.
        gemm: whether it is a fused GEMM, which does not depend on the support library's calls.
    """

    name: str
    text: str
    arch: str
    gemm: bool = False


def kernel_name(signature: Signature, arch: str, kernel: KernelConfig) -> str:
    """The id of a compiled kernel: everything that is compiled in, nothing else."""
    return f"{signature.name}_{arch}_{kernel.name}"


@lru_cache(maxsize=8)
def _environment(root: Path) -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(root),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701  C++, not HTML; every value is an int or from a fixed table
    )


def render_template(template: str, values: dict[str, object], root: Path | None = None) -> str:
    """Render one template with exactly ``values``.

    Raises:
        RenderError: the template is missing, broken, or uses a name that has no value.
    """
    try:
        return _environment(root or data_dir("templates")).get_template(template).render(values)
    except jinja2.TemplateError as error:
        raise RenderError(f"template {template}: {type(error).__name__}: {error}") from error


def render_kernel(
    signature: Signature, arch: str, kernel: KernelConfig, root: Path | None = None
) -> Rendered:
    """The source of one fused GEMM.

    Raises:
        UnsupportedError: no template for ``arch``. RenderError: see :func:`render_template`.
    """
    if arch not in ARCHS:
        raise UnsupportedError(f"arch {arch}: expected one of {', '.join(ARCHS)}")
    family = family_of(arch, kernel.schedule)
    if family is None:
        raise UnsupportedError(f"arch {arch}: has no schedule {kernel.schedule.value}")
    name, part = kernel_name(signature, arch, kernel), signature.compiled
    values: dict[str, object] = {
        "name": name,
        "header": family.header,
        "op": f"FLUXGEN_{part.op.value.upper()}",
        "element": part.dtype.cutlass,
        "b_transposed": "true" if part.b_layout == "kn" else "false",
        "tile_m": kernel.tile_m,
        "tile_n": kernel.tile_n,
        "tile_k": kernel.tile_k,
        "stages": kernel.stages,
        "before": family.before(kernel),
        "knobs": family.knobs(kernel),
    }
    return Rendered(name, render_template("gemm.cu.j2", values, root), arch, gemm=True)


def render_support(arch: str, root: Path | None = None) -> Rendered:
    """The source of the support kernels (begin, pull, reduce), one library per architecture."""
    name = f"support_{arch}"
    return Rendered(name, render_template("support.cu.j2", {"name": name}, root), arch)


def render_emulated_link(arch: str, root: Path | None = None) -> Rendered:
    """The source of the library that imitates a link where there is one GPU."""
    name = f"emulated_link_{arch}"
    return Rendered(name, render_template("emulated_link.cu.j2", {"name": name}, root), arch)
