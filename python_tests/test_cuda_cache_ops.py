"""The small ops of csrc/cuda against the reference, without a GPU: see cuda_shim/."""

from __future__ import annotations

import ctypes
import math
import shutil
from collections.abc import Iterator

import pytest
import torch
from cases import DTYPE_NAMES
from cuda_shim import emulated
from cuda_shim.emulated import EmulatedOps
from kit import (
    LAYOUTS,
    LSE_RELATIVE,
    ROUNDINGS,
    ROW_LAYOUTS,
    assert_bitwise_equal,
    rows_like,
    storage_bytes,
)
from torch import Tensor

from wim_ext import reference

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile the shim")


@pytest.fixture
def cuda() -> Iterator[EmulatedOps]:
    result = EmulatedOps()
    yield result
    result.order()


def test_the_mirrored_structs_have_the_sizes_of_the_real_ones() -> None:
    mirrored = [
        emulated.AppendKvParams,
        emulated.PageShape,
        emulated.MergeStatesParams,
        emulated.AttentionParams,
    ]
    sizes = [emulated.load().emulated_size(i) for i in range(len(mirrored))]
    assert [ctypes.sizeof(struct) for struct in mirrored] == sizes


def filled(layout: str, sizes: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    views = LAYOUTS[layout](*sizes, dtype)
    for view in views:
        view.copy_(torch.randn(view.shape, generator=generator))
    return list(views)


def assert_same_storages(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Gaps included, so nothing else was written."""
    for mine, right in zip(ours, theirs, strict=True):
        assert_bitwise_equal(storage_bytes(mine), storage_bytes(right), "cache storage")


class TestAppendKv:
    @pytest.mark.parametrize("dtype", DTYPE_NAMES)
    @pytest.mark.parametrize("rows", ROW_LAYOUTS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_equals_the_reference(
        self, cuda: EmulatedOps, layout: str, rows: str, dtype: torch.dtype
    ) -> None:
        sizes = (5, 7, 3, 24, 16)
        slots = torch.tensor([34, 0, -1, 13, 6, 7, -1])
        new = [rows_like(rows, len(slots), 3, dim, dtype) for dim in sizes[3:]]
        for i, t in enumerate(new):
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(i)))
        ours, theirs = (filled(layout, sizes, dtype, 7) for _ in range(2))
        cuda.append_kv(*new, *ours, slots)
        reference.append_kv(*new, *theirs, slots)
        assert_same_storages(ours, theirs)

    def test_no_tokens(self, cuda: EmulatedOps) -> None:
        ours, theirs = (filled("nhd", (2, 4, 1, 8, 8), torch.float32, 0) for _ in range(2))
        nothing = torch.empty(0, 1, 8)
        cuda.append_kv(nothing, nothing, *ours, torch.empty(0, dtype=torch.int64))
        assert_same_storages(ours, theirs)


class TestCopyPages:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("page_size", [1, 7, 64])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layers_in_one_call(
        self, cuda: EmulatedOps, layout: str, page_size: int, dtype: torch.dtype
    ) -> None:
        def make() -> list[Tensor]:
            """The second layer's pages are smaller."""
            dims = [(3, 24, 16), (1, 8, 8)]
            return [t for d in dims for t in filled(layout, (6, page_size, *d), dtype, 3)]

        src, dst = torch.tensor([5, 0, 0]), torch.tensor([1, 4, 3])
        ours, theirs = make(), make()
        cuda.copy_pages(ours, src, dst)
        reference.copy_pages(theirs, src, dst)
        assert_same_storages(ours, theirs)

    @pytest.mark.parametrize(
        "dtype", [torch.uint8, torch.float16, torch.int32, torch.float64, torch.complex128]
    )
    @pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 2, 3, 2), (6, 0, 4), (6, 16)])
    def test_any_width_and_rank(
        self, cuda: EmulatedOps, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        def make() -> list[Tensor]:
            return [torch.arange(math.prod(shape)).reshape(shape).to(dtype)]

        src, dst = torch.tensor([5, 2]), torch.tensor([0, 3])
        ours, theirs = make(), make()
        cuda.copy_pages(ours, src, dst)
        reference.copy_pages(theirs, src, dst)
        assert_same_storages(ours, theirs)

    @pytest.mark.parametrize("offset", [1, 2, 4, 8])
    def test_unaligned_pages(self, cuda: EmulatedOps, offset: int) -> None:
        """Pages that start at any byte, so that wide elements must not be used."""
        ours, theirs = (torch.arange(201, dtype=torch.uint8)[offset : offset + 192] for _ in "ab")
        src, dst = torch.tensor([2]), torch.tensor([0])
        cuda.copy_pages([ours.view(3, 64)], src, dst)
        reference.copy_pages([theirs.view(3, 64)], src, dst)
        assert_same_storages([ours], [theirs])

    def test_nothing_to_copy(self, cuda: EmulatedOps) -> None:
        cache = torch.arange(6.0)
        cuda.copy_pages([cache], torch.empty(0, dtype=torch.int64), torch.empty(0).long())
        assert_bitwise_equal(cache, torch.arange(6.0))


class TestMergeStates:
    def states(self, dtype: torch.dtype, rows: str) -> list[Tensor]:
        """A quarter of the rows of each state is empty and holds NaN, as memory may."""
        generator = torch.Generator().manual_seed(11)
        made = []
        for _ in range(2):
            lse = 5 * torch.randn(3, 29, generator=generator)
            out = rows_like(rows, 29, 3, 24, dtype)
            out.copy_(torch.randn(out.shape, generator=generator))
            empty = torch.rand(3, 29, generator=generator) < 0.25
            lse[empty] = -torch.inf
            out.masked_fill_(empty.t()[..., None], torch.nan)
            made += [out, lse]
        return made

    @pytest.mark.parametrize("dtype", DTYPE_NAMES)
    @pytest.mark.parametrize("rows", ROW_LAYOUTS)
    def test_equals_the_reference(self, cuda: EmulatedOps, rows: str, dtype: torch.dtype) -> None:
        args = self.states(dtype, rows)
        out, lse = cuda.merge_states(*args, out=rows_like(rows, 29, 3, 24, dtype))
        want, want_lse = reference.merge_states(*(a.double() for a in args))
        rounding = (want.to(dtype).double() - want).abs().max()
        assert (out.double() - want).abs().max() <= ROUNDINGS * rounding + 1e-6
        empty = want_lse == -torch.inf
        assert bool(empty.any())
        assert (lse[empty] == -torch.inf).all()
        relative = (lse.double() - want_lse).abs() / want_lse.abs().clamp(min=1)
        assert relative[~empty].max() <= LSE_RELATIVE

    def test_one_empty_side_leaves_the_other_to_the_bit(self, cuda: EmulatedOps) -> None:
        out_a, lse_a, out_b, lse_b = self.states(torch.float32, "contiguous")
        out_b.copy_(torch.randn(out_b.shape)), lse_b.copy_(torch.randn(lse_b.shape))
        out_b[0, 0, 0] = -0.0
        out, lse = cuda.merge_states(out_a, torch.full_like(lse_a, -torch.inf), out_b, lse_b)
        assert_bitwise_equal(out, out_b)
        assert_bitwise_equal(lse, lse_b)

    @pytest.mark.parametrize("onto", [0, 2])
    @pytest.mark.parametrize("last_thread_first", [False, True])
    def test_in_place(self, cuda: EmulatedOps, onto: int, last_thread_first: bool) -> None:
        args = self.states(torch.bfloat16, "fused")
        want = cuda.merge_states(*args)
        cuda.order(last_thread_first=last_thread_first)
        found = cuda.merge_states(*args, out=args[onto], lse=args[onto + 1])
        assert_bitwise_equal(found[0].contiguous(), want[0].contiguous())
        assert_bitwise_equal(found[1], want[1])
