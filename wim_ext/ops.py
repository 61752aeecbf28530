"""The operators of wim_ext, as plain functions over torch tensors.

Each function is a thin front of ``torch.ops.wim_ext.<name>``, where all arguments are checked; it
adds defaults, makes outputs, and turns the errors of C++ into typed exceptions. All of them work
under ``torch.compile(fullgraph=True)``. Their twins in plain PyTorch are in `wim_ext.reference`.

A paged cache is a pair of 4-D tensors per layer: ``k_cache [num_pages, page_size, num_kv_heads,
head_dim]`` and ``v_cache [num_pages, page_size, num_kv_heads, v_head_dim]``. Any page, slot and head
strides will do; the last dimension must be contiguous, or, for V, the slots of a page.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from wim_ext import _native  # noqa: F401  (loads torch.ops.wim_ext)

__all__ = ["append_kv", "copy_pages", "merge_states"]

_ops = torch.ops.wim_ext
_TYPED_ERROR = re.compile(r"(?:.*?)\b(ValueError|IndexError): (.*)", re.DOTALL)


def _call(op: Any, *args: Any) -> Any:
    """Calls an op; a RuntimeError that carries a typed exception's name becomes that exception."""
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except RuntimeError as error:
        typed = _TYPED_ERROR.match(str(error))
        if typed is None:
            raise
        kind = ValueError if typed.group(1) == "ValueError" else IndexError
        raise kind(typed.group(2)) from None


def append_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Writes the keys and values of new tokens into their slots of a paged cache, in place.

    Parameters
    ----------
    key : Tensor
        ``[num_tokens, num_kv_heads, head_dim]``, last dimension contiguous, any other strides.
    value : Tensor
        ``[num_tokens, num_kv_heads, v_head_dim]``, likewise.
    k_cache, v_cache : Tensor
        The cache of one layer (see the module), float32, bfloat16 or float16; `key` and `value`
        have the same dtype and device.
    slot_mapping : Tensor
        ``[num_tokens]`` int64: ``page * page_size + offset`` of each token; -1 skips the token. If a
        slot occurs twice, it is unspecified which token it keeps.

    Raises
    ------
    ValueError
        A dtype, device, shape or stride does not fit.
    IndexError
        A slot is out of range. Nothing has been written.

    Notes
    -----
    The slot form of the paged cache of Kwon et al., "Efficient Memory Management for Large Language
    Model Serving with PagedAttention" (2023), section 4.

    Examples
    --------
    >>> k_cache = torch.zeros(4, 16, 2, 64); v_cache = torch.zeros(4, 16, 2, 64)
    >>> key = torch.ones(3, 2, 64)
    >>> append_kv(key, key, k_cache, v_cache, torch.tensor([16, 17, -1]))
    >>> k_cache[1, :3, 0, 0].tolist()
    [1.0, 1.0, 0.0]
    """
    _call(_ops.append_kv, key, value, k_cache, v_cache, slot_mapping)


def copy_pages(caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copies page ``src[i]`` onto page ``dst[i]`` in every cache, in place: a fork's copy-on-write.

    Parameters
    ----------
    caches : list of Tensor
        Views ``[num_pages, ...]`` of 1 to 6 dimensions, any strides and dtypes; all the K and V caches
        of a model go into one call.
    src, dst : Tensor
        ``[num_copies]`` int64 page ids.

    Raises
    ------
    ValueError
        A page occurs twice in `dst`, or both in `src` and `dst` (the result would depend on the order).
    IndexError
        A page id is out of range for one of the caches. Nothing has been copied.

    Examples
    --------
    >>> cache = torch.arange(3.0).reshape(3, 1, 1, 1)
    >>> copy_pages([cache], torch.tensor([2]), torch.tensor([0]))
    >>> cache.flatten().tolist()
    [2.0, 1.0, 2.0]
    """
    _call(_ops.copy_pages, caches, src, dst)


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merges attention over two disjoint sets of keys into attention over their union.

    ``lse = log(exp(lse_a) + exp(lse_b))``, ``out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b``.

    Parameters
    ----------
    out_a, out_b : Tensor
        ``[tokens, heads, dim]``, float32, bfloat16 or float16, last dimension contiguous.
    lse_a, lse_b : Tensor
        ``[heads, tokens]`` float32, natural logarithm of the softmax denominators. A state with
        lse -inf is empty: it leaves the other one exactly as it is, and two empty states give an empty
        one (out 0, lse -inf). A sink may be counted in one of the two only.
    out, lse : Tensor, optional
        Where to write; may be `out_a` and `lse_a` (or b's) themselves. Made if not given.

    Returns
    -------
    (out, lse)

    Raises
    ------
    ValueError
        A dtype, device, shape or stride does not fit.

    Notes
    -----
    The rule is that of Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018),
    equation 4, written for normalised outputs.

    Examples
    --------
    >>> out_a, lse_a = torch.full((1, 1, 8), 1.0), torch.zeros(1, 1)
    >>> out_b, lse_b = torch.full((1, 1, 8), 3.0), torch.zeros(1, 1)
    >>> out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    >>> out[0, 0, 0].item(), round(lse.item(), 4)
    (2.0, 0.6931)
    """
    out = torch.empty_like(out_a) if out is None else out
    lse = torch.empty_like(lse_a) if lse is None else lse
    _call(_ops.merge_states, out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


@torch.library.register_fake("wim_ext::append_kv")
def _append_kv_fake(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    _same_device(k_cache=k_cache, v_cache=v_cache, key=key, value=value)


@torch.library.register_fake("wim_ext::copy_pages")
def _copy_pages_fake(caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    pass


@torch.library.register_fake("wim_ext::merge_states")
def _merge_states_fake(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> None:
    _same_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)


def _same_device(**tensors: Tensor | None) -> None:
    """Tensors on the meta device reach only the fake kernels, so a mix with real ones is caught here."""
    (first_name, first), *rest = ((name, t) for name, t in tensors.items() if t is not None)
    for name, tensor in rest:
        if tensor.device != first.device:
            raise ValueError(
                f"{name} must be on the device of {first_name} ({first.device}), found {tensor.device}"
            )
