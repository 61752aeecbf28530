"""What the README and docs/ print runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
MAKE_TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def blocks(language: str) -> list[str]:
    return [
        block
        for page in PAGES
        for block in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)
    ]


PYTHON = blocks("python")


def test_there_is_something_to_run() -> None:
    assert len(PYTHON) >= 2
    assert any("make demo" in block for block in blocks("bash"))


@pytest.mark.parametrize("code", PYTHON, ids=range(len(PYTHON)))
def test_python_blocks_run(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    if "print(" in code:
        assert "->" in result.stdout


def test_make_targets_exist() -> None:
    named = {name for block in blocks("bash") for name in re.findall(r"make ([a-z]+)", block)}
    assert named
    assert named <= MAKE_TARGETS


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


FOLDERS = ("wim_ext", "csrc", "python_tests", "benchmarks")
FILES = [f"/{p.relative_to(ROOT)}" for folder in FOLDERS for p in (ROOT / folder).rglob("*.*")]


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "benchmarks" / "README.md"], ids=lambda p: p.parent.name
)
def test_files_that_are_named_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w/]+\.(?:py|h|cpp|cuh|cu|json))`", page.read_text()))
    missing = {name for name in named if not any(path.endswith(f"/{name}") for path in FILES)}
    assert not missing, f"{page.name} names files that are not there"


def test_environment_variables_are_listed_where_contributors_look() -> None:
    listed = set(re.findall(r"`((?:WIM|MAX)_[A-Z_]+)`", (ROOT / "CONTRIBUTING.md").read_text()))
    used = set()
    for path in [ROOT / "setup.py", *(ROOT / "wim_ext").glob("*.py")]:
        used |= set(re.findall(r"environ[^\n]*[\"'](WIM_[A-Z_]+)[\"']", path.read_text()))
    assert used
    assert used <= listed
