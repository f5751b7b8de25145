"""nvcc from PyPI: where its wheels put it, and whether they fit each other."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from pathlib import Path

from fluxgen.core.errors import ToolchainError

# CUDA 13 wheels share one root; 12.x has a directory a wheel, and names that end in -cu12.
_PARTS_13 = (
    "nvidia-cuda-nvcc",
    "nvidia-cuda-crt",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
    "nvidia-nvvm",
)
_PARTS_12 = ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-runtime-cu12", "nvidia-cuda-cccl-cu12")

INSTALL = "pip install " + " ".join(f'"{part}==13.0.*"' for part in _PARTS_13)
"""The command that installs a compiler that works, all parts of one minor version."""


def candidates(search: Sequence[str]) -> list[Path]:
    """Every nvcc that wheels may have put below the directories of ``search``, newest first."""
    found: list[Path] = []
    for entry in search:
        base = Path(entry or ".").absolute() / "nvidia"
        roots = sorted(base.glob("cu[0-9]*"), key=_number, reverse=True)
        found += [root / "bin" / "nvcc" for root in roots]
        found.append(base / "cuda_nvcc" / "bin" / "nvcc")
    return [path for path in found if path.is_file()]


def _number(root: Path) -> int:
    digits = re.sub(r"\D", "", root.name)
    return int(digits) if digits else 0


def site_of(root: Path) -> Path | None:
    """The site-packages that ``root`` (the directory over ``bin/nvcc``) came to by a wheel."""
    if root.parent.name != "nvidia":
        return None
    site = root.parent.parent
    return site if any(site.glob("nvidia_cuda_nvcc*.dist-info")) else None


def folders(root: Path, kind: str) -> list[Path]:
    """The ``include`` or ``lib`` directories of the wheels that ``root`` belongs to."""
    parts = [root]
    if root.name == "cuda_nvcc":
        parts += [root.parent / "cuda_runtime", root.parent / "cuda_cccl"]
    return [part / kind for part in parts if (part / kind).is_dir()]


def check(root: Path, site: Path) -> None:
    """Refuse a set of wheels that do not fit each other.

    pip left alone mixes minor versions (nvcc asks for nvvm without a bound), and then ptxas stops
    with "Unsupported .version 9.5", which says nothing of the cause.

    Raises:
        ToolchainError: a part is missing or of another minor version; holds the pip command.
    """
    wanted = _PARTS_12 if root.name == "cuda_nvcc" else _PARTS_13
    versions = {}
    for dist in importlib.metadata.distributions(path=[str(site)]):
        name = re.sub(r"[-_.]+", "-", str(dist.metadata["Name"] or "")).lower()
        if name in wanted:
            versions[name] = dist.version
    minor = _minor(versions.get(wanted[0], ""))
    pins = " ".join(f'"{part}=={minor}.*"' for part in wanted) if minor else ""
    command = f"pip install {pins}" if pins else INSTALL
    missing = [part for part in wanted if part not in versions]
    if missing:
        raise ToolchainError(
            f"CUDA wheels in {site}: expected {', '.join(wanted)}; "
            f"{', '.join(missing)} missing. Run: {command}"
        )
    if any(_minor(version) != minor for version in versions.values()):
        found = ", ".join(f"{part} {versions[part]}" for part in wanted)
        raise ToolchainError(
            f"CUDA wheels in {site}: expected one minor version for all parts; found {found}. "
            f"Run: {command}"
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2]) if version else ""
