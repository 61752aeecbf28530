"""The micro-benchmarks run, check what they time, and say what they were measured on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

QUICK = ("--preset", "quick", "--seconds", "0", "--threads", "1")
PEAKS = {"bfloat16": 1.0, "float32": 1.0, "read": 1.0}
BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import attention

    shape = attention.Shape
    every_kind = [
        shape(4, 2, 32, 8, 100),
        shape(4, 2, 32, 8, 0),
        shape(4, 2, 32, 1, 100),
        shape(4, 2, 32, 0, 70, 3),
        shape(4, 2, 32, 70, 64, 3),
    ]
    monkeypatch.setitem(attention.PRESETS, "quick", every_kind)
    monkeypatch.setattr(attention, "measure_peaks", lambda: PEAKS)
    return attention


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *arguments])
    before = torch.get_num_threads()
    try:
        module.main()
    finally:
        torch.set_num_threads(before)


def test_attention(
    attention: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "table.json"
    run(attention, monkeypatch, *QUICK, "--json", str(path))
    report = json.loads(path.read_text())
    assert [row["dtype"] for row in report["rows"]] == ["bfloat16"] * 5 + ["float32"] * 5
    chunk, first, single, branches, both = (set(row["seconds"]) for row in report["rows"][:5])
    assert chunk == first == {"ours", "ours_nhd", "sdpa", "sdpa_composed", "sdpa_gathered"}
    assert single == {"ours", "ours_nhd", "sdpa", "sdpa_folded", "sdpa_gathered"}
    assert branches == {"ours", "ours_nhd", "ours_separate"}
    assert both == branches | {"chunk_alone"}
    assert report["machine"]["model"] in capsys.readouterr().out
    assert report["machine"]["kernels"]["cpu"]["in_use"]
    assert (report["versions"]["torch"], report["threads"]) == (torch.__version__, 1)


def test_attention_that_is_wrong_ends_the_run(
    attention: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = attention.forms.ops.paged_attention
    monkeypatch.setattr(attention.forms.ops, "paged_attention", lambda *a, **o: right(*a, **o) + 1)
    with pytest.raises(SystemExit, match=r"4/2/32, 8 after 100, torch.bfloat16: ours and sdpa"):
        run(attention, monkeypatch, *QUICK)


def test_cache_ops(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_cache_ops

    monkeypatch.setattr(bench_cache_ops, "REPEATS", 2)
    monkeypatch.setattr(bench_cache_ops, "TOKENS", 4096)
    run(bench_cache_ops, monkeypatch, "--json", str(tmp_path / "table.json"))
    report = json.loads((tmp_path / "table.json").read_text())
    assert report["versions"]["torch"] == torch.__version__
    assert report["machine"]["model"] in capsys.readouterr().out
    assert report["microseconds"]["page 64, 64 other branches"]["fork"] > 0
