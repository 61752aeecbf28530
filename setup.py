"""Builds the native libraries by driving CMakeLists.txt; everything else is in pyproject.toml.

Environment variables:
    WIM_TORCH_DIR   folder of the torch package to build against (default: the target environment's)
    WIM_CUDA        auto (default: when torch has CUDA and nvcc is found) | on | off
    WIM_CUDA_ARCHS  CMake architecture list, default "80-real;90a-real;100-real;80-virtual"
    MAX_JOBS        parallel compile jobs, default: all cores
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

ROOT = Path(__file__).resolve().parent
DEFAULT_CUDA_ARCHS = "80-real;90a-real;100-real;80-virtual"

NO_TORCH = """
wim_ext is built against an installed torch, and none was found.
Install one first, then repeat the command:
    pip install torch==2.13.0
On Linux a plain torch is the CUDA build (gigabytes); for CPUs take the CPU wheel of that version.
If torch lives in another environment (uv, `python -m build`), set WIM_TORCH_DIR to its folder.
"""


def find_torch() -> Path:
    """The torch package that the built libraries will be loaded beside; never downloads one.

    pip's isolated build hides the target's packages from sys.path but keeps its sys.prefix, so the
    target's purelib is looked at last.
    """
    spec = importlib.util.find_spec("torch")
    candidates = [
        os.environ.get("WIM_TORCH_DIR"),
        spec and spec.submodule_search_locations and spec.submodule_search_locations[0],
        Path(sysconfig.get_paths()["purelib"]) / "torch",
        Path(sysconfig.get_paths()["platlib"]) / "torch",
    ]
    for candidate in filter(None, candidates):
        if (Path(candidate) / "include" / "torch" / "csrc" / "stable").is_dir():
            return Path(candidate)
        if candidate == os.environ.get("WIM_TORCH_DIR"):
            sys.exit(f"WIM_TORCH_DIR={candidate} holds no torch >= 2.10 (no stable ABI headers).")
    sys.exit(NO_TORCH)


def source_digest() -> str:
    """`wim_ext/_source.py`, loaded by path: importing the package needs what is built here."""
    spec = importlib.util.spec_from_file_location("_source", ROOT / "wim_ext" / "_source.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.source_digest(ROOT / "csrc"))


def torch_has_cuda(torch: Path) -> bool:
    """Reads torch/version.py as text: importing torch would fail in an isolated build."""
    match = re.search(r"^cuda\b[^=]*=\s*(.+)$", (torch / "version.py").read_text(), re.MULTILINE)
    return match is not None and match.group(1).strip() != "None"


def find_nvcc() -> str | None:
    """nvcc on PATH, under CUDA_HOME, or installed as the `nvidia-cuda-nvcc` package."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    purelib = Path(sysconfig.get_paths()["purelib"])
    for home in [*filter(None, homes), *sorted(purelib.glob("nvidia/cu*"), reverse=True)]:
        nvcc = Path(home) / "bin" / "nvcc"
        if nvcc.is_file():
            return str(nvcc)
    return shutil.which("nvcc")


def cuda_compiler(torch: Path) -> str | None:
    """The nvcc to build the CUDA library with, or None for a CPU-only build; says which and why."""
    choice = os.environ.get("WIM_CUDA", "auto").lower()
    if choice not in ("auto", "on", "off"):
        sys.exit(f"WIM_CUDA={choice!r}: allowed are auto, on, off.")
    if not any((ROOT / "csrc" / "cuda").glob("*.cu")):
        if choice == "on":
            sys.exit("WIM_CUDA=on, but this source tree has no CUDA sources (csrc/cuda/*.cu).")
        return None
    nvcc = find_nvcc() if choice != "off" else None
    if choice == "on" and nvcc is None:
        sys.exit("WIM_CUDA=on, but no nvcc was found on PATH, in CUDA_HOME or /usr/local/cuda.")
    if choice == "auto" and not torch_has_cuda(torch):
        nvcc = None
    print(f"wim_ext: CUDA library {'with ' + nvcc if nvcc else 'left out'} (WIM_CUDA={choice})")
    return nvcc


class NativeLibrary(Extension):
    """A library that CMake builds; declared so that wheels and editable installs carry it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"wim_ext.{name}", sources=[])


class CMakeBuild(build_ext):
    """One CMake run builds every library; each is then copied to where setuptools wants it."""

    def run(self) -> None:
        abi = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
        self.staging = ROOT / "build" / f"cmake-{abi}"
        self.configure_and_build()
        super().run()

    def configure_and_build(self) -> None:
        torch = find_torch()
        nvcc = cuda_compiler(torch)
        if nvcc:
            self.extensions.append(NativeLibrary("_ops_cuda"))
        import pybind11

        ninja = shutil.which("ninja") or str(Path(sysconfig.get_paths()["scripts"]) / "ninja")
        configure = [
            "cmake",
            *("-S", str(ROOT), "-B", str(self.staging), "-G", "Ninja"),
            "-DCMAKE_BUILD_TYPE=Release",
            # Always given: a kept build folder would remember the ninja of a deleted isolated env.
            f"-DCMAKE_MAKE_PROGRAM={ninja}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DPython_INCLUDE_DIR={sysconfig.get_paths()['include']}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DWIM_TORCH_DIR={torch}",
            f"-DWIM_VERSION={self.distribution.get_version()}",
            f"-DWIM_SOURCE_DIGEST={source_digest()}",
            f"-DWIM_CUDA={'ON' if nvcc else 'OFF'}",
        ]
        if nvcc:
            archs = os.environ.get("WIM_CUDA_ARCHS", DEFAULT_CUDA_ARCHS)
            configure += [f"-DCMAKE_CUDA_COMPILER={nvcc}", f"-DCMAKE_CUDA_ARCHITECTURES={archs}"]
        subprocess.run(configure, check=True)
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))
        subprocess.run(["cmake", "--build", str(self.staging), "--parallel", jobs], check=True)

    def build_extension(self, ext: Extension) -> None:
        built = self.staging / Path(self.get_ext_filename(ext.name)).name
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, target)

    def get_ext_filename(self, ext_name: str) -> str:
        """Only the pybind11 module has a Python ABI; the op libraries run under any Python."""
        if "_ops_" in ext_name:
            return os.path.join(*ext_name.split(".")) + ".so"
        return super().get_ext_filename(ext_name)


class TorchFirst(dist_info):
    """Stops at the metadata when there is no torch: pip asks for it before it fetches dependencies,
    so a machine without torch is told to choose one and never downloads the CUDA build for nothing.
    """

    def run(self) -> None:
        find_torch()
        super().run()


def build_requirements() -> list[str]:
    """cmake from the index where the machine has none."""
    return [] if shutil.which("cmake") else ["cmake>=3.25"]


if __name__ == "__main__":
    setup(
        ext_modules=[NativeLibrary("_C"), NativeLibrary("_ops_cpu")],
        cmdclass={"build_ext": CMakeBuild, "dist_info": TorchFirst},
        setup_requires=build_requirements(),
    )
