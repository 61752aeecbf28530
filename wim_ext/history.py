"""The caches of transformers as values: made to keep every token, copied, cut back.

`DynamicCache` grows by `torch.cat`, so a copy may share keys and values with its original; states
of recurrent and convolution layers are written in place, so a copy needs its own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache, cache_utils

__all__ = ["can_crop", "cropped", "new_history", "shared_copy"]

_GROWN_BY_CAT = ("keys", "values")


def new_history(config: Any) -> Any:
    """An empty cache of the model's layer types, in which windowed layers keep every token too.

    transformers drops keys that have left the window, after which no earlier token can be returned
    to; its masks apply the window to a full layer just as well.
    """
    cache = DynamicCache(config=config)
    full: Any = cache_utils.DynamicLayer
    windowed = cache_utils.DynamicSlidingWindowLayer
    cache.layers = [full() if type(layer) is windowed else layer for layer in cache.layers]
    return cache


def shared_copy(cache: Any) -> Any:
    """A cache that can go its own way from here."""
    if not hasattr(cache, "layers"):
        return copy.deepcopy(cache)
    twin = copy.copy(cache)
    twin.layers = [_layer_copy(layer) for layer in cache.layers]
    return twin


def _layer_copy(layer: Any) -> Any:
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if name not in _GROWN_BY_CAT:
            setattr(twin, name, _cloned(value))
    return twin


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_cloned(item) for item in value]
    return value


def can_crop(cache: Any) -> bool:
    """Whether every layer can go back to any earlier token."""
    layers = getattr(cache, "layers", None)
    return layers is not None and all(map(_layer_can_crop, layers))


def _layer_can_crop(layer: Any) -> bool:
    if isinstance(layer, getattr(cache_utils, "DummyLayer", ())):
        return True
    states = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
    if isinstance(layer, states) or getattr(layer, "is_sliding", False):
        return False
    return isinstance(layer, cache_utils.DynamicLayer)


def cropped(cache: Any, count: int) -> Any:
    """A copy of `cache` without its last `count` tokens; needs `can_crop`."""
    twin = shared_copy(cache)
    if count:
        for layer in twin.layers:
            layer.crop(-count)
    return twin
