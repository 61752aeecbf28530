"""What a run reports: the events of a stream, the margins, the counters and the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = [
    "PHASES",
    "AnswerToken",
    "Event",
    "Finished",
    "Margin",
    "MarginWritten",
    "Progress",
    "ReadingStarted",
    "Result",
    "SegmentRead",
    "Stats",
]

# In the order in which a run goes through them. Every token that enters the model belongs to one.
PHASES = (
    "document",
    "extraction_prompts",
    "margins",
    "classification",
    "final_prompt",
    "answer",
)


@dataclass(frozen=True)
class Margin:
    """A note on one segment.

    Attributes:
        text: the note, without its verdict; may be empty when it is not relevant.
        relevant: whether the final prompt shows it.
        score: how sure the verdict is, 0 to 1; None where the relevance mode has no number.
        segment: index of the segment, from 0.
        span: characters of the document that the segment covers, [begin, end).
        tokens: how many tokens were generated for it, its verdict and its stop token included.
    """

    text: str
    relevant: bool
    score: float | None
    segment: int
    span: tuple[int, int]
    tokens: int = 0


@dataclass
class Stats:
    """Tokens that went through the model and seconds, by phase (the names in `PHASES`).

    The token counts add up to the growth of `model.tokens_processed`, exactly: a token that was
    read once is never read again. A generated token counts when it is fed back, so the last one
    of a margin or an answer, which nothing follows, counts nowhere.
    """

    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    forwards: int = 0
    segments: int = 0
    segments_read: int = 0
    generated_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return sum(self.tokens.values())

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Result:
    """The answer to one question.

    Attributes:
        answer: the text.
        margins: one for every segment that was read, in order, the dropped ones too.
        stats: this question's counters; the document's tokens are in the run that read it.
        stop_reason: why the answer ended: "end" (an end-of-text token), "length", "stop_string".
        stopped_early: whether reading was stopped before the document's end.
    """

    answer: str
    margins: list[Margin]
    stats: Stats
    stop_reason: str = "end"
    stopped_early: bool = False

    @property
    def relevant_margins(self) -> list[Margin]:
        return [margin for margin in self.margins if margin.relevant]


@dataclass(frozen=True)
class ReadingStarted:
    """First event: how much there is to read; `work` is in the units of `Progress`."""

    tokens: int
    segments: int
    work: float


@dataclass(frozen=True)
class Progress:
    """After each forward of the reading phase.

    `work_done` is 0 to 1 in *work*, not in tokens: reading token n costs a fixed part plus a part
    that grows with n, so the last tenth of a long document takes longer than its first.
    `tokens` of the document were read so far.
    """

    work_done: float
    tokens: int


@dataclass(frozen=True)
class SegmentRead:
    """A segment is in the trunk. `span` in characters of the document, [begin, end)."""

    index: int
    span: tuple[int, int]
    tokens: int
    work_done: float


@dataclass(frozen=True)
class MarginWritten:
    """A margin is finished and judged."""

    margin: Margin
    work_done: float


@dataclass(frozen=True)
class AnswerToken:
    """The next piece of the answer. Always whole characters; the pieces add up to the answer."""

    text: str


@dataclass(frozen=True)
class Finished:
    """Last event."""

    result: Result


Event: TypeAlias = ReadingStarted | Progress | SegmentRead | MarginWritten | AnswerToken | Finished
