"""The sources of csrc/cuda against the reference, without a GPU: g++ compiles the launchers and
kernels around cuda_shim/, their threads run one after the other, and the tensors are torch's."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cases import DTYPE_NAMES, EDGES, Case, Inputs, Span, build, pairwise
from cuda_shim.emulated import EmulatedOps
from kit import (
    LAYOUTS,
    ROW_LAYOUTS,
    assert_bitwise_equal,
    only_writes,
    unchanged,
)
from oracle import assert_right, expected
from torch import Tensor

from wim_ext import ops, reference

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the shim")

MAX_COST = 6e6  # of an emulated case; the larger ones are for a GPU


def cost(case: Case) -> float:
    """Emulated steps: every thread makes the scores of its row again for its slice of V."""
    pairs = sum(s.q * s.kv for s in case.spans) * case.num_heads
    return pairs * (case.v_head_dim / 8) * (case.head_dim / 8 + 12)


CASES = [case for case in (*pairwise(), *EDGES) if cost(case) <= MAX_COST]


@pytest.fixture
def cuda() -> Iterator[EmulatedOps]:
    result = EmulatedOps()
    yield result
    result.order()


def attend(
    cuda: EmulatedOps, inputs: Inputs, num_threads: int = 4, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    plan = ops.plan_attention(*inputs.tables, **inputs.plan_options, num_threads=num_threads)
    options = {k: v for k, v in inputs.options.items() if k not in ("causal", "window_size")}
    out = inputs.output() if out is None else out
    lse = torch.full((inputs.case.num_heads, len(inputs.query)), torch.nan)
    cuda.paged_attention(*inputs.args[:4], plan=plan.tensor, out=out, lse=lse, **options)
    return out, lse


class TestAttention:
    @pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
    def test_matches_the_reference(self, cuda: EmulatedOps, case: Case) -> None:
        """Slots that no sequence holds are NaN, unused table entries nonsense, gaps NaN."""
        assert_right(expected(case), *attend(cuda, build(case)))

    def test_the_cases_cover_the_axes(self) -> None:
        """Leaving out the dear ones left every option in."""
        assert len(CASES) >= 160
        for dtype in DTYPE_NAMES:
            mine = [c for c in CASES if c.dtype == dtype]
            assert {c.layout for c in mine} == set(LAYOUTS)
            assert {c.rows for c in mine} == set(ROW_LAYOUTS)
            assert {c.alibi for c in mine} == {"none", "heads", "batch"}
            assert {c.scales for c in mine} == {"none", "one", "heads"}
            assert {c.softcap > 0 for c in mine} == {c.sinks for c in mine} == {True, False}
            assert any(c.v_head_dim != c.head_dim for c in mine)
        assert any("staircase" in c.name for c in CASES)
        assert any("refilled" in c.name for c in CASES)

    @pytest.mark.parametrize("rows", ROW_LAYOUTS)
    def test_writes_only_its_output(self, cuda: EmulatedOps, rows: str) -> None:
        case = Case(f"only_writes_{rows}", (Span(9, 40), Span(1, 600)), rows=rows, sinks=True)
        inputs = build(case)
        out = inputs.output()
        with unchanged(inputs.query, inputs.k_cache, inputs.v_cache), only_writes(out):
            attend(cuda, inputs, out=out)

    def test_without_lse(self, cuda: EmulatedOps) -> None:
        inputs = build(Case("no_lse", (Span(5, 20),)))
        plan = ops.plan_attention(*inputs.tables, **inputs.plan_options)
        out = inputs.output()
        cuda.paged_attention(*inputs.args[:4], plan=plan.tensor, out=out)
        assert_bitwise_equal(out, attend(cuda, inputs)[0])


# In float32: rounding to 16 bits would hide most differences.
SPLIT = Case(
    "split", (Span(1, 2100), Span(3, 1030), Span(2, 1025, 1, 1024), Span(40, 700), Span(0, 9)),
    torch.float32, 4, 2, 32, 32, 48, "hnd", sinks=True, softcap=20.0, alibi="heads",
)  # fmt: skip


class TestBitwise:
    """A row's bits never depend on the plan, on its neighbours or on how threads are run."""

    @pytest.fixture
    def whole(self, cuda: EmulatedOps) -> tuple[Inputs, Tensor, Tensor]:
        inputs = build(SPLIT)
        return inputs, *attend(cuda, inputs, num_threads=1)

    @pytest.mark.parametrize("num_threads", [2, 16, 132])
    def test_any_plan(self, cuda: EmulatedOps, whole, num_threads: int) -> None:
        inputs, *want = whole
        for a, b in zip(attend(cuda, inputs, num_threads), want, strict=True):
            assert_bitwise_equal(a, b, f"a plan for {num_threads} blocks")

    def test_the_plans_differ(self, whole) -> None:
        inputs = whole[0]
        partials = [
            ops.plan_attention(*inputs.tables, **inputs.plan_options, num_threads=n).report.partials
            for n in (1, 132)
        ]
        assert partials[0] < partials[1]

    @pytest.mark.parametrize("grid", [1, 7])
    @pytest.mark.parametrize("last_thread_first", [False, True])
    def test_any_order_and_grid(
        self, cuda: EmulatedOps, whole, last_thread_first: bool, grid: int
    ) -> None:
        inputs, *want = whole
        cuda.order(last_thread_first=last_thread_first, largest_grid=grid)
        for a, b in zip(attend(cuda, inputs), want, strict=True):
            assert_bitwise_equal(a, b, "another order of threads")

    def test_alone(self, cuda: EmulatedOps, whole) -> None:
        inputs, out, lse = whole
        for b, span in enumerate(SPLIT.spans):
            rows = slice(*inputs.cu_seqlens_q[b : b + 2].tolist())
            alone = Inputs(
                SPLIT, inputs.query[rows], inputs.k_cache, inputs.v_cache,
                inputs.block_table[b : b + 1], torch.tensor([0, span.q], dtype=torch.int32),
                inputs.seqused_k[b : b + 1], inputs.options, inputs.used,
            )  # fmt: skip
            mine, my_lse = attend(cuda, alone)
            assert_bitwise_equal(mine, out[rows], f"sequence {b} alone")
            assert_bitwise_equal(my_lse, lse[:, rows].contiguous(), f"lse of sequence {b} alone")


class TestSpecialValues:
    """Infinities and NaN, as softmax treats them (rule R5)."""

    def run(self, cuda: EmulatedOps, change, **options) -> tuple[Tensor, Tensor, Inputs]:
        inputs = build(Case("special", (Span(6, 30),), torch.float32, 2, 1, 16, 16, 8, **options))
        slots = [divmod(j, 8) for j in range(30)]
        where = [(int(inputs.block_table[0, page]), slot) for page, slot in slots]
        change(inputs, where)
        return *attend(cuda, inputs, num_threads=1), inputs

    def check(self, found: tuple[Tensor, Tensor, Inputs]) -> None:
        out, lse, inputs = found
        want, want_lse = reference.paged_attention(
            *inputs.args, **inputs.options, return_lse=True, out_dtype=torch.float64
        )
        torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5, equal_nan=True)

    def test_minus_infinite_scores_have_no_weight(self, cuda: EmulatedOps) -> None:
        def change(inputs: Inputs, where) -> None:
            inputs.query[..., 0] = 1.0
            for page, slot in (where[0], where[9]):
                inputs.k_cache[page, slot] = 0.0
                inputs.k_cache[page, slot, :, 0] = -torch.inf

        found = self.run(cuda, change)
        assert found[0].isfinite().all()
        self.check(found)

    @pytest.mark.parametrize("sinks", [False, True])
    def test_only_minus_infinite_scores(self, cuda: EmulatedOps, sinks: bool) -> None:
        def change(inputs: Inputs, where) -> None:
            inputs.query[..., 0] = 1.0
            for page, slot in where:
                inputs.k_cache[page, slot] = 0.0
                inputs.k_cache[page, slot, :, 0] = -torch.inf

        found = self.run(cuda, change, sinks=sinks)
        assert bool(found[0].isnan().all()) is not sinks
        self.check(found)

    @pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_stays_in_the_rows_that_see_it(
        self, cuda: EmulatedOps, cache: str, value: float
    ) -> None:
        def change(inputs: Inputs, where) -> None:
            page, slot = where[27]  # rows at 24 .. 29: the last three see it
            getattr(inputs, cache)[page, slot] = value

        found = self.run(cuda, change)
        assert found[0][:3].isfinite().all()
        assert not found[0][3:].isfinite().any()

    def test_a_nan_query_row(self, cuda: EmulatedOps) -> None:
        def change(inputs: Inputs, where) -> None:
            inputs.query[2, 1, 3] = torch.nan

        out, lse, _ = self.run(cuda, change)
        assert out[2, 1].isnan().all()
        assert lse[1, 2].isnan()
        assert out.isnan().sum() == 16
        assert lse.isnan().sum() == 1


def test_bc16_the_longest_sequence(cuda: EmulatedOps) -> None:
    """2^31 - 1 keys, all on one page: the end of the last cell is no 32-bit number."""
    length, page_size = 2**31 - 1, 256
    inputs = build(
        Case("longest", (Span(1, 255),), torch.float32, 1, 1, 8, 8, page_size, window_size=(3, -1))
    )
    near, _ = attend(cuda, inputs)
    inputs.block_table = inputs.block_table[:, :1].expand(1, -(-length // page_size)).contiguous()
    inputs.seqused_k[0] = length
    assert_bitwise_equal(attend(cuda, inputs)[0], near)


def test_bc15_int64_offsets(cuda: EmulatedOps, tmp_path: Path) -> None:
    """A sparse cache whose last page lies beyond 2^31 elements, written, copied and read."""
    stride = 2**30 + 8
    elements = 3 * stride
    storage = torch.UntypedStorage.from_file(
        str(tmp_path / "sparse"), shared=True, nbytes=2 * elements
    )
    flat = torch.empty(0, dtype=torch.bfloat16).set_(storage)
    cache = flat.as_strided((3, 4, 1, 8), (stride, 8, 8, 1))
    key = torch.arange(32.0).reshape(4, 1, 8).bfloat16()
    cuda.append_kv(key, key, cache, cache, torch.arange(8, 12))
    assert_bitwise_equal(cache[2].contiguous(), key)
    assert not cache[:2].any()
    cuda.copy_pages([cache], torch.tensor([2]), torch.tensor([0]))
    assert_bitwise_equal(cache[0].contiguous(), key)
    inputs = build(Case("far", (Span(2, 4),), torch.bfloat16, 1, 1, 8, 8, 4))
    inputs.block_table[0, 0] = 0
    near = attend(cuda, Inputs(**{**vars(inputs), "k_cache": cache, "v_cache": cache}))
    inputs.block_table[0, 0] = 2
    far = attend(cuda, Inputs(**{**vars(inputs), "k_cache": cache, "v_cache": cache}))
    assert_bitwise_equal(near[0], far[0])
