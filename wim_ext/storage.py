"""Memory of a cache's pool: one pair of K and V tensors per layer, in the order the device likes.

Logically every tensor is ``[num_pages, page_size, num_kv_heads, head_dim]``. On a CPU a page is
stored head by head ("HND"), so that a kernel working on one head streams through ``page_size *
head_dim`` contiguous numbers. bfloat16 values are transposed within the page, as AMX tiles want
them: decoding is a third faster for it, while float32 would lose a tenth. A layer is one private
mapping that may use huge pages: attention reads the whole pool at every step, and with 4 KB pages
address translation would cost a third of that.
"""

from __future__ import annotations

import contextlib
import mmap
import operator
from threading import Lock
from typing import SupportsIndex

import torch
from torch import Tensor

__all__ = ["LayerPool"]

_LAYOUTS = ("HND", "NHD")
_HUGE_PAGE = 2 << 20
_VALUES_ALIGNMENT = 4096


class LayerPool:
    """The tensors of all layers, each made when its dimensions are known.

    Attributes:
        layout: physical order within a page, "HND" (head, slot, dim) or "NHD" (slot, head, dim).
        v_transposed: V is stored ``[head, dim, slot]`` within a page, whatever the layout: its slot
            stride is 1. None: where neither this nor a layout was asked for, and the layer is
            bfloat16 on a CPU.
        tensors: K and V of the layers made so far, in the order they were made. Replaced, never
            changed, when a layer is added.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: str | None = None,
        v_transposed: bool | None = None,
    ) -> None:
        if num_layers < 1:
            raise ValueError(f"num_layers = {num_layers}: must be 1 or more")
        if layout is not None and v_transposed is None:
            v_transposed = False
        layout = layout or ("HND" if device.type == "cpu" else "NHD")
        _check_dtype(dtype)
        if layout not in _LAYOUTS:
            raise ValueError(f"layout = {layout!r}: must be one of {', '.join(_LAYOUTS)}")
        self.num_pages, self.page_size = num_pages, page_size
        self.dtype, self.device = dtype, device
        self.layout, self.v_transposed = layout, v_transposed
        self.tensors: list[Tensor] = []
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * num_layers
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def bytes_per_page(self) -> int:
        """K and V of one page in the layers made so far."""
        return sum(tensor[0].numel() * tensor.element_size() for tensor in self.tensors)

    def layer(
        self,
        index: int,
        num_kv_heads: int | None,
        head_dim: int | None,
        v_head_dim: int | None,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        """The views of one layer; see `PagedKVCache.layer`."""
        if not 0 <= index < len(self):
            raise IndexError(f"layer {index}: must be 0..{len(self) - 1}")
        made = self._layers[index]
        if made is None:
            with self._lock:
                made = self._layers[index] or self._make(
                    index, num_kv_heads, head_dim, v_head_dim, dtype
                )
        k_cache, v_cache = made
        has = (k_cache.size(2), k_cache.size(3), v_cache.size(3), k_cache.dtype)
        wanted = (num_kv_heads, head_dim, head_dim if v_head_dim is None else v_head_dim, dtype)
        asked = tuple(old if new is None else new for new, old in zip(wanted, has, strict=True))
        if asked != has:
            raise ValueError(
                f"layer {index}: (num_kv_heads, head_dim, v_head_dim, dtype) are {has}, not {asked}"
            )
        return made

    def _make(
        self,
        index: int,
        num_kv_heads: int | None,
        head_dim: int | None,
        v_head_dim: int | None,
        dtype: torch.dtype | None,
    ) -> tuple[Tensor, Tensor]:
        if num_kv_heads is None or head_dim is None:
            raise ValueError(
                f"layer {index} has no tensors yet: its first use gives num_kv_heads and head_dim, "
                f"not {num_kv_heads} and {head_dim}"
            )
        dtype = self.dtype if dtype is None else dtype
        _check_dtype(dtype)
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        dims = (num_kv_heads, head_dim, v_head_dim)
        if not all(isinstance(dim, SupportsIndex) and operator.index(dim) >= 1 for dim in dims):
            raise ValueError(
                f"num_kv_heads = {num_kv_heads}, head_dim = {head_dim}, v_head_dim = {v_head_dim}: "
                "must be integers of 1 or more"
            )
        transposed = self.v_transposed
        if transposed is None:
            transposed = self.device.type == "cpu" and dtype == torch.bfloat16
        row_bytes = self.num_pages * self.page_size * num_kv_heads * dtype.itemsize
        keys, values = _allocate(self.device, row_bytes * head_dim, row_bytes * v_head_dim)
        made = (
            self._view(keys.view(dtype), num_kv_heads, head_dim, transposed=False),
            self._view(values.view(dtype), num_kv_heads, v_head_dim, transposed=transposed),
        )
        self.tensors = [*self.tensors, *made]
        self._layers[index] = made
        return made

    def _view(self, flat: Tensor, heads: int, dim: int, *, transposed: bool) -> Tensor:
        """The logical [num_pages, page_size, heads, dim] of a tensor's memory."""
        if transposed:
            return flat.view(self.num_pages, heads, dim, self.page_size).permute(0, 3, 1, 2)
        if self.layout == "HND":
            return flat.view(self.num_pages, heads, self.page_size, dim).permute(0, 2, 1, 3)
        return flat.view(self.num_pages, self.page_size, heads, dim)


def _check_dtype(dtype: object) -> None:
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype = {dtype!r}: must be a torch.dtype")


def _allocate(device: torch.device, k_bytes: int, v_bytes: int) -> tuple[Tensor, Tensor]:
    """Two byte tensors. On a CPU they are zeros that take up memory only where they are written."""
    try:
        if device.type == "cpu" and hasattr(mmap, "MAP_ANONYMOUS"):
            return _map(k_bytes, v_bytes)
        make = torch.zeros if device.type == "cpu" else torch.empty
        return (
            make(k_bytes, dtype=torch.uint8, device=device),
            make(v_bytes, dtype=torch.uint8, device=device),
        )
    except (OSError, OverflowError, RuntimeError) as error:  # torch's own is a RuntimeError
        raise MemoryError(
            f"cannot allocate {k_bytes + v_bytes} bytes on {device} for the K and V pages of one "
            f"layer: {error}"
        ) from error


def _map(k_bytes: int, v_bytes: int) -> tuple[Tensor, Tensor]:
    """K and V in one private mapping, on huge pages from its start on if it is large enough."""
    v_begin = -(-k_bytes // _VALUES_ALIGNMENT) * _VALUES_ALIGNMENT
    wanted = v_begin + v_bytes
    slack = _HUGE_PAGE if wanted >= _HUGE_PAGE else 0
    # Private: a shared anonymous mapping is a file in tmpfs, which rarely gets huge pages.
    memory = mmap.mmap(-1, wanted + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if slack and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: the advice is only about speed
            memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    begin = -flat.data_ptr() % _HUGE_PAGE if slack else 0
    return flat[begin : begin + k_bytes], flat[begin + v_begin : begin + wanted]
