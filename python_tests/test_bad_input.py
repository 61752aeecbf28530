"""Every wrong argument of the cache ops, of merging and of planning is an error in words.

Type and full text are asserted, through `wim_ext.ops` and straight through `torch.ops.wim_ext`, and
that no byte of any argument has changed.
"""

from __future__ import annotations

import pytest
import torch
from bad_input import (
    Bad,
    bad_id,
    call_dispatcher,
    call_front,
    check_refused,
    good_call,
    ints,
    ints64,
    nothing,
    numbered,
    strided,
    wider,
)

# fmt: off
APPEND_KV = [
    Bad("key", lambda t: t.double(), "key must have dtype float32 (as k_cache), found float64"),
    Bad("key", lambda t: t.int(), "key must have dtype float32 (as k_cache), found int32"),
    Bad("key", lambda t: t.bfloat16(), "key must have dtype float32 (as k_cache), found bfloat16"),
    Bad("value", lambda t: t.half(), "value must have dtype float32 (as k_cache), found float16"),
    Bad("k_cache", lambda t: t.double(),
        "k_cache must have dtype float32, bfloat16 or float16, found float64"),
    Bad("k_cache", lambda t: t.half(),
        "v_cache must have dtype float16 (as k_cache), found float32"),
    Bad("v_cache", lambda t: t.bfloat16(),
        "v_cache must have dtype float32 (as k_cache), found bfloat16"),
    Bad("slot_mapping", lambda t: t.int(), "slot_mapping must have dtype int64, found int32"),
    Bad("slot_mapping", lambda t: t.float(), "slot_mapping must have dtype int64, found float32"),
    Bad("key", lambda t: t.to("meta"), "key must be on the device of k_cache (cpu), found meta"),
    Bad("value", lambda t: t.to("meta"),
        "value must be on the device of k_cache (cpu), found meta"),
    Bad("k_cache", lambda t: t.to("meta"),
        "v_cache must be on the device of k_cache (meta), found cpu"),
    Bad("v_cache", lambda t: t.to("meta"),
        "v_cache must be on the device of k_cache (cpu), found meta"),
    Bad("slot_mapping", lambda t: t.to("meta"), "slot_mapping must be on the cpu, found meta"),
    Bad("key", lambda t: t.flatten(1),
        "key must have shape [num_tokens, num_kv_heads, head_dim] = [any, 2, 16], found [3, 32]"),
    Bad("key", lambda t: t[:, :1],
        "key must have shape [num_tokens, num_kv_heads, head_dim] = [any, 2, 16], found [3, "
        "1, 16]"),
    Bad("key", lambda t: t[..., :8],
        "key must have shape [num_tokens, num_kv_heads, head_dim] = [any, 2, 16], found [3, 2, 8]"),
    Bad("key", lambda t: t[None],
        "key must have shape [num_tokens, num_kv_heads, head_dim] = [any, 2, 16], found [1, "
        "3, 2, 16]"),
    Bad("value", lambda t: t[:2],
        "value must have shape [num_tokens, num_kv_heads, v_head_dim] = [3, 2, 8], found [2, "
        "2, 8]"),
    Bad("value", lambda t: t[:, :1],
        "value must have shape [num_tokens, num_kv_heads, v_head_dim] = [3, 2, 8], found [3, "
        "1, 8]"),
    Bad("value", wider,
        "value must have shape [num_tokens, num_kv_heads, v_head_dim] = [3, 2, 8], found [3, "
        "2, 16]"),
    Bad("k_cache", lambda t: t[0],
        "k_cache must have shape [num_pages, page_size, num_kv_heads, head_dim] = [any, any, "
        "any, any], found [16, 2, 16]"),
    Bad("k_cache", lambda t: t[:, :0],
        "k_cache must have page_size of at least 1, found shape [4, 0, 2, 16]"),
    Bad("v_cache", lambda t: t[:3],
        "v_cache must have shape [num_pages, page_size, num_kv_heads, v_head_dim] = [4, 16, "
        "2, any], found [3, 16, 2, 8]"),
    Bad("v_cache", lambda t: t[:, :8],
        "v_cache must have shape [num_pages, page_size, num_kv_heads, v_head_dim] = [4, 16, "
        "2, any], found [4, 8, 2, 8]"),
    Bad("v_cache", lambda t: t[:, :, :1],
        "v_cache must have shape [num_pages, page_size, num_kv_heads, v_head_dim] = [4, 16, "
        "2, any], found [4, 16, 1, 8]"),
    Bad("v_cache", lambda t: t.flatten(2),
        "v_cache must have shape [num_pages, page_size, num_kv_heads, v_head_dim] = [4, 16, "
        "2, any], found [4, 16, 16]"),
    Bad("slot_mapping", lambda t: t[:2],
        "slot_mapping must have shape [num_tokens] = [3], found [2]"),
    Bad("slot_mapping", lambda t: t[None],
        "slot_mapping must have shape [num_tokens] = [3], found [1, 3]"),
    Bad("key", strided, "key must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("value", strided,
        "value must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("k_cache", strided,
        "k_cache must have stride 1 in its last dimension, found strides [1024, 64, 32, 2]"),
    Bad("v_cache", strided,
        "v_cache must have stride 1 in its last dimension or in its slot dimension, found "
        "strides [512, 32, 16, 2]"),
    Bad("slot_mapping", strided,
        "slot_mapping must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("k_cache", lambda t: t[:, :, :1].expand(-1, -1, 2, -1),
        "k_cache is written and must not overlap itself, found shape [4, 16, 2, 16] "
        "with strides [512, 32, 0, 1]"),
    Bad("k_cache", lambda t: torch.zeros(2048).as_strided(t.shape, (512, 16, 16, 1)),
        "k_cache is written and must not overlap itself, found shape [4, 16, 2, 16] "
        "with strides [512, 16, 16, 1]"),
    Bad("v_cache", lambda t: t[:1].expand(4, -1, -1, -1),
        "v_cache is written and must not overlap itself, found shape [4, 16, 2, 8] "
        "with strides [0, 16, 8, 1]"),
    bad_id("slot_mapping", lambda t: ints64(1, 64, 0),
           "slot_mapping[1] = 64 is out of range: allowed are -1 (skip) and 0 to 63 "
           "(num_pages * page_size - 1)"),
    bad_id("slot_mapping", lambda t: ints64(-2, 1, 0),
           "slot_mapping[0] = -2 is out of range: allowed are -1 (skip) and 0 to 63 "
           "(num_pages * page_size - 1)"),
    bad_id("slot_mapping", lambda t: ints64(0, 1, 2**63 - 1),
           "slot_mapping[2] = 9223372036854775807 is out of range: allowed are -1 (skip) and "
           "0 to 63 (num_pages * page_size - 1)"),
    bad_id("slot_mapping", lambda t: ints64(0, -(2**63), 1),
           "slot_mapping[1] = -9223372036854775808 is out of range: allowed are -1 (skip) and "
           "0 to 63 (num_pages * page_size - 1)"),
    Bad("key", nothing, "key must be a tensor, found None"),
    Bad("k_cache", nothing, "k_cache must be a tensor, found None"),
    Bad("slot_mapping", nothing, "slot_mapping must be a tensor, found None"),
]

COPY_PAGES = [
    Bad("caches", lambda c: [c[0], c[1].to("meta")],
        "caches[1] must be on the device of caches[0] (cpu), found meta"),
    Bad("src", lambda t: t.to("meta"), "src must be on the cpu, found meta"),
    Bad("dst", lambda t: t.to("meta"), "dst must be on the cpu, found meta"),
    Bad("src", lambda t: t.int(), "src must have dtype int64, found int32"),
    Bad("dst", lambda t: t.float(), "dst must have dtype int64, found float32"),
    Bad("src", lambda t: t[:1], "dst must have shape [num_copies] = [1], found [2]"),
    Bad("dst", lambda t: t[:1], "dst must have shape [num_copies] = [2], found [1]"),
    Bad("src", lambda t: t[None], "src must have shape [num_copies] = [any], found [1, 2]"),
    Bad("src", strided, "src must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("dst", strided, "dst must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("caches", lambda c: [torch.tensor(1.0)], "caches[0] must have 1 to 6 dimensions, found []"),
    Bad("caches", lambda c: [torch.zeros(4, 1, 1, 1, 1, 1, 1)],
        "caches[0] must have 1 to 6 dimensions, found [4, 1, 1, 1, 1, 1, 1]"),
    Bad("caches", lambda c: [c[0], c[1][:1].expand(4, -1, -1, -1)],
        "caches[1] is written and must not overlap itself, found shape [4, 16, 2, 8] "
        "with strides [0, 16, 8, 1]"),
    bad_id("src", lambda t: ints64(0, 4), "src[1] = 4 is out of range: caches[0] has pages 0 to 3"),
    bad_id("dst", lambda t: ints64(2, -1),
           "dst[1] = -1 is out of range: caches[0] has pages 0 to 3"),
    bad_id("src", lambda t: ints64(-(2**63), 0),
           "src[0] = -9223372036854775808 is out of range: caches[0] has pages 0 to 3"),
    bad_id("dst", lambda t: ints64(2**63 - 1, 2),
           "dst[0] = 9223372036854775807 is out of range: caches[0] has pages 0 to 3"),
    bad_id("caches", lambda c: [c[0], c[1][:3]],
           "dst[1] = 3 is out of range: caches[1] has pages 0 to 2"),
    Bad("dst", lambda t: ints64(2, 2), "dst must not repeat a page, found 2 twice"),
    Bad("dst", lambda t: ints64(1, 2), "dst must not contain a page of src, found 1 in both"),
    Bad("dst", lambda t: ints64(0, 2), "dst must not contain a page of src, found 0 in both"),
    Bad("src", nothing, "src must be a tensor, found None"),
]

MERGE_STATES = [
    Bad("out_a", lambda t: t.double(),
        "out_a must have dtype float32, bfloat16 or float16, found float64"),
    Bad("out_b", lambda t: t.half(), "out_b must have dtype float32 (as out_a), found float16"),
    Bad("out", lambda t: t.bfloat16(), "out must have dtype float32 (as out_a), found bfloat16"),
    Bad("lse_a", lambda t: t.double(), "lse_a must have dtype float32, found float64"),
    Bad("lse_b", lambda t: t.half(), "lse_b must have dtype float32, found float16"),
    Bad("lse", lambda t: t.double(), "lse must have dtype float32, found float64"),
    Bad("out_a", lambda t: t.to("meta"), "lse_a must be on the device of out_a (meta), found cpu"),
    Bad("out_b", lambda t: t.to("meta"), "out_b must be on the device of out_a (cpu), found meta"),
    Bad("lse_a", lambda t: t.to("meta"), "lse_a must be on the device of out_a (cpu), found meta"),
    Bad("lse", lambda t: t.to("meta"), "lse must be on the device of out_a (cpu), found meta"),
    Bad("out_a", lambda t: t[0],
        "out_a must have shape [tokens, heads, dim] = [any, any, any], found [2, 8]"),
    Bad("out_b", lambda t: t[:2],
        "out_b must have shape [tokens, heads, dim] = [3, 2, 8], found [2, 2, 8]"),
    Bad("out_b", lambda t: t[:, :1],
        "out_b must have shape [tokens, heads, dim] = [3, 2, 8], found [3, 1, 8]"),
    Bad("out", lambda t: t[..., :4],
        "out must have shape [tokens, heads, dim] = [3, 2, 8], found [3, 2, 4]"),
    Bad("lse_a", lambda t: t.t(), "lse_a must have shape [heads, tokens] = [2, 3], found [3, 2]"),
    Bad("lse_b", lambda t: t[:1], "lse_b must have shape [heads, tokens] = [2, 3], found [1, 3]"),
    Bad("lse", lambda t: t.flatten(), "lse must have shape [heads, tokens] = [2, 3], found [6]"),
    Bad("out_a", strided,
        "out_a must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("out", strided, "out must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("lse_a", strided,
        "lse_a must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("lse", strided, "lse must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("out", lambda t: t[:1].expand(3, -1, -1),
        "out is written and must not overlap itself, found shape [3, 2, 8] with "
        "strides [0, 8, 1]"),
    Bad("lse", lambda t: t[:1].expand(2, -1),
        "lse is written and must not overlap itself, found shape [2, 3] with strides [0, 1]"),
    Bad("out_a", nothing, "out_a must be a tensor, found None"),
]

PLAN_ATTENTION = [
    Bad("block_table", lambda t: t.long(), "block_table must have dtype int32, found int64"),
    Bad("cu_seqlens_q", lambda t: t.float(), "cu_seqlens_q must have dtype int32, found float32"),
    Bad("seqused_k", lambda t: t.long(), "seqused_k must have dtype int32, found int64"),
    Bad("block_table", lambda t: t.to("meta"),
        "cu_seqlens_q must be on the device of block_table (meta), found cpu"),
    Bad("cu_seqlens_q", lambda t: t.to("meta"),
        "cu_seqlens_q must be on the device of block_table (cpu), found meta"),
    Bad("seqused_k", lambda t: t.to("meta"),
        "seqused_k must be on the device of block_table (cpu), found meta"),
    Bad("block_table", lambda t: t[:1],
        "block_table must have shape [batch, max_pages] = [2, any], found [1, 3]"),
    Bad("cu_seqlens_q", lambda t: t[:2],
        "cu_seqlens_q must have shape [batch + 1] = [3], found [2]"),
    Bad("seqused_k", lambda t: t[None], "seqused_k must have shape [batch] = [any], found [1, 2]"),
    Bad("seqused_k", lambda t: ints(20, 49),
        "seqused_k[1] = 49 exceeds what block_table can hold: 3 pages of 16 are 48 tokens"),
    Bad("seqused_k", lambda t: ints(-20, 1), "seqused_k[0] must not be negative, found -20"),
    Bad("cu_seqlens_q", lambda t: ints(1, 3, 5), "cu_seqlens_q must start with 0, found 1"),
    Bad("cu_seqlens_q", lambda t: ints(0, 3, 1),
        "cu_seqlens_q must not decrease, found 1 after 3 at sequence 1"),
    Bad("num_heads", lambda x: 5,
        "num_heads must be a positive multiple of num_kv_heads, found 5 and 2"),
    Bad("num_heads", lambda x: 0,
        "num_heads must be a positive multiple of num_kv_heads, found 0 and 2"),
    Bad("num_kv_heads", lambda x: 0,
        "num_heads must be a positive multiple of num_kv_heads, found 4 and 0"),
    Bad("num_kv_heads", lambda x: -2,
        "num_heads must be a positive multiple of num_kv_heads, found 4 and -2"),
    Bad("page_size", lambda x: 0, "page_size must be 1 to 2147483647, found 0"),
    Bad("page_size", lambda x: -16, "page_size must be 1 to 2147483647, found -16"),
    Bad("page_size", lambda x: 2**62,
        "page_size must be 1 to 2147483647, found 4611686018427387904"),
    Bad("num_heads", lambda x: 2**40,
        "num_heads must be at most 65536, found 1099511627776"),
    Bad("num_threads", lambda x: 0, "num_threads must be 1 to 4096, found 0"),
    Bad("num_threads", lambda x: 5000, "num_threads must be 1 to 4096, found 5000"),
    Bad("window_size", lambda x: (-3, 0),
        "window_left must be -1 (unlimited) or at least 0, found -3"),
    Bad("window_size", lambda x: (0, -2),
        "window_right must be -1 (unlimited) or at least 0, found -2"),
    Bad("block_table", strided,
        "block_table must be contiguous in its last dimension (stride 1), found stride 2"),
    Bad("seqused_k", strided,
        "seqused_k must be contiguous in its last dimension (stride 1), found stride 2"),
]
# fmt: on

TABLES = {
    "append_kv": APPEND_KV,
    "copy_pages": COPY_PAGES,
    "merge_states": MERGE_STATES,
    "plan_attention": PLAN_ATTENTION,
}


@pytest.mark.parametrize("op", TABLES)
def test_the_good_call_is_good(op):
    # so a refusal below is about the change
    call_front(op, good_call(op))
    call_dispatcher(op, good_call(op))


@pytest.mark.parametrize(
    ("op", "bad"), [p for op, table in TABLES.items() for p in numbered(op, table)]
)
def test_refused(op, bad):
    check_refused(op, bad)


def shifted(a):
    base = torch.zeros(4, 2, 8)
    return a | {"out_a": base[:3], "out": base[1:]}


def lse_in_out(a):
    return a | {"lse": a["out"].view(-1)[:6].view(2, 3)}


def lse_in_input(a):
    return a | {"lse": a["out_b"].view(-1)[:6].view(2, 3)}


def out_over_lse(a):
    base = torch.zeros(48)
    return a | {"lse_b": base[:6].view(2, 3), "out": base.view(3, 2, 8)}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (shifted, "out must not overlap out_a in memory"),
        (lse_in_out, "lse must not overlap out in memory"),
        (lse_in_input, "lse must not overlap out_b in memory"),
        (out_over_lse, "out must not overlap lse_b in memory"),
    ],
)
def test_merge_does_not_write_over_what_it_reads(change, text):
    # Exactly in place is allowed; shifted, a row would be read after it was written.
    with pytest.raises(ValueError, match=f"^{text}$"):
        call_front("merge_states", change(good_call("merge_states")))


@pytest.mark.parametrize("target", ["k_cache", "v_cache"])
@pytest.mark.parametrize("source", ["key", "value", "slot_mapping"])
def test_append_does_not_write_over_what_it_reads(source, target):
    a = good_call("append_kv")
    a["key"], a["v_cache"] = torch.ones(3, 2, 8), torch.zeros(4, 16, 2, 8)
    a["k_cache"] = torch.zeros(4, 16, 2, 8)
    shared = a[target][0, :3]
    a[source] = shared.view(-1)[:6].view(torch.int64) if source == "slot_mapping" else shared
    with pytest.raises(ValueError, match=f"^{target} must not overlap {source} in memory$"):
        call_front("append_kv", a)


def test_append_keeps_keys_and_values_apart():
    a = good_call("append_kv")
    a["k_cache"], a["key"] = a["v_cache"], torch.ones(3, 2, 8)
    with pytest.raises(ValueError, match=r"^k_cache must not overlap v_cache in memory$"):
        call_front("append_kv", a)
    packed = torch.zeros(4, 16, 2, 16)  # K | V in one buffer: they interleave without touching
    a["k_cache"], a["v_cache"] = packed[..., :8], packed[..., 8:]
    call_front("append_kv", a)
    assert packed.sum() == 2 * 2 * 16


@pytest.mark.parametrize("source", ["src", "dst"])
def test_copy_does_not_write_over_the_page_ids(source):
    a = good_call("copy_pages")
    a["caches"][1].view(-1)[:4] = a[source].clone().view(torch.float32)
    a[source] = a["caches"][1].view(-1)[:4].view(torch.int64)
    with pytest.raises(ValueError, match=rf"^caches\[1\] must not overlap {source} in memory$"):
        call_front("copy_pages", a)
