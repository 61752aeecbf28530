"""The method as a whole, on a model that replies as told and on a tiny random one."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from wim_kit import ScriptedModel, byte_level_tokenizer, long_text, tiny_llama

from wim_ext.cache import PagedKVCache
from wim_ext.errors import CacheFull, ContextTooLong
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
)
from wim_ext.fallback import FallbackModel
from wim_ext.margins import WritingInTheMargins
from wim_ext.model import PagedModel
from wim_ext.prompts import fill
from wim_ext.sampling import Sampling
from wim_ext.segments import Context

TOKENIZER = byte_level_tokenizer()
TEXT = long_text(24)
QUESTION = "Who is the keeper?"


def script(prompt: str) -> str:
    if "With the help of" in prompt:
        return "  Ada Quill."
    return "YES: note"


def scripted(**options: Any) -> tuple[WritingInTheMargins, ScriptedModel]:
    model_options = {k: options.pop(k) for k in ("max_length", "can_roll_back") if k in options}
    model = ScriptedModel(TOKENIZER, options.pop("script", script), **model_options)
    settings = {"segment_tokens": 60, "max_margin_tokens": 12, "max_answer_tokens": 20, **options}
    return WritingInTheMargins(model, TOKENIZER, **settings), model


def events_of(wim: WritingInTheMargins, **options: Any) -> list[Event]:
    return list(wim.stream(TEXT, QUESTION, **options))


def kinds(events: list[Event], *wanted: type) -> list[Event]:
    return [event for event in events if isinstance(event, wanted)]


def test_the_model_sees_trunk_margins_and_question_and_nothing_else() -> None:
    wim, model = scripted(prefill_chunk=32)
    result = wim.answer(TEXT, QUESTION)
    writer = wim._writer
    trunk = writer.layout.opening + writer.codec.encode("Read this text.\n\n")
    trunk += writer.codec.encode(TEXT)
    *_, answer, last = model.released
    # The trunk is what it would be without branches, and was released last.
    assert last.tokens == trunk
    notes = "- note\n" * len(result.margins)
    final = fill(writer.prompts.final_both, question=QUESTION, margins=notes)
    reply = writer.codec.encode("  Ada Quill.")
    closing = writer.layout.closing
    assert answer.tokens == trunk + writer.codec.encode(final) + closing + reply
    # Every branch is the trunk up to its segment, the prompt, and the margin.
    prompt = fill(writer.prompts.extract_fused, question=QUESTION)
    branch = writer.codec.encode(prompt) + closing + writer.codec.encode("YES: note")
    ends = [len(seq.tokens) - len(branch) for seq in model.released[:-2]]
    assert [seq.tokens for seq in model.released[:-2]] == [trunk[:n] + branch for n in ends]
    assert ends == sorted(set(ends))
    assert ends[-1] == len(trunk)
    assert result.answer == "Ada Quill."


def test_the_counters_add_up_exactly_and_nothing_is_read_twice() -> None:
    wim, model = scripted()
    result = wim.answer(TEXT, QUESTION)
    stats, codec = result.stats, wim._writer.codec
    segments = len(result.margins)
    closing = len(wim._writer.layout.closing)
    extract = fill(wim._writer.prompts.extract_fused, question=QUESTION)
    intro = codec.encode("Read this text.\n\n")
    assert stats.tokens["document"] == (
        len(wim._writer.layout.opening) + len(intro) + len(codec.encode(TEXT))
    )
    assert stats.tokens["extraction_prompts"] == segments * (len(codec.encode(extract)) + closing)
    assert stats.tokens["margins"] == segments * len(codec.encode("YES: note"))
    assert stats.tokens["answer"] == len(codec.encode("  Ada Quill."))
    assert stats.total_tokens == model.tokens_processed
    assert stats.forwards == len(model.forwards)
    assert (stats.segments, stats.segments_read) == (segments, segments)
    # Each reply ends with a stop token, which is generated but not fed.
    fed = stats.tokens["margins"] + stats.tokens["answer"]
    assert stats.generated_tokens == fed + segments + 1


def test_events_come_in_order_and_agree_with_the_result() -> None:
    wim, _ = scripted()
    events = events_of(wim)
    assert isinstance(events[0], ReadingStarted)
    assert isinstance(events[-1], Finished)
    result = events[-1].result
    story = kinds(events, SegmentRead, MarginWritten)
    assert [type(e) for e in story] == [SegmentRead, MarginWritten] * len(result.margins)
    assert [e.margin for e in story[1::2]] == result.margins
    assert "".join(e.text for e in kinds(events, AnswerToken)) == result.answer
    assert events[0].segments == len(result.margins)
    assert sum(e.tokens for e in story[::2]) == events[0].tokens
    spans = [margin.span for margin in result.margins]
    assert "".join(TEXT[begin:end] for begin, end in spans) == TEXT
    assert result.stop_reason == "end"
    assert not result.stopped_early
    assert result.relevant_margins == result.margins


def test_progress_is_in_work_and_never_runs_backwards() -> None:
    wim, _ = scripted(prefill_chunk=16)
    events = events_of(wim)
    done = [e.work_done for e in kinds(events, Progress, SegmentRead, MarginWritten)]
    assert done == sorted(done)
    assert 0 < done[0] < 0.1
    assert done[-1] == 1.0
    tokens = [e.tokens for e in kinds(events, Progress)]
    assert tokens == sorted(tokens)
    assert tokens[-1] == events[0].tokens
    assert events[0].work > events[0].tokens


@pytest.mark.parametrize("use", ["context+margins", "margins", "context"])
def test_what_the_answer_sees(use: str) -> None:
    wim, model = scripted(use=use)
    result = wim.answer(TEXT, QUESTION)
    *_, answer, _ = model.released
    prompt = TOKENIZER.decode(answer.tokens)
    assert ("Ada Quill" in prompt.split("With the help")[0]) == (use != "margins")
    assert ("- note\n" in prompt) == (use != "context")
    assert bool(result.margins) == (use != "context")
    assert result.stats.total_tokens == model.tokens_processed
    # Only the trunk began at position 0: the other modes share its opening at least.
    assert sum(length == 0 for forward in model.forwards for length, _ in forward) == 1
    assert not result.stopped_early


def test_without_relevant_margins_the_prompt_does_not_speak_of_them() -> None:
    prompts = []
    wim, _ = scripted(script=lambda prompt: prompts.append(prompt) or "NO. Nothing.")
    result = wim.answer(TEXT, QUESTION)
    assert not result.relevant_margins
    assert "Notes made" not in prompts[-1]
    wim, _ = scripted(script=lambda prompt: prompts.append(prompt) or "NO.", use="margins")
    wim.answer(TEXT, QUESTION)
    assert "Notes made while reading a text:\n(none)\n" in prompts[-1]


def test_margins_stand_apart_in_the_final_prompt() -> None:
    count = iter(range(100))
    prompts = []

    def numbered(prompt: str) -> str:
        prompts.append(prompt)
        return "done" if "With the help" in prompt else f"YES {next(count) // 6}"

    wim, _ = scripted(script=numbered)
    result = wim.answer(TEXT, QUESTION)
    listed = "".join(f"- {margin.text}\n" for margin in result.margins)
    assert f"reading the text:\n{listed}\nWith the help" in prompts[-1]


def test_a_margin_that_encodes_longer_than_it_was_generated_is_cut() -> None:
    wim, _ = scripted(max_margin_tokens=4, script=lambda p: "YES: " + "tower " * 9)
    margins = wim.answer(TEXT, QUESTION).margins
    assert all(len(wim._writer.codec.encode(m.text)) <= 4 for m in margins)


def test_stop_answers_from_what_was_read() -> None:
    wim, model = scripted(prefill_chunk=16)
    with wim.stream(TEXT, QUESTION) as stream:
        events = []
        for event in stream:
            events.append(event)
            if isinstance(event, MarginWritten) and event.margin.segment == 1:
                stream.stop()
    result = events[-1].result
    assert result.stopped_early
    assert result.answer == "Ada Quill."
    assert len(result.margins) == result.stats.segments_read == 2
    assert result.stats.segments > 2
    assert model.live == []
    assert result.stats.total_tokens == model.tokens_processed
    assert not kinds(events[events.index(kinds(events, AnswerToken)[0]) :], Progress)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 9, 14])
def test_should_stop_is_asked_after_every_forward(after: int) -> None:
    calls = []

    def should_stop() -> bool:
        calls.append(1)
        return len(calls) > after

    wim, model = scripted(prefill_chunk=16)
    result = wim.stream(TEXT, QUESTION, should_stop).result()
    assert result.stopped_early
    assert result.answer == "Ada Quill."
    assert 0 < result.stats.tokens["document"] < 400
    assert len(result.margins) <= result.stats.segments_read
    assert result.stats.total_tokens == model.tokens_processed
    assert model.live == []


def test_stop_from_another_thread() -> None:
    wim, _ = scripted(prefill_chunk=8)
    stream = wim.stream(TEXT, QUESTION)
    next(stream)
    thread = threading.Thread(target=stream.stop)
    thread.start()
    thread.join()
    assert stream.result().stopped_early


@pytest.mark.parametrize("after", [0, 1, 4, 12, 40, 60])
def test_closing_gives_everything_back(after: int) -> None:
    wim, model = scripted(prefill_chunk=16)
    stream = wim.stream(TEXT, QUESTION)
    for _ in range(after):
        next(stream)
    stream.close()
    assert model.live == []
    stream.close()
    with pytest.raises(RuntimeError, match="the stream was closed before it had a result"):
        stream.result()


def test_a_stream_that_is_dropped_gives_everything_back() -> None:
    wim, model = scripted()
    stream = wim.stream(TEXT, QUESTION)
    next(stream)
    del stream
    assert model.live == []


@pytest.mark.parametrize("at", [0, 1, 3, 10, 30])
def test_a_failing_model_leaves_nothing_behind(at: int) -> None:
    wim, model = scripted(prefill_chunk=32)
    model.fail_at = at
    with pytest.raises(RuntimeError, match="the model failed"):
        wim.answer(TEXT, QUESTION)
    assert model.live == []
    model.fail_at = None
    assert wim.answer(TEXT, QUESTION).answer == "Ada Quill."


def test_an_interrupt_leaves_nothing_behind() -> None:
    def interrupted(prompt: str) -> str:
        raise KeyboardInterrupt

    wim, model = scripted(script=interrupted)
    with pytest.raises(KeyboardInterrupt):
        wim.answer(TEXT, QUESTION)
    assert model.live == []


def test_too_long_is_refused_with_the_numbers_before_any_work() -> None:
    wim, model = scripted(max_length=300)
    with pytest.raises(ContextTooLong) as caught:
        wim.stream(TEXT, QUESTION)
    error = caught.value
    tokens = len(wim._writer.codec.encode(TEXT))
    assert error.limit == 300
    assert error.needed > tokens
    match = rf"the document has {tokens} tokens in \d+ segments; with prompts, margins of up to 12 "
    match += rf"tokens and an answer of up to 20 \({error.needed - tokens} together\) it may need "
    match += rf"{error.needed} tokens, and the model can attend to 300$"
    assert re.match(match, str(error))
    assert model.forwards == []
    assert model.live == []


def test_what_is_promised_to_fit_fits() -> None:
    wim, model = scripted(script=lambda prompt: "YES: " + "x" * 500)
    result = wim.answer(TEXT, QUESTION)
    longest = max(len(seq.tokens) for seq in model.released)
    exact, _ = scripted(script=lambda prompt: "YES: " + "x" * 500, max_length=longest + 40)
    assert exact.answer(TEXT, QUESTION).answer == result.answer
    assert result.stop_reason == "length"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"segment_tokens": 0}, "segment_tokens must be 1 or more, got 0"),
        ({"max_margin_tokens": 0}, "max_margin_tokens must be 1 or more, got 0"),
        ({"max_answer_tokens": -1}, "max_answer_tokens must be 1 or more, got -1"),
        ({"prefill_chunk": 0}, "prefill_chunk must be 1 or more, got 0"),
        ({"schedule": "overlap"}, "schedule must be one of rollback, got 'overlap'"),
        ({"use": "notes"}, r"use must be one of context\+margins, margins, context, got 'notes'"),
        ({"relevance": "vibes"}, "relevance must be one of auto, fused, separate, logit"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scripted(**options)


def test_bad_questions_and_contexts() -> None:
    wim, model = scripted()
    with pytest.raises(ValueError, match="the question is empty"):
        wim.answer(TEXT, " \n")
    with pytest.raises(ValueError, match="the document is empty: there is nothing to read"):
        wim.answer("", QUESTION)
    assert model.live == []


def test_several_documents() -> None:
    wim, _ = scripted()
    context = Context.join([("a.txt", "Alpha. " * 10), ("b.txt", "Beta. " * 10)])
    result = wim.answer(context, QUESTION)
    sources = [context.locate(margin.span) for margin in result.margins]
    assert sources[0][0].name == "a.txt"
    assert sources[-1][-1].name == "b.txt"
    pairs = wim.answer([("a.txt", "Alpha. " * 10), ("b.txt", "Beta. " * 10)], QUESTION)
    assert [m.span for m in pairs.margins] == [m.span for m in result.margins]


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_llama(len(TOKENIZER))


def paged(llama: Any, pages: int = 200) -> PagedModel:
    return PagedModel(llama, PagedKVCache.for_model(llama, num_tokens=pages * 16, page_size=16))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("relevance", ["fused", "separate", "logit", "likelihood"])
def test_a_real_model_gives_pages_back_and_counts(llama: Any, relevance: str) -> None:
    model = paged(llama)
    settings = {"segment_tokens": 80, "max_margin_tokens": 8, "max_answer_tokens": 8}
    wim = WritingInTheMargins(model, TOKENIZER, relevance=relevance, prefill_chunk=64, **settings)
    before = model.tokens_processed
    result = wim.answer(TEXT, QUESTION)
    assert result.stats.total_tokens == model.tokens_processed - before
    assert model.cache.stats().used_pages == 0
    model.cache.check_integrity()
    slow = WritingInTheMargins(FallbackModel(llama), TOKENIZER, relevance=relevance, **settings)
    other = slow.answer(TEXT, QUESTION)
    assert other.answer == result.answer
    assert [m.text for m in other.margins] == [m.text for m in result.margins]
    for mine, theirs in zip(result.margins, other.margins, strict=True):
        assert mine.relevant == theirs.relevant
        assert mine.score == pytest.approx(theirs.score, abs=1e-4)


@pytest.mark.usefixtures("one_thread")
def test_seeded_sampling_repeats(llama: Any) -> None:
    def answers(seed: int) -> list[str]:
        wim = WritingInTheMargins(
            paged(llama),
            TOKENIZER,
            segment_tokens=120,
            max_margin_tokens=6,
            max_answer_tokens=6,
            relevance=lambda margin, question: True,
            sampling=Sampling(temperature=1.0, seed=seed),
        )
        result = wim.answer(TEXT, QUESTION)
        return [margin.text for margin in result.margins] + [result.answer]

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


@pytest.mark.usefixtures("one_thread")
def test_a_full_pool_is_refused_before_any_work(llama: Any) -> None:
    model = paged(llama, pages=20)
    wim = WritingInTheMargins(model, TOKENIZER, segment_tokens=80)
    before = model.tokens_processed
    with pytest.raises(CacheFull, match=r"pages needed, 20 of 20 free") as caught:
        wim.answer(TEXT, QUESTION)
    assert not caught.value.can_ever_fit
    assert model.tokens_processed == before
    assert model.cache.stats().sequences == 0


@pytest.mark.usefixtures("one_thread")
def test_a_hugging_face_model_is_wrapped(llama: Any) -> None:
    state = {name: value.clone() for name, value in llama.state_dict().items()}
    wim = WritingInTheMargins(llama, TOKENIZER, max_margin_tokens=4, max_answer_tokens=4)
    assert isinstance(wim.model, PagedModel)
    assert isinstance(wim.answer(TEXT, QUESTION), Result)
    assert all(torch.equal(state[name], value) for name, value in llama.state_dict().items())


def test_all_the_models_end_tokens_stop_a_reply() -> None:
    model = ScriptedModel(TOKENIZER, script)
    model.hf_model = tiny_llama(len(TOKENIZER))
    model.hf_model.generation_config.eos_token_id = [2, 7]
    model.hf_model.config.eos_token_id = 9
    wim = WritingInTheMargins(model, TOKENIZER)
    assert wim._writer.stop_ids == {2, 7, 9, TOKENIZER.eos_token_id}


def test_margins_are_plain_values() -> None:
    assert Margin("a", True, None, 0, (0, 1)) == Margin("a", True, None, 0, (0, 1))
