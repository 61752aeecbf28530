"""What an attention plan says about itself.

A plan is one int32 tensor (its layout is in csrc/plan_layout.h): a header of 64-bit numbers, then
the work items. It is a plain value: never changed, safe to share between layers and threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from wim_ext import _native  # noqa: F401  (loads torch.ops.wim_ext)

__all__ = ["AttentionPlan", "PlanReport"]


@cache
def _field_index() -> dict[str, int]:
    names: str = torch.ops.wim_ext.plan_fields()
    return {name: i for i, name in enumerate(names.split())}


@dataclass(frozen=True)
class PlanReport:
    """The work that a plan describes; counts are for one layer.

    Attributes
    ----------
    items : int
        Work items; each is run once per KV head.
    rows : int
        Query rows of all items, each counted once per item that it takes part in.
    partials : int
        States written by rows with several items, per head, folded at the end.
    pages_read : int
        Pages that the items read (for each KV head).
    pages_without_sharing : int
        The same if no item served several sequences.
    scores : int
        Products q . k over all heads.
    imbalance : float
        Estimated load of the busiest thread over the average load; 1.0 is perfect.
    """

    items: int
    rows: int
    partials: int
    pages_read: int
    pages_without_sharing: int
    scores: int
    imbalance: float
    page_size: int = field(repr=False)
    num_kv_heads: int = field(repr=False)

    def flops(self, head_dim: int, v_head_dim: int | None = None) -> int:
        """Floating-point operations of the two matrix products."""
        return 2 * self.scores * (head_dim + (v_head_dim or head_dim))

    def bytes_read(
        self, head_dim: int, v_head_dim: int | None = None, *, dtype: torch.dtype
    ) -> int:
        """Bytes of K and V that the items read."""
        elements = self.num_kv_heads * self.page_size * (head_dim + (v_head_dim or head_dim))
        return self.pages_read * elements * dtype.itemsize


@dataclass(frozen=True)
class AttentionPlan:
    """A batch cut into work items, made by `wim_ext.ops.plan_attention`; one serves all layers."""

    tensor: Tensor

    def header(self, name: str) -> int:
        """A number of the plan's header, by its name in csrc/plan_layout.h."""
        index = _field_index()[name]
        return int(self.tensor[2 * index : 2 * index + 2].clone().view(torch.int64))

    @property
    def report(self) -> PlanReport:
        """What the plan costs and what its sharing saves."""
        return PlanReport(
            items=self.header("num_items"),
            rows=self.header("num_rows"),
            partials=self.header("num_partials"),
            pages_read=self.header("pages_read"),
            pages_without_sharing=self.header("pages_without_sharing"),
            scores=self.header("scores"),
            imbalance=self.header("imbalance_permille") / 1000,
            page_size=self.header("page_size"),
            num_kv_heads=self.header("num_kv_heads"),
        )
