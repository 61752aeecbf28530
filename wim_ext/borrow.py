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


class _Lent:
    """A model's lock, and every config that some module of it reads its implementation from."""

    def __init__(self, hf_model: Any) -> None:
        self.lock = threading.RLock()
        found: dict[int, Any] = {}
        for module in hf_model.modules():
            config: Any = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation_internal"):
                found[id(config)] = config
        self.configs = list(found.values())


_lent: WeakKeyDictionary[nn.Module, _Lent] = WeakKeyDictionary()
_lent_guard = threading.Lock()


def _lent_of(hf_model: Any) -> _Lent:
    with _lent_guard:
        if hf_model not in _lent:
            _lent[hf_model] = _Lent(hf_model)
        return _lent[hf_model]


@contextmanager
def borrowed(
    hf_model: Any, *, implementation: str | None = None, pin: RopePin | None = None
) -> Iterator[None]:
    """Holds `hf_model` alone, with another attention implementation and pinned rotary frequencies.

    Several wrappers over one model take turns here. Whoever calls the model itself in another
    thread while steps run has to hold it too, `with borrowed(hf_model): ...`, or else the call
    meets the step's implementation: as a rule a RuntimeError, but a call that is overtaken between
    its mask and its attention runs without a mask.
    """
    lent = _lent_of(hf_model)
    with lent.lock:
        configs = lent.configs if implementation is not None else []
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
