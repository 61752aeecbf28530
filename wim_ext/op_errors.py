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

__all__ = ["call"]

_TYPED_ERROR = re.compile(r"(?:.*?)\b(ValueError|IndexError): (.*)", re.DOTALL)


def call(op: Any, *args: Any) -> Any:
    """Calls an op; a RuntimeError that carries a typed exception's name becomes that exception."""
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except NotImplementedError as error:
        raise _no_kernels(args) or error from None
    except RuntimeError as error:
        typed = _TYPED_ERROR.match(str(error))
        if typed is None:
            raise
        kind = ValueError if typed.group(1) == "ValueError" else IndexError
        raise kind(typed.group(2)) from None


def _no_kernels(args: tuple[Any, ...]) -> ValueError | None:
    """The dispatcher found no kernel for these arguments: the error that says why, if it is their
    device."""
    flat = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
    devices = sorted({str(t.device) for t in flat if t.device.type != "cpu"})
    if not devices:
        return None
    return ValueError(
        f"wim_ext has no kernels for tensors on {' and '.join(devices)}; its CUDA library is "
        f"{_native.CUDA_STATUS}"
    )
