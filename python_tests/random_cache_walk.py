"""Random operations for a `CacheWalk`, drawn so that pools of a few dozen pages stay busy."""

from __future__ import annotations

import random

from cache_walk import CacheWalk, ModelSequence


def random_step(walk: CacheWalk, rng: random.Random) -> None:
    """One operation."""
    if not walk.live or (len(walk.live) < 8 and rng.random() < 0.05):
        walk.create()
        return
    sequence = rng.choice(walk.live)
    length = len(sequence.payloads)
    kind = rng.random()
    if kind < 0.06 and len(walk.live) < 7:
        random_siblings(walk, rng, sequence)
    elif kind < 0.40:
        members = rng.sample(walk.live, min(len(walk.live), rng.choice((1, 1, 2, 3))))
        most = 40 if rng.random() < 0.08 else 5
        outcome = rng.choice(("keep",) * 6 + ("cancel", "fail"))
        walk.append([(member, rng.randint(0, most)) for member in members], outcome)
    elif kind < 0.58 and len(walk.live) < 8:
        walk.fork(sequence, rng.choice((None, rng.randint(0, length), length + 1)))
    elif kind < 0.72:
        walk.rollback(
            sequence, rng.choice((rng.randint(0, length), max(length - 2, 0), length + 1))
        )
    elif kind < 0.82:
        random_commit(walk, rng, sequence)
    elif kind < 0.84 and walk.kept and len(walk.live) < 8:
        random_speculation(walk, rng, sequence)
    elif kind < 0.86 and walk.kept:
        walk.cancel_late(rng.randrange(6))
    elif kind < 0.90:
        walk.misuse(rng.randrange(60), sequence)
    else:
        (walk.release if rng.random() < 0.5 else walk.collect)(sequence)


def random_siblings(walk: CacheWalk, rng: random.Random, source: ModelSequence) -> None:
    """Forks within the last page that are written to in one call, with or without their source."""
    for _ in range(2):
        back = rng.randint(0, walk.cache.page_size)
        walk.fork(source, max(0, len(source.payloads) - back))
        walk.check()
    members = [*walk.live[-2:], *([source] if rng.random() < 0.5 else [])]
    rng.shuffle(members)
    walk.append([(member, rng.randint(1, 5)) for member in members])


def random_commit(walk: CacheWalk, rng: random.Random, branch: ModelSequence) -> None:
    """Mostly a pair that may commit, at times after the rollback that it takes."""
    trunk = branch.parent if branch.parent and rng.random() < 0.9 else rng.choice(walk.live)
    if branch.fork_length > 0 and trunk is branch.parent and rng.random() < 0.2:
        # Cut the trunk below the fork and bring it back there: it is not what was forked any more.
        walk.rollback(trunk, rng.randrange(min(branch.fork_length, len(trunk.payloads) + 1)))
        walk.check()
        walk.append([(trunk, branch.fork_length - len(trunk.payloads))])
        walk.check()
    if len(trunk.payloads) > branch.fork_length and rng.random() < 0.7:
        walk.rollback(trunk, branch.fork_length)
        walk.check()
    if trunk is not branch or rng.random() < 0.5:
        walk.commit(trunk, branch)


def random_speculation(walk: CacheWalk, rng: random.Random, trunk: ModelSequence) -> None:
    """Growth, a fork that grows and is accepted, and then second thoughts about the growth."""
    walk.append([(trunk, rng.randint(1, 3))])
    walk.fork(trunk, None)
    branch = walk.live[-1]
    walk.append([(branch, rng.randint(0, 3))])
    walk.commit(trunk, branch)
    walk.check()
    walk.cancel_late(max(0, len(walk.kept) - 2))
