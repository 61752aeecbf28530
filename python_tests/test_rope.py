"""Length-dependent rotary embeddings: pinned for a forward, and left as they were found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
from tiny_models import make, plain_logits

from wim_ext.borrow import borrowed
from wim_ext.cache import PagedKVCache
from wim_ext.model import PagedModel, Work
from wim_ext.rope import RopePin, context_length, depends_on_length

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = [5, 17, 3]  # within the original length of 4
LONG = [5, 17, 3, 40, 22, 9, 31, 8]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("llama", False), ("gpt_oss", False), ("phi3_longrope", True), ("llama_dynamic_ntk", True)],
)
def test_who_depends_on_length(name: str, expected: bool) -> None:
    assert depends_on_length(make(name)) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", 256),
        ("phi3_longrope", 256),
        ("llama_dynamic_ntk", 64),  # 16 trained, stretched by 4
        ("gpt2", 256),
        ("mpt", 256),
        ("bloom", None),
    ],
)
def test_context_length(name: str, expected: int | None) -> None:
    assert context_length(make(name).config) == expected


def test_total_length_is_positive() -> None:
    with pytest.raises(ValueError, match="total_length is 0; allowed are 1 and more"):
        RopePin(make("llama"), 0)


def test_a_pin_without_such_a_rotary_does_nothing() -> None:
    hf_model = make("llama")
    expected = plain_logits(hf_model, LONG)
    with RopePin(hf_model, 100).applied():
        assert torch.equal(plain_logits(hf_model, LONG), expected)


@pytest.mark.parametrize("name", ["phi3_longrope", "llama_dynamic_ntk"])
class TestPin:
    def test_short_and_long_forwards_agree(self, name: str) -> None:
        hf_model = make(name)
        with RopePin(hf_model, 40).applied():
            long = plain_logits(hf_model, LONG)
            short = plain_logits(hf_model, SHORT)
        assert torch.allclose(short, long[:3], atol=1e-5)

    def test_it_is_the_models_own_choice_for_that_length(self, name: str) -> None:
        hf_model = make(name)
        tokens = LONG * 5
        expected = plain_logits(make(name), tokens)
        with RopePin(hf_model, len(tokens)).applied():
            assert torch.allclose(plain_logits(hf_model, tokens), expected, atol=1e-5)

    def test_it_leaves_no_trace(self, name: str) -> None:
        hf_model, untouched = make(name), make(name)
        rotary = hf_model.model.rotary_emb
        buffer, kind = rotary.inv_freq, rotary.rope_type
        pin = RopePin(hf_model, 40)
        assert rotary.inv_freq is buffer
        with pin.applied():
            assert rotary.rope_type not in (kind, None)
            plain_logits(hf_model, LONG)
        assert rotary.rope_type == kind
        for tokens in (SHORT, LONG * 4, SHORT, LONG):
            assert torch.equal(plain_logits(hf_model, tokens), plain_logits(untouched, tokens))

    def test_it_goes_when_the_forward_fails(self, name: str) -> None:
        hf_model = make(name)
        kind = hf_model.model.rotary_emb.rope_type

        def fail() -> None:
            with borrowed(hf_model, pin=RopePin(hf_model, 40)):
                raise RuntimeError("broken")

        with pytest.raises(RuntimeError, match="broken"):
            fail()
        assert hf_model.model.rotary_emb.rope_type == kind

    def test_pins_nest(self, name: str) -> None:
        hf_model = make(name)
        outer = RopePin(hf_model, 40)
        inner = RopePin(hf_model, 64)
        with outer.applied():
            expected = plain_logits(hf_model, LONG)
            with inner.applied():
                plain_logits(hf_model, LONG)
            assert torch.equal(plain_logits(hf_model, LONG), expected)


def test_one_rotary_for_each_kind_of_layer() -> None:
    """Gemma 3 has a rotary type for each kind of layer; only the moving one is held."""
    still = {"rope_type": "default", "rope_theta": 10000.0}
    moving = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    kinds = {"full_attention": moving, "sliding_attention": still}
    hf_model = make("gemma3_text", rope_parameters=kinds, max_position_embeddings=16)
    assert depends_on_length(hf_model)
    with RopePin(hf_model, 40).applied():
        types = dict(hf_model.model.rotary_emb.rope_type)
        long = plain_logits(hf_model, LONG * 4)
        short = plain_logits(hf_model, LONG)
    assert types["sliding_attention"] == "default"
    assert types["full_attention"] != "dynamic"
    assert torch.allclose(short, long[: len(LONG)], atol=1e-5)


class TestPagedModel:
    def paged(self, total_length: int | None = None) -> PagedModel:
        cache = PagedKVCache(num_layers=2, num_pages=8, page_size=16, dtype=torch.float32)
        return PagedModel(make("phi3_longrope"), cache, total_length)

    def test_the_default_is_what_the_cache_can_hold(self) -> None:
        assert self.paged().total_length == 128
        assert self.paged(7).total_length == 7
        with pytest.raises(ValueError, match="total_length is 0; allowed are 1 and more"):
            self.paged(0)

    def test_a_short_text_takes_the_short_factors(self) -> None:
        model = self.paged(total_length=len(SHORT))
        [rows] = model.forward([Work(model.new_sequence(), SHORT, 3)])
        assert torch.allclose(rows, plain_logits(model.hf_model, SHORT), atol=1e-4)

    def test_it_can_be_set_for_the_next_text(self) -> None:
        model = self.paged(total_length=len(SHORT))
        model.total_length = len(LONG)
        sequence = model.new_sequence()
        parts: list[Any] = []
        for begin in range(0, len(LONG), 2):
            parts += model.forward([Work(sequence, LONG[begin : begin + 2], 2)])
        expected = plain_logits(model.hf_model, LONG)
        assert torch.allclose(torch.cat(parts), expected, atol=1e-4)
        assert isinstance(model.hf_model, hf.Phi3ForCausalLM)
