"""The package's front: light to import, PyTorch only when asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fluxgen


def test_the_pytorch_side_is_reached_by_name():
    pytest.importorskip("torch")
    from fluxgen.runtime import ops
    from fluxgen.runtime.session import dispatch

    assert fluxgen.all_gather_matmul is ops.all_gather_matmul
    assert fluxgen.matmul_reduce_scatter is ops.matmul_reduce_scatter
    assert fluxgen.explain is dispatch.explain
    assert fluxgen.strict is dispatch.strict
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = fluxgen.nothing_such


def test_lookup_imports_neither_torch_nor_optuna():
    code = (
        "import sys, fluxgen\n"
        "found = fluxgen.lookup('ag_gemm', 4096, 3584, 4096, tp=8, target='h100-sxm')\n"
        "print(found.reason.value, [m for m in ('torch', 'optuna') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split(" ", 1)[1].strip() == "[]"


def test_no_folder_of_tests_is_passed_over(request):
    """pytest's own list of folders to skip holds "dist", which are tests here."""
    from pathlib import Path

    root = Path(__file__).parents[2]
    folders = {path.parent.name for path in root.rglob("test_*.py")}
    assert {"dist", "nvcc", "gpu"} <= folders
    assert not folders & set(request.config.getini("norecursedirs"))


def test_a_folder_of_many_files_has_a_reason():
    """Where more than twelve lie side by side, docs/architecture.md says why."""
    from pathlib import Path

    root = Path(__file__).parents[3]
    reasons = (root / "docs/architecture.md").read_text().split("## Folders with many files")[1]
    skipped = (".", "__pycache__", "build_out", "tuning_db")
    folders: dict[str, int] = {}
    for path in root.rglob("*"):
        parts = path.relative_to(root).parts
        if path.is_file() and not any(part.startswith(skipped) for part in parts):
            folder = "/".join(parts[:-1])
            folders[folder] = folders.get(folder, 0) + (path.name != "__init__.py")
    many = {folder for folder, count in folders.items() if folder and count > 12}
    assert {"fluxgen/shapes", "tests/dist"} <= many
    unexplained = [folder for folder in sorted(many) if f"`{folder}`" not in reasons]
    assert not unexplained
