"""Text to tokens and back: untrusted text never becomes control tokens, streamed text never shows
half a character."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["EncodedText", "TextCodec", "TextStream"]

# What a byte-level tokenizer decodes an incomplete UTF-8 sequence to.
_REPLACEMENT = "\ufffd"
# A character ends within four bytes, so within four tokens, unless tokens straddle characters (runs
# of emoji). After this many tokens the bytes are wrong and showing the replacement is right.
_LONGEST_WAIT = 16


@dataclass(frozen=True)
class EncodedText:
    """Tokens of a text, with the characters [begin, end) of the text that each came from."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class TextCodec:
    """A tokenizer seen as a codec for plain text.

    `control_ids` are the ids that mean something to the model beyond their text: those that the
    tokenizer marks as special, and those added tokens that its chat template mentions (several
    models have turn and tool markers that are not marked). `encode` never returns one of them,
    except for the unknown-token id where the text holds a character outside the vocabulary.

    Raises:
        ValueError: `tokenizer` is not a fast one (only those map tokens to characters).
    """

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(
                f"tokenizer must be a fast one (offsets are needed), got {type(tokenizer).__name__}"
            )
        self.tokenizer = tokenizer
        template = str(getattr(tokenizer, "chat_template", None) or "")
        added = {
            int(index): str(token.content)
            for index, token in tokenizer.added_tokens_decoder.items()
            if token.special or (token.content.strip() and token.content in template)
        }
        self._control_text = {**added, **self._named_special_tokens()}
        self.control_ids = frozenset(self._control_text)

    def _named_special_tokens(self) -> dict[int, str]:
        ids, texts = self.tokenizer.all_special_ids, self.tokenizer.all_special_tokens
        return {int(index): str(text) for index, text in zip(ids, texts, strict=True)}

    def encode(self, text: str) -> list[int]:
        """Tokens of `text` as plain text: no token is added, no control token comes out."""
        return self.encode_with_offsets(text).ids

    def encode_with_offsets(self, text: str) -> EncodedText:
        """As `encode`, with the characters that each token stands for.

        Raises:
            ValueError: `text` is a single character that *is* a control token.
        """
        encoded = self._tokenize(text)
        cuts = self._cuts(text, encoded)
        if not cuts:
            return encoded
        # The tokenizer made control tokens although it was told not to. Cutting their texts in two
        # and encoding the pieces apart takes them away; pieces get shorter, so this ends.
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            piece = self.encode_with_offsets(text[begin:end])
            ids += piece.ids
            offsets += [(first + begin, last + begin) for first, last in piece.offsets]
        return EncodedText(ids, offsets)

    def _tokenize(self, text: str) -> EncodedText:
        encoded = self.tokenizer(
            text,
            add_special_tokens=False,
            split_special_tokens=True,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        offsets = [(int(begin), int(end)) for begin, end in encoded["offset_mapping"]]
        return EncodedText([int(index) for index in encoded["input_ids"]], offsets)

    def _cuts(self, text: str, encoded: EncodedText) -> list[int]:
        """The middle of each piece of text that became a control token."""
        cuts = []
        unknown = self.tokenizer.unk_token_id
        for index, (begin, end) in zip(encoded.ids, encoded.offsets, strict=True):
            piece = text[begin:end]
            if index not in self.control_ids:
                continue
            if index == unknown and piece.strip() != self._control_text[index]:
                continue
            if len(piece) < 2:
                raise ValueError(f"text holds a character that is a control token: {piece!r}")
            cuts.append((begin + end) // 2)
        return cuts

    def encode_template(self, text: str) -> list[int]:
        """Tokens of a text that comes from the chat template: its markers become control tokens."""
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return [int(index) for index in encoded["input_ids"]]

    def decode(self, ids: list[int]) -> str:
        """Text of generated tokens, control tokens left out."""
        shown = [index for index in ids if index not in self.control_ids]
        return str(self.tokenizer.decode(shown, clean_up_tokenization_spaces=False))

    @property
    def bos_id(self) -> int | None:
        """The begin-of-text id, if this tokenizer puts one before a plain text."""
        bos = self.tokenizer.bos_token_id
        if bos is None:
            return None
        start = self.tokenizer("x", verbose=False)["input_ids"][:1]
        return int(bos) if list(start) == [bos] else None


class TextStream:
    """Decodes tokens as they come. Pieces are whole characters and add up to the whole text."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        # Tokens before `_context` no longer matter; those before `_shown` were returned. Decoding
        # starts at `_context` since a token's text may depend on the one before it (spaces).
        self._context = 0
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that became final with this token; often all of it, "" in mid-character."""
        self._ids.append(token)
        old, new = self._texts()
        incomplete = len(self._ids) - self._shown
        if new.endswith(_REPLACEMENT) and incomplete < _LONGEST_WAIT:
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return new[len(old) :]

    def finish(self) -> str:
        """What is left, with the replacement character where a character was cut off."""
        old, new = self._texts()
        self._context = self._shown = len(self._ids)
        return new[len(old) :]

    def _texts(self) -> tuple[str, str]:
        shown = self._ids[self._context : self._shown]
        return self._codec.decode(shown), self._codec.decode(self._ids[self._context :])
