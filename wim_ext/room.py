"""Whether a question fits the model's context and the cache, before any work is done."""

from __future__ import annotations

from wim_ext.document import Document
from wim_ext.errors import CacheFull, ContextTooLong
from wim_ext.prompts import Template, fill
from wim_ext.relevance import Mode
from wim_ext.session import Session

__all__ = ["check_room", "clipped", "final_template", "margin_room"]

# A margin's text may take a token or two more between its neighbours than by itself.
_SEAM_TOKENS = 2
# Pages that a plan in tokens does not show: a copied one and a partly filled one for each of the
# branch and the conversation beside it.
_EXTRA_PAGES = 4


def check_room(session: Session, document: Document, mode: Mode | None, use: str) -> None:
    """Reserves nothing, but refuses what could run out on the way.

    Raises:
        ContextTooLong: document, margins and answer may need more tokens than the model can
            attend to; the text has the numbers.
        CacheFull: they may need more pages than are free.
    """
    writer, model = session.writer, session.writer.engine.model
    final = _final_tokens(session, document, use)
    branch = 0
    if mode is not None:
        branch = mode.prompt_tokens(session) + writer.max_margin_tokens
    trunk = document.trunk_tokens
    longest = trunk + max(branch, final if use != "margins" else 0)
    if model.max_length is not None and longest > model.max_length:
        raise ContextTooLong(_message(session, document, longest), longest, model.max_length)
    cache = getattr(model, "cache", None)
    if cache is None:
        return
    tokens = longest - document.tokens_in_trunk
    needed = -(-tokens // cache.page_size) + _EXTRA_PAGES
    if needed > cache.free_pages:
        raise CacheFull(needed, cache.free_pages, cache.num_pages)


def _message(session: Session, document: Document, longest: int) -> str:
    writer = session.writer
    rest = longest - document.num_tokens
    return (
        f"the document has {document.num_tokens} tokens in {len(document.segments)} segments; with "
        f"prompts, margins of up to {writer.max_margin_tokens} tokens and an answer of up to "
        f"{writer.max_answer_tokens} ({rest} together) it may need {longest} tokens, and the model "
        f"can attend to {writer.engine.model.max_length}"
    )


def _final_tokens(session: Session, document: Document, use: str) -> int:
    """Most tokens that follow the trunk for the answer."""
    template = final_template(session, use, any_margins=True)
    texts = {"question": session.question, "margins": ""}
    prompt = len(session.turn(fill(template, **texts)))
    margins = 0 if use == "context" else len(document.segments) * margin_room(session)
    return prompt + margins + session.writer.max_answer_tokens


def margin_room(session: Session) -> int:
    """Most tokens that one margin takes in the final prompt."""
    frame = session.writer.codec.encode(fill(session.prompts.margin, margin=""))
    return len(frame) + session.writer.max_margin_tokens + _SEAM_TOKENS


def clipped(session: Session, text: str) -> str:
    """A margin's text cut to the tokens that were reserved for it.

    Decoding and encoding again may give more tokens than were generated; it rarely does.
    """
    encoded = session.writer.codec.encode_with_offsets(text)
    limit = session.writer.max_margin_tokens
    return text if len(encoded.ids) <= limit else text[: encoded.offsets[limit][0]]


def final_template(session: Session, use: str, any_margins: bool) -> Template:
    """The final prompt; without margins to show, the one that does not speak of them."""
    prompts = session.prompts
    if use == "margins":
        return prompts.final_margins
    return prompts.final_both if use == "context+margins" and any_margins else prompts.final_context
