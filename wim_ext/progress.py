"""The line that shows how far a run is: a bar in work, the phase, tokens a second, the time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wim_ext.events import (
    AnswerToken,
    Event,
    MarginWritten,
    Progress,
    ReadingStarted,
    SegmentRead,
)

__all__ = ["ProgressLine"]

# The rate is that of the last seconds: the speed falls as the document gets longer.
_RATE_WINDOW_S = 4.0


class ProgressLine:
    """Follows the events of a run and renders as one line, whatever the width.

    The bar counts work, not tokens: the later tokens of a document cost more than the first.
    """

    def __init__(
        self, stop_asked: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stop_asked = stop_asked
        self._clock = clock
        self._started = clock()
        self._segments = 0
        self._work = 0.0
        self._tokens = 0
        self._samples: deque[tuple[float, int]] = deque()
        self.phase = "starting"

    def update(self, event: Event) -> None:
        if isinstance(event, ReadingStarted):
            self._started = self._clock()
            self._segments = event.segments
            self._samples.append((self._started, 0))
            self.phase = f"reading segment 1 of {event.segments}"
        elif isinstance(event, Progress):
            self._work = event.work_done
            self._advance(event.tokens)
        elif isinstance(event, SegmentRead):
            self._work = event.work_done
            self.phase = f"margin for segment {event.index + 1} of {self._segments}"
        elif isinstance(event, MarginWritten):
            self._work = event.work_done
            following = event.margin.segment + 2
            more = following <= self._segments
            self.phase = f"reading segment {following} of {self._segments}" if more else "answering"
        elif isinstance(event, AnswerToken):
            self.phase = "answering"

    def _advance(self, tokens: int) -> None:
        now = self._clock()
        self._tokens = tokens
        self._samples.append((now, tokens))
        while len(self._samples) > 2 and now - self._samples[1][0] > _RATE_WINDOW_S:
            self._samples.popleft()

    @property
    def tokens_per_second(self) -> float | None:
        """Document tokens a second over the last seconds; None before there are two readings."""
        if len(self._samples) < 2:
            return None
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        return (last - first) / (end - begin) if end > begin else None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        stopping = self._stop_asked()
        phase = "stopping, answering from what was read (Ctrl-C again quits)"
        text = Text(phase if stopping else self.phase, style="yellow" if stopping else "")
        rate = self.tokens_per_second
        if rate is not None and options.max_width >= 60 and not stopping:
            text.append(f" · {rate:,.0f} tokens/s", style="dim")
        seconds = int(self._clock() - self._started)
        text.append(f" · {seconds // 60}:{seconds % 60:02}", style="dim")
        line = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [f"{self._work:4.0%}", text]
        if options.max_width >= 40:
            bar = ProgressBar(total=1.0, completed=self._work, width=options.max_width // 4)
            line.add_column(no_wrap=True)
            cells.insert(0, bar)
        line.add_column(no_wrap=True, min_width=4)
        line.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        line.add_row(*cells)
        yield line
