"""PagedKVCache: what forks, copies and layouts do to real tensors, lazy layers, statistics."""

from __future__ import annotations

import doctest
import re
from types import SimpleNamespace

import pytest
import torch

from wim_ext import cache as cache_module
from wim_ext import ops, reference, sequence, storage
from wim_ext.cache import Batch, PagedKVCache, Sequence
from wim_ext.errors import CacheFull

LAYOUTS = [
    {},
    {"layout": "HND"},
    {"layout": "NHD"},
    {"layout": "HND", "v_transposed": True},
    {"layout": "NHD", "v_transposed": True},
]


def make_cache(num_pages: int = 8, page_size: int = 4, **options: object) -> PagedKVCache:
    options = {
        "num_kv_heads": 2,
        "head_dim": 8,
        "v_head_dim": 16,
        "dtype": torch.float32,
        **options,
    }
    return PagedKVCache(num_layers=2, num_pages=num_pages, page_size=page_size, **options)


def append(cache: PagedKVCache, *work: tuple[Sequence, list[float]]) -> None:
    """Appends tokens whose keys and values are recognisable in every head and dimension."""
    batch = cache.reserve([(seq, len(numbers)) for seq, numbers in work])
    numbers = torch.tensor([n for _, listed in work for n in listed])[:, None, None]
    for index in range(cache.num_layers):
        k_cache, v_cache = cache.layer(index)
        key, value = (
            ramp(numbers, index, k_cache.shape[2:]),
            ramp(-numbers, index, v_cache.shape[2:]),
        )
        ops.append_kv(
            key.to(k_cache.dtype), value.to(v_cache.dtype), k_cache, v_cache, batch.slot_mapping
        )


def ramp(numbers: torch.Tensor, layer: int, shape: torch.Size) -> torch.Tensor:
    heads, dim = shape
    return numbers + 1000 * layer + torch.arange(heads * dim).reshape(heads, dim) / 1024


def numbers_of(cache: PagedKVCache, seq: Sequence) -> list[float]:
    """Reads a sequence back through its block table and checks all of its payload."""
    batch = cache.reserve([(seq, 0)])
    rows = batch.block_table[0].long()
    found = None
    for index in range(cache.num_layers):
        for sign, tensor in zip((1, -1), cache.layer(index), strict=True):
            values = tensor[rows].flatten(0, 1)[: seq.length]
            numbers = sign * (values[:, 0, 0] - 1000 * index)
            torch.testing.assert_close(
                values,
                ramp(sign * numbers[:, None, None], index, tensor.shape[2:]),
                rtol=0,
                atol=1e-3,
            )
            assert found is None or found == numbers.tolist()
            found = numbers.tolist()
    return found or []


@pytest.mark.smoke
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_branches_keep_their_own_payload(options: dict) -> None:
    cache = make_cache(**options)
    trunk = cache.new_sequence()
    append(cache, (trunk, [0, 1, 2, 3, 4, 5]))
    branch, early = trunk.fork(), trunk.fork(3)
    append(cache, (trunk, [6, 7, 8]), (branch, [16]), (early, [23, 24]))
    assert numbers_of(cache, trunk) == list(range(9))
    assert numbers_of(cache, branch) == [0, 1, 2, 3, 4, 5, 16]
    assert numbers_of(cache, early) == [0, 1, 2, 23, 24]
    assert cache.stats().page_copies == 2
    trunk.rollback(6)
    trunk.commit(branch)
    assert numbers_of(cache, trunk) == [0, 1, 2, 3, 4, 5, 16]
    assert numbers_of(cache, early) == [0, 1, 2, 23, 24]
    cache.check_integrity()


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_attention_over_every_layout(options: dict) -> None:
    """A mid-page fork attends to what was appended, whatever the order of the memory."""
    cache = make_cache(num_pages=12, page_size=16, **options)
    g = torch.Generator().manual_seed(0)
    k_cache, v_cache = cache.layer(0)

    def grow(*work: tuple[Sequence, int]) -> Batch:
        batch = cache.reserve(work)
        tokens = sum(count for _, count in work)
        key, value = torch.randn(tokens, 2, 8, generator=g), torch.randn(tokens, 2, 16, generator=g)
        ops.append_kv(key, value, k_cache, v_cache, batch.slot_mapping)
        return batch

    trunk = cache.new_sequence()
    grow((trunk, 40))
    branch = trunk.fork(37)
    batch = grow((trunk, 3), (branch, 2))
    query = torch.randn(5, 6, 8, generator=g)
    arguments = (query, k_cache, v_cache, batch.block_table, batch.cu_seqlens_q, batch.seqused_k)
    found = ops.paged_attention(*arguments, plan=batch.plan(6, 2))
    torch.testing.assert_close(found, reference.paged_attention(*arguments).float())


def test_physical_layouts() -> None:
    pages, slots, heads, dim, v_dim = 8, 4, 2, 8, 16
    k_cache, v_cache = make_cache(layout="HND").layer(0)
    assert k_cache.shape == (pages, slots, heads, dim)
    assert v_cache.shape == (pages, slots, heads, v_dim)
    assert k_cache.stride() == (heads * slots * dim, dim, slots * dim, 1)
    assert v_cache.stride() == (heads * slots * v_dim, v_dim, slots * v_dim, 1)
    k_cache, v_cache = make_cache(layout="NHD").layer(0)
    assert k_cache.is_contiguous()
    assert v_cache.is_contiguous()
    k_cache, v_cache = make_cache(v_transposed=True).layer(0)
    assert k_cache.stride(3) == 1
    assert v_cache.stride() == (heads * v_dim * slots, 1, v_dim * slots, slots)


def test_default_layouts() -> None:
    assert make_cache().layout == "HND"
    assert make_cache(device="meta").layout == "NHD"
    bf16 = {"dtype": torch.bfloat16}
    for options, slot_stride in (
        ({}, 16),  # V's of float32: a head's slots follow each other
        (bf16, 1),
        ({**bf16, "layout": "HND"}, 16),
        ({**bf16, "v_transposed": False}, 16),
        ({"v_transposed": True}, 1),
    ):
        assert make_cache(**options).layer(0)[1].stride(1) == slot_stride, options
    assert make_cache(device="meta").layer(0)[0].device.type == "meta"


def test_pool_starts_as_untouched_zeros() -> None:
    k_cache, v_cache = make_cache().layer(1)
    assert not k_cache.any()
    assert not v_cache.any()


def test_large_pools_lie_on_huge_pages_and_cost_nothing_until_used() -> None:
    psutil = pytest.importorskip("psutil")
    before = psutil.Process().memory_info().rss
    cache = make_cache(num_pages=4096, page_size=64, num_kv_heads=8, head_dim=128)
    k_cache, v_cache = cache.layer(0)
    assert k_cache.numel() * 4 == 2**30
    assert k_cache.data_ptr() % (2 << 20) == 0
    assert v_cache.data_ptr() % 4096 == 0
    k_cache[4095, 63], v_cache[4095, 63] = 1, 2
    assert k_cache[4095, 63].sum() == 8 * 128
    assert psutil.Process().memory_info().rss - before < 64 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    cache = make_cache(dtype=dtype)
    assert cache.dtype == dtype
    assert {t.dtype for t in cache.layer(1)} == {dtype}


def test_without_a_mapping_torch_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(storage.mmap, "MAP_ANONYMOUS")
    cache = make_cache()
    assert not cache.layer(0)[0].any()
    trunk = cache.new_sequence()
    append(cache, (trunk, [1, 2, 3]))
    assert numbers_of(cache, trunk) == [1, 2, 3]


def test_advice_that_the_kernel_refuses_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.mmap, "MADV_HUGEPAGE", 12345, raising=False)
    assert not make_cache(num_pages=2048, page_size=64).layer(0)[0].any()


# Layers.


def test_layers_made_lazily_with_dimensions_of_their_own() -> None:
    cache = PagedKVCache(num_layers=2, num_pages=8, page_size=4, dtype=torch.float32)
    assert cache.stats().bytes_per_page == 0
    trunk = cache.new_sequence()
    branch_point = cache.reserve([(trunk, 3)])
    branch = trunk.fork()
    cache.reserve([(trunk, 1), (branch, 1)])  # a copy while there is nothing to copy
    assert cache.stats().page_copies == 1
    first = cache.layer(0, 2, 8)
    assert [t.shape[2:] for t in first] == [(2, 8), (2, 8)]
    second = cache.layer(1, 1, 24, 16, torch.bfloat16)
    assert [t.shape[2:] for t in second] == [(1, 24), (1, 16)]
    assert second[0].dtype == torch.bfloat16
    assert cache.layer(0, 2, 8)[0] is first[0]
    assert cache.layer(1)[1] is second[1]
    assert cache.stats().bytes_per_page == 4 * (2 * 8 * 2 * 4 + (24 + 16) * 2)
    assert branch_point.page_size == 4


def test_layer_made_after_sequences_is_copied_with_the_others() -> None:
    cache = PagedKVCache(num_layers=2, num_pages=8, page_size=4, dtype=torch.float32)
    cache.layer(0, 1, 8)
    trunk = cache.new_sequence()
    cache.reserve([(trunk, 2)])
    late_k, late_v = cache.layer(1, 1, 8)
    late_k[0], late_v[0] = 5, 6
    branch = trunk.fork()
    batch = cache.reserve([(trunk, 1), (branch, 1)])
    page = batch.block_table[1, 0]
    assert page != 0
    assert (late_k[page] == 5).all()
    assert (late_v[page] == 6).all()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((2,), IndexError, "layer 2: must be 0..1"),
        ((-1, 2, 8), IndexError, "layer -1: must be 0..1"),
        (
            (1,),
            ValueError,
            "layer 1 has no tensors yet: its first use gives num_kv_heads and head_dim",
        ),
        ((1, 2), ValueError, "not 2 and None"),
        (
            (1, 0, 8),
            ValueError,
            "num_kv_heads = 0, head_dim = 8, v_head_dim = 8: must be integers of 1 or more",
        ),
        (
            (1, 2, 8, 0),
            ValueError,
            "num_kv_heads = 2, head_dim = 8, v_head_dim = 0: must be integers of 1 or more",
        ),
        ((0, 0, 8), ValueError, "not (0, 8, 8, torch.float32)"),
        (
            (1, -2, 8),
            ValueError,
            "num_kv_heads = -2, head_dim = 8, v_head_dim = 8: must be integers of 1 or more",
        ),
        (
            (1, 2, 8.0),
            ValueError,
            "num_kv_heads = 2, head_dim = 8.0, v_head_dim = 8.0: must be integers of 1 or more",
        ),
        (("1", 2, 8), ValueError, "layer = '1': must be an integer"),
        ((1, 2, 8, 8, "half"), ValueError, "dtype = 'half': must be a torch.dtype"),
        ((0, 3, 8), ValueError, "are (2, 8, 8, torch.float32), not (3, 8, 8, torch.float32)"),
        ((0, 2, 8, 4), ValueError, "not (2, 8, 4, torch.float32)"),
        ((0, 2, 8, 8, torch.float16), ValueError, "not (2, 8, 8, torch.float16)"),
    ],
)
def test_bad_layers(arguments: tuple, error: type[Exception], text: str) -> None:
    cache = PagedKVCache(num_layers=2, num_pages=8, page_size=4, dtype=torch.float32)
    cache.layer(0, 2, 8)
    with pytest.raises(error, match=re.escape(text)):
        cache.layer(*arguments)


def test_a_pool_too_large_is_a_memory_error() -> None:
    cache = PagedKVCache(num_layers=1, num_pages=2**4, page_size=2**16, dtype=torch.float32)
    text = (
        f"cannot allocate {2**20 * 2**32 * 4 * 2} bytes on cpu for the K and V pages of one layer"
    )
    with pytest.raises(MemoryError, match=text):
        cache.layer(0, 2**16, 2**16)
    cache.layer(0, 1, 8)  # and the cache still works


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_layers": 0}, "num_layers = 0: must be 1 or more"),
        ({"num_layers": 1.5}, "num_layers = 1.5: must be an integer"),
        ({"num_pages": 0}, "num_pages = 0: must be 1..2147483647"),
        ({"num_pages": 2**70}, f"num_pages = {2**70}: does not fit 64 bits"),
        ({"page_size": "4"}, "page_size = '4': must be an integer"),
        ({"layout": "DNH"}, "layout = 'DNH': must be one of HND, NHD"),
        ({"num_kv_heads": 2}, "num_kv_heads = 2, head_dim = None, v_head_dim = None: give"),
        ({"head_dim": 8}, "num_kv_heads = None, head_dim = 8, v_head_dim = None: give"),
        ({"v_head_dim": 0}, "num_kv_heads = None, head_dim = None, v_head_dim = 0: give"),
        ({"dtype": None}, "dtype = None: must be a torch.dtype"),
        ({"device": "nowhere"}, "device = 'nowhere': Expected one of cpu, cuda"),
        ({"v_head_dim": 8}, "num_kv_heads = None, head_dim = None, v_head_dim = 8: give"),
    ],
)
def test_bad_caches(options: dict, text: str) -> None:
    good = {"num_layers": 1, "num_pages": 4, "page_size": 4, "dtype": torch.float32}
    with pytest.raises(ValueError, match=re.escape(text)):
        PagedKVCache(**{**good, **options})


# Models.


def fake_model(**config: object) -> SimpleNamespace:
    return SimpleNamespace(
        config=SimpleNamespace(**config), dtype=torch.bfloat16, device=torch.device("cpu")
    )


def test_for_model() -> None:
    cache = PagedKVCache.for_model(fake_model(num_hidden_layers=3), 1000)
    assert (cache.num_layers, cache.num_pages, cache.page_size) == (3, 16, 64)
    assert (cache.dtype, cache.device, cache.layout) == (torch.bfloat16, torch.device("cpu"), "HND")
    cache = PagedKVCache.for_model(
        fake_model(num_hidden_layers=3), 33, page_size=16, dtype=torch.float32, layout="NHD"
    )
    assert (cache.num_pages, cache.dtype, cache.layout) == (3, torch.float32, "NHD")


def test_for_model_reads_the_text_part_of_a_config() -> None:
    text = SimpleNamespace(num_hidden_layers=5)
    model = fake_model(get_text_config=lambda: text)
    assert PagedKVCache.for_model(model, 64).num_layers == 5


def test_for_model_refuses() -> None:
    with pytest.raises(
        ValueError, match="model: SimpleNamespace does not say its num_hidden_layers"
    ):
        PagedKVCache.for_model(fake_model(), 64)
    with pytest.raises(ValueError, match="num_tokens = 0: must be 1 or more"):
        PagedKVCache.for_model(fake_model(num_hidden_layers=1), 0)
    for page_size, text in ((0, "must be 1..2147483647"), (-4, "must be 1.."), ("4", "an integer")):
        with pytest.raises(ValueError, match=rf"page_size = \S+: .*{re.escape(text)}"):
            PagedKVCache.for_model(fake_model(num_hidden_layers=1), 64, page_size=page_size)


# Reservations.


def test_batch() -> None:
    cache = make_cache()
    a, b = cache.new_sequence(), cache.new_sequence()
    cache.reserve([(a, 5)])
    batch = cache.reserve([(a, 2), (b, 1)])
    assert batch.sequences == (a, b)
    assert batch.block_table.tolist() == [[0, 1], [2, -1]]
    assert batch.slot_mapping.tolist() == [5, 6, 8]
    assert batch.position_ids.tolist() == [5, 6, 0]
    assert batch.cu_seqlens_q.tolist() == [0, 2, 3]
    assert batch.seqused_k.tolist() == [7, 1]
    assert batch.slot_mapping.dtype == batch.position_ids.dtype == torch.int64
    assert (
        batch.block_table.dtype == batch.cu_seqlens_q.dtype == batch.seqused_k.dtype == torch.int32
    )
    with pytest.raises(AttributeError):
        batch.page_size = 5  # type: ignore[misc]


def test_plans_are_made_once_per_arguments() -> None:
    cache = make_cache(page_size=16)
    a = cache.new_sequence()
    batch = cache.reserve([(a, 20)])
    plan = batch.plan(6, 2)
    assert batch.plan(6, 2, True, (-1, -1)) is plan
    assert batch.plan(6, 2, causal=False) is not plan
    assert batch.plan(6, 2, window_size=[4, 0]) is batch.plan(6, 2, window_size=(4, 0))
    assert batch.plan(4, 2) is not plan
    assert cache.reserve([(a, 1)]).plan(6, 2) is not plan
    k_cache, v_cache = cache.layer(0)
    query = torch.randn(20, 6, 8)
    arguments = (batch.block_table, batch.cu_seqlens_q, batch.seqused_k)
    with_plan = ops.paged_attention(query, k_cache, v_cache, *arguments, plan=plan)
    assert torch.equal(with_plan, ops.paged_attention(query, k_cache, v_cache, *arguments))


def test_cancel() -> None:
    cache = make_cache()
    trunk = cache.new_sequence()
    append(cache, (trunk, [1, 2, 3]))
    batch = cache.reserve([(trunk, 9)])
    batch.cancel()
    batch.cancel()
    assert trunk.length == 3
    assert cache.free_pages == 7
    assert numbers_of(cache, trunk) == [1, 2, 3]
    batch = cache.reserve([(trunk, 1)])
    cache.reserve([(trunk, 1)])
    with pytest.raises(
        ValueError, match="was changed since this reservation left it at 4 tokens; it now has 5"
    ):
        batch.cancel()


def test_pages_needed_is_what_reserve_takes() -> None:
    cache = make_cache()
    trunk = cache.new_sequence()
    cache.reserve([(trunk, 6)])
    branch = trunk.fork()
    work = [(trunk, 1), (branch, 7)]
    free = cache.free_pages
    assert cache.pages_needed(iter(work)) == 3
    cache.reserve(iter(work))
    assert free - cache.free_pages == 3


def test_stats() -> None:
    cache = make_cache()
    page = 4 * 2 * (8 + 16) * 4 * 2
    trunk = cache.new_sequence()
    cache.reserve([(trunk, 10)])
    branch = trunk.fork(6)
    stats = cache.stats()
    assert (stats.num_pages, stats.free_pages, stats.used_pages, stats.shared_pages) == (8, 5, 3, 2)
    assert (stats.bytes_per_page, stats.bytes_used) == (page, 3 * page)
    assert (stats.sequences, stats.page_copies, stats.high_water_pages) == (2, 0, 3)
    cache.reserve([(branch, 1)])
    branch.release()
    trunk.rollback(0)
    stats = cache.stats()
    assert (stats.free_pages, stats.shared_pages, stats.bytes_used) == (8, 0, 0)
    assert (stats.sequences, stats.page_copies, stats.high_water_pages) == (1, 1, 4)


def test_full_cache_says_so_and_goes_on() -> None:
    cache = make_cache(num_pages=2)
    trunk = cache.new_sequence()
    append(cache, (trunk, [1, 2, 3, 4, 5]))
    with pytest.raises(CacheFull) as caught:
        cache.reserve([(trunk, 4)])
    error = caught.value
    assert (error.needed, error.free, error.total, error.can_ever_fit) == (1, 0, 2, False)
    append(cache, (trunk, [6, 7, 8]))
    assert numbers_of(cache, trunk) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_examples_in_the_docstrings_run() -> None:
    for module in (cache_module, sequence):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0
