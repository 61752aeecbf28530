"""The error bounds that the comments of the kernels' exp2 state, against double precision."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from wim_ext import ops

CSRC = Path(__file__).resolve().parent.parent / "csrc"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to compile a program")

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
# header, function of a vector, vector, flags, relative error, where results are flushed to 0
KINDS = {
    "portable": ("vec_portable.h", "exp2<V>", "Portable", ["-O2"], 2e-7, -126),
    "avx2": ("vec_avx2.h", "exp2<V>", "Avx2", AVX2, 2e-7, -126),
    "avx512": ("vec_avx512.h", "exp2<V>", "Avx512", AVX512, 2e-7, -126),
    "avx512_bf16": (
        "shell_pairs.h",
        "PairShell::exp2",
        "Avx512",
        [*AVX512, "-mavx512bf16"],
        3e-6,
        -126,
    ),
}
PROGRAM = """
#include <cmath>
#include <cstdio>
#include <limits>
#include "cpu/math.h"
#include "cpu/HEADER"
using namespace wim::cpu;
using V = VECTOR;
static float at(float x) {
  alignas(64) float lanes[V::kLanes];
  V::store(lanes, FUNCTION(V::set1(x)));
  return lanes[V::kLanes - 1];
}
int main() {
  double worst = 0;
  for (double x = SMALLEST + 1; x <= 20; x += 1.0 / 4099) {
    const float given = static_cast<float>(x);
    worst = std::fmax(worst, std::fabs(at(given) / std::exp2(static_cast<double>(given)) - 1));
  }
  const float infinity = std::numeric_limits<float>::infinity();
  std::printf("%.9g %.9g %.9g %.9g %.9g", worst, at(0.0f), at(-200.0f), at(-infinity), at(NAN));
}
"""


@pytest.mark.parametrize("kind", KINDS)
def test_error_bound(kind: str, tmp_path: Path) -> None:
    if kind not in ops.cpu_kernels()[1]:
        pytest.skip(f"this CPU has no {kind}")
    header, function, vector, flags, bound, smallest = KINDS[kind]
    text = PROGRAM.replace("HEADER", header).replace("FUNCTION", function)
    text = text.replace("VECTOR", vector).replace("SMALLEST", str(smallest))
    (tmp_path / "exp2.cpp").write_text(text)
    program = str(tmp_path / "exp2")
    options = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", *flags, f"-I{CSRC}"]
    subprocess.run(["g++", *options, str(tmp_path / "exp2.cpp"), "-o", program], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    worst, zero, tiny, least, nan = map(float, printed.split())
    assert worst < bound
    assert abs(zero - 1) < bound
    assert tiny == least == 0
    assert nan != nan
