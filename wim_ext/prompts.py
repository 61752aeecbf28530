"""The words around document, question and margins, and how they become tokens.

A template is a list of pieces: own words, and slots for texts of others. Texts are put side by
side and encoded as plain text, so that braces, template markers or the names of control tokens in
a document, a question or a margin are nothing but text. Control tokens come from the chat
template's own parts alone (`Layout`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeAlias

from wim_ext.chat_template import template_parts
from wim_ext.tokens import TextCodec

__all__ = ["MARGIN", "MARGINS", "QUESTION", "Layout", "Prompts", "Slot", "Template", "fill"]


class Slot(Enum):
    """A place in a template for a text that is not ours."""

    QUESTION = "question"
    MARGIN = "margin"
    MARGINS = "margins"


QUESTION, MARGIN, MARGINS = Slot.QUESTION, Slot.MARGIN, Slot.MARGINS
Template: TypeAlias = tuple["str | Slot", ...]


def fill(template: Template, **texts: str) -> str:
    """The template with its slots filled: `fill(t, question="...")`."""
    return "".join(texts[piece.value] if isinstance(piece, Slot) else piece for piece in template)


@dataclass(frozen=True)
class Prompts:
    """Our wording of every prompt; pass your own for other languages or habits.

    Attributes:
        system: the system message; None leaves it to the chat template.
        intro: stands before the document, without slots (the trunk serves many questions).
        extract_fused: asks for a verdict and, after it, what the text says about QUESTION.
        extract: asks for what the text says about QUESTION.
        probe: states QUESTION after a segment; `likelihood` measures how well the segment
            predicts it. `extract_probed` goes on from there, and `probed_lead` begins the reply:
            small models copy what they should after such words, and ramble without.
        classify: asks whether MARGIN helps with QUESTION; `separate` reads the reply, `logit`
            compares the probabilities of its first word.
        margin: one kept MARGIN in the list of all of them.
        final_both, final_margins, final_context: ask QUESTION, with MARGINS, with nothing but
            MARGINS, with nothing but the document.
        no_margins: stands for MARGINS in `final_margins` where no margin is relevant.
        plain_reply: stands before a reply where the model has no chat template.
        yes, no: words of a verdict, compared without regard to case.

    Raises:
        ValueError: a template lacks a slot that it needs, or has one that nothing fills, or `probe`
            begins with QUESTION.
    """

    system: str | None = None
    intro: Template = ("Read this text.\n\n",)
    extract_fused: Template = (
        "\n\nDoes the text above help to answer this question: ",
        QUESTION,
        "\nBegin your reply with YES or NO. After NO write nothing more. After YES copy what the "
        "text says about the question, in one or two sentences.",
    )
    extract: Template = (
        "\n\nQuestion: ",
        QUESTION,
        "\nCopy the sentence of the text above that helps most to answer the question.",
    )
    probe: Template = ("\n\nA question that the last part of the text answers: ", QUESTION)
    extract_probed: Template = ("\nCopy the sentence that answers it.",)
    probed_lead: str = "According to the text,"
    classify: Template = (
        "Question: ",
        QUESTION,
        "\nNote: ",
        MARGIN,
        "\nDoes the note help to answer the question? Reply with YES or NO.",
    )
    margin: Template = ("- ", MARGIN, "\n")
    final_both: Template = (
        "\n\nNotes made while reading the text:\n",
        MARGINS,
        "\nWith the help of the text and the notes, answer this question: ",
        QUESTION,
    )
    final_margins: Template = (
        "Notes made while reading a text:\n",
        MARGINS,
        "\nWith the help of the notes, answer this question: ",
        QUESTION,
    )
    final_context: Template = ("\n\nWith the help of the text, answer this question: ", QUESTION)
    no_margins: str = "(none)\n"
    plain_reply: str = "\n\nAnswer:"
    yes: tuple[str, ...] = ("yes",)
    no: tuple[str, ...] = ("no",)

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name in _SLOTS:
                _check_template(field.name, getattr(self, field.name))
        if not fill(self.probe[: self.probe.index(QUESTION)]).strip():
            raise ValueError(
                "prompts.probe must begin with words: they predict the question's first token"
            )
        for name in ("yes", "no"):
            if not all(word.strip() for word in getattr(self, name)) or not getattr(self, name):
                raise ValueError(f"prompts.{name} must hold at least one word and no empty one")


# The slots of each template: exactly these, since a missing one would drop a text in silence.
_SLOTS: dict[str, set[Slot]] = {
    "intro": set(),
    "extract_fused": {QUESTION},
    "extract": {QUESTION},
    "probe": {QUESTION},
    "extract_probed": set(),
    "classify": {QUESTION, MARGIN},
    "margin": {MARGIN},
    "final_both": {QUESTION, MARGINS},
    "final_margins": {QUESTION, MARGINS},
    "final_context": {QUESTION},
}


def _check_template(name: str, template: Any) -> None:
    if isinstance(template, str) or not all(isinstance(p, str | Slot) for p in template):
        raise ValueError(f"prompts.{name} must be a tuple of texts and slots, got {template!r}")
    found = {piece for piece in template if isinstance(piece, Slot)}
    if found != _SLOTS[name]:
        raise ValueError(
            f"prompts.{name} must have the slots {_names(_SLOTS[name])}, it has {_names(found)}"
        )


def _names(slots: Iterable[Slot]) -> str:
    return ", ".join(sorted(slot.name for slot in slots)) or "(none)"


@dataclass(frozen=True)
class Layout:
    """Tokens around a user's text: `opening` + text + `closing`, then the model replies.

    `opening` begins with the begin-of-text token if the model has one, and holds it once.
    """

    opening: list[int]
    closing: list[int]
    is_chat: bool

    @classmethod
    def of(cls, codec: TextCodec, prompts: Prompts) -> Layout:
        """From the tokenizer's chat template, or a plain layout where it has none.

        Raises:
            ValueError: the template cannot be used; the text says why.
        """
        if getattr(codec.tokenizer, "chat_template", None):
            parts = template_parts(codec.tokenizer, system=prompts.system is not None)
            opening = codec.encode_template(parts[0])
            if prompts.system is not None:
                opening += codec.encode(prompts.system) + codec.encode_template(parts[1])
            return cls(_with_one_bos(codec, opening), codec.encode_template(parts[-1]), True)
        opening = codec.encode(f"{prompts.system}\n\n") if prompts.system is not None else []
        return cls(_with_one_bos(codec, opening), codec.encode(prompts.plain_reply), False)


def _with_one_bos(codec: TextCodec, opening: list[int]) -> list[int]:
    """`opening` with one begin-of-text token in front, if the tokenizer uses one for texts."""
    bos = codec.bos_id
    if bos is None:
        return opening
    start = 0
    while opening[start : start + 1] == [bos]:
        start += 1
    return [bos, *opening[start:]]
