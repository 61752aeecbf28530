"""One run of the command: load the model, read, answer, and report it to a display or as JSON."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from wim_ext.console import Display, count
from wim_ext.document_files import Sources
from wim_ext.events import AnswerToken, Event, Finished, Result
from wim_ext.info import versions
from wim_ext.interrupt import StopOnInterrupt
from wim_ext.terminal import one_line

__all__ = ["Request", "answer_as_json", "answer_on", "open_engine", "result_object"]


@dataclass(frozen=True)
class Request:
    """What is asked, and with which settings. The names are those of the command's options."""

    question: str
    model: str | None = None
    segment_tokens: int | None = None
    max_margin_tokens: int = 64
    max_answer_tokens: int = 256
    relevance: str = "auto"
    use: str = "context+margins"
    dtype: str = "auto"
    device: str = "auto"
    seed: int | None = None
    temperature: float = 0.0
    threads: int | None = None


def open_engine(request: Request, note: Callable[[str], None]) -> Any:
    """The WritingInTheMargins that the request describes; `note` gets lines about the loading.

    Imports torch and transformers, which takes seconds: hence here and not at the top.
    """
    import torch

    from wim_ext.loading import load
    from wim_ext.margins import WritingInTheMargins
    from wim_ext.sampling import Sampling

    if request.threads is not None:
        torch.set_num_threads(request.threads)
    loaded = load(request.model, request.dtype, request.device, on_progress=note)
    dtype = str(loaded.dtype).removeprefix("torch.")
    threads = count(torch.get_num_threads(), "thread")
    on_cpu = f", {threads}" if loaded.device.type == "cpu" else ""
    note(f"Model: {loaded.name}, {dtype} on {loaded.device}{on_cpu}")
    return WritingInTheMargins(
        loaded.model,
        loaded.tokenizer,
        segment_tokens=request.segment_tokens,
        max_margin_tokens=request.max_margin_tokens,
        max_answer_tokens=request.max_answer_tokens,
        relevance=request.relevance,
        use=request.use,
        sampling=Sampling(temperature=request.temperature, seed=request.seed),
    )


def answer_on(
    display: Display,
    sources: Sources,
    request: Request,
    stop: StopOnInterrupt,
) -> Result:
    """Answers the request, showing everything on `display` as it happens."""
    with display, _warnings_to(display.note):
        display.note(f"Loading {request.model or 'the built-in model'} ...")
        engine = open_engine(request, display.note)
        result = None
        for event in _events(engine, sources, request, stop):
            display.show(event)
            if isinstance(event, Finished):
                result = event.result
    if result is None:
        raise RuntimeError("the run ended without a result")
    return result


def answer_as_json(
    out: TextIO,
    sources: Sources,
    request: Request,
    stop: StopOnInterrupt,
    every_event: bool,
) -> None:
    """Answers the request as one JSON object on `out`, or as one line of JSON for every event."""
    engine = open_engine(request, lambda text: None)
    for event in _events(engine, sources, request, stop):
        if every_event:
            _write(out, event_object(event, sources, request), indent=None)
        elif isinstance(event, Finished):
            _write(out, result_object(event.result, sources, request), indent=2)


def _write(out: TextIO, value: dict[str, Any], indent: int | None) -> None:
    # Escaped to ASCII: no encoding of the pipe, and no control character, can break it.
    out.write(json.dumps(value, indent=indent) + "\n")
    out.flush()


def _events(
    engine: Any, sources: Sources, request: Request, stop: StopOnInterrupt
) -> Iterator[Event]:
    # Closing the stream gives the pages of its sequences back, also when an interrupt ends the run.
    with (
        stop,
        closing(engine.stream(sources.context, request.question, should_stop=stop)) as events,
    ):
        for event in events:
            if isinstance(event, AnswerToken):
                stop.closing = True
            yield event


@contextmanager
def _warnings_to(note: Callable[[str], None]) -> Iterator[None]:
    """Shows warnings to users (a fallback, say) as notes; those to programmers not at all."""

    def show(message: Warning | str, category: type[Warning], *_args: Any, **_named: Any) -> None:
        if issubclass(category, UserWarning):
            note(one_line(f"note: {message}"))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def result_object(result: Result, sources: Sources, request: Request) -> dict[str, Any]:
    """The result as plain values for JSON; docs/command.md describes the keys."""
    stats = result.stats
    return {
        "answer": result.answer,
        "stop_reason": result.stop_reason,
        "stopped_early": result.stopped_early,
        "margins": [margin_object(margin, sources) for margin in result.margins],
        "documents": [
            {"name": file.name, "span": file.span, "unit": file.unit, "units": len(file.starts)}
            for file in sources.files
        ],
        "stats": {
            **asdict(stats),
            "total_tokens": stats.total_tokens,
            "total_seconds": stats.total_seconds,
        },
        "request": asdict(request),
        "versions": versions(),
    }


def margin_object(margin: Any, sources: Sources) -> dict[str, Any]:
    """A margin as plain values, with the pieces of documents that it was written about."""
    cited = [
        {"document": c.name, "span": c.span, "unit": c.unit, "first": c.first, "last": c.last}
        for c in sources.cite(margin.span)
    ]
    return {**asdict(margin), "sources": cited}


def event_object(event: Event, sources: Sources, request: Request) -> dict[str, Any]:
    """An event as plain values: its kind as ``event``, then its own fields."""
    kind = "".join(f"_{c.lower()}" if c.isupper() else c for c in type(event).__name__)[1:]
    values = dict(vars(event))
    if isinstance(event, Finished):
        values["result"] = result_object(event.result, sources, request)
    elif "margin" in values:
        values["margin"] = margin_object(values["margin"], sources)
    return {"event": kind, **values}
