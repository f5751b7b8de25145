"""Finding nvcc, CUTLASS and the host compiler; refusing what would fail later."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from fakecuda import Fake, make_cuda, make_cutlass

from fluxgen.compiler import toolchain as toolchain_module
from fluxgen.compiler.artifact import key_of
from fluxgen.compiler.toolchain import find
from fluxgen.core.errors import ToolchainError
from fluxgen.core.settings import Settings

WHEELS = {
    "nvidia-cuda-nvcc": "13.0.88",
    "nvidia-cuda-crt": "13.0.88",
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-cuda-cccl": "13.0.85",
    "nvidia-nvvm": "13.0.88",
}


def make_wheels(site: Path, root: str = "nvidia/cu13", **changes: str | None) -> Path:
    cuda = make_cuda(site / root)
    (cuda / "lib").mkdir()
    for name, version in (
        {**WHEELS, **{k.replace("_", "-"): v for k, v in changes.items()}}
    ).items():
        if version is not None:
            info = site / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
    return cuda


def test_order(fake: Fake) -> None:
    site = fake.base / "site"
    fake.search = (str(site),)
    wheel = make_wheels(site)
    assert fake.find().root == wheel
    system = make_cuda(fake.base / "usr-local-cuda")
    assert fake.find().root == system
    on_path = make_cuda(fake.base / "on-path")
    path = f"{fake.env['PATH']}:{on_path / 'bin'}"
    assert fake.find(PATH=path).root == on_path
    by_path = make_cuda(fake.base / "cuda-path")
    assert fake.find(PATH=path, CUDA_PATH=str(by_path)).root == by_path
    home = make_cuda(fake.base / "cuda-home")
    homes = {"PATH": path, "CUDA_PATH": str(by_path), "CUDA_HOME": str(home)}
    assert fake.find(**homes).root == home
    assert fake.find(**homes, FLUXGEN_NVCC=str(fake.cuda / "bin" / "nvcc")).root == fake.cuda
    # A CUDA_HOME with a runtime but no compiler is common; the search goes on.
    shutil.rmtree(home / "bin")
    assert fake.find(**homes).root == by_path


def test_facts(fake: Fake) -> None:
    found = fake.toolchain
    assert (found.version, found.cutlass_version) == ("13.0.88", "4.2.0")
    assert found.includes == (fake.cuda / "include", fake.cuda / "include" / "cccl")
    assert found.host == str(Path(fake.env["PATH"]) / "g++")
    assert "13.0.88" in found.identity and "compiler.1_0" in found.identity
    assert found.libraries == ()


def test_nothing_found_says_where_and_what_to_run(fake: Fake) -> None:
    with pytest.raises(ToolchainError) as error:
        fake.find(CUDA_HOME="/nowhere")
    text = str(error.value)
    assert "CUDA_HOME=/nowhere" in text and "PATH" in text and "usr-local-cuda" in text
    assert 'pip install "nvidia-cuda-nvcc==13.0.*"' in text and '"nvidia-nvvm==13.0.*"' in text


def test_given_nvcc_that_is_none_is_an_error_not_a_search(fake: Fake) -> None:
    make_cuda(fake.base / "usr-local-cuda")
    with pytest.raises(ToolchainError, match=r"FLUXGEN_NVCC.*'/nowhere/nvcc'"):
        fake.find(FLUXGEN_NVCC="/nowhere/nvcc")


@pytest.mark.parametrize(
    ("version", "want"), [("11.8.89", "12.0 or newer; found 11.8.89"), ("12.4.131", None)]
)
def test_age(fake: Fake, version: str, want: str | None) -> None:
    cuda = make_cuda(fake.base / "other", version)
    if want is None:
        assert fake.find(FLUXGEN_NVCC=str(cuda)).version == version
    else:
        with pytest.raises(ToolchainError, match=want):
            fake.find(FLUXGEN_NVCC=str(cuda))


def test_broken_nvcc(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    (fake.cuda / "broken").touch()
    with pytest.raises(ToolchainError, match="expected status 0; found 1"):
        _ = fake.toolchain
    (fake.cuda / "broken").unlink()
    (fake.cuda / "version.txt").write_text("hello")
    with pytest.raises(ToolchainError, match=r"'release X.Y, VX.Y.Z'; found 'hello'"):
        _ = fake.toolchain
    nvcc = fake.cuda / "bin" / "nvcc"
    nvcc.write_text("#!/no/such/interpreter\n")
    with pytest.raises(ToolchainError, match="cannot be run"):
        _ = fake.toolchain
    nvcc.write_text("#!/bin/sh\n/bin/sleep 60 &\n/bin/sleep 60\n")
    monkeypatch.setattr(toolchain_module, "_PROBE_S", 0.3)
    with pytest.raises(ToolchainError, match=r"no answer in 0.3 s"):
        _ = fake.toolchain


def test_wrapper_on_path_leads_to_the_same_identity(fake: Fake) -> None:
    wrapper = fake.base / "tools" / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec "{fake.cuda / "bin" / "nvcc"}" "$@"\n')
    wrapper.chmod(0o755)
    found = fake.find()
    assert found.nvcc == wrapper and found.root == fake.cuda
    assert found.includes == fake.toolchain.includes
    assert found.identity == fake.toolchain.identity


def test_spelling_of_cuda_home_does_not_change_the_key_but_the_version_does(fake: Fake) -> None:
    # L05
    link = fake.base / "cuda-link"
    link.symlink_to(fake.cuda)
    source = fake.source()
    spellings = [str(fake.cuda), str(link), f"{link}/", f"{fake.base}/./tools/../cuda"]
    keys = {key_of(source, fake.find(CUDA_HOME=spelling)) for spelling in spellings}
    assert len(keys) == 1
    (fake.cuda / "version.txt").write_text("release 13.1, V13.1.2\nBuild b\n")
    keys.add(key_of(source, fake.find(CUDA_HOME=str(link))))
    assert len(keys) == 2
    link.unlink()
    link.symlink_to(make_cuda(fake.base / "cuda-12", "12.9.1"))
    keys.add(key_of(source, fake.find(CUDA_HOME=str(link))))
    assert len(keys) == 3


def test_wheels_give_their_library_directory(fake: Fake) -> None:
    cuda = make_wheels(fake.base / "site")
    found = fake.find(FLUXGEN_NVCC=str(cuda))
    assert found.libraries == (cuda / "lib",)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"nvidia_nvvm": "13.5.14"}, "one minor version.*nvidia-nvvm 13.5.14"),
        ({"nvidia_cuda_crt": "13.1.80"}, "one minor version.*nvidia-cuda-crt 13.1.80"),
        ({"nvidia_cuda_cccl": None}, "nvidia-cuda-cccl missing"),
    ],
)
def test_wheels_that_do_not_fit(fake: Fake, changes: dict[str, str | None], want: str) -> None:
    cuda = make_wheels(fake.base / "site", **changes)
    with pytest.raises(ToolchainError, match=want) as error:
        fake.find(CUDA_HOME=str(cuda))
    assert '"nvidia-nvvm==13.0.*"' in str(error.value)


def test_wheels_of_cuda_12(fake: Fake) -> None:
    site = fake.base / "site"
    fake.search = (str(site),)
    cuda = make_cuda(site / "nvidia" / "cuda_nvcc", "12.8.93")
    (cuda / "include" / "cuda_runtime.h").unlink()
    for part in ("cuda_runtime", "cuda_cccl"):
        (site / "nvidia" / part / "include").mkdir(parents=True)
    (site / "nvidia" / "cuda_runtime" / "include" / "cuda_runtime.h").touch()
    for name in ("nvidia_cuda_nvcc_cu12", "nvidia_cuda_runtime_cu12", "nvidia_cuda_cccl_cu12"):
        info = site / f"{name}-12.8.93.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 12.8.93\n")
    found = fake.find()
    assert found.version == "12.8.93"
    assert site / "nvidia" / "cuda_runtime" / "include" in found.includes


def test_no_cuda_headers(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/usr/include/cuda_runtime.h").exists():
        pytest.skip("this machine has CUDA's headers in /usr/include")
    (fake.cuda / "include" / "cuda_runtime.h").unlink()
    with pytest.raises(ToolchainError, match=r"expected cuda_runtime\.h in"):
        _ = fake.toolchain


def test_no_host_compiler(fake: Fake) -> None:
    (fake.base / "tools" / "g++").unlink()
    with pytest.raises(ToolchainError, match=r"expected g\+\+.*apt-get install g\+\+"):
        _ = fake.toolchain
    with pytest.raises(ToolchainError, match="expected clang-99 \\(NVCC_CCBIN\\)"):
        fake.find(FLUXGEN_NVCC=str(fake.cuda), NVCC_CCBIN="clang-99")


@pytest.mark.parametrize(
    ("version", "fits"),
    [("3.9.2", False), ("4.1.0", False), ("4.2.0", True), ("4.3.1", True), ("5.0.0", False)],
)
def test_cutlass_version(fake: Fake, version: str, fits: bool) -> None:
    # L11
    include = make_cutlass(fake.base / "other" / "include", version)
    for given in (include, include.parent):
        if fits:
            found = fake.find(FLUXGEN_NVCC=str(fake.cuda), FLUXGEN_CUTLASS=str(given))
            assert (found.cutlass, found.cutlass_version) == (include, version)
        else:
            with pytest.raises(ToolchainError, match=f"found {version}.*nvidia-cutlass==4.2.0.0"):
                fake.find(FLUXGEN_NVCC=str(fake.cuda), FLUXGEN_CUTLASS=str(given))


def test_cutlass_missing_or_unreadable(fake: Fake) -> None:
    with pytest.raises(ToolchainError, match="FLUXGEN_CUTLASS=/nowhere; found none"):
        fake.find(FLUXGEN_NVCC=str(fake.cuda), FLUXGEN_CUTLASS="/nowhere")
    with pytest.raises(ToolchainError, match="pip install nvidia-cutlass"):
        fake.find(FLUXGEN_NVCC=str(fake.cuda), FLUXGEN_CUTLASS="")
    header = Path(fake.env["FLUXGEN_CUTLASS"]) / "cutlass" / "version.h"
    header.write_text("#define CUTLASS_MAJOR 4\n")
    with pytest.raises(ToolchainError, match="expected CUTLASS_MINOR"):
        _ = fake.toolchain


def test_cutlass_wheel_is_found_without_importing_it(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = fake.base / "site"
    include = make_cutlass(site / "cutlass_library" / "source" / "include")
    (site / "cutlass_library" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    for name in [n for n in sys.modules if n.split(".")[0] == "cutlass_library"]:
        monkeypatch.delitem(sys.modules, name)
    env = {**fake.env, "FLUXGEN_CUTLASS": "", "FLUXGEN_NVCC": str(fake.cuda)}
    assert find(Settings.load(env), env).cutlass == include
    assert "cutlass_library" not in sys.modules
