"""The displays: quiet, plain lines, and the live one on a terminal of several widths."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from rich.console import Console

from wim_ext.console import (
    Display,
    LiveDisplay,
    PlainDisplay,
    QuietDisplay,
    choose_display,
    dropped_text,
    numbers,
    place_of,
)
from wim_ext.document_files import SourceFile, Sources, join_documents
from wim_ext.document_formats import DocumentText
from wim_ext.events import (
    AnswerToken,
    Margin,
    MarginWritten,
    Progress,
    ReadingStarted,
    Result,
    SegmentRead,
    Stats,
)
from wim_ext.progress import ProgressLine
from wim_ext.segments import Context

TEXT = "The harbour opened in 1871.\nNothing else of note happened here today.\n" * 3
QUESTION = "When was the harbour opened?"


def sources(text: str = TEXT, name: str = "town.md") -> Sources:
    starts = (0, *(m.end() for m in re.finditer("\n", text[:-1])))
    return Sources(Context(text), (SourceFile(name, (0, len(text)), "line", starts),))


def play(display: Display, engine: FakeEngine, text: str = TEXT) -> None:
    with display:
        for event in engine.stream(text, QUESTION):
            display.show(event)


def live(width: int, **options: object) -> tuple[LiveDisplay, io.StringIO]:
    """A live display whose answer and margins land in one stream, as on a terminal."""
    screen = io.StringIO()
    console = Console(
        file=screen, force_terminal=True, width=width, height=24, color_system="standard"
    )
    return LiveDisplay(screen, console, sources(), lambda: False, **options), screen  # type: ignore[arg-type]


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def test_quiet_prints_the_answer_only() -> None:
    out = io.StringIO()
    display = QuietDisplay(out)
    display.note("unseen")
    play(display, FakeEngine())
    assert out.getvalue() == "Read 4 of 4 segments.\n"


def test_plain_lines() -> None:
    out, err = io.StringIO(), io.StringIO()
    display = PlainDisplay(out, err, sources(), lambda: False)
    display.note("Loading\nthe model")
    play(display, FakeEngine())
    assert out.getvalue() == "Read 4 of 4 segments.\n"
    lines = err.getvalue().splitlines()
    assert lines[:2] == ["Loading the model", "Reading town.md: 36 tokens in 4 segments"]
    assert lines[2].startswith("+ town.md, lines 1–2 (28%): Speaks of harbour opened: The harbour")
    assert len(lines) == 7
    assert "\x1b" not in err.getvalue()


def test_plain_display_tells_that_it_stops_once() -> None:
    err = io.StringIO()
    play(PlainDisplay(io.StringIO(), err, sources(), lambda: True), FakeEngine())
    assert err.getvalue().count("stopping: answering from what was read so far\n") == 1


def test_dropped_margins_are_marked() -> None:
    err = io.StringIO()
    play(PlainDisplay(io.StringIO(), err, sources(), lambda: False), FakeEngine(segment_words=5))
    assert "- town.md, line 2 (" in err.getvalue()
    assert "nothing relevant" in err.getvalue()
    assert dropped_text("x" * 80) == f"not relevant: {'x' * 59}…"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_live_display_keeps_to_the_width(width: int) -> None:
    display, screen = live(width)
    play(display, FakeEngine())
    text = without_codes(screen.getvalue())
    for line in re.split(r"[\r\n]+", text):
        assert len(line.rstrip()) <= width
    assert "┃ " in text
    words = " ".join(text.split())
    order = [words.index(shown) for shown in ("Reading", "┃", "Answer Read", "3 of 4 margins")]
    assert order == sorted(order)


def test_live_display_gathers_dropped_margins_in_one_line() -> None:
    display, screen = live(80)
    play(display, FakeEngine(segment_words=2))
    before_answer = without_codes(screen.getvalue()).split("\nAnswer")[0]
    assert "· town.md, lines 1–2 (33%): nothing relevant in 4 segments\n" in before_answer
    assert before_answer.count("┃ Speaks of") == 6


def test_live_display_restores_the_cursor_after_an_error() -> None:
    display, screen = live(80)
    engine = FakeEngine()

    def fail(event: object) -> None:
        if isinstance(event, MarginWritten):
            raise KeyboardInterrupt

    engine.on_event = fail
    with pytest.raises(KeyboardInterrupt):
        play(display, engine)
    codes = screen.getvalue()
    assert codes.count("\x1b[?25l") == 1
    assert codes.rindex("\x1b[?25h") > codes.rindex("\x1b[?25l")


def test_live_progress_is_gone_before_the_answer_begins() -> None:
    display, screen = live(80)
    play(display, FakeEngine())
    before, after = screen.getvalue().split("Answer", 1)
    assert "\x1b[?25h" in before
    assert "\x1b[?25" not in after
    assert without_codes(after).split("\n")[1] == "Read 4 of 4 segments."


def test_live_display_beside_a_redirected_answer() -> None:
    out, screen = io.StringIO(), io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, color_system=None)
    play(LiveDisplay(out, console, sources(), lambda: False, shared=False), FakeEngine())
    assert out.getvalue() == "Read 4 of 4 segments.\n"
    assert "\nAnswer\n" not in without_codes(screen.getvalue())


def test_nothing_from_a_document_or_a_model_acts_on_the_terminal() -> None:
    attack = "harbour \x1b]0;pwned\x07 \x9b2J [bold red]:smile: \u202egpj\n"
    out, err = io.StringIO(), io.StringIO()
    evil = sources(attack, "a\x1b[2J\n.md")
    play(PlainDisplay(out, err, evil, lambda: False), FakeEngine(answer_prefix=attack), attack)
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system="standard")
    play(
        LiveDisplay(screen, console, evil, lambda: False), FakeEngine(answer_prefix=attack), attack
    )
    for text in (out.getvalue() + err.getvalue(), without_codes(screen.getvalue())):
        assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]", text)
        assert "[bold red]:smile:" in text


def test_long_answers_break_between_words_on_the_terminal() -> None:
    display, screen = live(30)
    play(display, FakeEngine(answer_prefix="word " * 20))
    answer = without_codes(screen.getvalue()).split("Answer\n")[1].split("\n\n")[0]
    assert max(map(len, answer.split("\n"))) <= 30
    assert answer.split() == ["word"] * 20 + ["Read", "4", "of", "4", "segments."]


def test_an_answer_that_breaks_off_ends_its_line() -> None:
    out = io.StringIO()
    with QuietDisplay(out) as display:
        display.show(AnswerToken("half an"))
    assert out.getvalue() == "half an\n"


def test_choice_of_display(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.delenv(variable, raising=False)

    def choice(err: io.StringIO, quiet: bool = False) -> type:
        return type(choose_display(io.StringIO(), err, sources(), lambda: False, quiet))

    assert choice(Terminal()) is LiveDisplay
    assert choice(Terminal(), quiet=True) is QuietDisplay
    assert choice(io.StringIO()) is PlainDisplay
    monkeypatch.setenv("TERM", "dumb")
    assert choice(Terminal()) is PlainDisplay


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    play(LiveDisplay(screen, console, sources(), lambda: False), FakeEngine())
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", screen.getvalue())


def test_place_of_a_margin() -> None:
    two = join_documents(
        ["a", "b.pdf"], [DocumentText("x", "line", (0,)), DocumentText("y", "page", (0,))]
    )
    assert place_of((0, len(two.text)), 0, two) == ("a, line 1 – b.pdf, page 1 (100%)")
    assert place_of((0, 5), 4, two) == "segment 5"


def test_numbers() -> None:
    stats = Stats(segments=4, segments_read=2, forwards=9)
    stats.tokens.update(document=6531, extraction_prompts=329, margins=64, answer=1)
    stats.seconds.update(document=30.0, answer=1.5)
    margins = [Margin("a", True, None, 0, (0, 1)), Margin("", False, None, 1, (1, 2))]
    assert numbers(Result("x", margins, stats, "end", True)) == (
        "1 of 2 margins relevant, 2 of 4 segments read · 31.5 s · 220 tokens/s · 6,925 tokens, "
        "none read twice (document 6,531, extraction prompts 329, margins 64, answer 1)"
    )
    assert "tokens/s" not in numbers(Result("x", [], Stats()))


def render(line: ProgressLine, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(line)
    return capture.get()


def test_progress_line_counts_work_and_says_the_phase() -> None:
    now = [100.0]
    stopping = [False]
    line = ProgressLine(lambda: stopping[0], lambda: now[0])
    line.update(ReadingStarted(6000, 3, 1.0))
    assert line.tokens_per_second is None
    assert "  0% reading segment 1 of 3 · 0:00" in render(line, 80)
    now[0] += 2.0
    line.update(Progress(0.25, 1000))
    assert line.tokens_per_second == 500.0
    assert " 25% reading segment 1 of 3 · 500 tokens/s · 0:02" in render(line, 80)
    line.update(SegmentRead(0, (0, 10), 1000, 0.26))
    assert "margin for segment 1 of 3" in render(line, 80)
    line.update(MarginWritten(Margin("", True, None, 0, (0, 10)), 0.3))
    assert " 30% reading segment 2 of 3" in render(line, 80)
    line.update(MarginWritten(Margin("", True, None, 2, (0, 10)), 1.0))
    assert "100% answering" in render(line, 80)
    line.update(AnswerToken("x"))
    now[0] += 60.0
    assert "answering · 500 tokens/s · 1:02" in render(line, 80)
    stopping[0] = True
    assert "stopping, answering from what was read" in render(line, 80)


def test_progress_rate_is_that_of_the_last_seconds() -> None:
    now = [0.0]
    line = ProgressLine(lambda: False, lambda: now[0])
    line.update(ReadingStarted(100_000, 3, 1.0))
    tokens = 0
    for rate in [1000] * 20 + [100] * 20:
        now[0] += 1.0
        tokens += rate
        line.update(Progress(0.5, tokens))
    assert line.tokens_per_second == 100.0


@pytest.mark.parametrize("width", [10, 25, 59, 300])
def test_progress_line_is_one_line(width: int) -> None:
    line = ProgressLine(lambda: False)
    line.update(ReadingStarted(6000, 300, 1.0))
    line.update(Progress(0.25, 1000))
    assert len(render(line, width).rstrip("\n").split("\n")) == 1
    assert len(render(line, width).rstrip("\n")) <= width


def test_example_of_the_fake(tmp_path: Path) -> None:
    """The double itself: stops when asked, closes when left."""
    engine = FakeEngine()
    stream = engine.stream(TEXT, QUESTION, lambda: True)
    assert isinstance(next(stream), ReadingStarted)
    stream.close()
    assert engine.closed
    *_, last = engine.stream(TEXT, QUESTION, lambda: True)
    assert last.result.stopped_early  # type: ignore[union-attr]
