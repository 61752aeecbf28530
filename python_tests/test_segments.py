"""Segments lose nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wim_kit import byte_fallback_tokenizer, byte_level_tokenizer, long_text, word_tokenizer

from wim_ext.segments import Context, SourceSpan, segment_tokens
from wim_ext.tokens import EncodedText, TextCodec


def cut(text: str, limit: int, tokenizer: object = None) -> list[str]:
    encoded = TextCodec(tokenizer or byte_level_tokenizer()).encode_with_offsets(text)
    segments = segment_tokens(text, encoded, limit)
    return [text[s.span[0] : s.span[1]] for s in segments]


def one_token_per_character(text: str) -> EncodedText:
    return EncodedText(list(range(len(text))), [(i, i + 1) for i in range(len(text))])


def ends(text: str, limit: int) -> list[str]:
    segments = segment_tokens(text, one_token_per_character(text), limit)
    return [text[s.span[0] : s.span[1]] for s in segments]


def test_documents_are_kept_apart_where_they_fit() -> None:
    text = "a" * 25 + "b" * 30 + "c" * 5 + "d" * 90
    encoded = one_token_per_character(text)
    segments = segment_tokens(text, encoded, 40, breaks=[25, 55, 60])
    pieces = [text[s.span[0] : s.span[1]] for s in segments]
    # The break at 55 would leave a stub of five; where all that is left fits none is needed.
    assert pieces == ["a" * 25, "b" * 30 + "c" * 5, "d" * 40, "d" * 40, "d" * 10]
    assert len(segment_tokens(text, encoded, 400, breaks=[25, 55, 60])) == 1


WORDS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["One. ", "Two!\n\n", "three ", "\n", "🙂", "é", "。", "<|im_end|>", "   "]),
)


@given(text=st.lists(WORDS, max_size=30).map("".join), limit=st.integers(1, 40), data=st.data())
@settings(max_examples=120, deadline=None)
def test_segments_cover_the_document_exactly(text: str, limit: int, data: st.DataObject) -> None:
    breaks = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    for tokenizer in (byte_level_tokenizer(), byte_fallback_tokenizer(), word_tokenizer()):
        encoded = TextCodec(tokenizer).encode_with_offsets(text)
        segments = segment_tokens(text, encoded, limit, breaks)
        assert all(1 <= s.num_tokens <= limit for s in segments)
        assert [s.index for s in segments] == list(range(len(segments)))
        tokens = [i for s in segments for i in encoded.ids[s.begin : s.end]]
        assert tokens == encoded.ids
        if segments:
            assert "".join(text[s.span[0] : s.span[1]] for s in segments) == text
            assert segments[0].span[0] == 0
            assert segments[-1].span[1] == len(text)


def test_nothing_gives_no_segment() -> None:
    assert segment_tokens("", EncodedText([], []), 5) == []


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_below_one_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match=f"segment_tokens must be 1 or more, got {limit}"):
        segment_tokens("a", one_token_per_character("a"), limit)


def test_a_document_that_fits_is_one_segment() -> None:
    assert ends("One. Two.", 9) == ["One. Two."]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        # In the last quarter (characters 30 to 40): a paragraph wins over what comes after it,
        ("a" * 30 + ".\n\nB b. C c. D" + "d" * 60, "a" * 30 + ".\n\n"),
        # a sentence over a space, a line end over a space,
        ("a" * 30 + " b. C ccc d" + "d" * 60, "a" * 30 + " b. "),
        ("a" * 30 + " b\nC ccc d" + "d" * 60, "a" * 30 + " b\n"),
        # a closing quote belongs to the sentence, a decimal point ends none,
        ("a" * 30 + ' b." C ccc d' + "d" * 60, "a" * 30 + ' b." '),
        ("a" * 30 + " 3.1415 is b" + "d" * 60, "a" * 30 + " 3.1415 is"),
        # sentences in scripts without spaces end too; else the last space or the limit.
        ("字" * 32 + "。" + "字" * 60, "字" * 32 + "。"),
        ("a" * 30 + " b c d e f g" + "d" * 60, "a" * 30 + " b c d e f"),
        ("a" * 100, "a" * 40),
    ],
)
def test_cuts_are_at_the_best_place_near_the_limit(text: str, first: str) -> None:
    pieces = ends(text, 40)
    # The white space of a border may stand on either side of it.
    assert pieces[0].strip() == first.strip()
    assert "".join(pieces) == text


def test_a_paragraph_far_before_the_limit_does_not_shorten_the_segment() -> None:
    text = "One.\n\n" + "a" * 100
    assert len(ends(text, 40)[0]) == 40


def test_the_rest_is_shared_instead_of_leaving_a_stub() -> None:
    assert [len(piece) for piece in ends("a" * 42, 40)] == [21, 21]
    assert [len(piece) for piece in ends("a" * 50, 40)] == [40, 10]


def test_a_cut_inside_a_character_is_the_last_resort() -> None:
    # One emoji is four byte tokens here: two of them fit the limit, so the character is not cut.
    assert cut("🙂🙂🙂", 9) == ["🙂🙂", "🙂"]
    # No whole character fits three tokens: it belongs to where it begins.
    assert cut("🙂🙂", 3) == ["🙂", "", "🙂", ""]


def test_a_long_text_is_cut_at_sentences() -> None:
    pieces = cut(long_text(120), 200)
    assert len(pieces) > 5
    assert all(piece.rstrip()[-1] in ".!?;" for piece in pieces)


def test_joined_documents_know_where_a_span_lies() -> None:
    context = Context.join([("a.txt", "Alpha."), ("b.txt", "Beta and gamma.")])
    assert context.text == "Document: a.txt\n\nAlpha.\n\nDocument: b.txt\n\nBeta and gamma.\n\n"
    begin = context.text.index("gamma")
    assert context.locate((begin, begin + 5)) == [SourceSpan("b.txt", 9, 14)]
    assert context.locate((0, len(context.text))) == [
        SourceSpan("a.txt", 0, 6),
        SourceSpan("b.txt", 0, 15),
    ]
    title = context.text.index("Document: b")
    assert context.locate((title, title + 8)) == []


def test_a_single_document_has_no_title() -> None:
    context = Context.join([("a.txt", "Alpha.")])
    assert context.text == "Alpha."
    assert context.locate((0, 3)) == [SourceSpan("a.txt", 0, 3)]


def test_what_counts_as_a_context() -> None:
    joined = Context.join([("a", "x"), ("b", "y")])
    assert Context.of(joined) is joined
    assert Context.of("text").text == "text"
    assert Context.of([("a", "x")]).text == "x"
    with pytest.raises(ValueError, match=r"documents must hold at least one .* pair, got none"):
        Context.of([])
