"""copy_pages copies whole pages, to the bit, and nothing else."""

from __future__ import annotations

import pytest
import torch
from kit import LAYOUTS, assert_bitwise_equal, storage_bytes, threads

from wim_ext import ops, reference


def filled(layout, pages, page_size, heads, dims, dtype, seed):
    """K and V of one layer with a different number in every slot."""
    g = torch.Generator().manual_seed(seed)
    views = LAYOUTS[layout](pages, page_size, heads, *dims, dtype)
    for view in views:
        view.copy_(torch.randn(view.shape, generator=g))
    return list(views)


def check_against_reference(make, src, dst):
    src, dst = torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)
    ours, theirs = make(), make()
    ops.copy_pages(ours, src, dst)
    reference.copy_pages(theirs, src, dst)
    for i, (mine, right) in enumerate(zip(ours, theirs, strict=True)):
        assert_bitwise_equal(storage_bytes(mine), storage_bytes(right), f"storage of cache {i}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, page_size, dtype):
    def make():
        return filled(layout, 6, page_size, 3, (24, 16), dtype, seed=1)

    check_against_reference(make, [5, 0, 0], [1, 4, 3])


def test_all_layers_in_one_call():
    def make():
        return [
            cache
            for layer in range(5)
            for cache in filled("v_transposed", 8, 16, 2, (16, 16), torch.bfloat16, layer)
        ]

    check_against_reference(make, [2, 3], [7, 0])


def test_layers_that_differ():
    def make():
        return [
            *filled("nhd", 4, 16, 2, (32, 16), torch.float32, 0),
            *filled("hnd", 9, 64, 1, (8, 8), torch.bfloat16, 1),
            *filled("packed", 4, 1, 5, (8, 24), torch.float16, 2),
        ]

    check_against_reference(make, [3], [0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64, torch.bool])
def test_any_dtype(dtype):
    def make():
        g = torch.Generator().manual_seed(0)
        return [torch.randint(0, 2, (4, 3, 5), generator=g).to(dtype)]

    check_against_reference(make, [0, 1], [2, 3])


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 2, 3, 2), (6, 2, 1, 3, 1, 2), (6, 0, 4)])
def test_any_rank(shape):
    def make():
        return [torch.arange(float(torch.tensor(shape).prod())).reshape(shape)]

    check_against_reference(make, [5, 2], [0, 3])


def test_transposed_views():
    def make():
        return [torch.arange(6.0 * 5 * 4).reshape(4, 5, 6).permute(2, 0, 1)]

    check_against_reference(make, [5, 2], [0, 3])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_many_pages_on_several_threads(num_threads):
    def make():
        return filled("hnd", 64, 16, 2, (64, 64), torch.bfloat16, 3)

    order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).tolist()
    with threads(num_threads):
        check_against_reference(make, order[:32], order[32:])


def test_one_source_for_many_targets():
    def make():
        return filled("nhd", 9, 4, 1, (8, 8), torch.float32, 4)

    check_against_reference(make, [4] * 8, [0, 1, 2, 3, 5, 6, 7, 8])


def test_nothing_to_copy():
    def make():
        return filled("nhd", 2, 4, 1, (8, 8), torch.float32, 5)

    check_against_reference(make, [], [])
    ops.copy_pages([], torch.tensor([0]), torch.tensor([1]))


def test_payload_bits_survive():
    bits = torch.tensor([0x7F800001, 0x7FC12345, -0x80000000, 1]).to(torch.int32)
    cache = torch.stack([bits.view(torch.float32), torch.zeros(4)])
    ops.copy_pages([cache], torch.tensor([0]), torch.tensor([1]))
    assert_bitwise_equal(cache[1], cache[0])
