"""Changes to somebody else's model, made for the length of one forward and then undone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from wim_ext.rope import RopePin

__all__ = ["borrowed"]

_locks: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_locks_guard = threading.Lock()


def _lock_of(hf_model: nn.Module) -> threading.RLock:
    with _locks_guard:
        return _locks.setdefault(hf_model, threading.RLock())


@contextmanager
def borrowed(
    hf_model: Any, *, implementation: str | None = None, pin: RopePin | None = None
) -> Iterator[None]:
    """Holds `hf_model` alone, with another attention implementation and pinned rotary frequencies.

    Several wrappers over one model take turns here. Whoever calls the model itself, in another
    thread, at the same time, has to hold it too; the attention function refuses calls that come
    from outside a step, so such a mistake is an error and never a wrong answer.
    """
    with _lock_of(hf_model):
        configs = _attention_configs(hf_model) if implementation is not None else []
        before = [config._attn_implementation_internal for config in configs]
        try:
            for config in configs:
                config._attn_implementation_internal = implementation
            if pin is None:
                yield
            else:
                with pin.applied():
                    yield
        finally:
            for config, value in zip(configs, before, strict=True):
                config._attn_implementation_internal = value


def _attention_configs(hf_model: Any) -> list[Any]:
    """Every config that some module of the model reads its attention implementation from."""
    found: dict[int, Any] = {}
    for module in hf_model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())
