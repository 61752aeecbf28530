"""merge_states: exact where a side is empty, within rounding elsewhere, never a NaN of its own."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import FLOOR, LSE_RELATIVE, ROUNDINGS, assert_bitwise_equal, only_writes, rows_like

from wim_ext import ops, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INF, NAN = math.inf, math.nan


def states(seed, tokens=13, heads=3, dim=24, dtype=torch.float32, rows="contiguous", empty=0.25):
    """Two random states; a quarter of the rows of each is empty, so 1 in 16 is empty in both."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(2):
        lse = torch.randn(heads, tokens, generator=g) * 5
        out = rows_like(rows, tokens, heads, dim, dtype)
        out.copy_(torch.randn(out.shape, generator=g))
        gone = torch.rand(heads, tokens, generator=g) < empty
        lse[gone] = -INF
        out.masked_fill_(gone.t()[..., None], 0.0)
        made += [out, lse]
    return made


def check(found, args):
    """R1, R2 and R3 of kit.py, R4 for the empty rows."""
    out, lse = found
    exact_args = [a.double() for a in args]
    want_out, want_lse = reference.merge_states(*exact_args)
    rounding = (want_out.to(out.dtype).double() - want_out).abs().max()
    error = (out.double() - want_out).abs().max()
    assert error <= ROUNDINGS * rounding + FLOOR
    empty = want_lse == -INF
    assert (lse[empty] == -INF).all()
    assert (out.transpose(0, 1)[empty] == 0).all()
    relative = (lse.double() - want_lse).abs() / want_lse.abs().clamp(min=1)
    assert float(relative[~empty].max()) <= LSE_RELATIVE


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ["contiguous", "fused", "head_major", "padded"])
def test_equals_reference(rows, dtype):
    args = states(1, dtype=dtype, rows=rows)
    check(ops.merge_states(*args), args)


@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(1, 1, 8), (1, 9, 64), (300, 5, 128), (7, 2, 256)]
)
def test_sizes(tokens, heads, dim):
    args = states(2, tokens, heads, dim)
    check(ops.merge_states(*args), args)


def test_no_rows():
    out, lse = ops.merge_states(*states(3, tokens=0))
    assert out.shape == (0, 3, 24)
    assert lse.shape == (3, 0)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shift=st.floats(-1e4, 1e4, width=32),
    dtype=st.sampled_from(DTYPES),
)
def test_property(seed, shift, dtype):
    args = states(seed, tokens=5, heads=2, dim=8, dtype=dtype)
    args[1] += shift
    args[3] -= shift
    found = ops.merge_states(*args)
    assert not found[0].isnan().any()
    assert not found[1].isnan().any()
    check(found, args)
    # The order of the two does not matter, to the bit.
    for a, b in zip(found, ops.merge_states(*args[2:], *args[:2]), strict=True):
        assert_bitwise_equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_leaves_the_other_as_it_is(dtype):
    out, lse, *_ = states(4, dtype=dtype)
    nothing = torch.zeros_like(out), torch.full_like(lse, -INF)
    for merged in (ops.merge_states(out, lse, *nothing), ops.merge_states(*nothing, out, lse)):
        assert_bitwise_equal(merged[0], out)
        assert_bitwise_equal(merged[1], lse)


def test_out_of_an_empty_state_is_not_read():
    out, lse, *_ = states(5, empty=0.0)
    unwritten = torch.full_like(out, NAN), torch.full_like(lse, -INF)
    for merged in (ops.merge_states(out, lse, *unwritten), ops.merge_states(*unwritten, out, lse)):
        assert_bitwise_equal(merged[0], out)
        assert_bitwise_equal(merged[1], lse)


@pytest.mark.parametrize("where", [0, 1, 2, 3])
def test_nan_is_loud_and_stays_in_its_row(where):
    args = states(6, empty=0.0)
    clean = [t.clone() for t in ops.merge_states(*args)]
    args[where][(1, 2) if where % 2 else (2, 1)] = NAN  # token 2 of head 1
    out, lse = ops.merge_states(*args)
    assert out[2, 1].isnan().any()
    out[2, 1], lse[1, 2] = clean[0][2, 1], clean[1][1, 2]
    assert_bitwise_equal(out, clean[0])
    assert_bitwise_equal(lse, clean[1])


def test_far_apart_states_do_not_overflow():
    out_a, out_b = torch.ones(1, 1, 8), torch.full((1, 1, 8), 3.0)
    high, low = torch.full((1, 1), 3e38), torch.full((1, 1), -3e38)
    out, lse = ops.merge_states(out_a, high, out_b, low)
    assert_bitwise_equal(out, out_a)
    assert_bitwise_equal(lse, high)
    out, lse = ops.merge_states(out_a, low, out_b, low)
    assert_bitwise_equal(out, torch.full((1, 1, 8), 2.0))
    assert lse.item() == pytest.approx(-3e38)


@pytest.mark.parametrize("rows", ["fused", "head_major", "padded"])
def test_out_and_lse_are_written_and_nothing_else(rows):
    args = states(7, dtype=torch.bfloat16)
    expected = ops.merge_states(*args)
    out = rows_like(rows, 13, 3, 24, torch.bfloat16)
    lse = torch.empty(5, 13 + 4)[1:4, 2:15]
    with only_writes(out), only_writes(lse):
        found = ops.merge_states(*args, out=out, lse=lse)
        assert found[0] is out
        assert found[1] is lse
    assert_bitwise_equal(out, expected[0])
    assert_bitwise_equal(lse, expected[1])


@pytest.mark.parametrize("side", [0, 2])
def test_in_place(side):
    args = states(8)
    expected = ops.merge_states(*args)
    ops.merge_states(*args, out=args[side], lse=args[side + 1])
    assert_bitwise_equal(args[side], expected[0])
    assert_bitwise_equal(args[side + 1], expected[1])


def test_many_parts_make_the_whole():
    """Attention over 7 runs of keys, merged in any order, is attention over all of them."""
    g = torch.Generator().manual_seed(9)
    k, v = (torch.randn(7, 16, 2, 32, generator=g) for _ in range(2))
    query = torch.randn(1, 4, 32, generator=g)
    cu = torch.tensor([0, 1], dtype=torch.int32)

    def attend(pages):
        table = torch.tensor([pages], dtype=torch.int32)
        length = torch.tensor([16 * len(pages)], dtype=torch.int32)
        return reference.paged_attention(query, k, v, table, cu, length, return_lse=True)

    whole = attend([0, 1, 2, 3, 4, 5, 6])
    for order in ([0, 1, 2, 3, 4, 5, 6], [6, 2, 0, 4, 5, 1, 3]):
        state = torch.zeros(1, 4, 32), torch.full((4, 1), -INF)
        for page in order:
            state = ops.merge_states(*state, *attend([page]))
        torch.testing.assert_close(state, whole, rtol=1e-6, atol=1e-6)
