"""The operators of wim_ext, as plain functions over torch tensors.

Each function is a thin front of ``torch.ops.wim_ext.<name>``, where all arguments are checked; it
adds defaults, makes outputs, and turns the errors of C++ into typed exceptions. All of them work
under ``torch.compile(fullgraph=True)``. Their twins in plain PyTorch are in `wim_ext.reference`.

A paged cache is a pair of 4-D tensors per layer: ``k_cache [num_pages, page_size, num_kv_heads,
head_dim]`` and ``v_cache [num_pages, page_size, num_kv_heads, v_head_dim]``. Any page, slot and
head strides will do; the last dimension must be contiguous, or, for V, the slots of a page.

No op has a derivative: with gradients enabled, a tensor that requires one is a ValueError. What is
written must not lie over itself or over anything that the same call reads.
"""

from __future__ import annotations

import math
from typing import Literal, overload

import torch
from torch import Tensor

from wim_ext import op_fakes  # noqa: F401  (for torch.compile)
from wim_ext.op_errors import call, require_tensor, window_pair
from wim_ext.plan import AttentionPlan

__all__ = [
    "append_kv",
    "copy_pages",
    "cpu_kernels",
    "merge_states",
    "paged_attention",
    "plan_attention",
]

_ops = torch.ops.wim_ext


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
        ``[num_tokens]`` int64: ``page * page_size + offset`` of each token; -1 skips the token. If
        a slot occurs twice, it is unspecified which token it keeps.

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
    call(_ops.append_kv, key, value, k_cache, v_cache, slot_mapping)


def copy_pages(caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copies page ``src[i]`` onto page ``dst[i]`` in every cache, in place: a fork's copy-on-write.

    Parameters
    ----------
    caches : list of Tensor
        Views ``[num_pages, ...]`` of 1 to 6 dimensions, any strides and dtypes; all the K and V
        caches of a model go into one call.
    src, dst : Tensor
        ``[num_copies]`` int64 page ids.

    Raises
    ------
    ValueError
        A page occurs twice in `dst`, or both in `src` and `dst` (the order would matter).
    IndexError
        A page id is out of range for one of the caches. Nothing has been copied.

    Examples
    --------
    >>> cache = torch.arange(3.0).reshape(3, 1, 1, 1)
    >>> copy_pages([cache], torch.tensor([2]), torch.tensor([0]))
    >>> cache.flatten().tolist()
    [2.0, 1.0, 2.0]
    """
    call(_ops.copy_pages, caches, src, dst)


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

    With ``lse = log(exp(lse_a) + exp(lse_b))``, out is
    ``exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b``.

    Parameters
    ----------
    out_a, out_b : Tensor
        ``[tokens, heads, dim]``, float32, bfloat16 or float16, last dimension contiguous.
    lse_a, lse_b : Tensor
        ``[heads, tokens]`` float32, natural logarithm of the softmax denominators. A state with
        lse -inf is empty: it leaves the other one exactly as it is, and two empty states give
        an empty one (out 0, lse -inf). A sink may be counted in one of the two only.
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
    if out is None:
        require_tensor("out_a", out_a)
        out = out_a.new_empty(out_a.shape)
    if lse is None:
        require_tensor("lse_a", lse_a)
        lse = lse_a.new_empty(lse_a.shape)
    call(_ops.merge_states, out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


@overload
def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    plan: AttentionPlan | None = ...,
    out: Tensor | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    softmax_scale: float | None = ...,
    causal: bool = ...,
    window_size: tuple[int, int] = ...,
    softcap: float = ...,
    alibi_slopes: Tensor | None = ...,
    sinks: Tensor | None = ...,
    k_scale: Tensor | None = ...,
    v_scale: Tensor | None = ...,
    plan: AttentionPlan | None = ...,
    out: Tensor | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def paged_attention(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: AttentionPlan | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed query rows over the paged keys and values of their sequences.

    Row i of a sequence with q rows and L keys stands at position ``p = L - q + i`` (bottom-right
    aligned; before the first key if q > L) and sees the keys ``0 <= j < L`` with ``j <= p`` if
    causal, ``j >= p - left`` if left >= 0 and ``j <= p + right`` if right >= 0, where
    ``window_size = (left, right)``. With KV head ``h // (num_heads // num_kv_heads)`` of head h::

        s[j]  = softmax_scale * k_scale * (query . k[j])
        s[j]  = softcap * tanh(s[j] / softcap)              if softcap > 0
        s[j] -= alibi_slope * |p - j|                       if alibi_slopes
        lse   = log(sum_j exp(s[j]) + exp(sink))            (the sink only if sinks)
        out   = v_scale * sum_j exp(s[j] - lse) * v[j]

    A row that sees no key gives out 0 and lse -inf (with sinks: the sink). Slots that no row sees
    are never read, whatever they hold; a NaN that a row sees makes that row (and head) NaN. The
    arithmetic is float32. A row's result is bitwise the same alone, in any batch, with any chunking
    of its sequence, any plan and any number of threads (on one instruction set).

    Parameters
    ----------
    query : Tensor
        ``[total_q, num_heads, head_dim]``, float32, bfloat16 or float16, last dimension contiguous.
        head_dim and v_head_dim are multiples of 8 up to 256.
    k_cache, v_cache : Tensor
        The cache of one layer (see the module), same dtype and device.
    block_table : Tensor
        ``[batch, max_pages]`` int32 on the CPU: the pages of each sequence in order. Entries past a
        sequence's last page, or wholly outside its windows, may hold anything.
    cu_seqlens_q : Tensor
        ``[batch + 1]`` int32 on the CPU: sequence b has the rows ``cu_seqlens_q[b]`` to
        ``cu_seqlens_q[b + 1]``.
    seqused_k : Tensor
        ``[batch]`` int32 on the CPU: keys of each sequence, those of this step's tokens included.
    softmax_scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    causal : bool
    window_size : tuple of int
        (left, right), both inclusive; -1 is unlimited.
    softcap : float
        0 for none.
    alibi_slopes : Tensor, optional
        ``[num_heads]`` or ``[batch, num_heads]`` float32.
    sinks : Tensor, optional
        ``[num_heads]`` float32: one more logit per head in the denominator.
    k_scale, v_scale : Tensor, optional
        1 or num_kv_heads float32 factors of the stored keys and values.
    plan : AttentionPlan, optional
        From `plan_attention` for the same batch; made on the fly if not given.
    out : Tensor, optional
        ``[total_q, num_heads, v_head_dim]`` to write to, last dimension contiguous.
    return_lse : bool
        Also return the log-sum-exp.

    Returns
    -------
    out : Tensor
        ``[total_q, num_heads, v_head_dim]`` in the dtype of `query`.
    lse : Tensor
        ``[num_heads, total_q]`` float32, natural logarithm; only with `return_lse`.

    Raises
    ------
    ValueError
        A dtype, device, shape, stride, length or scalar does not fit, or the plan is for another
        batch. Nothing has been written.
    IndexError
        A used entry of `block_table` is no page of the cache. Nothing has been written.

    Notes
    -----
    Attention after Vaswani et al., "Attention Is All You Need" (2017), equation 1, over pages (Kwon
    et al. 2023), with the online softmax of Milakov and Gimelshein (2018), algorithm 3, as in Dao
    et al., "FlashAttention" (2022). ALiBi: Press et al. (2022). Sinks: Xiao et al. (2024).

    Examples
    --------
    >>> k_cache = torch.zeros(4, 16, 2, 64); v_cache = torch.ones(4, 16, 2, 64)
    >>> block_table = torch.tensor([[2, 0]], dtype=torch.int32)
    >>> out = paged_attention(
    ...     torch.randn(3, 6, 64), k_cache, v_cache, block_table,
    ...     torch.tensor([0, 3], dtype=torch.int32), torch.tensor([20], dtype=torch.int32))
    >>> out.shape, bool((out == 1).all())
    (torch.Size([3, 6, 64]), True)
    """
    require_tensor("query", query)
    require_tensor("v_cache", v_cache)
    if plan is not None and not isinstance(plan, AttentionPlan):
        raise ValueError(f"plan must be an AttentionPlan, found {type(plan).__name__}")
    left, right = window_pair(window_size)
    # Whatever the shapes are, they reach the op, which says what is wrong with them.
    if out is None:
        out = query.new_empty(query.shape[:-1] + v_cache.shape[-1:])
    lse = query.new_empty(query.shape[:2][::-1], dtype=torch.float32) if return_lse else None
    if softmax_scale is None:
        softmax_scale = 1.0 / math.sqrt(max(query.shape[-1], 1)) if query.dim() else 1.0
    call(
        _ops.paged_attention,
        *(query, k_cache, v_cache, block_table, cu_seqlens_q, seqused_k),
        *(None if plan is None else plan.tensor, out, lse, softmax_scale, causal, left, right),
        *(softcap, alibi_slopes, sinks, k_scale, v_scale),
    )
    return out if lse is None else (out, lse)


def plan_attention(
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    page_size: int,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    num_threads: int | None = None,
) -> AttentionPlan:
    """Cuts a batch into work items that read each shared page once; one plan serves all layers.

    Rows of a long chunk are tiled. Sequences with few rows are cut into cells of 512 keys; those
    that have a cell on the same pages share it, and whole cells that a chunk of the batch reads
    anyway ride along with it. ``plan.report`` tells what this saves.

    Parameters
    ----------
    block_table, cu_seqlens_q, seqused_k, causal, window_size
        As for `paged_attention`.
    num_heads, num_kv_heads, page_size : int
    num_threads : int, optional
        Threads to keep busy, default ``torch.get_num_threads()``. Results do not depend on it.

    Returns
    -------
    AttentionPlan

    Raises
    ------
    ValueError
        A dtype, shape or length does not fit.

    Examples
    --------
    >>> block_table = torch.tensor([[0, 1], [0, 1]], dtype=torch.int32)
    >>> plan = plan_attention(
    ...     block_table, torch.tensor([0, 1, 2], dtype=torch.int32),
    ...     torch.tensor([100, 90], dtype=torch.int32), num_heads=4, num_kv_heads=2, page_size=64)
    >>> plan.report.pages_read, plan.report.pages_without_sharing
    (2, 4)
    """
    left, right = window_pair(window_size)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    tensor = call(
        _ops.plan_attention,
        *(block_table, cu_seqlens_q, seqused_k, num_heads, num_kv_heads, page_size),
        *(causal, left, right, threads),
    )
    return AttentionPlan(tensor)


def cpu_kernels() -> tuple[list[str], list[str], str, str]:
    """Which instruction sets the CPU attention kernel has, and which one it uses.

    Returns
    -------
    (built, available, in_use, why)
        Names, widest first: all that are built in, those that this CPU has, the one in use; and in
        words why it is that one. The environment variable WIM_CPU_ISA forces one by name.

    Raises
    ------
    ValueError
        WIM_CPU_ISA names an instruction set that is unknown or that this CPU lacks.

    Examples
    --------
    >>> built, available, in_use, why = cpu_kernels()
    >>> "portable" in available and in_use in available
    True
    """
    entries = str(_ops.cpu_isas()).split()
    built = [entry.removesuffix(":missing") for entry in entries]
    available = [entry for entry in entries if not entry.endswith(":missing")]
    return built, available, call(_ops.cpu_isa), _ops.cpu_isa_reason()
