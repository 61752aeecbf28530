"""Planted faults: what the parity matrix is worth for the CPU kernels.

One library is built with all faults in it, each behind a number; the cases of the matrix must
reject each, and none without a fault. The algorithm is the same for all vector instruction sets, so
the portable one stands for them; AMX tiles have one of their own, tried where the CPU has them.
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

from wim_ext import ops

CSRC = Path(__file__).resolve().parent.parent / "csrc"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile kernels")


@dataclass(frozen=True)
class Place:
    """An expression of the sources: `where` with @ for `right`; `wrong` by the fault's name."""

    file: str
    where: str
    right: str
    wrong: dict[str, str]
    isa: str = "portable"


KERNEL, SOFTMAX, SCORING = "attention_kernel.h", "softmax.h", "scoring.h"
TILES, COLUMNS, LANES = "tile_kernel.h", "tile_columns.h", "tile_softmax.h"
AVX512 = "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq"
X86 = {"avx2": "-mavx2 -mfma -mf16c", "avx512": AVX512, "avx512_bf16": f"{AVX512} -mavx512bf16"}
X86["amx"] = X86["avx512_bf16"]
HAS_AMX = "amx" in ops.cpu_kernels()[1]
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
    Place(COLUMNS, "high_[row] = @;", "source.high", {
        "tiles drop the last key": "source.high - 1",
        "tiles see a key too many": "source.high + 1"}, "amx"),
    Place(COLUMNS, "low_[row] = @,", "source.low", {
        "tiles drop a window's first key": "source.low + (source.low > 0)"}, "amx"),
    Place(COLUMNS, "fold_.sum + at), @), added", "old_factor", {
        "tiles fold a cell's sum as it is": "V::set1(1.0f)"}, "amx"),
    Place(LANES, "V::mul(V::load(out), @)", "alpha", {
        "tiles do not rescale an output": "V::set1(1.0f)"}, "amx"),
    Place(LANES, "V::mul(V::load(lanes.sum), @)", "alpha", {
        "tiles do not rescale a sum": "V::set1(1.0f)"}, "amx"),
    Place(LANES, "V::sub(V::load(lanes.position), V::set1(static_cast<float>(@)))", "key", {
        "tiles take ALiBi from the next key": "key + 1"}, "amx"),
    Place(LANES, "if (@) BlockSoftmax::mask", "sees_part", {"tiles mask nothing": "false"}, "amx"),
    Place(TILES, "const bool fresh = @;", "columns_.visit(column)", {
        "tiles go on with another cell's output": "(columns_.visit(column), false)"}, "amx"),
    Place(TILES, "if (@ && sees_part)", "!values_are_finite_", {
        "tiles let hidden values count": "false"}, "amx"),
    Place(TILES, "key + kGroupKeys <= @)", "columns_.all_to()", {
        "tiles read values behind the last key": "columns_.all_to() + kGroupKeys"}, "amx"),
    Place(TILES, "find_slots<BFloat16>(params_.k_cache, pages_, @,", "kv_head_", {
        "tiles read another head's keys": "0"}, "amx"),
]  # fmt: skip
ISA = {name: place.isa for place in PLACES for name in place.wrong}
FAULTS = list(ISA)

JUDGE = """
import ctypes, json, sys, torch
library, isa, faults = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
load = torch.ops.load_library
torch.ops.load_library = lambda p: load(library if str(p).endswith("_ops_cpu.so") else p)
from cases import Case, Span, build
from oracle import assert_right, expected
from test_attention import CASES
from wim_ext import ops
assert ops.cpu_kernels()[2] == isa
torch.set_num_threads(1)
switch = ctypes.c_int.in_dll(ctypes.CDLL(library), "wim_fault")
cases = [c for c in CASES if c.dtype is torch.bfloat16 or isa != "amx"]
most = 20_000_000 if isa == "portable" else 2_000_000_000
cases = sorted((c for c in cases if c.flops < most), key=lambda c: c.flops)
rejecting = {number: [] for number in (0, *faults)}
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
x = build(Case("infinite", (Span(8, 8),), torch.bfloat16, num_heads=1, num_kv_heads=1))
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
    """_ops_cpu as CMakeLists.txt builds it; without AMX with the portable kernels alone."""
    torch_dir = Path(torch.__file__).parent
    flags = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-w", f"-I{csrc}"]
    flags += [f"-isystem{torch_dir / 'include'}", "-DTORCH_TARGET_VERSION=0x020a000000000000ULL"]
    sources = [*csrc.glob("torch_*.cpp"), *csrc.glob("plan*.cpp"), *csrc.glob("cpu/*.cpp")]
    other = ("torch_cuda",) if HAS_AMX else ("torch_cuda", "attention_avx", "attention_amx")
    sources = [s for s in sources if not s.name.startswith(other)]
    if HAS_AMX:
        flags.append("-DWIM_X86")
    objects = [folder / f"{s.stem}.o" for s in sources]

    def run(*arguments: object) -> None:
        subprocess.run([str(a) for a in ("g++", *arguments)], check=True)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(run, *flags, *isa_flags(s), "-c", s, "-o", o)
            for s, o in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    library = folder / "_ops_cpu.so"
    run("-shared", *objects, f"-L{torch_dir / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu",
        "-o", library)  # fmt: skip
    return library


def isa_flags(source: Path) -> list[str]:
    return X86.get(source.stem.removeprefix("attention_"), "").split()


@pytest.fixture(scope="module")
def rejecting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Up to three cases that reject each fault; "" is for no fault."""
    folder = tmp_path_factory.mktemp("faults")
    csrc = folder / "csrc"
    shutil.copytree(CSRC, csrc)
    plant(csrc)
    library = build_library(csrc, folder)
    result = {}
    for isa in ("portable", "amx") if HAS_AMX else ("portable",):
        numbers = [i + 1 for i, fault in enumerate(FAULTS) if ISA[fault] == isa]
        done = run_python(
            JUDGE, str(library), isa, json.dumps(numbers), env={"WIM_CPU_ISA": isa}, timeout=600
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        result |= {FAULTS[number - 1]: found[str(number)] for number in numbers}
        result[""] = result.get("", []) + found["0"]
    return result


def test_without_a_fault_nothing_is_rejected(rejecting: dict[str, list[str]]) -> None:
    assert rejecting[""] == []


@pytest.mark.parametrize("isa", ["portable", "amx"])
def test_there_are_a_dozen_faults(isa: str) -> None:
    assert len([name for name in FAULTS if ISA[name] == isa]) >= 12


@pytest.mark.parametrize("fault", FAULTS)
def test_is_caught(fault: str, rejecting: dict[str, list[str]]) -> None:
    if ISA[fault] == "amx" and not HAS_AMX:
        pytest.skip("this CPU has no AMX")
    assert len(rejecting[fault]) >= 2, f"only {rejecting[fault]} reject it"
