"""Short ways to make page tables of a certain state, for tests."""

from __future__ import annotations

from wim_ext import _C


def grown(table: _C.PageTable, *work: tuple[int, int]) -> _C.Reservation:
    reservation = table.prepare(list(work))
    table.apply(reservation)
    table.check_integrity()
    return reservation


def sequence_of(table: _C.PageTable, length: int) -> int:
    sequence = table.create()
    grown(table, (sequence, length))
    return sequence


def books(table: _C.PageTable, *sequences: int) -> tuple:
    """Everything that a caller can see, to compare before and after."""
    stats = table.stats()
    counts = (stats.free_pages, stats.shared_pages, stats.page_copies, stats.high_water_pages)
    live = [(table.length(s), table.pages(s)) for s in sequences]
    return counts, stats.sequences, live
