"""One generation: from logits to tokens to text, until something says stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from wim_ext.sampling import Sampler
from wim_ext.tokens import TextCodec, TextStream

__all__ = ["Generation"]


class Generation:
    """The state of one generated text.

    Args:
        codec: decodes the tokens.
        sampler: chooses them.
        phase: what the tokens are counted as when they are fed back.
        max_tokens: most tokens to choose, 1 or more.
        stop_ids: tokens that end the text; they are not part of it.
        stop_strings: texts that end the text; it is cut before the first of them.
        enough: called with the text so far after each token; true ends the text.

    Attributes:
        tokens: the chosen ids, a stop token included.
        text: the final text so far; `take()` returns what was added since the last call.
        stop_reason: "" while running, then "end", "length", "stop_string" or "enough".
    """

    def __init__(
        self,
        codec: TextCodec,
        sampler: Sampler,
        phase: str,
        max_tokens: int,
        stop_ids: frozenset[int],
        stop_strings: Iterable[str] = (),
        enough: Callable[[str], bool] | None = None,
    ) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be 1 or more, got {max_tokens}")
        self.phase = phase
        self.tokens: list[int] = []
        self.text = ""
        self.stop_reason = ""
        self._sampler = sampler
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._stop_strings = tuple(stop_strings)
        if not all(self._stop_strings):
            raise ValueError("stop_strings must not hold an empty text")
        self._enough = enough
        self._stream = TextStream(codec)
        self._held = ""  # decoded, but it may be the beginning of a stop string
        self._taken = 0

    @property
    def done(self) -> bool:
        return bool(self.stop_reason)

    def accept(self, logits: Tensor) -> int:
        """Chooses the next token from one row of logits, [vocab]."""
        token = self._sampler.choose(logits, f"token {len(self.tokens) + 1} of {self.phase}")
        self.tokens.append(token)
        if token in self._stop_ids:
            self._stop("end")
            return token
        self._add(self._stream.push(token))
        if not self.done and self._enough is not None and self._enough(self.text):
            self._stop("enough")
        if not self.done and len(self.tokens) == self._max_tokens:
            self._stop("length")
        return token

    def take(self) -> str:
        """Text that became final since the last call."""
        piece = self.text[self._taken :]
        self._taken = len(self.text)
        return piece

    def _stop(self, reason: str) -> None:
        self._add(self._stream.finish())
        if not self.done:
            self.text += self._held
            self.stop_reason = reason
        self._held = ""

    def _add(self, piece: str) -> None:
        pending = self._held + piece
        found = [at for stop in self._stop_strings if (at := pending.find(stop)) >= 0]
        if found:
            self.text += pending[: min(found)]
            self._held = ""
            self.stop_reason = "stop_string"
            return
        hold = _possible_stop(pending, self._stop_strings)
        self.text += pending[: len(pending) - hold]
        self._held = pending[len(pending) - hold :]


def _possible_stop(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0
