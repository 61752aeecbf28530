"""How a margin gets its text and its verdict. Each mode takes a branch that stands at the end of a
segment and returns a `Draft`.

| mode | the verdict is | costs |
|---|---|---|
| fused | first word of the margin itself; a NO ends it | an irrelevant margin is 1-2 tokens |
| separate | reply to a second prompt, on question and margin only | a prompt and a reply |
| logit | P(yes) against P(no) where that reply begins | a prompt; nothing to parse or to forge |
| likelihood | how much likelier the segment made the question | the question; no margin if no |
| a callable | what it returns for (margin, question[, segment text]) | nothing |

`likelihood` is the query-likelihood model of retrieval (Ponte and Croft, 1998), asked of the cache:
it needs no ability to follow instructions, so it serves models too small for the others, and it
drops segments that only repeat what was read before. "auto" takes it for models of less than a
billion parameters, "fused" for the others: SmolLM2-135M's yes and no were at chance in every
wording tried, its likelihoods told the right segment from the others.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

from wim_ext.engine import Task, released
from wim_ext.generation import Generation
from wim_ext.prompts import Slot, fill
from wim_ext.session import Session
from wim_ext.verdicts import first_verdict, probability_of_yes, says_no, verdict_ids

__all__ = ["MODES", "Draft", "Judge", "Mode", "Place", "mode_named", "suited_mode"]

Judge: TypeAlias = Callable[..., "bool | float"]
Drafting: TypeAlias = Generator[Task, None, "Draft"]

_EXTRACTING = ("extraction_prompts", "margins")
_CLASSIFYING = ("classification", "classification")
# Enough for a few marks and the word.
_VERDICT_TOKENS = 8


@dataclass(frozen=True)
class Draft:
    """A margin before it is placed: see `events.Margin`."""

    text: str
    relevant: bool
    score: float | None
    tokens: int


@dataclass(frozen=True)
class Place:
    """Where a margin is written: a branch at the end of a segment, and what was read there."""

    branch: Any
    fork: Callable[[int], Any]  # the trunk's first n tokens as a new sequence
    index: int
    segment_text: str
    document_begin: int  # tokens of the trunk before the document


class Mode(Protocol):
    """A relevance mode, made anew for each question."""

    def write(self, session: Session, place: Place) -> Drafting:
        """Writes and judges one margin; segments come in order."""
        ...

    def prompt_tokens(self, session: Session) -> int:
        """Most tokens that a branch takes besides its margin."""
        ...


class Fused:
    """The margin begins with its verdict. One without a verdict is kept: nothing is lost."""

    def write(self, session: Session, place: Place) -> Drafting:
        yes, no = session.prompts.yes, session.prompts.no
        prompt = fill(session.prompts.extract_fused, question=session.question)
        reply = yield from _extract(session, place, prompt, lambda text: says_no(text, yes, no))
        verdict, text = first_verdict(reply.text, yes, no)
        relevant = verdict is not False and bool(text)
        return Draft(text, relevant, None, len(reply.tokens))

    def prompt_tokens(self, session: Session) -> int:
        return _turn_tokens(session, session.prompts.extract_fused)


class Separate:
    """A second prompt in a conversation of its own; a reply without a verdict keeps the margin."""

    def write(self, session: Session, place: Place) -> Drafting:
        draft = yield from _plain_margin(session, place)
        if not draft.text:
            return draft
        yes, no = session.prompts.yes, session.prompts.no
        question = _classification(session, draft.text)
        with released(_conversation(session, place)) as talk:
            reply = yield from session.reply(
                talk,
                question,
                _CLASSIFYING,
                _VERDICT_TOKENS,
                stream=place.index,
                enough=lambda text: first_verdict(text, yes, no, finished=False)[0] is not None,
            )
        verdict, _ = first_verdict(reply.text, yes, no)
        return Draft(draft.text, verdict is not False, None, draft.tokens)

    def prompt_tokens(self, session: Session) -> int:
        return _turn_tokens(session, session.prompts.extract)


class Logit:
    """As `Separate`, but the verdict is read from the probabilities of yes and no."""

    def __init__(self, session: Session) -> None:
        prompts = session.prompts
        self._ids = verdict_ids(session.writer.codec, prompts.yes, prompts.no)

    def write(self, session: Session, place: Place) -> Drafting:
        draft = yield from _plain_margin(session, place)
        if not draft.text:
            return draft
        turn = session.turn(_classification(session, draft.text))
        with released(_conversation(session, place)) as talk:
            logits = yield from session.read(talk, turn, "classification", rows=1)
        score = probability_of_yes(logits[0], *self._ids)
        return Draft(draft.text, score >= 0.5, score, draft.tokens)

    def prompt_tokens(self, session: Session) -> int:
        return _turn_tokens(session, session.prompts.extract)


class Likelihood:
    """The question after each segment, compared with the question before it.

    Let l_i be the mean log-probability of the question's tokens after segment i, following the
    words of `prompts.probe`. Segment i is relevant if l_i - l_(i-1) is at least `THRESHOLD`; the
    score is a logistic function of the difference, 0.5 at the threshold. Only then is the margin
    written, on the same branch, so the probe's tokens are not wasted.
    """

    THRESHOLD = 0.65  # nats a token
    SHARPNESS = 6.0

    def __init__(self) -> None:
        self._before: float | None = None

    def write(self, session: Session, place: Place) -> Drafting:
        if self._before is None:
            with released(place.fork(place.document_begin)) as start:
                self._before = yield from self._probe(session, start)
        after = yield from self._probe(session, place.branch)
        gain, self._before = after - self._before, after
        score = 1.0 / (1.0 + math.exp(-self.SHARPNESS * (gain - self.THRESHOLD)))
        if score < 0.5:
            return Draft("", False, score, 0)
        prompts = session.prompts
        reply = yield from _extract(
            session, place, fill(prompts.extract_probed), lead=prompts.probed_lead
        )
        text = reply.text.strip()
        return Draft(text, bool(text), score, len(reply.tokens))

    def _probe(self, session: Session, sequence: Any) -> Generator[Task, None, float]:
        """Mean log-probability of the question's tokens at the end of `sequence`."""
        text, begin = _filled_with_position(session)
        encoded = session.writer.codec.encode_with_offsets(text)
        end = begin + len(session.question)
        asked = [i for i, (b, e) in enumerate(encoded.offsets) if b < end and e > begin and i]
        rows = len(encoded.ids) - asked[0] + 1
        logits = yield from session.read(sequence, encoded.ids, "classification", rows=rows)
        # Row r predicts the token after it: the rows begin one token before the question.
        predicted = torch.log_softmax(logits[: len(asked)].float().cpu(), dim=-1)
        found = predicted.gather(1, torch.tensor([[encoded.ids[i]] for i in asked]))
        return float(found.mean())

    def prompt_tokens(self, session: Session) -> int:
        text, _ = _filled_with_position(session)
        prompts, probe = session.prompts, session.writer.codec.encode(text)
        return len(probe) + len(session.turn(fill(prompts.extract_probed), prompts.probed_lead))


class Called:
    """A function of the user's decides: bool, or a score of which 0.5 and more is relevant."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._wants_segment = _positional(judge) >= 3

    def write(self, session: Session, place: Place) -> Drafting:
        draft = yield from _plain_margin(session, place)
        if not draft.text:
            return draft
        segment = (place.segment_text,) if self._wants_segment else ()
        value = self._judge(draft.text, session.question, *segment)
        if isinstance(value, bool):
            return Draft(draft.text, value, None, draft.tokens)
        score = float(value)
        return Draft(draft.text, score >= 0.5, score, draft.tokens)

    def prompt_tokens(self, session: Session) -> int:
        return _turn_tokens(session, session.prompts.extract)


MODES: dict[str, Callable[[Session], Mode]] = {
    "fused": lambda _session: Fused(),
    "separate": lambda _session: Separate(),
    "logit": Logit,
    "likelihood": lambda _session: Likelihood(),
}


# Between models that were seen to follow the fused form and one that was seen not to.
_SMALL_MODEL_PARAMETERS = 1_000_000_000


def suited_mode(model: Any) -> str:
    """The mode that "auto" stands for with this model; one of unknown size counts as large."""
    hf_model = getattr(model, "hf_model", None)
    small = hf_model is not None and hf_model.num_parameters() < _SMALL_MODEL_PARAMETERS
    return "likelihood" if small else "fused"


def mode_named(relevance: str | Judge) -> Callable[[Session], Mode]:
    """The maker of a mode. Raises ValueError for an unknown name."""
    if callable(relevance):
        return lambda _session: Called(relevance)
    if relevance not in MODES:
        allowed = ", ".join(["auto", *MODES])
        raise ValueError(f"relevance must be one of {allowed} or a callable, got {relevance!r}")
    return MODES[relevance]


def _plain_margin(session: Session, place: Place) -> Drafting:
    """A margin without a verdict; an empty one is not relevant."""
    prompt = fill(session.prompts.extract, question=session.question)
    reply = yield from _extract(session, place, prompt)
    text = reply.text.strip()
    return Draft(text, bool(text), None, len(reply.tokens))


def _extract(
    session: Session,
    place: Place,
    prompt: str,
    enough: Callable[[str], bool] | None = None,
    lead: str = "",
) -> Generator[Task, None, Generation]:
    limit = session.writer.max_margin_tokens
    return session.reply(place.branch, prompt, _EXTRACTING, limit, place.index, enough, lead)


def _conversation(session: Session, place: Place) -> Any:
    """A conversation without the document: it shares the trunk's first tokens."""
    return place.fork(len(session.writer.layout.opening))


def _classification(session: Session, margin: str) -> str:
    return fill(session.prompts.classify, question=session.question, margin=margin)


def _turn_tokens(session: Session, template: tuple[str | Slot, ...]) -> int:
    return len(session.turn(fill(template, question=session.question)))


def _filled_with_position(session: Session) -> tuple[str, int]:
    """The probe with the question in it, and where the question begins."""
    template = session.prompts.probe
    begin = len(fill(template[: template.index(Slot.QUESTION)]))
    return fill(template, question=session.question), begin


def _positional(judge: Judge) -> int:
    try:
        parameters = inspect.signature(judge).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return 2
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return 3
    return sum(p.kind in kinds for p in parameters)
