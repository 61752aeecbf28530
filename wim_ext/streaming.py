"""The iterator that a person holds while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from types import TracebackType

from wim_ext.events import Event, Finished, Result

__all__ = ["Stream"]


class _StopSign:
    """Whether to stop; apart from the stream, so that the run does not refer to the stream and a
    dropped stream is closed at once instead of at the next garbage collection."""

    def __init__(self, should_stop: Callable[[], bool] | None) -> None:
        self.raised = False
        self._should_stop = should_stop

    def __call__(self) -> bool:
        if not self.raised and self._should_stop is not None and self._should_stop():
            self.raised = True
        return self.raised


class Stream(Iterator[Event]):
    """Events of one run, as they happen.

    `stop()` (from any thread or a signal handler) ends the reading at the next forward and answers
    from what was read. `close()` ends the run without an answer and gives everything back; so
    do a with statement and garbage collection.
    """

    def __init__(
        self,
        start: Callable[[Callable[[], bool]], Generator[Event, None, None]],
        should_stop: Callable[[], bool] | None = None,
        release: Callable[[], object] = lambda: None,
    ) -> None:
        self._stop_sign = _StopSign(should_stop)
        self._release = release
        self._result: Result | None = None
        self._events = start(self._stop_sign)

    def __next__(self) -> Event:
        try:
            event = next(self._events)
        except BaseException:  # the end as well
            self._release()
            raise
        if isinstance(event, Finished):
            self._result = event.result
        return event

    def result(self) -> Result:
        """Runs to the end and returns the result.

        Raises:
            RuntimeError: the stream was closed before it had one.
        """
        for _ in self:
            pass
        if self._result is None:
            raise RuntimeError("the stream was closed before it had a result")
        return self._result

    def stop(self) -> None:
        """Ends the reading early; the answer follows."""
        self._stop_sign.raised = True

    def close(self) -> None:
        """Ends the run. Idempotent."""
        # In this order: the run's branches first. A run that never began has none.
        self._events.close()
        self._release()

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
