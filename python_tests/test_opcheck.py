"""torch.library.opcheck on every op and every kind of call: schema, fake kernel, dynamic shapes.

An op that writes an argument without declaring it works in eager mode and is silently wrong under
torch.compile; opcheck's schema test is what notices.
"""

from __future__ import annotations

import pytest
import torch
from bad_input import ints
from cases import EDGES, build, pairwise
from test_bad_input import TABLES

from wim_ext import ops

pytestmark = pytest.mark.usefixtures("one_thread")

OPS = torch.ops.wim_ext
# The ops have no gradient, so the autograd registration test has nothing to say about them.
TESTS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
CHECKED = {"append_kv", "copy_pages", "merge_states", "paged_attention", "plan_attention"}
# Small cases that together have every layout, dtype and option.
CASES = [c for c in (*pairwise(), *EDGES) if 0 < c.flops < 200_000][:40:4]


def check(op, *args):
    torch.library.opcheck(op, args, test_utils=TESTS)


def schemas():
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("wim_ext::"):
            short, _, overload = name.removeprefix("wim_ext::").partition(".")
            yield short, getattr(getattr(OPS, short), overload or "default")._schema


def test_every_op_with_tensors_is_checked_here():
    assert {
        name for name, schema in schemas() if any("Tensor" in str(a.type) for a in schema.arguments)
    } == CHECKED


def test_what_is_written_is_declared():
    written = {
        name: [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        for name, schema in schemas()
    }
    assert {name: names for name, names in written.items() if names} == {
        "append_kv": ["k_cache", "v_cache"],
        "copy_pages": ["caches"],
        "merge_states": ["out", "lse"],
        "paged_attention": ["out", "lse"],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_append_kv(dtype):
    k, v = (torch.zeros(4, 16, 2, d, dtype=dtype) for d in (32, 16))
    key, value = (torch.randn(5, 2, d).to(dtype) for d in (32, 16))
    check(OPS.append_kv.default, key, value, k, v, torch.tensor([3, -1, 63, 0, 17]))


def test_append_kv_without_tokens():
    k, none = torch.zeros(4, 16, 2, 8), torch.zeros(0, 2, 8)
    check(OPS.append_kv.default, none, none, k, k.clone(), torch.zeros(0, dtype=torch.int64))


def test_copy_pages():
    caches = [torch.randn(4, 16, 2, 8), torch.randn(6, 3)]
    check(OPS.copy_pages.default, caches, torch.tensor([0, 1]), torch.tensor([3, 2]))


def test_merge_states():
    args = [torch.randn(5, 3, 8), torch.randn(3, 5), torch.randn(5, 3, 8), torch.randn(3, 5)]
    check(OPS.merge_states.default, *args, torch.zeros(5, 3, 8), torch.zeros(3, 5))


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_paged_attention(case, with_lse):
    x = build(case)
    for cache in (x.k_cache, x.v_cache):  # opcheck compares all of a tensor, and NaN is not NaN
        cache.nan_to_num_(0.0)
    x.poison(0.0)
    o = x.options
    out = torch.zeros(len(x.query), case.num_heads, case.v_head_dim, dtype=case.dtype)
    lse = torch.zeros(case.num_heads, len(x.query)) if with_lse else None
    plan = ops.plan_attention(*x.tables, **x.plan_options).tensor if with_lse else None
    check(
        OPS.paged_attention.default, *(t.contiguous() for t in x.args[:1]), *x.args[1:], plan, out,
        lse, o.get("softmax_scale", 0.1), case.causal, *case.window_size, case.softcap,
        o.get("alibi_slopes"), o.get("sinks"), o.get("k_scale"), o.get("v_scale"),
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_plan_attention(causal):
    tables = ints([3, 5, 0], [1, 2, 4]), ints(0, 3, 5), ints(20, 40)
    # The size of a plan depends on its input, which the dynamic test cannot express as equal sizes.
    torch.library.opcheck(
        OPS.plan_attention.default, (*tables, 4, 2, 16, causal, -1, -1, 2), test_utils=TESTS[:2]
    )


def test_the_checked_ops_are_those_of_the_bad_input_tables():
    assert {*TABLES, "paged_attention"} == CHECKED
