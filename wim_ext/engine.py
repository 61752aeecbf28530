"""Runs tasks: packs their tokens into forwards, generates, counts.

A `Task` is a sequence, the tokens to feed to it, and what to generate after them. `Engine.step`
takes any number of tasks and makes one forward of them, so how tasks overlap is decided by who
calls it; the margins of schedule "rollback" are run one task at a time (`Engine.run`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wim_ext.events import Stats
from wim_ext.generation import Generation
from wim_ext.work import Work

__all__ = ["Engine", "Task", "released"]


@dataclass
class Task:
    """Work on one sequence.

    Attributes:
        sequence: of the engine's model; the caller owns it and releases it.
        pending: tokens still to feed.
        phase: what they are counted as (one of `events.PHASES`).
        generation: what to generate after them; None feeds only.
        rows: without a generation: of the fed tokens, how many last rows of logits to keep.
        last_fed: tokens that went in with the last forward.
    """

    sequence: Any
    pending: list[int]
    phase: str
    generation: Generation | None = None
    rows: int = 0
    last_fed: int = 0
    _kept: list[Tensor] = field(default_factory=list, repr=False)

    @property
    def done(self) -> bool:
        return not self.pending and (self.generation is None or self.generation.done)

    @property
    def logits(self) -> Tensor:
        """The kept rows of logits, [rows, vocab]."""
        return torch.cat(self._kept) if self._kept else torch.empty(0, 0)

    def rows_wanted(self, n: int) -> int:
        """How many rows of logits a forward of the next n tokens must return."""
        wanted = self.rows if self.generation is None else 1
        return min(n, max(0, wanted - (len(self.pending) - n)))

    def advance(self, n: int, logits: Tensor) -> None:
        """The next n tokens were fed; `logits` are the rows that were wanted of them."""
        del self.pending[:n]
        self.last_fed = n
        if self.generation is None and len(logits):
            self._kept.append(logits)
        if self.generation is not None and not self.pending:
            token = self.generation.accept(logits[-1])
            self.phase = self.generation.phase
            # Nothing follows the last token, so it is not fed: no forward is wasted on it.
            if not self.generation.done:
                self.pending.append(token)


@contextmanager
def released(sequence: Any) -> Iterator[Any]:
    """The sequence, released on the way out, whichever way that is."""
    try:
        yield sequence
    finally:
        sequence.release()


class Engine:
    """Feeds tasks to a model in forwards of at most `prefill_chunk` rows.

    Raises:
        ValueError: `prefill_chunk` is below 1.
    """

    def __init__(self, model: Any, prefill_chunk: int = 256) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be 1 or more, got {prefill_chunk}")
        self.model = model
        self.prefill_chunk = prefill_chunk

    def run(self, task: Task, stats: Stats) -> Iterator[Task]:
        """Steps one task to its end; yields after every forward."""
        while not task.done:
            self.step([task], stats)
            yield task

    def step(self, tasks: Sequence[Task], stats: Stats) -> None:
        """One forward: a token of every task that generates, prompts in the room that is left.

        If the forward fails, tasks and sequences are as they were.
        """
        chunks = self._pack(tasks)
        if not chunks:
            return
        start = time.perf_counter()
        with torch.inference_mode():
            logits = self.model.forward(
                [Work(task.sequence, task.pending[:n], task.rows_wanted(n)) for task, n in chunks]
            )
        seconds = time.perf_counter() - start
        total = sum(n for _, n in chunks)
        stats.forwards += 1
        for task, n in chunks:
            stats.tokens[task.phase] += n
            stats.seconds[task.phase] += seconds * n / total
        for (task, n), rows in zip(chunks, logits, strict=True):
            task.advance(n, rows)

    def _pack(self, tasks: Sequence[Task]) -> list[tuple[Task, int]]:
        """How many tokens of each task go into this forward. Single tokens first: they generate."""
        live = [task for task in tasks if task.pending]
        room = max(self.prefill_chunk, len(live))
        chunks = []
        for waiting, task in enumerate(sorted(live, key=lambda task: len(task.pending))):
            # Keep one row for everyone still to come, so that no task starves.
            n = min(len(task.pending), room - (len(live) - waiting - 1))
            chunks.append((task, n))
            room -= n
        return chunks
