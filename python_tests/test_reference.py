"""The reference is the oracle of all op tests, so it is checked against what is not ours."""

from __future__ import annotations

import math

import pytest
import torch
from kit import assert_bitwise_equal
from torch import Tensor

from wim_ext import reference

NAN, INF = math.nan, math.inf


def one_sequence(
    q: int, kv: int, *, heads: int = 2, kv_heads: int = 1, dim: int = 8, page: int = 4
):
    """The positional arguments of `paged_attention`, float64, pages in descending order."""
    g = torch.Generator().manual_seed(q * 1000 + kv)
    pages = -(-kv // page)
    query = torch.randn(q, heads, dim, generator=g, dtype=torch.float64)
    k_cache = torch.randn(pages + 1, page, kv_heads, dim, generator=g, dtype=torch.float64)
    v_cache = torch.randn(pages + 1, page, kv_heads, dim, generator=g, dtype=torch.float64)
    table = torch.arange(pages, 0, -1, dtype=torch.int32)[None]
    return query, k_cache, v_cache, table, as_int32(0, q), as_int32(kv)


def as_int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def dense(cache: Tensor, table: Tensor, kv: int) -> Tensor:
    return cache[table[0].long()].flatten(0, 1)[:kv]


def sdpa(args, causal: bool, window=(-1, -1), scale=None, bias=None) -> Tensor:
    query, k_cache, _, table, _, seqused = args
    q, kv = len(query), int(seqused[0])
    group = query.shape[1] // k_cache.shape[2]
    k, v = (dense(c, table, kv).repeat_interleave(group, 1).transpose(0, 1) for c in args[1:3])
    first, end = reference.visible_range(q, kv, causal, window)
    j = torch.arange(kv)
    mask = torch.where((j >= first[:, None]) & (j < end[:, None]), 0.0, -INF).double()
    mask = mask if bias is None else mask + bias
    out = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1), k, v, attn_mask=mask, scale=scale
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 2), (7, 1)])
@pytest.mark.parametrize(("q", "kv"), [(1, 1), (1, 13), (5, 5), (4, 16), (7, 33)])
@pytest.mark.parametrize("causal", [True, False])
def test_equals_sdpa(q, kv, causal, heads, kv_heads):
    args = one_sequence(q, kv, heads=heads, kv_heads=kv_heads)
    out = reference.paged_attention(*args, causal=causal, softmax_scale=0.4)
    torch.testing.assert_close(out, sdpa(args, causal, scale=0.4), rtol=0, atol=1e-14)


@pytest.mark.parametrize("window", [(0, -1), (3, -1), (3, 2), (-1, 1), (0, 0), (100, 100)])
@pytest.mark.parametrize("causal", [True, False])
def test_window_equals_masked_sdpa(window, causal):
    args = one_sequence(9, 30)
    out = reference.paged_attention(*args, causal=causal, window_size=window)
    torch.testing.assert_close(out, sdpa(args, causal, window), rtol=0, atol=1e-14)


def test_alibi_equals_biased_sdpa():
    args = one_sequence(6, 20)
    slopes = torch.tensor([0.5, 0.125])
    distance = (torch.arange(14, 20)[:, None] - torch.arange(20)).abs()
    bias = -slopes.double()[:, None, None] * distance
    for causal in (True, False):
        expected = sdpa(args, causal, bias=bias)
        for form in (slopes, slopes[None]):  # [heads] and [batch, heads]
            out = reference.paged_attention(*args, causal=causal, alibi_slopes=form)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)


def tiny(scores: list[float], values: list[float]):
    """One row, one head: the scores and (scalar) values are as given, softmax_scale 1."""
    k = torch.tensor(scores, dtype=torch.float64).reshape(1, -1, 1, 1)
    v = torch.tensor(values, dtype=torch.float64).reshape(1, -1, 1, 1)
    query = torch.ones(1, 1, 1, dtype=torch.float64)
    return query, k, v, as_int32(0)[None], as_int32(0, 1), as_int32(len(scores))


def test_softmax_by_hand():
    # weights 1/4, 1/4, 2/4
    args = tiny([0.0, 0.0, math.log(2)], [4.0, 8.0, 16.0])
    out, lse = reference.paged_attention(*args, softmax_scale=1.0, return_lse=True)
    assert out.item() == pytest.approx(11.0, abs=1e-14)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-14)


def test_sink_by_hand():
    # the sink takes half of the weight; lse counts it
    args = tiny([0.0, 0.0], [4.0, 8.0])
    sinks = torch.tensor([math.log(2)], dtype=torch.float64)
    out, lse = reference.paged_attention(*args, softmax_scale=1.0, sinks=sinks, return_lse=True)
    assert out.item() == pytest.approx(3.0, abs=1e-14)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-14)


def test_softcap_by_hand():
    args = tiny([100.0, 0.0], [1.0, 0.0])
    out = reference.paged_attention(*args, softmax_scale=1.0, softcap=2.0)
    capped = math.exp(2 * math.tanh(50.0))
    assert out.item() == pytest.approx(capped / (capped + 1), abs=1e-14)


def test_softcap_comes_before_alibi():
    # ALiBi is not capped: the far key's score is 2 * tanh(50) - 10 * 1
    args = tiny([100.0, 0.0], [1.0, 0.0])
    out = reference.paged_attention(
        *args, softmax_scale=1.0, softcap=2.0, alibi_slopes=torch.tensor([10.0])
    )
    far = math.exp(2 * math.tanh(50.0) - 10)
    assert out.item() == pytest.approx(far / (far + 1), abs=1e-14)


def test_scales_by_hand():
    args = tiny([0.0, 2 * math.log(3)], [1.0, 5.0])
    half, double = torch.tensor([0.5]), torch.tensor([2.0])
    out, lse = reference.paged_attention(
        *args, softmax_scale=1.0, k_scale=half, v_scale=double, return_lse=True
    )
    assert out.item() == pytest.approx(2 * (1 + 3 * 5) / 4, abs=1e-14)
    assert lse.item() == pytest.approx(math.log(4), abs=1e-14)


def test_scale_of_each_kv_head():
    args = one_sequence(3, 9, heads=4, kv_heads=2)
    scale = torch.tensor([0.5, 2.0])
    scaled = [*args]
    scaled[1], scaled[2] = (c * scale[:, None].double() for c in args[1:3])
    torch.testing.assert_close(
        reference.paged_attention(*args, k_scale=scale, v_scale=scale),
        reference.paged_attention(*scaled),
        rtol=0,
        atol=1e-14,
    )


def test_default_scale_is_one_over_root_head_dim():
    args = one_sequence(2, 6, dim=16)
    assert_bitwise_equal(
        reference.paged_attention(*args), reference.paged_attention(*args, softmax_scale=0.25)
    )


def test_bottom_right_by_hand():
    first, end = reference.visible_range(2, 5, True, (-1, -1))
    assert (first.tolist(), end.tolist()) == ([0, 0], [4, 5])
    first, end = reference.visible_range(4, 2, True, (-1, -1))  # two rows stand before key 0
    assert (first.tolist(), end.tolist()) == ([0, 0, 0, 0], [0, 0, 1, 2])
    first, end = reference.visible_range(3, 10, False, (2, 1))
    assert (first.tolist(), end.tolist()) == ([5, 6, 7], [9, 10, 10])
    first, end = reference.visible_range(2, 10, True, (0, 4))  # causal wins over the right side
    assert (first.tolist(), end.tolist()) == ([8, 9], [9, 10])


def test_empty_rows():
    args = one_sequence(5, 2)
    out, lse = reference.paged_attention(*args, return_lse=True)
    assert (out[:3] == 0).all()
    assert (lse[:, :3] == -INF).all()
    assert out[3:].isfinite().all()
    sinks = torch.tensor([1.5, -2.0])
    out, lse = reference.paged_attention(*args, sinks=sinks, return_lse=True)
    assert (out[:3] == 0).all()
    assert (lse[:, :3] == sinks[:, None]).all()


def test_dtypes_of_the_results():
    args = one_sequence(2, 5)
    half = [a.half() if a.is_floating_point() else a for a in args]
    out, lse = reference.paged_attention(*half, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.float16, torch.float32)
    out, lse = reference.paged_attention(*half, return_lse=True, out_dtype=torch.float64)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
    given = torch.empty(2, 2, 8)
    assert reference.paged_attention(*args, out=given) is given


def test_float32_computation_differs_from_float64():
    args = one_sequence(3, 40)
    args32 = [a.float() if a.is_floating_point() else a for a in args]
    exact = reference.paged_attention(*args32, out_dtype=torch.float64)
    naive = reference.paged_attention(*args32, compute_dtype=torch.float32).double()
    assert 0 < (exact - naive).abs().max() < 1e-5


@pytest.mark.parametrize("value", [NAN, INF, 1e300])
def test_stale_slots_are_never_gathered(value):
    query, k, v, table, cu, seqused = one_sequence(4, 10)  # page size 4: two slots are stale
    expected = reference.paged_attention(query, k, v, table, cu, seqused)
    for cache in (k, v):
        cache[table[0, -1], 2:] = value
        cache[0] = value
    out = reference.paged_attention(query, k, v, table, cu, seqused)
    assert_bitwise_equal(out, expected)


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_nan_stays_with_the_rows_that_see_it(which):
    args = one_sequence(4, 10, heads=2, kv_heads=2)
    clean = reference.paged_attention(*args)
    query, k, v, table, *_ = args
    if which == "query":
        query[1, 0, 0] = NAN
        affected = [1]
    else:
        (k if which == "key" else v)[table[0, 2], 0, 0, 0] = NAN  # key 8: rows 2 and 3
        affected = [2, 3]
    out = reference.paged_attention(*args)
    assert out[affected, 0].isnan().any(dim=-1).all()
    rest = [r for r in range(4) if r not in affected]
    torch.testing.assert_close(out[rest, 0], clean[rest, 0], rtol=0, atol=1e-14)
    assert_bitwise_equal(out[:, 1], clean[:, 1])


def test_all_scores_minus_infinity_is_nan():
    out, lse = reference.paged_attention(*tiny([-INF, -INF], [1.0, 2.0]), return_lse=True)
    assert out.isnan().all()
    assert lse.isnan().all()


def test_append_kv():
    key = torch.arange(12.0).reshape(3, 2, 2)
    value = -torch.arange(6.0).reshape(3, 2, 1)
    k, v = torch.zeros(2, 4, 2, 2), torch.zeros(2, 4, 2, 1)
    reference.append_kv(key, value, k, v, torch.tensor([6, -1, 3]))
    assert_bitwise_equal(k[1, 2], key[0])
    assert_bitwise_equal(k[0, 3], key[2])
    assert_bitwise_equal(v[1, 2], value[0])
    assert int((k != 0).any(-1).any(-1).sum()) == 2


def test_copy_pages():
    caches = [torch.arange(8.0).reshape(4, 2), torch.arange(4).reshape(4, 1)]
    reference.copy_pages(caches, torch.tensor([3, 0]), torch.tensor([1, 2]))
    assert caches[0].tolist() == [[0, 1], [6, 7], [0, 1], [6, 7]]
    assert caches[1].tolist() == [[0], [3], [0], [3]]


def test_merge_of_halves_is_the_whole():
    query, k, v, table, cu, seqused = one_sequence(1, 12)
    whole = reference.paged_attention(query, k, v, table, cu, seqused, return_lse=True)
    a = reference.paged_attention(query, k, v, table, cu, as_int32(8), return_lse=True)
    b = reference.paged_attention(query, k, v, table[:, 2:], cu, as_int32(4), return_lse=True)
    merged = reference.merge_states(*a, *b)
    torch.testing.assert_close(merged, whole, rtol=0, atol=1e-14)


def test_merge_with_empty_states():
    out = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]])
    lse = torch.tensor([[3.0, -INF]])
    empty = (
        torch.full_like(out, NAN),
        torch.full_like(lse, -INF),
    )  # an empty state's out is not read
    for merged in (
        reference.merge_states(out, lse, *empty),
        reference.merge_states(*empty, out, lse),
    ):
        assert_bitwise_equal(merged[0], out)
        assert_bitwise_equal(merged[1], lse)


def test_merge_writes_out_and_lse():
    out, lse = torch.empty(1, 1, 2), torch.empty(1, 1)
    state = torch.ones(1, 1, 2), torch.zeros(1, 1)
    got = reference.merge_states(*state, *state, out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse
    assert out.tolist() == [[[1.0, 1.0]]]
    assert lse.item() == pytest.approx(math.log(2))
