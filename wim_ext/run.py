"""The method: one question, one document (Algorithm 2 of Russak et al., 2024, on forks).

The text that the model sees, with what the chat template adds in angle brackets:

    <opening> intro, segment 1, ..., segment k      the trunk; nothing is ever taken out of it
              + extraction prompt <reply> margin    on a fork at the end of each segment
              + kept margins, question <reply>      on a fork at the end: the answer

A fork shares the trunk's pages and is released when its text is written, so no token is read twice
and the trunk is what it would be without forks.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar, cast

from wim_ext.document import Document
from wim_ext.effort import Effort, Meter
from wim_ext.engine import Task, released
from wim_ext.events import (
    AnswerToken,
    Event,
    Finished,
    Margin,
    MarginWritten,
    Progress,
    ReadingStarted,
    Result,
    SegmentRead,
)
from wim_ext.generation import Generation
from wim_ext.prompts import fill
from wim_ext.relevance import Mode, Place
from wim_ext.room import clipped, final_template
from wim_ext.segments import Segment
from wim_ext.session import Session

__all__ = ["Run", "read_all"]

Value = TypeVar("Value")

_ANSWERING = ("final_prompt", "answer")
# Above the index of any segment: the answer draws from a random stream of its own.
_ANSWER_STREAM = 1_000_002


def read_all(session: Session, document: Document, effort: Effort) -> Generator[Event, None, None]:
    """Reads a document without asking anything."""
    run = Run(session, document, None, effort)
    yield run.started()
    for segment in document.segments:
        yield from run.read(segment, lambda: False)


class Run:
    """One question on its way. Without a `mode` no margins are written."""

    def __init__(
        self,
        session: Session,
        document: Document,
        mode: Mode | None,
        effort: Effort,
        use: str = "context",
    ) -> None:
        self._session = session
        self._document = document
        self._mode = mode
        self._effort = effort
        self._use = use
        self._first_unread = document.segments_read
        self._shown = ""
        planned = sum(self._to_read(s) + self._to_write(s) for s in document.segments)
        self._meter = Meter(planned)

    def events(self, stops: Callable[[], bool]) -> Generator[Event, None, None]:
        """Reads, writes margins, answers. `stops` is asked after every forward until the answer."""
        document, stats = self._document, self._session.stats
        margins: list[Margin] = []
        yield self.started()
        for segment in document.segments:
            if segment.index >= document.segments_read:
                yield from self.read(segment, stops)
            if segment.index < document.segments_read and self._mode is not None:
                margins += yield from self._margin(segment, self._mode, stops)
            if self._stopped(stops):
                break
        answer = yield from self._answer(margins)
        stats.segments, stats.segments_read = len(document.segments), document.segments_read
        noted = len(margins) if self._mode is not None else document.segments_read
        result = Result(
            answer=self._shown,
            margins=margins,
            stats=stats,
            stop_reason=answer.stop_reason,
            stopped_early=noted < len(document.segments),
        )
        yield Finished(result)

    def started(self) -> ReadingStarted:
        document = self._document
        return ReadingStarted(document.num_tokens, len(document.segments), self._meter.total)

    def read(self, segment: Segment, stops: Callable[[], bool]) -> Generator[Event, None, None]:
        """Puts a segment into the trunk."""
        steps = self._document.read_segment(self._session)
        yield from self._watched(steps, stops, self._to_read(segment))
        if segment.index < self._document.segments_read:
            yield SegmentRead(segment.index, segment.span, segment.num_tokens, self._meter.part)

    def _margin(
        self, segment: Segment, mode: Mode, stops: Callable[[], bool]
    ) -> Generator[Event, None, list[Margin]]:
        """Writes one margin on a fork; none if a stop comes in between."""
        document = self._document
        with released(document.fork(document.end_of(segment))) as branch:
            text = document.text_of(segment)
            place = Place(branch, document.fork, segment.index, text, document.begin)
            steps = mode.write(self._session, place)
            draft = yield from self._watched(steps, stops, self._to_write(segment))
        if draft is None:
            return []
        text = clipped(self._session, draft.text)
        margin = Margin(
            text, draft.relevant, draft.score, segment.index, segment.span, draft.tokens
        )
        yield MarginWritten(margin, self._meter.part)
        return [margin]

    def _answer(self, margins: list[Margin]) -> Generator[Event, None, Generation]:
        """Answers on a fork at the end of what was read, with the margins that are relevant."""
        session, document, prompts = self._session, self._document, self._session.prompts
        kept = [margin.text for margin in margins if margin.relevant]
        notes = "".join(fill(prompts.margin, margin=text) for text in kept)
        template = final_template(session, self._use, bool(kept))
        text = fill(template, question=session.question, margins=notes or prompts.no_margins)
        # Without the document the question goes right behind the opening.
        start = document.opening if self._use == "margins" else None
        limit = session.writer.max_answer_tokens
        with released(document.fork(start)) as branch:
            steps = session.reply(branch, text, _ANSWERING, limit, _ANSWER_STREAM)
            return (yield from self._told(steps))

    def _told(self, steps: Generator[Task, None, Generation]) -> Generator[Event, None, Generation]:
        """Events for the pieces of the answer; white space before it is dropped."""
        while True:
            try:
                generation = next(steps).generation
            except StopIteration as done:
                return cast("Generation", done.value)
            piece = generation.take() if generation is not None else ""
            piece = piece if self._shown else piece.lstrip()
            if piece:
                self._shown += piece
                yield AnswerToken(piece)

    def _watched(
        self, steps: Generator[Task, None, Value], stops: Callable[[], bool], planned: float
    ) -> Generator[Event, None, Value | None]:
        """Takes steps, with a Progress event after each; gives them up (None) at a stop."""
        while True:
            try:
                task = next(steps)
            except StopIteration as done:
                self._meter.reach(planned)
                return cast("Value", done.value)
            self._meter.add(self._effort.of_step(task), planned)
            yield Progress(self._meter.part, self._document.tokens_read)
            if self._stopped(stops) and not task.done:
                steps.close()
                return None

    def _stopped(self, stops: Callable[[], bool]) -> bool:
        # A first piece of the document is read in any case: there is something to answer from.
        return stops() and self._document.tokens_read > 0

    def _to_read(self, segment: Segment) -> float:
        if segment.index < self._first_unread:
            return 0.0
        end = self._document.end_of(segment)
        begin = end - segment.num_tokens if segment.index else self._document.tokens_in_trunk
        return self._effort.reading(begin, end)

    def _to_write(self, segment: Segment) -> float:
        """The work of a margin of full length."""
        if self._mode is None:
            return 0.0
        begin = self._document.end_of(segment)
        written = begin + self._mode.prompt_tokens(self._session)
        generating = self._effort.generating(written, self._session.writer.max_margin_tokens)
        return self._effort.reading(begin, written) + generating
