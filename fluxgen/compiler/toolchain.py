"""Find nvcc, the host compiler and CUTLASS, and refuse what would fail later.

nvcc is looked for in this order: ``FLUXGEN_NVCC``, ``CUDA_HOME`` and ``CUDA_PATH``, ``PATH``,
``/usr/local/cuda``, the PyPI wheels.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fluxgen.compiler import process, wheels
from fluxgen.compiler.headers import find_cutlass
from fluxgen.core.errors import ToolchainError
from fluxgen.core.settings import Settings

OLDEST = (12, 0)
"""The first CUDA release that knows sm_90a."""

_PROBE_S = 60.0


@dataclass(frozen=True)
class Toolchain:
    """A compiler that has been found and checked.

    Attributes:
        nvcc: what is run.
        version: nvcc's, e.g. ``13.0.88``.
        includes: CUDA's include directories.
        cutlass, cutlass_version: CUTLASS' include directory and version.
        host: path of the host C++ compiler.
        build: nvcc's build line, which tells two builds of one version apart.
        root: the installation, links resolved; the same for all spellings of it.
        libraries: directories with CUDA's link libraries that nvcc does not know by itself.
    """

    nvcc: Path
    version: str
    includes: tuple[Path, ...]
    cutlass: Path
    cutlass_version: str
    host: str
    build: str = ""
    root: Path | None = None
    libraries: tuple[Path, ...] = ()

    @property
    def identity(self) -> str:
        """What the store's key holds of the toolchain.

        The host compiler is left out: it sees a plain C interface and launches, no device code.
        """
        root = self.root or self.nvcc.resolve().parent.parent
        return f"nvcc {self.version} ({self.build}) at {root}; cutlass {self.cutlass_version}"


def find(
    settings: Settings | None = None,
    env: Mapping[str, str] | None = None,
    *,
    search: Sequence[str] | None = None,
    system: Path = Path("/usr/local/cuda"),
) -> Toolchain:
    """The toolchain of this machine.

    Args:
        settings: ``None`` for :meth:`Settings.load` of ``env``.
        env: the environment to look in, ``None`` for the process's.
        search: where wheels are looked for, ``None`` for ``sys.path``.
        system: the system-wide installation.

    Raises:
        ToolchainError: something is missing or unfit; says what, and the command that gets it.
    """
    environ = os.environ if env is None else env
    the_settings = Settings.load(environ) if settings is None else settings
    path = _find_nvcc(the_settings, environ, sys.path if search is None else search, system)
    tool_env = process.clean_env(environ)
    version, build = _version(path, tool_env)
    root, known = _root(path, tool_env)
    site = wheels.site_of(root)
    if site is not None:
        wheels.check(root, site)
    host = _host(environ)
    cutlass, cutlass_version = find_cutlass(the_settings.cutlass, search)
    return Toolchain(
        nvcc=path,
        version=version,
        includes=_includes(root, known),
        cutlass=cutlass,
        cutlass_version=cutlass_version,
        host=host,
        build=build,
        root=root,
        # nvcc.profile names lib64, which wheels do not have: without -L ld finds no cudart_static.
        libraries=tuple(wheels.folders(root, "lib")) if site is not None else (),
    )


def _find_nvcc(
    settings: Settings, env: Mapping[str, str], search: Sequence[str], system: Path
) -> Path:
    if settings.nvcc:
        given = Path(settings.nvcc).expanduser().absolute()
        for path in (given, given / "nvcc", given / "bin" / "nvcc"):
            if _runnable(path):
                return _direct(path)
        raise ToolchainError(
            f"FLUXGEN_NVCC: expected an nvcc that can be run, or a CUDA directory; found "
            f"{settings.nvcc!r}. Correct it, or unset it to search for nvcc."
        )
    looked: list[str] = []
    for where, found in _candidates(env, search, system):
        if found is not None and _runnable(found):
            return _direct(found)
        looked.append(where)
    raise ToolchainError(
        f"nvcc: expected one in FLUXGEN_NVCC or in any of: {'; '.join(looked)}; found none. "
        f"Run: {wheels.INSTALL}"
    )


def _candidates(
    env: Mapping[str, str], search: Sequence[str], system: Path
) -> Iterator[tuple[str, Path | None]]:
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(name):
            yield f"{name}={env[name]}", Path(env[name]).absolute() / "bin" / "nvcc"
        else:
            yield f"{name} (not set)", None
    on_path = shutil.which("nvcc", path=env.get("PATH", os.defpath))
    yield "PATH", Path(on_path).absolute() if on_path else None
    yield str(system), system / "bin" / "nvcc"
    for path in wheels.candidates(search):
        yield f"the wheel at {path}", path
    yield "the nvidia-cuda-nvcc wheel", None


def _runnable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _direct(path: Path) -> Path:
    # A link named nvcc may lead to ccache, which must be called by the link's name.
    real = path.resolve()
    return real if real.name.startswith("nvcc") else path


def _version(nvcc: Path, env: Mapping[str, str]) -> tuple[str, str]:
    text = _probe([str(nvcc), "--version"], env)
    match = re.search(r"release (\d+)\.(\d+), V([\d.]+)", text)
    if match is None:
        raise ToolchainError(
            f"{nvcc} --version: expected 'release X.Y, VX.Y.Z'; found {text.strip()[:200]!r}. "
            f"Repair this CUDA installation, or set FLUXGEN_NVCC to another nvcc."
        )
    if (int(match[1]), int(match[2])) < OLDEST:
        raise ToolchainError(
            f"nvcc: expected CUDA {OLDEST[0]}.{OLDEST[1]} or newer; found {match[3]} at {nvcc}. "
            f"Set FLUXGEN_NVCC to a newer one, or run: {wheels.INSTALL}"
        )
    build = re.search(r"^Build (\S+)", text, re.MULTILINE)
    return match[3], build[1] if build else ""


def _root(nvcc: Path, env: Mapping[str, str]) -> tuple[Path, list[Path]]:
    # nvcc on PATH may be a small script that starts another; a dry run tells where that one is.
    text = _probe([str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull], env)
    here = re.search(r"^#\$ _HERE_=(.+)$", text, re.MULTILINE)
    line = re.search(r"^#\$ INCLUDES=(.+)$", text, re.MULTILINE)
    known = [Path(item) for item in re.findall(r'"-I([^"]+)"', line[1] if line else "")]
    if here and Path(here[1]).is_dir():
        return Path(here[1]).resolve().parent, known
    return nvcc.resolve().parent.parent, known


def _probe(args: list[str], env: Mapping[str, str]) -> str:
    advice = "Repair this CUDA installation, or set FLUXGEN_NVCC to another nvcc."
    try:
        status, text = process.capture(args, env=env, timeout=_PROBE_S)
    except OSError as error:
        raise ToolchainError(f"{args[0]}: cannot be run: {error}. {advice}") from error
    except process.Expired as error:
        raise ToolchainError(
            f"{args[0]} {args[1]}: no answer in {_PROBE_S:g} s. {advice}"
        ) from error
    if status != 0:
        raise ToolchainError(
            f"{' '.join(args[:2])}: expected status 0; found {status}: "
            f"{text.strip()[:300] or 'no output'}. {advice}"
        )
    return text


def _includes(root: Path, known: Sequence[Path]) -> tuple[Path, ...]:
    bases = wheels.folders(root, "include")
    # Distributions' packages keep the headers in /usr/include, which must not be passed on: as
    # -isystem it comes before the C++ library's own directories and breaks #include_next.
    anywhere = [*bases, *known, Path("/usr/include")]
    if not any((base / "cuda_runtime.h").is_file() for base in anywhere):
        raise ToolchainError(
            f"CUDA headers: expected cuda_runtime.h in {root / 'include'}; found none. "
            f"Install the CUDA runtime's development files beside nvcc, or run: {wheels.INSTALL}"
        )
    inner = [base / "cccl" for base in bases if (base / "cccl").is_dir()]
    return tuple(base for base in bases + inner if base != Path("/usr/include"))


def _host(env: Mapping[str, str]) -> str:
    name = env.get("NVCC_CCBIN") or "g++"
    found = shutil.which(name, path=env.get("PATH", os.defpath))
    if found is None:
        source = "NVCC_CCBIN" if env.get("NVCC_CCBIN") else "PATH"
        raise ToolchainError(
            f"host compiler: expected {name} ({source}); found none. "
            f"Run: apt-get install g++ (or set NVCC_CCBIN to a C++17 compiler)"
        )
    return str(Path(found).absolute())
