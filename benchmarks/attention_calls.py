"""What benchmarks/attention.py times: one piece of attention, by us and by torch, in several forms.

All forms of a shape work on the same numbers; each returns ``[tokens, num_heads, head_dim]``, and
the first, ``ours``, gives what the others must agree with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from wim_ext import ops
from wim_ext.cache import PagedKVCache
from wim_ext.plan import AttentionPlan

PAGE = 64
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """`rows` new tokens after a `prefix`, and `branches` more sequences of one row on that prefix.

    Without `rows` there are the branches alone.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rows: int
    prefix: int
    branches: int = 0

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}"
        parts = [f"{self.rows}"] if self.rows else []
        parts += [f"{self.branches} branches"] if self.branches else []
        return f"{heads}, {' + '.join(parts)} after {self.prefix}"

    @property
    def lengths(self) -> list[int]:
        """New tokens of each sequence."""
        return ([self.rows] if self.rows else []) + [1] * self.branches


class Inputs:
    """Random queries, keys and values of a shape, in pages of our cache and in one piece."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        new = shape.lengths
        own = [-(-(shape.prefix + n) // PAGE) - shape.prefix // PAGE for n in new]
        shared = shape.prefix // PAGE
        self.table = torch.zeros(len(new), shared + max(own), dtype=torch.int32)
        order = torch.randperm(shared + sum(own)).int()
        self.table[:, :shared] = order[:shared]
        at = shared
        for i, n in enumerate(own):
            self.table[i, shared : shared + n] = order[at : at + n]
            at += n
        self.cu_seqlens_q = torch.tensor([0, *new]).cumsum(0, dtype=torch.int32)
        self.seqused_k = torch.tensor([shape.prefix + n for n in new], dtype=torch.int32)
        cache = PagedKVCache(
            num_layers=1,
            num_pages=len(order),
            page_size=PAGE,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=dtype,
        )
        self.k_cache, self.v_cache = (p.copy_(torch.randn(p.shape)) for p in cache.layer(0))
        self.query = torch.randn(sum(new), shape.num_heads, shape.head_dim).to(dtype)

    def plan(self, table: Tensor | None = None) -> AttentionPlan:
        return ops.plan_attention(
            self.table if table is None else table,
            self.cu_seqlens_q,
            self.seqused_k,
            num_heads=self.shape.num_heads,
            num_kv_heads=self.shape.num_kv_heads,
            page_size=PAGE,
        )

    def gather(self, sequence: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a sequence in one piece, ``[1, num_kv_heads, length, head_dim]``."""
        length = int(self.seqused_k[sequence])
        pages = self.table[sequence, : -(-length // PAGE)].long()
        keys, values = (
            c[pages].flatten(0, 1)[:length].transpose(0, 1).contiguous()[None]
            for c in (self.k_cache, self.v_cache)
        )
        return keys, values


def ours(inputs: Inputs, plan: AttentionPlan | None = None) -> Call:
    """The pages as `PagedKVCache` lays them out, with a plan made beforehand, as in a model."""
    plan, out = plan or inputs.plan(), torch.empty_like(inputs.query)
    return lambda: ops.paged_attention(
        inputs.query,
        inputs.k_cache,
        inputs.v_cache,
        inputs.table,
        inputs.cu_seqlens_q,
        inputs.seqused_k,
        plan=plan,
        out=out,
    )


def ours_nhd(inputs: Inputs) -> Call:
    """The same over plain ``[page, slot, head, dim]`` memory, as another engine would bring it."""
    plan, out = inputs.plan(), torch.empty_like(inputs.query)
    keys, values = inputs.k_cache.contiguous(), inputs.v_cache.contiguous()
    return lambda: ops.paged_attention(
        inputs.query,
        keys,
        values,
        inputs.table,
        inputs.cu_seqlens_q,
        inputs.seqused_k,
        plan=plan,
        out=out,
    )


def ours_separate(inputs: Inputs) -> Call:
    """Our own kernel, a call for each sequence: nothing is shared."""
    calls = []
    borders = inputs.cu_seqlens_q.tolist()
    for i in range(len(inputs.seqused_k)):
        query = inputs.query[borders[i] : borders[i + 1]]
        table, used = inputs.table[i : i + 1], inputs.seqused_k[i : i + 1]
        cu = torch.tensor([0, len(query)], dtype=torch.int32)
        heads = inputs.shape.num_heads, inputs.shape.num_kv_heads
        plan = ops.plan_attention(
            table, cu, used, num_heads=heads[0], num_kv_heads=heads[1], page_size=PAGE
        )
        calls.append((query, inputs.k_cache, inputs.v_cache, table, cu, used, plan))
    return lambda: torch.cat([ops.paged_attention(*c[:-1], plan=c[-1]) for c in calls])


def _queries(inputs: Inputs) -> Tensor:
    return inputs.query.transpose(0, 1).contiguous()[None]


def sdpa(inputs: Inputs) -> Call:
    """One sequence, contiguous keys and values, a boolean mask where it needs one."""
    keys, values = inputs.gather(0)
    queries, mask = _queries(inputs), _mask(inputs.shape)
    causal = inputs.shape.rows > 1 and mask is None
    return lambda: _tokens(
        scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True
        )
    )


def sdpa_gathered(inputs: Inputs) -> Call:
    """`sdpa` with the gather that a paged cache needs first."""
    queries, mask = _queries(inputs), _mask(inputs.shape)
    causal = inputs.shape.rows > 1 and mask is None

    def call() -> Tensor:
        keys, values = inputs.gather(0)
        return _tokens(
            scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True
            )
        )

    return call


def sdpa_folded(inputs: Inputs) -> Call:
    """One row: its group of query heads as rows of the KV head, which reads K and V once."""
    keys, values = inputs.gather(0)
    group = inputs.shape.num_heads // inputs.shape.num_kv_heads
    queries = inputs.query.view(1, inputs.shape.num_kv_heads, group, -1)
    return lambda: scaled_dot_product_attention(queries, keys, values).flatten(0, 2)[None]


def sdpa_composed(inputs: Inputs) -> Call:
    """torch's best for a chunk: prefix without a mask, chunk causal, merged by their LSE."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    group = inputs.shape.num_heads // inputs.shape.num_kv_heads
    keys, values = (x.repeat_interleave(group, 1) for x in inputs.gather(0))
    queries, prefix = _queries(inputs), inputs.shape.prefix
    if prefix == 0:
        return lambda: _tokens(flash(queries, keys, values, is_causal=True)[0])
    old = keys[:, :, :prefix].contiguous(), values[:, :, :prefix].contiguous()
    new = keys[:, :, prefix:].contiguous(), values[:, :, prefix:].contiguous()

    def call() -> Tensor:
        (a, a_lse), (b, b_lse) = flash(queries, *old), flash(queries, *new, is_causal=True)
        weight = torch.sigmoid(a_lse - b_lse)[..., None]
        return _tokens((b + (a - b) * weight).to(queries.dtype))

    return call


def _mask(shape: Shape) -> Tensor | None:
    if shape.rows <= 1 or shape.prefix == 0:
        return None
    return torch.ones(shape.rows, shape.prefix + shape.rows, dtype=torch.bool).tril(shape.prefix)


def _tokens(result: Tensor) -> Tensor:
    return result[0].transpose(0, 1)
