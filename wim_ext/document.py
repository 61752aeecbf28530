"""A document in the cache: read once, asked any number of times."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import Any, Protocol

from wim_ext.engine import Task
from wim_ext.events import Result, Stats
from wim_ext.segments import Context, Segment, segment_tokens
from wim_ext.session import Session, Writer
from wim_ext.streaming import Stream

__all__ = ["Asker", "Document"]


class Asker(Protocol):
    """Who answers questions on a document (`margins.WritingInTheMargins`)."""

    def stream_on(
        self,
        document: Document,
        question: str,
        use: str | None,
        should_stop: Callable[[], bool] | None,
    ) -> Stream: ...


class Document:
    """The trunk: opening, introduction and the document's tokens, read segment by segment.

    Nothing but the document is ever appended to the trunk. Margins and answers are written on
    forks of it, so after any number of questions it is what it would be after none.

    Made by `WritingInTheMargins.read`. Usable in a with statement; `release` gives its pages back.

    Attributes:
        context: the text, and which document each part of it comes from.
        segments: the parts that get a margin each; segments[i].span in characters.
        stats: what reading it took, if it was read by `WritingInTheMargins.read`.
    """

    def __init__(self, context: Context, writer: Writer, asker: Asker, segment_size: int) -> None:
        self.context = context
        encoded = writer.codec.encode_with_offsets(context.text)
        if not encoded.ids:
            raise ValueError("the document is empty: there is nothing to read")
        self.segments = segment_tokens(context.text, encoded, segment_size, context.breaks)
        self._tokens = encoded.ids
        self._writer = writer
        self._asker = asker
        intro = writer.codec.encode("".join(map(str, writer.prompts.intro)))
        self._before = writer.layout.opening + intro
        self._trunk = writer.new_trunk()
        self._read = 0  # segments in the trunk
        self.stats = Stats()
        # A recurrent model's trunk cannot be forked in its past: forks are kept as it passes.
        self._keeps_marks = not getattr(writer.engine.model, "can_roll_back", True)
        self._marks: dict[int, Any] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of the document alone."""
        return len(self._tokens)

    @property
    def trunk_tokens(self) -> int:
        """Tokens of the trunk when everything is read: the document and what stands before it."""
        return len(self._before) + len(self._tokens)

    @property
    def tokens_read(self) -> int:
        """Tokens of the document that are in the trunk now."""
        return max(0, self.tokens_in_trunk - len(self._before))

    @property
    def tokens_in_trunk(self) -> int:
        """Tokens that the trunk holds now, opening and introduction included."""
        return int(self._trunk.length)

    @property
    def segments_read(self) -> int:
        return self._read

    @property
    def opening(self) -> int:
        """Tokens of the trunk before the introduction: the beginning of any conversation."""
        return len(self._writer.layout.opening)

    @property
    def begin(self) -> int:
        """Where the document begins in the trunk."""
        return len(self._before)

    def end_of(self, segment: Segment) -> int:
        """Where a segment ends in the trunk: the n of `fork(n)` for its margin."""
        return len(self._before) + segment.end

    def text_of(self, segment: Segment) -> str:
        return self.context.text[segment.span[0] : segment.span[1]]

    def read_segment(self, session: Session) -> Generator[Task, None, None]:
        """Feeds the next segment to the trunk; yields after every forward.

        Given up in the middle, the trunk holds a part of the segment, and `segments_read` stays.
        """
        segment = self.segments[self._read]
        tokens = self._tokens[segment.begin : segment.end]
        if not self._trunk.length:
            tokens = self._before + tokens
        for end in (self.opening, len(self._before)):
            if self._keeps_marks and self._trunk.length < end:
                start = int(self._trunk.length)
                yield from session.read(self._trunk, self._before[start:end], "document")
                tokens = tokens[end - start :]
                self._mark()
        yield from session.read(self._trunk, tokens, "document")
        self._mark()
        self._read += 1

    def _mark(self) -> None:
        if self._keeps_marks and self._trunk.length not in self._marks:
            self._marks[self._trunk.length] = self._trunk.fork()

    def fork(self, length: int | None = None) -> Any:
        """The trunk's first `length` tokens (default: all) as a sequence of its own."""
        if length in self._marks:
            return self._marks[length].fork()
        return self._trunk.fork(length)

    def ask(self, question: str, *, use: str | None = None) -> Result:
        """Answers a question; `use` overrides what the answer sees.

        Raises as `WritingInTheMargins.answer`, and StaleSequenceError after `release`.
        """
        return self.stream(question, use=use).result()

    def stream(
        self,
        question: str,
        should_stop: Callable[[], bool] | None = None,
        *,
        use: str | None = None,
    ) -> Stream:
        """As `ask`, as events: margins, the answer's pieces, the result."""
        return self._asker.stream_on(self, question, use, should_stop)

    def release(self) -> None:
        """Gives the pages back. Idempotent."""
        self._trunk.release()
        for mark in self._marks.values():
            mark.release()
        self._marks.clear()

    def __enter__(self) -> Document:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)
