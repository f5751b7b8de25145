"""What the log of nvcc says: ptxas' facts of each kernel, the first error, the cause of death."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class PtxasFacts:
    """What ptxas reports of one kernel; bytes are a thread's, ``smem`` a block's.

    Attributes:
        kernel: mangled name. arch: e.g. ``sm_90a``.
        registers, barriers, stack, spill_stores, spill_loads, smem: as reported; functions that
            the kernel calls are counted in.
        warnings: codes of performance warnings, e.g. ``C7508`` (setmaxnreg ignored).
    """

    kernel: str
    arch: str
    registers: int = 0
    barriers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    smem: int = 0
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "warnings": list(self.warnings)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> PtxasFacts:
        """Read what :meth:`to_dict` wrote; TypeError or KeyError for anything else."""
        return cls(**{**data, "warnings": tuple(data["warnings"])})


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SMEM = re.compile(r"(\d+) bytes smem")
_CODE = re.compile(r"\((C\d{4})\)")
_IN_FUNCTION = re.compile(r"function '([^']+)'")


def parse_facts(log: str) -> tuple[PtxasFacts, ...]:
    """The facts of every kernel in a log of ``-Xptxas=-v``, in the order of the log."""
    facts: list[PtxasFacts] = []
    early: list[tuple[str, str]] = []
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            facts.append(PtxasFacts(entry[1], entry[2]))
        if "ptxas" in line and (code := _CODE.search(line)):
            named = _IN_FUNCTION.search(line)
            early.append((named[1] if named else "", code[1]))
        if not facts:
            continue
        last = facts[-1]
        if stack := _STACK.search(line):
            facts[-1] = replace(
                last,
                stack=last.stack + int(stack[1]),
                spill_stores=last.spill_stores + int(stack[2]),
                spill_loads=last.spill_loads + int(stack[3]),
            )
        elif used := _USED.search(line):
            barriers, smem = _BARRIERS.search(line), _SMEM.search(line)
            facts[-1] = replace(
                last,
                registers=int(used[1]),
                barriers=int(barriers[1]) if barriers else 0,
                smem=int(smem[1]) if smem else 0,
            )
    return tuple(_with_warnings(fact, early) for fact in facts)


def _with_warnings(fact: PtxasFacts, found: Iterable[tuple[str, str]]) -> PtxasFacts:
    # A warning that names no kernel of this log is charged to all: better one too many.
    codes = {code for name, code in found if name in ("", fact.kernel)}
    return replace(fact, warnings=tuple(sorted(codes)))


def serialised_wgmma(log: str) -> tuple[tuple[str, str], ...]:
    """(code, function) of each warning that wgmma is serialised; function "" if not named.

    ptxas has a code for each cause (C7510 for touched accumulators, C7511 for lack of registers,
    and more), so the sentence is what counts.
    """
    found = []
    for line in log.splitlines():
        if "ptxas" in line and "wgmma" in line and "serialized" in line:
            code, named = _CODE.search(line), _IN_FUNCTION.search(line)
            found.append((code[1] if code else "no code", named[1] if named else ""))
    return tuple(found)


_ERROR = re.compile(
    r"\berror\s*(#\S+)?\s*:|\bfatal\s*:|\bfatal error\b|undefined reference to|cannot find -l"
)
_FULL = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
_KILLED = re.compile(
    r"died due to signal 9|Killed signal terminated|^Killed|: Killed"
    r"|cannot allocate memory|virtual memory exhausted|bad_alloc|out of memory",
    re.IGNORECASE | re.MULTILINE,
)


def first_error(log: str) -> str:
    """The line of the first error in the log, else its last line, cut to 400 characters."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for line in lines:
        if _ERROR.search(line):
            return line[:400]
    return lines[-1][:400] if lines else "nvcc wrote no message"


def disk_full(log: str) -> bool:
    """Whether a tool found no space to write to."""
    return _FULL.search(log) is not None


def out_of_memory(log: str, status: int) -> bool:
    """Whether a tool was killed, or could not get memory."""
    return status in (-9, 137) or _KILLED.search(log) is not None
