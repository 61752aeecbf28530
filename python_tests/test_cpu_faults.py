"""Planted faults: what the parity matrix is worth for the CPU kernels.

One library is built with all faults in it, each behind a number; the cases of the matrix must
reject each, and none without a fault. The algorithm is the same for all instruction sets, so the
portable one stands for it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kit import run_python

CSRC = Path(__file__).resolve().parent.parent / "csrc"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile kernels")


@dataclass(frozen=True)
class Place:
    """An expression of the sources: `where` with @ for `right`; `wrong` by the fault's name."""

    file: str
    where: str
    right: str
    wrong: dict[str, str]


KERNEL, SOFTMAX, SCORING = "attention_kernel.h", "softmax.h", "scoring.h"
PLACES = [
    Place(KERNEL, "s_.high[row] = @,", "source.high", {
        "the last key is dropped": "source.high - 1", "one key too many": "source.high + 1"}),
    Place(KERNEL, "s_.low[row] = @,", "source.low", {
        "the window's first key is dropped": "source.low + (source.low > 0)"}),
    Place(KERNEL, ": @;\n      find_slots", "item_.key_end", {
        "a page's tail is dropped": "item_.key_end / 16 * 16"}),
    Place(KERNEL, "find_slots<T>(params_.k_cache, pages_, @,", "kv_head_", {
        "keys of another head": "0"}),
    Place(KERNEL, "return @; }\n  const PlanRow&", "kv_head_ * work_.group + row % work_.group", {
        "heads interleaved": "row % work_.group * params_.k_cache.heads + kv_head_"}),
    Place(SOFTMAX, "*sum = *sum * @ +", "alpha", {"the sum is not rescaled": "1.0f"}),
    Place(KERNEL, "V::set1(@)", "alpha", {"the output is not rescaled": "1.0f"}),
    Place(SCORING, "float signed_scale = @;", "params.softmax_scale", {
        "scaled twice": "params.softmax_scale * params.softmax_scale"}),
    Place(KERNEL, "if (@) mask_scores", "low[m] > begin || high[m] < end", {
        "nothing is masked": "false"}),
    Place(KERNEL, "if (@ &&", "!values_are_finite_", {"hidden values count": "false"}),
    Place(SOFTMAX, "*next.sum * @;", "new_factor", {"a fold forgets a factor": "1.0f"}),
    Place(SCORING, "if (@)\n      signed_scale *=", "params.k_scale.data != nullptr", {
        "k_scale is forgotten": "false"}),
    Place(KERNEL, "static_cast<float>(@),", "token.position - strip", {
        "ALiBi from the next token": "token.position + 1 - strip"}),
    Place(SCORING, "V::set1(@));", "softcap * kLog2E", {"softcap in base e": "softcap"}),
]  # fmt: skip
FAULTS = [name for place in PLACES for name in place.wrong]

JUDGE = """
import ctypes, json, sys, torch
library, faults = sys.argv[1], int(sys.argv[2])
load = torch.ops.load_library
torch.ops.load_library = lambda p: load(library if str(p).endswith("_ops_cpu.so") else p)
from cases import Case, Span, build
from oracle import assert_right, expected
from test_attention import CASES
from wim_ext import ops
assert torch.ops.wim_ext.cpu_isas() == "portable"
torch.set_num_threads(1)
switch = ctypes.c_int.in_dll(ctypes.CDLL(library), "wim_fault")
cases = sorted((c for c in CASES if c.flops < 20_000_000), key=lambda c: c.flops)
rejecting = {number: [] for number in range(faults + 1)}
for case in cases:
    x = build(case)
    for number, names in rejecting.items():
        if len(names) >= 3:
            continue
        switch.value = number
        out, lse = ops.paged_attention(*x.args, **x.options, return_lse=True)
        try:
            assert_right(expected(case), out, lse)
        except AssertionError:
            names.append(case.name)

# An infinite value that only the last of a chunk's rows sees, as no case of the matrix has it.
x = build(Case("infinite", (Span(8, 8),), num_heads=1, num_kv_heads=1, page_size=16))
for value in (torch.inf, -torch.inf, torch.nan):
    x.v_cache[int(x.block_table[0, 0]), 7] = value
    for number, names in rejecting.items():
        switch.value = number
        out = ops.paged_attention(*x.args, **x.options)
        if len(names) < 3 and not out[:7].isfinite().all():
            names.append(str(value))
print(json.dumps(rejecting))
"""


def plant(csrc: Path) -> None:
    """Puts every fault into a copy of the sources, each behind its number."""
    inline = csrc / "cpu" / "inline.h"
    inline.write_text(inline.read_text() + '\nextern "C" int wim_fault;\n')
    (csrc / "cpu" / "fault.cpp").write_text('extern "C" { int wim_fault = 0; }\n')
    for place in PLACES:
        path = csrc / "cpu" / place.file
        source = path.read_text()
        right = place.where.replace("@", place.right)
        assert source.count(right) == 1, f"{place.file} has no single {right!r}"
        choice = place.right
        for name, wrong in place.wrong.items():
            choice = f"(wim_fault == {FAULTS.index(name) + 1} ? ({wrong}) : ({choice}))"
        path.write_text(source.replace(right, place.where.replace("@", choice)))


def build_library(csrc: Path, folder: Path) -> Path:
    """_ops_cpu with the portable kernels alone, as CMakeLists.txt builds it."""
    torch_dir = Path(torch.__file__).parent
    flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-w", f"-I{csrc}"]
    flags += [f"-isystem{torch_dir / 'include'}", "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"]
    sources = [*csrc.glob("torch_*.cpp"), *csrc.glob("plan*.cpp"), *csrc.glob("cpu/*.cpp")]
    other = ("torch_cuda", "attention_avx", "attention_amx")
    sources = [s for s in sources if not s.name.startswith(other)]
    objects = [folder / f"{s.stem}.o" for s in sources]

    def run(*arguments: object) -> None:
        subprocess.run([str(a) for a in ("g++", *arguments)], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(run, *flags, "-c", s, "-o", o)
            for s, o in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    library = folder / "_ops_cpu.so"
    run("-shared", *objects, f"-L{torch_dir / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu",
        "-o", library)  # fmt: skip
    return library


@pytest.fixture(scope="module")
def rejecting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Up to three cases that reject each fault; "" is for none."""
    folder = tmp_path_factory.mktemp("faults")
    csrc = folder / "csrc"
    shutil.copytree(CSRC, csrc)
    plant(csrc)
    library = build_library(csrc, folder)
    done = run_python(JUDGE, str(library), str(len(FAULTS)), timeout=600)
    assert done.returncode == 0, done.stderr
    return dict(zip(["", *FAULTS], json.loads(done.stdout).values(), strict=True))


def test_without_a_fault_nothing_is_rejected(rejecting: dict[str, list[str]]) -> None:
    assert rejecting[""] == []


def test_there_are_a_dozen_faults() -> None:
    assert len(set(FAULTS)) == len(FAULTS) >= 12


@pytest.mark.parametrize("fault", FAULTS)
def test_is_caught(fault: str, rejecting: dict[str, list[str]]) -> None:
    assert len(rejecting[fault]) == 3, f"only {rejecting[fault]} reject it"
