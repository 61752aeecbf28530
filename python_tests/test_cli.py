"""The `wim` command: options, streams, JSON, exit codes, signals, a real terminal.

Most tests put a fake engine under the real command; test_demo.py runs the real one end to end.
"""

from __future__ import annotations

import fcntl
import inspect
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from typer.testing import CliRunner

from wim_ext import __version__, answering
from wim_ext.answering import Request
from wim_ext.cli import app
from wim_ext.errors import CacheFull, ContextTooLong, ModelNotSupported

TEXT = "The harbour opened in 1871.\nNothing else of note happened here today.\n" * 3
QUESTION = ("--question", "When was the harbour opened?")
FAKE_COMMAND = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(
        answering, "open_engine", lambda request, note: note("Model: fake") or engine
    )
    monkeypatch.delenv("WIM_DEBUG", raising=False)
    return engine


@pytest.fixture
def town(tmp_path: Path) -> str:
    (tmp_path / "town.md").write_text(TEXT)
    return str(tmp_path / "town.md")


def invoke(*args: str, stdin: bytes | None = None) -> Any:
    return CliRunner().invoke(app, list(args), input=stdin)


def environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    return {**kept, "PYTHONUNBUFFERED": "1", "TERM": "xterm-256color", **changes}


def start(*args: str, delay: float = 0.0, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*FAKE_COMMAND, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(FAKE_DELAY=str(delay)),
        **options,
    )


def read_until(stream: Any, text: str) -> str:
    """Lines of `stream` until one holds `text`: the run is then known to be there."""
    seen = ""
    for line in stream:
        seen += line
        if text in line:
            break
    return seen


def test_version_and_help() -> None:
    assert invoke("--version").output == f"wim_ext {__version__}\n"
    for args in (["--help"], ["-h"], ["answer", "--help"], ["demo", "--help"], ["info", "--help"]):
        assert invoke(*args).exit_code == 0
    assert "Answer a question" in invoke("answer", "--help").output
    assert invoke().exit_code == 2


@pytest.mark.smoke
def test_help_is_fast_and_loads_nothing_heavy() -> None:
    script = (
        "import sys; sys.argv = ['wim', '--help']\n"
        "import wim_ext.cli\n"
        "try: wim_ext.cli.main()\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
    assert time.perf_counter() - begin < 5  # about 0.5 s; a loaded machine may take its time


def test_answer_on_stdout_and_the_rest_on_stderr(engine: FakeEngine, town: str) -> None:
    done = invoke("answer", town, *QUESTION)
    assert done.exit_code == 0
    assert done.stdout == "Read 4 of 4 segments.\n"
    assert done.stderr.startswith("Loading the built-in model ...\nModel: fake\n")
    assert f"+ {town}, lines 1–2 (28%): Speaks of harbour" in done.stderr
    assert "3 of 4 margins relevant" in done.stderr
    assert engine.asked == [(TEXT, QUESTION[1])]
    assert engine.closed


def test_quiet(engine: FakeEngine, town: str) -> None:
    done = invoke("answer", town, *QUESTION, "--quiet")
    assert (done.stdout, done.stderr) == ("Read 4 of 4 segments.\n", "")


def test_standard_input_and_several_documents(engine: FakeEngine, town: str) -> None:
    done = invoke("answer", town, "-", *QUESTION, "--json", stdin=b"The harbour closed.")
    result = json.loads(done.stdout)
    assert [d["name"] for d in result["documents"]] == [town, "standard input"]
    assert result["margins"][-1]["sources"][-1]["document"] == "standard input"
    assert "Document: standard input\n" in engine.asked[0][0]


def test_json(engine: FakeEngine, town: str) -> None:
    done = invoke("answer", town, *QUESTION, "--json", "--seed", "7")
    assert done.stderr == ""
    result = json.loads(done.stdout)
    assert set(result) == {
        *("answer", "stop_reason", "stopped_early", "margins", "documents", "stats"),
        *("request", "versions"),
    }
    assert result["answer"] == "Read 4 of 4 segments."
    margin = result["margins"][0]
    assert TEXT[slice(*margin["span"])].strip() in margin["text"]
    assert margin["sources"] == [
        {"document": town, "span": margin["span"], "unit": "line", "first": 1, "last": 2}
    ]
    assert result["documents"] == [
        {"name": town, "span": [0, len(TEXT)], "unit": "line", "units": 6}
    ]
    assert result["stats"]["total_tokens"] == sum(result["stats"]["tokens"].values()) == 53
    assert result["request"]["seed"] == 7
    assert result["versions"]["wim_ext"] == __version__


def test_json_is_ascii_whatever_the_document_holds(engine: FakeEngine, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("harbour \x1b[31m ünï 文")
    done = invoke("answer", str(tmp_path / "a.txt"), *QUESTION, "--json")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout
    assert "\x1b[31m ünï 文" in json.loads(done.stdout)["margins"][0]["text"]


def test_json_lines(engine: FakeEngine, town: str) -> None:
    done = invoke("answer", town, *QUESTION, "--json-lines")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [event["event"] for event in events]
    assert kinds[:4] == ["reading_started", "progress", "segment_read", "margin_written"]
    assert kinds[-1] == "finished"
    assert kinds.count("margin_written") == 4
    assert events[3]["margin"]["sources"][0]["document"] == town
    assert (
        "".join(e["text"] for e in events if e["event"] == "answer_token")
        == (events[-1]["result"]["answer"])
    )


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch, town: str) -> None:
    seen: list[Request] = []

    def open_engine(request: Request, note: object) -> FakeEngine:
        seen.append(request)
        return FakeEngine()

    monkeypatch.setattr(answering, "open_engine", open_engine)
    options = (
        "--model m --segment-tokens 5 --max-margin-tokens 6 --max-answer-tokens 7 "
        "--relevance logit --use margins --dtype bfloat16 --device cuda:1 "
        "--seed 8 --temperature 0.5 --threads 2"
    )
    invoke("answer", town, "-q", "why?", *options.split())
    invoke("answer", town, "-q", "why?")
    assert seen[0] == Request(
        question="why?",
        model="m",
        segment_tokens=5,
        max_margin_tokens=6,
        max_answer_tokens=7,
        relevance="logit",
        use="margins",
        dtype="bfloat16",
        device="cuda:1",
        seed=8,
        temperature=0.5,
        threads=2,
    )
    assert seen[1] == Request(question="why?")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--relevance", "maybe"], "'maybe' is not one of 'auto', 'fused', 'separate', 'logit'"),
        (["--use", "all"], "'all' is not one of 'context+margins', 'margins', 'context'"),
        (["--dtype", "int8"], "'int8' is not one of"),
        (["--segment-tokens", "0"], "--segment-tokens"),
        (["--temperature", "-1"], "--temperature"),
        (["--threads", "0"], "--threads"),
        (["--sgement-tokens", "5"], "No such option: --sgement-tokens"),
    ],
)
def test_bad_options(engine: FakeEngine, town: str, args: list[str], message: str) -> None:
    done = invoke("answer", town, *QUESTION, *args)
    assert done.exit_code == 2
    assert message in re.sub(r"[\s│]+", " ", done.stderr)
    assert not engine.asked


def test_question_is_needed(engine: FakeEngine, town: str) -> None:
    assert invoke("answer", town).exit_code == 2
    done = invoke("answer", town, "-q", "  ")
    assert (done.exit_code, done.stderr) == (2, "error: --question is empty\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            ContextTooLong("9,000 tokens are needed, the model can attend to 8,192", 9000, 8192),
            2,
            "error: 9,000 tokens are needed, the model can attend to 8,192; "
            "take a shorter document, or with --model one that reads more",
        ),
        (ModelNotSupported("t5 is an\nencoder-decoder"), 2, "error: t5 is an encoder-decoder"),
        (
            CacheFull(9, 1, 8),
            1,
            "error: " + str(CacheFull(9, 1, 8)) + "; the document needs more memory than there is",
        ),
        (OSError("no model 'x'"), 1, "error: no model 'x'"),
        (ImportError("wim_ext's _C is stale"), 1, "error: wim_ext's _C is stale"),
        (ValueError("\x1b[31mfake"), 2, "error: [31mfake"),
        (MemoryError(), 1, "error: MemoryError"),
    ],
)
def test_known_errors_are_one_line(
    engine: FakeEngine, town: str, error: Exception, code: int, line: str
) -> None:
    engine.fail = error
    done = invoke("answer", town, *QUESTION, "--quiet")
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", line + "\n")


def test_errors_for_machines(engine: FakeEngine, town: str) -> None:
    engine.fail = ContextTooLong("too long", needed=9, limit=8)
    done = invoke("answer", town, *QUESTION, "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout) == {
        "error": {"type": "ContextTooLong", "message": "too long", "needed": 9, "limit": 8}
    }


def test_document_errors_come_before_any_model(engine: FakeEngine, tmp_path: Path) -> None:
    done = invoke("answer", str(tmp_path / "none.md"), *QUESTION)
    assert (done.exit_code, done.stderr) == (2, f"error: {tmp_path}/none.md: no such file\n")
    assert invoke("answer", "-", "-", *QUESTION).exit_code == 2
    assert not engine.asked


def test_debug_lets_errors_through(
    engine: FakeEngine, town: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIM_DEBUG", "1")
    engine.fail = ValueError("inside")
    assert isinstance(invoke("answer", town, *QUESTION).exception, ValueError)


def test_faults_of_ours_keep_their_traceback(engine: FakeEngine, town: str) -> None:
    engine.fail = TypeError("a bug")
    assert isinstance(invoke("answer", town, *QUESTION).exception, TypeError)


def test_warnings_are_notes(engine: FakeEngine, town: str) -> None:
    import warnings

    def warn(event: object) -> None:
        warnings.warn("slower path", stacklevel=1)
        warnings.warn("an argument will go", FutureWarning, stacklevel=1)

    engine.on_event = warn
    done = invoke("answer", town, *QUESTION)
    assert "note: slower path\n" in done.stderr
    assert "UserWarning" not in done.stderr
    assert "an argument will go" not in done.stderr


def test_defaults_are_those_of_the_library() -> None:
    margins = pytest.importorskip("wim_ext.margins")
    library = inspect.signature(margins.WritingInTheMargins.__init__).parameters
    request = Request(question="")
    for name in ("segment_tokens", "max_margin_tokens", "max_answer_tokens", "relevance", "use"):
        assert library[name].default == getattr(request, name), name


def test_pipe(town: str) -> None:
    process = start("answer", town, *QUESTION)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "Read 4 of 4 segments.\n")
    assert "\x1b" not in err


def test_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wim_ext", "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"wim_ext {__version__}\n"


def test_reader_that_goes_away(town: str) -> None:
    process = start("answer", town, *QUESTION, "--json-lines", delay=0.2)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_ctrl_c_once_answers_from_what_was_read(town: str) -> None:
    process = start("answer", town, *QUESTION, delay=0.3)
    read_until(process.stderr, "+ ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert re.fullmatch(r"Read [123] of 4 segments\.\n", out)
    assert "stopping: answering from what was read so far" in err
    assert "segments read ·" in err


def test_ctrl_c_twice_ends_it(town: str) -> None:
    process = start("answer", town, *QUESTION, delay=0.5)
    read_until(process.stderr, "+ ")
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err


def test_termination(town: str) -> None:
    process = start("answer", town, *QUESTION, "--json-lines", delay=0.3)
    read_until(process.stdout, "reading_started")
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (143, "")


def on_terminal(
    command: list[str],
    act: Callable[[subprocess.Popen[bytes], str], None] = lambda process, screen: None,
    columns: int = 80,
    **variables: str,
) -> tuple[int, str]:
    """Runs `command` on a pseudo-terminal; returns its exit code and all that it wrote."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(**variables),
        close_fds=True,
    )
    os.close(slave)
    screen = b""
    while True:
        try:
            data = os.read(master, 65536)
        except OSError:  # Linux: the other side has closed
            break
        if not data:
            break
        screen += data
        act(process, screen.decode(errors="replace"))
    os.close(master)
    return process.wait(20), screen.decode()


def test_live_display_on_a_terminal(town: str) -> None:
    code, screen = on_terminal([*FAKE_COMMAND, "answer", town, *QUESTION], FAKE_DELAY="0.15")
    assert code == 0
    assert "\x1b[?25l" in screen
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen)
    assert "━" in shown
    assert "margin for segment 2 of 4" in shown
    assert "┃ Speaks of harbour opened" in shown
    assert "Answer\r\nRead 4 of 4 segments.\r\n" in shown


def test_no_color_on_a_terminal(town: str) -> None:
    _, screen = on_terminal([*FAKE_COMMAND, "answer", town, *QUESTION], NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", screen)
    _, screen = on_terminal([*FAKE_COMMAND, "answer", "/none", *QUESTION], NO_COLOR="1")
    assert screen == "error: /none: no such file\r\n"
    _, screen = on_terminal([*FAKE_COMMAND, "answer", "/none", *QUESTION])
    assert screen.startswith("\x1b[31merror: /none: no such file")


def test_ctrl_c_on_a_terminal_restores_it(town: str) -> None:
    pressed: list[int] = []

    def press(process: subprocess.Popen[bytes], screen: str) -> None:
        if len(pressed) < 2 and "┃" in screen and ("stopping" in screen or not pressed):
            pressed.append(1)
            process.send_signal(signal.SIGINT)

    code, screen = on_terminal([*FAKE_COMMAND, "answer", town, *QUESTION], press, FAKE_DELAY="0.6")
    assert code == 130
    assert "stopping, answering from what was read" in screen
    assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l")
    assert screen.endswith("interrupted\r\n")
