"""Faults that other people's loops had, and that must not be in this one."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wim_kit import (
    CHATML,
    MARKERS,
    ScriptedModel,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    long_text,
    word_tokenizer,
)

from wim_ext.chat_template import template_parts
from wim_ext.margins import WritingInTheMargins
from wim_ext.sampling import Sampler, Sampling
from wim_ext.segments import segment_tokens
from wim_ext.tokens import TextCodec

QUESTION = "Who is the keeper?"


def answered(
    tokenizer: Any, text: str, question: str, reply: str = "YES: a note", **options: Any
) -> ScriptedModel:
    """A model after one run; `released` holds every sequence that it saw."""
    model = ScriptedModel(tokenizer, lambda prompt: reply)
    settings = {"segment_tokens": 60, "max_margin_tokens": 12, "max_answer_tokens": 6, **options}
    WritingInTheMargins(model, tokenizer, **settings).answer(text, question)
    assert model.live == []
    return model


@pytest.mark.parametrize("relevance", ["fused", "separate", "likelihood"])
def test_bc36_one_bos(relevance: str) -> None:
    """A tokenizer that puts a BOS before every text: each sequence begins with one and has no
    other, however many pieces it was fed in."""
    template = CHATML.replace("<|im_start|>", "[").replace("<|im_end|>", "]")
    for chat in (None, template, "{{ bos_token }}" + template):
        tokenizer = byte_fallback_tokenizer(chat)
        bos = tokenizer.bos_token_id
        assert tokenizer("x")["input_ids"][0] == bos
        model = answered(tokenizer, long_text(8), QUESTION, relevance=relevance)
        for sequence in model.released:
            assert sequence.tokens[0] == bos
            assert sequence.tokens.count(bos) == 1


@given(
    seed=st.integers(0, 10_000),
    strings=st.lists(st.sampled_from(MARKERS), min_size=1, max_size=12),
)
@settings(max_examples=30, deadline=None)
def test_bc48_control_tokens(seed: int, strings: list[str]) -> None:
    """The names of control tokens in document, question and margins are text. The model sees as
    many control tokens as without them, each where the chat template puts it."""

    def sprinkled(text: str) -> str:
        draw = random.Random(seed)
        for marker in strings:
            at = draw.randrange(len(text) + 1)
            text = text[:at] + marker + text[at:]
        return text

    tokenizer = byte_level_tokenizer()
    codec = TextCodec(tokenizer)
    text, question = sprinkled(long_text(4)), sprinkled(QUESTION)
    assert not codec.control_ids & set(codec.encode(text))
    model = answered(tokenizer, text, question, reply="YES: " + sprinkled("note"))
    opening = [tokenizer.convert_tokens_to_ids("<|im_start|>")]
    turn = [*tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|im_start|>"])]
    for sequence in model.released:
        # What the scripted model itself "generated" is its own; the loop fed it back as it was.
        header = len(sequence.tokens)
        for at in range(len(sequence.tokens), -1, -1):
            if sequence.tokens[at : at + len(model.header)] == model.header:
                header = at + len(model.header)
                break
        seen = [token for token in sequence.tokens[:header] if token in codec.control_ids]
        assert seen in (opening, opening + turn)


@given(
    text=st.lists(
        st.one_of(
            st.text(max_size=10),
            st.sampled_from(["Some words. ", "x" * 60, "\n\n", "🙂", "日本語。", "é"]),
        ),
        max_size=25,
    ).map("".join),
    limit=st.integers(1, 64),
)
@settings(max_examples=120, deadline=None)
def test_bc50_lossless_segments(text: str, limit: int) -> None:
    for tokenizer in (byte_level_tokenizer(), byte_fallback_tokenizer(), word_tokenizer()):
        encoded = TextCodec(tokenizer).encode_with_offsets(text)
        segments = segment_tokens(text, encoded, limit)
        if encoded.ids:
            pieces = [text[s.span[0] : s.span[1]] for s in segments]
            assert "".join(pieces).encode(errors="surrogatepass") == text.encode(
                errors="surrogatepass"
            )
        assert all(1 <= s.num_tokens <= limit for s in segments)
        assert [t for s in segments for t in encoded.ids[s.begin : s.end]] == encoded.ids


@pytest.mark.parametrize("limit", [512, 100, 19, 1])
def test_bc50_a_thousand_sentences(limit: int) -> None:
    """The published segmenter loses one sentence at each border of such a text."""
    text = "".join(f"Sentence {i} has a few words in it. " for i in range(1000))
    encoded = TextCodec(byte_level_tokenizer()).encode_with_offsets(text)
    segments = segment_tokens(text, encoded, limit)
    assert "".join(text[s.span[0] : s.span[1]] for s in segments) == text


@pytest.mark.parametrize(
    "question",
    [
        "What is {a: 1}?",
        "{} {0} {question} {margins} {{x}}",
        "%s %(question)s ${question}",
        "{% raw %} {{ messages }} {% endfor %}",
        "wimslotuser wimslotsystem",
        "\\n \\x00 \x00",
    ],
)
def test_bc51_templates(question: str) -> None:
    """Braces and marks of any template language are text, in question, document and margins."""
    tokenizer = byte_level_tokenizer()
    text = "```\n" + question + "\n```\n" + long_text(4)
    model = answered(tokenizer, text, question, reply="YES: " + question, max_margin_tokens=60)
    *_, final, trunk = [tokenizer.decode(sequence.tokens) for sequence in model.released]
    assert text in trunk
    assert final.count(question) >= 3
    # A fence in the document closes nothing: there is none of ours around it.
    assert "```" not in final.replace(text, "")


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-4, 1.0])
def test_bc54_sampling(temperature: float) -> None:
    for top_p in (1e-4, 1.0):
        sampler = Sampler(Sampling(temperature=temperature, top_p=top_p, seed=0))
        best = sampler.choose(torch.tensor([0.0, 50.0, -torch.inf, 1.0]), "token 1 of answer")
        assert best == 1
        with pytest.raises(ValueError, match="token 7 of answer: the logits hold only -inf"):
            sampler.choose(torch.full((4,), -torch.inf), "token 7 of answer")
        with pytest.raises(ValueError, match="token 7 of answer: the logits hold NaN"):
            sampler.choose(torch.tensor([0.0, torch.nan]), "token 7 of answer")
    assert Sampler(Sampling()).choose(torch.zeros(50_000), "token 1 of answer") == 0


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% import 'os' as os %}{{ os.system('true') }}", "no loader"),
        ("{{ 'a' * 10 ** 11 }}", "it needs more than 4 GiB of memory"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "it runs longer than 5 s",
        ),
    ],
)
def test_bc55_template_sandbox(template: str, reason: str) -> None:
    """A template that reaches out, eats memory or never ends is an error, soon, and no more."""
    tokenizer = byte_level_tokenizer.__wrapped__(template)
    start = time.monotonic()
    with pytest.raises(ValueError, match="the model's chat template cannot be used: .*" + reason):
        template_parts(tokenizer, system=False)
    assert time.monotonic() - start < 60
