"""The CUDA launchers and kernels, compiled by g++ and run on CPU tensors: see cuda_runtime.h here.

The functions take the arguments of `wim_ext.ops`. Nothing checks them: the checks are those of the
ops, which are the same source for both devices.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import subprocess
import tempfile
from ctypes import Structure, c_float, c_int, c_int64, c_uint8, c_void_p
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class RowsView(Structure):
    _fields_ = [("data", c_void_p)] + [
        (name, c_int64) for name in ("rows", "heads", "dim", "row_stride", "head_stride")
    ]

    @classmethod
    def of(cls, t: Tensor) -> RowsView:
        assert t.stride(2) == 1 or t.shape[2] <= 1
        return cls(t.data_ptr(), *t.shape, *t.stride()[:2])


class CacheView(Structure):
    _fields_ = [("data", c_void_p)] + [
        (name, c_int64)
        for name in (
            *("num_pages", "page_size", "heads", "dim"),
            *("page_stride", "slot_stride", "head_stride", "dim_stride"),
        )
    ]

    @classmethod
    def of(cls, t: Tensor) -> CacheView:
        return cls(t.data_ptr(), *t.shape, *t.stride())


class AppendKvParams(Structure):
    _fields_ = [
        ("dtype", c_uint8),
        *((name, RowsView) for name in ("key", "value")),
        *((name, CacheView) for name in ("k_cache", "v_cache")),
        ("slots", c_void_p),
    ]


class PageShape(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("element_bytes", c_int64),
        ("page_stride", c_int64),
        ("dims", c_int),
        ("sizes", c_int64 * 6),
        ("strides", c_int64 * 6),
    ]

    @classmethod
    def of(cls, t: Tensor) -> PageShape:
        """Outermost first, seamless neighbours fused, as torch_ops.cpp describes a page."""
        fused: list[tuple[int, int]] = []
        for size, stride in sorted(
            zip(t.shape[1:], t.stride()[1:], strict=True), key=lambda d: -d[1]
        ):
            if fused and fused[-1][1] == size * stride:
                size *= fused.pop()[0]
            fused.append((size, stride))
        sizes, strides = zip(*fused, strict=True) if fused else ((), ())
        return cls(
            t.data_ptr(), t.element_size(), t.stride(0), len(fused),
            (c_int64 * 6)(*sizes), (c_int64 * 6)(*strides),
        )  # fmt: skip


class MergeStatesParams(Structure):
    _fields_ = [
        ("dtype", c_uint8),
        *((name, RowsView) for name in ("out_a", "out_b", "out")),
        *((name, c_void_p) for name in ("lse_a", "lse_b", "lse")),
        *((name, c_int64) for name in ("lse_a_stride", "lse_b_stride", "lse_stride")),
    ]


class HeadScale(Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64)]

    @classmethod
    def of(cls, t: Tensor | None) -> HeadScale:
        return cls() if t is None else cls(t.data_ptr(), int(t.numel() > 1))


class AttentionParams(Structure):
    _fields_ = [
        ("dtype", c_uint8),
        *((name, RowsView) for name in ("query", "out")),
        *((name, CacheView) for name in ("k_cache", "v_cache")),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
        ("lse", c_void_p),
        ("lse_stride", c_int64),
        ("softmax_scale", c_float),
        ("softcap", c_float),
        ("alibi_slopes", c_void_p),
        ("alibi_batch_stride", c_int64),
        ("sinks", c_void_p),
        *((name, HeadScale) for name in ("k_scale", "v_scale")),
        ("plan", c_void_p),
    ]


def compile_shim(csrc: Path, target: Path) -> ctypes.CDLL:
    """The shim around the sources in csrc/cuda; -ffp-contract does what CMake's -fmad does."""
    command = [
        "g++", "-std=c++17", "-O2", "-march=native", "-ffp-contract=off", "-Wall", "-Wextra",
        "-Werror", "-fPIC", "-shared", f"-I{HERE}", f"-I{csrc}", str(HERE / "emulated.cpp"),
        "-o", str(target),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    library = ctypes.CDLL(str(target))
    library.emulated_size.restype = c_int64
    return library


@functools.cache
def load() -> ctypes.CDLL:
    """The shim around the sources as they are, compiled once."""
    folder = tempfile.TemporaryDirectory(prefix="cuda_shim_")
    atexit.register(folder.cleanup)
    return compile_shim(CSRC, Path(folder.name) / "emulated.so")


class EmulatedOps:
    """`wim_ext.ops` with the CUDA kernels behind it."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self.library = load() if library is None else library

    def order(self, *, last_thread_first: bool = False, largest_grid: int = 2**31) -> None:
        self.library.emulate_order(last_thread_first, ctypes.c_uint(largest_grid))

    def append_kv(
        self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        params = AppendKvParams(
            DTYPES[key.dtype], RowsView.of(key), RowsView.of(value),
            CacheView.of(k_cache), CacheView.of(v_cache), slot_mapping.data_ptr(),
        )  # fmt: skip
        self.library.emulated_append_kv(ctypes.byref(params))

    def copy_pages(self, caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
        shapes = (PageShape * len(caches))(*map(PageShape.of, caches))
        self.library.emulated_copy_pages(
            shapes, c_int64(len(caches)), c_void_p(src.data_ptr()), c_void_p(dst.data_ptr()),
            c_int64(len(src)),
        )  # fmt: skip

    def merge_states(
        self, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor,
        *, out: Tensor | None = None, lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out = torch.empty_like(out_a) if out is None else out
        lse = torch.empty_like(lse_a) if lse is None else lse
        params = MergeStatesParams(
            DTYPES[out_a.dtype], *map(RowsView.of, (out_a, out_b, out)),
            *(t.data_ptr() for t in (lse_a, lse_b, lse)),
            *(t.stride(0) for t in (lse_a, lse_b, lse)),
        )  # fmt: skip
        self.library.emulated_merge_states(ctypes.byref(params))
        return out, lse

    def paged_attention(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor,
        *, plan: Tensor, out: Tensor, lse: Tensor | None = None, softmax_scale: float | None = None,
        softcap: float = 0.0, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
        k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        """The mask and the lengths come with the plan."""
        scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale

        def pointer(t: Tensor | None) -> int | None:
            return None if t is None else t.data_ptr()

        params = AttentionParams(
            DTYPES[query.dtype], RowsView.of(query), RowsView.of(out),
            CacheView.of(k_cache), CacheView.of(v_cache),
            pointer(block_table), block_table.stride(0),
            pointer(lse), 0 if lse is None else lse.stride(0), scale, softcap,
            pointer(alibi_slopes),
            alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
            pointer(sinks), HeadScale.of(k_scale), HeadScale.of(v_scale), pointer(plan),
        )  # fmt: skip
        self.library.emulated_attention(ctypes.byref(params))
