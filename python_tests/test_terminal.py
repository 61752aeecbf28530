"""Text for terminals: nothing that acts on them, and wrapping while it is written."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from wim_ext.terminal import WordWrap, clean, one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ünï 文 👩‍🚀\n\tx", "plain ünï 文 👩‍🚀\n\tx"),
        ("\x1b[31mred\x1b[0m", "[31mred[0m"),
        ("\x1b]0;title\x07x", "]0;titlex"),
        ("\x9b2Jx\x90", "2Jx"),
        ("over\rwrite\x08\x7f\x00", "overwrite"),
        ("dos\r\nline", "dos\nline"),
        ("a\x85b\u2028c\u2029d", "a\nb\nc\nd"),
        ("safe\u202egnp.exe\u2066\u2069\u200e\u200f\u061c", "safegnp.exe"),
        ("tag\U000e0041\U000e007f\ufeff\ufffa", "tag"),
        ("half \ud83d pair", "half \N{REPLACEMENT CHARACTER} pair"),
    ],
)
def test_clean(text: str, shown: str) -> None:
    assert clean(text) == shown


@given(st.text(), st.integers(0, 20))
def test_clean_acts_on_every_piece_alike(text: str, at: int) -> None:
    assert clean(text[:at]) + clean(text[at:]) == clean(text)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", clean(text))


def test_one_line() -> None:
    assert one_line("  a\n\n b\t\x1b c\r\n") == "a b c"


def wrapped(width: int, *pieces: str) -> str:
    wrap = WordWrap(width)
    return "".join(wrap.feed(piece) for piece in pieces) + wrap.finish()


def test_words_that_arrive_in_pieces_stay_whole() -> None:
    assert wrapped(10, "The qu", "ick bro", "wn fox ", "jumps") == "The quick\nbrown fox\njumps"


def test_a_word_is_written_when_it_ends() -> None:
    wrap = WordWrap(20)
    assert wrap.feed("hel") == ""
    assert wrap.feed("lo ") == "hello"
    assert wrap.feed("you") == ""
    assert wrap.finish() == " you"
    assert wrap.finish() == ""


def test_a_word_wider_than_the_line_is_left_to_the_terminal() -> None:
    assert wrapped(4, "a abcdefgh b") == "a\nabcdefgh\nb"
    assert wrapped(0, "ab cd") == "ab\ncd"


def test_line_ends_and_indentation_stay() -> None:
    assert wrapped(12, "def f():\n    return 1\n\tx  \n") == "def f():\n    return 1\n    x\n"
    assert wrapped(8, "    deep word") == "    deep\nword"


def test_wide_characters_break_anywhere() -> None:
    assert wrapped(6, "漢字漢字漢") == "漢字漢\n字漢"


@given(st.text("ab 漢\n", max_size=60), st.integers(4, 20), st.integers(1, 7))
def test_wrapping_only_moves_blanks(text: str, width: int, step: int) -> None:
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    result = wrapped(width, *pieces)
    assert result == wrapped(width, text)
    assert "".join(result.split()) == "".join(text.split())
    for line in result.split("\n"):
        assert cell_len(line) <= width or " " not in line.strip()
