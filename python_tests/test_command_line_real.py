"""The real command over a real, if tiny and random, model; and every command line of its page."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_folder
from test_document_files import pdf
from typer.testing import CliRunner

from wim_ext.answering import Request, answer_on
from wim_ext.cli import app
from wim_ext.console import QuietDisplay
from wim_ext.document_files import read_documents
from wim_ext.interrupt import StopOnInterrupt
from wim_ext.terminal import clean

ROOT = Path(__file__).resolve().parent.parent
TEXT = "Anna lives in Bergen. She repairs clocks. The rain falls every day of the year. " * 4
QUESTION = ("-q", "What is told of Anna?")
SHORT = ("--segment-tokens", "100", "--max-margin-tokens", "6", "--max-answer-tokens", "5")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_folder.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def story(tmp_path: Path) -> str:
    (tmp_path / "story.txt").write_text(TEXT)
    return str(tmp_path / "story.txt")


def answer(story: str, model: str, *args: str) -> Any:
    command = ["answer", story, *QUESTION, "--model", model, "--dtype", "float32", *SHORT, *args]
    return CliRunner().invoke(app, [*command, "--threads", "1"])


def test_counters_add_up_and_nothing_is_read_twice(tiny: str, story: str) -> None:
    done = answer(story, tiny, "--json")
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    stats = result["stats"]
    # The tiny tokenizer is byte-level; its one merge, "ab", is not in the text. One control token
    # and the words in front of the document are counted with it.
    in_front = 1 + len("user\n") + len("Read this text.\n\n")
    assert stats["tokens"]["document"] == len(TEXT) + in_front
    assert stats["segments"] == stats["segments_read"] == len(result["margins"]) == 4
    assert [m["span"][0] for m in result["margins"]] == [
        0,
        *(m["span"][1] for m in result["margins"][:3]),
    ]
    assert result["margins"][-1]["span"][1] == len(TEXT)
    assert stats["total_tokens"] == sum(stats["tokens"].values())


@pytest.mark.parametrize("relevance", ["fused", "separate", "logit", "likelihood"])
@pytest.mark.parametrize("use", ["context+margins", "margins"])
def test_every_mode_runs(tiny: str, story: str, relevance: str, use: str) -> None:
    done = answer(story, tiny, "--relevance", relevance, "--use", use)
    assert done.exit_code == 0, done.output
    assert "float32 on cpu, 1 thread\n" in done.stderr
    assert "of 4 margins relevant" in done.stderr


def test_the_same_run_twice_and_a_seed(tiny: str, story: str) -> None:
    greedy = [answer(story, tiny, "--quiet").stdout for _ in range(2)]
    assert greedy[0] == greedy[1]
    seeded = [answer(story, tiny, "--quiet", "--temperature", "1", "--seed", "3") for _ in range(2)]
    assert seeded[0].stdout == seeded[1].stdout
    assert seeded[0].stdout != greedy[0]


def test_a_stop_answers_from_what_was_read(tiny: str, story: str) -> None:
    stop, out = StopOnInterrupt(), io.StringIO()
    stop.asked = True
    request = Request(
        QUESTION[1], tiny, segment_tokens=100, max_margin_tokens=6, max_answer_tokens=5, threads=1
    )
    result = answer_on(QuietDisplay(out), read_documents([story]), request, stop)
    assert result.stopped_early
    assert result.stats.segments == 4
    assert len(result.margins) <= result.stats.segments_read < 4
    assert out.getvalue() == clean(result.answer) + "\n"


def test_a_document_that_is_too_long_is_refused_before_any_work(tmp_path: Path, story: str) -> None:
    model = tiny_folder.make(tmp_path, context=400)
    done = answer(story, model, "--json")
    assert done.exit_code == 2
    error = json.loads(done.stdout)["error"]
    assert error["type"] == "ContextTooLong"
    assert error["needed"] > error["limit"] == 400
    assert f"the document has {len(TEXT)} tokens in 4 segments" in error["message"]
    assert "the model can attend to 400; take a shorter document" in done.stderr


def test_no_such_model(story: str, tmp_path: Path) -> None:
    done = answer(story, str(tmp_path / "nowhere"))
    assert done.exit_code == 2
    assert done.stderr.endswith(f"error: there is no file or folder {tmp_path}/nowhere\n")


def command_lines() -> list[str]:
    page = (ROOT / "docs" / "command.md").read_text()
    blocks = re.findall(r"^```console\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@pytest.mark.skipif(shutil.which("bash") is None, reason="the lines are for a shell")
def test_every_command_line_of_the_page_runs_as_written(tmp_path: Path) -> None:
    """In a folder that has the documents, with the fake engine under the command."""
    pytest.importorskip("pypdf")
    (tmp_path / "report.pdf").write_bytes(pdf("Anna signed the treaty."))
    for name in ("chapter1.md", "chapter2.md", "notes.md"):
        (tmp_path / name).write_text(TEXT)
    shim = tmp_path / "bin" / "wim"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT}/python_tests/fake_engine.py "$@"\n')
    shim.chmod(0o755)
    (shim.parent / "python").symlink_to(sys.executable)
    path = os.pathsep.join([str(shim.parent), os.environ["PATH"]])
    lines = command_lines()
    assert len(lines) >= 5
    script = "set -e -o pipefail\n" + "\n".join(
        f"echo '# {i}' >&2\n{s}" for i, s in enumerate(lines)
    )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "answer.txt").read_text().startswith("Read ")
