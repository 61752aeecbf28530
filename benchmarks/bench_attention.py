"""Our paged attention beside torch's scaled_dot_product_attention, in one run.

Torch gets what it likes best: the sequence's K and V contiguous in one piece (gathering them out of
pages is not counted), grouped heads through enable_gqa, and a boolean mask where a chunk starts in
the middle of a sequence. Both are timed turn by turn, so that a busy machine disturbs both alike;
the table shows medians.

    python benchmarks/bench_attention.py [--threads N] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from wim_ext import ops
from wim_ext.plan import AttentionPlan

PAGE = 64


@dataclass(frozen=True)
class Shape:
    """`branches` sequences, each of `rows` new tokens after a `prefix`; more than one share it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rows: int
    prefix: int
    branches: int = 1

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_kv_heads}/{self.head_dim}"
        times = f"{self.branches} x " if self.branches > 1 else ""
        return f"{heads}, {times}{self.rows} after {self.prefix}"


SHAPES = [
    Shape(9, 3, 64, rows=512, prefix=0),
    Shape(9, 3, 64, rows=512, prefix=4096),
    Shape(9, 3, 64, rows=64, prefix=6000),
    Shape(32, 8, 64, rows=512, prefix=4096),
    Shape(32, 8, 128, rows=512, prefix=4096),
    Shape(9, 3, 64, rows=1, prefix=1000),
    Shape(9, 3, 64, rows=1, prefix=16384),
    Shape(32, 8, 128, rows=1, prefix=16384),
    Shape(9, 3, 64, rows=1, prefix=8192, branches=8),
]
QUICK = [SHAPES[i] for i in (0, 5, 8)]


@dataclass
class Row:
    """One line of the table: seconds, rates of ours, and how many times faster than torch."""

    shape: str
    dtype: str
    ours: float
    torch: float
    speedup: float
    gflops: float
    gigabytes_per_second: float
    largest_difference: float


def calls(
    shape: Shape, dtype: torch.dtype
) -> tuple[Callable[[], Tensor], Callable[[], Tensor], AttentionPlan]:
    """Ours and torch's over the same numbers, and our plan."""
    length = shape.prefix + shape.rows
    pages, own = -(-length // PAGE), -(-length // PAGE) - shape.prefix // PAGE
    shared = torch.randperm(pages - own)
    fresh = torch.arange(shape.branches * own).view(shape.branches, own) + len(shared)
    table = torch.cat([shared.expand(shape.branches, -1), fresh], dim=1).int()
    total, kv = len(shared) + fresh.numel(), shape.num_kv_heads
    # The cache's own layout on the CPU: head-major pages, V transposed within the page.
    k_cache = torch.randn(total, kv, PAGE, shape.head_dim).to(dtype).transpose(1, 2)
    v_cache = torch.randn(total, kv, shape.head_dim, PAGE).to(dtype).permute(0, 3, 1, 2)
    query = torch.randn(shape.branches * shape.rows, shape.num_heads, shape.head_dim).to(dtype)
    cu = torch.arange(shape.branches + 1, dtype=torch.int32) * shape.rows
    used = torch.full((shape.branches,), length, dtype=torch.int32)
    plan = ops.plan_attention(
        table, cu, used, num_heads=shape.num_heads, num_kv_heads=kv, page_size=PAGE
    )
    out = torch.empty_like(query)

    def ours() -> Tensor:
        return ops.paged_attention(query, k_cache, v_cache, table, cu, used, plan=plan, out=out)

    def contiguous(cache: Tensor) -> Tensor:
        whole = cache[table.long()].flatten(1, 2)[:, :length]
        return whole.transpose(1, 2).contiguous()

    keys, values = contiguous(k_cache), contiguous(v_cache)
    queries = query.unflatten(0, (shape.branches, shape.rows)).transpose(1, 2).contiguous()
    mask = None
    if shape.rows > 1 and shape.prefix:
        mask = torch.ones(shape.rows, length, dtype=torch.bool).tril(shape.prefix)

    def theirs() -> Tensor:
        result = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=shape.rows > 1 and mask is None,
            enable_gqa=True,
        )
        return result.transpose(1, 2).flatten(0, 1)

    return ours, theirs, plan


def measure(shape: Shape, dtype: torch.dtype, seconds: float) -> Row:
    ours, theirs, plan = calls(shape, dtype)
    difference = (ours().float() - theirs().float()).abs().max().item()
    times: tuple[list[float], list[float]] = ([], [])
    stop = time.perf_counter() + seconds
    while len(times[1]) < 3 or time.perf_counter() < stop:
        for call, spent in zip((ours, theirs), times, strict=True):
            begin = time.perf_counter()
            call()
            spent.append(time.perf_counter() - begin)
    mine, other = (statistics.median(t) for t in times)
    return Row(
        str(shape),
        str(dtype).removeprefix("torch."),
        mine,
        other,
        other / mine,
        plan.report.flops(shape.head_dim) / mine / 1e9,
        plan.report.bytes_read(shape.head_dim, dtype=dtype) / mine / 1e9,
        difference,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="per line of the table")
    parser.add_argument("--quick", action="store_true", help="three small shapes only")
    parser.add_argument("--json", help="also write the table here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    _, _, isa, why = ops.cpu_kernels()
    print(f"torch {torch.__version__}, {options.threads} threads, {isa} ({why})")
    print(f"{'heads, rows':<34}{'dtype':<10}{'ours ms':>10}{'torch ms':>10}", end="")
    print(f"{'speedup':>9}{'GFLOP/s':>9}{'GB/s':>7}")
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for shape in QUICK if options.quick else SHAPES:
            rows.append(row := measure(shape, dtype, options.seconds))
            print(f"{row.shape:<34}{row.dtype:<10}{row.ours * 1e3:>10.3f}", end="")
            print(f"{row.torch * 1e3:>10.3f}{row.speedup:>9.2f}", end="")
            print(f"{row.gflops:>9.0f}{row.gigabytes_per_second:>7.1f}")
    if options.json:
        facts = {"torch": torch.__version__, "threads": options.threads, "isa": isa}
        with open(options.json, "w") as file:
            json.dump({**facts, "rows": [asdict(row) for row in rows]}, file, indent=1)


if __name__ == "__main__":
    main()
