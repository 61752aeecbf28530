"""Every op in plain PyTorch: slow, obviously right, and the oracle of the tests.

The functions take the arguments of `wim_ext.ops` and mean the same. They trust their arguments (the
checks live in the C++ ops) and they compute in `compute_dtype`, float64 unless told otherwise.

Nothing here masks a padded tensor. Pages hold stale data behind a sequence's length, perhaps NaN,
and NaN times a weight of zero is NaN: so only slots that some row may see are ever gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["append_kv", "copy_pages", "merge_states", "paged_attention", "visible_range"]


def append_kv(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write the keys and values of new tokens into their slots of a paged cache, in place.

    Parameters
    ----------
    key : [num_tokens, num_kv_heads, head_dim]
    value : [num_tokens, num_kv_heads, v_head_dim]
    k_cache, v_cache : [num_pages, page_size, num_kv_heads, head_dim or v_head_dim]
        Any strides.
    slot_mapping : [num_tokens] int64
        ``page * page_size + offset`` of each token; -1 skips the token.

    Source: the slot form of PagedAttention (Kwon et al. 2023, arXiv:2309.06180, section 4).
    """
    page_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, page_size)
            k_cache[page, offset] = key[token]
            v_cache[page, offset] = value[token]


def copy_pages(caches: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy page ``src[i]`` onto page ``dst[i]`` in every cache, in place.

    Parameters
    ----------
    caches : list of [num_pages, ...]
    src, dst : [num_copies] int64
        A page is written at most once and is never both read and written.
    """
    for cache in caches:
        cache[dst] = cache[src]


def merge_states(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Combine the attention over two disjoint sets of keys into the attention over their union.

    With ``w_x = exp(lse_x - lse)`` and ``lse = log(exp(lse_a) + exp(lse_b))`` the result is
    ``w_a * out_a + w_b * out_b``. A state with lse -inf is empty: its `out` counts for nothing, and
    two empty states give an empty state (out 0, lse -inf).

    Parameters
    ----------
    out_a, out_b : [num_tokens, num_heads, v_head_dim]
    lse_a, lse_b : [num_heads, num_tokens] float32, natural logarithm
    out, lse : tensors like them, written and returned when given

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax), in the log-sum-exp form.
    """
    states = [(out_a, lse_a), (out_b, lse_b)]
    lse_x = torch.stack([x.to(compute_dtype) for _, x in states])  # [2, heads, tokens]
    largest = lse_x.amax(dim=0)  # NaN wins
    # An all-empty column would be -inf - -inf; any finite stand-in makes its weights exp(-inf) = 0.
    pivot = torch.where(largest == -torch.inf, torch.zeros_like(largest), largest)
    weight = (lse_x - pivot).exp()
    total = weight.sum(dim=0)
    merged = torch.zeros_like(out_a, dtype=compute_dtype)
    for (out_x, one_lse), w in zip(states, weight, strict=True):
        part = w.t()[..., None] * out_x.to(compute_dtype)
        empty = (one_lse == -torch.inf).t()[..., None]
        merged += part.masked_fill(empty, 0.0)
    merged /= torch.where(total == 0, torch.ones_like(total), total).t()[..., None]
    out = torch.empty_like(out_a) if out is None else out
    lse = torch.empty_like(lse_a) if lse is None else lse
    return out.copy_(merged), lse.copy_(pivot + total.log())


def visible_range(
    num_rows: int, kv_len: int, causal: bool, window_size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """First key and end (one past the last key) that each query row sees; both int64 [num_rows].

    Row i stands at position ``p = kv_len - num_rows + i`` (the last row at the last key) and sees
    the keys j of [0, kv_len) with j <= p if causal, j >= p - left if left >= 0, and j <= p + right
    if right >= 0. The first rows of a chunk longer than the cache have negative positions.
    """
    left, right = window_size
    position = torch.arange(kv_len - num_rows, kv_len)
    first = torch.zeros_like(position)
    end = torch.full_like(position, kv_len)
    if left >= 0:
        first = (position - left).clamp(min=0)
    if causal:
        end = position + 1
    if right >= 0:
        end = torch.minimum(end, position + right + 1)
    return first, end.clamp(0, kv_len)


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
    plan: object = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    compute_dtype: torch.dtype = torch.float64,
    out_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed query rows over the paged keys and values of their sequences.

    For query head h, KV head h // (num_heads / num_kv_heads), a row at position p and each visible
    key j::

        s[j]  = softmax_scale * k_scale * (q . k[j])
        s[j]  = softcap * tanh(s[j] / softcap)            if softcap > 0
        s[j] -= alibi_slope * |p - j|                     if alibi_slopes
        lse   = log(sum_j exp(s[j]) + exp(sink))          (the sink only if sinks)
        out   = v_scale * sum_j exp(s[j] - lse) * v[j]

    A row that sees no key gives out 0 and lse -inf (with sinks: the sink).

    Parameters
    ----------
    query : [total_q, num_heads, head_dim]
    k_cache : [num_pages, page_size, num_kv_heads, head_dim]
    v_cache : [num_pages, page_size, num_kv_heads, v_head_dim]
    block_table : [batch, max_pages] int32, the pages of each sequence in order
    cu_seqlens_q : [batch + 1] int32, rows of sequence b are cu_seqlens_q[b] .. cu_seqlens_q[b + 1]
    seqused_k : [batch] int32, keys of each sequence, those of this step's tokens included
    softmax_scale : default 1 / sqrt(head_dim)
    causal, window_size : see `visible_range`
    alibi_slopes : [num_heads] or [batch, num_heads] float32
    sinks : [num_heads] float32
    k_scale, v_scale : [1] or [num_kv_heads] float32
    plan : ignored; a result never depends on it
    out : [total_q, num_heads, v_head_dim], written and returned when given
    compute_dtype : every sum and product is made in this dtype
    out_dtype : default that of the query; float64 asks for the unrounded result

    Returns
    -------
    out, or (out, lse) with lse [num_heads, total_q] float32 (float64 if `out_dtype` is)

    Sources: Vaswani et al. 2017 (arXiv:1706.03762), Shazeer 2019 (MQA, 1911.02150), Ainslie et al.
    2023 (GQA, 2305.13245), Press et al. 2022 (ALiBi, 2108.12409), Gemma 2 (softcap, 2408.00118),
    Xiao et al. 2024 (sinks, 2309.17453; the learned per-head logit is that of gpt-oss).
    """
    total_q, num_heads, head_dim = query.shape
    num_kv_heads, v_head_dim = v_cache.shape[2:]
    group = num_heads // num_kv_heads
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if out is None:
        dtype = query.dtype if out_dtype is None else out_dtype
        out = query.new_empty(total_q, num_heads, v_head_dim, dtype=dtype)
    lse_dtype = torch.float64 if out.dtype == torch.float64 else torch.float32
    lse = query.new_empty(num_heads, total_q, dtype=lse_dtype)

    starts = cu_seqlens_q.tolist()
    for b, kv_len in enumerate(seqused_k.tolist()):
        rows = slice(starts[b], starts[b + 1])
        first, end = visible_range(starts[b + 1] - starts[b], kv_len, causal, window_size)
        for kv_head in range(num_kv_heads):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            row_out, row_lse = _attend_one_kv_head(
                query[rows, heads].to(compute_dtype),
                k_cache[:, :, kv_head],
                v_cache[:, :, kv_head],
                block_table[b],
                first,
                end,
                position=torch.arange(kv_len - len(first), kv_len),
                scale=scale * _scale_of(k_scale, kv_head),
                softcap=softcap,
                slopes=_of_heads(alibi_slopes, b, heads, compute_dtype),
                sinks=_of_heads(sinks, b, heads, compute_dtype),
            )
            out[rows, heads] = (row_out * _scale_of(v_scale, kv_head)).to(out.dtype)
            lse[heads, rows] = row_lse.t().to(lse_dtype)
    return (out, lse) if return_lse else out


def _attend_one_kv_head(
    q: Tensor,  # [rows, group, head_dim]
    k_pages: Tensor,  # [num_pages, page_size, head_dim]
    v_pages: Tensor,  # [num_pages, page_size, v_head_dim]
    page_ids: Tensor,  # [max_pages]
    first: Tensor,  # [rows]
    end: Tensor,  # [rows]
    *,
    position: Tensor,  # [rows]
    scale: float,
    softcap: float,
    slopes: Tensor | None,  # [group]
    sinks: Tensor | None,  # [group]
) -> tuple[Tensor, Tensor]:
    """One sequence and KV head: (out [rows, group, v_head_dim], lse [rows, group])."""
    out = q.new_zeros(q.shape[0], q.shape[1], v_pages.shape[-1])
    empty_lse = sinks if sinks is not None else q.new_full((q.shape[1],), -torch.inf)
    lse = empty_lse.expand(q.shape[:2]).clone()

    for rows, low, high in _row_groups(first, end, v_pages, page_ids):
        keys = torch.arange(low, high)
        k = _gather(k_pages, page_ids, keys).to(q.dtype)
        v = _gather(v_pages, page_ids, keys).to(q.dtype)
        scores = scale * _dot(q[rows], k)
        if softcap > 0:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            distance = (position[rows, None] - keys).abs()
            scores = scores - slopes[:, None] * distance[:, None, :]
        visible = (keys >= first[rows, None]) & (keys < end[rows, None])
        scores = torch.where(visible[:, None, :], scores, -torch.inf)

        largest = scores.amax(dim=-1)
        if sinks is not None:
            largest = torch.maximum(largest, sinks)
        weight = (scores - largest[..., None]).exp()
        total = weight.sum(dim=-1)
        if sinks is not None:
            total = total + (sinks - largest).exp()
        has_key = (end > first)[rows]  # rows without a key keep what they were given above
        out[rows][has_key] = (torch.matmul(weight, v) / total[..., None])[has_key]
        lse[rows][has_key] = (largest + total.log())[has_key]
    return out, lse


def _dot(q: Tensor, k: Tensor) -> Tensor:
    """[rows, group, head_dim] and [keys, head_dim] to [rows, group, keys]."""
    return torch.einsum("rgd,kd->rgk", q, k)


def _row_groups(
    first: Tensor, end: Tensor, v_pages: Tensor, page_ids: Tensor
) -> Iterator[tuple[slice, int, int]]:
    """Rows to be computed at once, with the range of keys to gather for them.

    All rows together, unless a value that some row sees is not finite: weight zero would not hide
    it from the rows that must not see it, so each row then gets exactly its own keys.
    """
    has_key = end > first
    if not bool(has_key.any()):
        return
    low, high = int(first[has_key].min()), int(end[has_key].max())
    if bool(_gather(v_pages, page_ids, torch.arange(low, high)).isfinite().all()):
        yield slice(0, len(first)), low, high
        return
    for row in has_key.nonzero().flatten().tolist():
        yield slice(row, row + 1), int(first[row]), int(end[row])


def _gather(pages: Tensor, page_ids: Tensor, keys: Tensor) -> Tensor:
    """The slots of the given key positions: [num_keys, dim]."""
    page_size = pages.shape[1]
    return pages[page_ids[keys // page_size].long(), keys % page_size]


def _of_heads(
    values: Tensor | None, sequence: int, heads: slice, dtype: torch.dtype
) -> Tensor | None:
    """Per-head values, [num_heads] or [batch, num_heads], of one sequence's group of heads."""
    if values is None:
        return None
    return (values[sequence] if values.dim() == 2 else values)[heads].to(dtype)


def _scale_of(scale: Tensor | None, kv_head: int) -> float:
    """A cache scale of one KV head; 1.0 where there is none."""
    if scale is None:
        return 1.0
    flat = scale.flatten()
    return float(flat[kv_head] if flat.numel() > 1 else flat[0])
