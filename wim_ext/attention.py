"""The attention function that transformers calls: appends K and V to pages and attends over them.

It is registered once, under the name "wim". A step tells it through a context variable where the
pages are: some models drop keyword arguments that they do not know (StableLM, Nemotron), none can
drop this. The name has no mask function, so transformers builds no mask; what a mask would say
comes from the step's metadata and from the layer's own arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from wim_ext import ops
from wim_ext.errors import ModelNotSupported

__all__ = ["IMPLEMENTATION", "Step", "attend"]

IMPLEMENTATION = "wim"
_MAX_HEAD_DIM = 256
_KNOWN_LAYERS = (None, "full_attention", "sliding_attention")


class Step:
    """Where one forward finds its pages; remembers which layers have come by.

    Args:
        cache: a `PagedKVCache`; its layers are made when their first keys arrive.
        batch: what `cache.reserve` returned for this forward.
    """

    _current: ContextVar[Step | None] = ContextVar("wim_ext_step", default=None)

    def __init__(self, cache: Any, batch: Any) -> None:
        self.cache = cache
        self.batch = batch
        self.layers_seen: set[int] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Makes this the step of every `attend` call of this thread."""
        token = Step._current.set(self)
        try:
            yield
        finally:
            Step._current.reset(token)

    @staticmethod
    def current() -> Step:
        step = Step._current.get()
        if step is None:
            raise RuntimeError(
                "the model was called while a PagedModel was using it in another thread; "
                "call it when no step runs, or give each thread its own model"
            )
        return step


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer over the step's pages, in the form transformers expects.

    Args:
        module: the attention module; `layer_idx` says which pages are its own.
        query: [1, num_heads, tokens, head_dim], after RoPE and QK norm.
        key, value: [1, num_kv_heads, tokens, head_dim or v_head_dim], not repeated for groups.
        scaling: factor of the scores; None is 1 / sqrt(head_dim).
        sliding_window: number of keys a row sees, its own included.
        s_aux: [num_heads], the sinks' logits.

    Returns:
        ([1, tokens, num_heads, v_head_dim], None)

    Raises:
        ModelNotSupported: the layer attends in a way that these arguments do not say.
    """
    step = Step.current()
    layer = _layer_index(module, step)
    _refuse_unknown(module, layer, attention_mask, position_bias, options)
    _refuse_silent(module, layer, sliding_window, softcap)
    _refuse_shape(layer, query, key, value)
    num_heads, num_kv_heads = query.shape[1], key.shape[1]
    k_cache, v_cache = step.cache.layer(
        layer, num_kv_heads, key.shape[-1], value.shape[-1], key.dtype
    )
    batch = step.batch
    ops.append_kv(_by_token(key), _by_token(value), k_cache, v_cache, batch.slot_mapping)
    # A window of W keys ends at the row's own position: W - 1 lie to its left.
    window = (-1, -1) if sliding_window is None else (sliding_window - 1, -1)
    out = ops.paged_attention(
        _by_token(query),
        k_cache,
        v_cache,
        batch.block_table,
        batch.cu_seqlens_q,
        batch.seqused_k,
        softmax_scale=scaling,
        window_size=window,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.detach().float(),
        plan=batch.plan(num_heads, num_kv_heads, causal=True, window_size=window),
    )
    return out.unsqueeze(0), None


def _by_token(states: Tensor) -> Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, dim] with the last dimension contiguous."""
    states = states[0].transpose(0, 1)
    return states if states.stride(-1) == 1 else states.contiguous()


def _layer_index(module: Any, step: Step) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ModelNotSupported(f"{type(module).__name__} does not say which layer it is")
    if layer in step.layers_seen:
        raise ModelNotSupported(f"layer {layer} attends twice in one forward")
    step.layers_seen.add(layer)
    return layer


def _refuse_unknown(
    module: Any,
    layer: int,
    attention_mask: Tensor | None,
    position_bias: Tensor | None,
    options: dict[str, Any],
) -> None:
    """Refuses what arrives and would have to be honoured, but has no counterpart in the op."""
    if attention_mask is not None:
        raise ModelNotSupported(f"layer {layer} brings an attention mask of its own")
    if position_bias is not None:
        raise ModelNotSupported(f"layer {layer} adds a position bias to its scores")
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        raise ModelNotSupported(f"layer {layer} is not causal")
    if options.get("dropout"):
        raise ModelNotSupported(f"layer {layer} uses dropout; call .eval() on the model first")


def _refuse_silent(
    module: Any, layer: int, sliding_window: int | None, softcap: float | None
) -> None:
    """Refuses what the config names but the call does not bring: it would be left out unnoticed."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds is not None and layer < len(kinds) else None
    if kind not in _KNOWN_LAYERS:
        raise ModelNotSupported(f"layer {layer} is of the kind {kind}")
    windowed = kind == "sliding_attention" or (
        kind is None and getattr(config, "sliding_window", None) is not None
    )
    if windowed and sliding_window is None:
        raise ModelNotSupported(f"layer {layer} has a sliding window that it does not pass on")
    if getattr(config, "attn_logit_softcapping", None) and not softcap:
        raise ModelNotSupported(f"layer {layer} has a softcap that it does not pass on")


def _refuse_shape(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
    if query.shape[0] != 1:
        raise ModelNotSupported(f"layer {layer} splits the packed row into {query.shape[0]}")
    for name, size in (("head_dim", key.shape[-1]), ("v_head_dim", value.shape[-1])):
        if size % 8 or size > _MAX_HEAD_DIM:
            raise ModelNotSupported(
                f"layer {layer} has {name} {size}; allowed are multiples of 8 up to {_MAX_HEAD_DIM}"
            )
    if query.dtype != key.dtype or torch.is_complex(query):
        raise ModelNotSupported(f"layer {layer} mixes the dtypes {query.dtype} and {key.dtype}")


AttentionInterface.register(IMPLEMENTATION, attend)
