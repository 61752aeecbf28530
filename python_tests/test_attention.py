"""The parity matrix: paged_attention against float64, over everything that it takes.

Each case of `cases.py` (WIM_TEST_TIER=full: all triples of values instead of all pairs) is run with
NaN in every slot that no sequence may see, and then again with other poison, other threads, a plan
of its own, another kind of output: the bits must not change.
"""

from __future__ import annotations

import os

import pytest
import torch
from cases import EDGES, Case, build, pairwise, triplewise
from kit import assert_bitwise_equal, only_writes, run_python, threads, unchanged
from oracle import assert_right, expected

from wim_ext import ops

# Many small calls: one thread is faster, and the cases' own check of two threads stands out.
pytestmark = pytest.mark.usefixtures("one_thread")
CASES = (triplewise() if os.environ.get("WIM_TEST_TIER") == "full" else pairwise()) + EDGES


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_matrix(case: Case):
    x = build(case)
    with unchanged(*x.args, *(v for v in x.options.values() if isinstance(v, torch.Tensor))):
        out, lse = ops.paged_attention(*x.args, **x.options, return_lse=True)
    assert_right(expected(case), out, lse)

    def same(what: str, **more) -> None:
        again = ops.paged_attention(*x.args, **x.options, **more)
        again = again if isinstance(again, tuple) else (again,)
        for found, wanted in zip(again, (out, lse), strict=False):
            assert_bitwise_equal(found, wanted, what)

    same("with a plan", plan=ops.plan_attention(*x.tables, **x.plan_options), return_lse=True)
    plan = ops.plan_attention(*x.tables, **x.plan_options, num_threads=7)
    with threads(2):
        same("on two threads", return_lse=True)
        same("on two threads, with a plan for seven", plan=plan, return_lse=True)
    for poison in (torch.inf, torch.finfo(case.dtype).max, 0.0):
        x.poison(poison)
        same(f"unused slots filled with {poison}", return_lse=True)
    if x.query.numel():
        given = x.output()
        with only_writes(given):
            assert ops.paged_attention(*x.args, **x.options, out=given) is given
        assert_bitwise_equal(given, out, "into a strided out")


def other_isas() -> list[str]:
    """The instruction sets that this machine has and that are not chosen by themselves."""
    names = torch.ops.wim_ext.cpu_isas().split()
    return [n for n in names if ":" not in n and n != torch.ops.wim_ext.cpu_isa()]


RUN_ALL = """
import sys, torch
from cases import build
from kit import assert_bitwise_equal
from test_attention import CASES
from wim_ext import ops

assert torch.ops.wim_ext.cpu_isa() == sys.argv[1]
torch.set_num_threads(1)
results = {}
for case in CASES:
    x = build(case)
    results[case.name] = ops.paged_attention(*x.args, **x.options, return_lse=True)
    if case.flops < 20_000_000:
        plan = ops.plan_attention(*x.tables, **x.plan_options, num_threads=5)
        out = ops.paged_attention(*x.args, **x.options, plan=plan)
        assert_bitwise_equal(out, results[case.name][0], case.name)
torch.save(results, sys.argv[2])
"""


@pytest.mark.parametrize("isa", other_isas())
def test_matrix_on_every_isa(isa, tmp_path):
    done = run_python(
        RUN_ALL, isa, str(tmp_path / "results.pt"), env={"WIM_CPU_ISA": isa}, timeout=600
    )
    assert done.returncode == 0, done.stderr
    results = torch.load(tmp_path / "results.pt")
    wrong = []
    for case in CASES:
        try:
            assert_right(expected(case), *results[case.name])
        except AssertionError as error:
            wrong.append(f"{case.name}: {error}")
    assert not wrong, "\n".join(wrong)


def test_there_is_a_portable_isa():
    assert "portable" in torch.ops.wim_ext.cpu_isas().split()


ATTEND_ONCE = """
from cases import EDGES, build
from wim_ext import ops
x = build(EDGES[0])
try:
    ops.paged_attention(*x.args)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("isa", ["sse9", "avx512 "])
def test_unknown_isa_is_refused(isa):
    built_in = ", ".join(n.split(":")[0] for n in torch.ops.wim_ext.cpu_isas().split())
    done = run_python(ATTEND_ONCE, env={"WIM_CPU_ISA": isa})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"WIM_CPU_ISA={isa} is unknown; built in are: {built_in}\n"


def test_missing_isa_is_refused():
    names = torch.ops.wim_ext.cpu_isas().split()
    missing = [n.split(":")[0] for n in names if ":" in n]
    if not missing:
        pytest.skip("this machine has every instruction set that is built in")
    done = run_python(ATTEND_ONCE, env={"WIM_CPU_ISA": missing[0]})
    available = ", ".join(n for n in names if ":" not in n)
    wanted = f"is not supported by this CPU, which has: {available}\n"
    assert done.stdout == f"WIM_CPU_ISA={missing[0]} {wanted}", done.stderr


def test_expanded_caches_can_be_read():
    # One KV head for all: stride 0 where nothing is written is fine.
    x = build(Case("expanded", EDGES[0].spans, num_heads=4, num_kv_heads=2))
    k, v = (c[:, :, :1].expand_as(c) for c in (x.k_cache, x.v_cache))
    out = ops.paged_attention(x.query, k, v, *x.tables)
    assert_bitwise_equal(
        out, ops.paged_attention(x.query, k.contiguous(), v.contiguous(), *x.tables)
    )


def test_reference_needs_no_kernel():
    # The two check each other, so neither may be made of the other.
    code = "import sys, wim_ext.reference; print('wim_ext._native' in sys.modules)"
    assert run_python(code).stdout == "False\n"
