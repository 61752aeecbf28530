"""The end-to-end benchmark on a tiny model: same tokens on all sides, table and JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest
import tiny_folder

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def benchmarks_importable() -> None:
    sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder.make(tmp_path_factory.mktemp("tiny"))


def settings(model: str, **changes: object) -> argparse.Namespace:
    values = {
        "model": model,
        "dtype": "float32",
        "threads": 1,
        "question": "What is told of Anna?",
        "segment_tokens": 100,
        "max_margin_tokens": 12,
        "max_answer_tokens": 10,
    }
    return argparse.Namespace(**{**values, **changes})


DOCUMENT = "Anna lives in Bergen. She repairs clocks. The rain falls every day of the year. " * 4


def test_sides_agree(tiny: str) -> None:
    import wim_sides

    runs = {side: wim_sides.measure(side, DOCUMENT, settings(tiny)) for side in wim_sides.SIDES}
    ours, plain, theirs = runs.values()
    assert ours["margins"] == theirs["margins"]
    assert len(ours["margins"]) == 4
    assert ours["answer"] == theirs["answer"]
    assert ours["tokens"] == theirs["tokens"]
    assert plain["margins"] == []
    assert plain["tokens"]["document"] == ours["tokens"]["document"]
    for run in runs.values():
        assert 0 < sum(run["seconds"].values()) <= run["wall_seconds"] * 1.01
        assert run["memory_bytes"]["peak"] >= run["memory_bytes"]["before"] * 0.9 > 0


def test_table_json_and_exit(
    tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wim_end_to_end
    import wim_sides

    taken: list[str] = []

    def in_process(document: str, arguments: argparse.Namespace) -> dict[str, list[dict]]:
        taken.append(document)
        return {
            side: [wim_sides.measure(side, document, arguments)] * 2 for side in wim_sides.SIDES
        }

    monkeypatch.setattr(wim_end_to_end, "run_sides", in_process)
    output = tmp_path / "out" / "result.json"
    command = f"--model {tiny} --threads 1 --tokens 150 --segment-tokens 100 --output {output}"
    limits = "--max-margin-tokens 8 --max-answer-tokens 8"
    wim_end_to_end.main([*command.split(), *limits.split()])
    assert 100 < len(taken[0]) <= 300
    shown = capsys.readouterr().out
    assert (
        "| phase | wim_ext: tokens | s | wim_ext plain: tokens | s | transformers: tokens | s |"
        in shown
    )
    assert "| **all, wall clock** |" in shown
    assert "| CPU time of all threads |" in shown
    report = json.loads(output.read_text())
    assert report["same_as_transformers"] == {"margins": True, "answer": True, "tokens": True}
    assert set(report["sides"]) == set(wim_sides.SIDES)
    assert report["machine"]["kernels"]["cpu"]["in_use"]
    assert str(tmp_path) not in json.dumps({**report, "settings": None})


def test_a_run_has_its_own_process(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import wim_end_to_end

    monkeypatch.setattr(wim_end_to_end, "SIDES", ("transformers",))
    runs = wim_end_to_end.run_sides(DOCUMENT, settings(tiny, repeats=1))
    assert runs["transformers"][0]["tokens"]["document"] > 300
    assert wim_end_to_end.summary(runs["transformers"])["peak_memory_bytes"] > 50e6


def test_runs_that_differ_are_refused() -> None:
    import wim_end_to_end

    runs = [{"side": "x", "tokens": {}, "margins": [], "answer": answer} for answer in ("a", "b")]
    with pytest.raises(SystemExit, match="x: greedy runs differ from each other"):
        wim_end_to_end.summary(runs)


def test_a_document_that_is_too_short(tiny: str, tmp_path: Path) -> None:
    import wim_end_to_end

    (tmp_path / "short.txt").write_text("short")
    command = f"--model {tiny} --document {tmp_path}/short.txt --tokens 150 --threads 1"
    with pytest.raises(SystemExit, match="--tokens 150: the document has only 5"):
        wim_end_to_end.main(command.split())
