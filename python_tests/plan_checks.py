"""Reads a plan's arrays and checks, by other means than the planner's, that it covers a batch."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wim_ext.plan import AttentionPlan
from wim_ext.reference import visible_range

CELL = 512


class Item(NamedTuple):
    row_begin: int
    row_end: int
    sequence: int
    key_begin: int
    key_end: int


class Row(NamedTuple):
    token: int
    low: int
    high: int
    slot: int


class Combine(NamedTuple):
    token: int
    slot_begin: int
    slot_end: int


@dataclass
class Batch:
    """What a plan is made for, as Python integers."""

    pages: list[list[int]]
    rows: list[int]
    lengths: list[int]
    page_size: int
    num_heads: int = 4
    num_kv_heads: int = 2
    causal: bool = True
    window_size: tuple[int, int] = (-1, -1)

    def tensors(self, garbage: int = -(2**31)) -> tuple[Tensor, Tensor, Tensor]:
        """block_table (tails filled with garbage), cu_seqlens_q, seqused_k."""
        width = max((len(p) for p in self.pages), default=0)
        table = torch.full((len(self.pages), width), garbage, dtype=torch.int32)
        for b, pages in enumerate(self.pages):
            table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        cu = torch.tensor([0, *self.rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return table, cu, torch.tensor(self.lengths, dtype=torch.int32)

    def visible(self) -> list[tuple[int, int, int]]:
        """Per token: sequence, first key, end; end <= first where it sees none."""
        result = []
        for b, (rows, length) in enumerate(zip(self.rows, self.lengths, strict=True)):
            first, end = visible_range(rows, length, self.causal, self.window_size)
            result += [(b, f, e) for f, e in zip(first.tolist(), end.tolist(), strict=True)]
        return result


class PlanArrays:
    """The arrays of a plan, by name."""

    def __init__(self, plan: AttentionPlan) -> None:
        ints: list[int] = plan.tensor.tolist()

        def table(kind: type, offset: str, count: int) -> list:
            width, begin = len(kind._fields), plan.header(offset)
            return [kind(*ints[i : i + width]) for i in range(begin, begin + width * count, width)]

        self.items: list[Item] = table(Item, "item_offset", plan.header("num_items"))
        self.rows: list[Row] = table(Row, "row_offset", plan.header("num_rows"))
        self.combines: list[Combine] = table(Combine, "combine_offset", plan.header("num_combines"))
        offset, total_q = plan.header("token_offset"), plan.header("total_q")
        self.tokens = [(ints[offset + 2 * t], ints[offset + 2 * t + 1]) for t in range(total_q)]

    def rows_of(self, item: Item) -> list[Row]:
        return self.rows[item.row_begin : item.row_end]


def check_plan(plan: AttentionPlan, batch: Batch) -> PlanArrays:
    """Every visible (row, key) once, nothing else, on its own pages, in the order that keeps
    results bitwise equal; slots and combine lists that fit; a report that tells the truth."""
    arrays = PlanArrays(plan)
    pieces: dict[int, list[Row]] = defaultdict(list)
    visible = batch.visible()
    own_pages = _pages_used(visible, len(batch.rows), batch.page_size)
    tile_tokens = max(1, 1024 * batch.num_kv_heads // batch.num_heads)
    pages_read = pages_alone = 0
    for item in arrays.items:
        rows = arrays.rows_of(item)
        assert rows, "an item without rows"
        assert min(r.low for r in rows) == item.key_begin
        assert max(r.high for r in rows) == item.key_end
        # Only entries of the block table that the plan's hash covers are read: the sequence's own.
        assert own_pages[item.sequence].start <= item.key_begin // batch.page_size
        assert (item.key_end - 1) // batch.page_size < own_pages[item.sequence].stop
        assert len(rows) <= max(1, tile_tokens + tile_tokens // 2)
        pages_read += len(_page_range(item.key_begin, item.key_end, batch.page_size))
        ranges: dict[int, list[int]] = {}
        for row in rows:
            pieces[row.token].append(row)
            sequence = visible[row.token][0]
            used = _page_range(row.low, row.high, batch.page_size)
            assert all(batch.pages[sequence][p] == batch.pages[item.sequence][p] for p in used)
            low, high = ranges.get(sequence, [row.low, row.high])
            ranges[sequence] = [min(low, row.low), max(high, row.high)]
        pages_alone += sum(len(_page_range(*r, batch.page_size)) for r in ranges.values())
    assert [r.row_begin for r in arrays.items] == [0, *(r.row_end for r in arrays.items)][:-1]
    assert sum(r.row_end - r.row_begin for r in arrays.items) == len(arrays.rows)

    slots: list[int] = []
    combined = {c.token: c for c in arrays.combines}
    assert len(combined) == len(arrays.combines)
    for token, (_, low, high) in enumerate(visible):
        own = sorted(pieces[token], key=lambda r: r.low)
        _check_cover(own, low, high)
        if len(own) == 1:
            assert own[0].slot == -1
            assert token not in combined
            continue
        combine = combined.pop(token)
        wanted = list(range(combine.slot_begin, combine.slot_end))
        assert [r.slot for r in own] == wanted  # in key order
        slots += wanted
    assert not combined
    assert sorted(slots) == list(range(plan.header("num_partials")))

    report = plan.report
    assert (report.items, report.rows) == (len(arrays.items), len(arrays.rows))
    assert (report.pages_read, report.pages_without_sharing) == (pages_read, pages_alone)
    keys = sum(max(0, high - low) for _, low, high in visible)
    assert report.scores == keys * batch.num_heads
    assert report.imbalance >= 1
    assert plan.header("max_item_rows") == max(
        (r.row_end - r.row_begin for r in arrays.items), default=0
    )
    starts = [sum(batch.rows[:b]) for b in range(len(batch.rows))]
    assert arrays.tokens == [
        (b, batch.lengths[b] - batch.rows[b] + token - starts[b])
        for token, (b, _, _) in enumerate(visible)
    ]
    return arrays


def _check_cover(own: list[Row], low: int, high: int) -> None:
    """The pieces are [low, high) in order; all but the first lie in one cell and start it."""
    if high <= low:
        assert not own
        return
    assert own[0].low == low
    assert own[-1].high == high
    for before, after in itertools.pairwise(own):
        assert before.high == after.low
        assert after.low % CELL == 0
        assert (after.high - 1) // CELL == after.low // CELL
    assert all(r.low < r.high for r in own)


def _pages_used(visible: list[tuple[int, int, int]], sequences: int, page_size: int) -> list[range]:
    """Per sequence, the pages on which its rows see a key."""
    result = [range(0)] * sequences
    for b, low, high in visible:
        if low < high:
            pages, before = _page_range(low, high, page_size), result[b] or range(2**31, 0)
            result[b] = range(min(pages.start, before.start), max(pages.stop, before.stop))
    return result


def _page_range(low: int, high: int, page_size: int) -> range:
    return range(low // page_size, (high - 1) // page_size + 1)
