"""What `wim demo` reads and asks: Python's own help texts, which come with every Python."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from wim_ext.answering import Request
from wim_ext.document_files import SourceFile, Sources
from wim_ext.document_formats import DocumentText
from wim_ext.errors import DocumentFileError
from wim_ext.segments import Context

__all__ = ["QUESTION", "TOPICS", "demo_request", "demo_sources"]

# Pages of the language reference, about 3,700 tokens together, in no order that gives the answer
# away. They have hardly changed since Python 3.8.
TOPICS = (
    *("break", "truth", "global", "power", "with", "shifting"),
    *("integers", "return", "lambda", "assert", "nonlocal", "yield"),
)
QUESTION = "What error is raised when 0.0 is raised to a negative power?"


def demo_sources() -> Sources:
    """The pages one after the other, as in a manual; segments end where a page does.

    Raises:
        DocumentFileError: this Python came without its help texts.
    """
    try:
        topics = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise DocumentFileError(
            "this Python came without its help texts (pydoc_data); "
            "ask about a document of yours with: wim answer FILE --question QUESTION"
        ) from error
    text = ""
    files = []
    for name in TOPICS:
        page = DocumentText.of_lines(str(topics[name]).strip() + "\n")
        span = (len(text), len(text) + len(page.text))
        files.append(SourceFile(f"help('{name}')", span, page.unit, page.starts))
        text += page.text + "\n"
    parts = [(file.name, *file.span) for file in files]
    return Sources(Context(text, parts), tuple(files))


def demo_request(**options: Any) -> Request:
    """The question, with settings that suit the built-in model of 135 million parameters."""
    return Request(
        question=QUESTION,
        segment_tokens=400,
        max_margin_tokens=48,
        max_answer_tokens=48,
        relevance="likelihood",
        **options,
    )
