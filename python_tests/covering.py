"""Covering arrays: few cases in which every combination of values of any `strength` axes occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Combination = tuple[tuple[str, Any], ...]  # ((axis, value), ...), axes in their given order


def covering_array(
    axes: Mapping[str, Sequence[Any]],
    strength: int,
    feasible: Callable[[Mapping[str, Any]], bool] = lambda values: True,
) -> list[dict[str, Any]]:
    """Rows {axis: value} that cover every feasible combination of `strength` axes at least once.

    Greedy: each row starts from a combination not covered yet and takes, axis by axis in random
    order, the value that covers most of the others. The result is the same in every run.
    `feasible` judges partial rows; a row once infeasible must stay so whatever is added to it.
    """
    pick = random.Random(0)
    missing = dict.fromkeys(_combinations(axes, strength, feasible))
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        rest = [a for a in axes if a not in row]
        pick.shuffle(rest)
        for axis in rest:
            others = list(itertools.combinations(row.items(), strength - 1))
            values = [v for v in axes[axis] if feasible({**row, axis: v})]
            pick.shuffle(values)
            order = {a: i for i, a in enumerate(axes)}
            row[axis] = max(values, key=lambda v: _num_new(missing, others, (axis, v), order))
        for names in itertools.combinations(axes, strength):
            missing.pop(tuple((a, row[a]) for a in names), None)
        rows.append({a: row[a] for a in axes})
    return rows


def _combinations(
    axes: Mapping[str, Sequence[Any]],
    strength: int,
    feasible: Callable[[Mapping[str, Any]], bool],
) -> list[Combination]:
    return [
        combination
        for names in itertools.combinations(axes, strength)
        for values in itertools.product(*(axes[a] for a in names))
        if feasible(dict(combination := tuple(zip(names, values, strict=True))))
    ]


def _num_new(
    missing: Mapping[Combination, None],
    others: Sequence[Combination],
    item: tuple[str, Any],
    order: Mapping[str, int],
) -> int:
    """How many missing combinations `item` completes with the row's other items."""
    keys = (tuple(sorted((*o, item), key=lambda pair: order[pair[0]])) for o in others)
    return sum(key in missing for key in keys)
