"""How the house is kept: sizes, tests per line of source, documented names, light imports."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.smoke

PYTHON = sorted((ROOT / "wim_ext").rglob("*.py"))
CPP = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})
TESTS = sorted((ROOT / "python_tests").rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.mark.parametrize("path", PYTHON + CPP + TESTS + BENCHMARKS, ids=lambda p: p.name)
def test_no_file_has_taken_on_a_second_job(path: Path) -> None:
    assert lines(path) <= 450, "what second job has this file taken on?"


def test_half_of_the_files_are_small() -> None:
    sizes = [lines(p) for p in PYTHON + CPP]
    assert statistics.median(sizes) <= 150


def test_a_line_of_test_for_each_line_of_source() -> None:
    source, tests = sum(map(lines, PYTHON + CPP)), sum(map(lines, TESTS))
    assert tests >= source, f"{tests} lines of tests for {source} lines of source"


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: p.stem)
def test_public_names_are_documented(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.name not in {"__init__.py", "__main__.py"}:
        assert ast.get_docstring(tree), f"{path.name} says nothing of its job"
    for node in tree.body:
        if "overload" in map(ast.unparse, getattr(node, "decorator_list", ())):
            continue  # the implementation has it
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} has no docstring"


def exported_names(module: str) -> set[str]:
    for node in ast.parse((ROOT / "wim_ext" / f"{module}.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: p.stem)
def test_what_a_module_lends_to_others_is_in_its_all(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wim_ext."):
            module = str(node.module).removeprefix("wim_ext.")
            if module == "_C":
                continue
            hidden = {alias.name for alias in node.names} - exported_names(module)
            assert not hidden, f"{path.name} takes {hidden} from {module}, not in its __all__"


@pytest.mark.parametrize("path", PYTHON, ids=lambda p: p.stem)
def test_no_assert_guards_a_users_input(path: Path) -> None:
    """`assert` vanishes under -O and says nothing; typed exceptions do neither."""
    asserts = [n.lineno for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Assert)]
    assert not asserts, f"{path.name}: assert in lines {asserts}"


@pytest.mark.parametrize("path", CPP, ids=lambda p: p.name)
def test_cpp_never_ends_the_process(path: Path) -> None:
    found = re.findall(r"\b(?:abort|exit|_exit|assert|terminate)\s*\(", path.read_text())
    assert not found, f"{path.name}: {found}"


@pytest.mark.parametrize("path", PYTHON + CPP + TESTS + BENCHMARKS, ids=lambda p: p.name)
def test_nothing_is_left_for_later(path: Path) -> None:
    if path == Path(__file__).resolve():
        return
    left = re.findall(r"\b(?:TODO|FIXME|XXX|HACK)\b", path.read_text())
    assert not left, f"{path.name}: {left}"


def test_every_op_stands_in_four_places() -> None:
    """ops.py, reference.py, a test file, the schemas; plan_attention needs no plain-torch twin."""
    schemas = "".join(p.read_text() for p in (ROOT / "csrc").glob("torch_*.cpp"))
    for op in ("append_kv", "copy_pages", "merge_states", "paged_attention", "plan_attention"):
        assert f"{op}(Tensor" in schemas, f"{op} has no schema"
        assert f"def {op}(" in (ROOT / "wim_ext" / "ops.py").read_text()
        if op != "plan_attention":
            assert f"def {op}(" in (ROOT / "wim_ext" / "reference.py").read_text()
        tests = {"paged_attention": "attention", "plan_attention": "plan"}.get(op, op)
        assert (ROOT / "python_tests" / f"test_{tests}.py").is_file()


def modules_loaded_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    return {name.split(".")[0] for name in result.stdout.split()}


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert not modules_loaded_by("import wim_ext") & {"torch", "transformers", "numpy", "rich"}


def test_the_cache_and_the_ops_do_not_need_transformers() -> None:
    loaded = modules_loaded_by("from wim_ext import PagedKVCache, paged_attention")
    assert "torch" in loaded
    assert not loaded & {"transformers", "typer", "rich"}


def test_every_public_name_resolves_and_others_do_not() -> None:
    import wim_ext

    for name in wim_ext.__all__:
        assert getattr(wim_ext, name) is not None
    assert set(wim_ext.__all__) <= set(dir(wim_ext))
    with pytest.raises(AttributeError, match="module 'wim_ext' has no attribute 'forks'"):
        _ = wim_ext.forks
