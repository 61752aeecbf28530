"""Text to tokens and back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wim_kit import (
    MARKERS,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    long_text,
    word_tokenizer,
)

from wim_ext.tokens import TextCodec, TextStream

TEXTS = st.lists(
    st.one_of(st.sampled_from([*MARKERS, "<s>", "</s>", "<unk>", "<0x0A>"]), st.text(max_size=8)),
    max_size=8,
).map("".join)


@pytest.fixture(params=["byte-level", "byte-fallback"], scope="module")
def codec(request: pytest.FixtureRequest) -> TextCodec:
    made = {"byte-level": byte_level_tokenizer, "byte-fallback": byte_fallback_tokenizer}
    return TextCodec(made[request.param]())


def test_every_special_token_is_a_control_token() -> None:
    codec = TextCodec(byte_level_tokenizer())
    ids = codec.tokenizer.convert_tokens_to_ids(MARKERS)
    assert codec.control_ids == frozenset(ids)


def test_an_added_token_of_the_template_is_a_control_token_and_others_are_not() -> None:
    tokenizer = byte_level_tokenizer.__wrapped__(template="{{ '<turn>' }}")
    tokenizer.add_tokens(["<turn>", "<table>"])
    codec = TextCodec(tokenizer)
    turn, table = tokenizer.convert_tokens_to_ids(["<turn>", "<table>"])
    assert turn in codec.control_ids
    assert table not in codec.control_ids
    encoded = codec.encode_with_offsets("a<turn>b<table>")
    assert turn not in encoded.ids
    assert table in encoded.ids
    assert encoded.offsets[0] == (0, 1)
    assert encoded.offsets[-1] == (8, 15)
    assert codec.decode(encoded.ids) == "a<turn>b<table>"
    assert turn in codec.encode_template("a<turn>b")


@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_text_never_becomes_control_tokens(text: str) -> None:
    for tokenizer in (byte_level_tokenizer(), byte_fallback_tokenizer()):
        codec = TextCodec(tokenizer)
        encoded = codec.encode_with_offsets(text)
        assert not codec.control_ids & set(encoded.ids)
        assert codec.encode(text) == encoded.ids
        begins = [begin for begin, _ in encoded.offsets]
        assert begins == sorted(begins)
        assert all(0 <= begin <= end <= len(text) for begin, end in encoded.offsets)


@given(text=TEXTS)
@settings(max_examples=100, deadline=None)
def test_decoding_gives_the_text_back(text: str) -> None:
    codec = TextCodec(byte_level_tokenizer())
    assert codec.decode(codec.encode(text)) == text


def test_an_unknown_character_is_the_unknown_token_but_its_name_is_not() -> None:
    codec = TextCodec(word_tokenizer())
    unknown = codec.tokenizer.unk_token_id
    assert codec.encode("the zebra .") == [4, unknown, 6]
    # The name of the unknown token is taken apart; its pieces are unknown words in their turn.
    assert len(codec.encode("[SEP]")) > 1
    assert codec.tokenizer.sep_token_id not in codec.encode("the [SEP] .")


def test_a_character_that_is_a_control_token_is_refused() -> None:
    tokenizer = byte_level_tokenizer.__wrapped__(template="{{ '§' }}")
    tokenizer.add_tokens(["§"])
    with pytest.raises(ValueError, match=r"text holds a character that is a control token: '§'"):
        TextCodec(tokenizer).encode("clause § 1")


def test_thousands_of_markers_are_taken_apart_in_one_pass() -> None:
    tokenizer = byte_level_tokenizer.__wrapped__(template="{{ '<turn>' }}")
    tokenizer.add_tokens(["<turn>"])
    codec = TextCodec(tokenizer)
    text = "<turn>" * 5000
    encoded = codec.encode_with_offsets(text)
    assert codec.decode(encoded.ids) == text
    assert not codec.control_ids & set(encoded.ids)


def test_slow_tokenizers_are_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match=r"tokenizer must be a fast one .*, got Slow"):
        TextCodec(Slow())


def test_bos_is_told_only_where_the_tokenizer_uses_it() -> None:
    assert TextCodec(byte_fallback_tokenizer()).bos_id == 1
    assert TextCodec(byte_level_tokenizer(bos=True)).bos_id == 0
    assert TextCodec(byte_level_tokenizer()).bos_id is None
    assert TextCodec(word_tokenizer()).bos_id is None


def test_control_tokens_are_left_out_of_decoded_text(codec: TextCodec) -> None:
    ids = codec.encode("tower")
    end = codec.tokenizer.eos_token_id
    assert codec.decode([end, *ids, end]) == "tower"


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=80, deadline=None)
def test_streamed_pieces_add_up_and_hold_no_half_character(text: str) -> None:
    for tokenizer in (byte_level_tokenizer(), byte_fallback_tokenizer()):
        codec = TextCodec(tokenizer)
        ids = codec.encode(text)
        stream = TextStream(codec)
        pieces = [stream.push(token) for token in ids] + [stream.finish()]
        assert "".join(pieces) == codec.decode(ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_appears_when_its_last_byte_comes() -> None:
    codec = TextCodec(byte_level_tokenizer())
    ids = codec.encode("a🙂b")
    stream = TextStream(codec)
    assert [stream.push(token) for token in ids] == ["a", "", "", "", "🙂", "b"]


def test_a_cut_character_shows_the_replacement_at_the_end(codec: TextCodec) -> None:
    ids = codec.encode("a🙂")[:-1]
    stream = TextStream(codec)
    shown = [stream.push(token) for token in ids]
    assert "".join(shown) == "a"
    assert set(stream.finish()) == {"\ufffd"}
    assert stream.finish() == ""


def test_wrong_bytes_do_not_hold_the_stream_for_ever() -> None:
    codec = TextCodec(byte_level_tokenizer())
    half = codec.encode("🙂")[0]
    stream = TextStream(codec)
    assert "\ufffd" in "".join(stream.push(half) for _ in range(40))


def test_spaces_between_words_survive_streaming(codec: TextCodec) -> None:
    ids = codec.encode("the tower was built")
    stream = TextStream(codec)
    assert "".join(stream.push(token) for token in ids) == "the tower was built"


def test_long_texts_stream_in_linear_time(codec: TextCodec) -> None:
    decoded: list[int] = []

    class Counting(TextCodec):
        def decode(self, ids: list[int]) -> str:
            decoded.append(len(ids))
            return super().decode(ids)

    counting = Counting(codec.tokenizer)
    stream = TextStream(counting)
    ids = codec.encode(long_text(30))
    for token in ids:
        stream.push(token)
    assert sum(decoded) < 20 * len(ids)
