"""Reads the documents that the command line is given, and says where in them a span lies.

Text must be UTF-8, or UTF-16/UTF-32 with a byte-order mark; PDF and HTML need the extra
``wim_ext[documents]``; ``-`` stands for standard input. Line ends become newlines, so spans count
characters of the text as the model sees it.

A path is opened exactly as the caller gave it: nothing here joins a folder with a name, so there
is no folder to break out of.
"""

from __future__ import annotations

import bisect
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from wim_ext.document_formats import (
    MAX_BYTES,
    DocumentText,
    Unit,
    document_text,
    printable,
    refusal,
)
from wim_ext.segments import Context

__all__ = ["Citation", "SourceFile", "Sources", "join_documents", "read_documents"]

STDIN_NAME = "standard input"


@dataclass(frozen=True)
class SourceFile:
    """One document: its name, where its text lies in the joined text, where its units start."""

    name: str
    span: tuple[int, int]
    unit: Unit
    # Offsets within this document's own text, ascending, the first one 0.
    starts: tuple[int, ...]

    def number_at(self, offset: int) -> int:
        """The 1-based line or page that holds the character at `offset` of this document."""
        return bisect.bisect_right(self.starts, offset)


@dataclass(frozen=True)
class Citation:
    """A piece of a document: characters `span` of it, which are its lines or pages first..last."""

    name: str
    span: tuple[int, int]
    unit: Unit
    first: int
    last: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"{self.name}, {self.unit} {self.first}"
        return f"{self.name}, {self.unit}s {self.first}–{self.last}"


@dataclass(frozen=True)
class Sources:
    """What the model reads, and the documents it was made of."""

    context: Context
    files: tuple[SourceFile, ...]

    @property
    def text(self) -> str:
        return self.context.text

    def cite(self, span: tuple[int, int]) -> list[Citation]:
        """The pieces of documents that the characters `span` of `text` cover, in order.

        Separators between documents belong to none of them: a span inside one gives no piece.
        """
        citations = []
        for file in self.files:
            begin, end = max(span[0], file.span[0]), min(span[1], file.span[1])
            if begin >= end:
                continue
            local = (begin - file.span[0], end - file.span[0])
            citations.append(
                Citation(
                    name=file.name,
                    span=local,
                    unit=file.unit,
                    first=file.number_at(local[0]),
                    last=file.number_at(local[1] - 1),
                )
            )
        return citations


def read_documents(
    paths: Sequence[str | os.PathLike[str]], stdin: BinaryIO | None = None
) -> Sources:
    """Reads every path (``-`` is `stdin`, by default the process's own) and joins the texts.

    One document is taken as it is; of several, each gets a title line (`Context.join`), so that the
    model, and a reader of the prompt, see where one ends.

    Raises:
        ValueError: no path, or ``-`` more than once.
        DocumentFileError: a document that cannot be read; the text has its path and the reason.
    """
    if not paths:
        raise ValueError("paths: expected at least one document, found none")
    names = [os.fspath(path) for path in paths]
    if names.count("-") > 1:
        raise ValueError("paths: '-' (standard input) can be given once only")
    documents = [_read_one(name, stdin) for name in names]
    return join_documents([STDIN_NAME if name == "-" else name for name in names], documents)


def join_documents(names: Sequence[str], documents: Sequence[DocumentText]) -> Sources:
    """Joins texts that are there already, as `read_documents` does."""
    texts = [document.text for document in documents]
    # A name could be made to look like text of a document, or act on a terminal: hence printable.
    context = Context.join(list(zip(map(printable, names), texts, strict=True)))
    files = [
        SourceFile(name, (begin, end), document.unit, document.starts)
        for name, document, (_, begin, end) in zip(names, documents, context.parts, strict=True)
    ]
    return Sources(context, tuple(files))


def _read_one(name: str, stdin: BinaryIO | None) -> DocumentText:
    if name == "-":
        return document_text(_read_stdin(stdin or sys.stdin.buffer), STDIN_NAME)
    return document_text(_read_file(name), name)


def _read_stdin(stream: BinaryIO) -> bytes:
    data = stream.read(MAX_BYTES + 1)
    _check_size(STDIN_NAME, len(data))
    return data


def _read_file(name: str) -> bytes:
    descriptor = _open(name)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise refusal(name, "is a directory, not a file")
        if not stat.S_ISREG(status.st_mode):
            raise refusal(
                name, "is a device, pipe or socket, not a file (use - for standard input)"
            )
        _check_size(name, status.st_size)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise refusal(name, f"cannot be read ({error.strerror or error})") from error
    finally:
        os.close(descriptor)
    # Again: the file may have grown meanwhile, and in /proc every size reads as 0.
    _check_size(name, len(data))
    return data


def _open(name: str) -> int:
    if not name:
        raise refusal(name, "the path is empty")
    if "\0" in name:
        raise refusal(name, "the path contains a NUL character")
    # Non-blocking, for opening a FIFO without a writer would wait for ever. What kind of file it
    # is gets asked of the open descriptor, not of the path: nothing can be swapped in between.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        return os.open(name, flags)
    except FileNotFoundError:
        raise refusal(name, "no such file") from None
    except OSError as error:
        raise refusal(name, f"cannot be opened ({error.strerror or error})") from error


def _check_size(name: str, size: int) -> None:
    if size > MAX_BYTES:
        found = f"{size:,} bytes" if size > MAX_BYTES + 1 else f"more than {MAX_BYTES:,} bytes"
        raise refusal(name, f"is too large: {found}, at most {MAX_BYTES >> 20} MB are read")
