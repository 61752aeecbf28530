"""Real weights: SmolLM2-135M-Instruct over pages against plain forwards of the same tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from wim_ext.loading import load
from wim_ext.model import PagedModel, Work, open_model

TEXT = (
    "Maria keeps her keys in a blue jar beside the door. The jar was a gift of her aunt, who had "
    "bought it at the market of a small town by the sea. On Fridays the town has a market, and on "
    "other days it is quiet. When Maria leaves the house in the morning, she takes the keys, locks "
    "the door twice, and walks down to the harbour, where the ferry waits."
)
QUESTION = " Question: where does Maria keep her keys? Answer: Maria keeps her keys in a blue"


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest) -> Any:
    if request.param == "float32":
        return request.getfixturevalue("smollm2")
    return load(dtype=request.param)


@pytest.fixture(scope="module")
def paths(loaded: Any) -> dict[str, Any]:
    """Logits of a trunk and of a branch, by pages and by two ways of transformers' own."""
    encode = loaded.tokenizer.encode
    document, question = encode(TEXT), encode(QUESTION)
    branch_tokens = document[:50] + question
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine two threads mostly wait for each other
    try:
        model = open_model(loaded.model, num_tokens=1024)
        assert isinstance(model, PagedModel)
        return {
            "model": model,
            "tokenizer": loaded.tokenizer,
            "ours": torch.cat(run(model, document, question)),
            "sdpa": plain(loaded.model, "sdpa", document, branch_tokens),
            "eager": plain(loaded.model, "eager", document, branch_tokens),
        }
    finally:
        torch.set_num_threads(threads)


def run(
    model: PagedModel, document: list[int], question: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefill in chunks, a fork in the middle of a page, a rollback, a refill, mixed steps."""
    trunk, half = model.new_sequence(), len(question) // 2
    rows = model.forward([Work(trunk, document[:50], 50)])
    branch = trunk.fork()
    head = [rows[0]]
    first, more = model.forward(
        [Work(branch, question[:half], half), Work(trunk, document[50:70], 20)]
    )
    rows.append(more)
    branch.rollback(50 + half - 3)
    head.append(first[: half - 3])
    again, more = model.forward(
        [
            Work(branch, question[half - 3 : -1], len(question) - half + 2),
            Work(trunk, document[70:], len(document) - 70),
        ]
    )
    rows.append(more)
    trunk.rollback(60)
    [last] = model.forward([Work(branch, question[-1:], 1)])
    return torch.cat(rows), torch.cat([*head, again, last])


def plain(hf_model: Any, implementation: str, *texts: list[int]) -> torch.Tensor:
    before = hf_model.config._attn_implementation
    hf_model.set_attn_implementation(implementation)
    try:
        with torch.no_grad():
            return torch.cat(
                [hf_model(input_ids=torch.tensor([t]), use_cache=False).logits[0] for t in texts]
            )
    finally:
        hf_model.set_attn_implementation(before)


def test_rows_agree_as_far_as_transformers_agrees_with_itself(paths: dict[str, Any]) -> None:
    ours, sdpa, eager = (paths[name].float() for name in ("ours", "sdpa", "eager"))
    assert ours.shape == sdpa.shape
    floor = (eager - sdpa).abs()
    found = (ours - sdpa).abs()
    if paths["model"].dtype == torch.float32:
        assert found.max() <= 1e-4 * sdpa.abs().max()
    # The typical difference is stable enough to be held to the floor; the largest one is not.
    assert found.mean() <= 1.5 * floor.mean() + 1e-6
    assert found.max() <= 3 * floor.max() + 1e-5


def test_the_likeliest_token_is_the_same(paths: dict[str, Any]) -> None:
    ours, sdpa, eager = (paths[name].argmax(-1) for name in ("ours", "sdpa", "eager"))
    if paths["model"].dtype == torch.float32:
        assert torch.equal(ours, sdpa)
    else:
        assert (ours != sdpa).sum() <= (eager != sdpa).sum() + 4


def test_it_answers_from_a_branch(paths: dict[str, Any]) -> None:
    tokenizer = paths["tokenizer"]
    assert tokenizer.decode(paths["ours"][-1].argmax().item()) == " jar"


def test_nothing_ran_twice(paths: dict[str, Any]) -> None:
    tokenizer = paths["tokenizer"]
    tokens = len(tokenizer.encode(TEXT)) + len(tokenizer.encode(QUESTION))
    assert paths["model"].tokens_processed == tokens + 3  # three were rolled back on purpose
