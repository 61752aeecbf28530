"""The bytes of one document become its text: PDF, HTML, or encoded text.

PDF goes through pypdf and HTML through Beautiful Soup, the packages of the extra
``wim_ext[documents]``; they are imported when a document needs them.
"""

from __future__ import annotations

import codecs
import importlib
import io
import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

from wim_ext.errors import DocumentFileError

__all__ = ["MAX_BYTES", "DocumentText", "Unit", "document_text", "printable", "refusal"]

MAX_BYTES = 64 * 1024 * 1024

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
_HTML_BLOCKS = re.compile(
    r"address|article|aside|blockquote|br|caption|d[dlt]|div|figcaption|figure|footer|form|h[1-6r]"
    r"|header|legend|li|main|nav|[ou]l|option|p|pre|section|summary|table|tr"
)


@dataclass(frozen=True)
class DocumentText:
    """A document's text, and the offsets at which its lines or pages start (ascending, from 0)."""

    text: str
    unit: Unit
    starts: tuple[int, ...]

    @classmethod
    def of_lines(cls, text: str) -> DocumentText:
        """Of a text that is there already."""
        return cls(text, "line", _line_starts(text))


def document_text(data: bytes, name: str) -> DocumentText:
    """The text of a document called `name`: its first bytes decide the format, then its ending.

    Raises:
        DocumentFileError: not readable as its format, no text in it, or its package is missing.
    """
    ending = os.path.splitext(name)[1].lower()
    if data.startswith(b"%PDF-") or ending == ".pdf":
        document = _join_pages(_pdf_pages(data, name))
        if not document.text.strip():
            raise refusal(name, "no text in this PDF (scanned pages need OCR first)")
        return document
    text = _html_text(data, name) if ending in _HTML_ENDINGS else _decode(data, name)
    if not text.strip():
        raise refusal(name, "the document is empty")
    return DocumentText.of_lines(text)


def refusal(name: str, reason: str) -> DocumentFileError:
    """The error that refuses the document called `name`."""
    return DocumentFileError(f"{printable(name) or repr(name)}: {reason}")


def printable(text: str) -> str:
    """A name fit for a message or a prompt: nothing that moves a cursor or starts a line."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _decode(data: bytes, name: str) -> str:
    encoding = next((e for mark, e in _BYTE_ORDER_MARKS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        found = encoding.removesuffix("-sig").upper()
        raise refusal(
            name,
            f"is not {found} text (byte {error.start:,} is wrong); convert it first, "
            "for example with iconv -f latin1 -t utf-8",
        ) from None
    if "\0" in text:
        raise refusal(name, f"is not text: NUL at character {text.index(chr(0)):,}")
    return _newlines(text)


def _newlines(text: str) -> str:
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
        raise refusal(
            name,
            f"reading {kind} needs the package {module}; "
            "install it with: pip install 'wim_ext[documents]'",
        ) from error


def _pdf_pages(data: bytes, name: str) -> list[str]:
    pypdf = _extra("pypdf", name, "PDF")
    # It logs each oddity of a file that it repairs; what it cannot read it raises as well.
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    try:
        reader = pypdf.PdfReader(io.BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise refusal(name, "the PDF is encrypted; save a copy without a password")
        return _limited(((page.extract_text() or "") for page in reader.pages), name)
    except DocumentFileError:
        raise
    # A broken PDF can fail anywhere in the parser: KeyError, RecursionError, zlib.error, ...
    except Exception as error:
        raise refusal(name, f"is not a readable PDF ({type(error).__name__}: {error})") from error


def _limited(pages: Iterable[str], name: str) -> list[str]:
    """Collects the pages, but not without end: a small file can unpack to any size."""
    kept: list[str] = []
    total = 0
    for page in pages:
        total += len(page)
        if total > MAX_BYTES:
            raise refusal(name, f"is too large: more than {MAX_BYTES:,} characters of text")
        kept.append(_clean(page))
    return kept


def _join_pages(pages: Sequence[str]) -> DocumentText:
    starts = []
    offset = 0
    for page in pages:
        starts.append(offset)
        offset += len(page) + 2
    return DocumentText("\n\n".join(pages), "page", tuple(starts))


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
    for tag in soup.find_all(lambda tag: _HTML_BLOCKS.fullmatch(tag.name) is not None):
        tag.insert_before("\n")
        tag.insert_after("\n")
    # What is left of the markup's own layout: blanks around line ends, runs of empty lines.
    text = re.sub(r"(?m)[ \t]+$|^ (?=\S)", "", _clean(soup.get_text()))
    return re.sub(r"\n\s*\n", "\n\n", text).strip() + "\n"


def _clean(text: str) -> str:
    """Without NULs, and without halves of surrogate pairs: those cannot be encoded again."""
    return _newlines(
        re.sub(r"[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text.replace("\0", ""))
    )
