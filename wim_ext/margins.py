"""Writing in the Margins (Russak et al., 2024, arXiv 2408.14906): answers from long documents.

The class here checks arguments and owns what all questions share; `run` is the method itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from wim_ext.document import Document
from wim_ext.effort import Effort
from wim_ext.engine import Engine
from wim_ext.events import Event, Margin, Result, Stats
from wim_ext.loading import load
from wim_ext.model import open_model
from wim_ext.prompts import Layout, Prompts
from wim_ext.relevance import Judge, mode_named, suited_mode
from wim_ext.room import check_room
from wim_ext.run import Run, read_all
from wim_ext.sampling import Sampling
from wim_ext.segments import Context
from wim_ext.session import Session, Writer
from wim_ext.stopping import stop_ids
from wim_ext.streaming import Stream
from wim_ext.tokens import TextCodec

__all__ = [
    "SCHEDULES",
    "USES",
    "Document",
    "Margin",
    "Result",
    "Sampling",
    "Stats",
    "WritingInTheMargins",
]

USES = ("context+margins", "margins", "context")
SCHEDULES = ("rollback",)

AnyContext: TypeAlias = "str | Context | Sequence[tuple[str, str]]"


class WritingInTheMargins:
    """Answers questions about long documents, with margins.

    Args:
        model: a Hugging Face causal LM, a `PagedModel` or a `FallbackModel`.
        tokenizer: its tokenizer, a fast one. Its chat template is used if it has one.
        segment_tokens: most tokens of the document between two margins. Default: 1,024, and 400
            where `relevance` is "likelihood": a small model speaks of what it read last.
        max_margin_tokens, max_answer_tokens: most tokens generated for each.
        relevance: how margins are judged: "auto" (by the model's size), "fused", "separate",
            "logit", "likelihood" or a callable (margin, question[, segment text]) -> bool or score;
            see `wim_ext.relevance`.
        use: what the answer sees: "context+margins", "margins" or "context" (then no margins are
            written).
        schedule: "rollback": one margin at a time, right after its segment.
        prefill_chunk: most tokens in one forward.
        sampling: how tokens are chosen; greedy by default.
        prompts: the wording.

    Raises:
        ValueError: an argument is outside its range, or the chat template cannot be used.
        ModelNotSupported: the model cannot run; the text says why.

    Example:
        >>> wim = WritingInTheMargins.load()
        >>> result = wim.answer(open("long.txt").read(), "Who signed the treaty?")
        >>> print(result.answer, [margin.text for margin in result.relevant_margins])
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        segment_tokens: int | None = None,
        max_margin_tokens: int = 64,
        max_answer_tokens: int = 256,
        relevance: str | Judge = "auto",
        use: str = "context+margins",
        schedule: str = "rollback",
        prefill_chunk: int = 256,
        sampling: Sampling | None = None,
        prompts: Prompts | None = None,
    ) -> None:
        if segment_tokens is not None:
            _at_least_one("segment_tokens", segment_tokens)
        _at_least_one("max_margin_tokens", max_margin_tokens)
        _at_least_one("max_answer_tokens", max_answer_tokens)
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
        self.use = _checked_use(use)
        if relevance != "auto":
            mode_named(relevance)  # a wrong name is told before the model is probed
        prompts = prompts or Prompts()
        codec = TextCodec(tokenizer)
        layout = Layout.of(codec, prompts)
        self.model = model if hasattr(model, "tokens_processed") else open_model(model)
        self.relevance = suited_mode(self.model) if relevance == "auto" else relevance
        self._new_mode = mode_named(self.relevance)
        self.segment_tokens = segment_tokens or (400 if self.relevance == "likelihood" else 1024)
        self.tokenizer = tokenizer
        self._effort = Effort(self.model)
        self._writer = Writer(
            engine=Engine(self.model, prefill_chunk),
            codec=codec,
            layout=layout,
            prompts=prompts,
            sampling=sampling or Sampling(),
            stop_ids=stop_ids(self.model, codec, layout),
            max_margin_tokens=max_margin_tokens,
            max_answer_tokens=max_answer_tokens,
        )

    @classmethod
    def load(
        cls,
        name: str | os.PathLike[str] | None = None,
        dtype: str = "auto",
        device: str = "auto",
        **options: Any,
    ) -> WritingInTheMargins:
        """Loads a model by name (`wim_ext.loading.load`); options are those of the constructor."""
        loaded = load(name, dtype, device)
        return cls(loaded.model, loaded.tokenizer, **options)

    def answer(self, context: AnyContext, question: str) -> Result:
        """Reads the context, writes margins, answers.

        `context` is a text, (name, text) pairs, or a `Context`.

        Raises:
            ValueError: context or question is empty.
            ContextTooLong: document, margins and answer may not fit the model's context.
            CacheFull: they may not fit the cache. Both before any work is done.
        """
        return self.stream(context, question).result()

    def stream(
        self,
        context: AnyContext,
        question: str,
        should_stop: Callable[[], bool] | None = None,
    ) -> Stream:
        """As `answer`, as events while it happens.

        When `should_stop` returns true, or `stop()` of the stream was called, reading ends at the
        next forward and the answer is made from what was read. Raises as `answer`, at once.
        """
        document = self._document(context)
        try:
            return self._stream(document, question, None, should_stop, document.release)
        except BaseException:
            document.release()
            raise

    def read(
        self, context: AnyContext, on_event: Callable[[Event], object] | None = None
    ) -> Document:
        """Reads a context once, for any number of questions (`Document.ask`).

        `on_event` is called with the events of the reading. Raises as `answer`.
        """
        document = self._document(context)
        session = Session(self._writer, "", document.stats)
        try:
            check_room(session, document, None, "context")
            for event in read_all(session, document, self._effort):
                if on_event is not None:
                    on_event(event)
        except BaseException:
            document.release()
            raise
        return document

    def stream_on(
        self,
        document: Document,
        question: str,
        use: str | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Stream:
        """What `Document.stream` calls."""
        return self._stream(document, question, use, should_stop, lambda: None)

    def _document(self, context: AnyContext) -> Document:
        return Document(Context.of(context), self._writer, self, self.segment_tokens)

    def _stream(
        self,
        document: Document,
        question: str,
        use: str | None,
        should_stop: Callable[[], bool] | None,
        release: Callable[[], object],
    ) -> Stream:
        if not question.strip():
            raise ValueError("the question is empty")
        use = self.use if use is None else _checked_use(use)
        session = Session(self._writer, question)
        mode = self._new_mode(session) if use != "context" else None
        check_room(session, document, mode, use)
        run = Run(session, document, mode, self._effort, use)
        return Stream(run.events, should_stop, release)


def _checked_use(use: str) -> str:
    if use not in USES:
        raise ValueError(f"use must be one of {', '.join(USES)}, got {use!r}")
    return use


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be 1 or more, got {value}")
