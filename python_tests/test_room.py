"""What is reserved for a question before it starts is enough, and no more than it says."""

from __future__ import annotations

import pytest
from wim_kit import ScriptedModel, byte_level_tokenizer, long_text

from wim_ext.errors import ContextTooLong
from wim_ext.margins import WritingInTheMargins
from wim_ext.room import clipped, margin_room
from wim_ext.session import Session

TOKENIZER = byte_level_tokenizer()
TEXT = long_text(12)
QUESTION = "Who is the keeper?"


def opened(max_length: int | None, **options: object) -> tuple[WritingInTheMargins, ScriptedModel]:
    # Every reply runs to its limit: the worst case that the room is reserved for.
    model = ScriptedModel(TOKENIZER, lambda prompt: "YES " + "tower " * 99, max_length)
    settings = {"segment_tokens": 50, "max_margin_tokens": 9, "max_answer_tokens": 7, **options}
    return WritingInTheMargins(model, TOKENIZER, **settings), model


def smallest_context(**options: object) -> int:
    """The length that the refusal of a tiny context asks for."""
    wim, _ = opened(1, **options)
    with pytest.raises(ContextTooLong) as caught:
        wim.stream(TEXT, QUESTION)
    return caught.value.needed


@pytest.mark.parametrize("relevance", ["fused", "separate", "logit", "likelihood"])
@pytest.mark.parametrize("use", ["context+margins", "margins", "context"])
def test_the_length_that_is_asked_for_is_enough(relevance: str, use: str) -> None:
    options = {"relevance": relevance, "use": use}
    needed = smallest_context(**options)
    wim, model = opened(needed, **options)
    # The model refuses to pass its context by itself; reaching the answer means that it fitted.
    result = wim.answer(TEXT, QUESTION)
    assert result.stop_reason == "length"
    assert max(len(sequence.tokens) for sequence in model.released) <= needed
    wim, model = opened(needed - 1, **options)
    with pytest.raises(ContextTooLong):
        wim.answer(TEXT, QUESTION)
    assert model.forwards == []


def test_the_reserve_is_not_much_more_than_the_worst_case() -> None:
    needed = smallest_context(relevance=lambda margin, question: True)
    wim, model = opened(needed, relevance=lambda margin, question: True)
    result = wim.answer(TEXT, QUESTION)
    longest = max(len(sequence.tokens) for sequence in model.released)
    # The last token is never fed, and a margin has two tokens of slack at its seams.
    assert needed - longest <= 1 + 4 * len(result.margins)


def test_plain_questions_need_less_than_questions_with_margins() -> None:
    assert smallest_context(use="context") < smallest_context(use="context+margins")


@pytest.mark.parametrize("text", ["tower", "tower " * 40, "🙂" * 30, ""])
def test_margins_are_cut_to_their_room(text: str) -> None:
    wim, _ = opened(None)
    session = Session(wim._writer, QUESTION)
    cut = clipped(session, text)
    assert text.startswith(cut)
    assert len(wim._writer.codec.encode(cut)) <= 9
    assert (cut == text) == (len(wim._writer.codec.encode(text)) <= 9)
    listed = wim._writer.codec.encode(f"- {cut}\n")
    assert len(listed) <= margin_room(session)
