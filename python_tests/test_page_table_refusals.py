"""What PageTable refuses: every error text, and that nothing has changed after it."""

from __future__ import annotations

import re

import pytest
from tables import books, grown, sequence_of

from wim_ext import _C
from wim_ext._native import PageTable
from wim_ext.errors import CacheFull, StaleSequenceError


def refused_commits() -> list:
    def not_a_fork(table: _C.PageTable) -> tuple[int, int]:
        return sequence_of(table, 6), sequence_of(table, 6)

    def fork_of_a_fork(table: _C.PageTable) -> tuple[int, int]:
        trunk = sequence_of(table, 6)
        return trunk, table.fork(table.fork(trunk))

    def itself(table: _C.PageTable) -> tuple[int, int]:
        trunk = sequence_of(table, 6)
        return trunk, trunk

    def trunk_is_ahead(table: _C.PageTable) -> tuple[int, int]:
        trunk = sequence_of(table, 6)
        return trunk, table.fork(trunk, 5)

    def trunk_was_cut(table: _C.PageTable) -> tuple[int, int]:
        trunk = sequence_of(table, 6)
        branch = table.fork(trunk, 5)
        table.rollback(trunk, 4)
        grown(table, (trunk, 1))
        return trunk, branch

    def branch_was_cut(table: _C.PageTable) -> tuple[int, int]:
        trunk = sequence_of(table, 6)
        branch = table.fork(trunk)
        table.rollback(branch, 5)
        grown(table, (branch, 3))
        return trunk, branch

    below = "rolled back below token 5, where the branch was forked"
    return [
        (not_a_fork, "branch: it was not forked from this sequence"),
        (fork_of_a_fork, "branch: it was not forked from this sequence"),
        (itself, "branch: it was not forked from this sequence"),
        (
            trunk_is_ahead,
            "branch: this sequence stands at 6 tokens, not at token 5, where the branch",
        ),
        (trunk_was_cut, f"branch: this sequence was {below}, since the fork"),
        (branch_was_cut, "branch: it was itself rolled back below token 6, where the branch was"),
    ]


@pytest.mark.parametrize(
    ("make", "text"), refused_commits(), ids=lambda v: getattr(v, "__name__", "")
)
def test_refused_commits(make, text: str) -> None:
    table = PageTable(8, 4)
    trunk, branch = make(table)
    before = books(table, trunk, branch)
    with pytest.raises(ValueError, match=re.escape(text)):
        table.commit(trunk, branch)
    assert books(table, trunk, branch) == before


# Running out.


def test_exactly_full_works_and_one_more_does_not() -> None:
    table = PageTable(3, 4)
    a = sequence_of(table, 12)
    before = books(table, a)
    with pytest.raises(CacheFull) as caught:
        table.prepare([(a, 1)])
    error = caught.value
    assert (error.needed, error.free, error.total, error.can_ever_fit) == (1, 0, 3, False)
    assert str(error) == (
        "the cache is full: 1 pages needed, 0 of 3 free; it can never fit: make the cache larger"
    )
    assert isinstance(error, MemoryError)
    assert books(table, a) == before


def test_full_counts_copies_and_says_whether_waiting_helps() -> None:
    table = PageTable(2, 4)
    trunk = sequence_of(table, 6)
    branch = table.fork(trunk)
    grown(table, (trunk, 1))
    assert table.pages_needed([(branch, 1)]) == 1
    with pytest.raises(CacheFull, match="release or roll back sequences and try again") as caught:
        table.prepare([(branch, 1)])
    assert (caught.value.needed, caught.value.can_ever_fit) == (1, True)
    table.release(trunk)
    assert table.pages_needed([(branch, 1)]) == 0
    grown(table, (branch, 1))


def test_full_is_all_or_nothing() -> None:
    table = PageTable(4, 4)
    a, b = sequence_of(table, 4), sequence_of(table, 4)
    before = books(table, a, b)
    with pytest.raises(CacheFull) as caught:
        table.prepare([(a, 4), (b, 5)])
    assert (caught.value.needed, caught.value.free) == (3, 2)
    assert books(table, a, b) == before
    grown(table, (a, 4), (b, 4))


def test_copies_among_the_members_decide_whether_it_can_ever_fit() -> None:
    table = PageTable(2, 4)
    trunk = sequence_of(table, 3)
    members = [trunk, table.fork(trunk), table.fork(trunk)]
    with pytest.raises(CacheFull) as caught:
        table.prepare([(member, 1) for member in members])
    assert (caught.value.needed, caught.value.can_ever_fit) == (2, False)


# Apply and cancel.


def test_apply_refuses_what_is_out_of_date() -> None:
    table, other = PageTable(4, 4), PageTable(4, 4)
    a = table.create()
    text = "reservation: the page table has changed since it was prepared"
    stale = table.prepare([(a, 1)])
    table.create()
    with pytest.raises(ValueError, match=text):
        table.apply(stale)
    with pytest.raises(ValueError, match=text):
        other.apply(table.prepare([(a, 1)]))
    applied = grown(table, (a, 1))
    with pytest.raises(ValueError, match=text):
        table.apply(applied)
    assert table.length(a) == 1


def test_cancel_brings_lengths_back_once() -> None:
    table = PageTable(8, 4)
    trunk = sequence_of(table, 6)
    branch = table.fork(trunk, 5)
    reservation = grown(table, (trunk, 9), (branch, 1))
    table.cancel(reservation)
    assert (table.length(trunk), table.length(branch)) == (6, 5)
    assert not reservation.applied
    grown(table, (trunk, 1))
    table.cancel(reservation)  # again: nothing
    assert table.length(trunk) == 7
    table.check_integrity()


def test_cancel_skips_the_released() -> None:
    table = PageTable(8, 4)
    a, b = table.create(), table.create()
    reservation = grown(table, (a, 3), (b, 3))
    table.release(a)
    table.cancel(reservation)
    assert table.length(b) == 0


def test_cancel_refuses_when_a_sequence_has_gone_on() -> None:
    table = PageTable(8, 4)
    a, b = table.create(), table.create()
    reservation = grown(table, (a, 3), (b, 3))
    grown(table, (b, 2))
    text = (
        r"work\[1\]: the sequence was changed since this reservation left it at 3 tokens; it now "
        "has 5"
    )
    with pytest.raises(ValueError, match=text):
        table.cancel(reservation)
    assert (table.length(a), table.length(b)) == (3, 5)
    with pytest.raises(ValueError, match="reservation: it was not applied to this page table"):
        table.cancel(table.prepare([(a, 1)]))
    with pytest.raises(ValueError, match="reservation: it was not applied to this page table"):
        PageTable(8, 4).cancel(reservation)


@pytest.mark.parametrize("how", ["refilled", "committed"])
def test_cancel_knows_other_tokens_of_the_same_number(how: str) -> None:
    table = PageTable(8, 4)
    trunk = table.create()
    grown(table, (trunk, 2))
    branch = table.fork(trunk, None)
    reservation = grown(table, (trunk, 3))
    table.rollback(trunk, 2)
    if how == "refilled":
        grown(table, (trunk, 3))
    else:
        grown(table, (branch, 3))
        table.commit(trunk, branch)
    with pytest.raises(ValueError, match=r"work\[0\]: the sequence was changed .* it now has 5$"):
        table.cancel(reservation)
    assert table.length(trunk) == 5


def test_cancel_does_not_mind_what_kept_the_tokens() -> None:
    table = PageTable(8, 4)
    a, b = table.create(), table.create()
    reservation = grown(table, (a, 3), (b, 0))
    table.rollback(a, 3)
    grown(table, (a, 0), (b, 2))
    table.commit(a, table.fork(a, None))
    table.cancel(reservation)
    assert (table.length(a), table.length(b)) == (0, 2)
    table.check_integrity()


# Arguments.


@pytest.mark.parametrize(
    ("num_pages", "page_size", "text"),
    [
        (0, 4, "num_pages = 0: must be 1..2147483647"),
        (-1, 4, "num_pages = -1: must be 1..2147483647"),
        (2**31, 4, "num_pages = 2147483648: must be 1..2147483647"),
        (4, 0, "page_size = 0: must be 1..2147483647"),
        (4, -5, "page_size = -5: must be 1..2147483647"),
    ],
)
def test_bad_pools(num_pages: int, page_size: int, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        PageTable(num_pages, page_size)


@pytest.mark.parametrize("length", [-1, 7, 2**62, -(2**62)])
@pytest.mark.parametrize("name", ["fork", "rollback"])
def test_lengths_out_of_range(name: str, length: int) -> None:
    table = PageTable(4, 4)
    sequence = sequence_of(table, 6)
    before = books(table, sequence)
    text = f"length = {length}: must be 0..6, the length of the sequence"
    with pytest.raises(ValueError, match=re.escape(text)):
        getattr(table, name)(sequence, length)
    assert books(table, sequence) == before


@pytest.mark.parametrize("count", [-1, 2**31 - 6, 2**62])
def test_counts_out_of_range(count: int) -> None:
    table = PageTable(4, 4)
    a, b = table.create(), sequence_of(table, 6)
    text = f"work[1]: count = {count}: must be 0..2147483641"
    with pytest.raises(ValueError, match=re.escape(text)):
        table.prepare([(a, 1), (b, count)])
    with pytest.raises(ValueError, match=re.escape(text)):
        table.pages_needed([(a, 1), (b, count)])


def test_a_sequence_named_twice() -> None:
    table = PageTable(4, 4)
    a, b = table.create(), table.create()
    text = re.escape("work[2]: the sequence is named twice in one request")
    with pytest.raises(ValueError, match=text):
        table.prepare([(a, 1), (b, 1), (a, 1)])
    grown(table, (a, 1), (b, 1))


@pytest.mark.parametrize("handle", [0, -1, 1, 1 << 25, (1 << 24) + 1, 5 << 24, 2**62, -(2**62)])
def test_handles_that_never_were(handle: int) -> None:
    table = PageTable(4, 4)
    live = table.create()
    text = (
        rf"sequence {handle} is not alive here: it was released, consumed by a commit, or belongs"
    )
    assert handle != live
    assert not table.alive(handle)
    calls = [
        lambda: table.fork(handle),
        lambda: table.rollback(handle, 0),
        lambda: table.release(handle),
        lambda: table.commit(live, handle),
        lambda: table.commit(handle, live),
        lambda: table.length(handle),
        lambda: table.pages(handle),
        lambda: table.prepare([(live, 1), (handle, 1)]),
        lambda: table.pages_needed([(handle, 1)]),
    ]
    for call in calls:
        with pytest.raises(StaleSequenceError, match=text):
            call()
    assert table.stats().sequences == 1
    table.check_integrity()


@pytest.mark.parametrize("page", [-1, 4])
def test_holders_of_no_page(page: int) -> None:
    with pytest.raises(IndexError, match=f"page = {page}: must be 0..3"):
        PageTable(4, 4).holders(page)
