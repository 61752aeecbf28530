"""What one step of a model is asked to do, and the checks that every kind of model makes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wim_ext.errors import ContextTooLong

__all__ = ["Work", "check_work"]


@dataclass(frozen=True)
class Work:
    """Tokens that one sequence takes in this step.

    Attributes:
        sequence: a sequence of the model's `new_sequence()` or a fork of one.
        tokens: token ids to append; an empty list is allowed and leaves the sequence as it is.
        logits: how many of the last rows' logits are wanted, 0 .. len(tokens).
    """

    sequence: Any
    tokens: Sequence[int]
    logits: int = 1


def check_work(work: Sequence[Work], vocab_size: int, max_length: int | None) -> None:
    """Refuses a step that cannot run, before anything has changed.

    Raises:
        ValueError: a sequence stands in the step twice, or more logits than tokens are wanted.
        IndexError: a token id is outside the vocabulary.
        ContextTooLong: a sequence would grow past the model's context.
    """
    seen: set[int] = set()
    for index, item in enumerate(work):
        if id(item.sequence) in seen:
            raise ValueError(f"work[{index}].sequence stands in this step twice; merge its tokens")
        seen.add(id(item.sequence))
        count = len(item.tokens)
        if not 0 <= item.logits <= count:
            raise ValueError(
                f"work[{index}].logits is {item.logits}; allowed are 0 to {count}, "
                "the number of its tokens"
            )
        if count and not (min(item.tokens) >= 0 and max(item.tokens) < vocab_size):
            bad = next(t for t in item.tokens if not 0 <= t < vocab_size)
            raise IndexError(
                f"work[{index}].tokens holds the id {bad}; allowed are 0 to {vocab_size - 1}"
            )
        length = item.sequence.length + count
        if max_length is not None and length > max_length:
            raise ContextTooLong(
                f"work[{index}] would make its sequence {length} tokens long; "
                f"the model can attend to {max_length}",
                needed=length,
                limit=max_length,
            )
