"""Sequences as objects: how they end, who may use them, and what an interrupt leaves behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import random
import re
import signal
import threading
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch

from wim_ext import ops
from wim_ext.cache import PagedKVCache, Sequence
from wim_ext.errors import StaleSequenceError


def make_cache(num_pages: int = 16) -> PagedKVCache:
    return PagedKVCache(
        num_layers=1,
        num_pages=num_pages,
        page_size=4,
        num_kv_heads=1,
        head_dim=8,
        dtype=torch.float32,
    )


def grown(cache: PagedKVCache, length: int) -> Sequence:
    sequence = cache.new_sequence()
    cache.reserve([(sequence, length)])
    return sequence


def state(cache: PagedKVCache, *sequences: Sequence) -> tuple:
    batch = cache.reserve([(sequence, 0) for sequence in sequences])
    return batch.block_table.tolist(), batch.seqused_k.tolist(), cache.stats()


# How a sequence ends.


def test_release_is_idempotent() -> None:
    cache = make_cache()
    sequence = grown(cache, 9)
    assert not sequence.released
    assert repr(sequence) == "<Sequence of 9 tokens>"
    sequence.release()
    other = grown(cache, 5)  # reuses the entry
    sequence.release()
    assert sequence.released
    assert repr(sequence) == "<Sequence, released>"
    assert other.length == 5
    assert cache.free_pages == 14


def test_with_releases_also_on_an_exception() -> None:
    cache = make_cache()
    trunk = grown(cache, 6)
    with contextlib.suppress(ZeroDivisionError), trunk.fork() as branch:
        cache.reserve([(branch, 5)])
        raise ZeroDivisionError
    assert branch.released
    assert cache.free_pages == 14
    with trunk.fork() as branch:
        branch.release()  # and again at the end of the block
    assert cache.stats().sequences == 1


def test_collection_releases() -> None:
    cache = make_cache()
    trunk = grown(cache, 6)
    branch = trunk.fork()
    cache.reserve([(branch, 7)])
    del branch
    gc.collect()
    assert cache.free_pages == 14
    assert cache.stats().sequences == 1


def test_a_batch_keeps_its_sequences_alive() -> None:
    cache = make_cache()
    batch = cache.reserve([(cache.new_sequence(), 6)])
    gc.collect()
    assert batch.sequences[0].length == 6
    del batch
    gc.collect()
    assert cache.free_pages == 16


def test_collection_in_the_middle_of_an_operation_waits_for_the_next() -> None:
    cache = make_cache()
    trunk = grown(cache, 6)
    branch = trunk.fork()
    doomed = [grown(cache, 8)]
    during: list[int] = []
    real_copy = ops.copy_pages

    def collect_and_copy(*arguments: object) -> None:
        doomed.clear()
        gc.collect()
        during.append(cache._table._table.stats().free_pages)
        real_copy(*arguments)

    with mock.patch.object(ops, "copy_pages", collect_and_copy):
        batch = cache.reserve([(trunk, 1), (branch, 1)])
    assert during == [12]
    assert set(batch.block_table.flatten().tolist()) == {0, 1, 4}
    assert cache.free_pages == 13
    cache.check_integrity()


def test_a_released_sequence_is_collected_once() -> None:
    cache = make_cache()
    sequence = grown(cache, 4)
    sequence.release()
    other = grown(cache, 4)
    del sequence
    gc.collect()
    assert other.length == 4
    cache.check_integrity()


# Who may use it.


def uses(
    cache: PagedKVCache, sequence: Sequence, live: Sequence
) -> dict[str, Callable[[], object]]:
    return {
        "reserve": lambda: cache.reserve([(live, 1), (sequence, 1)]),
        "reserve nothing": lambda: cache.reserve([(sequence, 0)]),
        "pages_needed": lambda: cache.pages_needed([(sequence, 1)]),
        "commit it": lambda: live.commit(sequence),
    }


def dead_sequences() -> dict[str, Callable[[PagedKVCache, Sequence], Sequence]]:
    def released(cache: PagedKVCache, live: Sequence) -> Sequence:
        sequence = live.fork()
        sequence.release()
        return sequence

    def committed(cache: PagedKVCache, live: Sequence) -> Sequence:
        sequence = live.fork()
        live.commit(sequence)
        return sequence

    return {"released": released, "committed": committed}


@pytest.mark.parametrize("end", dead_sequences().values(), ids=dead_sequences())
def test_a_dead_sequence_stays_dead(end: Callable[[PagedKVCache, Sequence], Sequence]) -> None:
    cache = make_cache()
    live = grown(cache, 6)
    dead = end(cache, live)
    successor = cache.new_sequence()  # takes the dead one's entry
    before = state(cache, live, successor)
    own = {
        "length": lambda: dead.length,
        "fork": lambda: dead.fork(),
        "rollback": lambda: dead.rollback(0),
        "commit": lambda: dead.commit(live),
    }
    for name, use in {**uses(cache, dead, live), **own}.items():
        with pytest.raises(StaleSequenceError, match=r"released|committed"):
            use()
        assert state(cache, live, successor) == before, name
    with pytest.raises(
        StaleSequenceError, match=r"^work\[1\]: sequence \d+ is not alive here: it was"
    ):
        cache.reserve([(live, 1), (dead, 1)])
    with pytest.raises(
        StaleSequenceError, match=r"^branch: sequence \d+ is not alive here: it was rel"
    ):
        live.commit(dead)


def test_a_foreign_sequence_is_refused() -> None:
    cache, other = make_cache(), make_cache()
    live, foreign = grown(cache, 6), grown(other, 6)
    before = state(cache, live), state(other, foreign)
    for use in uses(cache, foreign, live).values():
        with pytest.raises(StaleSequenceError, match="the sequence belongs to another cache"):
            use()
    assert (state(cache, live), state(other, foreign)) == before


@pytest.mark.parametrize("line", [(), (1,), (1, 2, 3), 5, None, "ab"], ids=str)
def test_a_request_is_made_of_pairs(line: object) -> None:
    cache = make_cache()
    live = grown(cache, 6)
    before = state(cache, live)
    text = rf"^work\[1\] = {re.escape(repr(line))}: must be a pair \(sequence, count\)$"
    for use in (cache.reserve, cache.pages_needed):
        with pytest.raises(ValueError, match=text):
            use([(live, 1), line])  # type: ignore[list-item]
    assert state(cache, live) == before


@pytest.mark.parametrize("thing", [None, -1, 0, "all", object()], ids=str)
def test_only_sequences_are_sequences(thing: object) -> None:
    cache = make_cache()
    live = grown(cache, 6)
    with pytest.raises(ValueError, match=r"work\[1\]: .* is not a Sequence"):
        cache.reserve([(live, 1), (thing, 1)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"branch = .*: must be a Sequence"):
        live.commit(thing)  # type: ignore[arg-type]
    assert live.length == 6


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_second_object_for_one_sequence(copier: Callable[[Sequence], object]) -> None:
    sequence = grown(make_cache(), 1)
    with pytest.raises(
        TypeError, match=r"a Sequence can be neither copied nor pickled; use fork\(\)"
    ):
        copier(sequence)


@pytest.mark.parametrize("number", [np.int64(3), np.uint8(3), torch.tensor(3)], ids=repr)
def test_integers_of_other_libraries_will_do(number: object) -> None:
    cache = make_cache()
    sequence = grown(cache, 6)
    assert sequence.fork(number).length == 3  # type: ignore[arg-type]
    sequence.rollback(number)  # type: ignore[arg-type]
    cache.reserve([(sequence, number)])  # type: ignore[list-item]
    assert sequence.length == 6


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1.0, "= 1.0: must be an integer"),
        ("1", "= '1': must be an integer"),
        (2**63, f"= {2**63}: does not fit 64 bits"),
        (-(2**70), f"= {-(2**70)}: does not fit 64 bits"),
        (-1, "= -1: must be 0.."),
    ],
)
def test_bad_numbers(number: object, text: str) -> None:
    cache = make_cache()
    sequence = grown(cache, 6)
    before = state(cache, sequence)
    calls = {
        "length": [sequence.fork, sequence.rollback],
        "work[0]: count": [lambda n: cache.reserve([(sequence, n)])],
    }
    for name, functions in calls.items():
        for function in functions:
            with pytest.raises(ValueError, match=re.escape(f"{name} {text}")):
                function(number)
    assert state(cache, sequence) == before


# Interrupts and failures.


class InterruptAfter:
    """A page table that is interrupted right after one of its operations has succeeded."""

    def __init__(self, table: object, name: str) -> None:
        self._table, self._name = table, name

    def __getattr__(self, name: str) -> object:
        attribute = getattr(self._table, name)
        if name != self._name:
            return attribute

        def interrupted(*arguments: object) -> None:
            attribute(*arguments)
            raise KeyboardInterrupt

        return interrupted


@pytest.mark.parametrize("name", ["create", "fork", "prepare", "apply"])
def test_an_interrupt_right_after_the_fact_undoes_it(name: str) -> None:
    cache = make_cache()
    trunk = grown(cache, 6)
    sibling = trunk.fork(5)
    before = state(cache, trunk, sibling)
    use = {"create": cache.new_sequence, "fork": trunk.fork}.get(
        name, lambda: cache.reserve([(trunk, 3), (sibling, 9)])
    )
    table = cache._table._table
    cache._table._table = InterruptAfter(table, name)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        use()
    cache._table._table = table
    cache.check_integrity()
    assert (trunk.length, sibling.length) == (6, 5)
    assert cache.stats().sequences == 2
    if name != "apply":  # else the branch keeps the page that it was given
        assert state(cache, trunk, sibling) == before


@pytest.mark.parametrize("error", [RuntimeError("device lost"), KeyboardInterrupt()], ids=repr)
def test_a_copy_that_fails_changes_nothing(error: BaseException) -> None:
    cache = make_cache()
    trunk = grown(cache, 6)
    branch = trunk.fork()
    k_cache, _ = cache.layer(0)
    k_cache[:2] = torch.arange(64.0).reshape(2, 4, 1, 8)
    before, pages = state(cache, trunk, branch), k_cache[:2].clone()
    with mock.patch.object(ops, "copy_pages", side_effect=error), pytest.raises(type(error)):
        cache.reserve([(trunk, 5), (branch, 1)])
    assert state(cache, trunk, branch) == before
    assert torch.equal(k_cache[:2], pages)
    cache.reserve([(trunk, 5), (branch, 1)])


class Alarm(BaseException):
    pass


def test_signals_at_any_moment_leave_the_books_in_order() -> None:
    cache = make_cache()
    trunk = grown(cache, 6)
    kept: list[Sequence] = []  # a finalizer that is interrupted itself cannot do its work

    def work(seconds: float) -> None:
        rung.clear()
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while not rung:
            kept.append(trunk.fork(5))
            cache.reserve([(kept[-1], 3), (trunk, 0)])
            kept[-1].rollback(4)
            kept[-1].release()
        raise Alarm  # the first one was raised inside a finalizer, where Python swallows it

    rung: list[bool] = []

    def ring(*_: object) -> None:
        rung.append(True)
        raise Alarm

    rng = random.Random(0)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(200):
            with pytest.raises(Alarm):
                work(rng.uniform(1e-5, 1e-3))
            cache.check_integrity()
            for sequence in kept:
                sequence.release()
            kept.clear()
            assert trunk.length == 6
            assert cache.stats().free_pages == 14
            assert cache.stats().sequences == 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(("setting", "checks"), [("1", True), ("0", False), ("", False)])
def test_the_debug_switch_checks_the_books_at_every_step(
    setting: str, checks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        """A page table whose books do not agree."""

        def check_integrity(self) -> None:
            raise RuntimeError("page table: 1 pages are shared, not 2")

        def length(self, _: int) -> int:
            return 5

    monkeypatch.setenv("WIM_DEBUG", setting)
    cache = make_cache()
    trunk = grown(cache, 3)
    with monkeypatch.context() as patch:
        patch.setattr(cache._table, "_table", Broken())
        if checks:
            with pytest.raises(RuntimeError, match="1 pages are shared, not 2"):
                _ = trunk.length
        else:
            assert trunk.length == 5


# Threads.


def branch_life(cache: PagedKVCache, trunk: Sequence, number: int, errors: list[str]) -> None:
    """Forks, writes and checks its own branch over and over; nobody else's numbers may show."""
    rng = random.Random(number)
    k_cache, v_cache = cache.layer(0)
    for turn in range(150):
        with trunk.fork(rng.randint(0, 10)) as branch:
            inherited = branch.length
            value = float(1000 * number + turn + 1)
            count = rng.randint(1, 9)
            batch = cache.reserve([(branch, count)])
            rows = torch.full((count, 1, 8), value)
            ops.append_kv(rows, -rows, k_cache, v_cache, batch.slot_mapping)
            pages = batch.block_table[0].long()
            keys = k_cache[pages].flatten(0, 1)[: branch.length, 0, 0].tolist()
            if keys != [0.5] * inherited + [value] * count:
                errors.append(f"thread {number}, turn {turn}: {keys}")
            branch.rollback(inherited)


def test_threads_on_their_own_branches() -> None:
    cache = make_cache(num_pages=64)
    trunk = grown(cache, 10)
    cache.layer(0)[0][:3] = 0.5
    errors: list[str] = []
    threads = [
        threading.Thread(target=branch_life, args=(cache, trunk, number, errors))
        for number in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not errors
    cache.check_integrity()
    assert cache.stats().sequences == 1
    assert cache.free_pages == 61
    assert (cache.layer(0)[0][:3].flatten(0, 1)[:10] == 0.5).all()


def test_threads_make_a_layer_once() -> None:
    cache = PagedKVCache(num_layers=1, num_pages=4, page_size=4, dtype=torch.float32)
    barrier, found = threading.Barrier(4), []

    def first_use() -> None:
        barrier.wait()
        found.append(cache.layer(0, 1, 8)[0].data_ptr())

    threads = [threading.Thread(target=first_use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 4
    assert len(set(found)) == 1
