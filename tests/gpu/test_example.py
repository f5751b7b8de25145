"""The README's example on one GPU, its ranks sharing it, with records for its shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fluxgen.core.config import RunConfig
from fluxgen.core.problem import Problem
from tests.gpu.ranks import (
    AG,
    AG_NK,
    RS,
    RS_NK,
    STORE,
    Environment,
    database,
    record,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("world", [2, 4])
def test_two_llama_blocks_train_on_the_fused_path(world: int) -> None:
    tokens, hidden, inter = 32 * world, 64, 96 * world
    heads = 4 * world
    assert hidden % heads == 0
    problems = [
        (AG, 3 * hidden // world, hidden),  # q, k and v
        (AG, 2 * inter // world, hidden),  # gate and up
        (RS, hidden, hidden // world),
        (RS, hidden, inter // world),
    ]
    records = [
        record(
            Problem(signature, tokens, n, k, world),
            AG_NK if signature is AG else RS_NK,
            RunConfig() if signature is AG else STORE,
        )
        for signature, n, k in problems
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world}", str(ROOT / "examples" / "train_block.py")]
    done = subprocess.run(
        [*command, "--steps", "3", "--device", "cuda"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **Environment(database(records))(0)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"3 losses equal on {world} ranks" in done.stdout
    qkv = f"ag_gemm/bfloat16/m{tokens}-n{3 * hidden // world}-k64-tp{world}"
    assert f"{qkv}: fused: " in done.stdout
    assert f"gemm_rs/bfloat16/m{tokens}-n64-k{inter // world}-tp{world}: fused: " in done.stdout
