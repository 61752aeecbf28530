"""`wim demo`: the text that every Python has, and a real run whose margins and answer are right."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from fake_engine import FakeEngine
from typer.testing import CliRunner

from wim_ext import answering
from wim_ext.answering import Request
from wim_ext.cli import app
from wim_ext.demo import QUESTION, TOPICS, demo_request, demo_sources


def test_the_text_holds_the_answer_in_one_page() -> None:
    sources = demo_sources()
    at = sources.text.index('Raising "0.0" to a negative power results in a "ZeroDivisionError"')
    assert [c.name for c in sources.cite((at, at + 10))] == ["help('power')"]
    assert sources.text.count("ZeroDivisionError") == 1
    assert 10_000 < len(sources.text) < 20_000


def test_pages_are_cited_by_their_own_lines() -> None:
    from pydoc_data.topics import topics

    sources = demo_sources()
    assert [file.name for file in sources.files] == [f"help('{name}')" for name in TOPICS]
    for name, file in zip(TOPICS, sources.files, strict=True):
        assert sources.text[slice(*file.span)].strip() == str(topics[name]).strip()
    (citation,) = sources.cite(sources.files[3].span)
    assert citation.first == 1
    assert citation.last == len(str(topics["power"]).strip().splitlines())


def test_the_request_and_its_options() -> None:
    request = demo_request(dtype="float32", threads=2)
    assert request.question == QUESTION
    assert (request.model, request.dtype, request.threads) == (None, "float32", 2)
    assert request.temperature == 0.0


def test_a_python_without_help_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert done.stderr.startswith(
        "error: this Python came without its help texts (pydoc_data); ask about a document"
    )


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(segment_words=200)
    monkeypatch.setattr(answering, "open_engine", lambda request, note: engine)
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 0
    assert done.stderr.splitlines()[:2] == [
        "Text: 12 pages of Python's language reference, from help()",
        f"Question: {QUESTION}",
    ]
    assert engine.asked == [(demo_sources().text, QUESTION)]
    assert "Question" not in CliRunner().invoke(app, ["demo", "--quiet"]).stderr
    assert json.loads(CliRunner().invoke(app, ["demo", "--json"]).stdout)["request"]["use"]


@pytest.mark.slow
def test_the_demo_is_visibly_right(smollm2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model: the page that answers is kept, its margin and the answer name the error."""
    real = answering.open_engine

    def open_engine(request: Request, note: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr("wim_ext.loading.load", lambda *args, **options: smollm2)
            return real(request, note)

    monkeypatch.setattr(answering, "open_engine", open_engine)
    done = CliRunner().invoke(app, ["demo", "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert "ZeroDivisionError" in result["answer"]
    (kept,) = [margin for margin in result["margins"] if margin["relevant"]]
    assert "ZeroDivisionError" in kept["text"]
    assert [source["document"] for source in kept["sources"]] == ["help('power')"]
