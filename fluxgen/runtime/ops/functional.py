"""The custom ops inside the transforms of ``torch.func``.

``torch.library`` gives an op a backward that eager autograd and torch.compile use. The transforms
of ``torch.func`` want an ``autograd.Function`` that sets its context up apart from its forward,
which torch.library does not make. :func:`call` is one, made of the same two functions, where such
a transform differentiates, and the custom op itself everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["call", "register"]

_GRAD = torch._C._functorch.TransformType.Grad
_innermost = torch._C._functorch.peek_interpreter_stack

_registered: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""Of each op by name: what sets its context up, and its backward."""


def register(name: str, op: Any, setup: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Give a custom op its backward, in both ways. Arguments as of ``register_autograd``."""
    op.register_autograd(backward, setup_context=setup)
    _registered[name] = (setup, backward)


def call(name: str, *args: Any) -> Any:
    """``torch.ops.fluxgen.<name>(*args)``, of a registered op, under any transform."""
    if not torch.compiler.is_compiling():
        transform = _innermost()
        if transform is not None and transform.key() == _GRAD:
            return _Differentiated.apply(name, *_flattened(args))
    return getattr(torch.ops.fluxgen, name)(*args)


class _Differentiated(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped to mypy
    """Tensors of lists are arguments of their own, or gradients would not find them."""

    @staticmethod
    def forward(name: str, template: list[Any], *tensors: Any) -> Any:
        out = call(name, *_filled(template, tensors))  # of the next transform outwards
        return tuple(out) if isinstance(out, list) else out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        name, template, *tensors = inputs
        setup, _ = _registered[name]
        ctx.made = name, template, isinstance(output, tuple)
        setup(ctx, tuple(_filled(template, tensors)), output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        name, template, several = ctx.made
        _, backward = _registered[name]
        kept = SimpleNamespace(
            saved_tensors=ctx.saved_tensors,
            needs_input_grad=_filled(template, ctx.needs_input_grad[2:]),
            call=getattr(ctx, "call", None),
        )
        found = backward(kept, list(grads)) if several else backward(kept, *grads)
        out: list[Any] = []
        for each, place in zip(found, template, strict=True):
            if isinstance(place, _List):
                out += [None] * place.size if each is None else each
            elif place is _TENSOR:
                out.append(each)
        return None, None, *out


class _List:
    """The place of a list of tensors."""

    def __init__(self, size: int) -> None:
        self.size = size


_TENSOR = object()


def _flattened(args: tuple[Any, ...]) -> list[Any]:
    """The arguments with places for tensors, and the tensors."""
    template: list[Any] = []
    tensors: list[torch.Tensor] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            template.append(_TENSOR)
            tensors.append(arg)
        elif isinstance(arg, list) and all(isinstance(each, torch.Tensor) for each in arg):
            template.append(_List(len(arg)))
            tensors += arg
        else:
            template.append(arg)
    return [template, *tensors]


def _filled(template: list[Any], values: Any) -> list[Any]:
    """The arguments of a template, with values in the places of tensors."""
    given = iter(values)
    return [
        [next(given) for _ in range(place.size)]
        if isinstance(place, _List)
        else next(given)
        if place is _TENSOR
        else place
        for place in template
    ]
