"""PageTable by itself: what each operation does to lengths, pages and counts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tables import books, grown, sequence_of

from wim_ext._native import PageTable

# Making, growing, ending.


def test_a_fresh_table_is_empty() -> None:
    table = PageTable(4, 16)
    stats = table.stats()
    assert table.page_size == 16
    assert (stats.num_pages, stats.free_pages, stats.used_pages) == (4, 4, 0)
    assert (stats.shared_pages, stats.high_water_pages, stats.page_copies) == (0, 0, 0)
    assert stats.sequences == 0


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 9])
def test_a_sequence_holds_just_the_pages_that_its_length_takes(length: int) -> None:
    table = PageTable(4, 4)
    sequence = sequence_of(table, length)
    assert table.length(sequence) == length
    assert table.pages(sequence) == list(range(-(-length // 4)))
    assert table.stats().used_pages == -(-length // 4)


def test_reservation_arrays() -> None:
    table = PageTable(8, 4)
    a, b = sequence_of(table, 6), sequence_of(table, 1)
    reservation = grown(table, (a, 3), (b, 0), (table.create(), 2))
    assert reservation.block_table.tolist() == [[0, 1, 3], [2, -1, -1], [4, -1, -1]]
    assert reservation.slot_mapping.tolist() == [6, 7, 12, 16, 17]
    assert reservation.position_ids.tolist() == [6, 7, 8, 0, 1]
    assert reservation.cu_seqlens_q.tolist() == [0, 3, 3, 5]
    assert reservation.seqused_k.tolist() == [9, 1, 2]
    assert reservation.copy_src.size == reservation.copy_dst.size == 0
    assert reservation.applied
    for name in ("slot_mapping", "position_ids", "copy_src", "copy_dst"):
        assert getattr(reservation, name).dtype == np.int64
    for name in ("block_table", "cu_seqlens_q", "seqused_k"):
        assert getattr(reservation, name).dtype == np.int32


def test_arrays_outlive_their_reservation_without_a_copy() -> None:
    table = PageTable(8, 4)
    reservation = grown(table, (table.create(), 6))
    first, again = reservation.slot_mapping, reservation.slot_mapping
    assert first.ctypes.data == again.ctypes.data
    del reservation, again
    assert first.tolist() == [0, 1, 2, 3, 4, 5]


def test_an_empty_request_is_an_empty_reservation() -> None:
    table = PageTable(1, 1)
    reservation = grown(table)
    assert reservation.block_table.shape == (0, 0)
    assert reservation.cu_seqlens_q.tolist() == [0]
    reservation = grown(table, (table.create(), 0))
    assert reservation.block_table.shape == (1, 0)
    assert reservation.seqused_k.tolist() == [0]


def test_prepare_alone_changes_nothing() -> None:
    table = PageTable(4, 4)
    a = sequence_of(table, 3)
    before = books(table, a)
    reservation = table.prepare([(a, 9)])
    assert not reservation.applied
    assert books(table, a) == before
    table.check_integrity()


def test_pages_are_reused() -> None:
    table = PageTable(3, 2)
    for _ in range(10):
        sequence = sequence_of(table, 6)
        assert sorted(table.pages(sequence)) == [0, 1, 2]
        table.release(sequence)
    assert table.stats().free_pages == 3
    assert table.stats().high_water_pages == 3


def test_handles_die_for_good() -> None:
    table = PageTable(4, 4)
    dead = [sequence_of(table, 1)]
    table.release(dead[0])
    for _ in range(5):  # the entry is used again and again
        dead.append(sequence_of(table, 1))
        assert table.newest == dead[-1]
        assert table.alive(dead[-1])
        table.release(dead[-1])
    assert len(set(dead)) == len(dead)
    live = sequence_of(table, 2)
    assert not any(table.alive(handle) for handle in dead)
    assert table.length(live) == 2


# Forks and who copies.


@pytest.mark.parametrize("length", range(10))
def test_fork_shares_pages_and_copies_nothing(length: int) -> None:
    table = PageTable(4, 4)
    trunk = sequence_of(table, 9)
    branch = table.fork(trunk, length)
    held = -(-length // 4)
    assert table.length(branch) == length
    assert table.pages(branch) == table.pages(trunk)[:held]
    assert [table.holders(page) for page in table.pages(trunk)] == [2] * held + [1] * (3 - held)
    assert table.stats().shared_pages == held
    assert table.stats().used_pages == 3
    table.check_integrity()


def test_fork_takes_all_tokens_by_default() -> None:
    table = PageTable(4, 4)
    trunk = sequence_of(table, 7)
    assert table.length(table.fork(trunk)) == 7


def test_the_trunk_goes_on_in_place_and_the_branch_copies() -> None:
    table = PageTable(4, 4)
    trunk = sequence_of(table, 6)
    branch = table.fork(trunk)
    reservation = grown(table, (trunk, 1))
    assert reservation.copy_src.size == 0
    reservation = grown(table, (branch, 1))
    assert (reservation.copy_src.tolist(), reservation.copy_dst.tolist()) == ([1], [2])
    assert table.pages(trunk) == [0, 1]
    assert table.pages(branch) == [0, 2]
    assert reservation.slot_mapping.tolist() == [2 * 4 + 2]
    assert table.stats().page_copies == 1
    assert grown(table, (branch, 1)).copy_src.size == 0  # the page is its own now


def test_a_branch_behind_everyone_else_goes_on_in_place() -> None:
    table = PageTable(4, 4)
    trunk = sequence_of(table, 6)
    branch = table.fork(trunk)
    table.rollback(trunk, 5)
    assert grown(table, (branch, 1)).copy_src.size == 0
    assert grown(table, (trunk, 1)).copy_src.tolist() == [1]  # the branch sees slot 1 of it


def test_no_copy_at_a_page_border() -> None:
    table = PageTable(4, 4)
    trunk = sequence_of(table, 8)
    branch = table.fork(trunk, 4)
    assert grown(table, (branch, 1)).copy_src.size == 0
    assert grown(table, (trunk, 1)).copy_src.size == 0


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_of_writers_in_one_call_exactly_one_stays(order: tuple[int, ...]) -> None:
    table = PageTable(8, 4)
    trunk = sequence_of(table, 6)
    members = [trunk, table.fork(trunk), table.fork(trunk)]
    work = [(members[i], 1) for i in order]
    assert table.pages_needed(work) == 2
    reservation = grown(table, *work)
    assert reservation.copy_src.tolist() == [1, 1]
    assert len({table.pages(member)[1] for member in members}) == 3
    assert table.pages(members[order[0]])[1] == 1
    assert len(set(reservation.slot_mapping.tolist())) == 3


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_number_of_copies_does_not_depend_on_the_order(order: tuple[int, ...]) -> None:
    table = PageTable(8, 8)
    trunk = sequence_of(table, 7)
    members = [table.fork(trunk, length) for length in (2, 5, 6)]
    table.rollback(trunk, 6)  # a holder that does not write, level with the last writer
    reservation = grown(table, *[(members[i], 1) for i in order])
    assert reservation.copy_src.tolist() == [0, 0]
    assert table.pages(members[2]) == [0]


def test_a_silent_holder_that_sees_further_makes_every_writer_copy() -> None:
    table = PageTable(8, 8)
    trunk = sequence_of(table, 7)
    a, b = table.fork(trunk, 2), table.fork(trunk, 5)
    assert grown(table, (a, 1), (b, 1), (trunk, 0)).copy_src.tolist() == [0, 0]


def test_refill_below_a_fork_copies() -> None:
    table = PageTable(4, 4)
    trunk = sequence_of(table, 7)
    branch = table.fork(trunk, 6)
    table.rollback(trunk, 5)
    reservation = grown(table, (trunk, 1))
    assert reservation.copy_src.tolist() == [1]
    assert table.pages(branch) == [0, 1]


# Rollback.


@pytest.mark.parametrize("length", range(10))
def test_rollback_frees_whole_pages(length: int) -> None:
    table = PageTable(4, 4)
    sequence = sequence_of(table, 9)
    table.rollback(sequence, length)
    assert table.length(sequence) == length
    assert table.stats().used_pages == -(-length // 4)
    table.check_integrity()


def test_rollback_leaves_shared_pages_to_their_holders() -> None:
    table = PageTable(4, 4)
    trunk = sequence_of(table, 9)
    branch = table.fork(trunk)
    table.rollback(trunk, 0)
    assert table.stats().free_pages == 1
    assert table.pages(branch) == [0, 1, 2]
    assert table.stats().shared_pages == 0


# Commit.


def test_commit_takes_over_tokens_and_ends_the_branch() -> None:
    table = PageTable(8, 4)
    trunk = sequence_of(table, 6)
    branch = table.fork(trunk)
    grown(table, (trunk, 2))
    grown(table, (branch, 5))
    pages = table.pages(branch)
    table.rollback(trunk, 6)
    table.commit(trunk, branch)
    assert table.length(trunk) == 11
    assert table.pages(trunk) == pages
    assert not table.alive(branch)
    assert table.stats().used_pages == 3
    table.check_integrity()


def test_commit_of_a_branch_without_tokens_of_its_own() -> None:
    table = PageTable(8, 4)
    trunk = sequence_of(table, 6)
    table.commit(trunk, table.fork(trunk))
    assert table.length(trunk) == 6
    assert table.stats().sequences == 1


def test_commit_needs_no_free_page() -> None:
    table = PageTable(3, 4)
    trunk = sequence_of(table, 6)
    branch = table.fork(trunk)
    grown(table, (trunk, 1), (branch, 1))
    assert table.stats().free_pages == 0
    table.rollback(trunk, 6)
    table.commit(trunk, branch)
    assert table.stats().free_pages == 1


def test_other_forks_survive_a_commit() -> None:
    table = PageTable(8, 4)
    trunk = sequence_of(table, 6)
    first, second = table.fork(trunk), table.fork(trunk, 3)
    grown(table, (first, 2), (second, 4))
    table.commit(trunk, first)
    table.rollback(trunk, 3)
    table.commit(trunk, second)
    assert table.length(trunk) == 7
    table.check_integrity()
