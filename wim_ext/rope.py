"""Rotary embeddings whose frequencies depend on the length of the text, held still.

LongRoPE (Phi-3-128k) and dynamic NTK choose their frequencies from the longest position *in the
forward*. A text that is read in chunks would mix keys of different frequencies, and a packed step
would let one sequence decide for another. The final length is known before reading starts, so the
frequencies of that length are worked out once and used for every chunk.
Sources: LongRoPE, arXiv 2402.13753; dynamic NTK, the Hugging Face `dynamic` rope type.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["RopePin", "context_length", "depends_on_length"]

_PINNED = "wim_pinned"  # a rope type that transformers does not know is left alone


def _is_moving(rope_type: object) -> bool:
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


def _rope_types(module: nn.Module) -> dict[str | None, str]:
    """The rope type of each layer type; models with one kind of layer have the single key None."""
    found = getattr(module, "rope_type", None)
    if isinstance(found, dict):
        return dict(found)
    return {None: found} if isinstance(found, str) else {}


def _moving_modules(hf_model: nn.Module) -> list[nn.Module]:
    return [m for m in hf_model.modules() if any(map(_is_moving, _rope_types(m).values()))]


def depends_on_length(hf_model: nn.Module) -> bool:
    """Whether the model's rotary frequencies change with the length of the text."""
    return bool(_moving_modules(hf_model))


def context_length(config: Any) -> int | None:
    """Tokens that the model can attend to, or None where its config sets no limit."""
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if limit is not None and rope.get("rope_type") == "dynamic":
        # Dynamic NTK states the trained length and stretches it by its factor.
        limit = int(limit * rope.get("factor", 1.0))
    return limit


class RopePin:
    """The rotary frequencies of one final length, put into a model for as long as it is asked to.

    Args:
        hf_model: any model; without a length-dependent rotary the pin does nothing.
        total_length: tokens of the longest sequence that will be read.
    """

    def __init__(self, hf_model: nn.Module, total_length: int) -> None:
        if total_length < 1:
            raise ValueError(f"total_length is {total_length}; allowed are 1 and more")
        self.total_length = total_length
        self._pinned = [(m, _pinned_state(m, total_length)) for m in _moving_modules(hf_model)]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swaps the pinned frequencies in, and the model's own back on the way out."""
        before = [(module, _state(module)) for module, _ in self._pinned]
        try:
            for module, state in self._pinned:
                _put_state(module, state)
            yield
        finally:
            for module, state in before:
                _put_state(module, state)


_State = tuple[dict[str, Any], dict[str, Any]]


def _state(module: nn.Module) -> _State:
    """A rotary module's own attributes (rope type, scaling, lengths seen) and its buffers."""
    plain = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return plain, dict(module._buffers)


def _put_state(module: nn.Module, state: _State) -> None:
    plain, buffers = state
    vars(module).update(plain)
    module._buffers.update(buffers)


def _pinned_state(module: nn.Module, total_length: int) -> _State:
    """The state that a forward up to `total_length` leaves behind, with updating switched off."""
    plain, buffers = _state(module)
    types = _rope_types(module)
    # transformers 5 copies new frequencies into the buffer in place: work on clones.
    before = plain, {name: _cloned(value) for name, value in buffers.items()}
    try:
        _put_state(module, (plain, {name: _cloned(value) for name, value in buffers.items()}))
        example = next(b for b in buffers.values() if b is not None)
        position = torch.tensor([[total_length - 1]], device=example.device)
        with torch.no_grad():
            for layer_type in types:
                options = {} if layer_type is None else {"layer_type": layer_type}
                module(example.new_zeros(1, 1, 1), position, **options)
        after_plain, after_buffers = _state(module)
    finally:
        _put_state(module, (before[0], buffers))
    moving = {key: _PINNED if _is_moving(value) else value for key, value in types.items()}
    after_plain["rope_type"] = moving.get(None, moving)
    return after_plain, after_buffers


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
