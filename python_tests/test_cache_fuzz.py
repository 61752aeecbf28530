"""Random walks over PagedKVCache beside a naive model (cache_walk.py), and proof that they bite."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from cache_walk import CacheWalk
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from random_cache_walk import random_step

PICK = st.integers(0, 999)  # taken modulo the number of choices
COUNT = st.integers(0, 6) | st.integers(0, 6) | st.integers(0, 30)
OUTCOME = st.sampled_from(("keep", "keep", "cancel", "fail"))


class CacheMachine(RuleBasedStateMachine):
    """Every rule is one operation; what it must do is in `CacheWalk`."""

    steps = 0
    events: ClassVar[Counter[str]] = Counter()

    @initialize(num_pages=st.integers(8, 40), page_size=st.sampled_from((1, 3, 4, 8)))
    def start(self, num_pages: int, page_size: int) -> None:
        self.walk = CacheWalk(num_pages, page_size)
        self.walk.create()

    def pick(self, number: int) -> object:
        return self.walk.live[number % len(self.walk.live)]

    def has_sequences(self) -> bool:
        return bool(self.walk.live)

    def has_few_sequences(self) -> bool:
        return len(self.walk.live) < 8

    @precondition(lambda self: len(self.walk.live) < 2)
    @rule()
    def create(self) -> None:
        self.walk.create()

    @precondition(has_sequences)
    @precondition(has_few_sequences)
    @rule(which=PICK, length=st.none() | PICK, beyond=st.sampled_from((0, 0, 0, 1)))
    def fork(self, which: int, length: int | None, beyond: int) -> None:
        source = self.pick(which)
        if length is not None:
            length = length % (len(source.payloads) + 1) + beyond
        self.walk.fork(source, length)

    @precondition(has_sequences)
    @rule(which=PICK, count=COUNT)
    def grow(self, which: int, count: int) -> None:
        self.walk.append([(self.pick(which), count)])

    @precondition(has_sequences)
    @precondition(has_few_sequences)
    @rule(which=PICK, back=st.integers(0, 9), count=st.integers(1, 5), outcome=OUTCOME)
    def branch_off(self, which: int, back: int, count: int, outcome: str) -> None:
        """What a margin does: fork near the end and write."""
        source = self.pick(which)
        self.walk.fork(source, max(0, len(source.payloads) - back))
        self.walk.check()
        self.walk.append([(self.walk.live[-1], count)], outcome)

    @precondition(has_sequences)
    @rule(lines=st.lists(st.tuples(PICK, COUNT), min_size=1, max_size=3), outcome=OUTCOME)
    def append(self, lines: list[tuple[int, int]], outcome: str) -> None:
        work = {self.pick(which): count for which, count in lines}
        self.walk.append(list(work.items()), outcome)

    @precondition(has_sequences)
    @rule(which=PICK, back=PICK, beyond=st.sampled_from((0, 0, 0, 1)))
    def rollback(self, which: int, back: int, beyond: int) -> None:
        sequence = self.pick(which)
        length = len(sequence.payloads)
        self.walk.rollback(sequence, length + 1 if beyond else length - back % (length + 1))

    @precondition(has_sequences)
    @rule(which=PICK, aim=st.booleans(), other=PICK)
    def commit(self, which: int, aim: bool, other: int) -> None:
        branch = self.pick(which)
        trunk = branch.parent if aim and branch.parent else self.pick(other)
        if aim and branch.fork_length < len(trunk.payloads):
            self.walk.rollback(trunk, branch.fork_length)
            self.walk.check()
        self.walk.commit(trunk, branch)

    @precondition(lambda self: len(self.walk.live) > 1)
    @rule(which=PICK, explicit=st.booleans())
    def end(self, which: int, explicit: bool) -> None:
        (self.walk.release if explicit else self.walk.collect)(self.pick(which))

    @precondition(lambda self: self.walk.kept)
    @rule(which=PICK)
    def cancel_late(self, which: int) -> None:
        self.walk.cancel_late(which)

    @precondition(has_sequences)
    @rule(which=PICK, kind=PICK)
    def misuse(self, which: int, kind: int) -> None:
        self.walk.misuse(kind, self.pick(which))

    @invariant()
    def books_and_payloads_agree(self) -> None:
        if hasattr(self, "walk"):
            self.walk.check()
            CacheMachine.steps += 1

    def teardown(self) -> None:
        if hasattr(self, "walk"):
            self.walk.finish()
            CacheMachine.events += self.walk.events


def assert_busy(events: Counter[str], steps: int) -> None:
    """A walk that never runs out of pages or never copies one would prove nothing about either."""
    assert events["exhausted"] >= 0.02 * events["append"], events
    assert events["copy on write"] >= 0.02 * events["append"], events
    for kind in ("fork", "append", "rollback", "release", "collect", "misuse"):
        assert events[kind] >= 0.02 * steps, (kind, events)
    for kind in (
        "commit",
        "refused commit",
        "cancel",
        "late cancel",
        "refused cancel",
        "invalid",
        "create",
    ):
        assert events[kind] >= 10, (kind, events)
    assert events["interrupted copy"] > 0, events


def test_state_machine() -> None:
    CacheMachine.steps, CacheMachine.events = 0, Counter()
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=120,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert CacheMachine.steps >= 2000
    assert_busy(CacheMachine.events, CacheMachine.steps)


@pytest.mark.parametrize("options", [{}, {"layout": "NHD"}, {"v_transposed": True}])
def test_random_walks(options: dict[str, object]) -> None:
    events: Counter[str] = Counter()
    steps = 0
    for seed in range(12):
        rng = random.Random(seed)
        walk = CacheWalk(rng.choice((4, 8, 16, 32)), rng.choice((1, 3, 4, 8)), **options)
        for _ in range(150):
            random_step(walk, rng)
            walk.check()
            steps += 1
        walk.finish()
        events += walk.events
    assert_busy(events, steps)


@pytest.mark.slow
def test_planted_faults_are_caught() -> None:
    """Each fault of page_table_mutants.py is compiled in and must fail the random walk."""
    script = Path(__file__).with_name("page_table_mutants.py")
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
