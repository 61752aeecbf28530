"""Choosing the next token from one row of logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Sampler", "Sampling"]

# A prime above any number of segments: (seed, stream) pairs do not meet.
_STREAMS = 1_000_003


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        temperature: 0 takes the most probable token, of equal ones the lowest id.
        top_p: keep the smallest set of most probable tokens whose probabilities reach this sum.
        top_k: keep this many most probable tokens; 0 keeps all.
        min_p: drop tokens less probable than this part of the most probable one.
        seed: of the request's own generator; None takes a fresh one. The global generator of
            torch is neither used nor changed.

    Raises:
        ValueError: a value outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more and finite, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or more, got {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")


class Sampler:
    """The random state of one generated text.

    Each margin and the answer have a `stream` of their own, so that what is drawn for one does
    not depend on the order in which they are generated.
    """

    def __init__(self, sampling: Sampling, stream: int = 0) -> None:
        self.sampling = sampling
        self._generator = torch.Generator(device="cpu")
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed((sampling.seed * _STREAMS + stream) % (1 << 63))

    def choose(self, logits: Tensor, step: str) -> int:
        """The next token's id from one row of logits, [vocab].

        `step` says in words what is being generated; errors quote it.

        Raises:
            ValueError: the row holds a NaN or +inf, or nothing but -inf.
        """
        row = logits.detach().to(device="cpu", dtype=torch.float32)
        best = row.max()
        # max() is NaN if any element is; a row of -inf has no token to choose.
        if not torch.isfinite(best):
            found = "only -inf" if best == -torch.inf else "NaN or +inf"
            raise ValueError(f"no token can be chosen at {step}: the logits hold {found}")
        if self.sampling.temperature == 0.0:
            return int((row == best).nonzero()[0, 0])
        return self._sample(row - best)

    def _sample(self, row: Tensor) -> int:
        # The maximum is 0 here, so that even a temperature of 1e-40 gives exp(0) = 1 there and 0
        # elsewhere; the double keeps 0 / 1e-40 and -1 / 1e-40 finite.
        options = self.sampling
        probabilities = torch.softmax(row.double() / options.temperature, dim=-1)
        # A stable sort keeps equal probabilities in the order of their ids.
        ordered, ids = torch.sort(probabilities, descending=True, stable=True)
        if options.top_k:
            ordered = ordered[: options.top_k]
        # A token stays if the sum *before* it has not reached top_p: the first one always does.
        before = torch.cumsum(ordered, dim=0) - ordered
        keep = (before < options.top_p) & (ordered >= options.min_p * ordered[0])
        kept = torch.where(keep, ordered, 0.0)
        index = torch.multinomial(kept, 1, generator=self._generator)
        return int(ids[index])
