"""Exceptions of wim_ext. Bad arguments raise ValueError, bad ids IndexError; the rest is here."""

from __future__ import annotations

__all__ = [
    "CacheFull",
    "ContextTooLong",
    "DocumentFileError",
    "ModelNotFound",
    "ModelNotSupported",
    "StaleSequenceError",
]


class CacheFull(MemoryError):
    """The page pool cannot hold what was asked for. Nothing was changed.

    Attributes:
        needed: pages that the call needs, copies of shared pages included.
        free: pages that are free now.
        total: pages of the pool.
        can_ever_fit: whether the call would fit if all other sequences were released; False means
            that waiting cannot help. Default: whether `needed` is within `total`.
    """

    def __init__(
        self, needed: int, free: int, total: int, can_ever_fit: bool | None = None
    ) -> None:
        self.needed = needed
        self.free = free
        self.total = total
        self.can_ever_fit = needed <= total if can_ever_fit is None else can_ever_fit
        advice = (
            "release or roll back sequences and try again"
            if self.can_ever_fit
            else "it can never fit: make the cache larger"
        )
        super().__init__(
            f"the cache is full: {needed} pages needed, {free} of {total} free; {advice}"
        )


class StaleSequenceError(RuntimeError):
    """A sequence was used after its release or commit, or with a cache that it is not part of."""


class ModelNotFound(ValueError):
    """There is no model under the name that was given; the text says where was looked."""


class ModelNotSupported(ValueError):
    """The model cannot run on the path that was asked for; the text says why."""


class DocumentFileError(ValueError):
    """A document could not be read; the text names the file and the reason."""


class ContextTooLong(ValueError):
    """Document, margins and answer do not fit the model's context. Nothing was run.

    Attributes:
        needed: tokens that the request needs in the worst case.
        limit: tokens that the model can attend to.
    """

    def __init__(self, message: str, needed: int, limit: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.limit = limit
