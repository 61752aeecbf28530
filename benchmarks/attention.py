"""Our paged attention beside torch's scaled_dot_product_attention, in one run.

Torch gets K and V contiguous in one piece, in the forms that suit it: with the mask that a chunk
after a prefix needs (``sdpa``), prefix and chunk apart and merged by their log-sum-exp
(``sdpa_composed``), a row's heads folded (``sdpa_folded``), and with the gather that a paged cache
costs it (``sdpa_gathered``). Ours reads pages in random order (``ours``); the same in another
engine's NHD layout (``ours_nhd``); each sequence by a call of its own (``ours_separate``). Plans
are made beforehand, as one serves all layers of a step. All forms of a shape are timed turn by
turn, so that a busy machine disturbs them alike; the table shows medians, and how much of the CPU
other processes took. Results that differ by more than rounding end the run.

    python benchmarks/attention.py [--preset quick|acceptance|grid] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import attention_calls as forms
import torch
from attention_calls import Call, Inputs, Shape

from wim_ext.info import collect

# Of numbers about 1: a bfloat16 output near 4 is rounded to multiples of 1/64 on either side.
LARGEST_DIFFERENCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
HEADS = [(9, 3, 64), (32, 8, 64), (32, 8, 128), (8, 1, 256)]
PREFILL = [(512, 4096), (512, 16384), (2048, 4096), (2048, 16384)]
DTYPES = [torch.bfloat16, torch.float32]
PRESETS = {
    "quick": [Shape(9, 3, 64, 512, 0), Shape(9, 3, 64, 1, 1000), Shape(9, 3, 64, 0, 2048, 8)],
    "acceptance": [
        *(Shape(*heads, *chunk) for heads in HEADS[:3] for chunk in PREFILL),
        *(Shape(*heads, 1, 16384) for heads in HEADS[:3]),
        *(Shape(*heads, 0, 16384, 8) for heads in HEADS[:3]),
        *(Shape(*heads, 512, 16384, 8) for heads in HEADS[:3]),
    ],
    "grid": [
        *(
            Shape(*heads, rows, prefix)
            for heads in HEADS
            for rows in (1, 128, 512, 2048)
            for prefix in (0, 4096, 16384, 32768)
        ),
        *(
            Shape(*heads, rows, 16384, n)
            for heads in HEADS
            for rows in (0, 512)
            for n in (1, 8, 32)
        ),
    ],
}


@dataclass
class Row:
    """One line of the table: median seconds of each form, and rates of ours."""

    shape: str
    dtype: str
    seconds: dict[str, float]
    gflops: float
    gigabytes_per_second: float
    share_of_peak: float
    repeats: int
    foreign_cpu: float

    def ratio(self, form: str) -> float | None:
        return self.seconds[form] / self.seconds["ours"] if form in self.seconds else None


def calls(shape: Shape, dtype: torch.dtype) -> tuple[dict[str, Call], Inputs]:
    """The forms that make sense for a shape, ours first."""
    inputs = Inputs(shape, dtype)
    result = {"ours": forms.ours(inputs), "ours_nhd": forms.ours_nhd(inputs)}
    if shape.branches:
        result["ours_separate"] = forms.ours_separate(inputs)
        if shape.rows:
            chunk = Inputs(Shape(*_heads(shape), shape.rows, shape.prefix), dtype)
            result["chunk_alone"] = forms.ours(chunk)
        return result, inputs
    result["sdpa"] = forms.sdpa(inputs)
    result["sdpa_gathered"] = forms.sdpa_gathered(inputs)
    if shape.rows == 1:
        result["sdpa_folded"] = forms.sdpa_folded(inputs)
    else:
        result["sdpa_composed"] = forms.sdpa_composed(inputs)
    return result, inputs


def _heads(shape: Shape) -> tuple[int, int, int]:
    return shape.num_heads, shape.num_kv_heads, shape.head_dim


def check(shape: Shape, dtype: torch.dtype, made: dict[str, Call]) -> None:
    expected = made["ours"]().float().flatten()
    for name, call in made.items():
        if name == "chunk_alone":
            continue  # other numbers
        difference = (call().float().flatten() - expected).abs().max().item()
        if not difference <= LARGEST_DIFFERENCE[dtype]:
            sys.exit(f"{shape}, {dtype}: ours and {name} differ by {difference}")


def measure(shape: Shape, dtype: torch.dtype, seconds: float, peak: dict[str, float]) -> Row:
    made, inputs = calls(shape, dtype)
    check(shape, dtype, made)
    times: dict[str, list[float]] = {name: [] for name in made}
    foreign = ForeignCpu()
    stop = time.perf_counter() + seconds
    while len(times["ours"]) < 3 or time.perf_counter() < stop:
        for name, call in made.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(t) for name, t in times.items()}
    report = inputs.plan().report
    gflops = report.flops(shape.head_dim) / medians["ours"] / 1e9
    gigabytes = report.bytes_read(shape.head_dim, dtype=dtype) / medians["ours"] / 1e9
    share = gflops / peak[name_of(dtype)] if shape.rows > 1 else gigabytes / peak["read"]
    return Row(
        str(shape),
        name_of(dtype),
        medians,
        gflops,
        gigabytes,
        share,
        len(times["ours"]),
        foreign.share(),
    )


class ForeignCpu:
    """The share of all CPUs that other processes took since it was made (0 where /proc is not)."""

    def __init__(self) -> None:
        self._begin = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = os.times()
        try:
            with open("/proc/stat") as file:
                fields = [int(n) for n in file.readline().split()[1:9]]
        except OSError:
            return 0.0, 1.0, 0.0
        tick = os.sysconf("SC_CLK_TCK")
        busy = sum(fields) - fields[3] - fields[4]
        return busy / tick, sum(fields) / tick, times.user + times.system

    def share(self) -> float:
        busy, total, own = (b - a for a, b in zip(self._begin, self._now(), strict=True))
        return max(0.0, (busy - own) / total) if total > 0 else 0.0


def best(call: Callable[[], object], repeats: int = 7) -> float:
    shortest = math.inf
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - begin)
    return shortest


def measure_peaks() -> dict[str, float]:
    """What the machine does at best by torch: GFLOP/s of matrix products, GB/s of reading."""
    peak = {}
    n = 2048
    for dtype in DTYPES:
        left, right = (torch.randn(n, n).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        peak[name_of(dtype)] = 2 * n**3 / best(partial(torch.mm, left, right, out=out)) / 1e9
    memory = torch.ones(256 << 20, dtype=torch.float32)
    peak["read"] = memory.nbytes / best(lambda: memory.sum(), 3) / 1e9
    return peak


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


PEERS = ("sdpa", "sdpa_composed", "sdpa_folded", "sdpa_gathered", "ours_nhd", "ours_separate")


def line(row: Row) -> str:
    text = f"{row.shape:<40}{row.dtype:<10}{row.seconds['ours'] * 1e3:>9.3f}{row.gflops:>8.0f}"
    text += f"{row.gigabytes_per_second:>7.1f}{row.share_of_peak:>6.0%}"
    for peer in PEERS:
        ratio = row.ratio(peer)
        text += f"{ratio:>9.2f}" if ratio else f"{'':>9}"
    added = row.ratio("chunk_alone")
    text += f"{1 / added - 1:>+9.1%}" if added else f"{'':>9}"
    return text + f"{row.foreign_cpu:>6.0%}"


HEADER = (
    f"{'':<40}{'':<10}{'ours':>9}{'':>8}{'':>7}{'of':>6}"
    f"{'times ours':>54}{'on':>9}{'other':>6}\n"
    f"{'heads/kv/dim, rows':<40}{'dtype':<10}{'ms':>9}{'GFLOP/s':>8}{'GB/s':>7}{'peak':>6}"
    + "".join(f"{p.replace('sdpa_', '').replace('ours_', ''):>9}" for p in PEERS)
    + f"{'chunk':>9}{'CPU':>6}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="acceptance")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="per line of the table")
    parser.add_argument("--json", help="also write the table here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    facts = collect()
    cpu, kernels = facts["cpu"], facts["kernels"]["cpu"]
    print(f"{cpu['model']}, {options.threads} threads, kernels for {kernels['in_use']}, ", end="")
    print(f"torch {torch.__version__}")
    peak = measure_peaks()
    print("peaks by torch:", ", ".join(f"{name} {rate:.0f}" for name, rate in peak.items()), end="")
    print(" (GFLOP/s of matrix products, GB/s)\n" + HEADER)
    rows = []
    for dtype in DTYPES:
        for shape in PRESETS[options.preset]:
            rows.append(measure(shape, dtype, options.seconds, peak))
            print(line(rows[-1]), flush=True)
    if options.json:
        report = {
            "when": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "machine": {**cpu, "kernels": facts["kernels"]},
            "versions": facts["versions"],
            "threads": options.threads,
            "peak": peak,
            "rows": [asdict(row) for row in rows],
        }
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
