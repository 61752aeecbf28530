"""The house's floors: imports and includes go down only. Parsed, so lazy imports count too."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Bottom first. A module may import from its own floor and from those under it.
FLOORS: list[set[str]] = [
    {"errors"},
    {"_source", "_native", "_C", "reference"},
    {"op_errors", "op_fakes", "plan"},
    {"ops"},
    {"storage", "sequence", "batch", "cache"},
    {
        "work",
        "rope",
        "borrow",
        "guards",
        "history",
        "fallback",
        "attention",
        "model",
        "conversion",
        "loading",
    },
    {"events", "sampling", "tokens", "generation", "engine"},
    {"template_process", "chat_template", "segments", "prompts", "stopping"},
    {"session", "streaming", "document", "effort", "verdicts", "relevance", "room", "run"},
    {"margins"},
    {
        "terminal",
        "progress",
        "interrupt",
        "document_formats",
        "document_files",
        "info",
        "console",
        "answering",
        "demo",
        "cli",
    },
    {"__init__", "__main__"},
]
FLOOR = {name: i for i, names in enumerate(FLOORS) for name in names}
MODULES = sorted((ROOT / "wim_ext").glob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Modules of wim_ext that a file imports at run time (TYPE_CHECKING blocks are left out)."""
    tree = ast.parse(path.read_text())
    typing_only: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            typing_only.update(n for child in node.body for n in ast.walk(child))
    found = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "wim_ext":
            parts = (node.module or "").split(".")
            found.update([parts[1]] if len(parts) > 1 else [a.name for a in node.names])
        elif isinstance(node, ast.Import):
            found.update(a.name.split(".")[1] for a in node.names if a.name.startswith("wim_ext."))
    return found & FLOOR.keys()


def includes_of(path: Path) -> set[str]:
    return set(re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE))


@pytest.mark.smoke
@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_python_imports_go_down(path: Path) -> None:
    assert path.stem in FLOOR, f"{path.name} stands on no floor: add it to FLOORS"
    upward = {name for name in imports_of(path) if FLOOR[name] > FLOOR[path.stem]}
    assert not upward, f"{path.name} imports from a floor above its own: {sorted(upward)}"


@pytest.mark.smoke
def test_python_imports_have_no_cycle() -> None:
    graph = {path.stem: imports_of(path) for path in MODULES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, f"import cycle: {' -> '.join((*above, name))}"
        if name not in done:
            for imported in graph.get(name, set()):
                visit(imported, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.smoke
def test_the_reference_is_only_an_oracle() -> None:
    users = [p.name for p in MODULES if p.stem != "reference" and "reference" in imports_of(p)]
    assert not users, f"the slow reference must not be a fallback of the package: {users}"


CPP = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})


@pytest.mark.smoke
@pytest.mark.parametrize("path", CPP, ids=lambda p: str(p.relative_to(ROOT / "csrc")))
def test_cpp_includes(path: Path) -> None:
    """torch only in torch_*, pybind11 only in bindings.cpp; cpu/ and cuda/ are strangers."""
    where = path.relative_to(ROOT / "csrc").as_posix()
    for include in includes_of(path):
        if include.startswith(("torch/", "ATen/", "c10/")):
            assert where.startswith("torch_"), f"{where} includes {include}"
        if include.startswith("pybind11/"):
            assert where == "bindings.cpp", f"{where} includes {include}"
        if where.startswith("cpu/"):
            assert not include.startswith(("cuda", "../cuda", "torch")), f"{where}: {include}"
        if where.startswith("cuda/"):
            assert not include.startswith(("cpu/", "../cpu")), f"{where}: {include}"
        if where.startswith(("page_table", "plan")):
            assert not include.startswith(("cpu/", "cuda/")), f"{where}: {include}"
