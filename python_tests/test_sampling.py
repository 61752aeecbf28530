"""Choosing tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wim_ext.sampling import Sampler, Sampling


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def chosen(logits: torch.Tensor, count: int = 400, **options: object) -> set[int]:
    sampler = Sampler(Sampling(**{"temperature": 1.0, "seed": 1, **options}))
    return {sampler.choose(logits, "a test") for _ in range(count)}


def test_greedy_takes_the_lowest_id_of_equal_ones() -> None:
    sampler = Sampler(Sampling())
    assert sampler.choose(row(0, 3, 1, 3), "a test") == 1
    assert sampler.choose(torch.zeros(1000), "a test") == 0
    assert sampler.choose(row(-math.inf, -5, -math.inf), "a test") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rows(dtype: torch.dtype) -> None:
    assert Sampler(Sampling()).choose(row(1, 2, 2).to(dtype), "a test") == 1


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([-math.inf, -math.inf], "only -inf"),
        ([0.0, math.nan], r"NaN or \+inf"),
        ([0.0, math.inf], r"NaN or \+inf"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_choice_name_the_step(
    values: list[float], found: str, temperature: float
) -> None:
    sampler = Sampler(Sampling(temperature=temperature))
    match = f"no token can be chosen at token 3 of margins: the logits hold {found}"
    with pytest.raises(ValueError, match=match):
        sampler.choose(row(*values), "token 3 of margins")


@pytest.mark.parametrize("tiny", [1e-4, 1e-40, 5e-324])
def test_tiny_temperatures_are_greedy(tiny: float) -> None:
    assert chosen(row(0, 1, 0.99), count=20, temperature=tiny) == {1}


def test_tiny_top_p_keeps_the_best() -> None:
    assert chosen(row(0, 1, 0.9), count=50, top_p=1e-4) == {1}


def test_top_k_and_top_p_and_min_p_keep_what_they_say() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.3, 0.1]))
    assert chosen(logits) == {0, 1, 2, 3}
    assert chosen(logits, top_k=2) == {1, 2}
    assert chosen(logits, top_k=99) == {0, 1, 2, 3}
    # 0.5 alone does not reach 0.6; of the two equal last ones the lower id comes first.
    assert chosen(logits, top_p=0.6) == {1, 2}
    assert chosen(logits, top_p=0.85) == {0, 1, 2}
    assert chosen(logits, min_p=0.5) == {1, 2}
    assert chosen(logits, min_p=1.0) == {1}


def test_impossible_tokens_are_never_drawn() -> None:
    assert chosen(row(-math.inf, 0, 0, -math.inf)) == {1, 2}


def test_frequencies_follow_the_probabilities() -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=3))
    logits = torch.log(torch.tensor([0.2, 0.8]))
    ones = sum(sampler.choose(logits, "a test") for _ in range(2000))
    assert abs(ones / 2000 - 0.8) < 0.04


def test_a_seed_repeats_and_streams_differ() -> None:
    def draws(seed: int, stream: int = 0) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), stream)
        return [sampler.choose(torch.zeros(1000), "a test") for _ in range(8)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)
    assert draws(5) != draws(5, stream=1)
    assert draws(-5) == draws(-5)


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    chosen(torch.zeros(10), count=5)
    chosen(torch.zeros(10), count=5, seed=None)
    assert torch.equal(before, torch.random.get_rng_state())


def test_without_a_seed_draws_differ() -> None:
    def draws() -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0))
        return [sampler.choose(torch.zeros(100_000), "a test") for _ in range(4)]

    assert draws() != draws()


@given(
    values=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=30),
    temperature=st.floats(1e-6, 1e6),
    top_p=st.floats(1e-6, 1.0),
    top_k=st.integers(0, 40),
    min_p=st.floats(0.0, 1.0),
)
@settings(max_examples=150, deadline=None)
def test_any_setting_chooses_a_token(
    values: list[float], temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    sampling = Sampling(temperature, top_p, top_k, min_p, seed=0)
    assert 0 <= Sampler(sampling).choose(row(*values), "a test") < len(values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more and finite, got -0.1"),
        ({"temperature": math.nan}, "temperature must be 0 or more and finite, got nan"),
        ({"temperature": math.inf}, "temperature must be 0 or more and finite, got inf"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1, got 1.1"),
        ({"top_k": -1}, r"top_k must be 0 \(off\) or more, got -1"),
        ({"min_p": -0.5}, "min_p must be between 0 and 1, got -0.5"),
        ({"min_p": math.nan}, "min_p must be between 0 and 1, got nan"),
    ],
)
def test_settings_outside_their_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
