"""The example of the README, run as written there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_llama_blocks_train_as_the_unsharded_run(ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(ROOT / "examples" / "train_block.py")]
    done = subprocess.run(
        [*command, "--steps", "3"], capture_output=True, text=True, timeout=180, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"3 losses equal on {ranks} ranks" in done.stdout
    losses = {line.split("loss ")[1].split(",")[0] for line in done.stdout.splitlines()[:3]}
    assert len(losses) == 3, "the loss must move, or equality says nothing"
