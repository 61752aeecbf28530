"""Every wrong argument of paged_attention is an error in words; see test_bad_input.py."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from bad_input import (
    Bad,
    bad_id,
    call_dispatcher,
    call_front,
    check_refused,
    damaged_plan,
    flip_last,
    good_call,
    ints,
    nothing,
    numbered,
    plan_for,
    strided,
)
from kit import assert_bitwise_equal, run_python

NAN, INF = math.nan, math.inf

# fmt: off
PAGED_ATTENTION = [
    Bad("query", lambda t: t.double(),
        "query must have dtype float32, bfloat16 or float16, found float64"),
    Bad("query", lambda t: t.half(), "k_cache must have dtype float16 (as query), found float32"),
    Bad("k_cache", lambda t: t.bfloat16(),
        "k_cache must have dtype float32 (as query), found bfloat16"),
    Bad("v_cache", lambda t: t.half(), "v_cache must have dtype float32 (as query), found float16"),
    Bad("block_table", lambda t: t.long(), "block_table must have dtype int32, found int64"),
    Bad("cu_seqlens_q", lambda t: t.long(), "cu_seqlens_q must have dtype int32, found int64"),
    Bad("seqused_k", lambda t: t.bool(), "seqused_k must have dtype int32, found bool"),
    Bad("out", lambda t: t.double(), "out must have dtype float32 (as query), found float64"),
    Bad("alibi_slopes", lambda t: torch.ones(4, dtype=torch.float64),
        "alibi_slopes must have dtype float32, found float64"),
    Bad("sinks", lambda t: torch.ones(4).half(), "sinks must have dtype float32, found float16"),
    Bad("k_scale", lambda t: torch.ones(2).int(), "k_scale must have dtype float32, found int32"),
    Bad("v_scale", lambda t: torch.ones(1).double(),
        "v_scale must have dtype float32, found float64"),
    Bad("query", lambda t: t.to("meta"),
        "k_cache must be on the device of query (meta), found cpu"),
    Bad("k_cache", lambda t: t.to("meta"),
        "k_cache must be on the device of query (cpu), found meta"),
    Bad("v_cache", lambda t: t.to("meta"),
        "v_cache must be on the device of query (cpu), found meta"),
    Bad("out", lambda t: t.to("meta"), "out must be on the device of query (cpu), found meta"),
    Bad("block_table", lambda t: t.to("meta"), "block_table must be on the cpu, found meta"),
    Bad("cu_seqlens_q", lambda t: t.to("meta"), "cu_seqlens_q must be on the cpu, found meta"),
    Bad("seqused_k", lambda t: t.to("meta"), "seqused_k must be on the cpu, found meta"),
    Bad("alibi_slopes", lambda t: torch.ones(4, device="meta"),
        "alibi_slopes must be on the device of query (cpu), found meta"),
    Bad("sinks", lambda t: torch.ones(4, device="meta"),
        "sinks must be on the device of query (cpu), found meta"),
    Bad("k_scale", lambda t: torch.ones(1, device="meta"),
        "k_scale must be on the device of query (cpu), found meta"),
    Bad("v_scale", lambda t: torch.ones(1, device="meta"),
        "v_scale must be on the device of query (cpu), found meta"),
    Bad("query", lambda t: t.flatten(1),
        "query must have shape [total_q, num_heads, head_dim] = [any, any, any], found [5, 64]"),
    Bad("query", lambda t: t[..., :8],
        "query must have shape [total_q, num_heads, head_dim] = [any, any, 16], found [5, 4, 8]"),
    Bad("query", lambda t: t[:, :3],
        "out must have shape [total_q, num_heads, v_head_dim] = [5, 3, 8], found [5, 4, 8]"),
    Bad("query", lambda t: t[:4],
        "out must have shape [total_q, num_heads, v_head_dim] = [4, 4, 8], found [5, 4, 8]"),
    Bad("k_cache", lambda t: t[:, :, 0],
        "k_cache must have shape [num_pages, page_size, num_kv_heads, head_dim] = [any, any, "
        "any, any], found [6, 16, 16]"),
    Bad("k_cache", lambda t: t[:, :0],
        "k_cache must have page_size of at least 1, found shape [6, 0, 2, 16]"),
    Bad("v_cache", lambda t: t[:5],
        "v_cache must have shape [num_pages, page_size, num_kv_heads, v_head_dim] = [6, 16, "
        "2, any], found [5, 16, 2, 8]"),
    Bad("v_cache", lambda t: t[:, :8],
        "v_cache must have shape [num_pages, page_size, num_kv_heads, v_head_dim] = [6, 16, "
        "2, any], found [6, 8, 2, 8]"),
    Bad("v_cache", lambda t: t[:, :, :1],
        "v_cache must have shape [num_pages, page_size, num_kv_heads, v_head_dim] = [6, 16, "
        "2, any], found [6, 16, 1, 8]"),
    Bad("v_cache", lambda t: t[0],
        "v_cache must have shape [num_pages, page_size, num_kv_heads, v_head_dim] = [6, 16, "
        "2, any], found [16, 2, 8]"),
    Bad("block_table", lambda t: t[:1],
        "block_table must have shape [batch, max_pages] = [2, any], found [1, 3]"),
    Bad("block_table", lambda t: t[0],
        "block_table must have shape [batch, max_pages] = [2, any], found [3]"),
    Bad("seqused_k", lambda t: t[:1], "cu_seqlens_q must have shape [batch + 1] = [2], found [3]"),
    Bad("seqused_k", lambda t: t[None], "seqused_k must have shape [batch] = [any], found [1, 2]"),
    Bad("cu_seqlens_q", lambda t: t[:2],
        "cu_seqlens_q must have shape [batch + 1] = [3], found [2]"),
    Bad("out", lambda t: t[:4],
        "out must have shape [total_q, num_heads, v_head_dim] = [5, 4, 8], found [4, 4, 8]"),
    Bad("out", lambda t: t[:, :2],
        "out must have shape [total_q, num_heads, v_head_dim] = [5, 4, 8], found [5, 2, 8]"),
    Bad("out", lambda t: t.flatten(1),
        "out must have shape [total_q, num_heads, v_head_dim] = [5, 4, 8], found [5, 32]"),
    Bad("alibi_slopes", lambda t: torch.ones(3),
        "alibi_slopes must have shape [num_heads] = [4], found [3]"),
    Bad("alibi_slopes", lambda t: torch.ones(3, 4),
        "alibi_slopes must have shape [batch, num_heads] = [2, 4], found [3, 4]"),
    Bad("alibi_slopes", lambda t: torch.tensor(1.0),
        "alibi_slopes must have shape [batch, num_heads] = [2, 4], found []"),
    Bad("sinks", lambda t: torch.ones(2), "sinks must have shape [num_heads] = [4], found [2]"),
    Bad("k_scale", lambda t: torch.ones(4),
        "k_scale must have 1 or num_kv_heads = 2 elements, found shape [4]"),
    Bad("v_scale", lambda t: torch.ones(0),
        "v_scale must have 1 or num_kv_heads = 2 elements, found shape [0]"),
    Bad("query", strided,
        "query must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("k_cache", strided,
        "k_cache must have stride 1 in its last dimension, found strides [1024, 64, 32, 2]"),
    Bad("v_cache", strided,
        "v_cache must have stride 1 in its last dimension or in its slot dimension, found "
        "strides [512, 32, 16, 2]"),
    Bad("block_table", strided,
        "block_table must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("cu_seqlens_q", strided,
        "cu_seqlens_q must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("seqused_k", strided,
        "seqused_k must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("out", strided, "out must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("alibi_slopes", lambda t: strided(torch.ones(4)),
        "alibi_slopes must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("sinks", lambda t: strided(torch.ones(4)),
        "sinks must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("out", lambda t: t[:1].expand(5, -1, -1),
        "out is written and must not overlap itself, found shape [5, 4, 8] with "
        "strides [0, 8, 1]"),
    Bad("out", lambda t: torch.zeros(64).as_strided((5, 4, 8), (8, 8, 1)),
        "out is written and must not overlap itself, found shape [5, 4, 8] with "
        "strides [8, 8, 1]"),
    bad_id("block_table", lambda t: ints([3, 9, 0], [1, 2, 4]),
           "block_table[0, 1] = 9 is out of range: the cache has pages 0 to 5"),
    bad_id("block_table", lambda t: ints([3, 5, 0], [1, -1, 4]),
           "block_table[1, 1] = -1 is out of range: the cache has pages 0 to 5"),
    bad_id("block_table", lambda t: ints([2**31 - 1, 5, 0], [1, 0, 4]),
           "block_table[0, 0] = 2147483647 is out of range: the cache has pages 0 to 5"),
    bad_id("block_table", lambda t: ints([1, 5, 0], [1, 0, -(2**31)]),
           "block_table[1, 2] = -2147483648 is out of range: the cache has pages 0 to 5"),
    bad_id("block_table", lambda t: ints([1, 5, 0], [1, 0, 6]),
           "block_table[1, 2] = 6 is out of range: the cache has pages 0 to 5"),
    Bad("seqused_k", lambda t: ints(-1, 40), "seqused_k[0] must not be negative, found -1"),
    Bad("seqused_k", lambda t: ints(20, 49),
        "seqused_k[1] = 49 exceeds what block_table can hold: 3 pages of 16 are 48 tokens"),
    Bad("seqused_k", lambda t: ints(2**31 - 1, 40),
        "seqused_k[0] = 2147483647 exceeds what block_table can hold: 3 pages of 16 are 48 tokens"),
    Bad("seqused_k", lambda t: ints(20, -(2**31)),
        "seqused_k[1] must not be negative, found -2147483648"),
    Bad("block_table", lambda t: t[:, :0],
        "seqused_k[0] = 20 exceeds what block_table can hold: 0 pages of 16 are 0 tokens"),
    Bad("cu_seqlens_q", lambda t: ints(1, 3, 5), "cu_seqlens_q must start with 0, found 1"),
    Bad("cu_seqlens_q", lambda t: ints(0, 6, 5),
        "cu_seqlens_q must not decrease, found 5 after 6 at sequence 1"),
    Bad("cu_seqlens_q", lambda t: ints(0, 3, 4),
        "cu_seqlens_q must end with the number of query rows (5), found 4"),
    Bad("cu_seqlens_q", lambda t: ints(0, 3, 6),
        "cu_seqlens_q must end with the number of query rows (5), found 6"),
    Bad("cu_seqlens_q", lambda t: ints(0, -3, 5),
        "cu_seqlens_q must not decrease, found -3 after 0 at sequence 0"),
    Bad("cu_seqlens_q", lambda t: ints(0, 3, 2**31 - 1),
        "cu_seqlens_q must end with the number of query rows (5), found 2147483647"),
    Bad("softmax_scale", lambda x: NAN, "softmax_scale must be a finite float32, found nan"),
    Bad("softmax_scale", lambda x: -INF, "softmax_scale must be a finite float32, found -inf"),
    Bad("softmax_scale", lambda x: 1e39, "softmax_scale must be a finite float32, found 1e+39"),
    Bad("softcap", lambda x: -1.0,
        "softcap must be 0 (none) or 1.17549e-38 to 3.40282e+38, found -1"),
    Bad("softcap", lambda x: NAN,
        "softcap must be 0 (none) or 1.17549e-38 to 3.40282e+38, found nan"),
    Bad("softcap", lambda x: INF,
        "softcap must be 0 (none) or 1.17549e-38 to 3.40282e+38, found inf"),
    Bad("softcap", lambda x: 1e-46,
        "softcap must be 0 (none) or 1.17549e-38 to 3.40282e+38, found 1e-46"),
    Bad("window_size", lambda x: (-2, -1),
        "window_left must be -1 (unlimited) or at least 0, found -2"),
    Bad("window_size", lambda x: (-1, -5),
        "window_right must be -1 (unlimited) or at least 0, found -5"),
    Bad("plan", plan_for(seqused_k=ints(20, 39)),
        "plan was made for another batch: sequence 1 has other lengths"),
    Bad("plan", plan_for(cu_seqlens_q=ints(0, 2, 5)),
        "plan was made for another batch: sequence 0 has other lengths"),
    Bad("plan", plan_for(num_heads=8),
        "plan was made for another batch: its num_heads is 8, this call's is 4"),
    Bad("plan", plan_for(num_kv_heads=4),
        "plan was made for another batch: its num_kv_heads is 4, this call's is 2"),
    Bad("plan", plan_for(page_size=32),
        "plan was made for another batch: its page_size is 32, this call's is 16"),
    Bad("plan", plan_for(causal=False),
        "plan was made for another batch: its causal is 0, this call's is 1"),
    Bad("plan", plan_for(window_size=(5, -1)),
        "plan was made for another batch: its window_left is 5, this call's is -1"),
    Bad("plan", plan_for(window_size=(-1, 5)),
        "plan was made for another batch: its window_right is 5, this call's is -1"),
    Bad("plan", plan_for(block_table=ints([4, 5, 0], [1, 2, 4])),
        "plan was made for another batch: block_table has other pages"),
    Bad("plan", plan_for(seqused_k=ints(20), cu_seqlens_q=ints(0, 5), block_table=ints([3, 5])),
        "plan was made for another batch: its batch size is 1, this call's is 2"),
    Bad("plan", damaged_plan(flip_last),
        "plan must be an unchanged result of plan_attention, found 103 other integers"),
    Bad("plan", damaged_plan(lambda t: t[:-1]),
        "plan must be an unchanged result of plan_attention, found 102 other integers"),
    Bad("plan", damaged_plan(lambda t: t[:0]),
        "plan must be an unchanged result of plan_attention, found 0 other integers"),
    Bad("plan", damaged_plan(lambda t: t.long()), "plan must have dtype int32, found int64"),
    Bad("plan", damaged_plan(lambda t: t.to("meta")), "plan must be on the cpu, found meta"),
    Bad("query", nothing, "query must be a tensor, found None"),
    Bad("k_cache", nothing, "k_cache must be a tensor, found None"),
    Bad("seqused_k", nothing, "seqused_k must be a tensor, found None"),
]
# fmt: on


def test_the_good_call_is_good():
    call_front("paged_attention", good_call("paged_attention"))
    call_dispatcher("paged_attention", good_call("paged_attention"))


@pytest.mark.parametrize(("op", "bad"), numbered("paged_attention", PAGED_ATTENTION))
def test_refused(op, bad):
    check_refused(op, bad)


@pytest.mark.parametrize("source", ["query", "k_cache", "v_cache"])
def test_out_is_not_what_is_read(source):
    a = good_call("paged_attention")
    a["out"] = a[source].view(-1)[:160].view(5, 4, 8)
    with pytest.raises(ValueError, match=f"^out must not overlap {source} in memory$"):
        call_front("paged_attention", a)


@pytest.mark.parametrize("source", ["block_table", "cu_seqlens_q", "seqused_k", "plan"])
def test_out_is_not_a_table(source):
    """Its ids are checked before the kernel runs and read while it does."""
    a = good_call("paged_attention")
    a["plan"] = plan_for()(None)
    table = a["plan"].tensor if source == "plan" else a[source]
    memory = torch.zeros(160)
    memory[: table.numel()] = table.reshape(-1).view(torch.float32)
    within = memory[: table.numel()].view(torch.int32).view(table.shape)
    a[source] = dataclasses.replace(a["plan"], tensor=within) if source == "plan" else within
    a["out"] = memory.view(5, 4, 8)
    with pytest.raises(ValueError, match=f"^out must not overlap {source} in memory$"):
        call_front("paged_attention", a)


@pytest.mark.parametrize("source", ["alibi_slopes", "sinks", "k_scale", "v_scale"])
def test_out_is_not_an_option(source):
    a = good_call("paged_attention")
    a[source] = a["out"].view(-1)[-2:] if "scale" in source else a["out"].view(-1)[:4]
    with pytest.raises(ValueError, match=f"^out must not overlap {source} in memory$"):
        call_front("paged_attention", a)


def test_lse_of_the_op_itself():
    # `wim_ext.ops` makes lse; who calls below it may hand in a wrong one.
    a = good_call("paged_attention")
    wrong = [
        (torch.zeros(4, 5).double(), "lse must have dtype float32, found float64"),
        (torch.zeros(5, 4), "lse must have shape [num_heads, total_q] = [4, 5], found [5, 4]"),
        (strided(torch.zeros(4, 5)),
         "lse must be contiguous in its last dimension (stride 1), found stride 2"),
        (torch.zeros(4, 5, device="meta"),
         "lse must be on the device of query (cpu), found meta"),
        (a["out"].view(-1)[:20].view(4, 5), "lse must not overlap out in memory"),
    ]  # fmt: skip
    options = ("softmax_scale", "causal", "window_left", "window_right", "softcap")
    options += ("alibi_slopes", "sinks", "k_scale", "v_scale")
    arguments = ("query", "k_cache", "v_cache", "block_table", "cu_seqlens_q", "seqused_k")
    names = (*arguments, "plan", "out", "lse", *options)
    for lse, text in wrong:
        given = a | {"lse": lse, "window_left": -1, "window_right": -1}
        with pytest.raises((RuntimeError, ValueError)) as error:
            torch.ops.wim_ext.paged_attention(*(given[n] for n in names))
        assert text in str(error.value)


@pytest.mark.parametrize("dim", [4, 12, 264, 7, 0])
@pytest.mark.parametrize("which", ["k_cache", "v_cache"])
def test_head_dims(which, dim):
    a = good_call("paged_attention")
    a[which] = torch.zeros(6, 16, 2, dim)
    if which == "k_cache":
        a["query"] = torch.zeros(5, 4, dim)
    else:
        a["out"] = torch.zeros(5, 4, dim)
    name = "head_dim" if which == "k_cache" else "v_head_dim"
    with pytest.raises(
        ValueError, match=f"^{name} must be a multiple of 8 from 8 to 256, found {dim}$"
    ):
        call_front("paged_attention", a)


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 2), (2, 4), (1, 2), (0, 2), (4, 0)])
def test_head_counts(heads, kv_heads):
    a = good_call("paged_attention")
    a |= {"query": torch.zeros(5, heads, 16), "out": torch.zeros(5, heads, 8)}
    a |= {"k_cache": torch.zeros(6, 16, kv_heads, 16), "v_cache": torch.zeros(6, 16, kv_heads, 8)}
    text = f"num_heads must be a positive multiple of num_kv_heads, found {heads} and {kv_heads}"
    with pytest.raises(ValueError, match=f"^{text}$"):
        call_front("paged_attention", a)


def test_a_good_call_after_every_bad_one():
    """No refusal leaves anything behind that a later call could trip over."""
    expected = call_front("paged_attention", good_call("paged_attention")).clone()
    for bad in PAGED_ATTENTION:
        a = good_call("paged_attention")
        a[bad.argument] = bad.change(a[bad.argument])
        with pytest.raises(bad.error):
            call_front("paged_attention", a)
        found = call_front("paged_attention", good_call("paged_attention"))
        assert_bitwise_equal(found, expected)


ALL_BAD_CALLS = """
import test_bad_attention as attention, test_bad_input as other
from bad_input import call_dispatcher, good_call
refused = 0
for op, table in {**other.TABLES, "paged_attention": attention.PAGED_ATTENTION}.items():
    for bad in table:
        arguments = good_call(op)
        arguments[bad.argument] = bad.change(arguments[bad.argument])
        try:
            call_dispatcher(op, arguments)
        except Exception:
            refused += 1
    call_dispatcher(op, good_call(op))
print(refused)
"""


def test_a_process_survives_all_of_them():
    done = run_python(ALL_BAD_CALLS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 200
