"""Calling an op, and what its errors mean.

The checks live in C++, where torch turns every exception into a RuntimeError. Their texts start
with the name of the exception that a user should see.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from wim_ext import _native  # also loads torch.ops.wim_ext

__all__ = ["call", "require_tensor", "window_pair"]

_TYPED_ERROR = re.compile(r"(?:.*?)\b(ValueError|IndexError): (.*)", re.DOTALL)
_WRONG_TYPE = re.compile(
    r"Expected a value of type '(.+?)' for argument '(\w+)' but instead found type '(.+?)'\."
)


def call(op: Any, *args: Any) -> Any:
    """Calls an op; a RuntimeError that carries a typed exception's name becomes that exception.

    The ops have no derivatives. An argument that wants one would be written to, or its result read,
    as if it were a constant, and training would go wrong without a word: so it is refused.
    """
    if torch.is_grad_enabled():
        _refuse_gradients(op, args)
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except NotImplementedError as error:
        raise _no_kernels(op, args) or error from None
    except RuntimeError as error:
        if typed := _TYPED_ERROR.match(str(error)):
            kind = ValueError if typed.group(1) == "ValueError" else IndexError
            raise kind(typed.group(2)) from None
        if wrong := _WRONG_TYPE.search(str(error)):
            raise ValueError(_wrong_type_text(*wrong.groups())) from None
        raise


def require_tensor(name: str, value: object) -> None:
    """For arguments whose shape is needed before the op can look at them."""
    if not isinstance(value, Tensor):
        found = None if value is None else type(value).__name__
        raise ValueError(f"{name} must be a tensor, found {found}")


def window_pair(window_size: tuple[int, int]) -> tuple[int, int]:
    """``(left, right)`` of a window."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size must be (left, right), two integers, found {window_size!r}"
        ) from None
    return left, right


def _wrong_type_text(wanted: str, name: str, found: str) -> str:
    if wanted == found == "int":
        return f"{name} must fit 64 bits"
    if "Tensor" in wanted:
        return (
            f"{name} must be a {'list of tensors' if 'List' in wanted else 'tensor'}, found {found}"
        )
    return f"{name} must be of type {wanted}, found {found}"


def _tensors(op: Any, args: tuple[Any, ...]) -> list[tuple[str, Tensor]]:
    """The tensors among the arguments of an op, and what they are called."""
    named = []
    for argument, value in zip(op.default._schema.arguments, args, strict=False):
        if isinstance(value, Tensor):
            named.append((argument.name, value))
        elif isinstance(value, list):
            named += [
                (f"{argument.name}[{i}]", t) for i, t in enumerate(value) if isinstance(t, Tensor)
            ]
    return named


def _refuse_gradients(op: Any, args: tuple[Any, ...]) -> None:
    compiling = torch.compiler.is_compiling()  # the tracer knows neither getattr() nor a schema
    # At every layer of every step: isinstance() would cost four times as much.
    if not compiling and not any(
        getattr(value, "requires_grad", value.__class__ is list) for value in args
    ):
        return
    tensors = [
        t
        for value in args
        for t in (value if isinstance(value, list) else [value])
        if isinstance(t, Tensor) and t.requires_grad
    ]
    if not tensors:
        return
    names = ["an argument"]
    if not compiling:
        names = [name for name, t in _tensors(op, args) if t.requires_grad]
    if names:
        raise ValueError(
            f"{names[0]} requires a gradient, which wim_ext does not compute: call under "
            "torch.no_grad() or torch.inference_mode(), or detach() it"
        )


def _no_kernels(op: Any, args: tuple[Any, ...]) -> ValueError | None:
    """The dispatcher found no kernel for these arguments: the error that says why, if it is their
    layout or their device."""
    tensors = _tensors(op, args)
    for name, t in tensors:
        if t.layout != torch.strided or t.is_nested:
            layout = "a nested tensor" if t.is_nested else t.layout
            return ValueError(f"{name} must be a dense (strided) tensor, found {layout}")
    devices = sorted({str(t.device) for _, t in tensors if t.device.type != "cpu"})
    if not devices:
        return None
    return ValueError(
        f"wim_ext has no kernels for tensors on {' and '.join(devices)}; its CUDA library is "
        f"{_native.CUDA_STATUS}"
    )
