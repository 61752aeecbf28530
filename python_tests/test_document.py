"""One trunk, many questions."""

from __future__ import annotations

from typing import Any

import pytest
from wim_kit import ScriptedModel, byte_level_tokenizer, long_text, tiny_llama

from wim_ext.cache import PagedKVCache
from wim_ext.document import Document
from wim_ext.effort import Effort, Meter
from wim_ext.errors import ContextTooLong, StaleSequenceError
from wim_ext.events import (
    Event,
    Finished,
    MarginWritten,
    Progress,
    ReadingStarted,
    Result,
    SegmentRead,
)
from wim_ext.margins import WritingInTheMargins
from wim_ext.model import PagedModel

TOKENIZER = byte_level_tokenizer()
TEXT = long_text(24)
FIRST, SECOND = "Who is the keeper?", "When was the tower built?"


def script(prompt: str) -> str:
    return "An answer." if "With the help of" in prompt else "YES: note"


def opened(**options: Any) -> tuple[WritingInTheMargins, ScriptedModel]:
    model_options = {k: options.pop(k) for k in ("max_length", "can_roll_back") if k in options}
    model = ScriptedModel(TOKENIZER, options.pop("script", script), **model_options)
    settings = {"segment_tokens": 60, "max_margin_tokens": 12, "max_answer_tokens": 20, **options}
    return WritingInTheMargins(model, TOKENIZER, **settings), model


def without_times(result: Result) -> tuple[Any, ...]:
    return (result.answer, result.margins, result.stop_reason, result.stopped_early)


@pytest.mark.parametrize("use", ["context+margins", "margins", "context"])
def test_asking_a_read_document_gives_what_answer_gives(use: str) -> None:
    wim, model = opened(use=use)
    alone = [wim.answer(TEXT, question) for question in (FIRST, SECOND)]
    with wim.read(TEXT) as document:
        asked = [document.ask(question) for question in (FIRST, SECOND)]
    assert [without_times(r) for r in asked] == [without_times(r) for r in alone]
    assert model.live == []


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("relevance", ["fused", "likelihood"])
def test_forks_of_the_finished_trunk_write_the_same_margins(relevance: str) -> None:
    llama = tiny_llama(len(TOKENIZER))
    model = PagedModel(llama, PagedKVCache.for_model(llama, num_tokens=4096, page_size=16))
    wim = WritingInTheMargins(
        model,
        TOKENIZER,
        segment_tokens=80,
        max_margin_tokens=8,
        max_answer_tokens=8,
        relevance=relevance,
    )
    alone = wim.answer(TEXT, FIRST)
    with wim.read(TEXT) as document:
        for _ in range(2):
            again = document.ask(FIRST)
            assert again.answer == alone.answer
            assert [m.text for m in again.margins] == [m.text for m in alone.margins]
            model.cache.check_integrity()
        # Only the trunk is left; every branch gave its pages back.
        assert model.cache.stats().sequences == 1
        assert model.cache.stats().used_pages == -(-document.trunk_tokens // 16)
    assert model.cache.stats().used_pages == 0


def test_the_document_is_read_once_for_all_questions() -> None:
    wim, model = opened()
    document = wim.read(TEXT)
    read = model.tokens_processed
    assert document.stats.tokens["document"] == document.stats.total_tokens == read
    assert document.trunk_tokens == document.tokens_in_trunk == read
    assert document.num_tokens == document.tokens_read == len(wim._writer.codec.encode(TEXT))
    trunk = list(document._trunk.tokens)
    for question in (FIRST, SECOND, FIRST):
        before = model.tokens_processed
        result = document.ask(question)
        assert result.stats.tokens["document"] == 0
        assert result.stats.total_tokens == model.tokens_processed - before
        assert result.stats.segments == result.stats.segments_read == len(document.segments)
    assert document._trunk.tokens == trunk
    document.release()


def test_each_question_may_use_what_it_likes() -> None:
    wim, _ = opened()
    with wim.read(TEXT) as document:
        assert document.ask(FIRST, use="context").margins == []
        assert len(document.ask(FIRST, use="margins").margins) == len(document.segments)
        with pytest.raises(ValueError, match=r"use must be one of .*, got 'all'"):
            document.ask(FIRST, use="all")


def test_reading_reports_its_events() -> None:
    wim, _ = opened(prefill_chunk=16)
    events: list[Event] = []
    with wim.read(TEXT, on_event=events.append) as document:
        assert isinstance(events[0], ReadingStarted)
        read = [e for e in events if isinstance(e, SegmentRead)]
        assert [e.span for e in read] == [segment.span for segment in document]
        assert [e.tokens for e in read] == [segment.num_tokens for segment in document.segments]
        assert read[-1].work_done == 1.0
        assert len([e for e in events if isinstance(e, Progress)]) > len(read)
        assert "".join(document.text_of(segment) for segment in document) == TEXT


def test_asking_reports_margins_but_no_reading() -> None:
    wim, _ = opened()
    with wim.read(TEXT) as document, document.stream(FIRST) as stream:
        events = list(stream)
    assert not any(isinstance(e, SegmentRead) for e in events)
    assert len([e for e in events if isinstance(e, MarginWritten)]) == len(document.segments)
    assert isinstance(events[-1], Finished)
    done = [e.work_done for e in events if isinstance(e, Progress | MarginWritten)]
    assert done == sorted(done)
    assert done[-1] == 1.0


def test_stopping_a_question_leaves_the_document_whole() -> None:
    wim, model = opened()
    with wim.read(TEXT) as document:
        stream = document.stream(FIRST)
        while not isinstance(next(stream), MarginWritten):
            pass
        stream.stop()
        result = stream.result()
        assert result.stopped_early
        assert len(result.margins) == 1
        abandoned = document.stream(FIRST)
        next(abandoned)
        abandoned.close()
        assert len(model.live) == 1
        assert not document.ask(FIRST).stopped_early
        assert document.stream(FIRST, should_stop=lambda: True).result().stopped_early


def test_a_released_document_cannot_be_asked() -> None:
    wim, model = opened()
    document = wim.read(TEXT)
    document.release()
    document.release()
    assert model.live == []
    with pytest.raises(StaleSequenceError):
        document.ask(FIRST)


def test_a_document_that_cannot_be_read_or_asked_is_refused_before_any_work() -> None:
    wim, model = opened(max_length=100)
    with pytest.raises(ContextTooLong, match="the model can attend to 100"):
        wim.read(TEXT)
    assert model.forwards == []
    assert model.live == []
    wim, model = opened(max_length=620)
    with wim.read(TEXT) as document:
        read = model.tokens_processed
        with pytest.raises(ContextTooLong, match="the model can attend to 620"):
            document.ask("Why? " * 200)
        assert model.tokens_processed == read
        with pytest.raises(ValueError, match="the question is empty"):
            document.ask("")


def test_a_failing_callback_gives_everything_back() -> None:
    wim, model = opened()

    def refuse(event: Event) -> None:
        raise RuntimeError("not now")

    with pytest.raises(RuntimeError, match="not now"):
        wim.read(TEXT, on_event=refuse)
    assert model.live == []


@pytest.mark.parametrize("relevance", ["fused", "separate", "logit", "likelihood"])
@pytest.mark.parametrize("use", ["context+margins", "margins"])
def test_models_that_cannot_go_back_keep_forks_as_they_read(relevance: str, use: str) -> None:
    options = {"relevance": relevance, "use": use, "script": script}
    plain, _ = opened(**options)
    wim, model = opened(can_roll_back=False, **options)
    expected = without_times(plain.answer(TEXT, FIRST))
    assert without_times(wim.answer(TEXT, FIRST)) == expected
    with wim.read(TEXT) as document:
        assert without_times(document.ask(FIRST)) == expected
        assert without_times(document.ask(FIRST)) == expected
        assert isinstance(document, Document)
    assert model.live == []


def test_work_is_quadratic_in_reading_and_dear_in_generating() -> None:
    effort = Effort(object())
    assert effort.reading(0, 10) == 10 * effort.fixed + 50
    assert effort.reading(0, 10) + effort.reading(10, 30) == effort.reading(0, 30)
    assert effort.generating(100, 10) > 5 * effort.reading(100, 110)
    llama = tiny_llama(len(TOKENIZER))

    class Wrapped:
        hf_model = llama

    weights = sum(parameter.numel() for parameter in llama.parameters())
    assert Effort(Wrapped()).fixed == weights / (2 * 2 * 4 * 8)


def test_a_meter_stays_within_what_was_planned() -> None:
    meter = Meter(100.0)
    meter.add(30.0, limit=20.0)
    assert meter.part == 0.2
    meter.reach(20.0)
    meter.add(5.0, limit=50.0)
    assert meter.part == 0.25
    meter.reach(50.0)
    assert meter.part == 0.7
    meter.reach(99.0)
    assert meter.part == 1.0
    assert Meter(0.0).part == 1.0
