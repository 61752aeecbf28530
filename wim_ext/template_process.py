"""The process that renders a chat template. `chat_template` runs this file as a script.

A chat template is a program that came with a model file. It runs in the sandbox of transformers,
and in a process of its own, because inside one process nothing can stop `9**9**9` or a string of
a terabyte. The request is JSON on stdin, the reply JSON on stdout: {"text"} or {"error"}.
"""

import json
import sys
from typing import Any

MAX_CHARACTERS = 65_536
MAX_SECONDS = 5
MAX_BYTES = 4 << 30


def limit_resources() -> None:
    """Time and memory from here on; the signal's default action ends even a loop in C."""
    try:
        import resource
        import signal
    except ImportError:  # not on Windows: there the parent's timeout is the only limit
        return
    signal.alarm(MAX_SECONDS)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = MAX_BYTES if hard == resource.RLIM_INFINITY else min(MAX_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def render(request: dict[str, Any]) -> str:
    """The text that the template makes of the request; ValueError if it is too long."""
    from transformers.utils.chat_template_utils import render_jinja_template

    limit_resources()
    rendered = render_jinja_template(
        conversations=[request["messages"]],
        chat_template=request["template"],
        add_generation_prompt=True,
        **request["variables"],
    )
    # A list of texts; newer versions return it beside the positions of generated ones.
    text = rendered[0][0] if isinstance(rendered, tuple) else rendered[0]
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it returns {len(text)} characters; allowed are {MAX_CHARACTERS}")
    return str(text)


def main() -> None:
    """Reads the request, writes the reply."""
    request = json.load(sys.stdin)
    # The parent started this with -I; the packages are where the parent found them.
    sys.path[:] = request["path"]
    try:
        reply = {"text": render(request)}
    except MemoryError:
        reply = {"error": f"it needs more than {MAX_BYTES >> 30} GiB of memory"}
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}"[:500]}
    json.dump(reply, sys.stdout)


if __name__ == "__main__":
    main()
