"""GPU tests run where a GPU and the compiled kernels of ``build_out/gpu`` are."""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import pytest

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
# One thread queues the calls of all ranks of a LocalGroup: round the ring, with K chunks, hundreds
# of launches wait for the rank that is queued last. Tests of eight ranks timed out without this,
# and once with it, before LocalGroup kept to the hardware queues: that alone may do.
os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

TIERS = ("core", "full")
TIER = os.environ.get("FLUXGEN_GPU_TIER", "full")
"""Which kernels the tests run: see ``build_kernels``. Tests marked slow belong to the full tier."""
if TIER not in TIERS:
    raise pytest.UsageError(f"FLUXGEN_GPU_TIER: expected core or full; found {TIER!r}")

KERNELS = Path(os.environ.get("FLUXGEN_TEST_KERNELS", Path(__file__).parents[2] / "build_out/gpu"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test of this folder is a GPU test; without a GPU it is skipped and says so."""
    try:
        import torch

        missing = "" if torch.cuda.is_available() else "no CUDA GPU"
    except ImportError:
        missing = "torch is not installed"
    if not missing and not KERNELS.is_dir():
        missing = f"no compiled kernels in {KERNELS}: run `make gpu-kernels`"
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)
            late = TIER == "core" and item.get_closest_marker("slow") is not None
            if missing or late:
                reason = missing or "a test of the full tier"
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once why a test failed: a run on a GPU may be cut before its summary."""
    if report.failed and "tests/gpu" in report.nodeid:
        print(f"\n{report.nodeid}:\n{report.longreprtext[-1800:]}", flush=True)


@pytest.fixture(autouse=True)
def _watchdog():
    """A kernel whose flag never comes must not hang the run."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
