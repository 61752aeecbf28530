"""One question: its prompts as tokens, its random streams, its counters."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from wim_ext.engine import Engine, Task
from wim_ext.events import Stats
from wim_ext.generation import Generation
from wim_ext.prompts import Layout, Prompts
from wim_ext.sampling import Sampler, Sampling
from wim_ext.tokens import TextCodec

__all__ = ["Session", "Writer"]


@dataclass(frozen=True)
class Writer:
    """What all questions to one model share."""

    engine: Engine
    codec: TextCodec
    layout: Layout
    prompts: Prompts
    sampling: Sampling
    stop_ids: frozenset[int]
    max_margin_tokens: int
    max_answer_tokens: int

    def new_trunk(self) -> Any:
        return self.engine.model.new_sequence()


@dataclass
class Session:
    """A question on its way: what it has counted so far, and how to read and reply for it.

    The methods are generators that yield after every forward of the model, so that the caller can
    report progress, look for a stop, or give up (closing the generator is enough).
    """

    writer: Writer
    question: str
    stats: Stats = field(default_factory=Stats)

    @property
    def prompts(self) -> Prompts:
        return self.writer.prompts

    def read(
        self, sequence: Any, tokens: list[int], phase: str, rows: int = 0
    ) -> Generator[Task, None, Tensor]:
        """Feeds tokens; returns the last `rows` rows of logits, [rows, vocab]."""
        task = Task(sequence, list(tokens), phase, rows=rows)
        yield from self.writer.engine.run(task, self.stats)
        return task.logits

    def reply(
        self,
        sequence: Any,
        text: str,
        phases: tuple[str, str],
        max_tokens: int,
        stream: int,
        enough: Callable[[str], bool] | None = None,
        lead: str = "",
    ) -> Generator[Task, None, Generation]:
        """Ends the user's turn with `text` and generates the model's reply.

        `phases` name the prompt's and the reply's tokens; `stream` numbers the random stream;
        `enough` may end the reply early; `lead` is put in the model's mouth and not returned.
        """
        writer = self.writer
        sampler = Sampler(writer.sampling, stream)
        generation = Generation(
            writer.codec, sampler, phases[1], max_tokens, writer.stop_ids, enough=enough
        )
        task = Task(sequence, self.turn(text, lead), phases[0], generation)
        yield from writer.engine.run(task, self.stats)
        self.stats.generated_tokens += len(generation.tokens)
        return generation

    def turn(self, text: str, lead: str = "") -> list[int]:
        """Tokens that end the user's turn with `text` and open the reply with `lead`."""
        encode = self.writer.codec.encode
        return encode(text) + self.writer.layout.closing + encode(lead)
