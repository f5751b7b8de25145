"""From a model's GEMMs and token counts to the distinct problems that are tuned or looked up."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fluxgen.core.dtypes import DType
from fluxgen.core.errors import UsageError
from fluxgen.core.op import Op
from fluxgen.core.problem import MAX_WORLD, Problem, Signature, check_int
from fluxgen.shapes.architecture import ModelDims
from fluxgen.shapes.gemms import LayerGemm, ModelGemms, analyse
from fluxgen.shapes.reader import RawConfig
from fluxgen.shapes.sharding import check_tp

_LOG = logging.getLogger(__name__)

BOTH: tuple[Op, ...] = (Op.AG_GEMM, Op.GEMM_RS)

Model = str | Path | Mapping[str, Any] | RawConfig | ModelDims


@dataclass(frozen=True)
class ProblemSet:
    """Distinct problems and how often a model poses each.

    Attributes:
        problems: in the order in which they are first met.
        counts: GEMMs of all layers that pose the problem, one for each.
        names: the GEMMs' names, one tuple for each.
        messages: tokens that were dropped or do not divide by tp.
    """

    problems: tuple[Problem, ...]
    counts: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]
    messages: tuple[str, ...]

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.problems)

    def __len__(self) -> int:
        return len(self.problems)

    def to_list(self) -> list[dict[str, Any]]:
        """Plain JSON values: each problem's fields with its count and names."""
        return [
            {**problem.to_dict(), "count": count, "names": list(names)}
            for problem, count, names in zip(self.problems, self.counts, self.names, strict=True)
        ]


def problems(
    model: Model,
    tp: int,
    tokens: int | Iterable[int],
    dtype: DType | str = DType.BF16,
    ops: Iterable[Op | str] = BOTH,
    include_lm_head: bool = False,
    training: bool = False,
) -> tuple[Problem, ...]:
    """The distinct problems of a model, in first-seen order: each is tuned once.

    Args:
        model: a preset's name, a path, a config's object, or a model's dimensions.
        tp: tensor-parallel size, 1 to 16.
        tokens: global tokens m, one or several; 0 is dropped with a logged message.
        dtype: element type of operands and result.
        ops: the fused ops to list.
        include_lm_head: whether to add the output projection.
        training: whether to add what a backward poses, see :func:`backward`.

    Raises:
        UsageError: for an invalid argument, before the model is read.
        ModelConfigError, UnsupportedError, ShardingError: as
            :func:`fluxgen.shapes.gemms.model_gemms`.
    """
    found = counted_problems(model, tp, tokens, dtype, ops, include_lm_head, training)
    for message in found.messages:
        _LOG.warning("%s", message)
    return found.problems


def counted_problems(
    model: Model,
    tp: int,
    tokens: int | Iterable[int],
    dtype: DType | str = DType.BF16,
    ops: Iterable[Op | str] = BOTH,
    include_lm_head: bool = False,
    training: bool = False,
) -> ProblemSet:
    """As :func:`problems`, with counts, and with the messages returned instead of logged.

    Raises:
        UsageError, ModelConfigError, UnsupportedError, ShardingError: as :func:`problems`.
    """
    check_int("tp", tp, 1, MAX_WORLD)
    sizes, messages = check_tokens(tokens, tp)
    the_dtype = dtype if isinstance(dtype, DType) else DType.parse(dtype)
    if isinstance(ops, str):
        ops = (ops,)
    wanted = tuple(op if isinstance(op, Op) else Op.parse(op) for op in ops)
    if not wanted:
        every = ", ".join(op.value for op in Op)
        raise UsageError(f"ops: expected at least one of {every}; found none")
    gemms = analyse(model, tp, include_lm_head).gemms
    return _count(gemms, tp, sizes, the_dtype, wanted, messages, training)


def check_tokens(tokens: int | Iterable[int], tp: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The distinct positive token counts, in their order, and messages about the others.

    Raises:
        UsageError: for anything but non-negative integers below 2^31.
    """
    if isinstance(tokens, (str, bytes, Mapping)) or (
        not isinstance(tokens, Iterable) and not isinstance(tokens, int)
    ):
        raise UsageError(f"tokens: expected an integer or a list of integers; found {tokens!r}")
    values = [tokens] if isinstance(tokens, int) else list(tokens)
    sizes = tuple(dict.fromkeys(check_int("tokens", value, 0) for value in values))
    messages = []
    if 0 in sizes:
        messages.append("tokens: 0 is dropped: there is nothing to compute or tune")
    uneven = [m for m in sizes if m % tp]
    if uneven:
        messages.append(
            f"tokens: {', '.join(map(str, uneven))} not divisible by tp={tp}: kept, but the ranks "
            "do not share the rows evenly"
        )
    return tuple(m for m in sizes if m), tuple(messages)


def _count(
    gemms: tuple[LayerGemm, ...],
    tp: int,
    sizes: tuple[int, ...],
    dtype: DType,
    ops: tuple[Op, ...],
    messages: tuple[str, ...],
    training: bool = False,
) -> ProblemSet:
    counts: dict[Problem, int] = {}
    names: dict[Problem, dict[str, None]] = {}
    for gemm in gemms:
        if gemm.op is None:
            continue
        for m in sizes:
            forward = Problem(Signature.of(gemm.op, dtype), m, gemm.n, gemm.k, tp)
            posed = [(forward, gemm.name)]
            if training:
                posed.append((backward(forward), f"{gemm.name}.backward"))
            if gemm.op.alone is not None:  # the same layer without sequence parallelism
                shared = Problem(Signature.of(gemm.op.alone, dtype), m, gemm.n, gemm.k, tp)
                posed.append((shared, gemm.name))
            for problem, name in posed:
                if problem.op in ops:
                    counts[problem] = counts.get(problem, 0) + gemm.count
                    names.setdefault(problem, {})[name] = None
    found_ops = {problem.op for problem in counts}
    for op in ops:
        if sizes and op not in found_ops and op is not op.compiled:
            served = f"calls of it take the records of {op.compiled.value}"
            messages = (*messages, f"ops: {op.value} is no GEMM of this model's layers: {served}")
    return ProblemSet(
        problems=tuple(counts),
        counts=tuple(counts.values()),
        names=tuple(tuple(found) for found in names.values()),
        messages=messages,
    )


def backward(problem: Problem) -> Problem:
    """What the gradient of a fused op's activation poses: the other op, the weight transposed.

    dX (m/tp, k) of an ag_gemm reduces dY (m, n) times W (n, k); dX (m, k) of a gemm_rs gathers dY
    (m/tp, n) and multiplies it with W (n, k). Either way W is the (k, n) operand "kn".
    """
    assert problem.op.backward is not None
    signature = replace(problem.signature, op=problem.op.backward, b_layout="kn")
    return Problem(signature, problem.m, problem.k, problem.n, problem.tp)


def summary(
    model: Model,
    tp: int,
    tokens: int | Iterable[int] = (),
    dtype: DType | str = DType.BF16,
    include_lm_head: bool = False,
) -> dict[str, Any]:
    """Everything about a model at one tensor-parallel size, as plain JSON values.

    Keys: ``model``, ``source``, ``model_type``, ``hidden``, ``layers``, ``tp``, ``valid_tp``,
    ``notes``, ``warnings``, ``gemms`` (with equal shapes merged: op, n, k, count, names),
    ``others`` (GEMMs that are no site of a fused op, each with its reason) and ``problems``.

    Raises:
        UsageError, ModelConfigError, UnsupportedError, ShardingError: as :func:`problems`; unlike
            there, ``tp`` may be up to 64, with a warning and no problems above 16.
    """
    check_tp(tp)
    sizes, messages = check_tokens(tokens, tp)
    the_dtype = dtype if isinstance(dtype, DType) else DType.parse(dtype)
    found = analyse(model, tp, include_lm_head)
    warnings = list(found.warnings)
    listed: list[dict[str, Any]] = []
    if tp <= MAX_WORLD:
        listed = _count(found.gemms, tp, sizes, the_dtype, BOTH, ()).to_list()
    else:
        warnings.append(f"tp={tp}: fused kernels span at most {MAX_WORLD} ranks; no problems")
    dims = found.dims
    return {
        "model": dims.name,
        "source": dims.where,
        "model_type": dims.model_type,
        "hidden": dims.hidden,
        "layers": dims.layers,
        "tp": tp,
        "valid_tp": list(found.valid_tp),
        "notes": [*found.notes, *_gemm_notes(found), *messages],
        "warnings": warnings,
        "gemms": _merged(found.gemms),
        "others": [gemm.to_dict() for gemm in found.others],
        "problems": listed,
    }


def _gemm_notes(found: ModelGemms) -> list[str]:
    return [f"{gemm.name}: {gemm.note}" for gemm in found.gemms if gemm.note]


def _merged(gemms: tuple[LayerGemm, ...]) -> list[dict[str, Any]]:
    merged: dict[tuple[Op | None, int, int], list[LayerGemm]] = {}
    for gemm in gemms:
        merged.setdefault((gemm.op, gemm.n, gemm.k), []).append(gemm)
    return [
        {
            "op": op.value if op is not None else None,
            "n": n,
            "k": k,
            "count": sum(gemm.count for gemm in group),
            "names": [gemm.name for gemm in group],
            "bias": any(gemm.bias for gemm in group),
            "weight_layout": group[0].weight_layout,
        }
        for (op, n, k), group in merged.items()
    ]
