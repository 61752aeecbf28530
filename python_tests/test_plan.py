"""The planner: exact cover, the order that keeps results bitwise the same, sharing."""

from __future__ import annotations

import random

import pytest
import torch
from plan_checks import CELL, Batch, PlanArrays, check_plan

from wim_ext import ops
from wim_ext.plan import AttentionPlan


def plan_of(batch: Batch, threads: int = 1) -> AttentionPlan:
    return ops.plan_attention(
        *batch.tensors(),
        num_heads=batch.num_heads,
        num_kv_heads=batch.num_kv_heads,
        page_size=batch.page_size,
        causal=batch.causal,
        window_size=batch.window_size,
        num_threads=threads,
    )


class Pages:
    """Hands out fresh page ids, shuffled so that no order helps the planner."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.next = rng, 0

    def fresh(self, count: int) -> list[int]:
        pages = list(range(self.next, self.next + count))
        self.next += count
        self.rng.shuffle(pages)
        return pages


def forked(trunk: list[int], at: int, length: int, page_size: int, pages: Pages) -> list[int]:
    """A branch of `length` tokens that left the trunk at token `at`; whole pages are shared."""
    whole = min(at, length) // page_size
    return trunk[:whole] + pages.fresh(-(-length // page_size) - whole)


def random_batch(rng: random.Random) -> Batch:
    page_size = rng.choice([1, 7, 16, 16, 64, 64, 100, 256, 700])
    group = rng.choice([1, 2, 3, 7, 16, 130])
    num_kv_heads = rng.choice([1, 3])
    trunk_length = rng.choice([1, 63, 512, 513, rng.randrange(1, 4000)])
    pages = Pages(rng)
    trunk = pages.fresh(-(-trunk_length // page_size))
    table, rows, lengths = [], [], []
    for _ in range(rng.randrange(0, 9)):
        length = rng.choice([0, 1, 512, 1024, rng.randrange(0, 4000)])
        fork_at = rng.choice([0, trunk_length, rng.randrange(0, trunk_length + 1)])
        if rng.random() < 0.2:  # the trunk itself
            table.append(trunk)
            lengths.append(trunk_length)
        else:
            table.append(forked(trunk, fork_at, length, page_size, pages))
            lengths.append(length)
        rows.append(rng.choice([0, 1, 1, 1, 2, 5, rng.randrange(0, 300)]))
    window = rng.choice([(-1, -1), (-1, -1), (rng.randrange(0, 1500), -1), (0, 0), (40, 600)])
    return Batch(
        table,
        rows,
        lengths,
        page_size,
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        causal=rng.random() < 0.7,
        window_size=window,
    )


@pytest.mark.parametrize("seed", range(20))
def test_random_batches_are_covered_exactly(seed: int) -> None:
    rng = random.Random(seed)
    shared = split = 0
    for _ in range(100):
        batch = random_batch(rng)
        plan = plan_of(batch, threads=rng.choice([1, 2, 16]))
        arrays = check_plan(plan, batch)
        shared += plan.report.pages_read < plan.report.pages_without_sharing
        split += any(row.slot >= 0 for row in arrays.rows)
    assert shared > 10
    assert split > 10


@pytest.mark.smoke
def test_empty_batches() -> None:
    for batch in (
        Batch([], [], [], 16),
        Batch([[]], [0], [0], 16),
        Batch([[3], [4, 5]], [0, 0], [16, 20], 16),
    ):
        arrays = check_plan(plan_of(batch), batch)
        assert arrays.items == []
        assert arrays.combines == []


def test_rows_before_the_first_key_are_empty_combines() -> None:
    batch = Batch([[9]], [5], [2], 16)
    arrays = check_plan(plan_of(batch), batch)
    assert [(c.token, c.slot_begin, c.slot_end) for c in arrays.combines] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 0),
    ]
    assert [position for _, position in arrays.tokens] == [-3, -2, -1, 0, 1]


def test_chunk_rows_share_tiles() -> None:
    # 300 tokens of 4 query heads per KV head: tiles of at most 256 tokens, 1,024 packed rows.
    batch = Batch([list(range(100))], [300], [4000], 64, num_heads=8, num_kv_heads=2)
    arrays = check_plan(plan_of(batch), batch)
    assert sorted(i.row_end - i.row_begin for i in arrays.items) == [150, 150]
    assert all(row.slot == -1 for row in arrays.rows)


def test_items_come_longest_first() -> None:
    batch = Batch([list(range(100))], [300], [4000], 64)
    arrays = PlanArrays(plan_of(batch))
    work = [sum(r.high - r.low for r in arrays.rows_of(i)) for i in arrays.items]
    assert work[0] == max(work)
    assert work[-1] == min(work)


def test_branches_of_one_prefix_read_it_once() -> None:
    pages = Pages(random.Random(0))
    trunk = pages.fresh(64)
    branches = [forked(trunk, 4096, 4100, 64, pages) for _ in range(8)]
    batch = Batch(branches, [1] * 8, [4100] * 8, 64)
    report = plan_of(batch).report
    check_plan(plan_of(batch), batch)
    assert report.pages_without_sharing == 8 * 65
    assert report.pages_read == 64 + 8


def test_nested_forks_share_what_they_have_in_common() -> None:
    pages = Pages(random.Random(0))
    trunk = pages.fresh(64)
    forks = [1024, 2048, 3072, 4096]
    branches = [forked(trunk, at, at + 1, 64, pages) for at in forks]
    batch = Batch(branches, [1] * 4, [at + 1 for at in forks], 64)
    check_plan(plan_of(batch), batch)
    report = plan_of(batch).report
    assert report.pages_read == 4096 // 64 + 4  # each trunk page once, each branch's own page
    assert report.pages_without_sharing == sum(at // 64 + 1 for at in forks)


def test_a_short_sequence_follows_a_longer_one_that_comes_later() -> None:
    batch = Batch([list(range(20))] * 3, [1, 1, 1], [600, 900, 700], 64)
    plan = plan_of(batch)
    check_plan(plan, batch)
    assert plan.report.pages_read == 15


def test_branches_ride_along_with_the_trunks_chunk() -> None:
    pages = Pages(random.Random(0))
    trunk = pages.fresh(80)
    forks = [1100, 2100, 3100]
    branches = [forked(trunk, at, at + 3, 64, pages) for at in forks]
    batch = Batch([trunk, *branches], [256, 1, 1, 1], [4608, *(at + 3 for at in forks)], 64)
    plan = plan_of(batch)
    arrays = check_plan(plan, batch)
    alone = Batch([trunk], [256], [4608], 64)
    # Whole cells before each fork cost nothing; the rest of each branch is its own cell.
    rest = sum((at + 2) // 64 - at // CELL * CELL // 64 + 1 for at in forks)
    assert plan.report.pages_read == plan_of(alone).report.pages_read + rest
    for token, at in zip(range(256, 259), forks, strict=True):
        own = sorted((r for r in arrays.rows if r.token == token), key=lambda r: r.low)
        assert [(r.low, r.high) for r in own] == [
            (0, at // CELL * CELL),
            (at // CELL * CELL, at + 3),
        ]


def test_a_branch_wholly_on_the_chunks_pages_needs_no_partials() -> None:
    trunk = list(range(80))
    batch = Batch([trunk, trunk], [256, 1], [4608, 1000], 64)
    plan = plan_of(batch)
    check_plan(plan, batch)
    assert plan.report.partials == 0
    assert plan.report.pages_read == plan_of(Batch([trunk], [256], [4608], 64)).report.pages_read


def test_same_ids_at_other_places_are_not_shared() -> None:
    batch = Batch([[0, 1], [1, 0]], [1, 1], [128, 128], 64)
    plan = plan_of(batch)
    check_plan(plan, batch)
    assert plan.report.pages_read == plan.report.pages_without_sharing == 4


def test_a_window_reads_only_its_pages() -> None:
    batch = Batch([list(range(100))], [1], [6400], 64, window_size=(99, -1))
    plan = plan_of(batch)
    check_plan(plan, batch)
    assert plan.report.pages_read == 2
    assert plan.report.scores == 100 * 4


def test_pages_below_a_chunks_window_are_not_borrowed_from_it() -> None:
    """The chunk no longer reads them; its block table may hold anything there by the next call."""
    trunk = list(range(80))
    batch = Batch([trunk, trunk], [256, 1], [4608, 900], 64, window_size=(1000, -1))
    arrays = check_plan(plan_of(batch), batch)
    branch = [i for i in arrays.items if any(r.token == 256 for r in arrays.rows_of(i))]
    assert [i.sequence for i in branch] == [1, 1]


def test_windows_that_overlap_only_in_part_are_not_shared() -> None:
    trunk = list(range(8))
    batch = Batch([trunk, trunk], [1, 1], [400, 464], 64, window_size=(150, -1))  # pages 3-6, 4-7
    plan = plan_of(batch)
    check_plan(plan, batch)
    assert plan.report.pages_read == 8


def test_a_hundred_branches_fill_several_tiles_of_their_trunk() -> None:
    trunk = list(range(80))
    batch = Batch([trunk] * 101, [256] + [1] * 100, [4608] + [4608] * 100, 64)
    plan = plan_of(batch)
    check_plan(plan, batch)  # no tile above one and a half times its size
    assert plan.report.pages_read < plan.report.pages_without_sharing / 5


def test_few_long_tiles_are_split_for_the_threads() -> None:
    batch = Batch([list(range(128))], [64], [8192], 64, num_heads=2, num_kv_heads=1)
    whole, split = plan_of(batch, threads=1), plan_of(batch, threads=8)
    check_plan(split, batch)
    assert whole.report.items == 1
    assert whole.report.partials == 0
    assert split.report.items == 8192 // CELL
    assert split.report.imbalance < 1.2


def test_entries_that_no_row_sees_do_not_matter() -> None:
    batch = Batch([list(range(100))], [1], [6400], 64, window_size=(99, -1))
    table, cu, used = batch.tensors()
    other = table.clone()
    other[0, :90] = -7
    arguments = {"num_heads": 4, "num_kv_heads": 2, "page_size": 64, "window_size": (99, -1)}
    plans = [ops.plan_attention(t, cu, used, **arguments, num_threads=1) for t in (table, other)]
    assert torch.equal(plans[0].tensor, plans[1].tensor)


def test_report_in_operations_and_bytes() -> None:
    batch = Batch([[0, 1]], [1], [128], 64, num_heads=6, num_kv_heads=2)
    report = plan_of(batch).report
    assert report.flops(64) == 2 * 6 * 128 * 128
    assert report.flops(64, 32) == 2 * 6 * 128 * 96
    assert report.bytes_read(64, dtype=torch.bfloat16) == 2 * 2 * 64 * 128 * 2
    assert report.bytes_read(64, 32, dtype=torch.float32) == 2 * 2 * 64 * 96 * 4


def test_a_plan_is_a_value() -> None:
    batch = Batch([list(range(8)), [9]], [3, 1], [500, 20], 64)
    first, again = plan_of(batch), plan_of(batch)
    assert first.tensor.dtype == torch.int32
    assert first.tensor.device.type == "cpu"
    assert first.tensor.data_ptr() != again.tensor.data_ptr()
    assert torch.equal(first.tensor, again.tensor)


def test_exactly_at_capacity() -> None:
    batch = Batch([[4]], [1], [16], 16)
    check_plan(plan_of(batch), batch)
