"""Every op works inside torch.compile(fullgraph=True) and gives the bits of eager mode.

The backend is aot_eager: it traces, functionalises (where undeclared writes get lost) and runs, but
needs no C++ compiler.
"""

from __future__ import annotations

import pytest
import torch
from cases import EDGES, Case, Span, build
from kit import assert_bitwise_equal

from wim_ext import ops

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = (Span(3, 20), Span(1, 33))
CASES = [
    Case("compile-plain", FEW),
    Case("compile-options", FEW, torch.bfloat16, 6, 2, 64, 32, 16, "v_transposed", "fused",
         True, (10, -1), 5.0, "batch", True, "heads", 2.0),
    Case("compile-full", FEW, torch.float16, causal=False),
    next(c for c in EDGES if "sinks_without_keys" in c.name),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()


def compiled(f, dynamic=None):
    return torch.compile(f, fullgraph=True, backend="aot_eager", dynamic=dynamic)


def test_append_kv():
    def step(key, k_cache, v_cache, slots):
        ops.append_kv(key * 2, key + 1, k_cache, v_cache, slots)
        return k_cache.sum() + v_cache.sum()  # what was written is seen

    def caches():
        return torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 2, 8)

    key, slots = torch.randn(5, 2, 8), torch.tensor([3, -1, 63, 0, 17])
    (k1, v1), (k2, v2) = caches(), caches()
    assert_bitwise_equal(compiled(step)(key, k1, v1, slots), step(key, k2, v2, slots))
    assert_bitwise_equal(k1, k2)
    assert_bitwise_equal(v1, v2)
    assert k1.any()


def test_copy_pages():
    def step(a, b, src, dst):
        ops.copy_pages([a, b], src, dst)
        return a.sum() + b.sum()

    pages = torch.tensor([0, 1]), torch.tensor([3, 2])
    a, b = torch.randn(4, 3), torch.randn(5, 2, 2)
    eager = [a.clone(), b.clone()]
    assert_bitwise_equal(compiled(step)(a, b, *pages), step(*eager, *pages))
    assert_bitwise_equal(a, eager[0])
    assert_bitwise_equal(b, eager[1])


@pytest.mark.parametrize("given", [False, True])
def test_merge_states(given):
    def step(a, b, out, lse):
        more = {"out": out, "lse": lse} if given else {}
        merged, total = ops.merge_states(*a, *b, **more)
        return merged * 1, total * 1

    a, b = [(torch.randn(5, 3, 8), torch.randn(3, 5)) for _ in range(2)]
    room = torch.zeros(5, 3, 8), torch.zeros(3, 5)
    found = compiled(step)(a, b, *(t.clone() for t in room))
    for mine, wanted in zip(found, step(a, b, *room), strict=True):
        assert_bitwise_equal(mine, wanted)


@pytest.mark.parametrize("how", ["plain", "lse", "plan", "out"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_paged_attention(case, how):
    x = build(case)
    plan = ops.plan_attention(*x.tables, **x.plan_options) if how == "plan" else None

    def step(*args):
        out = x.output() if how == "out" else None
        found = ops.paged_attention(*args, **x.options, plan=plan, out=out, return_lse=how == "lse")
        return found[0] + found[1].sum() if how == "lse" else found + 1

    assert_bitwise_equal(compiled(step)(*x.args), step(*x.args))


def test_append_then_attend():
    """The order of a write and the read after it survives functionalisation."""
    x = build(CASES[0])
    slots = torch.tensor([p * 16 + o for p, o in [(int(x.block_table[1, 2]), 0)]])

    def step(query, key, k_cache, v_cache, *tables):
        ops.append_kv(key, key, k_cache, v_cache, slots)
        return ops.paged_attention(query, k_cache, v_cache, *tables)

    key = torch.randn(1, 2, 64)
    fresh = [x.k_cache.clone(), x.v_cache.clone()]
    eager = step(x.query, key, *fresh, *x.tables)
    before = ops.paged_attention(*x.args)
    found = compiled(step)(x.query, key, x.k_cache, x.v_cache, *x.tables)
    assert_bitwise_equal(found, eager)
    assert not torch.equal(found, before)


def test_dynamic_shapes_compile_once():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(ops.paged_attention, fullgraph=True, backend=backend, dynamic=True)
    for q, kv in [(5, 9), (7, 30), (12, 48)]:
        x = build(Case(f"dynamic{q}", (Span(q, kv),)))
        table = x.block_table[:, :3]
        args = (x.query, x.k_cache, x.v_cache, table.clone(), *x.tables[1:])
        assert_bitwise_equal(step(*args), ops.paged_attention(*x.args))
    assert len(graphs) <= 2


@pytest.mark.parametrize("dynamic", [None, True])
def test_gradients_enabled(dynamic):
    """The check for gradients is traced too, with sizes that are no numbers."""
    x = build(CASES[0])
    with torch.enable_grad():
        fast = compiled(ops.paged_attention, dynamic)
        assert_bitwise_equal(fast(*x.args), ops.paged_attention(*x.args))
        with pytest.raises(Exception, match=r"an argument requires a gradient|Observed exception"):
            fast(x.query.clone().requires_grad_(), *x.args[1:])


def test_errors_keep_their_words():
    x = build(CASES[0])
    with pytest.raises(Exception, match="k_cache must have dtype float16"):
        compiled(ops.paged_attention)(x.query.half(), x.k_cache, x.v_cache, *x.tables)
