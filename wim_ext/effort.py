"""How much work a run is, so that a progress bar moves evenly: reading a document is quadratic."""

from __future__ import annotations

from typing import Any

from wim_ext.engine import Task

__all__ = ["Effort", "Meter"]

# Reading one token costs about as much as attending to this many, where the model does not say.
_DEFAULT_FIXED = 4096.0
# A forward of one row moves all weights for a single token; about this many rows cost the same.
_ROWS_LIKE_ONE = 8


class Effort:
    """Cost of tokens in units of one attended past token.

    A row at position p costs `fixed + p`: its matrix products, and attention to p tokens.
    """

    def __init__(self, model: Any) -> None:
        self.fixed = _fixed_cost(getattr(model, "hf_model", None))

    def reading(self, begin: int, end: int) -> float:
        """Prefill of positions [begin, end): the sum of fixed + p."""
        return (end - begin) * self.fixed + (end * end - begin * begin) / 2

    def generating(self, begin: int, count: int) -> float:
        """`count` tokens, one by one, from position `begin` on."""
        return count * self.fixed * _ROWS_LIKE_ONE + self.reading(begin, begin + count)

    def of_step(self, task: Task) -> float:
        """What the task's last forward cost."""
        end, count = int(task.sequence.length), task.last_fed
        if count == 1:
            return self.generating(end - 1, 1)
        return self.reading(end - count, end)


def _fixed_cost(hf_model: Any) -> float:
    """Weights over twice the attention width: both sides in multiplications for one token."""
    config = getattr(hf_model, "config", None)
    config = config.get_text_config(decoder=True) if config is not None else None
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    width = getattr(config, "hidden_size", None)
    if not (layers and heads and width):
        return _DEFAULT_FIXED
    head_dim = getattr(config, "head_dim", None) or width // heads
    weights = sum(parameter.numel() for parameter in hf_model.parameters())
    return float(weights / (2 * layers * heads * head_dim))


class Meter:
    """Work done, as a part of the whole. Never runs backwards.

    A margin may turn out shorter than was planned for; `reach` then skips to where it would end.
    """

    def __init__(self, total: float) -> None:
        self.total = total
        self._done = 0.0
        self._reached = 0.0

    @property
    def part(self) -> float:
        return min(1.0, self._done / self.total) if self.total else 1.0

    def add(self, work: float, limit: float) -> None:
        """`work` more, but within a step planned to end at `limit` since the last `reach`."""
        self._done = max(self._done, min(self._done + work, self._reached + limit))

    def reach(self, planned: float) -> None:
        """A step that was planned as `planned` has ended."""
        self._reached += planned
        self._done = max(self._done, self._reached)
