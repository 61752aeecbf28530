"""Reads the documents that the command line is given, and says where in them a span lies.

Formats, by content first and by the name's ending second:

- PDF (``%PDF-`` at the start, or ``.pdf``), through pypdf;
- HTML (``.html``, ``.htm``, ``.xhtml``), through Beautiful Soup;
- everything else is text and must be UTF-8, or UTF-16/UTF-32 with a byte-order mark.

PDF and HTML need the extra ``wim_ext[documents]``. ``-`` stands for standard input. Line ends become
``\\n``, so spans count characters of the text as the model sees it.

A path is opened exactly as the caller gave it: nothing here joins a folder with a name, so there is no
folder to break out of.
"""

from __future__ import annotations

import bisect
import codecs
import importlib
import os
import re
import stat
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import BinaryIO, Literal

from wim_ext.errors import DocumentFileError

__all__ = ["MAX_BYTES", "Citation", "SourceFile", "Sources", "read_documents"]

MAX_BYTES = 64 * 1024 * 1024
STDIN_NAME = "standard input"

Unit = Literal["line", "page"]

# Longest first: the UTF-32 little-endian mark begins with the UTF-16 one.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)

_HTML_ENDINGS = (".html", ".htm", ".xhtml")
_HTML_DROPPED = ("script", "style", "template", "noscript", "svg", "head")
_HTML_BLOCKS = (
    "address article aside blockquote br caption dd div dl dt figcaption figure footer form h1 h2 h3 h4 h5 h6 "
    "header hr legend li main nav ol option p pre section summary table tr ul"
).split()


@dataclass(frozen=True)
class SourceFile:
    """One document: its name, where its text lies in the joined text, and where its lines or pages start."""

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
    """A piece of one document: characters ``span`` of it, which are its lines or pages ``first``..``last``."""

    name: str
    span: tuple[int, int]
    unit: Unit
    first: int
    last: int
    percent: int

    def __str__(self) -> str:
        if self.first == self.last:
            return f"{self.name}, {self.unit} {self.first}"
        return f"{self.name}, {self.unit}s {self.first}–{self.last}"


@dataclass(frozen=True)
class Sources:
    """The text the model reads, and the documents it was made of."""

    text: str
    files: tuple[SourceFile, ...]

    def cite(self, span: tuple[int, int]) -> list[Citation]:
        """The pieces of documents that the characters ``span`` of `text` cover, in order.

        Separators between documents belong to none of them, so a span inside one gives an empty list.
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
                    percent=round(100 * local[1] / (file.span[1] - file.span[0])),
                )
            )
        return citations


def read_documents(paths: Sequence[str | os.PathLike[str]], stdin: BinaryIO | None = None) -> Sources:
    """Reads every path (``-`` is `stdin`, by default the process's own) and joins the texts.

    One document is taken as it is. Of several, each is preceded by a line ``===== name =====``, so that
    the model and a reader of the prompt see where one ends.

    Raises:
        ValueError: no path, or ``-`` more than once.
        DocumentFileError: a document that cannot be read, with its path and the reason.
    """
    if not paths:
        raise ValueError("paths: expected at least one document, found none")
    names = [os.fspath(path) for path in paths]
    if names.count("-") > 1:
        raise ValueError("paths: '-' (standard input) can be given once only")
    read = [_read_one(name, stdin) for name in names]
    pieces: list[str] = []
    files = []
    offset = 0
    for name, (text, unit, starts) in zip(names, read, strict=True):
        shown = STDIN_NAME if name == "-" else name
        if len(read) > 1:
            title = " ".join(_printable(shown).split())
            header = f"{'' if not pieces else chr(10) * 2}===== {title} =====\n\n"
            pieces.append(header)
            offset += len(header)
        pieces.append(text)
        files.append(SourceFile(shown, (offset, offset + len(text)), unit, starts))
        offset += len(text)
    return Sources("".join(pieces), tuple(files))


def _read_one(name: str, stdin: BinaryIO | None) -> tuple[str, Unit, tuple[int, ...]]:
    data = _read_stdin(stdin or sys.stdin.buffer) if name == "-" else _read_file(name)
    ending = os.path.splitext(name)[1].lower()
    shown = STDIN_NAME if name == "-" else name
    if data.startswith(b"%PDF-") or ending == ".pdf":
        pages = _pdf_pages(data, shown)
        text, starts = _join_pages(pages)
        if not text.strip():
            raise DocumentFileError(shown, "no text in this PDF (scanned pages need OCR first)")
        return text, "page", starts
    text = _html_text(data, shown) if ending in _HTML_ENDINGS else _decode(data, shown)
    if not text.strip():
        raise DocumentFileError(shown, "the document is empty")
    return text, "line", _line_starts(text)


def _read_file(name: str) -> bytes:
    if not name:
        raise DocumentFileError(name, "the path is empty")
    if "\0" in name:
        raise DocumentFileError(name, "the path contains a NUL character")
    try:
        # O_NONBLOCK: opening a FIFO without a writer would wait for ever. The kind is asked of the open
        # descriptor, not of the path, so nothing can be swapped in between.
        descriptor = os.open(name, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise DocumentFileError(name, "no such file") from None
    except IsADirectoryError:
        raise DocumentFileError(name, "is a directory, not a file") from None
    except OSError as error:
        raise DocumentFileError(name, f"cannot be opened ({error.strerror or error})") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise DocumentFileError(name, "is a directory, not a file")
        if not stat.S_ISREG(status.st_mode):
            raise DocumentFileError(name, "is a device, pipe or socket, not a file (use - for standard input)")
        if status.st_size > MAX_BYTES:
            raise DocumentFileError(name, _too_large(f"{status.st_size:,} bytes"))
        try:
            data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise DocumentFileError(name, f"cannot be read ({error.strerror or error})") from error
    # A file that grew meanwhile, or one of /proc whose size reads as 0.
    if len(data) > MAX_BYTES:
        raise DocumentFileError(name, _too_large(f"more than {MAX_BYTES:,} bytes"))
    return data


def _read_stdin(stream: BinaryIO) -> bytes:
    data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise DocumentFileError(STDIN_NAME, _too_large(f"more than {MAX_BYTES:,} bytes"))
    return data


def _too_large(found: str) -> str:
    return f"is too large: {found}, at most {MAX_BYTES:,} ({MAX_BYTES >> 20} MB) are read"


def _decode(data: bytes, name: str) -> str:
    encoding = next((e for mark, e in _BYTE_ORDER_MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentFileError(
            name,
            f"is not {encoding.removesuffix('-sig').upper()} text (byte {error.start:,} is wrong); convert it first, "
            "for example with iconv -f latin1 -t utf-8",
        ) from None
    if "\0" in text:
        raise DocumentFileError(name, f"is not text: NUL at character {text.index(chr(0)):,}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _line_starts(text: str) -> tuple[int, ...]:
    starts = [0]
    position = text.find("\n")
    # A newline at the very end closes the last line, it does not open another.
    while 0 <= position < len(text) - 1:
        starts.append(position + 1)
        position = text.find("\n", position + 1)
    return tuple(starts)


def _extra(module: str, name: str, kind: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DocumentFileError(
            name, f"reading {kind} needs the package {module}; install it with: pip install 'wim_ext[documents]'"
        ) from error


def _pdf_pages(data: bytes, name: str) -> list[str]:
    pypdf = _extra("pypdf", name, "PDF")
    import io

    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise DocumentFileError(name, "the PDF is encrypted; save a copy without a password")
        return _limited(((page.extract_text() or "") for page in reader.pages), name)
    except DocumentFileError:
        raise
    # A broken PDF can fail anywhere in the parser: KeyError, RecursionError, zlib.error, ...
    except Exception as error:
        raise DocumentFileError(name, f"is not a readable PDF ({type(error).__name__}: {error})") from error


def _limited(pages: Iterable[str], name: str) -> list[str]:
    """Collects the pages, but not without end: a small file can unpack to any size."""
    kept: list[str] = []
    total = 0
    for page in pages:
        total += len(page)
        if total > MAX_BYTES:
            raise DocumentFileError(name, _too_large(f"more than {MAX_BYTES:,} characters of text"))
        kept.append(_without_surrogates(page.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")))
    return kept


def _join_pages(pages: Sequence[str]) -> tuple[str, tuple[int, ...]]:
    starts = []
    offset = 0
    for page in pages:
        starts.append(offset)
        offset += len(page) + 2
    return "\n\n".join(pages), tuple(starts)


def _html_text(data: bytes, name: str) -> str:
    bs4 = _extra("bs4", name, "HTML")
    # Beautiful Soup finds the encoding itself: byte-order mark, then <meta charset>, then UTF-8.
    soup = bs4.BeautifulSoup(data, "html.parser")
    for tag in soup.find_all(_HTML_DROPPED):
        tag.decompose()
    verbatim = {id(string) for pre in soup.find_all("pre") for string in pre.descendants}
    for string in soup.find_all(string=True):
        if type(string) is not bs4.NavigableString:
            string.extract()  # comments, doctypes, processing instructions
        elif id(string) not in verbatim:
            string.replace_with(re.sub(r"\s+", " ", string))
    for tag in soup.find_all(_HTML_BLOCKS):
        tag.insert_before("\n")
        tag.insert_after("\n")
    text = soup.get_text().replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    text = re.sub(r"[ \t]*\n[ \t]*\n\s*\n", "\n\n", re.sub(r"(?m)[ \t]+$", "", text))
    return _without_surrogates(text.strip() + "\n")


def _without_surrogates(text: str) -> str:
    """Half of a surrogate pair cannot be encoded again, neither for the tokenizer nor for the screen."""
    return re.sub(r"[\ud800-\udfff]", "�", text)


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in text)
