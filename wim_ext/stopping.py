"""Which tokens end a reply."""

from __future__ import annotations

from typing import Any

from wim_ext.prompts import Layout
from wim_ext.tokens import TextCodec

__all__ = ["stop_ids"]


def stop_ids(model: Any, codec: TextCodec, layout: Layout) -> frozenset[int]:
    """End tokens of the model's generation settings, of its configuration and of the tokenizer, and
    the one with which the chat template ends a turn. Models often name different ones in each."""
    hf_model = getattr(model, "hf_model", None)
    named: list[Any] = [codec.tokenizer.eos_token_id]
    for settings in ("generation_config", "config"):
        named.append(getattr(getattr(hf_model, settings, None), "eos_token_id", None))
    found: set[int] = set()
    for value in named:
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [value])
    if layout.is_chat:
        # The first control token of the closing ends the user's turn, and so does it the reply's.
        found.update([i for i in layout.closing if i in codec.control_ids][:1])
    return frozenset(found)
