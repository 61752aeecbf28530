"""One step's work over a paged cache: where its tokens go and what each of them may see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wim_ext import ops
from wim_ext.op_errors import window_pair

if TYPE_CHECKING:
    from wim_ext.plan import AttentionPlan
    from wim_ext.sequence import Sequence

__all__ = ["Batch"]


@dataclass(frozen=True, eq=False)
class Batch:
    """What `PagedKVCache.reserve` made room for: arguments of the ops, in the request's order.

    Attributes:
        sequences: the B sequences; token rows of a step stand one sequence after another.
        slot_mapping: [T] int64 on the cache's device, ``page * page_size + offset`` of each new
            token.
        position_ids: [T] int64 on the cache's device, index of each new token in its sequence.
        block_table: [B, max_pages] int32 on the host, page ids, -1 behind a sequence's last page.
        cu_seqlens_q: [B + 1] int32 on the host, first row of each sequence, then T.
        seqused_k: [B] int32 on the host, length of each sequence with the new tokens.
        page_size: slots in a page.
    """

    sequences: tuple[Sequence, ...]
    slot_mapping: Tensor
    position_ids: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seqused_k: Tensor
    page_size: int
    _undo: Callable[[], None] = field(repr=False)
    _plans: dict[tuple[Any, ...], AttentionPlan] = field(repr=False, default_factory=dict)

    def plan(
        self,
        num_heads: int,
        num_kv_heads: int,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        num_threads: int | None = None,
    ) -> AttentionPlan:
        """This step's attention plan (see `wim_ext.plan_attention`), made once per arguments."""
        key = (num_heads, num_kv_heads, causal, window_pair(window_size), num_threads)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = ops.plan_attention(
                self.block_table,
                self.cu_seqlens_q,
                self.seqused_k,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                page_size=self.page_size,
                causal=causal,
                window_size=window_size,
                num_threads=num_threads,
            )
        return plan

    def cancel(self) -> None:
        """Takes the reservation back: every sequence that is still alive has its old length again.

        A second call does nothing.

        Raises
        ------
        ValueError
            A sequence has gained or lost tokens since. Nothing was changed.
        """
        self._undo()
