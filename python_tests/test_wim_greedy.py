"""Greedy decoding is what plain transformers gives for the same tokens, token by token.

The plain side knows nothing of trunks, pages or forks: it puts the tokens of each prompt together
by itself, runs the unmodified model over transformers' own cache and attention, copies that cache
whole before every reply, and takes the argmax.
"""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import pytest
import torch
from wim_kit import byte_level_tokenizer, long_text, tiny_llama

from wim_ext import session
from wim_ext.cache import PagedKVCache
from wim_ext.generation import Generation
from wim_ext.margins import WritingInTheMargins
from wim_ext.model import PagedModel
from wim_ext.prompts import fill


@pytest.fixture
def generations(monkeypatch: pytest.MonkeyPatch) -> list[Generation]:
    """Every generation of the run, with its tokens, in order."""
    made: list[Generation] = []

    class Noted(Generation):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(session, "Generation", Noted)
    return made


class Plain:
    """An unmodified model that has read some tokens."""

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self._model = model
        self._output: Any = None
        self.read(tokens)

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> None:
        for begin in range(0, len(tokens), 512):
            ids = torch.tensor([tokens[begin : begin + 512]])
            past = None if self._output is None else self._output.past_key_values
            self._output = self._model(
                input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1
            )

    def reply(self, prompt: list[int], count: int, stop_ids: frozenset[int]) -> list[int]:
        """What the model says after `prompt`; this reader itself stays as it is."""
        reader = copy.copy(self)
        reader._output = copy.deepcopy(self._output)
        reader.read(prompt)
        said: list[int] = []
        while len(said) < count:
            said.append(int(reader._output.logits[0, -1].argmax()))
            if said[-1] in stop_ids:
                break
            reader.read(said[-1:])
        return said


def check_against_plain(
    hf_model: Any,
    tokenizer: Any,
    text: str,
    question: str,
    generations: list[Generation],
    **settings: Any,
) -> None:
    cache = PagedKVCache.for_model(hf_model, num_tokens=9 * 1024)
    wim = WritingInTheMargins(
        PagedModel(hf_model, cache), tokenizer, relevance=lambda m, q: True, **settings
    )
    result = wim.answer(text, question)
    written = [generation.tokens for generation in generations]
    assert len(written) == len(result.margins) + 1

    def plain(piece: str) -> list[int]:
        return list(tokenizer(piece, add_special_tokens=False, split_special_tokens=True).input_ids)

    chat = [{"role": "user", "content": "@@@"}]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    before, after = (tokenizer(p, add_special_tokens=False).input_ids for p in whole.split("@@@"))
    prompts = wim._writer.prompts
    reader = Plain(hf_model, [*before, *plain("".join(prompts.intro))])
    extract = [*plain(fill(prompts.extract, question=question)), *after]
    stops, left = wim._writer.stop_ids, plain(text)
    limit = wim._writer.max_margin_tokens
    for margin, tokens in zip(result.margins, written, strict=False):
        # Segments are slices of the document's own tokens: as many as the span's text has.
        count = _tokens_in(tokenizer, text, margin.span)
        reader.read(left[:count])
        left = left[count:]
        assert reader.reply(extract, limit, stops) == tokens
        said = tokenizer.decode(tokens, skip_special_tokens=True)
        # A random model writes broken characters, whose replacements take more tokens than were
        # generated: such a margin is cut to the room that it has.
        assert said.strip() == margin.text or "\ufffd" in said
        assert said.strip().startswith(margin.text)
    assert not left
    notes = "".join(f"- {margin.text}\n" for margin in result.margins if margin.text)
    final = plain(fill(prompts.final_both, question=question, margins=notes))
    answer = reader.reply([*final, *after], wim._writer.max_answer_tokens, stops)
    assert answer == written[-1]
    assert tokenizer.decode(answer, skip_special_tokens=True).lstrip() == result.answer
    assert cache.stats().used_pages == 0


def _tokens_in(tokenizer: Any, text: str, span: tuple[int, int]) -> int:
    encoded = tokenizer(
        text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True
    )
    return sum(span[0] <= begin < span[1] for begin, _ in encoded.offset_mapping)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("chunk", [7, 256])
def test_a_tiny_model(seed: int, chunk: int, generations: list[Generation]) -> None:
    tokenizer = byte_level_tokenizer()
    check_against_plain(
        tiny_llama(len(tokenizer), seed=seed),
        tokenizer,
        long_text(40),
        "Who is the keeper?",
        generations,
        segment_tokens=100,
        max_margin_tokens=10,
        max_answer_tokens=12,
        prefill_chunk=chunk,
    )


@pytest.mark.slow
def test_smollm2_on_a_long_document(smollm2: Any, generations: list[Generation]) -> None:
    topics = import_module("pydoc_data.topics").topics
    names = ("assert", "global", "lambda", "power", "raise", "with", "truth", "nonlocal")
    text = "\n\n".join(topics[name] for name in (*names, "execmodel", "naming", "import"))[:26_500]
    assert 6000 <= len(smollm2.tokenizer(text, verbose=False).input_ids) <= 7000
    check_against_plain(
        smollm2.model,
        smollm2.tokenizer,
        text,
        "What error is raised when 0.0 is raised to a negative power?",
        generations,
        segment_tokens=1300,
        max_margin_tokens=12,
        max_answer_tokens=16,
        prefill_chunk=256,
    )
