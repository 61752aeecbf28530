"""A stand-in for WritingInTheMargins: yields the events of a run without any model.

The answer quotes what was read, so that tests see the effect of stopping early. Words count as
tokens. Hooks let a test act in the middle of a run.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

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
    Stats,
)
from wim_ext.segments import Context


@dataclass
class FakeEngine:
    """Reads `segment_words` words at a time; a segment is relevant if it holds a question word."""

    segment_words: int = 10
    delay: float = 0.0
    answer_prefix: str = ""
    fail: Exception | None = None
    closed: bool = False
    on_event: Callable[[Event], None] = lambda event: None
    asked: list[tuple[str, str]] = field(default_factory=list)

    def stream(
        self,
        context: Context | str,
        question: str,
        should_stop: Callable[[], bool] | None = None,
    ) -> Iterator[Event]:
        text = Context.of(context).text
        self.asked.append((text, question))
        try:
            for event in self._events(text, question, should_stop or (lambda: False)):
                self.on_event(event)
                yield event
        finally:
            self.closed = True

    def _events(self, context: str, question: str, stop: Callable[[], bool]) -> Iterator[Event]:
        if self.fail is not None:
            raise self.fail
        words = list(re.finditer(r"\S+", context))
        groups = [
            words[i : i + self.segment_words] for i in range(0, len(words), self.segment_words)
        ]
        stats, margins = Stats(segments=len(groups)), []
        yield ReadingStarted(len(words), len(groups), float(len(words)))
        wanted = {w.lower().strip("?") for w in question.split() if len(w) > 3}
        begin, tokens = 0, 0
        for index, group in enumerate(groups):
            if stop() and index:
                break
            end = len(context) if index == len(groups) - 1 else groups[index + 1][0].start()
            tokens += len(group)
            work = tokens / len(words)
            time.sleep(self.delay)
            yield Progress(work * 0.99, tokens)
            yield SegmentRead(index, (begin, end), len(group), work * 0.99)
            found = [w.group() for w in group if w.group().lower().strip(".,") in wanted]
            text = f"Speaks of {' '.join(found)}: {context[begin:end].strip()}" if found else ""
            score = 0.9 if found else None
            margins.append(Margin(text, bool(found), score, index, (begin, end), 3))
            stats.tokens["document"] += len(group)
            stats.tokens["margins"] += 3
            stats.segments_read += 1
            time.sleep(self.delay)
            yield MarginWritten(margins[-1], work)
            begin = end
        answer = f"{self.answer_prefix}Read {stats.segments_read} of {len(groups)} segments."
        for piece in re.findall(r"\S+\s*", answer):
            time.sleep(self.delay)
            stats.tokens["answer"] += 1
            yield AnswerToken(piece)
        stats.seconds.update(document=1.0, answer=0.5)
        early = stats.segments_read < len(groups)
        yield Finished(Result(answer, margins, stats, "end", early))


def main() -> None:
    """The real command, with this engine under it; FAKE_DELAY is the seconds a step takes."""
    from wim_ext import answering, cli

    delay = float(os.environ.get("FAKE_DELAY", "0"))
    answering.open_engine = lambda request, note: FakeEngine(delay=delay)  # type: ignore[assignment]
    cli.main()


if __name__ == "__main__":
    main()
