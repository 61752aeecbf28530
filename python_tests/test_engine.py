"""Packing work into forwards, and generating."""

from __future__ import annotations

import pytest
import torch
from wim_kit import ScriptedModel, byte_level_tokenizer

from wim_ext.engine import Engine, Task, released
from wim_ext.events import Stats
from wim_ext.generation import Generation
from wim_ext.sampling import Sampler, Sampling
from wim_ext.tokens import TextCodec

CODEC = TextCodec(byte_level_tokenizer())
END = CODEC.tokenizer.eos_token_id
HEADER = CODEC.encode_template("<|im_start|>assistant\n")


def model(reply: str = "Yes it is.") -> ScriptedModel:
    return ScriptedModel(CODEC.tokenizer, lambda text: reply)


def generation(**options: object) -> Generation:
    settings = {"phase": "margins", "max_tokens": 50, "stop_ids": frozenset([END]), **options}
    return Generation(CODEC, Sampler(Sampling()), **settings)


def prompt(text: str) -> list[int]:
    return CODEC.encode(text) + HEADER


def test_a_prompt_is_fed_in_chunks_and_counted() -> None:
    scripted, stats = model(), Stats()
    sequence = scripted.new_sequence()
    task = Task(sequence, [5] * 23, "document")
    steps = list(Engine(scripted, prefill_chunk=10).run(task, stats))
    assert scripted.forwards == [[(0, 10)], [(10, 10)], [(20, 3)]]
    assert len(steps) == stats.forwards == 3
    assert stats.tokens["document"] == stats.total_tokens == scripted.tokens_processed == 23
    assert stats.seconds["document"] > 0
    assert stats.total_seconds == stats.seconds["document"]
    assert task.last_fed == 3
    assert task.logits.numel() == 0


@pytest.mark.parametrize("rows", [1, 3, 7, 12])
@pytest.mark.parametrize("chunk", [1, 5, 100])
def test_the_last_rows_of_logits_cross_chunks(rows: int, chunk: int) -> None:
    scripted = model()
    scripted.likely = lambda tokens: {0: float(len(tokens))}
    task = Task(scripted.new_sequence(), [5] * 12, "classification", rows=rows)
    for _ in Engine(scripted, chunk).run(task, Stats()):
        pass
    assert task.logits[:, 0].tolist() == [float(n) for n in range(13 - rows, 13)]


def test_a_reply_ends_at_the_stop_token_without_a_forward_for_it() -> None:
    scripted, stats = model("Yes."), Stats()
    writing = generation()
    tokens = prompt("Is it?")
    task = Task(scripted.new_sequence(), list(tokens), "extraction_prompts", writing)
    for _ in Engine(scripted).run(task, stats):
        pass
    assert (writing.text, writing.stop_reason) == ("Yes.", "end")
    assert writing.tokens == [*CODEC.encode("Yes."), END]
    # All tokens of the reply but the stop token were fed.
    assert task.sequence.tokens == tokens + CODEC.encode("Yes.")
    assert stats.tokens["margins"] == len(writing.tokens) - 1
    assert stats.tokens["extraction_prompts"] == len(tokens)
    assert stats.total_tokens == scripted.tokens_processed


def test_a_reply_ends_at_its_length_without_a_wasted_forward() -> None:
    scripted, stats = model("Yes it is, and more."), Stats()
    writing = generation(max_tokens=3)
    task = Task(scripted.new_sequence(), prompt("?"), "final_prompt", writing)
    for _ in Engine(scripted).run(task, stats):
        pass
    assert writing.stop_reason == "length"
    assert len(writing.tokens) == 3
    assert stats.tokens["margins"] == 2
    assert stats.forwards == 3


def test_any_of_several_end_tokens_stops() -> None:
    other = CODEC.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    writing = generation(stop_ids=frozenset([END, other]))
    logits = torch.zeros(len(CODEC.tokenizer))
    logits[other] = 1
    assert writing.accept(logits) == other
    assert writing.stop_reason == "end"


def written(text: str, **options: object) -> Generation:
    scripted, writing = model(text), generation(**options)
    task = Task(scripted.new_sequence(), prompt("?"), "final_prompt", writing)
    for _ in Engine(scripted).run(task, Stats()):
        pass
    return writing


@pytest.mark.parametrize(
    ("stops", "text"),
    [
        (["\n\n"], "One two."),
        (["two", "One t"], ""),
        (["three."], "One two.\n\nTwo "),
        (["nowhere"], "One two.\n\nTwo three."),
        (["three. "], "One two.\n\nTwo three."),
    ],
)
def test_stop_strings_cut_the_text(stops: list[str], text: str) -> None:
    writing = written("One two.\n\nTwo three.", stop_strings=stops)
    assert writing.text == text
    assert writing.stop_reason == ("end" if "three." in text else "stop_string")


def test_the_begin_of_a_stop_string_is_held_back() -> None:
    scripted, writing = model("a STOX STOP b"), generation(stop_strings=["STOP"])
    task = Task(scripted.new_sequence(), prompt("?"), "final_prompt", writing)
    pieces = []
    for _ in Engine(scripted).run(task, Stats()):
        pieces.append(writing.take())
        assert "STOP".startswith("".join(pieces)[7:])
    assert "".join(pieces) == writing.text == "a STOX "


def test_enough_ends_a_reply_early() -> None:
    writing = written("NO, because it is.", enough=lambda text: text.startswith("NO,"))
    assert writing.stop_reason == "enough"
    assert writing.text == "NO,"


def test_an_unusable_row_names_the_token() -> None:
    writing = generation()
    writing.accept(torch.zeros(4))
    with pytest.raises(ValueError, match="no token can be chosen at token 2 of margins"):
        writing.accept(torch.full((4,), float("nan")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be 1 or more, got 0"),
        ({"stop_strings": ["a", ""]}, "stop_strings must not hold an empty text"),
    ],
)
def test_bad_generation_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generation(**options)


def test_a_chunk_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="prefill_chunk must be 1 or more, got 0"):
        Engine(model(), prefill_chunk=0)


def test_tasks_share_a_forward_and_get_the_same_as_alone() -> None:
    scripted, stats = model("Yes it is."), Stats()
    engine = Engine(scripted, prefill_chunk=8)
    writings = [generation(), generation(max_tokens=2), generation()]
    tasks = [
        Task(scripted.new_sequence(), prompt("x" * n), "extraction_prompts", w)
        for n, w in zip((3, 9, 1), writings, strict=True)
    ]
    tasks.append(Task(scripted.new_sequence(), [7] * 40, "document"))
    while not all(task.done for task in tasks):
        engine.step(tasks, stats)
    assert [w.text for w in writings] == ["Yes it is.", writings[1].text, "Yes it is."]
    assert all(sum(n for _, n in forward) <= 8 for forward in scripted.forwards)
    # Nobody starves: every task that has tokens gets at least one in each forward.
    assert len(scripted.forwards[0]) == 4
    assert tasks[3].sequence.tokens == [7] * 40
    assert stats.total_tokens == scripted.tokens_processed


def test_more_tasks_than_the_chunk_has_rows_all_advance() -> None:
    scripted = model()
    tasks = [Task(scripted.new_sequence(), [5, 6], "document") for _ in range(5)]
    Engine(scripted, prefill_chunk=2).step(tasks, Stats())
    assert [len(task.pending) for task in tasks] == [1] * 5


def test_nothing_to_do_is_no_forward() -> None:
    scripted = model()
    Engine(scripted).step([Task(scripted.new_sequence(), [], "document")], Stats())
    assert scripted.forwards == []


def test_a_failed_forward_leaves_the_task_as_it_was() -> None:
    scripted, stats = model(), Stats()
    scripted.fail_at = 0
    task = Task(scripted.new_sequence(), [5, 6], "document")
    with pytest.raises(RuntimeError, match="the model failed"):
        Engine(scripted).step([task], stats)
    assert (task.pending, stats.total_tokens, stats.forwards) == ([5, 6], 0, 0)
    scripted.fail_at = None
    Engine(scripted).step([task], stats)
    assert task.done


def test_released_gives_back_whatever_happens() -> None:
    scripted = model()
    with pytest.raises(KeyboardInterrupt), released(scripted.new_sequence()):
        raise KeyboardInterrupt
    assert scripted.live == []
