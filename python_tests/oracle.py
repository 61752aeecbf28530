"""What each case's result must be, computed once, and the judgement of a result against it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from unittest import mock

import torch
from cases import Case, Inputs, build
from kit import assert_matches, threads
from torch import Tensor

from wim_ext import reference

MAX_SCORES = 5_000_000  # above, summing one by one takes seconds


@dataclass(frozen=True)
class Expected:
    out: Tensor  # [total_q, num_heads, v_head_dim] float64
    lse: Tensor  # [num_heads, total_q] float64
    naive: tuple[Tensor, ...]  # float32 cases: what plain float32 arithmetic makes of it
    keys_seen: Tensor  # [total_q]


@functools.lru_cache(maxsize=512)
def expected(case: Case) -> Expected:
    return expected_of(build(case))


def expected_of(inputs: Inputs) -> Expected:
    with threads(1):
        out, lse = reference.paged_attention(
            *inputs.args, **inputs.options, return_lse=True, out_dtype=torch.float64
        )
        naive = _naive(inputs) if inputs.case.dtype == torch.float32 else ()
    return Expected(out, lse, naive, inputs.keys_seen)


def _naive(inputs: Inputs) -> tuple[Tensor, ...]:
    """The reference in float32, its dot products summed in blocks (as a BLAS does) and one by one
    (as a loop does) in several orders. One sum's luck is no measure: a decode has few of them.
    """

    def attend() -> Tensor:
        out, _ = reference.paged_attention(
            *inputs.args, **inputs.options, return_lse=True, compute_dtype=torch.float32
        )
        return out

    results = [attend()]
    if inputs.case.num_heads * sum(s.q * s.kv for s in inputs.case.spans) <= MAX_SCORES:
        dims = [*range(inputs.case.head_dim)]
        for order in (dims, dims[::-1], dims[::2] + dims[1::2]):
            dot = functools.partial(_dot_one_by_one, order)
            with mock.patch.object(reference, "_dot", dot):
                results.append(attend())
    return tuple(results)


def _dot_one_by_one(order: list[int], q: Tensor, k: Tensor) -> Tensor:
    total = q.new_zeros(q.shape[0], q.shape[1], k.shape[0])
    for a, b in zip(q[..., order].unbind(-1), k[:, order].unbind(-1), strict=True):
        total += a[..., None] * b
    return total


def assert_right(want: Expected, out: Tensor, lse: Tensor | None) -> None:
    assert_matches(
        out, want.out, keys_seen=want.keys_seen, naive=want.naive, lse=lse, exact_lse=want.lse
    )
