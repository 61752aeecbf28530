"""What the tests of the ops share: tolerances, memory layouts, poison, canaries, subprocesses.

The tolerance rules are stated here and nowhere else (errors are measured against float64):

R1  16-bit outputs: error <= 1.5 x (bfloat16: 2 x) the error of rounding the exact result to the
    dtype, + 1e-6.
R2  float32 outputs: error <= 2 x that of naive float32 arithmetic, + 1e-6.
R3  lse: |error| <= 1e-5 x max(1, |lse|).
R4  A row without a key is exactly 0, its lse exactly -inf (exactly the sink, where there is one).
R5  NaN and infinity stand exactly where the exact result has them.

R1 holds for each class of rows that see about equally many keys (within a power of two), not for
the tensor as a whole: a row over 16,384 keys is a hundred times smaller than a row over one, and an
error in it must not hide behind the rounding of the other. R2 holds for the whole: in float32 the
error comes from the rounding of the scores, whatever the size of the result. (2 = 1.5 x log2(e), a
little less: kernels take powers of 2, and base-2 scores are that much larger.)

bfloat16 has 2 because kernels that multiply in bfloat16 also round the softmax's weights to it, as
FlashAttention does: of normal random numbers that alone brings a class's worst element to 1.8.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

ROUNDINGS = 1.5  # R1
BFLOAT16_ROUNDINGS = 2.0  # R1, attention
NAIVE_ERRORS = 2.0  # R2
FLOOR = 1e-6  # R1, R2
LSE_RELATIVE = 1e-5  # R3
CANARY = -12345.0  # exact in every dtype but float16, where it rounds to another odd number


def assert_matches(
    out: Tensor,
    exact: Tensor,  # float64
    *,
    keys_seen: Tensor,
    naive: tuple[Tensor, ...] = (),
    lse: Tensor | None = None,
    exact_lse: Tensor | None = None,
) -> None:
    """Rules R1 to R5 for an attention output [rows, heads, dim] and its lse [heads, rows].

    `keys_seen` [rows] says how many keys each row sees; `naive` are float32 results whose error is
    the measure for float32 (R2).
    """
    assert out.shape == exact.shape, f"shape {tuple(out.shape)}, expected {tuple(exact.shape)}"
    _assert_finite_alike(out, exact, "out")
    is_f32 = out.dtype == torch.float32
    measures = naive if is_f32 else (exact.to(out.dtype),)
    factor = NAIVE_ERRORS if is_f32 else ROUNDINGS
    if out.dtype == torch.bfloat16:
        factor = BFLOAT16_ROUNDINGS
    allowed = torch.stack([_error(m, exact) for m in measures]).amax(dim=0)
    error = _error(out, exact)

    empty = keys_seen == 0
    assert (out[empty] == 0).all(), "a row without a key is not exactly 0 (R4)"
    row_class = keys_seen.clamp(min=1).double().log2().floor().long()
    if is_f32:
        row_class.zero_()
    for c in sorted(set(row_class[~empty].tolist())):
        members = (row_class == c) & ~empty
        limit = factor * float(allowed[members].max()) + FLOOR
        worst = float(error[members].max())
        assert worst <= limit, (
            f"rows of class {c} (2^{c} keys or more): error {worst:.3e} above {limit:.3e} "
            f"at {_where(torch.where(members[:, None, None], error, -1.0))} (R1, R2)"
        )
    if lse is not None:
        assert exact_lse is not None
        assert_lse_matches(lse, exact_lse, empty)


def assert_lse_matches(lse: Tensor, exact_lse: Tensor, empty: Tensor) -> None:
    """Rules R3 to R5 for lse [heads, rows]; `empty` [rows] marks the rows without a key."""
    assert lse.dtype == torch.float32, f"lse is {lse.dtype}"
    assert lse.shape == exact_lse.shape, f"lse shape {tuple(lse.shape)}"
    assert_bitwise_equal(lse[:, empty], exact_lse[:, empty].float(), "lse without a key (R4)")
    _assert_finite_alike(lse, exact_lse, "lse")
    if lse.numel():
        excess = _error(lse, exact_lse) / exact_lse.abs().nan_to_num().clamp(min=1)
        worst = float(excess.max())
        assert worst <= LSE_RELATIVE, f"lse off by {worst:.3e} at [head, row] {_where(excess)} (R3)"


def assert_bitwise_equal(a: Tensor, b: Tensor, what: str = "tensors") -> None:
    """Equal to the bit: NaN equals the same NaN, -0.0 differs from 0.0."""
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)} and {tuple(b.shape)}"
    assert a.dtype == b.dtype, f"{what}: dtype {a.dtype} and {b.dtype}"
    as_int = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differs = a.contiguous().view(as_int) != b.contiguous().view(as_int)
    if bool(differs.any()):
        at = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differs.sum())} of {a.numel()} elements differ, first at {at}: "
            f"{a[at].item()!r} and {b[at].item()!r}"
        )


def _assert_finite_alike(found: Tensor, exact: Tensor, what: str) -> None:
    """R5. Where the exact value is beyond the dtype's range, infinity is its right rounding."""
    differs = found.isfinite() != exact.to(found.dtype).isfinite()
    if bool(differs.any()):
        at = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{what} is {found[at].item()} at {at}, exactly {exact[at].item()} (R5)"
        )


def _error(found: Tensor, exact: Tensor) -> Tensor:
    """|found - exact| in float64, 0 where the exact value is not finite (R5 looks at those)."""
    return torch.where(exact.isfinite(), (found.double() - exact).abs(), 0.0)


def _where(error: Tensor) -> tuple[int, ...]:
    index = torch.unravel_index(error.argmax(), error.shape)
    return tuple(int(i) for i in index)


# Memory layouts. Each maker takes [N, P, H, D] and [N, P, H, Dv] sizes and returns empty K and V
# views with that logical shape; whatever lies between the views' elements is NaN.

Layout = Callable[[int, int, int, int, int, torch.dtype], tuple[Tensor, Tensor]]


def _nan(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def nhd(n: int, p: int, h: int, d: int, dv: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Token-major pages, contiguous."""
    return _nan(n, p, h, d, dtype=dtype), _nan(n, p, h, dv, dtype=dtype)


def hnd(n: int, p: int, h: int, d: int, dv: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Head-major pages."""
    k, v = nhd(n, h, p, d, dv, dtype)
    return k.transpose(1, 2), v.transpose(1, 2)


def v_transposed(
    n: int, p: int, h: int, d: int, dv: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Head-major pages with V's slots adjacent: `PagedKVCache(..., v_transposed=True)`."""
    k, _ = hnd(n, p, h, d, dv, dtype)
    return k, _nan(n, h, dv, p, dtype=dtype).permute(0, 3, 1, 2)


def packed(n: int, p: int, h: int, d: int, dv: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of a token side by side."""
    kv = _nan(n, p, h, d + dv, dtype=dtype)
    return kv[..., :d], kv[..., d:]


def cross_layer(
    n: int, p: int, h: int, d: int, dv: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One pool for three layers, each page holding all of them; these are the views of layer 1."""
    k, v = _nan(n, 3, p, h, d, dtype=dtype), _nan(n, 3, p, h, dv, dtype=dtype)
    return k[:, 1], v[:, 1]


def padded(n: int, p: int, h: int, d: int, dv: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Odd gaps after every dimension and an odd offset, so nothing is aligned."""
    k, v = nhd(n + 1, p + 1, h + 1, d + 3, dv + 5, dtype)
    return k[1:, :p, 1:, 1 : d + 1], v[:n, 1:, :h, 3 : dv + 3]


LAYOUTS: dict[str, Layout] = {
    f.__name__: f for f in (nhd, hnd, v_transposed, packed, cross_layer, padded)
}


def rows_like(kind: str, rows: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """A NaN-filled [rows, heads, dim] tensor laid out as queries and outputs come in practice."""
    if kind == "contiguous":
        return _nan(rows, heads, dim, dtype=dtype)
    if kind == "fused":  # the query part of a fused QKV projection
        return _nan(rows, heads + 4, dim, dtype=dtype)[:, :heads]
    if kind == "head_major":
        return _nan(heads, rows, dim, dtype=dtype).transpose(0, 1)
    if kind == "padded":  # odd strides, odd offset
        return _nan(rows + 1, heads + 1, dim + 3, dtype=dtype)[1:, 1:, 1 : dim + 1]
    raise ValueError(f"no row layout is named {kind!r}")


ROW_LAYOUTS = ("contiguous", "fused", "head_major", "padded")


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """torch's thread count in the block; many small ops are far faster with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def storage_bytes(t: Tensor) -> Tensor:
    """All bytes of the storage behind a view, gaps included."""
    return torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())


@contextlib.contextmanager
def unchanged(*tensors: Tensor | None) -> Iterator[None]:
    """Nothing in the storages of these tensors changes in the block, whether it raises or not."""
    watched = [storage_bytes(t) for t in tensors if t is not None and t.device.type == "cpu"]
    before = [s.clone() for s in watched]
    try:
        yield
    finally:
        for i, (now, then) in enumerate(zip(watched, before, strict=True)):
            assert_bitwise_equal(now, then, f"storage of watched tensor {i}")


@contextlib.contextmanager
def only_writes(view: Tensor) -> Iterator[None]:
    """Every byte of the storage that is not an element of `view` keeps its value in the block."""
    base = view.new_empty(0).set_(view.untyped_storage())
    base.fill_(CANARY)
    yield
    gaps = base.new_ones(base.shape, dtype=torch.bool)
    gaps.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    expected = torch.full_like(base[gaps], CANARY)
    assert_bitwise_equal(base[gaps], expected, "canaries around the output")


def run_python(
    code: str, *args: str, timeout: float = 120, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that can import what the tests can; the caller judges."""
    here = str(Path(__file__).parent)
    inherited = os.environ.get("PYTHONPATH")
    path = here if not inherited else os.pathsep.join([here, inherited])
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
