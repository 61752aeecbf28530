"""Cost of the cache's bookkeeping: fork, rollback, release, commit and reserve of long sequences.

    python benchmarks/bench_cache_ops.py [--json FILE]

No model and no tensors: what is timed is what a step pays beside its kernels. Goals: fork, rollback
and release of a 64k-token branch under 20 us each, reserve under 1 us a token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wim_ext.cache import PagedKVCache, Sequence
from wim_ext.info import collect

TOKENS = 65536
REPEATS = 300


def microseconds(run: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """Median time of `run`, each time after an untimed `prepare`."""
    times = []
    for _ in range(REPEATS):
        prepare()
        begin = time.perf_counter_ns()
        run()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times) / 1000


def make(page_size: int, others: int) -> tuple[PagedKVCache, Sequence, list[Sequence]]:
    """A trunk of TOKENS tokens, and `others` forks of it that each wrote a token."""
    num_pages = 2 * (TOKENS // page_size) + 4 * others + 1024
    cache = PagedKVCache(
        num_layers=1, num_pages=num_pages, page_size=page_size, dtype=torch.float32
    )
    trunk = cache.new_sequence()
    cache.reserve([(trunk, TOKENS - page_size // 2)])
    forks = [trunk.fork() for _ in range(others)]
    cache.reserve([(fork, 1) for fork in forks])
    return cache, trunk, forks


def whole_sequences(page_size: int, others: int) -> dict[str, float]:
    """Operations on a branch of (nearly) TOKENS tokens; microseconds each."""
    cache, trunk, _forks = make(page_size, others)
    box: list[Sequence] = []

    def fork() -> None:
        box[:] = [trunk.fork()]

    def written_fork() -> None:
        fork()
        cache.reserve([(box[0], 64)])

    return {
        "fork": microseconds(fork, box.clear),
        "rollback of 64 tokens": microseconds(lambda: box[0].rollback(trunk.length), written_fork),
        "rollback to 0": microseconds(lambda: box[0].rollback(0), fork),
        "release": microseconds(lambda: box[0].release(), fork),
        "commit": microseconds(lambda: trunk.commit(box[0]), fork),
    }


def reservations(page_size: int, branches: int) -> dict[str, float]:
    """Microseconds per token of typical steps: chunks, decoding, and both together."""
    cache, trunk, forks = make(page_size, branches)
    lengths = [trunk.length, *[fork.length for fork in forks]]

    def reset() -> None:
        for sequence, length in zip([trunk, *forks], lengths, strict=True):
            sequence.rollback(length)

    steps = {
        "chunk of 256": [(trunk, 256)],
        "chunk of 2048": [(trunk, 2048)],
        f"{branches} branches, 1 token each": [(fork, 1) for fork in forks],
        f"chunk of 256 + {branches} branches": [(trunk, 256), *[(fork, 1) for fork in forks]],
    }
    return {
        name: microseconds(lambda work=work: cache.reserve(work), reset) / sum(n for _, n in work)
        for name, work in steps.items()
    }


def measure() -> dict[str, Any]:
    """All figures, with what they were measured on."""
    facts = collect()
    return {
        "tokens": TOKENS,
        "when": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": facts["cpu"],
        "versions": facts["versions"],
        "microseconds": {
            f"page {page_size}, {others} other branches": whole_sequences(page_size, others)
            for page_size in (16, 64)
            for others in (0, 64)
        },
        "reserve_microseconds_per_token": {
            f"page {page_size}": reservations(page_size, 8) for page_size in (16, 64)
        },
    }


def print_table(title: str, columns: dict[str, dict[str, float]]) -> None:
    print(title)
    width = max(len(name) for figures in columns.values() for name in figures)
    print(" " * width, *(f"{name:>28}" for name in columns))
    for row in next(iter(columns.values())):
        print(f"{row:{width}}", *(f"{figures[row]:28.2f}" for figures in columns.values()))
    print()


def main() -> None:
    """Measures, prints tables, and writes JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    results = measure()
    print(f"{results['machine']['model']}, torch {results['versions']['torch']}\n")
    print_table(f"microseconds, sequences of {TOKENS} tokens", results["microseconds"])
    print_table("reserve, microseconds per token", results["reserve_microseconds_per_token"])
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
