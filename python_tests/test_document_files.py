"""Documents from files and standard input: formats, limits, citations, and every refusal."""

from __future__ import annotations

import builtins
import inspect
import io
import os
import socket
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wim_ext import document_files, document_formats
from wim_ext.document_files import Citation, Sources, read_documents
from wim_ext.errors import DocumentFileError


def write(path: Path, data: bytes | str) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def refusal(path: str, stdin: bytes = b"") -> str:
    with pytest.raises(DocumentFileError) as error:
        read_documents([path], io.BytesIO(stdin))
    return str(error.value)


def test_one_document_is_taken_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.md", "# Title\n\nBody with ünïcode 文.\n")
    sources = read_documents([path])
    assert sources.text == "# Title\n\nBody with ünïcode 文.\n"
    assert sources.files[0].name == path
    assert sources.files[0].span == (0, len(sources.text))
    assert sources.files[0].starts == (0, 8, 9)


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "x")
    assert read_documents([tmp_path / "a.txt"]).text == "x"


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_byte_order_mark_decides_and_is_dropped(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path / "a.txt", "żółw 1\n".encode(encoding))
    assert read_documents([path]).text == "żółw 1\n"


def test_big_endian_marks(tmp_path: Path) -> None:
    utf16 = write(tmp_path / "a", b"\xfe\xff" + "ab".encode("utf-16-be"))
    utf32 = write(tmp_path / "b", b"\x00\x00\xfe\xff" + "ab".encode("utf-32-be"))
    assert read_documents([utf16]).text == "ab"
    assert read_documents([utf32]).text == "ab"


def test_line_ends_become_newlines(tmp_path: Path) -> None:
    sources = read_documents([write(tmp_path / "a.txt", "one\r\ntwo\rthree\n")])
    assert sources.text == "one\ntwo\nthree\n"
    assert sources.files[0].starts == (0, 4, 8)


def test_text_without_a_final_newline(tmp_path: Path) -> None:
    assert read_documents([write(tmp_path / "a", "one\ntwo")]).files[0].starts == (0, 4)


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = read_documents(["-"], io.BytesIO(b"piped text"))
    assert (sources.text, sources.files[0].name) == ("piped text", "standard input")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the process's own")))
    assert read_documents(["-"]).text == "the process's own"


def test_several_documents_are_joined_visibly(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "alpha\n"), write(tmp_path / "b.txt", "beta\ngamma\n")
    sources = read_documents([a, b])
    assert sources.text == f"Document: {a}\n\nalpha\n\n\nDocument: {b}\n\nbeta\ngamma\n\n\n"
    for file, text in zip(sources.files, ("alpha\n", "beta\ngamma\n"), strict=True):
        assert sources.text[slice(*file.span)] == text


def test_a_name_cannot_forge_a_separator(tmp_path: Path) -> None:
    evil = write(tmp_path / "a\n\nDocument: b\n\x1b[31m.txt", "alpha")
    sources = read_documents([evil, write(tmp_path / "c.txt", "x")])
    header = sources.text[: sources.files[0].span[0]]
    assert header.count("\n") == 2
    assert "\x1b" not in header


def test_citation_of_lines_across_documents(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "one\ntwo\nthree\n"), write(tmp_path / "b.txt", "four\nfive\n")
    sources = read_documents([a, b])
    begin = sources.text.index("wo\nthree")
    end = sources.text.index("four") + 4
    assert sources.cite((begin, end)) == [
        Citation(a, (5, 14), "line", 2, 3),
        Citation(b, (0, 4), "line", 1, 1),
    ]
    assert [str(c) for c in sources.cite((begin, end))] == [f"{a}, lines 2–3", f"{b}, line 1"]


def test_a_span_inside_a_separator_belongs_to_no_document(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a.txt", "one"), write(tmp_path / "b.txt", "two")
    sources = read_documents([a, b])
    assert sources.cite((sources.files[0].span[1], sources.files[1].span[0])) == []
    assert sources.cite((5, 5)) == []


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("ab\n", min_size=1, max_size=30).filter(str.strip), min_size=1, max_size=3),
    st.data(),
)
def test_citations_point_at_the_cited_characters(texts: list[str], data: st.DataObject) -> None:
    def one(name: str, _stdin: object) -> document_formats.DocumentText:
        text = texts[int(name)]
        return document_formats.DocumentText.of_lines(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_files, "_read_one", one)
        sources: Sources = read_documents([str(i) for i in range(len(texts))])
    begin = data.draw(st.integers(0, len(sources.text)))
    end = data.draw(st.integers(begin, len(sources.text)))
    for citation in sources.cite((begin, end)):
        text = texts[int(citation.name)]
        lo, hi = citation.span
        assert 0 <= lo < hi <= len(text)
        assert citation.first == text.count("\n", 0, lo) + 1
        assert citation.last == text.count("\n", 0, hi - 1) + 1
        offset = sources.files[int(citation.name)].span[0]
        assert sources.text[offset + lo : offset + hi] == text[lo:hi]


def pdf(*pages: str) -> bytes:
    """A minimal PDF, one line of text a page."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode())
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for i, text in enumerate(pages):
        content = f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET" if text else ""
        resources = "<< /Font << /F1 3 0 R >> >>"
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 300 200] /Resources {resources} "
            f"/Contents {5 + 2 * i} 0 R >>".encode()
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream".encode())
    out = bytearray(b"%PDF-1.4\n")
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(out))
        out += f"{number} 0 obj\n".encode() + body + b"\nendobj\n"
    table = len(out)
    out += f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{offset:010} 00000 n \n".encode() for offset in offsets)
    out += (
        f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{table}\n%%EOF\n".encode()
    )
    return bytes(out)


def test_pdf_is_cited_by_page(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    path = write(tmp_path / "a.pdf", pdf("First page here", "Second page there"))
    sources = read_documents([path])
    assert "First page here" in sources.text
    assert "Second page there" in sources.text
    begin = sources.text.index("there")
    (citation,) = sources.cite((begin, begin + 5))
    assert str(citation) == f"{path}, page 2"
    assert str(sources.cite((0, len(sources.text)))[0]) == f"{path}, pages 1–2"


def test_pdf_is_known_by_its_content(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    assert "Hello" in read_documents(["-"], io.BytesIO(pdf("Hello"))).text
    assert "Hello" in read_documents([write(tmp_path / "a.txt", pdf("Hello"))]).text


def test_pdf_refusals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pypdf = pytest.importorskip("pypdf")
    path = write(tmp_path / "a.pdf", b"%PDF-1.4\ngarbage")
    assert refusal(path).startswith(f"{path}: is not a readable PDF (")
    path = write(tmp_path / "b.pdf", b"not a PDF at all")
    assert refusal(path).startswith(f"{path}: is not a readable PDF (")
    path = write(tmp_path / "c.pdf", pdf(""))
    assert refusal(path) == f"{path}: no text in this PDF (scanned pages need OCR first)"
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf("secret")))
    writer.encrypt("password", algorithm="RC4-128")
    writer.write(tmp_path / "d.pdf")
    assert refusal(str(tmp_path / "d.pdf")) == (
        f"{tmp_path}/d.pdf: the PDF is encrypted; save a copy without a password"
    )
    assert not caplog.records, "an error is one line; pypdf's own log would be more"


def test_pdf_that_unpacks_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pypdf")
    path = write(tmp_path / "a.pdf", pdf("word " * 150, "word " * 150))
    monkeypatch.setattr(document_formats, "MAX_BYTES", 1400)
    assert "more than 1,400 characters of text" in refusal(path)


HTML = """<!DOCTYPE html><html><head><title>T</title><style>p {}</style></head><body>
<script>alert("no")</script><!-- hidden -->
<h1>Heading</h1><p>A <b>bold</b>   word,
one sentence.</p><p>Next &amp; last.</p><pre>  kept
    as is</pre><ul><li>one<li>two</ul></body></html>"""


def test_html_becomes_text(tmp_path: Path) -> None:
    pytest.importorskip("bs4")
    sources = read_documents([write(tmp_path / "a.html", HTML)])
    lines = sources.text.splitlines()
    assert lines[0] == "Heading"
    assert "A bold word, one sentence." in lines
    assert "Next & last." in lines
    assert "    as is" in lines
    assert {"one", "two"} <= set(lines)
    assert not any(
        word in sources.text for word in ("alert", "hidden", "p {}", "DOCTYPE", "\n\n\n")
    )


def test_html_encoding_of_its_meta_tag(tmp_path: Path) -> None:
    pytest.importorskip("bs4")
    page = '<meta charset="latin-1"><p>caf\xe9</p>'.encode("latin-1")
    assert read_documents([write(tmp_path / "a.htm", page)]).text == "café\n"


def test_html_without_text(tmp_path: Path) -> None:
    pytest.importorskip("bs4")
    path = write(tmp_path / "a.html", "<script>x</script>")
    assert refusal(path) == f"{path}: the document is empty"


@pytest.mark.parametrize(
    ("name", "package", "kind"), [("a.pdf", "pypdf", "PDF"), ("a.html", "bs4", "HTML")]
)
def test_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str, kind: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # what `import` takes for "not installed"
    path = write(tmp_path / name, "<p>x</p>")
    assert refusal(path) == (
        f"{path}: reading {kind} needs the package {package}; "
        "install it with: pip install 'wim_ext[documents]'"
    )


def test_no_path_and_standard_input_twice() -> None:
    with pytest.raises(ValueError, match="paths: expected at least one document, found none"):
        read_documents([])
    with pytest.raises(ValueError, match=r"paths: '-' \(standard input\) can be given once only"):
        read_documents(["-", "-"], io.BytesIO(b"x"))


def test_bc53_paths(tmp_path: Path) -> None:
    """What must not be opened is refused; and no path is ever joined from two parts."""
    assert refusal(str(tmp_path / "none.txt")) == f"{tmp_path}/none.txt: no such file"
    assert refusal(str(tmp_path)) == f"{tmp_path}: is a directory, not a file"
    assert refusal("") == "'': the path is empty"
    assert refusal("a\0b") == "a�b: the path contains a NUL character"
    device = "is a device, pipe or socket, not a file (use - for standard input)"
    assert refusal("/dev/zero") == f"/dev/zero: {device}"
    os.mkfifo(tmp_path / "fifo")
    assert refusal(str(tmp_path / "fifo")) == f"{tmp_path}/fifo: {device}"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert refusal(str(tmp_path / "loop")).startswith(f"{tmp_path}/loop: cannot be opened (")
    assert refusal(str(tmp_path / ("x" * 300))).endswith("cannot be opened (File name too long)")
    source = inspect.getsource(document_files) + inspect.getsource(document_formats)
    assert "path.join" not in source
    assert "Path(" not in source


def test_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    thread = threading.Thread(target=refusal, args=(str(tmp_path / "fifo"),), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()


def test_socket_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket may have about 100 characters only
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s")
        assert refusal("s").startswith("s: cannot be opened (")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x")
    os.chmod(path, 0)
    assert refusal(path) == f"{path}: cannot be opened (Permission denied)"


def test_too_large_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "big.txt")
    with open(path, "wb") as file:
        file.truncate(document_formats.MAX_BYTES + 2)  # sparse: takes no room on the disk
    monkeypatch.setattr(builtins, "bytes", None)
    assert refusal(path) == f"{path}: is too large: 67,108,866 bytes, at most 64 MB are read"


def test_a_file_that_grows_and_a_long_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document_files, "MAX_BYTES", 1 << 20)
    message = "is too large: more than 1,048,576 bytes, at most 1 MB are read"
    assert refusal("-", b"x" * ((1 << 20) + 1)) == f"standard input: {message}"
    path = write(tmp_path / "a", b"x" * ((1 << 20) + 1))
    real = os.fstat
    # As in /proc, where every size reads as 0.
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result((*real(fd)[:6], 0, *real(fd)[7:])))
    assert refusal(path) == f"{path}: {message}"


def test_undecodable_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "abc é".encode("latin-1"))
    assert refusal(path) == (
        f"{path}: is not UTF-8 text (byte 4 is wrong); convert it first, "
        "for example with iconv -f latin1 -t utf-8"
    )
    path = write(tmp_path / "b.txt", b"\xff\xfea\x00b")
    assert refusal(path).startswith(f"{path}: is not UTF-16 text (byte 4 is wrong)")


@pytest.mark.parametrize("data", [b"", b" \n\t\n", b"\xef\xbb\xbf"])
def test_empty_text(tmp_path: Path, data: bytes) -> None:
    path = write(tmp_path / "a.txt", data)
    assert refusal(path) == f"{path}: the document is empty"


def test_binary_is_not_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.docx", b"PK\x03\x04\x00\x00")
    assert refusal(path) == f"{path}: is not text: NUL at character 4"


def test_refusals_carry_no_control_characters(tmp_path: Path) -> None:
    assert "\x1b" not in refusal(str(tmp_path / "\x1b]0;title\x07"))
