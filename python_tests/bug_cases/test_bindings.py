"""Peers' faults in bindings, devices, plans, processes, dead on arrival here (BC-37 to BC-42)."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from bad_input import call_dispatcher, call_front, good_call
from cases import Case, Span, build
from kit import assert_bitwise_equal, run_python, threads

from wim_ext import ops

OPS = ("append_kv", "copy_pages", "merge_states", "paged_attention", "plan_attention")


def dispatcher_arguments(op):
    a = good_call(op)
    if "window_size" in a:
        left, right = a.pop("window_size")
        a |= {"window_left": left, "window_right": right}
    if op == "paged_attention":
        a["lse"] = torch.zeros(4, 5)
    return a


@pytest.mark.parametrize("op", OPS)
def test_bc37_opcheck(op):
    """Every written argument is declared mutable; the toy below shows what it costs if not."""
    for overload in getattr(torch.ops.wim_ext, op).overloads():
        torch.library.opcheck(
            getattr(getattr(torch.ops.wim_ext, op), overload),
            (),
            dispatcher_arguments(op),
            test_utils=("test_schema", "test_faketensor"),
        )


def test_bc37_opcheck_would_notice():
    @torch.library.custom_op("wim_ext_test::fill", mutates_args=(), schema="(Tensor x) -> ()")
    def fill(x):
        x.fill_(12.0)

    @fill.register_fake
    def _(x):
        return None

    with pytest.raises(Exception, match="mutable"):
        torch.library.opcheck(fill, (torch.zeros(3),), test_utils="test_schema")


def moved(value, device):
    return [v.to(device) for v in value] if isinstance(value, list) else value.to(device)


OPTIONAL = {"alibi_slopes": 4, "sinks": 4, "k_scale": 2, "v_scale": 1}
TENSORS = [
    (op, name)
    for op in OPS
    for name, value in good_call(op).items()
    if isinstance(value, torch.Tensor) or name in OPTIONAL
]


@pytest.mark.parametrize("call", [call_front, call_dispatcher])
@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_bc39_devices(op, name, call):
    """One argument on another device than the rest: an error that names argument and device."""
    a = good_call(op)
    a[name] = moved(torch.ones(OPTIONAL[name]) if a[name] is None else a[name], "meta")
    with pytest.raises(ValueError, match=r"^\w+ must be on the (device of \w+ \(.*\)|cpu), found"):
        call(op, a)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_bc39_second_cuda_device():
    a = {
        name: moved(value, "cuda:1") if isinstance(value, torch.Tensor | list) else value
        for name, value in good_call("merge_states").items()
    }
    out, _ = ops.merge_states(**a)
    assert out.device == torch.device("cuda:1")
    assert (out == 0).all()


def test_bc40_two_plans():
    """Plans are values: any number alive, used in any order and repeatedly, also at once."""
    batches = [(Span(1, 900),), (Span(70, 200), Span(1, 150, 0, 140)), (Span(5, 5),)]
    inputs = [
        build(Case(f"bc40-{i}", spans, torch.bfloat16, 6, 2, 64, 64, 32))
        for i, spans in enumerate(batches)
    ]
    expected = [ops.paged_attention(*x.args) for x in inputs]
    plans = [ops.plan_attention(*x.tables, **x.plan_options) for x in inputs]
    before = [plan.tensor.clone() for plan in plans]
    with threads(2):
        for order in ([0, 1, 2], [2, 1, 0], [1, 1, 0, 2, 0, 1]):
            for i in order:
                x = inputs[i]
                assert_bitwise_equal(ops.paged_attention(*x.args, plan=plans[i]), expected[i])
    for plan, then in zip(plans, before, strict=True):
        assert_bitwise_equal(plan.tensor, then, "a plan after use")
    # Making a plan does not touch the last one's memory, and a copy is as good.
    copied = dataclasses.replace(plans[0], tensor=plans[0].tensor.clone())
    del plans[0]
    assert_bitwise_equal(ops.paged_attention(*inputs[0].args, plan=copied), expected[0])


FORK = """
import os, sys, time
import torch
from cases import Case, Span, build
from wim_ext import ops
torch.set_num_threads(2)
x = build(Case("bc42", (Span(300, 900), Span(1, 700)), torch.float16))
expected = ops.paged_attention(*x.args)  # the thread pool is running now
expected_bytes, out_lse = expected.numpy().tobytes(), torch.zeros(4, 301)
child = os.fork()
if child == 0:
    # Only our ops and tiny torch ones: a large torch op would hang here, which is torch's limit.
    out = ops.paged_attention(*x.args)
    row = x.k_cache[0, :2].clone()
    ops.copy_pages([x.k_cache], torch.tensor([0]), torch.tensor([1]))
    ops.append_kv(row, row, x.k_cache, x.v_cache, torch.tensor([20, 40]))
    ops.merge_states(out, out_lse, out, out_lse)
    os._exit(0 if out.numpy(force=True).tobytes() == expected_bytes else 1)
deadline = time.monotonic() + float(sys.argv[1])
while time.monotonic() < deadline:
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        print(os.waitstatus_to_exitcode(status))
        break
    time.sleep(0.02)
else:
    os.kill(child, 9)
    print("hangs")
assert torch.equal(ops.paged_attention(*x.args), expected)  # and the parent goes on
"""


def test_bc42_after_fork():
    """A forked child has no thread pool: the op must finish there all the same."""
    done = run_python(FORK, "20", timeout=90)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


SPAWN = """
import multiprocessing
from wim_ext import ops
from cases import Case, Span, build

def attend(_):
    x = build(Case("bc42-spawn", (Span(5, 50),)))
    return ops.paged_attention(*x.args).sum().item()

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(attend, [0]) == [attend(0)]
"""


def test_bc42_spawned_process(tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(SPAWN)
    code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = run_python(code, timeout=90)
    assert done.returncode == 0, done.stderr
