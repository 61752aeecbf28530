"""A paged KV cache whose sequences fork at any token without copying, roll back, and commit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wim_ext import ops
from wim_ext.batch import Batch
from wim_ext.sequence import LockedPageTable, Sequence, as_int64
from wim_ext.storage import LayerPool

if TYPE_CHECKING:
    from wim_ext._C import Reservation

__all__ = ["Batch", "CacheStats", "PagedKVCache", "Sequence"]

_Request = list[tuple[int, int]]  # (handle, count)


def _as_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device = {device!r}: {error}") from None


@dataclass(frozen=True)
class CacheStats:
    """How full a cache is. A page held by several sequences counts once.

    Attributes:
        num_pages, free_pages, used_pages: of the pool; the last two add up to the first.
        shared_pages: used pages that more than one sequence holds.
        high_water_pages: most pages ever used at once.
        bytes_per_page: K and V of one page in all layers made so far.
        bytes_used: ``used_pages * bytes_per_page``.
        page_copies: pages copied so far because a writer shared them.
        sequences: sequences alive.
    """

    num_pages: int
    free_pages: int
    used_pages: int
    shared_pages: int
    high_water_pages: int
    bytes_per_page: int
    bytes_used: int
    page_copies: int
    sequences: int


class PagedKVCache:
    """Keys and values of many token sequences in one pool of pages.

    Parameters
    ----------
    num_layers : int
        Layers of the model.
    num_pages, page_size : int
        The pool holds ``num_pages`` pages of ``page_size`` token slots in every layer.
    num_kv_heads, head_dim, v_head_dim : int, optional
        Dimensions of every layer (`v_head_dim`: as `head_dim`), whose tensors are made at once.
        Left out, each layer's tensors are made by the first `layer` call for it and may differ.
    dtype : torch.dtype
        Of K and V.
    device : torch.device or str
        Where the pool lies.
    layout : {"HND", "NHD"}, optional
        Physical order within a page: head, slot, dim or slot, head, dim. Default: HND on a CPU, NHD
        elsewhere. The views handed out are [num_pages, page_size, num_kv_heads, head_dim] in any
        case.
    v_transposed : bool, optional
        Store V as head, dim, slot within a page. Default: where no `layout` is given, bfloat16
        layers on a CPU.

    Notes
    -----
    Safe to use from several threads: one lock guards the page table. The tensors are not guarded;
    work on different sequences never touches the same slots.

    Pages and block tables are those of Kwon et al., "Efficient Memory Management for Large Language
    Model Serving with PagedAttention" (2023). Here a shared page is copied only if a holder other
    than the writer can see a slot at or behind the write position.

    Examples
    --------
    >>> import torch
    >>> shape = {"num_layers": 1, "num_pages": 16, "page_size": 16, "num_kv_heads": 2}
    >>> cache = PagedKVCache(**shape, head_dim=8, dtype=torch.float32)
    >>> trunk = cache.new_sequence()
    >>> batch = cache.reserve([(trunk, 20)])
    >>> k_cache, v_cache = cache.layer(0)
    >>> key = value = torch.ones(20, 2, 8)
    >>> ops.append_kv(key, value, k_cache, v_cache, batch.slot_mapping)
    >>> branch = trunk.fork()
    >>> batch = cache.reserve([(trunk, 4), (branch, 1)])
    >>> batch.block_table.tolist(), batch.seqused_k.tolist()
    ([[0, 1], [0, 2]], [24, 21])
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int = 64,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layout: str | None = None,
        v_transposed: bool | None = None,
    ) -> None:
        num_pages, page_size = as_int64(num_pages, "num_pages"), as_int64(page_size, "page_size")
        num_layers = as_int64(num_layers, "num_layers")
        self._table = LockedPageTable(num_pages, page_size)
        self._pool = LayerPool(
            num_layers, num_pages, page_size, dtype, _as_device(device), layout, v_transposed
        )
        dims_given = head_dim is not None
        if (num_kv_heads is not None) != dims_given or (v_head_dim is not None and not dims_given):
            raise ValueError(
                f"num_kv_heads = {num_kv_heads}, head_dim = {head_dim}, v_head_dim = {v_head_dim}: "
                "give num_kv_heads and head_dim, or none of them"
            )
        if num_kv_heads is not None:
            for index in range(num_layers):
                self.layer(index, num_kv_heads, head_dim, v_head_dim)

    @classmethod
    def for_model(
        cls, model: Any, num_tokens: int, *, page_size: int = 64, **options: Any
    ) -> PagedKVCache:
        """A cache for a Hugging Face causal LM with room for `num_tokens` tokens.

        Layers, dtype and device are the model's; head counts and dimensions are taken from the
        first keys and values that a layer gets. `options` go to the constructor. Shared tokens
        count once; the tokens of every fork start a page of their own.
        """
        config = model.config
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        num_layers = getattr(config, "num_hidden_layers", None)
        if num_layers is None:
            raise ValueError(f"model: {type(config).__name__} does not say its num_hidden_layers")
        if as_int64(num_tokens, "num_tokens") < 1:
            raise ValueError(f"num_tokens = {num_tokens}: must be 1 or more")
        page_size = as_int64(page_size, "page_size")
        options = {"dtype": model.dtype, "device": model.device, **options}
        return cls(
            num_layers=num_layers,
            num_pages=-(-num_tokens // max(page_size, 1)),  # below 1: refused like any other
            page_size=page_size,
            **options,
        )

    @property
    def num_layers(self) -> int:
        return len(self._pool)

    @property
    def num_pages(self) -> int:
        return self._pool.num_pages

    @property
    def page_size(self) -> int:
        return self._pool.page_size

    @property
    def dtype(self) -> torch.dtype:
        return self._pool.dtype

    @property
    def device(self) -> torch.device:
        return self._pool.device

    @property
    def layout(self) -> str:
        return self._pool.layout

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return self.stats().free_pages

    def layer(
        self,
        index: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The ``(k_cache, v_cache)`` of a layer, views that ops take.

        Shapes: ``[num_pages, page_size, num_kv_heads, head_dim]``, V's last one `v_head_dim`. The
        first call for a layer makes its tensors and must give the dimensions; later calls may
        leave them out, and must not contradict them.

        Raises
        ------
        IndexError
            There is no such layer.
        ValueError
            Dimensions are missing, or are not those of the layer.
        MemoryError
            The tensors cannot be allocated.
        """
        index = as_int64(index, "layer")
        return self._pool.layer(index, num_kv_heads, head_dim, v_head_dim, dtype)

    def new_sequence(self) -> Sequence:
        """An empty sequence."""
        return Sequence(self._table, lambda table: table.create())

    def reserve(self, work: Iterable[tuple[Sequence, int]]) -> Batch:
        """Appends room for n tokens to each sequence, all or none; `work`: pairs (sequence, n).

        Lengths grow at once; what the new slots hold is undefined until `append_kv` writes it.
        Shared pages that a writer must not touch are copied here, in all layers.

        Raises
        ------
        CacheFull
            There are not enough free pages. Nothing has changed.
        ValueError
            A count is negative, or a sequence is named twice. Nothing has changed.
        StaleSequenceError
            A sequence has ended or belongs to another cache. Nothing has changed.
        """
        work = list(work)
        reservation = None
        try:
            with self._table.lock:
                table = self._table.get()
                reservation = table.prepare(self._request(work))
                batch = self._batch(work, reservation)
                # The copies go to pages that are still free: a failure here harms nobody.
                if len(reservation.copy_src) and self._pool.tensors:
                    src, dst = map(self._on_device, (reservation.copy_src, reservation.copy_dst))
                    ops.copy_pages(self._pool.tensors, src, dst)
                table.apply(reservation)
        except BaseException:
            if reservation is not None and reservation.applied:  # interrupted on the way out
                self._cancel(reservation)
            raise
        return batch

    def pages_needed(self, work: Iterable[tuple[Sequence, int]]) -> int:
        """Free pages that ``reserve(work)`` would take now, copies of shared pages included."""
        work = list(work)
        with self._table.lock:
            return self._table.get().pages_needed(self._request(work))

    def stats(self) -> CacheStats:
        """How full the cache is."""
        with self._table.lock:
            table = self._table.get().stats()
            bytes_per_page = self._pool.bytes_per_page
        return CacheStats(
            num_pages=table.num_pages,
            free_pages=table.free_pages,
            used_pages=table.used_pages,
            shared_pages=table.shared_pages,
            high_water_pages=table.high_water_pages,
            bytes_per_page=bytes_per_page,
            bytes_used=table.used_pages * bytes_per_page,
            page_copies=table.page_copies,
            sequences=table.sequences,
        )

    def check_integrity(self) -> None:
        """Checks the page table's books against each other.

        Raises
        ------
        RuntimeError
            They do not agree; the text says where.
        """
        with self._table.lock:
            self._table.get().check_integrity()

    def _request(self, work: list[tuple[Sequence, int]]) -> _Request:
        request: _Request = []
        for i, line in enumerate(work):
            if not isinstance(line, (tuple, list)) or len(line) != 2:
                raise ValueError(f"work[{i}] = {line!r}: must be a pair (sequence, count)")
            sequence, count = line
            if not isinstance(sequence, Sequence):
                raise ValueError(f"work[{i}]: {sequence!r} is not a Sequence")
            handle = sequence.handle_in(self._table, f"work[{i}]")
            request.append((handle, as_int64(count, f"work[{i}]: count")))
        return request

    def _batch(self, work: list[tuple[Sequence, int]], reservation: Reservation) -> Batch:
        return Batch(
            sequences=tuple(sequence for sequence, _ in work),
            slot_mapping=self._on_device(reservation.slot_mapping),
            position_ids=self._on_device(reservation.position_ids),
            block_table=torch.from_numpy(reservation.block_table),
            cu_seqlens_q=torch.from_numpy(reservation.cu_seqlens_q),
            seqused_k=torch.from_numpy(reservation.seqused_k),
            page_size=self.page_size,
            _undo=lambda: self._cancel(reservation),
        )

    def _on_device(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def _cancel(self, reservation: Reservation) -> None:
        with self._table.lock:
            self._table.get().cancel(reservation)
