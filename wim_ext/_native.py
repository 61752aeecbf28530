"""Loads the native libraries that stand beside this file, or says what is wrong with them.

Everything in the package that needs C++ gets it from here: `PageTable` (pybind11) and, as a side
effect of the import, the `torch.ops.wim_ext` namespace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from wim_ext import __version__
from wim_ext._source import source_digest

if TYPE_CHECKING:
    from wim_ext import _C

__all__ = ["CUDA_STATUS", "PageTable"]

_HERE = Path(__file__).resolve().parent
_CHECKOUT = _HERE.parent / "csrc"  # not there in an installed package
_REBUILD = (
    "rebuild it with `pip install --no-build-isolation -e .` in a checkout, "
    "or install wim_ext again with `pip install --force-reinstall --no-deps`"
)


def _load_page_table() -> type[_C.PageTable]:
    try:
        from wim_ext import _C
    except ImportError as error:
        built = ", ".join(sorted(p.name for p in _HERE.glob("_C.*so"))) or "none"
        hint = (
            f"{_HERE.parent} is a source folder, which hides an installed wim_ext: run Python "
            "from another folder, or "
            if _CHECKOUT.is_dir()
            else ""
        )
        raise ImportError(
            f"wim_ext's native module _C cannot be loaded by Python {sys.version.split()[0]} "
            f"(built here: {built}; {error}); {hint}{_REBUILD}"
        ) from error
    _check_version("_C", _C.version)
    _check_sources(_C.source_digest)
    return _C.PageTable


def _check_sources(built_from: str) -> None:
    if _CHECKOUT.is_dir() and built_from != source_digest(_CHECKOUT):
        raise ImportError(
            f"wim_ext's libraries were built before the last change in {_CHECKOUT}; {_REBUILD}"
        )


def _check_version(library: str, found: str) -> None:
    if found != __version__:
        raise ImportError(
            f"wim_ext's {library} was built from version {found}, the Python files are "
            f"{__version__}; {_REBUILD}"
        )


def _load_ops(name: str) -> None:
    path = _HERE / f"{name}.so"
    if not path.is_file():
        raise ImportError(f"wim_ext's op library {path} is missing; {_REBUILD}")
    load: Callable[[Path], None] = torch.ops.load_library
    try:
        load(path)
    except (OSError, RuntimeError) as error:
        raise ImportError(
            f"wim_ext's op library {path.name} does not load into torch {torch.__version__} "
            f"({error}); it needs torch >= 2.10, and {_REBUILD}"
        ) from error


def _load_cuda_ops() -> str:
    """Loads the CUDA library where it can run; returns in words what was done and why."""
    if not (_HERE / "_ops_cuda.so").is_file():
        return "not built (WIM_CUDA=on builds it where nvcc is found)"
    if torch.version.cuda is None:
        return f"built, not loaded: torch {torch.__version__} has no CUDA"
    _load_ops("_ops_cuda")
    return "loaded"


PageTable = _load_page_table()
_load_ops("_ops_cpu")
CUDA_STATUS = _load_cuda_ops()
