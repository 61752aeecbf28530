"""Ctrl-C in two steps: the first asks the reading to stop, the second ends the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

__all__ = ["StopOnInterrupt"]


class StopOnInterrupt:
    """While entered, the first SIGINT sets `asked`; a second one raises KeyboardInterrupt.

    Once `closing` is set there is nothing left that could stop early, and the first SIGINT raises.
    SIGTERM raises SystemExit(143), so that the terminal is restored on the way out. Outside the
    main thread, where Python delivers no signals, entering changes nothing; a signal that the
    caller had ignored, as a shell does for background jobs, stays ignored.

    The handler only sets a flag: it may run in the middle of a write to the very stream that a
    message would have to go to.
    """

    def __init__(self) -> None:
        self.asked = False
        self.closing = False
        self._before: dict[signal.Signals, object] = {}

    def __call__(self) -> bool:
        """Whether to stop: the form that the engine asks for."""
        return self.asked

    def __enter__(self) -> StopOnInterrupt:
        if threading.current_thread() is threading.main_thread():
            self._handle(signal.SIGINT, self._interrupt)
            self._handle(signal.SIGTERM, self._terminate)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def _handle(
        self, number: signal.Signals, handler: Callable[[int, FrameType | None], None]
    ) -> None:
        if signal.getsignal(number) is not signal.SIG_IGN:
            self._before[number] = signal.signal(number, handler)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked or self.closing:
            raise KeyboardInterrupt
        self.asked = True

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)
