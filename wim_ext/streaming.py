"""The iterator that a person holds while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from types import TracebackType

from wim_ext.events import Event, Finished, Result

__all__ = ["Stream"]


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
        self._asked_to_stop = False
        self._should_stop = should_stop
        self._result: Result | None = None
        self._release = release
        self._events = start(self._stops)

    def _stops(self) -> bool:
        if not self._asked_to_stop and self._should_stop is not None and self._should_stop():
            self._asked_to_stop = True
        return self._asked_to_stop

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
        self._asked_to_stop = True

    def close(self) -> None:
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
