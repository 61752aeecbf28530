"""Our paged attention beside torch's scaled_dot_product_attention, in one run.

Torch gets what it likes best: the sequence's K and V contiguous in one piece (gathering them out of
pages is not counted), grouped heads through enable_gqa, and a boolean mask where a chunk starts in
the middle of a sequence. Ours gets the pages as `PagedKVCache` lays them out, in random order, and
a plan made beforehand, as one plan serves all layers of a step. Both are timed turn by turn, so
that a busy machine disturbs both alike; the table shows medians. Results that differ by more than
rounding end the run.

    python benchmarks/bench_attention.py [--threads N] [--seconds S] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from wim_ext import ops
from wim_ext.cache import PagedKVCache
from wim_ext.info import collect
from wim_ext.plan import AttentionPlan

PAGE = 64
# Of numbers about 1: a bfloat16 output near 4 is rounded to multiples of 1/64 on either side.
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


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
    cache = PagedKVCache(
        num_layers=1,
        num_pages=total,
        page_size=PAGE,
        num_kv_heads=kv,
        head_dim=shape.head_dim,
        dtype=dtype,
    )
    k_cache, v_cache = (pages.copy_(torch.randn(pages.shape)) for pages in cache.layer(0))
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

    def theirs() -> Tensor:  # [branches, num_heads, rows, head_dim]
        return scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=shape.rows > 1 and mask is None,
            enable_gqa=True,
        )

    return ours, theirs, plan


def measure(shape: Shape, dtype: torch.dtype, seconds: float) -> Row:
    ours, theirs, plan = calls(shape, dtype)
    other_rows = theirs().transpose(1, 2).flatten(0, 1)
    difference = (ours().float() - other_rows.float()).abs().max().item()
    if not difference <= LARGEST_DIFFERENCE[dtype]:
        sys.exit(f"{shape}, {dtype}: ours and torch's differ by {difference}")
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
    facts = collect()
    cpu, kernels = facts["cpu"], facts["kernels"]["cpu"]
    print(f"{cpu['model']}, {options.threads} threads, kernels for {kernels['in_use']}, ", end="")
    print(f"torch {torch.__version__}")
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
        report = {
            "when": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "machine": {**cpu, "kernels": facts["kernels"]},
            "versions": facts["versions"],
            "threads": options.threads,
            "rows": [asdict(row) for row in rows],
        }
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
