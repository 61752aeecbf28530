"""One good call of every op, and the small changes that make it a bad one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit import unchanged
from torch import Tensor

from wim_ext import ops
from wim_ext.plan import AttentionPlan

Change = Callable[[Any], Any]


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ints64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def strided(t: Tensor) -> Tensor:
    """The same values with stride 2 in the last dimension, and in no dimension stride 1."""
    return torch.stack([t, t], dim=-1).flatten(-2)[..., ::2]


def wider(t: Tensor) -> Tensor:
    return torch.cat([t, t], dim=-1)


def nothing(_: Any) -> None:
    return None


def good_call(op: str) -> dict[str, Any]:
    """Arguments, by name, with which the op succeeds."""
    k_cache, v_cache = torch.zeros(6, 16, 2, 16), torch.zeros(6, 16, 2, 8)
    tables = {
        "block_table": ints([3, 5, 0], [1, 2, 4]),
        "cu_seqlens_q": ints(0, 3, 5),
        "seqused_k": ints(20, 40),
    }
    if op == "append_kv":
        return {
            "key": torch.ones(3, 2, 16), "value": torch.ones(3, 2, 8), "k_cache": k_cache[:4],
            "v_cache": v_cache[:4], "slot_mapping": ints64(1, 20, -1),
        }  # fmt: skip
    if op == "copy_pages":
        return {"caches": [k_cache[:4], v_cache[:4]], "src": ints64(0, 1), "dst": ints64(2, 3)}
    if op == "merge_states":
        outs = {name: torch.zeros(3, 2, 8) for name in ("out_a", "out_b", "out")}
        return outs | {name: torch.zeros(2, 3) for name in ("lse_a", "lse_b", "lse")}
    if op == "plan_attention":
        return tables | {
            "num_heads": 4, "num_kv_heads": 2, "page_size": 16, "causal": True,
            "window_size": (-1, -1), "num_threads": 2,
        }  # fmt: skip
    return {"query": torch.zeros(5, 4, 16), "k_cache": k_cache, "v_cache": v_cache, **tables} | {
        "plan": None, "out": torch.zeros(5, 4, 8), "softmax_scale": 0.25, "causal": True,
        "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "sinks": None,
        "k_scale": None, "v_scale": None,
    }  # fmt: skip


def plan_for(**changes: Any) -> Change:
    """A plan of a batch that differs from the good call's."""

    def make(_: Any) -> AttentionPlan:
        return ops.plan_attention(**{**good_call("plan_attention"), **changes})

    return make


def damaged_plan(damage: Callable[[Tensor], Tensor]) -> Change:
    """The right plan, of which `damage` changed the integers."""

    def make(_: Any) -> AttentionPlan:
        plan = ops.plan_attention(**good_call("plan_attention"))
        return dataclasses.replace(plan, tensor=damage(plan.tensor.clone()))

    return make


def flip_last(t: Tensor) -> Tensor:
    t[-1] += 1
    return t


def call_front(op: str, arguments: dict[str, Any]) -> Any:
    """Through `wim_ext.ops`."""
    return getattr(ops, op)(**arguments)


def call_dispatcher(op: str, arguments: dict[str, Any]) -> Any:
    """Straight through `torch.ops.wim_ext`, whose arguments are positional and all given."""
    a = dict(arguments)
    left, right = a.pop("window_size", (-1, -1))
    if op in ("paged_attention", "plan_attention"):
        a |= {"window_left": left, "window_right": right}
    if op == "paged_attention":
        a |= {"plan": a["plan"] and a["plan"].tensor, "lse": None}
    return getattr(torch.ops.wim_ext, op)(**a)


def all_tensors(arguments: dict[str, Any]) -> list[Tensor]:
    found = []
    for value in arguments.values():
        found += [v for v in (value if isinstance(value, list) else [value])
                  if isinstance(v, Tensor)]  # fmt: skip
    return found


@dataclasses.dataclass(frozen=True)
class Bad:
    """A good call with one argument changed, and what must be said about it."""

    argument: str
    change: Change
    text: str
    error: type[Exception] = ValueError


def bad_id(argument: str, change: Change, text: str) -> Bad:
    return Bad(argument, change, text, IndexError)


def numbered(op: str, table: list[Bad]) -> list[Any]:
    """Parameters (op, row) with readable ids."""
    return [pytest.param(op, b, id=f"{op}-{i}-{b.argument}") for i, b in enumerate(table)]


def check_refused(op: str, bad: Bad) -> None:
    """Both ways into the op refuse the call in the same words, and nothing has changed."""
    arguments = good_call(op)
    arguments[bad.argument] = bad.change(arguments[bad.argument])
    with unchanged(*all_tensors(arguments)), pytest.raises(bad.error) as front:
        call_front(op, arguments)
    assert str(front.value) == bad.text
    assert type(front.value) is bad.error
    # Below Python the type is a prefix of the text; fake kernels raise the typed error itself.
    with (
        unchanged(*all_tensors(arguments)),
        pytest.raises((RuntimeError, bad.error)) as direct,
    ):
        call_dispatcher(op, arguments)
    if type(direct.value) is RuntimeError:
        assert f"{bad.error.__name__}: {bad.text}" in str(direct.value)
    else:
        assert str(direct.value) == bad.text
