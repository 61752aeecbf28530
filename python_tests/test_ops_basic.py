"""Quick sanity of the kernels, and what is peculiar to how they work; the parity matrix is in
test_attention.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wim_ext import ops, reference

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 64, 64


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(keys: Tensor, values: Tensor, page: int = PAGE) -> tuple[Tensor, Tensor, Tensor]:
    """Contiguous [length, heads, dim] as one sequence of a cache whose other slots are NaN."""
    length, pages = keys.shape[0], -(-keys.shape[0] // page)
    table = torch.randperm(pages)
    slots = table[torch.arange(length) // page] * page + torch.arange(length) % page
    caches = [torch.full((pages * page, *x.shape[1:]), torch.nan) for x in (keys, values)]
    caches[0][slots], caches[1][slots] = keys, values
    return (*(c.unflatten(0, (pages, page)) for c in caches), table[None].int())


def sequence(length: int, rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    torch.manual_seed(seed)
    query = torch.randn(rows, HEADS, DIM)
    caches = paged(torch.randn(length, KV_HEADS, DIM), torch.randn(length, KV_HEADS, DIM))
    return query, *caches, int32(0, rows), int32(length)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_close_to_the_reference(dtype: torch.dtype) -> None:
    query, k_cache, v_cache, *tables = sequence(1300, 70)
    tensors = [x.to(dtype) for x in (query, k_cache, v_cache)]
    out, lse = ops.paged_attention(*tensors, *tables, return_lse=True)
    exact, exact_lse = reference.paged_attention(*tensors, *tables, return_lse=True)
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float16: 3e-4}[dtype]
    torch.testing.assert_close(out, exact, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 64, 100])
def test_chunking_does_not_change_a_bit(chunk: int) -> None:
    length, rows = 1100, 200
    query, k_cache, v_cache, table, _, _ = sequence(length, rows)
    whole = ops.paged_attention(query, k_cache, v_cache, table, int32(0, rows), int32(length))
    for begin in range(0, rows, chunk):
        part = query[begin : begin + chunk]
        used = length - rows + begin + len(part)
        out = ops.paged_attention(part, k_cache, v_cache, table, int32(0, len(part)), int32(used))
        assert torch.equal(bits(out), bits(whole[begin : begin + chunk]))


def test_neighbours_threads_and_sharing_do_not_change_a_bit() -> None:
    """A branch alone, beside a copy of itself, and riding along with its trunk's chunk."""
    length, rows, branch_length = 2000, 150, 1300
    query, k_cache, v_cache, table, _, _ = sequence(length, rows + 1)
    branch = query[rows:]
    alone = ops.paged_attention(branch, k_cache, v_cache, table, int32(0, 1), int32(branch_length))
    tables = table.expand(3, -1).contiguous()
    cu, used = int32(0, rows, rows + 1, rows + 2), int32(length, branch_length, branch_length)
    queries = torch.cat([query[:rows], branch, branch])
    for threads in (1, 2, 7, 64):
        plan = ops.plan_attention(
            tables, cu, used, num_heads=HEADS, num_kv_heads=KV_HEADS, page_size=PAGE,
            num_threads=threads,
        )  # fmt: skip
        assert plan.report.pages_read < plan.report.pages_without_sharing
        out = ops.paged_attention(queries, k_cache, v_cache, tables, cu, used, plan=plan)
        assert torch.equal(bits(out[rows:]), bits(alone.expand(2, -1, -1)))


@pytest.mark.parametrize("page", [1, 7, 64, 100])
def test_transposed_values_are_the_same_to_the_bit(page: int) -> None:
    torch.manual_seed(1)
    keys, values = torch.randn(700, KV_HEADS, DIM), torch.randn(700, KV_HEADS, 24)
    query = torch.randn(5, HEADS, DIM)
    k_cache, v_cache, table = paged(keys, values, page)
    transposed = v_cache.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    if page > 1:
        assert transposed.stride(1) == 1
        assert transposed.stride(3) != 1
    tables = (table, int32(0, 5), int32(700))
    natural = ops.paged_attention(query, k_cache, v_cache, *tables)
    assert torch.equal(
        bits(natural), bits(ops.paged_attention(query, k_cache, transposed, *tables))
    )


def test_weights_are_exact_to_a_few_roundings() -> None:
    """Two keys, the second's value 1: the output is w / (1 + w) with w = 2^x by the kernel's exp2.

    Its relative error is that of the polynomial (2e-7) plus those of one sum and one quotient.
    """
    x = -torch.cat([torch.linspace(0, 2, 4001), torch.linspace(2, 125, 4001)])
    query = torch.zeros(len(x), 1, 8)
    query[:, 0, 0] = x * math.log(2)
    keys, values = torch.zeros(2, 1, 8), torch.zeros(2, 1, 8)
    keys[1, 0, 0], values[1] = 1, 1
    rows = len(x)
    out = ops.paged_attention(
        query,
        keys[None],
        values[None],
        torch.zeros(rows, 1).int(),
        torch.arange(rows + 1).int(),
        torch.full((rows,), 2).int(),
        softmax_scale=1.0,
    )[:, 0, 0].double()
    # What the kernel sees is the float32 product of x ln 2 with log2 e: measured against that.
    seen = (query[:, 0, 0] * torch.tensor(1.4426950408889634)).double()
    weight = seen.exp2()
    assert ((out - weight / (1 + weight)).abs() / (weight / (1 + weight))).max() < 4e-7


@pytest.mark.parametrize("cap", [0.3, 5.0, 30.0])
def test_softcap_keeps_small_scores(cap: float) -> None:
    """tanh of small arguments must not lose digits to 1 - (1 - x)."""
    scores = torch.logspace(-6, 2, 300)
    query = torch.zeros(len(scores), 1, 8)
    query[:, 0, 0] = scores
    key = torch.zeros(1, 1, 1, 8)
    key[..., 0] = 1
    rows = len(scores)
    _, lse = ops.paged_attention(
        query,
        key,
        torch.ones(1, 1, 1, 8),
        torch.zeros(rows, 1).int(),
        torch.arange(rows + 1).int(),
        torch.ones(rows).int(),
        softmax_scale=1.0,
        softcap=cap,
        return_lse=True,
    )  # one key: lse is its score
    torch.testing.assert_close(
        lse[0].double(), cap * torch.tanh(scores.double() / cap), rtol=1e-6, atol=0
    )


def test_whole_cells_of_minus_infinity() -> None:
    """Scores of -inf weigh nothing once a finite one comes; alone they make the row NaN."""
    keys, values = torch.zeros(1030, 1, 8), torch.randn(1030, 1, 8)
    keys[:1024, 0, 0] = -torch.inf
    query = torch.ones(2, 1, 8)
    caches = paged(keys, values)
    out, lse = ops.paged_attention(
        query, *caches, int32(0, 2), int32(1030), causal=False, return_lse=True
    )
    torch.testing.assert_close(out[0], values[1024:].mean(0))
    assert lse.isfinite().all()
    out = ops.paged_attention(query, *caches, int32(0, 2), int32(1024), causal=False)
    assert out.isnan().all()


def test_nothing_to_do() -> None:
    cache = torch.zeros(3, 16, KV_HEADS, DIM)
    query = torch.zeros(0, HEADS, DIM)
    none = torch.zeros(0, 4).int()
    out, lse = ops.paged_attention(query, cache, cache, none, int32(0), none[:, 0], return_lse=True)
    assert out.shape == (0, HEADS, DIM)
    assert lse.shape == (HEADS, 0)
    out = ops.paged_attention(query, cache, cache, none[:, :0].expand(0, 0), int32(0), none[:, 0])
    assert out.numel() == 0


def test_out_and_lse_are_what_was_asked_for() -> None:
    arguments = sequence(100, 3)
    packed = torch.full((3, HEADS, 2 * DIM), -5.0)
    out, lse = ops.paged_attention(*arguments, out=packed[..., DIM:], return_lse=True)
    assert out.data_ptr() == packed[..., DIM:].data_ptr()
    assert (packed[..., :DIM] == -5).all()
    assert lse.shape == (HEADS, 3)
    assert torch.equal(out, ops.paged_attention(*arguments))


def test_query_and_out_may_be_columns_of_one_buffer() -> None:
    arguments = sequence(100, 3)
    expected = ops.paged_attention(*arguments)
    rows = torch.cat([arguments[0], torch.zeros(3, HEADS, DIM)], dim=1)  # all of q, then all of out
    out = ops.paged_attention(rows[:, :HEADS], *arguments[1:], out=rows[:, HEADS:])
    assert torch.equal(out, expected)
    packed = torch.cat([arguments[0], torch.zeros(3, HEADS, DIM)], dim=-1)  # head by head
    out = ops.paged_attention(packed[..., :DIM], *arguments[1:], out=packed[..., DIM:])
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="out must not overlap query in memory"):
        ops.paged_attention(packed[..., :DIM], *arguments[1:], out=packed[..., 8 : 8 + DIM])


@pytest.mark.smoke
def test_cpu_kernels_are_told() -> None:
    built, available, in_use, why = ops.cpu_kernels()
    assert built[-1] == "portable"
    assert in_use in available
    assert set(available) <= set(built)
    assert in_use == available[0] or "WIM_CPU_ISA" in why
