"""The ops may be called from several Python threads at once; results are those of one thread.

torch releases the GIL around an op, so the calls really run at the same time.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import Case, Span, build
from kit import assert_bitwise_equal, threads

from wim_ext import ops

NUM_THREADS, ROUNDS = 4, 30
SPANS = (Span(40, 300), Span(1, 280, 0, 270), Span(7, 191, 0, 190), Span(1, 1100))
CASES = [
    Case("threads-0", SPANS, torch.float32, 6, 2, 64, 64, 16),
    Case("threads-1", SPANS, torch.bfloat16, 4, 2, 64, 64, 64, "v_transposed"),
    Case("threads-2", SPANS, torch.float16, 8, 1, 96, 32, 32, "hnd", sinks=True, softcap=4.0),
    Case(
        "threads-3", SPANS[3:], torch.bfloat16, 3, 3, 128, 128, 48, "padded", window_size=(99, -1)
    ),
]


def at_once(*works):
    """Run the functions in threads that start together; the first error is raised."""
    start = threading.Barrier(len(works))

    def run(work):
        start.wait(timeout=30)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [f.result(timeout=120) for f in [pool.submit(run, w) for w in works]]


@pytest.mark.parametrize("intra_op", [1, 2])
def test_different_calls(intra_op):
    inputs = [build(c) for c in CASES]
    with threads(intra_op):
        expected = [ops.paged_attention(*x.args, **x.options, return_lse=True) for x in inputs]

        def work(i):
            for r in range(ROUNDS):
                k = (i + r) % len(CASES)  # so every case meets every other
                x = inputs[k]
                found = ops.paged_attention(*x.args, **x.options, return_lse=True)
                for mine, wanted in zip(found, expected[k], strict=True):
                    assert_bitwise_equal(mine, wanted, x.case.name)

        at_once(*(lambda i=i: work(i) for i in range(NUM_THREADS)))


def test_one_plan_for_all():
    x = build(CASES[0])
    plan = ops.plan_attention(*x.tables, **x.plan_options)
    expected = ops.paged_attention(*x.args, **x.options)

    def work():
        for _ in range(ROUNDS):
            assert_bitwise_equal(ops.paged_attention(*x.args, **x.options, plan=plan), expected)

    at_once(*[work] * NUM_THREADS)


def test_plans_made_at_once():
    inputs = [build(c) for c in CASES]
    expected = [ops.plan_attention(*x.tables, **x.plan_options).tensor for x in inputs]

    def work(i):
        for r in range(ROUNDS):
            k = (i + r) % len(CASES)
            found = ops.plan_attention(*inputs[k].tables, **inputs[k].plan_options)
            assert_bitwise_equal(found.tensor, expected[k])

    at_once(*(lambda i=i: work(i) for i in range(NUM_THREADS)))


def test_writers_of_disjoint_pages_of_one_cache():
    """Each thread appends to, copies and reads pages of its own in a cache that all share."""
    k_cache, v_cache = (torch.zeros(4 * NUM_THREADS, 16, 2, 32) for _ in range(2))

    def work(i):
        g = torch.Generator().manual_seed(i)
        first = 4 * i
        for _ in range(ROUNDS):
            key, value = (torch.randn(32, 2, 32, generator=g) for _ in range(2))
            slots = torch.arange(first * 16, (first + 2) * 16)
            ops.append_kv(key, value, k_cache, v_cache, slots)
            pages = torch.tensor([first, first + 1])
            ops.copy_pages([k_cache, v_cache], pages, pages + 2)
            for cache, wanted in ((k_cache, key), (v_cache, value)):
                mine = cache[first : first + 4].reshape(2, 32, 2, 32)
                assert_bitwise_equal(mine[0], wanted)
                assert_bitwise_equal(mine[1], wanted)

    at_once(*(lambda i=i: work(i) for i in range(NUM_THREADS)))


def test_errors_stay_in_their_thread():
    x = build(CASES[0])
    expected = ops.paged_attention(*x.args, **x.options)

    def good():
        for _ in range(ROUNDS):
            assert_bitwise_equal(ops.paged_attention(*x.args, **x.options), expected)

    def bad():
        text = r"^seqused_k\[0\] must not be negative, found -1$"
        for _ in range(ROUNDS):
            with pytest.raises(ValueError, match=text):
                ops.paged_attention(*x.args[:5], torch.full_like(x.seqused_k, -1), **x.options)

    at_once(good, bad, good, bad)


def test_calls_really_overlap():
    """While one long call runs, another thread gets through many short ones."""
    long = build(Case("threads-long", (Span(700, 4000),), torch.float32, 4, 1, 128, 128, 64))
    short = build(Case("threads-short", (Span(1, 5),)))
    finished = threading.Event()
    counted = []

    def slow():
        ops.paged_attention(*long.args)
        finished.set()

    def quick():
        count = 0
        while not finished.is_set():
            ops.paged_attention(*short.args)
            count += 1
        counted.append(count)

    with threads(1):
        at_once(slow, quick)
    assert counted[0] > 10
