"""Compile the host driver once per session and expose it through ctypes."""

from __future__ import annotations

import ctypes as ct
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np

from fluxgen.core.settings import data_dir


@lru_cache(maxsize=1)
def driver() -> ct.CDLL:
    """The driver, compiled with all warnings as errors."""
    compiler = shutil.which("g++")
    assert compiler, "g++ is needed: it compiles the device headers for the host"
    out = Path(mkdtemp(prefix="fluxgen-host-")) / "driver.so"
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-O2",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-shared",
            "-fPIC",
            "-pthread",
            f"-I{data_dir('templates') / 'include'}",
            str(Path(__file__).with_name("host_driver.cpp")),
            "-o",
            str(out),
        ],
        check=True,
    )
    lib = ct.CDLL(str(out))
    lib.walk.restype = ct.c_int64
    lib.walk_flat.restype = ct.c_int64
    lib.run_ranks.restype = ct.c_int64
    lib.run_packets.restype = ct.c_int64
    lib.expire_packets.restype = ct.c_int64
    lib.expire.restype = ct.c_int64
    lib.layout.restype = ct.c_int64
    return lib


def walk(op, world, rank, tiles_m, tiles_n, panel=0, groups=(), cluster_m=1):
    """Clusters of the walk, and (m, n, l) of every block, (clusters, cluster_m, 3)."""
    array = (ct.c_int32 * max(1, len(groups)))(*groups)
    fixed = (op, world, rank, ct.c_int64(tiles_m), ct.c_int64(tiles_n), cluster_m, panel)
    count = driver().walk(*fixed, array, len(groups), None)
    out = np.full((count, cluster_m, 3), -7, dtype=np.int32)
    assert driver().walk(*fixed, array, len(groups), out.ctypes.data_as(ct.c_void_p)) == count
    return count, out
