"""Faults of peers in positions and chunked prefill (CASES part D, and BC-14), dead on arrival."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, make, plain_logits

from wim_ext import ops
from wim_ext.cache import PagedKVCache, Sequence
from wim_ext.model import PagedModel, Work

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [(7 * i * i + 13 * i + 3) % VOCAB for i in range(50)]


def paged(hf_model: Any, num_pages: int = 32, page_size: int = 16) -> PagedModel:
    cache = PagedKVCache(
        num_layers=2, num_pages=num_pages, page_size=page_size, dtype=hf_model.dtype
    )
    return PagedModel(hf_model, cache)


@contextmanager
def positions_of(hf_model: Any) -> Iterator[list[list[int]]]:
    """The position ids of every forward of the model in the block."""
    seen: list[list[int]] = []

    def note(_: Any, args: Any, options: dict[str, Any]) -> None:
        assert options["position_ids"].dtype == torch.int64
        seen.append(options["position_ids"][0].tolist())

    hook = hf_model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("position", [257, 1857, 131_068])
def test_bc14_rope_table(position: int, dtype: torch.dtype) -> None:
    """Positions arrive as exact integers, and angles are float32, in half-precision models too.

    The table is the unmodified model's own. Its angle, position x frequency in float32, is off by
    at most half a unit in the last place; bfloat16 models round the finished cosine, not the angle.
    """
    hf_model = make("llama", max_position_embeddings=1 << 18).to(dtype)
    model = paged(hf_model, num_pages=(1 << 17) // 256 + 1, page_size=256)
    sequence = model.new_sequence()
    model.cache.reserve([(sequence, position)])
    rotary, tables = hf_model.model.rotary_emb, []
    hook = rotary.register_forward_hook(lambda *call: tables.append(call[2]))
    with positions_of(hf_model) as seen:
        model.forward([Work(sequence, TOKENS[:4])])
    hook.remove()
    assert seen == [[position, position + 1, position + 2, position + 3]]
    [(cos, sin)] = tables
    exact = torch.tensor(seen[0], dtype=torch.float64)[:, None] * rotary.inv_freq.double()
    exact = torch.cat([exact, exact], dim=-1)
    tolerance = exact * 2.0**-24 + 1e-6 + (2.0**-8 if dtype == torch.bfloat16 else 0.0)
    assert ((cos[0].double() - exact.cos()).abs() <= tolerance).all()
    assert ((sin[0].double() - exact.sin()).abs() <= tolerance).all()


def test_bc31_positions() -> None:
    """A token's position is the number of tokens before it, after chunks, forks and rollbacks."""
    hf_model = make("llama")
    model = paged(hf_model)
    trunk = model.new_sequence()
    with positions_of(hf_model) as seen:
        model.forward([Work(trunk, TOKENS[:20], 0)])
        model.forward([Work(trunk, TOKENS[20:25], 0)])
        branch = trunk.fork(17)
        model.forward([Work(branch, TOKENS[:2], 0), Work(trunk, TOKENS[25:28], 0)])
        trunk.rollback(3)
        branch.rollback(18)
        model.forward([Work(trunk, TOKENS[3:5], 0), Work(branch, TOKENS[18:20], 0)])
    assert seen == [
        list(range(20)),
        [20, 21, 22, 23, 24],
        [17, 18, 25, 26, 27],
        [3, 4, 18, 19],
    ]


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_bc32_visible_length(chunk: int) -> None:
    """After a chunk a sequence is start + q tokens long; slots not yet written are never read."""
    hf_model = make("llama")
    model = paged(hf_model)
    sequence = model.new_sequence()
    model.forward([Work(sequence, TOKENS[:1], 0)])
    sequence.rollback(0)
    for layer in range(2):
        for pages in model.cache.layer(layer):
            pages.fill_(float("nan"))
    lengths: list[int] = []
    reserve = model.cache.reserve

    def noting(work: Any) -> Any:
        batch = reserve(work)
        lengths.append(int(batch.seqused_k[0]))
        return batch

    model.cache.reserve = noting  # type: ignore[method-assign]
    rows = []
    for begin in range(0, len(TOKENS), chunk):
        part = TOKENS[begin : begin + chunk]
        rows += model.forward([Work(sequence, part, len(part))])
    assert lengths == [min(begin + chunk, 50) for begin in range(0, 50, chunk)]
    expected = plain_logits(hf_model, TOKENS)
    assert (torch.cat(rows) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_bc33_len_vs_pos() -> None:
    """Length and next position are one number, because only the end can be dropped.

    There is no call that evicts from the front or the middle; whoever adds one has to give a
    sequence a position of its own, and fails here first.
    """
    words = ("evict", "drop", "trim", "slide", "shift", "compress", "keep", "discard")
    for kind in (Sequence, PagedKVCache):
        assert not [name for name in dir(kind) if any(word in name for word in words)]
    hf_model = make("mistral")  # a window does not evict either
    model = paged(hf_model)
    sequence = model.new_sequence()
    tokens: list[int] = []
    for grow, back in ((20, 3), (1, 0), (9, 25), (30, 1)):
        with positions_of(hf_model) as seen:
            [rows] = model.forward([Work(sequence, TOKENS[:grow])])
        assert seen == [list(range(len(tokens), len(tokens) + grow))]
        tokens += TOKENS[:grow]
        expected = plain_logits(hf_model, tokens)[-1]
        assert (rows[0] - expected).abs().max() <= 1e-4 * expected.abs().max()
        sequence.rollback(len(tokens) - back)
        del tokens[len(tokens) - back :]
        assert sequence.length == len(tokens)


CHUNKINGS = ([200], [100, 100], [1, 199], [64, 64, 64, 8], [33, 1, 1, 130, 35], [15] * 13 + [5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bc34_chunk_invariance(dtype: torch.dtype) -> None:
    """A row of attention is the same, to the bit, for any chunking and beside any other rows."""
    total, heads, kv_heads, dim = 200, 6, 2, 64
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query, key, value = (
        draw(total, heads, dim),
        draw(total, kv_heads, dim),
        draw(total, kv_heads, dim),
    )
    mate_query, mate_kv = draw(40, heads, dim), draw(40, kv_heads, dim)

    def run(chunks: list[int], with_mate: bool) -> torch.Tensor:
        cache = PagedKVCache(
            num_layers=1, num_pages=32, page_size=16, num_kv_heads=2, head_dim=dim, dtype=dtype
        )
        sequence, k_cache, v_cache = cache.new_sequence(), *cache.layer(0)
        rows, begin = [], 0
        for count in chunks:
            part = slice(begin, begin + count)
            begin += count
            work, q, k, v = [(sequence, count)], query[part], key[part], value[part]
            if with_mate:
                work = [(cache.new_sequence(), 40), *work]
                q, k, v = (
                    torch.cat(pair) for pair in ((mate_query, q), (mate_kv, k), (mate_kv, v))
                )
            batch = cache.reserve(work)
            ops.append_kv(k, v, k_cache, v_cache, batch.slot_mapping)
            out = ops.paged_attention(
                q,
                k_cache,
                v_cache,
                batch.block_table,
                batch.cu_seqlens_q,
                batch.seqused_k,
                plan=batch.plan(heads, kv_heads),
            )
            rows.append(out[-count:])
        return torch.cat(rows)

    expected = run(CHUNKINGS[0], with_mate=False)
    assert torch.isfinite(expected).all()
    for chunks in CHUNKINGS:
        assert sum(chunks) == total
        for with_mate in (False, True):
            assert torch.equal(run(chunks, with_mate), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_bc34_logits_hardly_depend_on_chunks(name: str) -> None:
    """Around attention, torch's matrix products round differently for other numbers of rows."""
    hf_model = make(name)
    expected = plain_logits(hf_model, TOKENS)
    for chunk in (1, 7, 16, 50):
        model = paged(hf_model)
        sequence, mate = model.new_sequence(), model.new_sequence()
        rows = []
        for begin in range(0, len(TOKENS), chunk):
            part = TOKENS[begin : begin + chunk]
            _, found = model.forward([Work(mate, [3], 0), Work(sequence, part, len(part))])
            rows.append(found)
        found = torch.cat(rows)
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
