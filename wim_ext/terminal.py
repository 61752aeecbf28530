"""Text on its way to a terminal: made harmless, and wrapped while it is still being written."""

from __future__ import annotations

import re

from rich.cells import cell_len

__all__ = ["WordWrap", "clean", "one_line"]

# What could act on the terminal instead of being shown, coming from a document or a model: C0 and
# C1 controls (so every escape sequence loses its start; the newline and the tab stay), marks that
# reorder text (bidirectional controls), invisible tag characters, interlinear annotation.
_ACTING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")
_SURROGATES = re.compile("[\ud800-\udfff]")


def clean(text: str) -> str:
    """`text` without anything that acts on a terminal; piece by piece gives the same as at once."""
    text = _LINE_BREAKS.sub("\n", text)
    return _SURROGATES.sub("\N{REPLACEMENT CHARACTER}", _ACTING.sub("", text))


def one_line(text: str) -> str:
    """`text` cleaned and with every run of blanks and line ends as one blank."""
    return " ".join(clean(text).split())


class WordWrap:
    """Breaks text that arrives in pieces between words, so that none is cut at the edge.

    A word is held back until its end is known. Wide characters (CJK) may break anywhere.
    """

    def __init__(self, width: int) -> None:
        self._width = max(width, 1)
        self._column = 0
        self._blanks = ""
        self._word = ""

    def feed(self, piece: str) -> str:
        """Takes the next piece; returns what can be written now."""
        out = []
        for character in piece:
            if character == "\n":
                out.append(self._take_word() + "\n")
                self._blanks, self._column = "", 0
            elif character in " \t":
                out.append(self._take_word())
                self._blanks += " " if character == " " else "    "
            else:
                self._word += character
                if cell_len(character) == 2:
                    out.append(self._take_word())
        return "".join(out)

    def finish(self) -> str:
        """The last word, which no blank has ended."""
        return self._take_word()

    def _take_word(self) -> str:
        if not self._word:
            return ""
        blanks, word, self._blanks, self._word = self._blanks, self._word, "", ""
        width = cell_len(blanks) + cell_len(word)
        if self._column and self._column + width > self._width:
            self._column = cell_len(word)
            return "\n" + word
        self._column += width
        return blanks + word
