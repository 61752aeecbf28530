"""The `wim` command: `wim answer`, `wim demo`, `wim info`.

Exit codes: 0 answered (also early, after one Ctrl-C); 1 the run failed; 2 the request cannot be
answered as it is (arguments, a document that cannot be read or is too long for the model);
130 interrupted; 141 the reader of the output went away; 143 terminated.

Everything heavy is imported inside the functions that need it: `wim --help` answers at once.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

import wim_ext
from wim_ext.errors import CacheFull, ContextTooLong

if TYPE_CHECKING:
    from wim_ext.answering import Request
    from wim_ext.document_files import Sources

__all__ = ["app", "main"]

FAILED, BAD_REQUEST, INTERRUPTED, OUTPUT_CLOSED = 1, 2, 130, 141

app = typer.Typer(
    help="Answer questions about long documents, with notes in the margins.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Relevance(str, Enum):
    """The named modes of `wim_ext.relevance`."""

    auto = "auto"
    fused = "fused"
    separate = "separate"
    logit = "logit"
    likelihood = "likelihood"


class Use(str, Enum):
    """What the answer sees."""

    both = "context+margins"
    margins = "margins"
    context = "context"


class DType(str, Enum):
    """What the model computes in."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Documents = Annotated[
    list[str],
    typer.Argument(metavar="DOCUMENT", help="Text, Markdown, PDF or HTML files; - is stdin."),
]
Question = Annotated[str, typer.Option("--question", "-q", help="What to ask.")]
Model = Annotated[
    str | None,
    typer.Option(
        help="Hub id, folder or .gguf file.", show_default="the built-in SmolLM2-135M-Instruct"
    ),
]
SegmentTokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens a segment: one margin for each.", show_default="1024; small models 400"
    ),
]
MarginTokens = Annotated[int, typer.Option(min=1, help="Longest margin, in tokens.")]
AnswerTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
RelevanceOption = Annotated[Relevance, typer.Option(help="How margins are judged.")]
UseOption = Annotated[Use, typer.Option(help="What the answer sees.")]
DTypeOption = Annotated[DType, typer.Option("--dtype", help="Numbers the model computes in.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")]
Seed = Annotated[int | None, typer.Option(min=0, help="For --temperature.", show_default="new")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the most probable token.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="all cores")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
JsonLines = Annotated[bool, typer.Option("--json-lines", help="One JSON object for every event.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print the answer only.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"wim_ext {wim_ext.__version__}")
        raise typer.Exit


@app.callback()
def _wim(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it, exit."),
    ] = False,
) -> None:
    pass


@app.command()
def answer(
    documents: Documents,
    question: Question,
    model: Model = None,
    segment_tokens: SegmentTokens = None,
    max_margin_tokens: MarginTokens = 64,
    max_answer_tokens: AnswerTokens = 256,
    relevance: RelevanceOption = Relevance.auto,
    use: UseOption = Use.both,
    dtype: DTypeOption = DType.auto,
    device: Device = "auto",
    seed: Seed = None,
    temperature: Temperature = 0.0,
    threads: Threads = None,
    as_json: Json = False,
    json_lines: JsonLines = False,
    quiet: Quiet = False,
) -> None:
    """Answer a question about one or several documents.

    The answer goes to standard output; margins, progress and numbers go to standard error.
    Ctrl-C once stops the reading and answers from what was read; twice ends the program.
    """
    from wim_ext.answering import Request

    with _errors_told(as_json or json_lines):
        from wim_ext.document_files import read_documents

        if not question.strip():
            raise ValueError("--question is empty")
        request = Request(
            question=question,
            model=model,
            segment_tokens=segment_tokens,
            max_margin_tokens=max_margin_tokens,
            max_answer_tokens=max_answer_tokens,
            relevance=relevance.value,
            use=use.value,
            dtype=dtype.value,
            device=device,
            seed=seed,
            temperature=temperature,
            threads=threads,
        )
        _run(read_documents(documents), request, as_json, json_lines, quiet)


@app.command()
def demo(
    model: Model = None,
    dtype: DTypeOption = DType.auto,
    device: Device = "auto",
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Answer a question about a long text that comes with Python."""
    with _errors_told(as_json):
        from wim_ext.demo import demo_request, demo_sources

        sources = demo_sources()
        request = demo_request(model=model, dtype=dtype.value, device=device, threads=threads)
        if not (as_json or quiet):
            pages = len(sources.files)
            typer.echo(f"Text: {pages} pages of Python's language reference, from help()", err=True)
            typer.echo(f"Question: {request.question}", err=True)
        _run(sources, request, as_json, False, quiet)


@app.command()
def info(as_json: Json = False) -> None:
    """Print versions, instruction sets, kernels, devices and settings."""
    with _errors_told(as_json):
        from wim_ext.info import collect, render

        facts = collect()
        typer.echo(json.dumps(facts, indent=2) if as_json else render(facts))


def _run(sources: Sources, request: Request, as_json: bool, json_lines: bool, quiet: bool) -> None:
    from wim_ext.answering import answer_as_json, answer_on
    from wim_ext.console import choose_display
    from wim_ext.interrupt import StopOnInterrupt

    stop = StopOnInterrupt()
    if as_json or json_lines:
        answer_as_json(sys.stdout, sources, request, stop, every_event=json_lines)
    else:
        display = choose_display(sys.stdout, sys.stderr, sources, stop, quiet)
        answer_on(display, sources, request, stop)


@contextmanager
def _errors_told(as_json: bool) -> Iterator[None]:
    """Turns what is known to go wrong into one line and an exit code; WIM_DEBUG=1 lets it through.

    Anything else is a fault of ours and keeps its traceback.
    """
    try:
        yield
    except BrokenPipeError:
        # Python flushes stdout once more on its way out, which would fail again, loudly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(OUTPUT_CLOSED) from None
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, MemoryError, ImportError, OSError) as error:
        if os.environ.get("WIM_DEBUG", "") not in ("", "0"):
            raise
        _tell(error, as_json)
        raise typer.Exit(BAD_REQUEST if isinstance(error, ValueError) else FAILED) from None


def _tell(error: Exception, as_json: bool) -> None:
    from wim_ext.terminal import one_line

    message = one_line(str(error)) or type(error).__name__
    advice = _advice(error)
    if as_json:
        found: dict[str, Any] = {"type": type(error).__name__, "message": message}
        found |= {key: value for key, value in vars(error).items() if isinstance(value, int)}
        typer.echo(json.dumps({"error": found}))
    line = f"error: {message}{'; ' + advice if advice else ''}"
    colour = not os.environ.get("NO_COLOR")
    typer.echo(typer.style(line, fg=typer.colors.RED) if colour else line, err=True)


def _advice(error: Exception) -> str:
    if isinstance(error, ContextTooLong):
        return "take a shorter document, or with --model one that reads more"
    if isinstance(error, CacheFull) and not error.can_ever_fit:
        return "the document needs more memory than there is"
    return ""


def main() -> None:
    """Entry of the `wim` script and of `python -m wim_ext`."""
    for stream in (sys.stdout, sys.stderr):
        # Characters outside the stream's encoding become "?" instead of ending the program.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app(prog_name="wim")
