"""What the dispatcher calls instead of a kernel: under torch.compile, and for the meta device.

Nothing is computed. A mix of meta tensors with real ones ends here too, not in C++, so the checks
of devices are made here once more.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wim_ext import _native  # noqa: F401  (loads torch.ops.wim_ext)


def _append_kv_fake(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    _same_device(k_cache=k_cache, v_cache=v_cache, key=key, value=value)
    _on_host(k_cache, slot_mapping=slot_mapping)


def _copy_pages_fake(caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    _same_device(**{f"caches[{i}]": cache for i, cache in enumerate(caches)})
    if caches:
        _on_host(caches[0], src=src, dst=dst)


def _merge_states_fake(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor
) -> None:
    _same_device(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b, out=out, lse=lse)


def _paged_attention_fake(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seqused_k: Tensor,
    plan: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    _same_device(query=query, k_cache=k_cache, v_cache=v_cache, out=out, lse=lse)
    options = {"alibi_slopes": alibi_slopes, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
    _same_device(query=query, **options)
    tables = {"block_table": block_table, "cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k}
    _on_host(query, **tables)
    if plan is not None:
        _on_host(query, plan=plan)


def _plan_attention_fake(
    block_table: Tensor, cu_seqlens_q: Tensor, seqused_k: Tensor, *options: Any
) -> Tensor:
    _same_device(block_table=block_table, cu_seqlens_q=cu_seqlens_q, seqused_k=seqused_k)
    ints = torch.library.get_ctx().new_dynamic_size()  # depends on the lengths and on the pages
    return block_table.new_empty(ints, dtype=torch.int32)


def _same_device(**tensors: Tensor | None) -> None:
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in present.items():
        first_name, first = next(iter(present.items()))
        if tensor.device != first.device:
            raise ValueError(
                f"{name} must be on the device of {first_name} ({first.device}), "
                f"found {tensor.device}"
            )


def _on_host(reference: Tensor, **tensors: Tensor) -> None:
    """Integers that C++ reads; on the meta device with everything else, where nothing is read."""
    for name, tensor in tensors.items():
        if tensor.device.type not in ("cpu", reference.device.type):
            raise ValueError(f"{name} must be on the cpu, found {tensor.device}")


for _name, _fake in (
    ("append_kv", _append_kv_fake),
    ("copy_pages", _copy_pages_fake),
    ("merge_states", _merge_states_fake),
    ("paged_attention", _paged_attention_fake),
    ("plan_attention", _plan_attention_fake),
):
    torch.library.register_fake(f"wim_ext::{_name}", _fake)
