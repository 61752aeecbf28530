"""What a person sees while a document is read and its question answered.

The answer goes to standard output; progress, margins and numbers go to standard error, so that
``wim answer ... > answer.txt`` keeps the answer alone. On a terminal there is a live progress line
and colour (unless NO_COLOR is set); elsewhere plain lines, one a margin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from wim_ext.document_files import Sources
from wim_ext.events import (
    AnswerToken,
    Event,
    Finished,
    Margin,
    MarginWritten,
    ReadingStarted,
    Result,
)
from wim_ext.progress import ProgressLine
from wim_ext.terminal import WordWrap, clean, one_line

__all__ = [
    "Display",
    "LiveDisplay",
    "PlainDisplay",
    "QuietDisplay",
    "choose_display",
    "count",
    "numbers",
]

# How much of a dropped margin is shown.
_DROPPED_LENGTH = 60


class Display(Protocol):
    """Shows the events of one run. Entered for its duration: leaving restores the terminal."""

    def __enter__(self) -> Display: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def note(self, text: str) -> None:
        """A line about the run itself: the model is being loaded, a fallback was taken."""

    def show(self, event: Event) -> None: ...


class QuietDisplay:
    """Only the answer, on `out`, as it is generated."""

    def __init__(self, out: TextIO, width: int | None = None) -> None:
        self._out = out
        self._wrap = WordWrap(width) if width else None
        self._answered = False

    def __enter__(self) -> QuietDisplay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._answered:
            self._end_answer()

    def note(self, text: str) -> None:
        pass

    def show(self, event: Event) -> None:
        if isinstance(event, AnswerToken):
            self._answered = True
            piece = clean(event.text)
            self._out.write(self._wrap.feed(piece) if self._wrap else piece)
            self._out.flush()
        elif isinstance(event, Finished):
            self._end_answer()

    def _end_answer(self) -> None:
        self._out.write((self._wrap.finish() if self._wrap else "") + "\n")
        self._out.flush()
        self._answered = False


class PlainDisplay(QuietDisplay):
    """The answer on `out`; one line a margin and one of numbers on `err`, without colour."""

    def __init__(
        self, out: TextIO, err: TextIO, sources: Sources, stop_asked: Callable[[], bool]
    ) -> None:
        super().__init__(out)
        self._err = err
        self._sources = sources
        self._stop_asked = stop_asked
        self._stop_told = False

    def note(self, text: str) -> None:
        self._line(one_line(text))

    def show(self, event: Event) -> None:
        if self._stop_asked() and not self._stop_told:
            self._stop_told = True
            self._line("stopping: answering from what was read so far")
        if isinstance(event, ReadingStarted):
            self._line(reading_text(event, self._sources))
        elif isinstance(event, MarginWritten):
            margin = event.margin
            text = one_line(margin.text)
            mark, text = ("+", text) if margin.relevant else ("-", dropped_text(text))
            self._line(f"{mark} {place_of(margin.span, margin.segment, self._sources)}: {text}")
        super().show(event)
        if isinstance(event, Finished):
            self._line(numbers(event.result))

    def _line(self, text: str) -> None:
        self._err.write(text + "\n")
        self._err.flush()


class LiveDisplay(QuietDisplay):
    """A terminal: margins scroll by above a progress line, then the answer is written below them.

    `shared` says that `out` is the same terminal as the console's. Then the progress line must be
    gone before the first word of the answer; otherwise it stays and counts the answer's pieces.
    """

    def __init__(
        self,
        out: TextIO,
        console: Console,
        sources: Sources,
        stop_asked: Callable[[], bool],
        shared: bool = True,
    ) -> None:
        super().__init__(out, console.width if shared else None)
        self._console = console
        self._sources = sources
        self._shared = shared
        self._progress = ProgressLine(stop_asked)
        self._dropped: list[Margin] = []
        self._live = Live(
            console=console,
            get_renderable=self._footer,
            refresh_per_second=8,
            transient=True,
            redirect_stdout=False,
        )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()
        super().__exit__(kind, error, traceback)

    def note(self, text: str) -> None:
        self._console.print(Text(one_line(text), style="dim"))

    def show(self, event: Event) -> None:
        if not (self._shared and isinstance(event, AnswerToken)):
            self._progress.update(event)
        if isinstance(event, ReadingStarted):
            self._console.print(Text(reading_text(event, self._sources), style="bold"))
            self._live.start(refresh=True)
        elif isinstance(event, MarginWritten) and event.margin.relevant:
            self._print_dropped()
            self._print_margin(event.margin)
        elif isinstance(event, MarginWritten):
            self._dropped.append(event.margin)
        elif isinstance(event, AnswerToken) and self._shared and not self._answered:
            self._print_dropped()
            self._live.stop()
            self._console.print(Text("\nAnswer", style="bold"))
        elif isinstance(event, Finished):
            self._print_dropped()
            self._live.stop()
        super().show(event)
        if isinstance(event, Finished):
            self._console.print(Text("\n" + numbers(event.result), style="dim"))

    def _footer(self) -> Group:
        """What stays below the margins while they come: the latest dropped ones, the progress."""
        dropped = list(self._dropped)  # rendered in rich's thread
        return Group(*([self._dropped_line(dropped)] if dropped else []), self._progress)

    def _print_dropped(self) -> None:
        if self._dropped:
            self._console.print(self._dropped_line(self._dropped))
            self._dropped = []

    def _dropped_line(self, margins: Sequence[Margin]) -> Text:
        """One dim line for dropped margins that follow each other, so that they crowd nothing."""
        first, last = margins[0], margins[-1]
        place = place_of((first.span[0], last.span[1]), first.segment, self._sources)
        if len(margins) == 1:
            text = dropped_text(one_line(first.text))
        else:
            text = f"nothing relevant in {len(margins)} segments"
        line = Text(f"· {place}: {text}", style="dim", no_wrap=True)
        line.truncate(self._console.width, overflow="ellipsis")
        return line

    def _print_margin(self, margin: Margin) -> None:
        place = place_of(margin.span, margin.segment, self._sources)
        text = one_line(margin.text)
        bar = ("┃ ", "bold green")
        self._console.print(Text.assemble(bar, (place, "green"), no_wrap=True, overflow="ellipsis"))
        # Wrapped here and not by rich, so that the bar stands before every line.
        for line in Text(text).wrap(self._console, max(self._console.width - 2, 10)):
            self._console.print(Text.assemble(bar, line))


def choose_display(
    out: TextIO, err: TextIO, sources: Sources, stop_asked: Callable[[], bool], quiet: bool
) -> Display:
    """The display that fits the streams: quiet if asked, live on a terminal, else plain lines."""
    if quiet:
        return QuietDisplay(out)
    console = Console(file=err, highlight=False, markup=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        return PlainDisplay(out, err, sources, stop_asked)
    return LiveDisplay(out, console, sources, stop_asked, shared=out.isatty())


def reading_text(event: ReadingStarted, sources: Sources) -> str:
    """What is about to be read, in one line."""
    names = [one_line(file.name) for file in sources.files]
    shown = names[0] if len(names) == 1 else f"{len(names)} documents"
    return f"Reading {shown}: {event.tokens:,} tokens in {count(event.segments, 'segment')}"


def place_of(span: tuple[int, int], segment: int, sources: Sources) -> str:
    """Where a margin's segment lies, and how far that is into all that is read.

    As in ``notes.md, lines 1–80 (14%)`` or ``a.md, line 70 – b.pdf, page 2 (60%)``.
    """
    citations = sources.cite(span)
    if not citations:
        return f"segment {segment + 1}"
    first, last = citations[0], citations[-1]
    place = str(first)
    if len(citations) > 1:
        place = f"{first.name}, {first.unit} {first.first} – {last.name}, {last.unit} {last.last}"
    return f"{one_line(place)} ({round(100 * span[1] / len(sources.text))}%)"


def dropped_text(text: str) -> str:
    """What a dropped margin shows: that it was dropped, and how it began."""
    if not text:
        return "nothing relevant"
    short = text if len(text) <= _DROPPED_LENGTH else text[: _DROPPED_LENGTH - 1].rstrip() + "…"
    return f"not relevant: {short}"


def numbers(result: Result) -> str:
    """The run in one line: margins, seconds, rate, and the tokens by phase."""
    stats = result.stats
    kept = f"{len(result.relevant_margins)} of {count(len(result.margins), 'margin')} relevant"
    if result.stopped_early:
        kept += f", {stats.segments_read} of {count(stats.segments, 'segment')} read"
    seconds = stats.total_seconds
    rate = f" · {stats.total_tokens / seconds:,.0f} tokens/s" if seconds > 0 else ""
    phases = ", ".join(
        f"{phase.replace('_', ' ')} {tokens:,}" for phase, tokens in stats.tokens.items() if tokens
    )
    total = f"{stats.total_tokens:,} tokens, none read twice"
    return f"{kept} · {seconds:.1f} s{rate} · {total} ({phases})"


def count(number: int, noun: str) -> str:
    """A number and its noun, in the plural where it is one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
