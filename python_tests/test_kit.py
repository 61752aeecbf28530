"""The test tools themselves: a check that cannot fail proves nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import AXES, EDGES, PROFILES, Case, Span, build, pairwise
from covering import covering_array
from kit import (
    LAYOUTS,
    ROW_LAYOUTS,
    assert_bitwise_equal,
    assert_matches,
    only_writes,
    rows_like,
    run_python,
    storage_bytes,
    unchanged,
)

pytestmark = pytest.mark.usefixtures("one_thread")
INF, NAN = math.inf, math.nan


def judged(change, dtype=torch.bfloat16, lse_change=lambda t: t):
    """Judge an exact result of 4 rows (the first sees no key), rounded and then changed."""
    g = torch.Generator().manual_seed(0)
    exact = torch.randn(4, 2, 8, generator=g, dtype=torch.float64)
    exact_lse = torch.randn(2, 4, generator=g, dtype=torch.float64)
    exact[0], exact_lse[:, 0] = 0.0, -INF
    out, lse = change(exact.to(dtype)), lse_change(exact_lse.float())
    naive = (exact.float(),) if dtype == torch.float32 else ()
    seen = torch.tensor([0, 5, 6, 1000])
    assert_matches(out, exact, keys_seen=seen, naive=naive, lse=lse, exact_lse=exact_lse)


def put(index, value):
    def change(t):
        t[index] = value(t[index]) if callable(value) else value
        return t

    return change


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rounded_result_passes(dtype):
    judged(lambda t: t, dtype)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (put((1, 0, 0), lambda v: v + 0.05), r"\(R1, R2\)"),
        (put((0, 1, 3), 1e-20), r"\(R4\)"),
        (put((2, 0, 1), NAN), r"out is nan at \(2, 0, 1\), exactly .* \(R5\)"),
        (put((2, 0, 1), INF), r"out is inf at .* \(R5\)"),
    ],
)
def test_a_wrong_out_is_rejected(change, rule):
    with pytest.raises(AssertionError, match=rule):
        judged(change)


def test_float32_is_judged_by_its_own_measure():
    with pytest.raises(AssertionError, match=r"\(R1, R2\)"):
        judged(put((1, 0, 0), lambda v: v + 4e-6), torch.float32)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (put((1, 2), lambda v: v + 1e-4), r"\[head, row\] \(1, 2\) \(R3\)"),
        (put((0, 0), -1e30), r"\(R4\)"),
        (put((1, 3), -INF), r"\(R5\)"),
        (lambda t: t.double(), "lse is torch.float64"),
    ],
)
def test_a_wrong_lse_is_rejected(change, rule):
    with pytest.raises(AssertionError, match=rule):
        judged(lambda t: t, lse_change=change)


def test_bitwise():
    a = torch.tensor([1.0, NAN, 0.0])
    assert_bitwise_equal(a, a.clone())
    with pytest.raises(
        AssertionError, match=r"1 of 3 elements differ, first at \(2,\): 0.0 and -0.0"
    ):
        assert_bitwise_equal(a, torch.tensor([1.0, NAN, -0.0]))
    with pytest.raises(AssertionError, match="dtype"):
        assert_bitwise_equal(a, a.double())
    with pytest.raises(AssertionError, match="shape"):
        assert_bitwise_equal(a, a[:2])


@pytest.mark.parametrize("rows", ROW_LAYOUTS)
def test_canaries_notice_a_stray_write(rows):
    view = rows_like(rows, 3, 2, 8, torch.float32)
    with only_writes(view):
        view.fill_(1.0)
    if view.untyped_storage().nbytes() > 4 * view.numel():
        with pytest.raises(AssertionError, match="canaries"), only_writes(view):
            view.new_empty(0).set_(view.untyped_storage())[-1 if rows == "fused" else 0] = 7.0


def test_unchanged_notices_a_write_behind_the_view():
    base = torch.zeros(10)
    with pytest.raises(AssertionError, match="storage of watched tensor 0"), unchanged(base[:3]):
        base[7] = 1.0
    with unchanged(base, None):
        pass


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_have_their_shapes_and_their_contiguous_dimension(layout):
    k, v = LAYOUTS[layout](3, 5, 2, 16, 8, torch.float16)
    assert (k.shape, v.shape) == ((3, 5, 2, 16), (3, 5, 2, 8))
    assert k.stride(-1) == 1
    assert (v.stride(1) if layout == "v_transposed" else v.stride(-1)) == 1
    assert storage_bytes(k).numel() >= 2 * k.numel()
    assert k.isnan().all()


def test_covering_array_covers_and_is_small():
    axes = {"a": "pqr", "b": range(4), "c": (True, False), "d": "xy"}
    for strength in (2, 3):
        rows = covering_array(axes, strength)
        for names in itertools.combinations(axes, strength):
            wanted = set(itertools.product(*(axes[n] for n in names)))
            assert {tuple(r[n] for n in names) for r in rows} == wanted
    assert len(covering_array(axes, 2)) <= 16  # 12 is the least; all combinations are 48


def test_covering_array_leaves_out_what_is_infeasible():
    rows = covering_array(
        {"a": "pq", "b": "xy"}, 2, lambda r: (r.get("a"), r.get("b")) != ("p", "y")
    )
    assert sorted(r["a"] + r["b"] for r in rows) == ["px", "qx", "qy"]


def test_the_case_list():
    cases = [*pairwise(), *EDGES]
    assert len({c.name for c in cases}) == len(cases)
    assert len(pairwise()) <= 180
    assert {c.page_size for c in pairwise()} == set(AXES["page_size"])
    assert {s for c in pairwise() for s in [c.spans]} == set(PROFILES.values())
    assert {c.num_heads // c.num_kv_heads for c in EDGES} >= {1, 2, 3, 5, 7, 8, 16, 24, 71}


def test_build_shares_pages_as_forks_do():
    trunk, whole, half = Span(1, 40), Span(1, 40, 0, 40), Span(2, 37, 0, 35)
    x = build(Case("kit-fork", (trunk, whole, half), page_size=16))
    pages = x.block_table[:, :3].tolist()
    assert pages[1] == pages[0]  # a fork that wrote nothing has all pages of its parent
    assert pages[2][:2] == pages[0][:2]
    assert pages[2][2] != pages[0][2]  # the first write copied the half page ...
    assert_bitwise_equal(x.k_cache[pages[2][2], :3], x.k_cache[pages[0][2], :3])
    assert x.k_cache[pages[2][2], 5:].isnan().all()  # ... up to the fork, and appended two tokens
    assert x.keys_seen.tolist() == [40, 40, 36, 37]
    assert int(x.used.sum()) == 40 + 5


def test_build_leaves_stale_data_after_a_rollback():
    x = build(Case("kit-stale", (Span(1, 10, stale=4),), page_size=16))
    page = int(x.block_table[0, 0])
    assert x.k_cache[page, 10:14].isfinite().all()
    assert x.k_cache[page, 14:].isnan().all()
    assert int(x.used.sum()) == 10
    x.poison(INF)
    assert x.v_cache[page, 10:].isinf().all()


def test_run_python_reports():
    done = run_python("import sys, kit; print(sys.argv[1]); sys.exit(3)", "word")
    assert (done.returncode, done.stdout) == (3, "word\n")
