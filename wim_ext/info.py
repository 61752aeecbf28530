"""What `wim info` prints: versions, instruction sets, kernels, devices, settings.

Every part is found out by itself, so that a broken installation still tells what is broken.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import wim_ext

__all__ = ["ENVIRONMENT", "collect", "render", "versions"]

# Every environment variable of the package, for the command, the documentation and the tests.
ENVIRONMENT = {
    "WIM_CACHE_DIR": "folder of converted models (default: the user's cache folder)",
    "WIM_CPU_ISA": "the CPU kernels to use, instead of the best that this CPU has",
    "WIM_CUDA": "build time: auto, on or off",
    "WIM_CUDA_ARCHS": "build time: GPU architectures",
    "WIM_DEBUG": "1: errors of the command keep their traceback, caches check their books",
    "WIM_TORCH_DIR": "build time: the torch package to build against",
}

# Of the many flags of an x86 CPU, those that a kernel of ours could ask for.
_INSTRUCTION_SETS = (
    "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_fp16 avx512_vnni avx_vnni "
    "amx_tile amx_bf16 amx_int8 asimd asimdhp bf16 sve sve2 i8mm"
)


def versions() -> dict[str, str | None]:
    """Versions of what a result depends on, without importing any of it."""
    found: dict[str, str | None] = {
        "wim_ext": wim_ext.__version__,
        "python": platform.python_version(),
    }
    for package in ("torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def collect() -> dict[str, Any]:
    """All facts, as plain values for JSON. Imports torch and the native libraries."""
    return {
        "versions": {**versions(), "compiler": _compiler()},
        "cpu": _attempt(_cpu),
        "kernels": _attempt(_kernels),
        "devices": _attempt(_devices),
        "model_cache": _attempt(_model_cache),
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
    }


def _attempt(part: Callable[[], Any]) -> Any:
    try:
        return part()
    # ValueError: a WIM_CPU_ISA that this CPU lacks is one more thing to tell.
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _compiler() -> str | None:
    """The compiler that left its mark in the CPU library; None if there is no library or mark."""
    library = Path(wim_ext.__file__).with_name("_ops_cpu.so")
    try:
        data = library.read_bytes()
    except OSError:
        return None
    marks = set(re.findall(rb"GCC: \([^)\0]*\) [\w.]+|clang version [\w.]+", data))
    # A library that clang has linked carries the mark of the C runtime's GCC as well.
    best = sorted(marks, key=lambda mark: (not mark.startswith(b"clang"), mark))
    return best[0].decode() if best else None


def _cpu() -> dict[str, Any]:
    import torch

    affinity = getattr(os, "sched_getaffinity", None)
    flags = _cpu_flags()
    return {
        "model": flags.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(affinity(0)) if affinity else os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "instruction_sets": [
            name for name in _INSTRUCTION_SETS.split() if name in flags.get("flags", "").split()
        ],
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu_flags(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Name and flags of the first CPU; empty where the system does not tell."""
    try:
        text = path.read_text()
    except OSError:
        return {}
    fields = dict(re.findall(r"^([^:\n\t]+)\s*:[ \t]*(.*)$", text.split("\n\n")[0], re.MULTILINE))
    return {"flags": fields.get("flags", fields.get("Features", "")), **fields}


def _kernels() -> dict[str, Any]:
    from wim_ext import _native, ops

    built, available, in_use, reason = ops.cpu_kernels()
    return {
        "cpu": {"built": built, "available": available, "in_use": in_use, "why": reason},
        "cuda": _native.CUDA_STATUS,
    }


def _devices() -> list[dict[str, Any]]:
    import torch

    devices: list[dict[str, Any]] = [{"name": "cpu"}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(
            {
                "name": f"cuda:{index}",
                "model": properties.name,
                "memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return devices


def _model_cache() -> str:
    from wim_ext.conversion import cache_dir

    return str(cache_dir())


def render(facts: dict[str, Any]) -> str:
    """The facts for people: a section a part, a line a fact."""
    sections = []
    for title, part in facts.items():
        lines = _environment_lines(part) if title == "environment" else _lines(part)
        sections.append("\n".join([title.replace("_", " "), *(f"  {line}" for line in lines)]))
    return "\n".join(sections)


def _environment_lines(values: dict[str, str | None]) -> list[str]:
    return [
        f"{name:<20}{f'not set ({ENVIRONMENT[name]})' if value is None else value}"
        for name, value in values.items()
    ]


def _lines(part: Any) -> list[str]:
    if isinstance(part, list):
        return [", ".join(map(_text, device.values())) for device in part]
    if not isinstance(part, dict):
        return [_text(part)]
    lines = []
    for name, value in part.items():
        if isinstance(value, dict):
            lines += [f"{name}: {key.replace('_', ' ')}: {_text(v)}" for key, v in value.items()]
        else:
            lines.append(
                f"{name.replace('_', ' ') if name != 'wim_ext' else name:<20}{_text(value)}"
            )
    return lines


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "unknown" if value is None else str(value)
