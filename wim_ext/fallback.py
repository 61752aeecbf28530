"""Models that the packed path cannot run: the same surface over the model's own cache.

Slower, because sequences run one after the other and every step copies keys and values
(`torch.cat`), but right for recurrent layers, ALiBi inside the model and masks of the model's own.
A fork shares the keys and values, which transformers never writes in place, and clones recurrent
states, which it does.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch

from wim_ext.borrow import borrowed
from wim_ext.errors import ModelNotSupported, StaleSequenceError
from wim_ext.guards import check_causal_lm, parity_check
from wim_ext.history import can_crop, cropped, new_history, shared_copy
from wim_ext.rope import RopePin, context_length, depends_on_length
from wim_ext.work import Work, check_work

__all__ = ["FallbackModel", "FallbackSequence", "SlowPathWarning"]


class SlowPathWarning(UserWarning):
    """A model runs on the slow path; the text says why."""


class FallbackModel:
    """Runs any causal LM of transformers through its own cache, one sequence after the other.

    Args:
        hf_model: a model in eval mode with its weights loaded.
        reason: why the packed path was not taken, in words; kept as `fallback_reason`.
        total_length: tokens of the longest sequence; matters for length-dependent rotary only.

    Raises:
        ModelNotSupported: an encoder-decoder, a model without a cache that can be continued, or one
            whose continued forward does not repeat its plain forward.
    """

    is_fallback = True

    def __init__(
        self, hf_model: Any, reason: str = "it was asked for", total_length: int | None = None
    ) -> None:
        check_causal_lm(hf_model)
        self.hf_model = hf_model
        self.fallback_reason = reason
        self.max_length = context_length(hf_model.config)
        self.vocab_size: int = hf_model.config.get_text_config(decoder=True).vocab_size
        self.dtype: torch.dtype = hf_model.dtype
        self.device: torch.device = hf_model.device
        self.tokens_processed = 0
        # Whether sequences can go back to any token; recurrent states cannot.
        self.can_roll_back = can_crop(new_history(hf_model.config))
        parameters = inspect.signature(hf_model.forward).parameters
        names = ("cache", "past_key_values", "cache_params")
        self._cache_name = next((n for n in names if n in parameters), None)
        if self._cache_name is None:
            raise ModelNotSupported(f"{type(hf_model).__name__} has no cache to continue from")
        self._keeps_rows = "logits_to_keep" in parameters
        self._pin: RopePin | None = None
        self.total_length = total_length
        self._one_by_one = False
        self._check()
        self.tokens_processed = 0

    @property
    def total_length(self) -> int | None:
        """Tokens of the longest sequence to come; a length-dependent rotary needs it."""
        return self._pin.total_length if self._pin is not None else None

    @total_length.setter
    def total_length(self, value: int | None) -> None:
        length = value if value is not None else self.max_length
        moves = length is not None and depends_on_length(self.hf_model)
        self._pin = RopePin(self.hf_model, length) if moves and length is not None else None

    @property
    def free_tokens(self) -> int:
        """The model's own cache grows without a limit but the machine's memory."""
        return sys.maxsize

    def new_sequence(self) -> FallbackSequence:
        return FallbackSequence(self, new_history(self.hf_model.config), 0)

    @torch.no_grad()
    def forward(self, work: Sequence[Work]) -> list[torch.Tensor]:
        """Appends each item's tokens to its sequence; returns [item.logits, vocab] for each.

        Raises:
            ValueError, IndexError, ContextTooLong: as `check_work`.
            StaleSequenceError: a sequence was released or belongs to another model.
        """
        for item in work:
            self._check_sequence(item.sequence)
        check_work(work, self.vocab_size, self.max_length)
        done = []
        with borrowed(self.hf_model, pin=self._pin):
            for item in work:
                # The step runs on a copy, so that a failing item leaves every sequence as it was.
                cache = shared_copy(item.sequence._cache)
                cache, logits = self._extend(cache, item)
                done.append((cache, logits))
        for item, (cache, _) in zip(work, done, strict=True):
            item.sequence._cache = cache
            item.sequence._length += len(item.tokens)
            self.tokens_processed += len(item.tokens)
        return [logits for _, logits in done]

    def _extend(self, cache: Any, item: Work) -> tuple[Any, torch.Tensor]:
        tokens, rows = list(item.tokens), []
        # What is continued one by one may still be started in one piece.
        single = self._one_by_one and item.sequence.length > 0
        step = 1 if single else max(len(tokens), 1)
        for begin in range(0, len(tokens), step):
            ids = torch.tensor([tokens[begin : begin + step]], device=self.device)
            wanted = max(0, min(step, begin + step - (len(tokens) - item.logits)))
            options = {"logits_to_keep": max(wanted, 1)} if self._keeps_rows else {}
            output = self.hf_model(
                input_ids=ids, use_cache=True, **{str(self._cache_name): cache}, **options
            )
            cache = getattr(output, str(self._cache_name), None)
            if cache is None:
                raise ModelNotSupported("the model does not give its cache back")
            rows.append(output.logits[0, output.logits.shape[1] - wanted :])
        if not rows:
            rows.append(torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device))
        return cache, torch.cat(rows)

    def _check_sequence(self, sequence: Any) -> None:
        if not isinstance(sequence, FallbackSequence) or sequence._model is not self:
            raise StaleSequenceError("the sequence belongs to another model")
        sequence._check_alive()

    def _check(self) -> None:
        """Accepts the model as it is, or else one token at a time, or not at all."""
        try:
            parity_check(self, self.hf_model, self._pin)
        except ModelNotSupported:
            self._one_by_one = True
            parity_check(self, self.hf_model, self._pin)


class FallbackSequence:
    """Tokens held in a cache of transformers; forks share its keys and values."""

    def __init__(
        self, model: FallbackModel, cache: Any, length: int, parent: FallbackSequence | None = None
    ) -> None:
        self._model = model
        self._cache = cache
        self._length = length
        self._fork_length = length
        self._parent = parent
        self._forks: WeakSet[FallbackSequence] = WeakSet()

    @property
    def length(self) -> int:
        """Tokens of this sequence."""
        return self._length

    @property
    def released(self) -> bool:
        """Whether the sequence has ended."""
        return self._cache is None

    def fork(self, length: int | None = None) -> FallbackSequence:
        """A sequence that starts with this one's first `length` tokens (default: all).

        Raises:
            ValueError: `length` is not a length of this sequence, or lies before its end in a model
                whose states cannot be rolled back.
        """
        self._check_alive()
        length = self._length if length is None else length
        branch = FallbackSequence(self._model, self._cut_to(length, "fork"), length, parent=self)
        self._forks.add(branch)
        return branch

    def rollback(self, length: int) -> None:
        """Forgets every token from `length` on. Raises ValueError as `fork` does."""
        self._check_alive()
        self._cache = self._cut_to(length, "rollback")
        self._length = length
        # Below the fork point the two no longer share all tokens: no commit between them.
        if length < self._fork_length:
            self._parent = None
        for branch in [b for b in self._forks if length < b._fork_length]:
            branch._parent = None

    def commit(self, branch: FallbackSequence) -> None:
        """Takes over the tokens of `branch`, a fork of this sequence, and uses it up.

        Raises:
            ValueError: `branch` is no sequence or was not forked from this one, this sequence does
                not stand at the token where it was forked (roll it back first), or one of them was
                rolled back below that token since.
        """
        self._check_alive()
        if not isinstance(branch, FallbackSequence):
            raise ValueError(f"branch is {branch!r}; allowed is a FallbackSequence")
        branch._check_alive()
        if branch._parent is not self:
            raise ValueError(
                "branch was not forked from this sequence, or one of them was rolled back below "
                "the fork point since"
            )
        if self._length != branch._fork_length:
            raise ValueError(
                f"this sequence has {self._length} tokens, the branch was forked at "
                f"{branch._fork_length}; roll back to the fork point before commit"
            )
        self._cache, self._length = branch._cache, branch._length
        branch.release()

    def release(self) -> None:
        """Gives the memory back; may be called again."""
        self._cache = self._parent = None

    def __enter__(self) -> FallbackSequence:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def _check_alive(self) -> None:
        if self._cache is None:
            raise StaleSequenceError("the sequence has been released")

    def _cut_to(self, length: int, action: str) -> Any:
        if not 0 <= length <= self._length:
            raise ValueError(f"{action} length is {length}; allowed are 0 to {self._length}")
        if length == 0:
            return new_history(self._model.hf_model.config)
        if length < self._length and not self._model.can_roll_back:
            raise ValueError(
                f"{action} to {length} of {self._length} tokens: "
                f"{type(self._model.hf_model).__name__} has recurrent states, which cannot go back "
                f"to an earlier token; fork when the sequence has that length"
            )
        return cropped(self._cache, self._length - length)
