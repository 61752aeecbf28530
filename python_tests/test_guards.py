"""Models that cannot run right are refused in words, and never run wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_models import FALCON_PACKS, FALLBACK, VOCAB, make

from wim_ext import attention
from wim_ext.cache import PagedKVCache
from wim_ext.errors import ModelNotSupported
from wim_ext.fallback import FallbackModel
from wim_ext.guards import check_causal_lm, check_packable, parity_check, probe_length
from wim_ext.model import PagedModel, Work, open_model

pytestmark = pytest.mark.usefixtures("one_thread")

REFUSED = {
    "falcon": "FalconForCausalLM does not attend through transformers' AttentionInterface",
    "falcon_alibi": "FalconForCausalLM does not attend through transformers' AttentionInterface",
    "bloom": "BloomForCausalLM does not attend through transformers' AttentionInterface",
    "mpt": "MptForCausalLM does not attend through transformers' AttentionInterface",
    "llama4": "Llama4ForCausalLM: layer 0 is of the kind chunked_attention",
    "qwen3_next": "Qwen3NextForCausalLM: 1 of 4 layers attend through transformers' "
    "AttentionInterface; the others keep a state of their own",
    "lfm2": "Lfm2ForCausalLM: 1 of 2 layers attend through transformers' "
    "AttentionInterface; the others keep a state of their own",
    "mamba": "MambaForCausalLM: 0 of 2 layers attend through transformers' "
    "AttentionInterface; the others keep a state of their own",
}

if FALCON_PACKS:
    del REFUSED["falcon"]
    REFUSED["falcon_alibi"] = (
        "FalconForCausalLM fails in chunks and forks: 'NoneType' object has no attribute 'dtype'"
    )


def paged(hf_model: Any) -> PagedModel:
    num_layers = hf_model.config.num_hidden_layers
    cache = PagedKVCache(num_layers=num_layers, num_pages=8, page_size=16, dtype=torch.float32)
    return PagedModel(hf_model, cache)


def test_every_fallback_model_has_its_words() -> None:
    assert REFUSED.keys() == FALLBACK.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_the_packed_path_refuses(name: str) -> None:
    hf_model = make(name)
    with pytest.raises(ModelNotSupported) as error:
        paged(hf_model)
    assert str(error.value) == REFUSED[name]
    assert hf_model.config._attn_implementation == "eager"


def encoder_decoder(kind: str) -> Any:
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 16, "decoder_start_token_id": 0}
    if kind == "t5":
        return hf.T5ForConditionalGeneration(
            hf.T5Config(**sizes, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ).eval()
    config = hf.BartConfig(
        **sizes,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )
    return hf.BartForConditionalGeneration(config).eval()


@pytest.mark.parametrize("path", [paged, FallbackModel, open_model])
@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_encoder_decoders_are_refused_by_name(kind: str, path: Any) -> None:
    text = rf"is an encoder-decoder model \({kind}\); Writing in the Margins needs a decoder-only"
    model = encoder_decoder(kind)
    if path is paged:
        cache = PagedKVCache(num_layers=1, num_pages=8, dtype=torch.float32)
        with pytest.raises(ModelNotSupported, match=text):
            PagedModel(model, cache)
    else:
        with pytest.raises(ModelNotSupported, match=text):
            path(model)


def test_no_language_model_head() -> None:
    with pytest.raises(ModelNotSupported, match="LlamaModel has no language-model head"):
        check_causal_lm(make("llama").model)


def test_no_hugging_face_model() -> None:
    with pytest.raises(ModelNotSupported, match="Linear is not a Hugging Face model; load one"):
        check_causal_lm(torch.nn.Linear(2, 2))


def test_weights_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(make("llama").config).eval()
    text = r"weights are not loaded: model\.embed_tokens\.weight is on the meta device"
    with pytest.raises(ModelNotSupported, match=text):
        check_causal_lm(model)


def test_training_mode() -> None:
    with pytest.raises(ModelNotSupported, match=r"is in training mode.*call \.eval\(\) first"):
        check_causal_lm(make("llama").train())


def test_float64_is_left_to_the_fallback() -> None:
    model = make("llama").double()
    text = "computes in torch.float64; allowed are torch.float32, torch.bfloat16, torch.float16"
    with pytest.raises(ModelNotSupported, match=text):
        check_packable(model)
    with pytest.warns(UserWarning, match=text):
        assert open_model(model).is_fallback


def test_a_model_on_several_devices() -> None:
    model = make("llama")
    model.lm_head.weight = torch.nn.Parameter(torch.empty(VOCAB, 32, device="meta"))
    with pytest.raises(
        ModelNotSupported, match="is spread over cpu, meta; load it onto one device"
    ):
        check_packable(model)


class TestWhatALayerBrings:
    """The attention function refuses what it would have to leave out."""

    @pytest.fixture
    def call(self) -> Any:
        """Calls `attend` as layer 0 of a model; keywords change the call or the config."""
        hf_model = make("mistral")
        module = hf_model.model.layers[0].self_attn
        model = paged(hf_model)

        def run(config: dict[str, Any] | None = None, **changes: Any) -> Any:
            module.config = copy.copy(module.config)
            for name, value in (config or {}).items():
                setattr(module.config, name, value)
            states = {
                "query": torch.zeros(1, 4, 3, 8),
                "key": torch.zeros(1, 2, 3, 8),
                "value": torch.zeros(1, 2, 3, 8),
                "sliding_window": 6,
            }
            batch = model.cache.reserve([(model.new_sequence(), 3)])
            step = attention.Step(model.cache, batch)
            with step.running():
                attention.attend(module, **{**states, **changes})
                return attention.attend(module, **states)

        return run

    def test_a_mask(self, call: Any) -> None:
        with pytest.raises(ModelNotSupported, match="layer 0 brings an attention mask of its own"):
            call(attention_mask=torch.zeros(1, 1, 3, 3))

    def test_a_position_bias(self, call: Any) -> None:
        with pytest.raises(ModelNotSupported, match="layer 0 adds a position bias to its scores"):
            call(position_bias=torch.zeros(1, 4, 3, 3))

    def test_not_causal(self, call: Any) -> None:
        with pytest.raises(ModelNotSupported, match="layer 0 is not causal"):
            call(is_causal=False)

    def test_dropout(self, call: Any) -> None:
        with pytest.raises(ModelNotSupported, match=r"layer 0 uses dropout; call \.eval\(\)"):
            call(dropout=0.1)

    def test_a_window_that_does_not_arrive(self, call: Any) -> None:
        text = "layer 0 has a sliding window that it does not pass on"
        with pytest.raises(ModelNotSupported, match=text):
            call(sliding_window=None)
        with pytest.raises(ModelNotSupported, match=text):
            call({"layer_types": ["sliding_attention"] * 2}, sliding_window=None)

    def test_a_softcap_that_does_not_arrive(self, call: Any) -> None:
        with pytest.raises(ModelNotSupported, match="layer 0 has a softcap that it does not pass"):
            call({"attn_logit_softcapping": 30.0})

    def test_an_unknown_kind_of_layer(self, call: Any) -> None:
        with pytest.raises(ModelNotSupported, match="layer 0 is of the kind indexed_attention"):
            call({"layer_types": ["indexed_attention"] * 2})

    @pytest.mark.parametrize("name", ["head_dim", "v_head_dim"])
    @pytest.mark.parametrize("size", [12, 264])
    def test_head_sizes(self, call: Any, name: str, size: int) -> None:
        changed = {"value": torch.zeros(1, 2, 3, size)}
        if name == "head_dim":
            changed = {
                "query": torch.zeros(1, 4, 3, size),
                "key": torch.zeros(1, 2, 3, size),
            }
        text = f"layer 0 has {name} {size}; allowed are multiples of 8 up to 256"
        with pytest.raises(ModelNotSupported, match=text):
            call(**changed)

    def test_mixed_dtypes(self, call: Any) -> None:
        text = "layer 0 mixes the dtypes torch.bfloat16 and torch.float32"
        with pytest.raises(ModelNotSupported, match=text):
            call(query=torch.zeros(1, 4, 3, 8, dtype=torch.bfloat16))

    def test_a_split_row(self, call: Any) -> None:
        with pytest.raises(ModelNotSupported, match="layer 0 splits the packed row into 3"):
            call(query=torch.zeros(3, 4, 1, 8))

    def test_a_layer_twice(self, call: Any) -> None:
        with pytest.raises(ModelNotSupported, match="layer 0 attends twice in one forward"):
            call()

    def test_a_layer_without_a_number(self) -> None:
        step = attention.Step(None, None)
        states = torch.zeros(1, 1, 1, 8)
        with (
            step.running(),
            pytest.raises(ModelNotSupported, match="Linear does not say which layer it is"),
        ):
            attention.attend(torch.nn.Linear(1, 1), states, states, states)


class TestTheProbe:
    @pytest.mark.parametrize(
        ("name", "tokens"),
        [("llama", 12), ("mistral", 14), ("gemma2", 14), ("llama4", 14)],
    )
    def test_it_leaves_a_short_window_behind(self, name: str, tokens: int) -> None:
        assert probe_length(make(name).config) == tokens

    def test_a_long_window_stays_out_of_reach(self) -> None:
        assert probe_length(make("mistral", sliding_window=4096).config) == 12
        assert probe_length(make("mistral", sliding_window=72).config) == 80
        assert probe_length(make("mistral", sliding_window=73).config) == 12

    def test_a_model_that_ignores_positions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hf_model = make("llama")
        rotary = hf_model.model.rotary_emb
        forward = rotary.forward

        def counted_from_zero(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return forward(x, torch.arange(position_ids.shape[1])[None])

        monkeypatch.setattr(rotary, "forward", counted_from_zero)
        with pytest.raises(
            ModelNotSupported, match=r"LlamaForCausalLM in chunks and forks differs"
        ):
            paged(hf_model)

    def test_a_model_that_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hf_model = make("llama")

        def broken(*args: Any, **options: Any) -> Any:
            raise TypeError("position_ids are not for me")

        monkeypatch.setattr(hf_model.model.layers[1], "forward", broken)
        text = "LlamaForCausalLM fails in chunks and forks: position_ids are not for me"
        with pytest.raises(ModelNotSupported, match=text):
            paged(hf_model)

    def test_rows_that_are_not_finite(self) -> None:
        hf_model = make("llama")
        hf_model.model.norm.weight.data[0] = float("nan")
        with pytest.raises(ModelNotSupported, match=r"relative error inf, allowed 1e-04"):
            paged(hf_model)

    def test_half_precision_passes(self) -> None:
        for name in ("llama", "gemma2", "gpt_oss"):
            for dtype in (torch.bfloat16, torch.float16):
                model = open_model(make(name).to(dtype), num_tokens=64)
                assert not model.is_fallback
                [rows] = model.forward([Work(model.new_sequence(), [1, 2, 3])])
                assert rows.dtype == dtype

    @pytest.mark.parametrize("name", ["llama", "bloom"])
    def test_it_leaves_no_trace(self, name: str) -> None:
        hf_model = make(name)
        model = FallbackModel(hf_model)
        parity_check(model, hf_model, None)
        assert model.tokens_processed > 0
        assert FallbackModel(hf_model).tokens_processed == 0
