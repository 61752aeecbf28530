"""CASES.md part C: faults that other cache managers had with sharing, rollback and exhaustion."""

from __future__ import annotations

import inspect
import random
from collections import Counter

import pytest
import torch

from wim_ext import _C, ops, sequence
from wim_ext._native import PageTable
from wim_ext.cache import PagedKVCache, Sequence
from wim_ext.errors import CacheFull, StaleSequenceError

PAGE_SIZE = 4


def make_cache(num_pages: int) -> PagedKVCache:
    return PagedKVCache(
        num_layers=2,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=1,
        head_dim=8,
        dtype=torch.float32,
    )


def append(cache: PagedKVCache, seq: Sequence, numbers: list[int]) -> None:
    batch = cache.reserve([(seq, len(numbers))])
    rows = torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(-1, 1, 8).contiguous()
    for layer in range(2):
        ops.append_kv(rows + layer, -rows - layer, *cache.layer(layer), batch.slot_mapping)


def read(cache: PagedKVCache, seq: Sequence) -> list[torch.Tensor]:
    pages = cache.reserve([(seq, 0)]).block_table[0].long()
    tensors = [tensor for layer in range(2) for tensor in cache.layer(layer)]
    return [tensor[pages].flatten(0, 1)[: seq.length] for tensor in tensors]


def visible(cache: PagedKVCache, *sequences: Sequence) -> tuple:
    """All that can be seen from outside, tensors included."""
    return (
        cache.stats(),
        [seq.length for seq in sequences],
        cache.reserve([(seq, 0) for seq in sequences]).block_table.tolist(),
        [part.tolist() for seq in sequences for part in read(cache, seq)],
    )


def count_holders(table: _C.PageTable, live: list[int]) -> None:
    """The count of every page is its number of live holders; free and held make up the pool."""
    table.check_integrity()
    held = Counter(page for handle in live for page in set(table.pages(handle)))
    assert sum(len(table.pages(handle)) for handle in live) == held.total(), "a page stands twice"
    stats = table.stats()
    for page in range(stats.num_pages):
        assert table.holders(page) == held[page]
    assert stats.free_pages + len(held) == stats.num_pages
    assert stats.shared_pages == sum(count > 1 for count in held.values())


def walk(table: _C.PageTable, rng: random.Random, steps: int) -> None:
    live = [table.create()]
    for _ in range(steps):
        kind, handle = rng.random(), rng.choice(live)
        if kind < 0.3 and len(live) < 12:
            live.append(table.fork(handle, rng.randint(0, table.length(handle))))
        elif kind < 0.7:
            work = [(member, rng.randint(0, 9)) for member in rng.sample(live, min(3, len(live)))]
            if table.pages_needed(work) <= table.stats().free_pages:
                table.apply(table.prepare(work))
            else:
                with pytest.raises(CacheFull):
                    table.prepare(work)
        elif kind < 0.85:
            table.rollback(handle, rng.randint(0, table.length(handle)))
        elif len(live) > 1:
            live.remove(handle)
            table.release(handle)
        count_holders(table, live)
    for handle in live:
        table.release(handle)
    count_holders(table, [])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_bc22_refcounts(page_size: int) -> None:
    """Counts are holders, always: forks of forks, copies on write, releases in any order."""
    for seed in range(4):
        walk(PageTable(24, page_size), random.Random(seed), 300)


def test_bc22_released_twice_in_one_breath() -> None:
    """vllm#42571: free([b, b]) put the page on the free list twice."""
    table = PageTable(2, PAGE_SIZE)
    handle = table.create()
    table.apply(table.prepare([(handle, 3)]))
    table.release(handle)
    with pytest.raises(StaleSequenceError):
        table.release(handle)
    first, second = table.create(), table.create()
    table.apply(table.prepare([(first, 1), (second, 1)]))
    assert table.pages(first) != table.pages(second)
    count_holders(table, [first, second])


def test_bc23_stale_handle() -> None:
    """A second release changes no count, and a reused entry does not revive the old handle."""
    table = PageTable(4, PAGE_SIZE)
    old = table.create()
    table.apply(table.prepare([(old, 3)]))
    table.release(old)
    new = table.create()
    table.apply(table.prepare([(new, 3)]))
    for use in (table.release, table.length, table.pages, table.fork):
        with pytest.raises(StaleSequenceError, match=f"sequence {old} is not alive here"):
            use(old)
    count_holders(table, [new])
    releases = [name for name, _ in inspect.getmembers(Sequence) if "release" in name]
    assert releases == ["release", "released"], (
        "one way to release, and the question whether it was"
    )


def test_bc23_release_paths_meet_in_one_place() -> None:
    """`with`, release(), commit and collection of one sequence: its page is freed once."""
    cache = make_cache(4)
    trunk = cache.new_sequence()
    append(cache, trunk, [1, 2])
    with trunk.fork() as branch:
        append(cache, branch, [3])
        trunk.commit(branch)
        branch.release()
    del branch
    assert cache.free_pages == 3
    assert cache.stats().sequences == 1
    cache.check_integrity()


def test_bc24_accounting() -> None:
    """sglang#35270: 96 available + 470,016 evictable were more than the 469,952 there are."""
    cache = make_cache(16)
    trunk = cache.new_sequence()
    append(cache, trunk, list(range(30)))
    branches = [trunk.fork(length) for length in range(31)]  # 31 holders of the same 8 pages
    for number, branch in enumerate(branches):
        stats = cache.stats()
        assert stats.free_pages + stats.used_pages == stats.num_pages == 16
        assert stats.used_pages == 8
        assert stats.bytes_used == 8 * stats.bytes_per_page
        assert stats.sequences == 32 - number
        branch.release()
    assert cache.stats().shared_pages == 0


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 64])
def test_bc25_rollback_edges(page_size: int) -> None:
    """transformers#47433: crop(0) kept all 3 tokens, crop(-5) of 3 kept 1."""
    cache = PagedKVCache(num_layers=1, num_pages=4, page_size=page_size, dtype=torch.float32)
    seq = cache.new_sequence()
    for wrong in (-5, -1, 4, 10**9):
        cache.reserve([(seq, 3)])
        before = cache.stats(), cache.reserve([(seq, 0)]).block_table.tolist()
        with pytest.raises(ValueError, match=rf"length = {wrong}: must be 0\.\.3, the length"):
            seq.rollback(wrong)
        seq.rollback(3)
        assert (cache.stats(), cache.reserve([(seq, 0)]).block_table.tolist()) == before
        seq.rollback(0)
        assert seq.length == 0
        assert cache.free_pages == 4


@pytest.mark.parametrize("fork_length", range(1, 11))
def test_bc26_refill_under_fork(fork_length: int) -> None:
    """Every cut below (and at) the fork, refilled by every length: the fork's bits stay."""
    for cut in range(fork_length + 1):
        for refill in range(1, 7):
            cache = make_cache(12)
            trunk = cache.new_sequence()
            append(cache, trunk, list(range(1, 11)))
            fork = trunk.fork(fork_length)
            before = read(cache, fork)
            kept = [part[:cut].clone() for part in read(cache, trunk)]
            trunk.rollback(cut)
            append(cache, trunk, list(range(100, 100 + refill)))
            for now, then in zip(read(cache, fork), before, strict=True):
                assert torch.equal(now, then)
            for now, then in zip(read(cache, trunk), kept, strict=True):
                assert torch.equal(now[:cut], then)
            assert read(cache, trunk)[0][cut:, 0, 0].tolist() == list(range(100, 100 + refill))
            cache.check_integrity()


@pytest.mark.parametrize("handle", [-1, 0, None, "all", float("nan"), 2**63 - 1])
def test_bc27_no_magic_ids(handle: object) -> None:
    """llama.cpp PR#13985: seq_id -1 meant every sequence. Here no value means anything."""
    cache = make_cache(4)
    seq = cache.new_sequence()
    append(cache, seq, [1, 2, 3])
    before = visible(cache, seq)
    for use in (
        lambda: cache.reserve([(handle, 1)]),  # type: ignore[list-item]
        lambda: cache.pages_needed([(handle, 1)]),  # type: ignore[list-item]
        lambda: seq.commit(handle),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match="Sequence"):
            use()
    table = cache._table._table
    if isinstance(handle, int):
        for low in (table.release, table.length, table.fork, lambda h: table.rollback(h, 0)):
            with pytest.raises(StaleSequenceError, match=f"sequence {handle} is not alive here"):
                low(handle)
    assert visible(cache, seq) == before
    assert not any("all" in name for name in dir(sequence.Sequence) if not name.startswith("_"))


def growth_points() -> list[tuple[int, int, int, int]]:
    """(page_size, free pages, tokens of the trunk, tokens asked for) around every page border."""
    return [
        (page_size, free, length, count)
        for page_size in (1, 2, 3, 4)
        for free in (0, 1, 2)
        for length in range(1, 9)
        for count in range(1, 2 * page_size + 2)
    ]


def test_bc29_transactional() -> None:
    """A full pool: its own exception, nothing changed, and success after a release."""
    failed = 0
    for page_size, free, length, count in growth_points():
        used = -(-length // page_size)
        cache = PagedKVCache(
            num_layers=1,
            num_pages=used + 2 + free,
            page_size=page_size,
            num_kv_heads=1,
            head_dim=8,
            dtype=torch.float32,
        )
        trunk, other = cache.new_sequence(), cache.new_sequence()
        cache.reserve([(trunk, length), (other, 2 * page_size)])  # the filler holds 2 pages
        branch = trunk.fork()
        work = [(trunk, count), (branch, count)]
        keys, _ = cache.layer(0)
        keys.copy_(torch.arange(float(keys.numel())).reshape(keys.shape))
        before = (cache.stats(), trunk.length, branch.length, keys.clone())
        needed = cache.pages_needed(work)
        if needed <= free:
            cache.reserve(work)
            continue
        failed += 1
        with pytest.raises(CacheFull) as caught:
            cache.reserve(work)
        assert (caught.value.needed, caught.value.free) == (needed, free)
        assert (cache.stats(), trunk.length, branch.length) == before[:3]
        assert torch.equal(keys, before[3])
        cache.check_integrity()
        other.release()
        if needed <= free + 2:
            cache.reserve(work)
            assert branch.length == length + count
        assert caught.value.can_ever_fit == (needed <= free + 2)
    assert failed > 200
