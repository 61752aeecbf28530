"""append_kv writes exactly the slots it is told to, to the bit, in every layout."""

from __future__ import annotations

import pytest
import torch
from kit import LAYOUTS, ROW_LAYOUTS, assert_bitwise_equal, rows_like, storage_bytes, threads

from wim_ext import ops, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def tokens(rows, count, heads, dims, dtype, seed=0):
    """Keys and values of `count` tokens, laid out as `rows` says."""
    g = torch.Generator().manual_seed(seed)
    made = [rows_like(rows, count, heads, dim, dtype) for dim in dims]
    for t in made:
        t.copy_(torch.randn(t.shape, generator=g))
    return made


def distinct_slots(count, num_slots, seed=0):
    return torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:count]


def check_against_reference(layout, rows, dtype, page_size, heads, dims, slots, pages=5):
    key, value = tokens(rows, len(slots), heads, dims, dtype)
    ours, theirs = (LAYOUTS[layout](pages, page_size, heads, *dims, dtype) for _ in range(2))
    ops.append_kv(key, value, *ours, slots)
    reference.append_kv(key, value, *theirs, slots)
    # Whole storages: the gaps between elements, NaN, must be NaN still.
    for mine, right in zip(ours, theirs, strict=True):
        assert_bitwise_equal(storage_bytes(mine), storage_bytes(right), f"{layout} storage")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROW_LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, rows, dtype):
    slots = distinct_slots(23, 5 * 16)
    slots[::5] = -1
    check_against_reference(layout, rows, dtype, 16, 3, (32, 32), slots)


@pytest.mark.parametrize("dims", [(8, 8), (64, 32), (32, 64), (192, 128), (256, 256), (24, 8)])
@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize("layout", ["nhd", "v_transposed", "packed"])
def test_dims(layout, heads, dims):
    check_against_reference(
        layout, "fused", torch.bfloat16, 32, heads, dims, distinct_slots(40, 160)
    )


@pytest.mark.parametrize("page_size", [1, 2, 7, 16, 48, 64, 128, 256])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_sizes(layout, page_size):
    count = min(30, 5 * page_size)
    slots = distinct_slots(count, 5 * page_size)
    check_against_reference(layout, "contiguous", torch.float32, page_size, 2, (16, 16), slots)


@pytest.mark.parametrize("layout", ["nhd", "v_transposed"])
def test_a_run_of_slots_over_page_ends(layout):
    # what a prefill chunk does: 150 tokens from the middle of page 1 on
    slots = torch.arange(70, 220)
    check_against_reference(layout, "fused", torch.bfloat16, 64, 3, (64, 64), slots)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_many_tokens_on_several_threads(num_threads):
    with threads(num_threads):
        slots = distinct_slots(1500, 40 * 64)
        check_against_reference(
            "v_transposed", "fused", torch.bfloat16, 64, 4, (32, 32), slots, pages=40
        )


def test_first_and_last_slot():
    check_against_reference(
        "nhd", "contiguous", torch.float32, 16, 1, (8, 8), torch.tensor([0, 5 * 16 - 1])
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_skipped(layout):
    check_against_reference(
        layout, "contiguous", torch.float32, 16, 2, (8, 8), torch.full((7,), -1)
    )


def test_no_tokens():
    check_against_reference(
        "hnd", "contiguous", torch.float16, 16, 2, (8, 8), torch.empty(0, dtype=torch.int64)
    )


def test_payload_bits_survive():
    # NaN payloads, infinities, -0.0 and denormals are data like any other.
    bits = torch.tensor([0x7F800001, 0x7FC12345, 0x7F800000, -0x80000000, 1, 0x007FFFFF, 0, -1])
    key = bits.to(torch.int32).view(torch.float32).reshape(1, 1, 8)
    k, v = (torch.zeros(1, 4, 1, 8) for _ in range(2))
    ops.append_kv(key, key.flip(-1), k, v, torch.tensor([2]))
    assert_bitwise_equal(k[0, 2:3], key)
    assert_bitwise_equal(v[0, 2:3], key.flip(-1))


def test_expanded_and_shared_inputs():
    # One key for all heads (stride 0) and the same tensor as key and value are fine to read.
    row = torch.arange(16.0).reshape(2, 1, 8)
    k, v = torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8)
    ops.append_kv(row.expand(2, 3, 8), row.expand(2, 3, 8), k, v, torch.tensor([1, 6]))
    for cache in (k, v):
        assert_bitwise_equal(cache[0, 1], row[0].expand(3, 8))
        assert_bitwise_equal(cache[1, 2], row[1].expand(3, 8))


def test_a_strided_slot_mapping_is_refused():
    slots = torch.tensor([3, 99, 5, 99])[::2]
    k, v = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    key = torch.ones(2, 1, 8)
    message = (
        r"^slot_mapping must be contiguous in its last dimension \(stride 1\), found stride 2$"
    )
    with pytest.raises(ValueError, match=message):
        ops.append_kv(key, key, k, v, slots)
    assert (k == 0).all()
