"""Does the parity matrix bite? Planted faults must each be rejected by cases of every run."""

from __future__ import annotations

import functools

import pytest
import torch
from cases import EDGES, PROFILES, Case, Inputs, build, pairwise
from faulty_attention import FAULTS, TILE, attention
from kit import threads
from oracle import assert_right, expected

pytestmark = pytest.mark.usefixtures("one_thread")


def num_steps(case: Case) -> int:
    """How many key tiles the faulty attention walks: what a case costs it."""
    return case.num_heads * sum(-(-s.kv // TILE) for s in case.spans)


@functools.cache
def cheap_cases() -> tuple[Case, ...]:
    return tuple(sorted((c for c in (*pairwise(), *EDGES) if num_steps(c) < 100), key=num_steps))


@functools.cache
def inputs_of(case: Case) -> Inputs:
    return build(case)


def is_rejected(case: Case, fault: str | None) -> bool:
    with threads(1):
        out, lse = attention(inputs_of(case), fault)
    try:
        assert_right(expected(case), out, lse)
    except AssertionError:
        return True
    return False


def has_option(case: Case, option: str) -> bool:
    if option == "window":
        return case.window_size != (-1, -1)
    return not option or option in inputs_of(case).options


def test_without_a_fault_nothing_is_rejected():
    # so a rejection below is the fault's doing
    assert [c.name for c in cheap_cases()[::4] if is_rejected(c, None)] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_rejected(fault):
    cases = [c for c in cheap_cases() if has_option(c, FAULTS[fault])]
    rejecting = (c.name for c in cases if is_rejected(c, fault))
    caught = [name for name, _ in zip(rejecting, range(3), strict=False)]
    assert len(caught) == 3, f"only {caught} of {len(cases)} cases reject {fault}"


@pytest.mark.parametrize("profile", ["decode_long", "decode_longest"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_key_of_thousands_is_missed(profile, dtype):
    # The usual absolute tolerance of 1.5e-2 would let this pass, lse or not. In bfloat16 a key of
    # little weight may hide behind the weights' rounding: there the lse tells.
    case = Case(f"one-of-{profile}", PROFILES[profile], dtype, 8, 2, 64, 64, 64)
    with threads(1):
        out, lse = attention(inputs_of(case), "drops_last_key")
    with pytest.raises(AssertionError, match=r"error .* above .* \(R1, R2\)|R3"):
        assert_right(expected(case), out, lse if dtype == torch.bfloat16 else None)
