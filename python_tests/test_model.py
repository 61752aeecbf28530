"""PagedModel's surface: rows, counters, errors, and what it leaves behind."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, make, plain_logits, run_script

from wim_ext import attention
from wim_ext.cache import PagedKVCache
from wim_ext.errors import CacheFull, ContextTooLong, ModelNotSupported, StaleSequenceError
from wim_ext.fallback import FallbackModel, SlowPathWarning
from wim_ext.model import PagedModel, Work, open_model

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [5, 17, 3, 40, 22, 9, 31]


@pytest.fixture(scope="module")
def llama() -> Any:
    return make("llama")


def paged(hf_model: Any, num_pages: int = 16, page_size: int = 16) -> PagedModel:
    cache = PagedKVCache(
        num_layers=2, num_pages=num_pages, page_size=page_size, dtype=torch.float32
    )
    return PagedModel(hf_model, cache)


@pytest.fixture
def model(llama: Any) -> PagedModel:
    return paged(llama)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


def test_attributes(llama: Any, model: PagedModel) -> None:
    assert model.max_length == 256
    assert model.vocab_size == VOCAB
    assert model.dtype == torch.float32
    assert model.device == torch.device("cpu")
    assert model.num_layers == 2
    assert not model.is_fallback
    assert model.fallback_reason is None
    assert model.can_roll_back
    assert model.tokens_processed == 0
    assert model.total_length is None
    assert model.hf_model is llama


@pytest.mark.parametrize("wanted", range(len(TOKENS) + 1))
def test_only_the_wanted_rows_come_back(llama: Any, model: PagedModel, wanted: int) -> None:
    [rows] = model.forward([Work(model.new_sequence(), TOKENS, wanted)])
    assert rows.shape == (wanted, VOCAB)
    assert rows.dtype == torch.float32
    assert not rows.requires_grad
    if wanted:
        assert close(rows, plain_logits(llama, TOKENS)[-wanted:])


def test_one_row_is_the_default(model: PagedModel) -> None:
    [rows] = model.forward([Work(model.new_sequence(), TOKENS)])
    assert rows.shape == (1, VOCAB)


def test_logits_are_computed_for_wanted_rows_only(llama: Any, model: PagedModel) -> None:
    seen = []
    hook = llama.lm_head.register_forward_hook(lambda *call: seen.append(call[1][0].shape[1]))
    try:
        model.forward(
            [Work(model.new_sequence(), TOKENS, 0), Work(model.new_sequence(), TOKENS, 2)]
        )
    finally:
        hook.remove()
    assert seen == [2]


def test_items_are_independent(llama: Any, model: PagedModel) -> None:
    first, second = model.new_sequence(), model.new_sequence()
    a, b = model.forward([Work(first, TOKENS, 7), Work(second, TOKENS[::-1], 7)])
    assert close(a, plain_logits(llama, TOKENS))
    assert close(b, plain_logits(llama, TOKENS[::-1]))


def test_nothing_to_do(model: PagedModel) -> None:
    sequence = model.new_sequence()
    assert model.forward([]) == []
    [rows] = model.forward([Work(sequence, [], 0)])
    assert rows.shape == (0, VOCAB)
    assert sequence.length == 0
    assert model.tokens_processed == 0


def test_an_empty_item_beside_a_full_one(llama: Any, model: PagedModel) -> None:
    idle, busy = model.new_sequence(), model.new_sequence()
    none, rows = model.forward([Work(idle, [], 0), Work(busy, TOKENS, 7)])
    assert none.shape == (0, VOCAB)
    assert close(rows, plain_logits(llama, TOKENS))


def test_counts_every_row_once(model: PagedModel) -> None:
    trunk = model.new_sequence()
    model.forward([Work(trunk, TOKENS, 0)])
    model.forward([Work(trunk, TOKENS[:2], 1), Work(trunk.fork(3), TOKENS[:4], 0)])
    assert model.tokens_processed == 7 + 2 + 4


def test_free_tokens_counts_whole_pages(model: PagedModel) -> None:
    assert model.free_tokens == 256
    sequence = model.new_sequence()
    model.forward([Work(sequence, TOKENS, 0)])
    assert model.free_tokens == 240
    sequence.release()
    assert model.free_tokens == 256


@pytest.mark.parametrize("wanted", [-1, 8])
def test_too_many_logits(model: PagedModel, wanted: int) -> None:
    sequence = model.new_sequence()
    with pytest.raises(ValueError, match=rf"work\[0\]\.logits is {wanted}; allowed are 0 to 7"):
        model.forward([Work(sequence, TOKENS, wanted)])
    assert sequence.length == 0


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_token_outside_the_vocabulary(model: PagedModel, token: int) -> None:
    sequence = model.new_sequence()
    text = rf"work\[1\]\.tokens holds the id {token}; allowed are 0 to {VOCAB - 1}"
    with pytest.raises(IndexError, match=text):
        model.forward([Work(model.new_sequence(), TOKENS), Work(sequence, [1, token])])
    assert sequence.length == 0


def test_the_same_sequence_twice(model: PagedModel) -> None:
    sequence = model.new_sequence()
    with pytest.raises(ValueError, match=r"work\[1\]\.sequence stands in this step twice"):
        model.forward([Work(sequence, TOKENS), Work(sequence, TOKENS)])
    assert sequence.length == 0


def test_past_the_context(model: PagedModel) -> None:
    sequence = model.new_sequence()
    model.forward([Work(sequence, [1] * 250, 0)])
    with pytest.raises(ContextTooLong, match=r"257 tokens long; the model can attend to 256") as e:
        model.forward([Work(sequence, TOKENS)])
    assert (e.value.needed, e.value.limit) == (257, 256)
    assert sequence.length == 250


def test_released_and_foreign_sequences(llama: Any, model: PagedModel) -> None:
    released = model.new_sequence()
    released.release()
    with pytest.raises(StaleSequenceError):
        model.forward([Work(released, TOKENS)])
    with pytest.raises(StaleSequenceError):
        model.forward([Work(paged(llama).new_sequence(), TOKENS)])


def test_a_full_cache_changes_nothing(llama: Any) -> None:
    model = paged(llama, num_pages=2)
    first, second = model.new_sequence(), model.new_sequence()
    model.forward([Work(first, TOKENS, 0)])
    with pytest.raises(CacheFull):
        model.forward([Work(first, TOKENS, 0), Work(second, TOKENS * 3, 0)])
    assert (first.length, second.length) == (7, 0)
    assert model.tokens_processed == 7
    [rows] = model.forward([Work(first, TOKENS, 7)])
    assert close(rows, plain_logits(llama, TOKENS + TOKENS)[-7:])


@pytest.mark.parametrize("failure", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_failing_step_changes_nothing(
    llama: Any, model: PagedModel, failure: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk = model.new_sequence()
    model.forward([Work(trunk, TOKENS, 0)])
    branch = trunk.fork(5)
    pages = model.cache.free_pages
    calls = []

    def fail_in_the_second_layer(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args)
        if len(calls) == 2:
            raise failure
        return original(*args, **options)

    original = attention.ops.paged_attention
    with monkeypatch.context() as patch:
        patch.setattr(attention.ops, "paged_attention", fail_in_the_second_layer)
        with pytest.raises(type(failure)):
            model.forward([Work(trunk, TOKENS, 0), Work(branch, TOKENS * 3, 0)])
    assert (trunk.length, branch.length) == (7, 5)
    assert model.tokens_processed == 7
    assert llama.config._attn_implementation == "eager"
    model.cache.check_integrity()
    # The branch's private copy of the shared page may stay; nothing else does.
    assert model.cache.free_pages >= pages - 1
    a, b = model.forward([Work(trunk, TOKENS, 7), Work(branch, TOKENS, 7)])
    assert close(a, plain_logits(llama, TOKENS + TOKENS)[-7:])
    assert close(b, plain_logits(llama, TOKENS[:5] + TOKENS)[-7:])


def test_the_model_still_works_by_itself(llama: Any, model: PagedModel) -> None:
    before = plain_logits(llama, TOKENS)
    generate = {"max_new_tokens": 5, "do_sample": False}
    ids = torch.tensor([TOKENS])
    text = llama.generate(ids, **generate)
    run_script(model)
    assert llama.config._attn_implementation == "eager"
    assert torch.equal(plain_logits(llama, TOKENS), before)
    assert torch.equal(llama.generate(ids, **generate), text)
    llama.set_attn_implementation("sdpa")
    try:
        assert close(plain_logits(llama, TOKENS), before)
        assert run_script(model).worst(llama) <= 1e-4
        assert llama.config._attn_implementation == "sdpa"
    finally:
        llama.set_attn_implementation("eager")


def test_greedy_continuation_is_that_of_generate(llama: Any, model: PagedModel) -> None:
    expected = llama.generate(torch.tensor([TOKENS]), max_new_tokens=9, do_sample=False)
    sequence, tokens = model.new_sequence(), list(TOKENS)
    [rows] = model.forward([Work(sequence, tokens)])
    while len(tokens) < expected.shape[1]:
        tokens.append(int(rows[-1].argmax()))
        [rows] = model.forward([Work(sequence, tokens[-1:])])
    assert tokens == expected[0].tolist()


def test_two_wrappers_share_a_model(llama: Any) -> None:
    first, second = paged(llama), paged(llama, page_size=64)
    a, b = first.new_sequence(), second.new_sequence()
    first.forward([Work(a, TOKENS, 0)])
    second.forward([Work(b, TOKENS[::-1], 0)])
    [rows] = first.forward([Work(a, TOKENS, 7)])
    assert close(rows, plain_logits(llama, TOKENS + TOKENS)[-7:])
    [rows] = second.forward([Work(b, TOKENS, 7)])
    assert close(rows, plain_logits(llama, TOKENS[::-1] + TOKENS)[-7:])


def test_threads_take_turns(llama: Any) -> None:
    wrappers = [paged(llama) for _ in range(3)]
    expected = run_script(paged(llama))
    scripts: list[Any] = []
    threads = [
        threading.Thread(target=lambda m=model: scripts.append(run_script(m))) for model in wrappers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(scripts) == 3
    for script in scripts:
        for (_, found), (_, rows) in zip(script.rows, expected.rows, strict=True):
            assert torch.allclose(found, rows, atol=1e-5)


def test_a_call_from_outside_a_step_is_an_error(llama: Any) -> None:
    llama.config._attn_implementation_internal = attention.IMPLEMENTATION
    try:
        with pytest.raises(RuntimeError, match="a PagedModel was using it in another thread"):
            plain_logits(llama, TOKENS)
    finally:
        llama.config._attn_implementation_internal = "eager"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_layers": 3}, "cache has 3 layers, the model 2; make it with PagedKVCache.for_model"),
        ({"dtype": torch.bfloat16}, "cache is torch.bfloat16, the model torch.float32"),
        ({"device": "meta"}, "cache is on meta, the model on cpu; they must agree"),
    ],
)
def test_a_cache_that_does_not_fit(llama: Any, changes: dict[str, Any], text: str) -> None:
    class Described:
        num_layers, dtype, device = 2, torch.float32, torch.device("cpu")
        num_pages, page_size = 4, 16

    cache: Any = Described()
    for name, value in changes.items():
        setattr(cache, name, value)
    with pytest.raises(ValueError, match=text):
        PagedModel(llama, cache)


def test_a_device_with_and_without_a_number(llama: Any, model: PagedModel) -> None:
    class Described:
        num_layers, dtype, device = 2, torch.float32, torch.device("cpu", 0)
        num_pages, page_size = 4, 16

    cache: Any = Described()
    assert PagedModel(llama, cache).device == torch.device("cpu")


def test_the_probe_runs_once_for_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model = make("llama")
    paged(hf_model)
    monkeypatch.setattr("wim_ext.model.parity_check", lambda *_: pytest.fail("probed again"))
    model = paged(hf_model)
    assert model.tokens_processed == 0
    assert model.cache.free_pages == 16
    with pytest.raises(pytest.fail.Exception, match="probed again"):
        paged(make("llama"))


def test_open_model_takes_the_packed_path(llama: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = open_model(llama)
    assert isinstance(model, PagedModel)
    assert model.free_tokens >= 256 + 2048


def test_open_model_sizes_the_cache(llama: Any) -> None:
    model = open_model(llama, num_tokens=100)
    assert model.free_tokens == 128


def test_open_model_falls_back_and_says_so() -> None:
    with pytest.warns(SlowPathWarning, match="over the model's own cache: BloomForCausalLM") as w:
        model = open_model(make("bloom"))
    assert len([x for x in w if x.category is SlowPathWarning]) == 1
    assert w[0].filename == __file__
    assert isinstance(model, FallbackModel)
    assert model.is_fallback
    assert "does not attend through transformers' AttentionInterface" in model.fallback_reason


def test_open_model_never_falls_back() -> None:
    with pytest.raises(ModelNotSupported, match="BloomForCausalLM does not attend through"):
        open_model(make("bloom"), fallback="never")


def test_open_model_always_falls_back(llama: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = open_model(llama, fallback="always")
    assert isinstance(model, FallbackModel)
    assert model.fallback_reason == "it was asked for"


def test_open_model_knows_three_choices(llama: Any) -> None:
    with pytest.raises(ValueError, match="fallback is 'maybe'; allowed are auto, never, always"):
        open_model(llama, fallback="maybe")
