"""Peers' faults in kernel numerics, masks and empty rows, dead on arrival here (BC-01 to BC-12)."""

from __future__ import annotations

import math

import pytest
import torch
from cases import Case, Span, build
from kit import LSE_RELATIVE, assert_bitwise_equal
from oracle import assert_right, expected, expected_of

from wim_ext import ops, reference

pytestmark = pytest.mark.usefixtures("one_thread")

INF, NAN = math.inf, math.nan
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("nhd", "v_transposed", "packed")


def attend(x, **more):
    return ops.paged_attention(*x.args, **x.options, return_lse=True, **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("page_size", "spans"),
    [
        (4, (Span(1, 13),)),
        (4, (Span(5, 13),)),
        (16, (Span(1, 1), Span(1, 3))),
        (64, (Span(70, 130), Span(1, 129), Span(3, 100, 0, 98))),
    ],
)
def test_bc01_poisoned_pool(page_size, spans, layout, dtype):
    """The whole pool holds NaN, Inf or huge numbers wherever no sequence may look."""
    x = build(Case("bc01", spans, dtype, 4, 2, 64, 64, page_size, layout))
    x.poison(0.0)
    clean = attend(x)
    for poison in (NAN, INF, -INF, 1e30 if dtype != torch.float16 else 6e4):
        x.poison(poison)
        for found, wanted in zip(attend(x), clean, strict=True):
            assert_bitwise_equal(found, wanted, f"poison {poison}")


def test_bc03_reference_slices():
    """Masking a padded tensor lets NaN through (0 * NaN); the reference never gathers it."""
    x = build(Case("bc03", (Span(3, 13), Span(1, 2)), page_size=16))
    x.poison(NAN)
    out = reference.paged_attention(*x.args)
    assert out.isfinite().all()
    x.poison(0.0)
    assert_bitwise_equal(out, reference.paged_attention(*x.args))
    # and what torch does with the same data masked, which is why:
    v = torch.tensor([1.0, NAN]).reshape(1, 1, 2, 1)
    mask = torch.tensor([[True, False]])
    masked = torch.nn.functional.scaled_dot_product_attention(v[..., :1, :], v, v, attn_mask=mask)
    assert masked.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_bc04_nan_is_loud(which, value, dtype):
    """A NaN or infinity that a row sees is not a plausible number there, and is nowhere else."""
    x = build(Case("bc04", (Span(6, 40), Span(1, 20)), dtype, 4, 2, 32, 32, 16))
    clean, clean_lse = attend(x)
    affected = torch.zeros(7, 4, dtype=torch.bool)
    if which == "query":
        x.query[2, 1, 5] = value
        affected[2, 1] = True
    else:  # key 37 of sequence 0 in KV head 1: rows 3, 4, 5 and query heads 2, 3
        cache = x.k_cache if which == "key" else x.v_cache
        cache[int(x.block_table[0, 2]), 5, 1, 3] = value
        affected[3:6, 2:] = True
    out, lse = attend(x)
    exact = expected_of(x)
    for row, head in (~affected).nonzero().tolist():
        assert_bitwise_equal(out[row, head], clean[row, head], f"row {row}, head {head}")
        assert_bitwise_equal(lse[head, row], clean_lse[head, row])
    assert_right(exact, out, lse)  # non-finite exactly where the exact result is
    if math.isnan(value) or which == "value":
        assert not out[affected].isfinite().all(dim=-1).any()


def test_bc04_nan_among_many_splits_and_shared_rows():
    spans = (Span(40, 1500), Span(1, 1400, 0, 1399), Span(1, 700, 0, 699))
    x = build(Case("bc04-split", spans, torch.float32, 2, 1, 32, 32, 64))
    clean, _ = attend(x)
    x.k_cache[int(x.block_table[0, 1000 // 64]), 1000 % 64, 0, 0] = NAN  # sequences 0 and 1 see it
    out, lse = attend(x)
    assert out[:41].isnan().all()
    assert lse[:, :41].isnan().all()
    assert_bitwise_equal(out[41:], clean[41:])


def test_all_visible_scores_minus_infinity():
    """As softmax: rows that see keys, all of weight zero, are NaN and not an empty row's zero."""
    x = build(Case("bc04-minus", (Span(2, 5), Span(1, 3)), num_heads=1, num_kv_heads=1))
    x.query[:2] = 0.0
    x.query[:2, :, 0] = 1.0
    x.k_cache[int(x.block_table[0, 0]), :5, :, 0] = -INF
    out, _ = attend(x)
    assert out[:2].isnan().all()
    assert out[2].isfinite().all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("kv", [0, 1, 16])
@pytest.mark.parametrize("q", [2, 17, 65])
def test_bc05_no_visible_key(q, kv, sinks, causal):
    x = build(Case("bc05", (Span(q, kv), Span(1, 9)), sinks=sinks, causal=causal))
    out, lse = attend(x)
    empty = q - kv if causal and q > kv else q if kv == 0 else 0
    assert (out[:empty] == 0).all()
    wanted = x.options["sinks"][:, None] if sinks else torch.full((4, 1), -INF)
    assert_bitwise_equal(lse[:, :empty], wanted.expand(4, empty))
    assert out[empty:].isfinite().all()
    assert lse[:, empty:].isfinite().all()
    assert_right(expected(x.case), out, lse)


def test_bc07_merge_identity():
    g = torch.Generator().manual_seed(7)
    none = torch.zeros(50, 4, 16), torch.full((4, 50), -INF)
    merged = ops.merge_states(*none, *none)
    assert_bitwise_equal(merged[0], none[0])
    assert_bitwise_equal(merged[1], none[1])
    for _ in range(20):
        states = []
        for _ in range(3):
            out, lse = torch.randn(50, 4, 16, generator=g), torch.randn(4, 50, generator=g) * 4
            empty = torch.rand(4, 50, generator=g) < 0.25
            states.append((out.masked_fill(empty.t()[..., None], 0), lse.masked_fill(empty, -INF)))
        a, b, c = states
        for merged in (ops.merge_states(*a, *none), ops.merge_states(*none, *a)):
            assert_bitwise_equal(merged[0], a[0])
            assert_bitwise_equal(merged[1], a[1])
        left = ops.merge_states(*ops.merge_states(*a, *b), *c)
        right = ops.merge_states(*a, *ops.merge_states(*c, *b))
        torch.testing.assert_close(left, right, rtol=LSE_RELATIVE, atol=1e-6)
        assert not left[0].isnan().any()
        all_empty = (a[1] == -INF) & (b[1] == -INF) & (c[1] == -INF)
        assert_bitwise_equal(left[1] == -INF, all_empty)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q", "kv"), [(1, 1), (2, 5), (5, 5), (64, 65), (63, 128), (7, 4096)])
def test_bc08_bottom_right(q, kv, dtype):
    """Row i sees the keys j <= kv - q + i: V counts them, K gives all the same weight."""
    x = build(Case("bc08", (Span(q, kv),), dtype, 2, 1, 32, 32, 16))
    x.k_cache.zero_()
    x.v_cache.zero_()
    one_hot_of_last = torch.arange(kv) >= kv - q  # 1 for the chunk's own keys
    pages = x.block_table[0, torch.arange(kv) // 16].long()
    x.v_cache[pages, torch.arange(kv) % 16] = one_hot_of_last.to(dtype)[:, None, None]
    out, lse = attend(x)
    seen = torch.arange(kv - q + 1, kv + 1, dtype=torch.float64)
    own = torch.arange(1, q + 1, dtype=torch.float64)
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(
        out.double(), (own / seen)[:, None, None].expand_as(out), rtol=tolerance, atol=0
    )
    # One key more or less in 65 changes the lse by 1.5e-2.
    right = seen.log().expand_as(lse)
    torch.testing.assert_close(lse.double(), right, rtol=LSE_RELATIVE, atol=LSE_RELATIVE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bc10_warm_chunk(layout, dtype):
    """A chunk on a warm cache sees the same as those rows of a prefill in one piece, to the bit."""
    length = 150
    x = build(Case("bc10", (Span(length, length),), dtype, 6, 2, 64, 64, 16, layout))
    whole, whole_lse = attend(x)
    for sizes in ([75, 75], [1] * 20 + [130], [149, 1], [16, 48, 17, 69], [140] + [1] * 10):
        begin = 0
        for size in sizes:
            end = begin + size
            cu, used = (torch.tensor(t, dtype=torch.int32) for t in ([0, size], [end]))
            # The keys behind the chunk are not written yet at this point.
            k, v = x.k_cache.clone(), x.v_cache.clone()
            later = torch.arange(end, length)
            pages = x.block_table[0, later // 16].long()
            k[pages, later % 16] = NAN
            v[pages, later % 16] = NAN
            out, lse = ops.paged_attention(
                x.query[begin:end], k, v, x.block_table, cu, used, return_lse=True
            )
            assert_bitwise_equal(out, whole[begin:end], f"rows {begin}..{end}")
            assert_bitwise_equal(lse, whole_lse[:, begin:end])
            begin = end


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spans", [(Span(1, 5000),), (Span(1, 3000), Span(2, 1), Span(1, 513))])
def test_bc11_splits(spans, dtype):
    """The plan for any number of threads, or none at all: right, and the same bits."""
    x = build(Case("bc11", spans, dtype, 8, 2, 64, 64, 64))
    out, lse = attend(x)
    assert_right(expected(x.case), out, lse)
    for count in range(1, 17):
        plan = ops.plan_attention(*x.tables, **x.plan_options, num_threads=count)
        for found, wanted in zip(attend(x, plan=plan), (out, lse), strict=True):
            assert_bitwise_equal(found, wanted, f"plan for {count} threads")


@pytest.mark.parametrize("group", [1, 2, 3, 5, 7, 8, 16, 24])
@pytest.mark.parametrize("kv_heads", [1, 2, 3])
@pytest.mark.parametrize("q", [1, 20])
def test_bc12_gqa(q, kv_heads, group):
    """V of KV head h is the constant h + 1, so every query head names the KV head that it read."""
    num_heads = group * kv_heads
    x = build(Case("bc12", (Span(q, 40),), torch.float32, num_heads, kv_heads, 32, 32, 16))
    x.v_cache.copy_(torch.arange(1.0, kv_heads + 1)[:, None].expand_as(x.v_cache))
    out, _ = attend(x)
    wanted = torch.arange(1.0, kv_heads + 1).repeat_interleave(group)
    torch.testing.assert_close(out, wanted[:, None].expand_as(out), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("num_heads", "kv_heads"), [(33, 2), (3, 2), (28, 3), (4, 0), (2, 4)])
def test_bc12_gqa_refuses_ragged_groups(num_heads, kv_heads):
    found = f"found {num_heads} and {kv_heads}"
    text = f"^num_heads must be a positive multiple of num_kv_heads, {found}$"
    k = torch.zeros(2, 16, kv_heads, 32)
    tables = [torch.tensor(t, dtype=torch.int32) for t in ([[0]], [0, 1], [5])]
    with pytest.raises(ValueError, match=text):
        ops.paged_attention(torch.zeros(1, num_heads, 32), k, k.clone(), *tables)
