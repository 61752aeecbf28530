"""What `wim demo` reads and asks: Python's own help texts, which come with every Python."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from wim_ext.answering import Request
from wim_ext.document_files import Sources, join_documents
from wim_ext.document_formats import DocumentText

__all__ = ["QUESTION", "TOPICS", "demo_request", "demo_sources"]

# Topics that every supported Python has, about 4,000 tokens in all. One of them answers.
TOPICS = ("assert", "lambda", "with", "raise", "booleans", "global")
QUESTION = "What does the with statement do?"


def demo_sources() -> Sources:
    """The help texts as documents called ``help(topic)``."""
    topics = import_module("pydoc_data.topics").topics
    documents = [DocumentText.of_lines(str(topics[name])) for name in TOPICS]
    return join_documents([f"help('{name}')" for name in TOPICS], documents)


def demo_request(**options: Any) -> Request:
    """The question, with settings that suit the built-in model of 135 million parameters."""
    return Request(
        question=QUESTION,
        segment_tokens=512,
        max_margin_tokens=48,
        max_answer_tokens=64,
        relevance="likelihood",
        **options,
    )
