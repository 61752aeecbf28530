"""What each case's result must be, computed once, and the judgement of a result against it."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from cases import Case, Inputs, build
from kit import assert_matches, threads
from torch import Tensor

from wim_ext import reference


@dataclass(frozen=True)
class Expected:
    out: Tensor  # [total_q, num_heads, v_head_dim] float64
    lse: Tensor  # [num_heads, total_q] float64
    naive: Tensor | None  # float32 cases: what plain float32 arithmetic makes of it
    keys_seen: Tensor  # [total_q]


@functools.lru_cache(maxsize=512)
def expected(case: Case) -> Expected:
    return expected_of(build(case))


def expected_of(inputs: Inputs) -> Expected:
    with threads(1):
        out, lse = reference.paged_attention(
            *inputs.args, **inputs.options, return_lse=True, out_dtype=torch.float64
        )
        naive = None
        if inputs.case.dtype == torch.float32:
            naive = reference.paged_attention(
                *inputs.args, **inputs.options, compute_dtype=torch.float32
            )
    return Expected(out, lse, naive, inputs.keys_seen)


def assert_right(want: Expected, out: Tensor, lse: Tensor | None) -> None:
    assert_matches(
        out, want.out, keys_seen=want.keys_seen, naive=want.naive, lse=lse, exact_lse=want.lse
    )
