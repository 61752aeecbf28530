"""A row's result is the same to the bit, whatever it is computed together with.

One trunk of 1,100 tokens (two cells of 512 keys and a bit, in the plan's terms) is computed in one
piece; then its rows come in chunks, one by one, in batches with rows of other lengths of the same
trunk (what branches and piggy-backed decodes are), with every plan. All must give the bits of the
one piece.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from cases import Case, Inputs, Span, build
from kit import assert_bitwise_equal, threads
from torch import Tensor

from wim_ext import ops

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 1100
TRUNK = (Span(LENGTH, LENGTH),)
f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
CASES = [
    Case("bits-plain", TRUNK, f32, 6, 2, 64, 64, 16),
    Case("bits-own_layout", TRUNK, bf16, 9, 3, 64, 64, 64, "v_transposed", "fused"),
    Case("bits-mqa_odd_page", TRUNK, f16, 7, 1, 80, 96, 48, "hnd"),
    Case("bits-window", TRUNK, bf16, 4, 2, 32, 64, 32, "padded", window_size=(50, -1)),
    Case("bits-options", TRUNK, f32, 8, 2, 128, 64, 64, "v_transposed", "padded",
         softcap=5.0, alibi="heads", sinks=True, scales="heads", sharpness=4.0),
    Case("bits-one_token_pages", TRUNK, bf16, 3, 3, 64, 64, 1, "packed"),
]  # fmt: skip
CHUNKINGS = [
    [550, 550],
    [1099, 1],
    [1, 1099],
    [256, 256, 256, 256, 76],
    [17, 500, 3, 480, 100],
    [*[1] * 20, 1000, *[4] * 20],
]


def attend(x: Inputs, pieces: list[tuple[int, int]], **more) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of the rows begin..end of the trunk, each piece as a sequence of one batch."""
    starts = [0]
    for begin, end in pieces:
        starts.append(starts[-1] + end - begin)
    query = torch.cat([x.query[begin:end] for begin, end in pieces])
    tables = (
        x.block_table.expand(len(pieces), -1).contiguous(),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([end for _, end in pieces], dtype=torch.int32),
    )
    if "plan_threads" in more:
        count = more.pop("plan_threads")
        more["plan"] = ops.plan_attention(*tables, **x.plan_options, num_threads=count)
    out, lse = ops.paged_attention(
        query, x.k_cache, x.v_cache, *tables, **x.options, **more, return_lse=True
    )
    return [(out[a:b], lse[:, a:b]) for a, b in itertools.pairwise(starts)]


def check(x: Inputs, whole: tuple[Tensor, Tensor], pieces: list[tuple[int, int]], **more) -> None:
    for (begin, end), (out, lse) in zip(pieces, attend(x, pieces, **more), strict=True):
        what = f"rows {begin}..{end} with {len(pieces) - 1} others"
        assert_bitwise_equal(out, whole[0][begin:end], what)
        assert_bitwise_equal(lse, whole[1][:, begin:end], what)


@pytest.fixture(params=CASES, ids=lambda c: c.name, scope="module")
def trunk(request) -> tuple[Inputs, tuple[Tensor, Tensor]]:
    x = build(request.param)
    [whole] = attend(x, [(0, LENGTH)])
    return x, whole


@pytest.mark.parametrize("sizes", CHUNKINGS, ids=lambda s: "-".join(map(str, s[:5])))
def test_chunked(trunk, sizes):
    x, whole = trunk
    begin = 0
    for size in sizes:
        check(x, whole, [(begin, begin + size)])
        begin += size


@pytest.mark.parametrize("sizes", CHUNKINGS, ids=lambda s: "-".join(map(str, s[:5])))
def test_all_chunks_in_one_batch(trunk, sizes):
    x, whole = trunk
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    check(x, whole, [(end - size, end) for size, end in zip(sizes, ends, strict=True)])


def test_piggy_backed(trunk):
    # a chunk of the trunk, and branches that decode on it, in any order of the batch
    x, whole = trunk
    pieces = [
        (900, 1060),
        (99, 100),
        (511, 513),
        (1023, 1024),
        (64, 65),
        (1025, 1042),
        (1059, 1060),
    ]
    for rotation in range(0, len(pieces), 2):
        check(x, whole, pieces[rotation:] + pieces[:rotation])


def test_random_batches(trunk):
    x, whole = trunk
    pick = random.Random(0)
    for _ in range(8):
        pieces = []
        for _ in range(pick.randint(1, 12)):
            begin = pick.randrange(LENGTH)
            size = pick.choice([1, 1, 2, 5, 17, 64, 250])
            pieces.append((begin, min(begin + size, LENGTH)))
        check(x, whole, pieces, plan_threads=pick.randint(1, 16))


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_thread_counts(trunk, count):
    x, whole = trunk
    with threads(count):
        check(x, whole, [(0, LENGTH)])
        check(x, whole, [(1000, 1100), (99, 100), (711, 712)])


@pytest.mark.parametrize("count", range(1, 17))
def test_plans_for_other_thread_counts(trunk, count):
    x, whole = trunk
    check(x, whole, [(900, 1100), (150, 151), (1023, 1025)], plan_threads=count)


def test_sequences_without_rows_or_keys_among_others(trunk):
    x, whole = trunk
    check(x, whole, [(0, 0), (40, 80), (10, 10), (1099, 1100), (0, 0)])


def test_many_repeats(trunk):
    # A race between threads shows as a difference now and then.
    x, whole = trunk
    with threads(4):
        for _ in range(15):
            check(x, whole, [(980, 1060), (1059, 1060), (620, 621)])


def test_pool_position_does_not_matter(trunk):
    # The same tokens in other pages, as after a copy or a reload.
    x, whole = trunk
    num_pages = len(x.k_cache)
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1))
    k, v = torch.empty_like(x.k_cache), torch.empty_like(x.v_cache)
    k[order], v[order] = x.k_cache.clone(), x.v_cache.clone()
    table = x.block_table.clone()
    used = -(-LENGTH // x.case.page_size)
    table[0, :used] = order[table[0, :used].long()].int()
    out = ops.paged_attention(x.query, k, v, table, *x.tables[1:], **x.options)
    assert_bitwise_equal(out, whole[0])
