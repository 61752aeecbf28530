"""Runs unmodified causal LMs of Hugging Face transformers over forkable paged KV caches.

The work of many sequences goes through the model as one row of tokens, `[1, T]`, with explicit
positions; only the attention function knows which tokens belong together. The model itself is left
as it was found: its attention implementation and rotary are changed for the length of a forward,
under a lock, so it can be called as usual between steps and several `PagedModel`s can share it
(`wim_ext.borrow` says what other threads have to do).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from wim_ext.attention import IMPLEMENTATION, Step
from wim_ext.borrow import borrowed
from wim_ext.cache import PagedKVCache
from wim_ext.errors import ModelNotSupported
from wim_ext.fallback import FallbackModel, SlowPathWarning
from wim_ext.guards import check_causal_lm, check_packable, parity_check, probe_length
from wim_ext.rope import RopePin, context_length, depends_on_length
from wim_ext.work import Work, check_work

__all__ = ["PagedModel", "Work", "open_model"]

_FALLBACK_CHOICES = ("auto", "never", "always")
_DEFAULT_CONTEXT = 32768
_ROOM_FOR_BRANCHES = 2048

# Models that have passed the probe, with the dtype and device they passed it in.
_accepted: WeakKeyDictionary[Any, tuple[torch.dtype, torch.device]] = WeakKeyDictionary()


class PagedModel:
    """A causal LM whose sequences live in a `PagedKVCache`: they fork, roll back and run together.

    Args:
        hf_model: a decoder-only model of transformers, in eval mode, on the cache's device.
        cache: room for its keys and values; several models may not share one.
        total_length: tokens of the longest sequence to come. Needed only by models whose rotary
            depends on the length (LongRoPE, dynamic NTK); default: what the cache can hold.

    Raises:
        ModelNotSupported: the model attends in a way that packing cannot serve; the text says how.
            `open_model` turns to a slower path then.
        ValueError: the cache does not fit the model.

    Example:
        >>> cache = PagedKVCache.for_model(hf_model, num_tokens=4096)
        >>> model = PagedModel(hf_model, cache)
        >>> trunk = model.new_sequence()
        >>> [logits] = model.forward([Work(trunk, [1, 2, 3])])
        >>> branch = trunk.fork()
    """

    is_fallback = False
    fallback_reason: str | None = None
    can_roll_back = True

    def __init__(self, hf_model: Any, cache: PagedKVCache, total_length: int | None = None) -> None:
        check_causal_lm(hf_model)
        check_packable(hf_model)
        config = hf_model.config.get_text_config(decoder=True)
        self.hf_model = hf_model
        self.cache = cache
        self.num_layers: int = config.num_hidden_layers
        self.vocab_size: int = config.vocab_size
        self.max_length = context_length(hf_model.config)
        self.dtype: torch.dtype = hf_model.dtype
        self.device: torch.device = hf_model.device
        self.tokens_processed = 0
        self._keeps_rows = "logits_to_keep" in inspect.signature(hf_model.forward).parameters
        self._check_cache()
        self._pin: RopePin | None = None
        self.total_length = total_length
        if _accepted.get(hf_model) != (self.dtype, self.device):
            self._probe()
            _accepted[hf_model] = (self.dtype, self.device)

    @property
    def total_length(self) -> int | None:
        """Tokens of the longest sequence to come; a length-dependent rotary needs it."""
        return self._pin.total_length if self._pin is not None else None

    @total_length.setter
    def total_length(self, value: int | None) -> None:
        capacity = self.cache.num_pages * self.cache.page_size
        length = min(capacity, self.max_length or capacity) if value is None else value
        self._pin = RopePin(self.hf_model, length) if depends_on_length(self.hf_model) else None

    @property
    def free_tokens(self) -> int:
        """Tokens that surely fit the free pages, if they all go to one sequence."""
        return self.cache.free_pages * self.cache.page_size

    def new_sequence(self) -> Any:
        """An empty sequence of this model's cache."""
        return self.cache.new_sequence()

    @torch.no_grad()
    def forward(self, work: Sequence[Work]) -> list[Tensor]:
        """Appends each item's tokens to its sequence, all in one forward of the model.

        Returns:
            For each item its last `logits` rows, [item.logits, vocab], in the model's dtype.

        Raises:
            ValueError, IndexError, ContextTooLong: as `check_work`.
            CacheFull: the tokens do not fit.
            StaleSequenceError: a sequence was released or belongs to another cache.

        On any exception every sequence is as it was before.
        """
        check_work(work, self.vocab_size, self.max_length)
        batch = self.cache.reserve([(item.sequence, len(item.tokens)) for item in work])
        try:
            logits = self._run(work, batch)
        except BaseException:
            batch.cancel()
            raise
        self.tokens_processed += sum(len(item.tokens) for item in work)
        return logits

    def _run(self, work: Sequence[Work], batch: Any) -> list[Tensor]:
        tokens: list[int] = []
        rows: list[int] = []
        for item in work:
            tokens += item.tokens
            rows += range(len(tokens) - item.logits, len(tokens))
        if not tokens:
            none = torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device)
            return [none for _ in work]
        kept = torch.tensor(rows, dtype=torch.long, device=self.device)
        options = {"logits_to_keep": kept} if self._keeps_rows else {}
        step = Step(self.cache, batch)
        with borrowed(self.hf_model, implementation=IMPLEMENTATION, pin=self._pin), step.running():
            output = self.hf_model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=batch.position_ids.to(self.device).unsqueeze(0),
                use_cache=False,
                **options,
            )
        if len(step.layers_seen) != self.num_layers:
            raise ModelNotSupported(
                f"{len(step.layers_seen)} of {self.num_layers} layers attend through transformers' "
                "AttentionInterface; the others keep a state of their own"
            )
        logits = output.logits[0] if self._keeps_rows else output.logits[0, kept]
        return list(logits.split([item.logits for item in work]))

    def _check_cache(self) -> None:
        cache = self.cache
        if cache.num_layers != self.num_layers:
            raise ValueError(
                f"cache has {cache.num_layers} layers, the model {self.num_layers}; "
                "make it with PagedKVCache.for_model"
            )
        if cache.dtype != self.dtype:
            raise ValueError(f"cache is {cache.dtype}, the model {self.dtype}; they must agree")
        # "cuda" and "cuda:0" are one device.
        places = [(d.type, d.index or 0) for d in (torch.device(cache.device), self.device)]
        if places[0] != places[1]:
            raise ValueError(
                f"cache is on {cache.device}, the model on {self.device}; they must agree"
            )

    def _probe(self) -> None:
        """Runs the parity check in a cache of its own: a refused model leaves nothing behind."""
        page_size = self.cache.page_size
        pages = 2 * (probe_length(self.hf_model.config) // page_size + 2)
        own, self.cache = (
            self.cache,
            PagedKVCache(
                num_layers=self.num_layers,
                num_pages=pages,
                page_size=page_size,
                dtype=self.dtype,
                device=self.cache.device,
            ),
        )
        try:
            parity_check(self, self.hf_model, self._pin)
        finally:
            self.cache = own
            self.tokens_processed = 0


def open_model(
    hf_model: Any,
    num_tokens: int | None = None,
    total_length: int | None = None,
    fallback: str = "auto",
) -> PagedModel | FallbackModel:
    """Wraps a Hugging Face causal LM in the fastest path that runs it right.

    Args:
        hf_model: a decoder-only model of transformers, in eval mode.
        num_tokens: size of the cache in tokens. Default: the model's context, at most 32,768, and
            some more for branches.
        total_length: tokens of the longest sequence to come; see `PagedModel`.
        fallback: "auto" turns to the model's own cache where the packed path refuses and says so
            once, by a `SlowPathWarning`; "never" raises instead; "always" does not try the packed
            path.

    Raises:
        ModelNotSupported: no allowed path runs the model right; the text says why.
        ValueError: `fallback` is none of the three.
    """
    if fallback not in _FALLBACK_CHOICES:
        raise ValueError(f"fallback is {fallback!r}; allowed are {', '.join(_FALLBACK_CHOICES)}")
    check_causal_lm(hf_model)
    if fallback == "always":
        return FallbackModel(hf_model, total_length=total_length)
    try:
        check_packable(hf_model)
        if num_tokens is None:
            context = context_length(hf_model.config) or _DEFAULT_CONTEXT
            num_tokens = min(context, _DEFAULT_CONTEXT) + _ROOM_FOR_BRANCHES
        cache = PagedKVCache.for_model(hf_model, num_tokens=num_tokens)
        return PagedModel(hf_model, cache, total_length)
    except ModelNotSupported as refusal:
        if fallback == "never":
            raise
        reason = str(refusal)
    model = FallbackModel(hf_model, reason, total_length)
    warnings.warn(
        f"running on the slow path, over the model's own cache: {reason}",
        SlowPathWarning,
        stacklevel=2,
    )
    return model
