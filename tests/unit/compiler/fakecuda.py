"""A pretended CUDA installation whose nvcc does what the source's ``// FAKE`` lines ask for."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fluxgen
from fluxgen.compiler.nvcc import Source
from fluxgen.compiler.store import Store
from fluxgen.compiler.toolchain import Toolchain, find
from fluxgen.core.settings import Settings

REPO = Path(fluxgen.__file__).parent.parent

# PATH holds nothing but g++ here, so the shell's own commands must do.
NVCC = r"""#!/bin/sh
root=$(cd -P "${0%/*}/.." && pwd -P)
case "$1" in
--version)
    while IFS= read -r line || [ -n "$line" ]; do echo "$line"; done < "$root/version.txt"
    [ ! -e "$root/broken" ]; exit ;;
--dryrun) echo "#\$ _HERE_=$root/bin"; exit ;;
esac
exec "{python}" -SE "$root/bin/fake.py" "$@"
""".replace("{python}", sys.executable)

COMPILE = r'''
import os, signal, subprocess, sys, time
root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
def at(name): return os.path.join(root, name)
def append(name, text):
    fd = os.open(at(name), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, (text + "\n").encode()); os.close(fd)
append("calls", str(os.getpid()))
append("args", "\x1f".join(sys.argv[1:]))
append("environ", "\x1f".join(sorted(os.environ)))
arch = [a for a in sys.argv if a.startswith("-gencode")][0].rsplit("sm_", 1)[1].strip("]")
text = open("kernel.cu", encoding="utf-8").read()
open(os.path.join(os.environ["TMPDIR"], "tmpxft"), "w").write("x")
print("ptxas info    : 24 bytes gmem")
spill = (0, 0)
todo = [l[8:].split(" ", 1) for l in text.splitlines() if l.startswith("// FAKE ")]
for what, *rest in todo:
    arg = rest[0] if rest else ""
    if what == "sleep": time.sleep(float(arg))
    elif what == "sleep_once":
        try: os.close(os.open(at("slept"), os.O_CREAT | os.O_EXCL))
        except FileExistsError: continue
        time.sleep(float(arg))
    elif what == "gate":
        # Until so many compile at once, or a file named so is there.
        end = time.monotonic() + 15
        while not (len(open(at("calls")).readlines()) >= int(arg) if arg.isdigit()
                   else os.path.exists(at(arg))):
            if time.monotonic() > end: print("error: nobody came"); sys.exit(3)
            time.sleep(0.01)
    elif what == "alone":
        try: os.mkdir(at("alone"))
        except FileExistsError: print("error: not alone"); sys.exit(3)
        time.sleep(float(arg)); os.rmdir(at("alone"))
    elif what == "child":
        child = subprocess.Popen(["sleep", arg]); append("calls", str(child.pid)); child.wait()
    elif what == "print": print(arg, flush=True)
    elif what == "exit": sys.exit(int(arg))
    elif what == "kill": os.kill(os.getpid(), signal.SIGKILL)
    elif what == "spill": spill = tuple(map(int, arg.split()))
    elif what == "nothing": sys.exit(0)
    elif what == "fill":
        try:
            with open("big", "wb") as f:
                while True: f.write(b"x" * 65536); f.flush()
        except OSError as e:
            print("kernel.cu: fatal error: cannot write: " + e.strerror); sys.exit(1)
print(f"""ptxas info    : Compiling entry function '_Z1kPf' for 'sm_{arch}'
ptxas info    : Function properties for _Z1kPf
    16 bytes stack frame, {spill[0]} bytes spill stores, {spill[1]} bytes spill loads
ptxas info    : Used 168 registers, used 10 barriers, 16 bytes stack, 1024 bytes smem""")
open("kernel.so", "wb").write(b"fake" + arch.encode() + text.encode())
'''


def make_cuda(root: Path, version: str = "13.0.88") -> Path:
    (root / "bin").mkdir(parents=True)
    (root / "include" / "cccl").mkdir(parents=True)
    (root / "include" / "cuda_runtime.h").touch()
    release = ".".join(version.split(".")[:2])
    (root / "version.txt").write_text(
        f"nvcc: NVIDIA (R) Cuda compiler driver\n"
        f"Cuda compilation tools, release {release}, V{version}\n"
        f"Build cuda_{release}.r{release}/compiler.1_0\n"
    )
    nvcc = root / "bin" / "nvcc"
    nvcc.write_text(NVCC)
    (root / "bin" / "fake.py").write_text(COMPILE)
    nvcc.chmod(0o755)
    return root


def make_cutlass(include: Path, version: str = "4.2.0") -> Path:
    (include / "cutlass").mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    lines = [f"#define CUTLASS_{name} {value}" for name, value in parts]
    (include / "cutlass" / "version.h").write_text("\n".join(lines) + "\n")
    return include


@dataclass
class Fake:
    """The pretended machine: CUDA, CUTLASS, g++, headers, a store."""

    base: Path
    cuda: Path
    env: dict[str, str]
    include: Path
    store: Store
    search: tuple[str, ...]

    def find(self, **changes: str) -> Toolchain:
        env = {**self.env, **changes}
        return find(
            Settings.load(env),
            env,
            search=list(self.search),
            system=self.base / "usr-local-cuda",
        )

    @property
    def toolchain(self) -> Toolchain:
        return self.find(FLUXGEN_NVCC=str(self.cuda))

    def source(self, *lines: str, name: str = "kern", arch: str = "sm90") -> Source:
        fakes = "".join(f"// FAKE {line}\n" for line in lines)
        text = f'// {name}\n#include "fluxgen/abi.h"\n{fakes}'
        return Source.of(name, text, arch, include=self.include)

    def _lines(self, name: str) -> list[str]:
        path = self.cuda / name
        return path.read_text().splitlines() if path.exists() else []

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self._lines("calls")]

    @property
    def args(self) -> list[list[str]]:
        return [line.split("\x1f") for line in self._lines("args")]

    @property
    def environ(self) -> set[str]:
        return set(self._lines("environ")[-1].split("\x1f"))

    @property
    def published(self) -> list[Path]:
        return sorted(self.store.root.glob("??/*"))

    def leavings(self) -> list[Path]:
        return sorted(self.store.root.glob("tmp/*"))

    def spawn(self, code: str, *, drop_root: bool = False) -> subprocess.Popen[str]:
        """Python in another process, with ``store``, ``toolchain`` and ``source`` at hand."""
        prelude = f"""
import sys
from pathlib import Path
from fluxgen.compiler.builder import build_all
from fluxgen.compiler.nvcc import Source
from fluxgen.compiler.store import Store
from fluxgen.compiler.toolchain import find
from fluxgen.core.settings import Settings
env = {self.env!r} | {{"FLUXGEN_NVCC": {str(self.cuda)!r}}}
def toolchain():
    return find(Settings.load(env), env, search=[])
def source(*lines, name="kern"):
    fakes = "".join(f"// FAKE {{line}}\\n" for line in lines)
    text = f'// {{name}}\\n#include "fluxgen/abi.h"\\n{{fakes}}'
    return Source.of(name, text, "sm90", include=Path({str(self.include)!r}))
store = Store(Path({str(self.store.root)!r}))
"""
        return subprocess.Popen(
            [*(_no_override() if drop_root else []), sys.executable, "-c", prelude + code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPO)},
        )


def _no_override() -> list[str]:
    """A prefix under which root, too, is bound by modes."""
    if os.geteuid() != 0:
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("root is not bound by modes, and there is no setpriv to change that")
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "condition never came true"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead but not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Fake]:
    base = tmp_path / "größe und raum"
    tools = base / "tools"
    tools.mkdir(parents=True)
    host = tools / "g++"
    host.write_text("#!/bin/sh\n")
    host.chmod(0o755)
    include = base / "headers"
    (include / "fluxgen").mkdir(parents=True)
    (include / "fluxgen" / "abi.h").write_text("#define ABI 1\n")
    cutlass = make_cutlass(base / "cutlass" / "include")
    env = {"PATH": str(tools), "HOME": str(base), "FLUXGEN_CUTLASS": str(cutlass)}
    made = Fake(base, make_cuda(base / "cuda"), env, include, Store(base / "store"), ())
    yield made
    for pid in made.pids:
        if alive(pid) and str(made.cuda).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
