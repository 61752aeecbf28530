"""Peers' faults in index arithmetic and bounds, dead on arrival here (BC-15 to BC-20)."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from bad_input import good_call, ints, ints64
from cases import Case, Span, build
from kit import CANARY, assert_bitwise_equal, run_python, unchanged
from oracle import assert_right, expected

from wim_ext import ops

pytestmark = pytest.mark.usefixtures("one_thread")

CSRC = Path(__file__).parents[2] / "csrc"
HUGE = 2**31 // 8 + 8  # eight of these are past int32


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    """A maker of float16 views over gigabytes of address space, of which hardly a page is real."""
    folder = tmp_path_factory.mktemp("sparse")
    made = iter(range(1000))

    def make(shape, stride):
        size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        path = folder / f"{next(made)}.bin"
        flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.float16)
        path.unlink()  # the mapping lives on, the file does not outlive the test
        return flat.as_strided(shape, stride)

    return make


def far_apart(which, shape):
    """Strides of [pages, slots, heads, dim] in which one dimension's steps are huge."""
    _, slots, heads, dim = shape
    strides = {
        "page": (HUGE, heads * dim, dim, 1),
        "slot": (heads * dim, HUGE, dim, 1),
        "head": (slots * dim, dim, HUGE, 1),
    }
    return strides[which]


@pytest.mark.parametrize("which", ["page", "slot", "head"])
def test_bc15_int64_offsets(which, sparse):
    """Pages, slots and heads more than 2^31 elements from the start of the cache."""
    spans, page_size, heads = (Span(3, 21), Span(1, 10)), 10, 10
    case = Case("bc15", spans, torch.float16, 10, heads, 16, 16, page_size)
    x = build(case)
    pages = torch.tensor([8, 2, 9, 1, 5, 0, 3])  # the far ones in use
    shape = (10, page_size, heads, 16)
    k, v = (sparse(shape, far_apart(which, shape)) for _ in range(2))
    assert max(k.stride()) * 8 > 2**31
    table = torch.zeros_like(x.block_table)
    slots, keys, values = [], [], []
    for b, span in enumerate(spans):
        for i in range(-(-span.kv // page_size)):
            old = int(x.block_table[b, i])
            new = int(pages[old])
            table[b, i] = new
            filled = range(min(page_size, span.kv - i * page_size))
            slots += [new * page_size + offset for offset in filled]
            keys.append(x.k_cache[old, : len(filled)])
            values.append(x.v_cache[old, : len(filled)])
    ops.append_kv(torch.cat(keys), torch.cat(values), k, v, torch.tensor(slots))
    out, lse = ops.paged_attention(x.query, k, v, table, *x.tables[1:], return_lse=True)
    assert_right(expected(case), out, lse)
    ops.copy_pages([k, v], ints64(8, 9), ints64(6, 7))
    for cache in (k, v):
        assert_bitwise_equal(cache[6], cache[8].contiguous())
        assert_bitwise_equal(cache[7], cache[9].contiguous())


def test_bc15_int64_row_offsets(sparse):
    query = sparse((10, 2, 16), (HUGE, 16, 1))
    out = sparse((10, 2, 16), (HUGE, 16, 1))
    x = build(Case("bc15-rows", (Span(10, 30),), torch.float16, 2, 1, 16, 16))
    query.copy_(x.query)
    ops.paged_attention(query, *x.args[1:], out=out)
    assert_bitwise_equal(out, ops.paged_attention(*x.args))


def test_bc15_every_stride_is_64_bit():
    """The far end of every dimension cannot be tested; the type of every stride can."""
    narrow = re.compile(r"\b(int|int32_t|unsigned|uint32_t)\s+\w*stride\w*")
    found = [
        (source.name, line.strip())
        for source in sorted(CSRC.rglob("*.[hc]*"))
        for line in source.read_text().splitlines()
        if narrow.search(line.split("//")[0])
    ]
    assert found == []


def test_bc16_no_abort():
    """Every failed check is an exception; the process goes on and the next call is right."""
    code = """
import torch
from bad_input import good_call, ints
from wim_ext import ops
good = good_call("paged_attention")
expected = ops.paged_attention(**good).clone()
bad = [{"seqused_k": ints(20, 2**31 - 1)}, {"block_table": ints([-1, -1, -1], [9, 9, 9])},
       {"cu_seqlens_q": ints(0, 2**31 - 1, 5)}, {"softcap": float("nan")}]
caught = 0
for changes in bad * 50:
    try:
        ops.paged_attention(**{**good_call("paged_attention"), **changes})
    except (ValueError, IndexError):
        caught += 1
assert torch.equal(ops.paged_attention(**good_call("paged_attention")), expected)
print(caught)
"""
    done = run_python(code)
    assert (done.returncode, done.stdout) == (0, "200\n"), done.stderr


def test_bc16_millions_of_one_token_pages():
    """6.3 million tokens in pages of one: a guard of a peer ended its server here."""
    length = 6_300_000
    k, v = torch.zeros(3, 1, 1, 8), torch.zeros(3, 1, 1, 8)
    k[1], v[1], v[2] = 1.0, 1.0, -5.0
    table = torch.ones(1, length, dtype=torch.int32)
    table[0, -1] = 2  # the last key counts e^-1 of the others
    query = torch.full((1, 1, 8), 0.125)
    out, lse = ops.paged_attention(
        query, k, v, table, ints(0, 1), ints(length), softmax_scale=1.0, return_lse=True
    )
    total = (length - 1) + math.exp(-1)
    assert lse.item() == pytest.approx(1 + math.log(total), abs=1e-4)
    wanted = (length - 1 - 5 * math.exp(-1)) / total
    assert out.flatten().tolist() == pytest.approx([wanted] * 8, abs=2e-6)


def test_bc16_the_longest_sequence():
    """2^31 - 1 keys, all on one page: the end of the last cell is no 32-bit number."""
    length, page_size = 2**31 - 1, 256
    x = build(Case("bc16-longest", (Span(1, 255),), head_dim=8, v_head_dim=8, page_size=page_size))
    window = {"window_size": (3, -1)}
    near = ops.paged_attention(*x.args, **window)
    table = x.block_table[:, :1].expand(1, -(-length // page_size)).contiguous()
    far = ops.paged_attention(*x.args[:3], table, x.cu_seqlens_q, ints(length), **window)
    assert_bitwise_equal(far, near)


@pytest.mark.parametrize("length", [49, 64, 10_000, 2**31 - 1])
@pytest.mark.parametrize("sequence", [0, 1])
def test_bc17_capacity(sequence, length):
    a = good_call("paged_attention")
    a["seqused_k"][sequence] = length
    a["out"].fill_(CANARY)
    text = (
        rf"^seqused_k\[{sequence}\] = {length} exceeds what block_table can hold: "
        r"3 pages of 16 are 48 tokens$"
    )
    tensors = [t for t in a.values() if isinstance(t, torch.Tensor)]
    with unchanged(*tensors), pytest.raises(ValueError, match=text):
        ops.paged_attention(**a)


def test_bc17_exactly_at_capacity():
    case = Case("bc17", (Span(3, 48), Span(1, 48)), page_size=16)
    x = build(case)
    x.block_table = x.block_table[:, :3].contiguous()  # no column to spare
    out, lse = ops.paged_attention(*x.args, return_lse=True)
    assert_right(expected(case), out, lse)


def test_bc17_append_at_the_end_of_the_cache():
    a = good_call("append_kv")
    a["slot_mapping"] = ints64(63, -1, -1)
    ops.append_kv(**a)
    assert (a["k_cache"][3, 15] == 1).all()
    a = good_call("append_kv")
    a["slot_mapping"] = ints64(63, 64, -1)  # the good slot before the bad one is not written
    with (
        unchanged(a["k_cache"], a["v_cache"]),
        pytest.raises(IndexError, match=r"^slot_mapping\[1\] = 64 is out of range: allowed are"),
    ):
        ops.append_kv(**a)


NONSENSE = [-(2**31), -123456, -1, 6, 7, 2147480000, 2147483647]


@pytest.mark.parametrize("page_id", NONSENSE)
@pytest.mark.parametrize(("row", "column"), [(0, 0), (0, 1), (1, 0), (1, 2)])
def test_bc19_bad_page_id(row, column, page_id):
    a = good_call("paged_attention")
    a["block_table"][row, column] = page_id
    text = (
        rf"^block_table\[{row}, {column}\] = {page_id} is out of range: "
        r"the cache has pages 0 to 5$"
    )
    with unchanged(a["out"]), pytest.raises(IndexError, match=text):
        ops.paged_attention(**a)


@pytest.mark.parametrize("page_id", NONSENSE)
def test_bc19_unused_entries_may_hold_anything(page_id):
    a = good_call("paged_attention")
    a["v_cache"].normal_()
    expected_out = ops.paged_attention(**a).clone()
    a["block_table"][0, 2] = page_id  # sequence 0 has 20 tokens: two pages
    assert_bitwise_equal(ops.paged_attention(**a), expected_out)
    a["seqused_k"] = ints(20, 0)
    a["block_table"][1] = page_id  # sequence 1 has none
    assert ops.paged_attention(**a)[3:].eq(0).all()


@pytest.mark.parametrize("page_id", NONSENSE)
def test_bc19_entries_outside_the_window_are_not_followed(page_id):
    a = good_call("paged_attention") | {"window_size": (3, -1)}
    expected_out = ops.paged_attention(**a).clone()
    a["block_table"][1, 0] = page_id  # rows at 38 and 39 see keys from 35 on: pages 2 only
    assert_bitwise_equal(ops.paged_attention(**a), expected_out)


@pytest.mark.parametrize("page_id", [-1, 6])
def test_bc19_no_pages_at_all(page_id):
    a = good_call("paged_attention")
    a |= {"k_cache": a["k_cache"][:0], "v_cache": a["v_cache"][:0]}
    with pytest.raises(IndexError, match=r"^block_table\[0, 0\] = 3 is out of range"):
        ops.paged_attention(**a)
    a["seqused_k"] = ints(0, 0)
    assert ops.paged_attention(**a).eq(0).all()


@pytest.mark.parametrize("empty", [Span(0, 0), Span(0, 20), Span(3, 0)])
@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_bc20_empty(position, empty):
    """An empty sequence at every position of the batch: zeros for its rows, the rest as alone."""
    full = (Span(5, 40), Span(1, 17), Span(2, 600))
    case = Case("bc20", (*full[:position], empty, *full[position:]))
    x = build(case)
    out, lse = ops.paged_attention(*x.args, return_lse=True)
    assert_right(expected(case), out, lse)
    plan = ops.plan_attention(*x.tables, **x.plan_options)
    assert_bitwise_equal(ops.paged_attention(*x.args, plan=plan), out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spans", [(), (Span(0, 0),), (Span(0, 9), Span(0, 0)), (Span(2, 0),)])
def test_bc20_nothing_but_empties(spans, dtype):
    x = build(Case("bc20-all", spans, dtype))
    out, lse = ops.paged_attention(*x.args, return_lse=True)
    rows = sum(s.q for s in spans)
    assert out.shape == (rows, 4, 64)
    assert lse.shape == (4, rows)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    assert ops.plan_attention(*x.tables, **x.plan_options).report.pages_read == 0


def test_bc20_empty_calls_of_the_other_ops():
    k, none = torch.ones(2, 4, 1, 8), torch.zeros(0, 1, 8)
    with unchanged(k):
        ops.append_kv(none, none, k, k.clone(), ints64())
        ops.copy_pages([k], ints64(), ints64())
        ops.copy_pages([], ints64(), ints64())
    out, lse = ops.merge_states(none, torch.zeros(1, 0), none, torch.zeros(1, 0))
    assert out.shape == (0, 1, 8)
    assert lse.shape == (1, 0)
