"""What commands share: their options, their output, and what an option names."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fluxgen.codegen.space import kernel_space, why_illegal_kernel
from fluxgen.core.config import KernelConfig
from fluxgen.core.dtypes import DType
from fluxgen.core.errors import DatabaseError, ToolchainError, UnsupportedError, UsageError
from fluxgen.core.op import Op
from fluxgen.core.problem import MAX_WORLD, Signature, check_int
from fluxgen.core.settings import Settings, data_dir
from fluxgen.core.topology import Gpu, LinkKind, Topology, parse_gpu

if TYPE_CHECKING:
    from fluxgen.tune import CompiledKernels, Evaluator

DEFAULT_TOKENS = "512,1024,2048,4096,8192,16384"
MAX_KERNELS = 24

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Model = Annotated[
    str, typer.Option("--model", help="An HF config.json, its directory, or a preset's name.")
]
Tp = Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.")]
Target = Annotated[
    str, typer.Option("--target", help="A GPU by name or by properties, or auto for this machine.")
]
Link = Annotated[
    str, typer.Option("--link", help="nvlink, pcie, or host: no peer access; pcie2: two sockets.")
]
Tokens = Annotated[str, typer.Option("--tokens", help="Global token counts m, comma-separated.")]
Ops = Annotated[str, typer.Option("--ops", help="Ops, comma-separated; gemm_ar too.")]
Dtype = Annotated[str, typer.Option("--dtype", help="bf16 or fp16.")]
Training = Annotated[
    bool, typer.Option("--training", help="Also the GEMMs of the backward, with (k, n) weights.")
]
CompiledOnly = Annotated[
    bool, typer.Option("--compiled-only", help="Measure only kernels that are compiled.")
]
Db = Annotated[Path | None, typer.Option("--db", help="Tuning database file.")]

# Piped into a file or a pager, a table is as wide as it needs; a terminal has its own width.
stdout = Console(width=None if sys.stdout.isatty() else 160)
stderr = Console(stderr=True)


def say(text: str) -> None:
    """One line for people, beside whatever stdout holds."""
    stderr.print(escape(text), highlight=False, soft_wrap=True)


def emit(document: object) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, indent=2, sort_keys=True, allow_nan=False))


def integers(name: str, text: str) -> tuple[int, ...]:
    """Different integers of a comma-separated option.

    Raises:
        UsageError: it is something else, or empty.
    """
    try:
        values = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        values = ()
    if not values:
        raise UsageError(f"{name}: expected comma-separated integers; found {text!r}")
    return tuple(dict.fromkeys(values))


def named_ops(text: str) -> tuple[Op, ...]:
    """Different ops of a comma-separated option."""
    return tuple(dict.fromkeys(Op.parse(part) for part in text.split(",") if part.strip()))


def named_gpu(name: str, tp: int) -> Gpu:
    """The GPU that ``--target`` names.

    Raises:
        UsageError: nobody knows it, or ``auto`` finds none, or fewer than ``tp``.
    """
    if name.strip().lower() != "auto":
        return parse_gpu(name)
    from fluxgen.machine.device import devices

    visible = devices()
    if not visible:
        raise UsageError("target auto: the driver sees no GPU; name the target with --target")
    if 1 < len(visible) < tp:
        raise UsageError(
            f"tp: expected at most the {len(visible)} visible GPUs with --target auto; found {tp}. "
            "To tune for another machine, name its GPU with --target"
        )
    return visible[0].gpu


def named_topology(target: str, link: str, tp: int) -> Topology:
    """The topology that ``--target``, ``--link`` and ``--tp`` name.

    Raises:
        UsageError: there is none such, or this machine has not that link.
    """
    check_int("tp", tp, 1, MAX_WORLD)
    topology = Topology.of(named_gpu(target, tp), link, tp)
    if target.strip().lower() == "auto" and topology.link is LinkKind.NVLINK:
        _check_nvlink(tp)
    return topology


def _check_nvlink(tp: int) -> None:
    """Refuse to tune for a link that the GPUs of this machine do not have."""
    from fluxgen.machine.device import devices
    from fluxgen.machine.wiring import nvlinked

    if nvlinked([device.address for device in devices()[:tp]]) is False:
        raise UsageError(
            "link: expected pcie with --target auto: NVLink does not join every two of this "
            f"machine's first {tp} GPUs; found nvlink. To tune for another machine, name its GPU "
            "with --target"
        )


@contextmanager
def progress_bar(title: str) -> Iterator[tuple[Progress, Any]]:
    """A bar on stderr, and its task."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:g}/{task.total:g} {task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr, transient=not stderr.is_terminal) as bar:
        yield bar, bar.add_task(title, total=1, note="")


@contextmanager
def named_evaluator(
    name: str, topology: Topology, jobs: int | None = None, compiled_only: bool = False
) -> Iterator[tuple[Evaluator, CompiledKernels | None]]:
    """The evaluator, and for one that runs kernels what compiles them; both end with the block."""
    from fluxgen import tune as tuning
    from fluxgen.tune.evaluators.process import ProcessEvaluator

    with ExitStack() as stack:
        compiled = None
        if tuning.resolve(name, topology) == "device" and tuning.can_measure(topology):
            compiled = stack.enter_context(compiled_kernels(topology.gpu, jobs, compiled_only))
        judge = tuning.make_evaluator(name, topology)
        if isinstance(judge, ProcessEvaluator):
            stack.enter_context(judge)
        yield judge, compiled


def compiled_kernels(gpu: Gpu, jobs: int | None, compiled_only: bool) -> CompiledKernels:
    """What the device evaluator runs: compiled as needed, where there is a compiler."""
    from fluxgen.compiler import toolchain
    from fluxgen.compiler.store import Store
    from fluxgen.tune import CompiledKernels

    tools = None
    if not compiled_only:
        try:
            tools = toolchain.find()
        except ToolchainError as error:
            raise UsageError(
                f"{error}\nor pass --compiled-only: measure the kernels that are compiled already"
            ) from None
    return CompiledKernels(f"sm{gpu.cc}", Store(), tools, jobs)


def require_kernels(gpu: Gpu, dtype: str) -> None:
    """Refuse a GPU or type that no kernel can be generated for."""
    signature = Signature.of(Op.AG_GEMM, DType.parse(dtype))
    if next(kernel_space(signature, gpu), None) is None:
        reason = why_illegal_kernel(signature, gpu, KernelConfig(128, 128, 64))
        raise UnsupportedError(f"target {gpu.name}: {reason}")


def require_database(db: Path | None) -> None:
    """A database that is named has to be there; the user's own may not be yet."""
    if db is not None and not db.is_file():
        raise DatabaseError(f"{db}: no such tuning database; tune first, or check the path")


def known_records(packs: Path | None, db: Path | None) -> list[Any]:
    """Records of packs, or of the database and, without ``--db``, of the shipped packs."""
    from fluxgen.db.packs import pack_files, read_pack

    records = [] if packs is not None else list(open_database(db).records())
    if packs is not None or db is None:
        for path in pack_files(packs or data_dir("tuning_db")):
            records += read_pack(path)
    return records


def open_database(path: Path | None) -> Any:
    """The named database, or the user's."""
    from fluxgen.db.database import Database

    return Database(path or Settings.load().db)


def write_file(path: Path, text: str) -> None:
    """Write a file whole.

    Raises:
        UsageError: it cannot be written.
    """
    from fluxgen.compiler.generated import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None
