"""The fixed text that a model's chat template puts around a conversation."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from wim_ext import template_process

__all__ = ["render_template", "template_parts"]

# For starting Python and importing transformers on a slow disk; the template itself has less.
_PARENT_TIMEOUT = 120.0
_MARKERS = ("wimslotsystem", "wimslotuser")


def template_parts(tokenizer: Any, system: bool) -> tuple[str, ...]:
    """What the tokenizer's chat template writes before, between and after the messages.

    The template is rendered once with markers in place of the texts, and what it returns is cut
    at the markers; texts are put between the parts later, as tokens, and never pass through the
    template. Thinking is switched off where a template has that switch.

    Args:
        tokenizer: one with a chat template.
        system: whether the conversation has a system message before the user's.

    Returns:
        (before, after) or, with a system message, (before, between, after); the last part ends
        with the header of the reply to generate.

    Raises:
        ValueError: the template fails, passes its limits, or does not show each text once.
    """
    template = str(tokenizer.get_chat_template())
    # A marker must not be in the template already; letters only, so that no filter changes it.
    markers = list(_MARKERS if system else _MARKERS[1:])
    while any(marker in template for marker in markers):
        markers = [marker + "x" for marker in markers]
    roles = ("system", "user") if system else ("user",)
    messages = [
        {"role": role, "content": marker} for role, marker in zip(roles, markers, strict=True)
    ]
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    request = {
        "messages": messages,
        "template": template,
        "variables": {**special, "enable_thinking": False},
    }
    text = render_template(json.dumps(request, sort_keys=True))
    return _cut(text, markers, roles)


def _cut(text: str, markers: list[str], roles: tuple[str, ...]) -> tuple[str, ...]:
    parts = []
    for marker, role in zip(markers, roles, strict=True):
        if text.count(marker) != 1:
            raise ValueError(
                "the model's chat template cannot be used: it shows the "
                f"{role} message {text.count(marker)} times instead of once"
            )
        before, text = text.split(marker)
        parts.append(before)
    return (*parts, text)


@lru_cache(maxsize=32)
def render_template(request: str) -> str:
    """The text of a chat template; `request` is JSON with template, messages and variables.

    Raises:
        ValueError: the template fails or passes its limits; the text says which.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(Path(template_process.__file__))],
            input=json.dumps({**json.loads(request), "path": sys.path}),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=_PARENT_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _unusable(f"no reply within {_PARENT_TIMEOUT:.0f} s") from None
    if done.returncode == -getattr(signal, "SIGALRM", 0) != 0:
        raise _unusable(f"it runs longer than {template_process.MAX_SECONDS} s")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise _unusable(f"its process failed: {last[0]}")
    reply = json.loads(done.stdout)
    if "error" in reply:
        raise _unusable(str(reply["error"]))
    return str(reply["text"])


def _unusable(reason: str) -> ValueError:
    return ValueError(f"the model's chat template cannot be used: {reason}")
