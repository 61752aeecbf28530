"""Reading a verdict: from a text that should begin with YES or NO, or from one row of logits."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from wim_ext.tokens import TextCodec

__all__ = ["first_verdict", "probability_of_yes", "says_no", "verdict_ids"]

# Marks that close the verdict, then a dash or the like before the text; marks that the text itself
# begins with (a quote, a brace, a minus sign) are its own.
_AFTER_VERDICT = r"[*_`\"'”.,:;#!)\]}]*\s*(?:[-–—:#|]+\s+)?"


def first_verdict(
    text: str, yes: Iterable[str], no: Iterable[str], finished: bool = True
) -> tuple[bool | None, str]:
    """The verdict that `text` begins with, and the text after it.

    Markup, quotes and punctuation around the word and its case do not matter: `yes`, `**YES**:`,
    `"No."`, `YES#` and `- no,` are verdicts; `Nobody`, `yesterday` and a verdict later in the text
    are not. While `finished` is false, a word at the very end may still grow and decides nothing.

    Returns:
        (True or False, rest) with a verdict, (None, text) without.
    """
    for verdict, words in ((True, yes), (False, no)):
        options = "|".join(re.escape(word) for word in words)
        match = re.match(rf"[\W_]*(?:{options})(?![^\W_])" + _AFTER_VERDICT, text, re.IGNORECASE)
        if match and (finished or not text[match.end() - 1].isalnum()):
            return verdict, text[match.end() :].strip()
    return None, text.strip()


def says_no(text: str, yes: Iterable[str], no: Iterable[str]) -> bool:
    """Whether a text that is still growing has begun with a NO."""
    return first_verdict(text, yes, no, finished=False)[0] is False


def verdict_ids(codec: TextCodec, yes: Iterable[str], no: Iterable[str]) -> tuple[set[int], ...]:
    """First tokens of the verdict words in all their spellings, without those that both share.

    Raises:
        ValueError: the tokenizer begins every yes and every no with the same token.
    """
    yes_ids, no_ids = _spellings(codec, yes), _spellings(codec, no)
    both = yes_ids & no_ids
    if not yes_ids - both or not no_ids - both:
        raise ValueError(
            f"prompts.yes {tuple(yes)} and prompts.no {tuple(no)} begin with the same tokens"
        )
    return yes_ids - both, no_ids - both


def _spellings(codec: TextCodec, words: Iterable[str]) -> set[int]:
    spelled = {form for word in words for form in (word, word.lower(), word.upper(), word.title())}
    encoded = [codec.encode(space + form) for form in sorted(spelled) for space in ("", " ")]
    whole = {ids[0] for ids in encoded if len(ids) == 1}
    # A word of several tokens shares its first one with other words, so it counts only if no
    # spelling is a single token.
    return whole or {ids[0] for ids in encoded if ids}


def probability_of_yes(logits: Tensor, yes_ids: set[int], no_ids: set[int]) -> float:
    """P(yes) / (P(yes) + P(no)) at one position; `logits` is [vocab].

    Raises:
        ValueError: the logits hold a NaN.
    """
    row = logits.detach().to(device="cpu", dtype=torch.float64)
    yes = torch.logsumexp(row[sorted(yes_ids)], dim=0)
    no = torch.logsumexp(row[sorted(no_ids)], dim=0)
    score = float(torch.sigmoid(yes - no))
    if score != score:
        raise ValueError("the verdict cannot be read: the logits of yes and no hold NaN")
    return score
