"""Cuts a tokenized document into segments. Nothing is lost and nothing is tokenized twice: a
segment is a slice of the document's own tokens, and the segments' texts add up to the document."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from wim_ext.tokens import EncodedText

__all__ = ["Context", "Segment", "SourceSpan", "segment_tokens"]

# How good a place to cut is. Any value below _BROKEN_CHARACTER would lose to no cut at all.
_BROKEN_CHARACTER, _CHARACTER, _WORD, _LINE, _SENTENCE, _PARAGRAPH = range(6)
_SENTENCE_ENDS = ".!?…:;"
_WIDE_SENTENCE_ENDS = "。！？"  # need no space after them
_CLOSERS = "\"')]}»”’`*_"
# Characters on either side of a cut that decide how good it is.
_SIGHT = 12


@dataclass(frozen=True)
class Segment:
    """Tokens [begin, end) of the document and the characters `span` that they stand for.

    A character whose tokens are split by the cut (only when no better place is within the limit)
    belongs to the segment that holds its first token, so `span` may be empty.
    """

    index: int
    begin: int
    end: int
    span: tuple[int, int]

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin


def segment_tokens(
    text: str, encoded: EncodedText, limit: int, breaks: Sequence[int] = ()
) -> list[Segment]:
    """Segments of 1 to `limit` tokens, cut at paragraph or sentence ends in the last quarter.

    Where the last quarter holds no such place, a line end, a space, a whole character or at last
    the limit itself is taken. The last of `breaks` (characters where something new begins: another
    document) is taken before all of these if it is not in the first quarter. Raises ValueError for
    a limit below 1.
    """
    if limit < 1:
        raise ValueError(f"segment_tokens must be 1 or more, got {limit}")
    total = len(encoded.ids)
    begins = [begin for begin, _ in encoded.offsets]
    fresh = [bisect_left(begins, position) for position in sorted(breaks)]
    cuts = [0]
    while cuts[-1] < total:
        begin = cuts[-1]
        at = bisect_right(fresh, min(begin + limit, total - 1)) - 1
        if at >= 0 and fresh[at] > begin + limit // 4 and total - begin > limit:
            cuts.append(fresh[at])
        else:
            cuts.append(_next_cut(text, encoded.offsets, begin, total, limit))
    starts = _character_starts(text, encoded.offsets, cuts)
    return [
        Segment(index, cuts[index], cuts[index + 1], (starts[index], starts[index + 1]))
        for index in range(len(cuts) - 1)
    ]


def _next_cut(text: str, offsets: list[tuple[int, int]], begin: int, total: int, limit: int) -> int:
    left = total - begin
    if left <= limit:
        return total
    # A stub at the end would cost a margin for a few words: share the rest between two segments.
    furthest = begin + (limit if left >= limit + limit // 4 else (left + 1) // 2)
    nearest = max(begin + 1, furthest - limit // 4)
    best, best_rank = furthest, _BROKEN_CHARACTER
    for cut in range(furthest, begin, -1):
        if cut < nearest and best_rank > _BROKEN_CHARACTER:
            break
        rank = _rank(text, offsets, cut)
        if rank > best_rank:
            best, best_rank = cut, rank
        if best_rank == _PARAGRAPH:
            break
    return best


def _rank(text: str, offsets: list[tuple[int, int]], cut: int) -> int:
    """How good a cut before token `cut` is."""
    position = offsets[cut][0]
    if offsets[cut - 1][1] > position:
        return _BROKEN_CHARACTER
    before, after = text[max(0, position - _SIGHT) : position], text[position : position + _SIGHT]
    words = before.rstrip()
    gap = before[len(words) :] + after[: len(after) - len(after.lstrip())]
    sentence = words.rstrip(_CLOSERS)
    if gap.count("\n") >= 2:
        return _PARAGRAPH
    if sentence.endswith(tuple(_WIDE_SENTENCE_ENDS)):
        return _SENTENCE
    if gap and sentence.endswith(tuple(_SENTENCE_ENDS)):
        return _SENTENCE
    if "\n" in gap:
        return _LINE
    return _WORD if gap else _CHARACTER


def _character_starts(text: str, offsets: list[tuple[int, int]], cuts: list[int]) -> list[int]:
    starts = [0]
    for cut in cuts[1:-1]:
        # In mid-character both tokens name the same character; it stays with the first.
        starts.append(max(starts[-1], offsets[cut][0], offsets[cut - 1][1]))
    return [*starts, len(text)]


@dataclass(frozen=True)
class SourceSpan:
    """Characters [begin, end) of the document called `name`."""

    name: str
    begin: int
    end: int


class Context:
    """One or several documents as one text, which remembers where each of them lies.

    Several documents get a title line each; a single one is taken as it is.

        >>> context = Context.join([("a.txt", "Alpha."), ("b.txt", "Beta.")])
        >>> begin = context.text.index("Beta")
        >>> context.locate((begin, begin + 4))
        [SourceSpan(name='b.txt', begin=0, end=4)]
    """

    def __init__(self, text: str, parts: Sequence[tuple[str, int, int]] = ()) -> None:
        self.text = text
        # (name, begin, end) in characters of `text`; ordered, without overlap.
        self.parts = list(parts) or [("", 0, len(text))]

    @classmethod
    def join(cls, documents: Sequence[tuple[str, str]]) -> Context:
        """From (name, text) pairs. Raises ValueError if there is none."""
        if not documents:
            raise ValueError("documents must hold at least one (name, text) pair, got none")
        if len(documents) == 1:
            name, text = documents[0]
            return cls(text, [(name, 0, len(text))])
        pieces: list[str] = []
        parts: list[tuple[str, int, int]] = []
        position = 0
        for name, text in documents:
            title = f"Document: {name}\n\n"
            parts.append((name, position + len(title), position + len(title) + len(text)))
            pieces += [title, text, "\n\n"]
            position = parts[-1][2] + 2
        return cls("".join(pieces), parts)

    @classmethod
    def of(cls, context: str | Context | Sequence[tuple[str, str]]) -> Context:
        """What the public methods accept: a text, a Context, or (name, text) pairs."""
        if isinstance(context, Context):
            return context
        return cls(context) if isinstance(context, str) else cls.join(context)

    @property
    def breaks(self) -> list[int]:
        """Characters where one document ends and another begins."""
        return [end for _, _, end in self.parts[:-1]]

    def locate(self, span: tuple[int, int]) -> list[SourceSpan]:
        """The pieces of documents that `span` (characters of `text`) covers, in order."""
        found = []
        for name, begin, end in self.parts:
            first, last = max(span[0], begin), min(span[1], end)
            if first < last:
                found.append(SourceSpan(name, first - begin, last - begin))
        return found
