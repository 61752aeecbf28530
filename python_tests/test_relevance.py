"""Verdicts: read from text, from logits, from the question's likelihood, from a function."""

from __future__ import annotations

import math

import pytest
import torch
from wim_kit import ScriptedModel, byte_level_tokenizer

from wim_ext.events import Margin, Stats
from wim_ext.margins import WritingInTheMargins
from wim_ext.relevance import Likelihood, mode_named, suited_mode
from wim_ext.tokens import TextCodec
from wim_ext.verdicts import first_verdict, probability_of_yes, says_no, verdict_ids

CODEC = TextCodec(byte_level_tokenizer())
TEXT = (
    "The tower was built in 1889. Its keeper is called Ada Quill. "
    + "Bread is sold in the hall. " * 4
)
QUESTION = "Who keeps the tower?"


@pytest.mark.parametrize(
    ("text", "verdict", "rest"),
    [
        ("yes", True, ""),
        ("YES: the keeper is Ada", True, "the keeper is Ada"),
        ("**YES** - Ada", True, "Ada"),
        ('"Yes." She is.', True, "She is."),
        ("YES#Ada Quill", True, "Ada Quill"),
        ('YES: "Ada" is her name', True, '"Ada" is her name'),
        ("YES {x} -1", True, "{x} -1"),
        ("YES: -1 degrees", True, "-1 degrees"),
        ("\n\nYes\nAda", True, "Ada"),
        ("no", False, ""),
        ("NO.", False, ""),
        ("- No, nothing", False, "nothing"),
        ("`no`", False, ""),
        ("Nobody knows", None, "Nobody knows"),
        ("yesterday", None, "yesterday"),
        ("Not at all", None, "Not at all"),
        ("The answer is yes", None, "The answer is yes"),
        ("1. yes", None, "1. yes"),
        ("", None, ""),
    ],
)
def test_verdicts_at_the_begin_of_a_text(text: str, verdict: bool | None, rest: str) -> None:
    assert first_verdict(text, ["yes"], ["no"]) == (verdict, rest)


def test_a_word_that_may_still_grow_decides_nothing() -> None:
    assert not says_no("NO", ["yes"], ["no"])
    assert says_no("NO.", ["yes"], ["no"])
    assert says_no("NO\n", ["yes"], ["no"])
    assert not says_no("Nob", ["yes"], ["no"])
    assert not says_no("YES.", ["yes"], ["no"])
    assert says_no("NEIN ", ["ja"], ["nein"])


def test_words_with_marks_of_patterns_are_words() -> None:
    assert first_verdict("y.s sir", ["y.s"], ["no"]) == (True, "sir")
    assert first_verdict("yes sir", ["y.s"], ["no"])[0] is None


def test_all_spellings_of_a_verdict_count() -> None:
    yes, no = verdict_ids(CODEC, ["yes"], ["no"])
    assert not yes & no
    single = [form for form in ("yes", " yes", "YES", " YES") if len(CODEC.encode(form)) == 1]
    assert {CODEC.encode(form)[0] for form in single} <= yes
    logits = torch.full((len(CODEC.tokenizer),), -20.0)
    logits[sorted(yes)[0]] = 1.0
    logits[sorted(no)[0]] = 1.0
    assert probability_of_yes(logits, yes, no) == pytest.approx(0.5, abs=1e-6)
    logits[sorted(yes)[0]] = 1.0 + math.log(3)
    assert probability_of_yes(logits.bfloat16().float(), yes, no) == pytest.approx(0.75, abs=5e-3)


def test_verdicts_that_begin_alike_are_refused() -> None:
    with pytest.raises(ValueError, match=r"prompts.yes \('qa',\) and prompts.no \('qb',\) begin"):
        verdict_ids(CODEC, ["qa"], ["qb"])


def test_unreadable_logits_are_an_error() -> None:
    with pytest.raises(ValueError, match="the logits of yes and no hold NaN"):
        probability_of_yes(torch.full((10,), math.nan), {1}, {2})


def test_unknown_modes_name_the_known_ones() -> None:
    match = (
        r"relevance must be one of auto, fused, separate, logit, likelihood or a callable, "
        r"got 'no'"
    )
    with pytest.raises(ValueError, match=match):
        mode_named("no")


class Sized:
    """A model of which only the size is known."""

    def __init__(self, parameters: int) -> None:
        self.hf_model = self
        self.num_parameters = lambda: parameters


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        (Sized(135_000_000), "likelihood"),
        (Sized(999_999_999), "likelihood"),
        (Sized(1_000_000_000), "fused"),
        (object(), "fused"),
    ],
)
def test_small_models_are_not_asked_for_yes_and_no(model: object, mode: str) -> None:
    assert suited_mode(model) == mode


def test_the_chosen_mode_can_be_asked_for() -> None:
    model = ScriptedModel(CODEC.tokenizer, lambda prompt: "")
    assert WritingInTheMargins(model, CODEC.tokenizer).relevance == "fused"
    model.hf_model = Sized(1000)
    assert WritingInTheMargins(model, CODEC.tokenizer).relevance == "likelihood"
    assert WritingInTheMargins(model, CODEC.tokenizer, relevance="logit").relevance == "logit"


def test_segments_are_shorter_where_the_last_words_matter() -> None:
    model = ScriptedModel(CODEC.tokenizer, lambda prompt: "")

    def segment_tokens(**options: object) -> int:
        return WritingInTheMargins(model, CODEC.tokenizer, **options).segment_tokens

    assert segment_tokens() == 1024
    assert segment_tokens(relevance="likelihood") == 400
    assert segment_tokens(relevance="likelihood", segment_tokens=50) == 50


def run(
    script: object, relevance: object, likely: object = None, **options: object
) -> tuple[list[Margin], Stats, ScriptedModel]:
    model = ScriptedModel(CODEC.tokenizer, script)
    if likely is not None:
        model.likely = likely
    settings = {"segment_tokens": 30, "max_margin_tokens": 40, "max_answer_tokens": 10, **options}
    wim = WritingInTheMargins(model, CODEC.tokenizer, relevance=relevance, **settings)
    result = wim.answer(TEXT, QUESTION)
    assert result.stats.total_tokens == model.tokens_processed
    assert model.live == []
    return result.margins, result.stats, model


def keeper_script(found: str, otherwise: str, final: str = "Ada.") -> object:
    """`found` where the last segment names the keeper, `otherwise` elsewhere."""

    def script(prompt: str) -> str:
        if "Notes made" in prompt or "With the help" in prompt:
            return final
        document = prompt.split("\n\nDoes the text")[0].split("\n\nQuestion")[0]
        return found if "Ada" in document[-40:] else otherwise

    return script


def test_fused_strips_the_verdict_and_stops_at_no() -> None:
    script = keeper_script("YES: Ada Quill keeps it.", "NO. There is nothing about that here.")
    margins, stats, _ = run(script, "fused")
    assert [m.relevant for m in margins].count(True) >= 1
    for margin in margins:
        if margin.relevant:
            assert margin.text == "Ada Quill keeps it."
        else:
            # "NO" and the full stop that ends the word.
            assert margin.tokens <= 3
        assert margin.score is None
    assert stats.tokens["classification"] == 0


def test_fused_keeps_a_margin_without_a_verdict_and_drops_an_empty_one() -> None:
    margins, _, _ = run(keeper_script("Ada Quill keeps it.", "YES"), "fused")
    assert {m.text for m in margins if m.relevant} == {"Ada Quill keeps it."}
    assert {m.text for m in margins if not m.relevant} == {""}


def classified(reply: str) -> object:
    def script(prompt: str) -> str:
        if "\nNote: " in prompt:
            # The second conversation holds the question and the note, and not the document.
            assert "1889" not in prompt
            assert prompt.count("Who keeps the tower?") == 1
            return reply if "Ada" in prompt else "NO"
        return "Ada keeps it." if "Ada" in prompt.split("\n\nQuestion")[0][-40:] else "Bread."

    return script


@pytest.mark.parametrize(
    ("reply", "kept"), [("**Yes**, it does", True), ("no", False), ("?", True)]
)
def test_separate_reads_the_second_reply(reply: str, kept: bool) -> None:
    margins, stats, model = run(classified(reply), "separate")
    assert {m.relevant for m in margins if "Ada" in m.text} == {kept}
    assert {m.relevant for m in margins if "Bread" in m.text} == {False}
    assert stats.tokens["classification"] > 0
    # The conversation shares the trunk's opening: no forward began at position 0 but the trunk's.
    assert sum(length == 0 for forward in model.forwards for length, _ in forward) == 1


def test_an_empty_margin_is_not_classified() -> None:
    for relevance in ("separate", "logit", lambda margin, question: True):
        margins, stats, _ = run(lambda prompt: "", relevance)
        assert not any(m.relevant for m in margins)
        assert stats.tokens["classification"] == 0


def test_logit_compares_the_first_tokens_of_the_reply() -> None:
    yes, no = verdict_ids(CODEC, ["yes"], ["no"])

    def likely(tokens: list[int]) -> dict[int, float]:
        return {min(yes): 2.0, min(no): 2.0 - math.log(4)}

    margins, stats, _ = run(classified("unread"), "logit", likely)
    # All other spellings have logit 0, so the score is near, not at, 4/5.
    assert all(0.5 < m.score < 4 / 5 for m in margins)
    assert all(m.relevant for m in margins)
    assert stats.generated_tokens > 0


def question_likelier_after(word: str, logit: float) -> object:
    ids = set(CODEC.encode(QUESTION))

    def likely(tokens: list[int]) -> dict[int, float]:
        text = CODEC.decode(tokens)
        document = text.split("\n\nA question")[0]
        return dict.fromkeys(ids, logit if word in document else 0.0)

    return likely


def test_likelihood_writes_where_the_question_becomes_likelier() -> None:
    likely = question_likelier_after("Ada", 5.0)
    margins, stats, model = run(lambda prompt: "Ada keeps it.", "likelihood", likely)
    kept = [m for m in margins if m.relevant]
    # Later segments leave the question as likely as it was: they add nothing.
    assert len(kept) == 1
    assert "Ada" in TEXT[: kept[0].span[1]]
    assert "Ada" not in TEXT[: kept[0].span[0]]
    assert kept[0].score > 0.9
    assert all(m.tokens == 0 and m.score < 0.1 for m in margins if not m.relevant)
    # One probe before the document, one after each segment; one extraction prompt in all.
    probe = len(CODEC.encode("\n\nA question that the last part of the text answers: " + QUESTION))
    assert stats.tokens["classification"] == probe * (len(margins) + 1)
    assert stats.tokens["margins"] == len(CODEC.encode("Ada keeps it."))
    # The words before the margin are fed with the prompt and are not in the margin.
    assert kept[0].text == "Ada keeps it."
    lead = "<|im_start|>assistant\nAccording to the text,Ada keeps it."
    assert any(CODEC.tokenizer.decode(s.tokens).endswith(lead) for s in model.released)


def test_likelihood_measures_the_mean_log_probability() -> None:
    margins, _, _ = run(lambda prompt: "", "likelihood", question_likelier_after("Ada", 5.0))
    size, ids = len(CODEC.tokenizer), len(set(CODEC.encode(QUESTION)))
    before, after = -math.log(size), 5 - math.log(size - ids + ids * math.exp(5))
    gain = after - before
    expected = 1 / (1 + math.exp(-Likelihood.SHARPNESS * (gain - Likelihood.THRESHOLD)))
    assert max(m.score for m in margins) == pytest.approx(expected, abs=1e-4)
    # A reply that is empty is no margin, however relevant the segment.
    assert not any(m.relevant for m in margins)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_likelihood_does_not_depend_on_the_chunks(chunk: int) -> None:
    likely = question_likelier_after("Ada", 2.0)
    margins, _, _ = run(lambda p: "Ada.", "likelihood", likely, prefill_chunk=chunk)
    again, _, _ = run(lambda p: "Ada.", "likelihood", likely)
    assert [m.score for m in margins] == pytest.approx([m.score for m in again], abs=1e-6)


def test_a_function_gets_margin_question_and_segment() -> None:
    seen = []

    def judge(margin: str, question: str, segment: str) -> bool:
        seen.append((margin, question, segment))
        return "Ada" in segment

    margins, _, _ = run(lambda prompt: "A note.", judge)
    assert [m.relevant for m in margins] == ["Ada" in segment for _, _, segment in seen]
    assert "".join(segment for _, _, segment in seen) == TEXT
    assert {(margin, question) for margin, question, _ in seen} == {("A note.", QUESTION)}


@pytest.mark.parametrize(
    ("judge", "relevant", "score"),
    [
        (lambda margin, question: 0.5, True, 0.5),
        (lambda margin, question: 0.49, False, 0.49),
        (lambda margin, question: True, True, None),
        (lambda *texts: len(texts) == 3, True, None),
        (max, True, None),
    ],
)
def test_what_a_function_may_return(judge: object, relevant: bool, score: float | None) -> None:
    if judge is max:
        with pytest.raises(ValueError, match="could not convert string to float"):
            run(lambda prompt: "A note.", judge)
        return
    margins, _, _ = run(lambda prompt: "A note.", judge)
    assert {(m.relevant, m.score) for m in margins} == {(relevant, score)}
