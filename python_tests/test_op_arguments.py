"""Arguments that never reach an op's own checks: wrong Python types, wrong kinds of tensors,
tensors that want a gradient. They too are ValueErrors that name the argument and change nothing.
"""

from __future__ import annotations

import re

import pytest
import torch
from bad_input import all_tensors, call_front, good_call, ints
from kit import unchanged

from wim_ext import ops

# fmt: off
WRONG_TYPES = [
    ("paged_attention", "query", [1.0], "query must be a tensor, found list"),
    ("paged_attention", "query", None, "query must be a tensor, found None"),
    ("paged_attention", "v_cache", None, "v_cache must be a tensor, found None"),
    ("paged_attention", "k_cache", 3, "k_cache must be a tensor, found int"),
    ("paged_attention", "seqused_k", [20, 40], "seqused_k must be a tensor, found list"),
    ("paged_attention", "sinks", 1.0, "sinks must be a tensor, found float"),
    ("paged_attention", "softcap", None, "softcap must be of type float, found NoneType"),
    ("paged_attention", "softmax_scale", "1", "softmax_scale must be of type float, found str"),
    ("paged_attention", "window_size", 5,
     "window_size must be (left, right), two integers, found 5"),
    ("paged_attention", "window_size", (1, 2, 3),
     "window_size must be (left, right), two integers, found (1, 2, 3)"),
    ("paged_attention", "window_size", (1.5, -1), "window_left must be of type int, found float"),
    ("paged_attention", "window_size", (0, 2**63), "window_right must fit 64 bits"),
    ("paged_attention", "plan", ints(1, 2), "plan must be an AttentionPlan, found Tensor"),
    ("plan_attention", "window_size", None,
     "window_size must be (left, right), two integers, found None"),
    ("plan_attention", "num_heads", 4.0, "num_heads must be of type int, found float"),
    ("append_kv", "key", (1, 2), "key must be a tensor, found tuple"),
    ("copy_pages", "caches", torch.zeros(1), "caches must be a list of tensors, found Tensor"),
    ("merge_states", "lse_b", 0.0, "lse_b must be a tensor, found float"),
]
# fmt: on


def exactly(text):
    return f"^{re.escape(text)}$"


@pytest.mark.parametrize(("op", "name", "value", "text"), WRONG_TYPES)
def test_wrong_types(op, name, value, text):
    a = good_call(op)
    a[name] = value
    if op != "plan_attention":
        a.pop("out", None)  # made by the front, from the shapes of what it was given
    with unchanged(*all_tensors(a)), pytest.raises(ValueError, match=exactly(text)):
        call_front(op, a)


@pytest.mark.parametrize("name", ["out_a", "lse_a"])
def test_merging_nothing(name):
    a = {k: v for k, v in good_call("merge_states").items() if k not in ("out", "lse")}
    a[name] = None
    with pytest.raises(ValueError, match=f"^{name} must be a tensor, found None$"):
        ops.merge_states(**a)


@pytest.mark.parametrize("shape", [(), (16,), (5, 16), (5, 4, 0), (5, 4, 16, 1)])
def test_query_of_any_shape(shape):
    """`out`, `lse` and the default scale are made from it before the op can refuse it."""
    a = good_call("paged_attention") | {"query": torch.zeros(shape), "softmax_scale": None}
    a["out"] = None
    with pytest.raises(ValueError, match=r"^query must have shape \[total_q, num_heads, head_dim"):
        ops.paged_attention(**a, return_lse=True)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (torch.Tensor.to_sparse, "query must be a dense (strided) tensor, found torch.sparse_coo"),
        (torch.Tensor.to_mkldnn, "query must be a dense (strided) tensor, found torch._mkldnn"),
        (
            lambda t: torch.nested.nested_tensor(list(t), layout=torch.jagged),
            "query must be a dense (strided) tensor, found a nested tensor",
        ),
    ],
)
def test_only_dense_tensors(change, text):
    a = good_call("paged_attention")
    a["query"] = change(a["query"])
    with pytest.raises(ValueError, match=exactly(text)):
        call_front("paged_attention", a)


NO_GRADIENT = (
    "^{} requires a gradient, which wim_ext does not compute: call under torch.no_grad"
    r"\(\) or torch.inference_mode\(\), or detach\(\) it$"
)


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, name) for op in ("append_kv", "merge_states", "paged_attention")
     for name, value in good_call(op).items()
     if isinstance(value, torch.Tensor) and value.is_floating_point()],
)  # fmt: skip
def test_a_gradient_is_refused(op, name):
    """The ops have none; a result that looks like a constant would train the wrong thing."""
    a = good_call(op)
    a[name] = a[name].clone().requires_grad_()
    with unchanged(*all_tensors(a)), pytest.raises(ValueError, match=NO_GRADIENT.format(name)):
        call_front(op, a)
    with torch.no_grad():
        call_front(op, a)
    with torch.inference_mode():
        call_front(op, a)


def test_a_gradient_is_refused_in_a_list():
    a = good_call("copy_pages")
    a["caches"][1].requires_grad_()
    with pytest.raises(ValueError, match=NO_GRADIENT.format(r"caches\[1\]")):
        call_front("copy_pages", a)


def test_a_gradient_is_refused_when_compiled():
    a = good_call("paged_attention")
    a["query"].requires_grad_()
    torch.compiler.reset()
    step = torch.compile(lambda query: ops.paged_attention(**{**a, "query": query}) + 1,
                         backend="aot_eager")  # fmt: skip
    with pytest.raises(ValueError, match=NO_GRADIENT.format("query")):
        step(a["query"])
    with torch.no_grad():
        step(a["query"])


def test_empty_tensors_have_no_strides():
    """NumPy gives an empty array the strides 0; a batch of no sequences is a batch."""
    a = good_call("paged_attention") | {"query": torch.zeros(0, 4, 16), "out": None}
    a |= {"block_table": ints(0).as_strided((0, 2), (0, 0)), "cu_seqlens_q": ints(0)}
    a["seqused_k"] = ints()
    assert ops.paged_attention(**a).shape == (0, 4, 8)
    a["out"] = torch.zeros(1).as_strided((0, 4, 8), (0, 0, 0))
    assert ops.paged_attention(**a).shape == (0, 4, 8)
    b = good_call("plan_attention")
    b |= {name: a[name] for name in ("block_table", "cu_seqlens_q", "seqused_k")}
    assert ops.plan_attention(**b).report.items == 0
