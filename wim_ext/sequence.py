"""One sequence of tokens in a paged cache: it can fork, roll back, commit and be released."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING

from wim_ext import _native
from wim_ext.errors import StaleSequenceError

if TYPE_CHECKING:
    from wim_ext._C import PageTable

__all__ = ["LockedPageTable", "Sequence", "as_int64"]


def as_int64(value: object, name: str) -> int:
    """An integer argument for C++; numpy and torch integers will do."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} = {value!r}: must be an integer") from None
    if not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} = {number}: does not fit 64 bits")
    return number


class LockedPageTable:
    """A page table, its lock, and what the garbage collector wants released.

    A `Sequence` may be collected at any moment, in any thread and in the middle of an operation, so
    its finalizer only leaves the handle here; the next operation releases it. With WIM_DEBUG=1 each
    operation first checks the books.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._table: PageTable = _native.PageTable(num_pages, page_size)
        self.lock = RLock()
        self.abandoned: deque[int] = deque()
        self._checked = os.environ.get("WIM_DEBUG", "") not in ("", "0")

    def get(self) -> PageTable:
        """The table with nothing left to release. Call it under the lock, once per operation."""
        while self.abandoned:
            handle = self.abandoned[0]
            if self._table.alive(handle):
                self._table.release(handle)
            self.abandoned.popleft()  # last: an interrupt before it only repeats the check
        if self._checked:
            self._table.check_integrity()  # what the operation before this one has left
        return self._table


class Sequence:
    """Tokens in a `PagedKVCache`, made by `PagedKVCache.new_sequence` and `fork`.

    A sequence ends with `release`, at the end of a ``with`` block, when another one commits it, or
    when it is garbage collected; from then on every use but `release` raises `StaleSequenceError`.

    Examples
    --------
    >>> import torch
    >>> from wim_ext.cache import PagedKVCache
    >>> cache = PagedKVCache(num_layers=1, num_pages=8, page_size=16, dtype=torch.float32)
    >>> trunk = cache.new_sequence()
    >>> batch = cache.reserve([(trunk, 20)])
    >>> with trunk.fork(18) as branch:
    ...     batch = cache.reserve([(branch, 3)])
    ...     branch.length, trunk.length, cache.free_pages
    (21, 20, 5)
    >>> cache.free_pages
    6
    """

    __slots__ = ("__weakref__", "_handle", "_table")

    def __init__(self, table: LockedPageTable, make: Callable[[PageTable], int]) -> None:
        self._table = table
        self._handle = 0  # never alive
        with table.lock:
            pages = table.get()
            newest = pages.newest
            try:
                self._handle = make(pages)
            except BaseException:
                # Interrupted after it was made and before it was stored: nobody else would release
                # it.
                if pages.newest != newest:
                    pages.release(pages.newest)
                raise

    @property
    def length(self) -> int:
        """Number of tokens, and so the position of the next one."""
        with self._table.lock:
            return self._table.get().length(self._handle)

    @property
    def released(self) -> bool:
        """Whether the sequence has ended."""
        with self._table.lock:
            return not self._table.get().alive(self._handle)

    def fork(self, length: int | None = None) -> Sequence:
        """A new sequence that shares the first `length` tokens (default: all). Copies nothing.

        Raises
        ------
        ValueError
            `length` is not within 0..`self.length`.
        """
        shared = None if length is None else as_int64(length, "length")
        return Sequence(self._table, lambda table: table.fork(self._handle, shared))

    def rollback(self, length: int) -> None:
        """Forgets every token from `length` (the new length, 0 for none) on; never fails for room.

        Raises
        ------
        ValueError
            `length` is not within 0..`self.length`.
        """
        length = as_int64(length, "length")
        with self._table.lock:
            self._table.get().rollback(self._handle, length)

    def commit(self, branch: Sequence) -> None:
        """Takes over the tokens of a fork of this sequence, which ends; never fails for room.

        Raises
        ------
        ValueError
            `branch` was not forked from this sequence, this sequence does not stand at the token
            where it was forked (roll it back first), or one of them was rolled back below that
            token since.
        """
        if not isinstance(branch, Sequence):
            raise ValueError(f"branch = {branch!r}: must be a Sequence")
        handle = branch.handle_in(self._table, "branch")
        with self._table.lock:
            self._table.get().commit(self._handle, handle)

    def release(self) -> None:
        """Ends the sequence and frees the pages that nobody else holds. Again does nothing."""
        with self._table.lock:
            table = self._table.get()
            if table.alive(self._handle):
                table.release(self._handle)

    def handle_in(self, table: LockedPageTable, name: str) -> int:
        """What `table` knows the sequence by, for argument `name`; it may have ended.

        Raises
        ------
        StaleSequenceError
            The sequence belongs to another cache.
        """
        if self._table is not table:
            raise StaleSequenceError(f"{name}: the sequence belongs to another cache")
        return self._handle

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        if hasattr(self, "_handle"):  # else interrupted before it was anything
            self._table.abandoned.append(self._handle)

    def __reduce__(self) -> str:
        # A copy would share the handle, and the end of either would end both.
        raise TypeError("a Sequence can be neither copied nor pickled; use fork()")

    def __repr__(self) -> str:
        return "<Sequence, released>" if self.released else f"<Sequence of {self.length} tokens>"
