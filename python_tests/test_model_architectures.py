"""Every architecture: a script of steps over pages gives the logits of plain forwards."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import PACKED, VOCAB, WINDOW, make, run_script

from wim_ext import attention
from wim_ext.cache import PagedKVCache
from wim_ext.errors import ModelNotSupported
from wim_ext.model import PagedModel, Work
from wim_ext.rope import RopePin

TOLERANCE = 1e-4  # of the largest |logit|, float32
SCRIPT_TOKENS = 48


pytestmark = pytest.mark.usefixtures("one_thread")


def paged(hf_model: Any, page_size: int = 16) -> PagedModel:
    num_layers = hf_model.config.num_hidden_layers
    cache = PagedKVCache(
        num_layers=num_layers,
        num_pages=512 // page_size + 8,
        page_size=page_size,
        dtype=torch.float32,
    )
    return PagedModel(hf_model, cache, total_length=SCRIPT_TOKENS)


@pytest.mark.parametrize("name", PACKED)
def test_script_gives_the_logits_of_plain_forwards(name: str) -> None:
    hf_model = make(name)
    model = paged(hf_model)
    script = run_script(model)
    model.cache.check_integrity()
    # Dynamic NTK picks frequencies by the length of each forward: hold the plain ones too.
    pinned = (
        RopePin(hf_model, SCRIPT_TOKENS).applied() if "ntk" in name else contextlib.nullcontext()
    )
    with pinned:
        assert script.worst(hf_model) <= TOLERANCE


def test_pages_come_back_when_the_sequences_go() -> None:
    model = paged(make("llama"))
    script = run_script(model)
    assert model.tokens_processed == sum(rows.shape[0] for _, rows in script.rows)
    stats = model.cache.stats()
    assert stats.free_pages == stats.num_pages


@pytest.mark.parametrize("page_size", [1, 8, 64])
def test_page_size_does_not_matter(page_size: int) -> None:
    hf_model = make("gemma2")
    model = paged(hf_model, page_size=page_size)
    assert run_script(model).worst(hf_model) <= TOLERANCE


def test_key_and_value_dims_may_differ() -> None:
    model = paged(make("deepseek_v3"))
    run_script(model)
    k_cache, v_cache = model.cache.layer(0)
    assert k_cache.shape[-1] == 24
    assert v_cache.shape[-1] == 16


def test_longrope_without_a_pin_would_disagree() -> None:
    """The pin is not idle: chunks within the original length choose the short factors."""
    original = 16
    hf_model = make("phi3_longrope", original_max_position_embeddings=original)
    hf_model.config.rope_parameters["original_max_position_embeddings"] = original
    model = paged(hf_model)
    tokens = [(5 * i + 3) % VOCAB for i in range(original + 8)]

    def chunked() -> torch.Tensor:
        with model.new_sequence() as sequence:
            parts = [
                model.forward([Work(sequence, tokens[i : i + 8], 8)])[0]
                for i in range(0, len(tokens), 8)
            ]
        return torch.cat(parts)

    with torch.no_grad():
        plain = hf_model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    scale = plain.abs().max()
    assert (chunked() - plain).abs().max() <= TOLERANCE * scale
    model._pin = None
    assert (chunked() - plain).abs().max() > 1e-2 * scale


Change = Callable[[dict[str, Any]], dict[str, Any]]


def _top_left(call: dict[str, Any]) -> dict[str, Any]:
    """Row i of a chunk sees i + 1 keys, however many came before."""
    return {**call, "seqused_k": call["cu_seqlens_q"].diff()}


# mutation -> (architecture, what it does to the arguments of the attention op)
MUTATIONS: dict[str, tuple[str, Change]] = {
    "top_left_mask": ("llama", _top_left),
    "not_causal": ("llama", lambda call: {**call, "causal": False}),
    "no_sinks": ("gpt_oss", lambda call: {**call, "sinks": None}),
    "no_softcap": ("gemma2", lambda call: {**call, "softcap": 0.0}),
    "no_scale": ("granite", lambda call: {**call, "softmax_scale": None}),
    "no_window": ("mistral", lambda call: {**call, "window_size": (-1, -1)}),
    "window_too_long": ("mistral", lambda call: {**call, "window_size": (WINDOW, -1)}),
    "window_too_short": ("phi3", lambda call: {**call, "window_size": (WINDOW - 2, -1)}),
}


def mutate(monkeypatch: pytest.MonkeyPatch, change: Change) -> None:
    names = ("query", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqused_k")
    original = attention.ops.paged_attention

    def changed(*args: Any, **options: Any) -> torch.Tensor:
        call = change({"causal": True, **dict(zip(names, args, strict=True)), **options})
        return original(**{**call, "plan": None})

    monkeypatch.setattr(attention.ops, "paged_attention", changed)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_script_is_sensitive(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = MUTATIONS[mutation]
    hf_model = make(name)
    model = paged(hf_model)
    mutate(monkeypatch, change)
    assert run_script(model).worst(hf_model) > 100 * TOLERANCE


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_probe_at_load_is_sensitive(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, change = MUTATIONS[mutation]
    mutate(monkeypatch, change)
    with pytest.raises(ModelNotSupported, match="differs from its plain forward"):
        paged(make(name))


def test_wrong_positions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model = make("llama")
    model = paged(hf_model)
    reserve = model.cache.reserve

    def from_the_chunk_only(work: Any) -> Any:
        batch = reserve(work)
        positions = torch.cat([torch.arange(count) for _, count in work])
        return dataclasses.replace(batch, position_ids=positions)

    monkeypatch.setattr(model.cache, "reserve", from_the_chunk_only)
    assert run_script(model).worst(hf_model) > 100 * TOLERANCE
