"""The fallback: the same surface and the same logits over the model's own cache."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_models import (
    FALLBACK,
    RECURRENT,
    VOCAB,
    make,
    plain_logits,
    run_forward_only_script,
    run_script,
)

from wim_ext import history
from wim_ext.errors import ContextTooLong, ModelNotSupported, StaleSequenceError
from wim_ext.fallback import FallbackModel
from wim_ext.work import Work

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4  # of the largest |logit|, float32
TOKENS = [5, 17, 3, 40, 22, 9, 31]


@pytest.fixture(scope="module")
def bloom() -> Any:
    return make("bloom")


@pytest.fixture(scope="module")
def hybrid() -> Any:
    return make("lfm2")


@pytest.fixture
def model(bloom: Any) -> FallbackModel:
    return FallbackModel(bloom)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


@pytest.mark.parametrize("name", [n for n in FALLBACK if n not in RECURRENT])
def test_script_gives_the_logits_of_plain_forwards(name: str) -> None:
    hf_model = make(name)
    model = FallbackModel(hf_model)
    assert model.can_roll_back
    assert run_script(model).worst(hf_model) <= TOLERANCE


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_models_fork_and_commit(name: str) -> None:
    hf_model = make(name)
    model = FallbackModel(hf_model)
    assert not model.can_roll_back
    assert run_forward_only_script(model).worst(hf_model) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"])
def test_packed_models_run_on_it_too(name: str) -> None:
    """Windowed layers keep every token here, so they can be rolled back as well."""
    hf_model = make(name)
    model = FallbackModel(hf_model)
    assert model.can_roll_back
    assert run_script(model).worst(hf_model) <= TOLERANCE


def test_longrope_is_pinned_to_the_total_length() -> None:
    hf_model = make("phi3_longrope")
    model = FallbackModel(hf_model, total_length=48)
    assert model.total_length == 48
    assert run_script(model).worst(hf_model) <= TOLERANCE


def test_attributes(bloom: Any, model: FallbackModel) -> None:
    assert model.is_fallback
    assert model.fallback_reason == "it was asked for"
    assert FallbackModel(bloom, "because").fallback_reason == "because"
    assert model.max_length is None
    assert FallbackModel(make("mpt")).max_length == 256
    assert model.vocab_size == VOCAB
    assert model.dtype == torch.float32
    assert model.device == torch.device("cpu")
    assert model.tokens_processed == 0
    assert model.free_tokens == sys.maxsize
    assert model.total_length is None
    assert model.hf_model is bloom


@pytest.mark.parametrize("name", ["bloom", "mamba"])
def test_only_the_wanted_rows_come_back(name: str) -> None:
    hf_model = make(name)
    model = FallbackModel(hf_model)
    expected = plain_logits(hf_model, TOKENS[:2] + TOKENS)
    for wanted in range(len(TOKENS) + 1):
        sequence = model.new_sequence()
        model.forward([Work(sequence, TOKENS[:2], 0)])
        [rows] = model.forward([Work(sequence, TOKENS, wanted)])
        assert rows.shape == (wanted, VOCAB)
        assert not rows.requires_grad
        if wanted:
            assert close(rows, expected[-wanted:])


def test_mamba_goes_one_token_at_a_time() -> None:
    """Its own continued forward of several tokens is wrong; its plain forward decides."""
    hf_model = make("mamba")
    model = FallbackModel(hf_model)
    steps = []
    hook = hf_model.register_forward_pre_hook(
        lambda _, args, options: steps.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    sequence = model.new_sequence()
    model.forward([Work(sequence, TOKENS)])
    model.forward([Work(sequence, TOKENS[:3])])
    hook.remove()
    assert steps == [7, 1, 1, 1]
    assert model.tokens_processed == 10


def test_empty_items(model: FallbackModel) -> None:
    assert model.forward([]) == []
    sequence = model.new_sequence()
    [rows] = model.forward([Work(sequence, [], 0)])
    assert rows.shape == (0, VOCAB)
    assert sequence.length == 0
    assert model.tokens_processed == 0


def test_refuses_what_the_packed_path_refuses(model: FallbackModel) -> None:
    sequence = model.new_sequence()
    with pytest.raises(ValueError, match=r"work\[0\]\.logits is 8; allowed are 0 to 7"):
        model.forward([Work(sequence, TOKENS, 8)])
    with pytest.raises(IndexError, match=rf"work\[0\]\.tokens holds the id {VOCAB}"):
        model.forward([Work(sequence, [VOCAB])])
    with pytest.raises(ValueError, match=r"work\[1\]\.sequence stands in this step twice"):
        model.forward([Work(sequence, [1]), Work(sequence, [1])])
    assert sequence.length == 0
    mpt = FallbackModel(make("mpt"))
    with pytest.raises(ContextTooLong, match="257 tokens long; the model can attend to 256"):
        mpt.forward([Work(mpt.new_sequence(), [1] * 257)])


def test_released_and_foreign_sequences(bloom: Any, model: FallbackModel) -> None:
    sequence = model.new_sequence()
    assert not sequence.released
    sequence.release()
    sequence.release()
    assert sequence.released
    with pytest.raises(StaleSequenceError, match="the sequence has been released"):
        model.forward([Work(sequence, TOKENS)])
    with pytest.raises(StaleSequenceError, match="the sequence has been released"):
        sequence.fork()
    with pytest.raises(StaleSequenceError, match="the sequence has been released"):
        sequence.rollback(0)
    with pytest.raises(StaleSequenceError, match="the sequence belongs to another model"):
        model.forward([Work(FallbackModel(bloom).new_sequence(), TOKENS)])
    with pytest.raises(StaleSequenceError, match="the sequence belongs to another model"):
        model.forward([Work("text", TOKENS)])


def test_a_with_block_releases(model: FallbackModel) -> None:
    with model.new_sequence() as sequence:
        model.forward([Work(sequence, TOKENS)])
    with pytest.raises(StaleSequenceError):
        sequence.fork()


@pytest.mark.parametrize("name", ["bloom", "lfm2"])
def test_a_failing_step_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model = make(name)
    model = FallbackModel(hf_model)
    first, second = model.new_sequence(), model.new_sequence()
    model.forward([Work(first, TOKENS, 0), Work(second, TOKENS[::-1], 0)])
    calls = []

    def fail_at_the_second_item(module: Any, args: Any, output: Any) -> None:
        calls.append(output)
        if len(calls) == 2:
            raise RuntimeError("broken")

    hook = hf_model.register_forward_hook(fail_at_the_second_item)
    with pytest.raises(RuntimeError, match="broken"):
        model.forward([Work(first, TOKENS), Work(second, TOKENS)])
    hook.remove()
    assert (first.length, second.length, model.tokens_processed) == (7, 7, 14)
    [rows] = model.forward([Work(first, TOKENS[::-1], 7)])
    assert close(rows, plain_logits(hf_model, TOKENS + TOKENS[::-1])[-7:])


@pytest.mark.parametrize("length", [-1, 8])
def test_lengths_outside_the_sequence(model: FallbackModel, length: int) -> None:
    sequence = model.new_sequence()
    model.forward([Work(sequence, TOKENS)])
    with pytest.raises(ValueError, match=rf"fork length is {length}; allowed are 0 to 7"):
        sequence.fork(length)
    with pytest.raises(ValueError, match=rf"rollback length is {length}; allowed are 0 to 7"):
        sequence.rollback(length)
    assert sequence.length == 7


def test_recurrent_states_do_not_go_back(hybrid: Any) -> None:
    model = FallbackModel(hybrid)
    sequence = model.new_sequence()
    model.forward([Work(sequence, TOKENS)])
    text = "{} to 3 of 7 tokens: Lfm2ForCausalLM has recurrent states, which cannot go back"
    with pytest.raises(ValueError, match=text.format("rollback")):
        sequence.rollback(3)
    with pytest.raises(ValueError, match=text.format("fork")):
        sequence.fork(3)
    sequence.rollback(7)
    assert sequence.fork(7).length == 7
    sequence.rollback(0)
    [rows] = model.forward([Work(sequence, TOKENS, 7)])
    assert close(rows, plain_logits(hybrid, TOKENS))


class TestCommit:
    @pytest.fixture
    def pair(self, model: FallbackModel) -> tuple[Any, Any]:
        trunk = model.new_sequence()
        model.forward([Work(trunk, TOKENS)])
        branch = trunk.fork(5)
        model.forward([Work(branch, [1, 2, 3])])
        return trunk, branch

    def test_at_the_fork_point(self, bloom: Any, model: FallbackModel, pair: Any) -> None:
        trunk, branch = pair
        trunk.rollback(5)
        trunk.commit(branch)
        assert trunk.length == 8
        with pytest.raises(StaleSequenceError):
            branch.fork()
        [rows] = model.forward([Work(trunk, [4], 1)])
        assert close(rows, plain_logits(bloom, [*TOKENS[:5], 1, 2, 3, 4])[-1:])

    def test_elsewhere(self, pair: Any) -> None:
        trunk, branch = pair
        text = "has 7 tokens, the branch was forked at 5; roll back to the fork point"
        with pytest.raises(ValueError, match=text):
            trunk.commit(branch)
        assert (trunk.length, branch.length) == (7, 8)

    @pytest.mark.parametrize("who", [0, 1])
    def test_after_a_rollback_below_the_fork_point(
        self, model: FallbackModel, pair: Any, who: int
    ) -> None:
        trunk, branch = pair
        pair[who].rollback(4)
        model.forward([Work(pair[who], [9])])
        trunk.rollback(min(trunk.length, 5))
        with pytest.raises(ValueError, match="one of them was rolled back below the fork point"):
            trunk.commit(branch)

    def test_a_stranger(self, model: FallbackModel, pair: Any) -> None:
        trunk, branch = pair
        with pytest.raises(ValueError, match="branch was not forked from this sequence"):
            branch.commit(trunk)
        with pytest.raises(ValueError, match="branch was not forked from this sequence"):
            model.new_sequence().commit(branch.fork())
        with pytest.raises(ValueError, match="branch is None; allowed is a FallbackSequence"):
            trunk.commit(None)


def test_a_fork_shares_keys_and_clones_states(hybrid: Any) -> None:
    model = FallbackModel(hybrid)
    trunk = model.new_sequence()
    model.forward([Work(trunk, TOKENS)])
    branch = trunk.fork()
    convolution, attention = zip(trunk._cache.layers, branch._cache.layers, strict=True)
    assert attention[0].keys.data_ptr() == attention[1].keys.data_ptr()
    assert convolution[0].conv_states[0].data_ptr() != convolution[1].conv_states[0].data_ptr()


def test_forks_are_forgotten_when_they_go(model: FallbackModel) -> None:
    trunk = model.new_sequence()
    model.forward([Work(trunk, TOKENS)])
    for _ in range(3):
        trunk.fork()
    gc.collect()
    assert len(trunk._forks) == 0


class TestHistory:
    def test_windowed_layers_keep_every_token(self) -> None:
        cache = history.new_history(make("gpt_oss").config)
        assert [type(layer).__name__ for layer in cache.layers] == ["DynamicLayer"] * 2
        assert history.can_crop(cache)

    def test_lists_and_unknown_caches_are_copied_whole(self) -> None:
        class Own:
            states = None

        own = Own()
        own.states = [torch.ones(2)]
        twin = history.shared_copy(own)
        twin.states[0][0] = 7
        assert own.states[0].tolist() == [1, 1]
        assert not history.can_crop(own)
        layer = history.new_history(make("llama").config).layers[0]
        layer.extra = [torch.ones(1), {"a": torch.ones(1)}, "text"]
        copied = history._layer_copy(layer)
        copied.extra[0][0] = copied.extra[1]["a"][0] = 5
        assert layer.extra[0].item() == layer.extra[1]["a"].item() == 1


def test_no_cache_argument() -> None:
    config = hf.RwkvConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32
    )
    with pytest.raises(ModelNotSupported, match="RwkvForCausalLM has no cache to continue from"):
        FallbackModel(hf.RwkvForCausalLM(config).eval())


def test_a_model_that_keeps_its_cache_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model = make("llama")

    def cacheless(_: Any, args: Any, output: Any) -> Any:
        output["cache"] = output["past_key_values"] = None
        return output

    hook = hf_model.register_forward_hook(cacheless)
    with pytest.raises(ModelNotSupported, match="LlamaForCausalLM: the model does not give its"):
        FallbackModel(hf_model)
    hook.remove()


def test_a_model_that_cannot_be_continued_right() -> None:
    hf_model = make("llama")

    def position_in_the_chunk(_: Any, args: Any, options: Any) -> Any:
        count = options["input_ids"].shape[1]
        options["position_ids"] = torch.arange(count)[None]
        return args, options

    hook = hf_model.model.register_forward_pre_hook(position_in_the_chunk, with_kwargs=True)
    with pytest.raises(
        ModelNotSupported, match="in chunks and forks differs from its plain forward"
    ):
        FallbackModel(hf_model)
    hook.remove()
