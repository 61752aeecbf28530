"""A PagedKVCache beside a naive model of it; every operation is done on both and then compared.

The model keeps each sequence as a Python list of payload numbers and each page as an object whose
identity stands for sharing. These are demanded after every step:
I1  free + unique live pages = total
I2  pages are shared exactly as in the model
I3  the page table's own books agree
I4  a sequence holds ceil(length / page_size) pages
I5  every sequence reads back its list from the tensors of all layers; whatever nobody can see is
    poisoned with NaN
I6  new slots were visible to nobody
I7  after an exception nothing has changed
I8  exceptions happen exactly when the model says so
I9  dead sequences stay dead
I10 after releasing everything all pages are free
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from wim_ext import batch as batch_module
from wim_ext import ops
from wim_ext.cache import PagedKVCache, Sequence
from wim_ext.errors import CacheFull, StaleSequenceError

NUM_LAYERS = 2
HEADS, HEAD_DIM = 2, 8


class ModelPage:
    """Stands for one page; `real` is the id that the cache gave it, once it is known."""

    real: int | None = None


@dataclass(eq=False)
class ModelSequence:
    real: Sequence
    payloads: list[int] = field(default_factory=list)
    pages: list[ModelPage] = field(default_factory=list)
    parent: ModelSequence | None = None
    fork_length: int = 0
    severed: bool = False
    edits: int = 0  # how often tokens came or went


Work = list[tuple[ModelSequence, int]]


def refused(
    error: type[BaseException], text: str, call: Callable[..., object], *args: object
) -> Any:
    """The exception that a call must raise, without the frames that keep sequences alive."""
    try:
        call(*args)
    except error as exception:
        caught = exception.with_traceback(None)
    else:
        raise AssertionError(f"{call} did not raise {error.__name__}")
    assert re.search(text, str(caught)), f"{text!r} is not in {caught}"
    return caught


class CacheWalk:
    def __init__(self, num_pages: int, page_size: int, **options: object) -> None:
        self.cache = PagedKVCache(
            num_layers=NUM_LAYERS,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=HEADS,
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            **options,  # type: ignore[arg-type]
        )
        self.foreign = PagedKVCache(
            num_layers=1, num_pages=1, page_size=1, dtype=torch.float32
        ).new_sequence()
        self.live: list[ModelSequence] = []
        self.dead: list[Sequence] = []
        self.next_payload = 1
        self.copies = self.high_water = 0
        self.events: Counter[str] = Counter()
        self.visible: set[int] = set()  # slots that some sequence can see
        # Batches that were kept, with the sequences, counts and edits that they left behind.
        self.kept: list[tuple[batch_module.Batch, list[tuple[ModelSequence, int, int]]]] = []

    # What the model knows.

    def pages_for(self, length: int) -> int:
        return -(-length // self.cache.page_size)

    def held_pages(self, sequences: list[ModelSequence]) -> set[ModelPage]:
        return {page for sequence in sequences for page in sequence.pages}

    def appended(
        self, work: Work, present: list[ModelSequence]
    ) -> tuple[dict[ModelSequence, list[ModelPage]], list[ModelPage], int]:
        """Pages of everyone after `work`, the new ones among them, and how many are copies."""
        pages = {sequence: list(sequence.pages) for sequence in present}
        lengths = {sequence: len(sequence.payloads) for sequence in present}
        new: list[ModelPage] = []
        copies = 0
        for writer, count in work:
            at = lengths[writer]
            if count and at % self.cache.page_size:
                last = pages[writer][-1]
                if any(
                    lengths[other] > at and last in pages[other]
                    for other in present
                    if other is not writer
                ):
                    pages[writer][-1] = ModelPage()
                    new.append(pages[writer][-1])
                    copies += 1
            lengths[writer] += count
            while len(pages[writer]) < self.pages_for(lengths[writer]):
                pages[writer].append(ModelPage())
                new.append(pages[writer][-1])
        return pages, new, copies

    # Operations, each on the cache and on the model.

    def create(self) -> None:
        self.live.append(ModelSequence(self.cache.new_sequence()))
        self.events["create"] += 1

    def fork(self, source: ModelSequence, length: int | None) -> None:
        shared = len(source.payloads) if length is None else length
        if not 0 <= shared <= len(source.payloads):
            refused(ValueError, r"length = -?\d+: must be 0\.\.", source.real.fork, length)
            self.events["invalid"] += 1
            return
        pages = source.pages[: self.pages_for(shared)]
        real = source.real.fork(length)
        self.live.append(
            ModelSequence(real, source.payloads[:shared], pages, source, fork_length=shared)
        )
        self.events["fork"] += 1

    def rollback(self, sequence: ModelSequence, length: int) -> None:
        if not 0 <= length <= len(sequence.payloads):
            refused(ValueError, r"length = -?\d+: must be 0\.\.", sequence.real.rollback, length)
            self.events["invalid"] += 1
            return
        sequence.real.rollback(length)
        self.shorten(sequence, length)
        self.events["rollback"] += 1

    def shorten(self, sequence: ModelSequence, length: int) -> None:
        sequence.edits += length < len(sequence.payloads)
        del sequence.payloads[length:]
        del sequence.pages[self.pages_for(length) :]
        sequence.severed |= length < sequence.fork_length
        for child in self.live:
            child.severed |= child.parent is sequence and child.fork_length > length

    def bury(self, sequence: ModelSequence) -> None:
        self.live.remove(sequence)
        for child in self.live:
            if child.parent is sequence:
                child.parent = None

    def release(self, sequence: ModelSequence) -> None:
        sequence.real.release()
        self.bury(sequence)
        self.dead = [*self.dead[-20:], sequence.real]
        self.events["release"] += 1

    def collect(self, sequence: ModelSequence) -> None:
        """Drops the last reference instead of releasing."""
        self.kept = [b for b in self.kept if all(s is not sequence for s, _, _ in b[1])]
        self.bury(sequence)
        del sequence.real
        self.events["collect"] += 1

    def commit(self, trunk: ModelSequence, branch: ModelSequence) -> None:
        allowed = (
            branch.parent is trunk
            and not branch.severed
            and len(trunk.payloads) == branch.fork_length
        )
        if not allowed:
            refused(ValueError, "branch: ", trunk.real.commit, branch.real)
            self.events["refused commit"] += 1
            return
        trunk.real.commit(branch.real)
        trunk.edits += len(branch.payloads) > len(trunk.payloads)
        trunk.payloads, trunk.pages = branch.payloads, branch.pages
        self.bury(branch)
        self.dead.append(branch.real)
        self.events["commit"] += 1

    def append(self, work: Work, outcome: str = "keep") -> None:
        """Reserves, and then writes, cancels, or fails in the copying of pages."""
        request = [(sequence.real, count) for sequence, count in work]
        pages, new, copies = self.appended(work, self.live)
        free = self.cache.num_pages - len(self.held_pages(self.live))
        assert self.cache.pages_needed(request) == len(new)
        self.events["append"] += 1
        if len(new) > free:
            self.expect_full(request, work, len(new), free)
            return
        if outcome == "fail" and copies:
            with mock.patch.object(ops, "copy_pages", side_effect=KeyboardInterrupt):
                refused(KeyboardInterrupt, "", self.cache.reserve, request)
            self.events["interrupted copy"] += 1
            return
        batch = self.cache.reserve(request)
        self.check_batch(batch, work)
        self.copies += copies
        self.events["copy on write"] += copies > 0
        for sequence, held in pages.items():
            sequence.pages = held
        self.high_water = max(self.high_water, len(self.held_pages(self.live)))
        self.write(batch, work)
        if outcome == "cancel":
            batch.cancel()
            batch.cancel()
            for sequence, count in work:
                self.shorten(sequence, len(sequence.payloads) - count)
            self.events["cancel"] += 1
        else:
            left = [(sequence, count, sequence.edits) for sequence, count in work]
            self.kept = [*self.kept[-5:], (batch, left)]

    def cancel_late(self, number: int) -> None:
        """Takes an earlier batch back: allowed while its sequences are as it left them, or dead."""
        batch, left = self.kept.pop(number % len(self.kept))
        grown = [(s, count, edits) for s, count, edits in left if count and s in self.live]
        if any(sequence.edits != edits for sequence, _, edits in grown):
            refused(ValueError, "was changed since this reservation", batch.cancel)
            self.events["refused cancel"] += 1
            return
        batch.cancel()
        for sequence, count, _ in grown:
            self.shorten(sequence, len(sequence.payloads) - count)
        self.events["late cancel"] += 1

    def expect_full(
        self, request: list[tuple[Sequence, int]], work: Work, needed: int, free: int
    ) -> None:
        members = [sequence for sequence, _ in work]
        _, alone, _ = self.appended(work, members)
        error = refused(CacheFull, "the cache is full", self.cache.reserve, request)
        total = self.cache.num_pages
        assert (error.needed, error.free, error.total) == (needed, free, total)
        assert error.can_ever_fit == (len(self.held_pages(members)) + len(alone) <= total)
        self.events["exhausted"] += 1

    def write(self, batch: batch_module.Batch, work: Work) -> None:
        total = sum(count for _, count in work)
        payloads = list(range(self.next_payload, self.next_payload + total))
        self.next_payload += total
        rows = torch.tensor(payloads, dtype=torch.float32)[:, None, None].expand(
            -1, HEADS, HEAD_DIM
        )
        for layer in range(NUM_LAYERS):
            key = (rows + layer / 2).contiguous()
            ops.append_kv(key, -key, *self.cache.layer(layer), batch.slot_mapping)
        for sequence, count in work:
            sequence.payloads.extend(payloads[:count])
            sequence.edits += count > 0
            del payloads[:count]

    def misuse(self, kind: int, sequence: ModelSequence) -> None:
        """Calls that must be refused without a trace."""
        cache, real, length = self.cache, sequence.real, len(sequence.payloads)
        calls = [
            (ValueError, "named twice", lambda: cache.reserve([(real, 1), (real, 0)])),
            (ValueError, "count = -1: must be 0", lambda: cache.reserve([(real, -1)])),
            (ValueError, "must be 0", lambda: real.rollback(length + 1)),
            (ValueError, "must be 0", lambda: real.rollback(-1)),
            (ValueError, "must be 0", lambda: real.fork(length + 1)),
            (ValueError, "is not a Sequence", lambda: cache.reserve([(-1, 1)])),
            (StaleSequenceError, "another cache", lambda: cache.reserve([(self.foreign, 1)])),
            (StaleSequenceError, "another cache", lambda: real.commit(self.foreign)),
        ]
        if self.dead:
            dead = self.dead[kind % len(self.dead)]
            dead.release()  # again: no effect
            calls = [
                (StaleSequenceError, "", lambda: dead.fork()),
                (StaleSequenceError, "", lambda: dead.rollback(0)),
                (StaleSequenceError, "", lambda: real.commit(dead)),
                (StaleSequenceError, "", lambda: dead.commit(real)),
                (StaleSequenceError, "", lambda: cache.reserve([(real, 1), (dead, 1)])),
                *calls,
            ]
        refused(*calls[kind % len(calls)])
        self.events["misuse"] += 1

    # Comparison.

    def check_batch(self, batch: batch_module.Batch, work: Work) -> None:
        table, size = batch.block_table.tolist(), self.cache.page_size
        positions, slots, rows = [], [], [0]
        for (sequence, count), row in zip(work, table, strict=True):
            begin = len(sequence.payloads)
            positions += range(begin, begin + count)
            slots += [row[p // size] * size + p % size for p in range(begin, begin + count)]
            rows.append(rows[-1] + count)
        assert batch.position_ids.tolist() == positions
        assert batch.slot_mapping.tolist() == slots
        assert batch.cu_seqlens_q.tolist() == rows
        assert batch.seqused_k.tolist() == [len(s.payloads) + count for s, count in work]
        assert len(set(slots)) == len(slots)
        assert not self.visible & set(slots)  # I6

    def check(self) -> None:
        self.cache.check_integrity()  # I3
        batch = self.cache.reserve([(sequence.real, 0) for sequence in self.live])
        table = batch.block_table.tolist()
        assert batch.seqused_k.tolist() == [len(s.payloads) for s in self.live]
        seen: dict[int, ModelPage] = {}
        for sequence, row in zip(self.live, table, strict=True):
            assert len(sequence.pages) == self.pages_for(len(sequence.payloads))
            assert [page >= 0 for page in row] == [i < len(sequence.pages) for i in range(len(row))]
            for page, real in zip(sequence.pages, row, strict=False):
                page.real = real if page.real is None else page.real
                assert page.real == real  # I7
                assert seen.setdefault(real, page) is page  # I2
        self.check_stats()
        self.check_payloads(table)

    def check_stats(self) -> None:
        stats = self.cache.stats()
        holders = Counter(page for sequence in self.live for page in sequence.pages)
        assert stats.used_pages == len(holders)
        assert stats.free_pages + stats.used_pages == stats.num_pages == self.cache.num_pages  # I1
        assert stats.shared_pages == sum(count > 1 for count in holders.values())
        assert stats.high_water_pages == self.high_water
        assert stats.page_copies == self.copies
        assert stats.sequences == len(self.live)
        assert stats.bytes_used == stats.used_pages * stats.bytes_per_page

    def check_payloads(self, table: list[list[int]]) -> None:
        size = self.cache.page_size
        all_slots = [
            [row[p // size] * size + p % size for p in range(len(sequence.payloads))]
            for sequence, row in zip(self.live, table, strict=True)
        ]
        self.visible = set().union(*all_slots)
        unseen = np.array(sorted(set(range(self.cache.num_pages * size)) - self.visible), dtype=int)
        for layer in range(NUM_LAYERS):
            for sign, tensor in zip((1, -1), self.cache.layer(layer), strict=True):
                values = tensor.numpy()
                values[unseen // size, unseen % size] = np.nan
                for sequence, slots in zip(self.live, all_slots, strict=True):
                    found = values[np.array(slots, int) // size, np.array(slots, int) % size]
                    wanted = sign * (np.array(sequence.payloads, np.float32) + layer / 2)
                    assert (found == wanted[:, None, None]).all()  # I5

    def finish(self) -> None:
        """Releases everything, some of it by garbage collection."""
        while self.live:
            (self.release if len(self.live) % 2 else self.collect)(self.live[0])
            self.check()
        assert self.cache.free_pages == self.cache.num_pages  # I10
