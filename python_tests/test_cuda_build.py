"""The CUDA library itself: nvcc compiles it through the project's own CMake file, without spills,
and it loads beside a CPU-only torch on a machine without a driver."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kit import run_python

from wim_ext import __version__, _native, op_errors

ROOT = Path(__file__).resolve().parent.parent
OPS = ("append_kv", "copy_pages", "merge_states", "paged_attention", "plan_attention")


def find_nvcc() -> str | None:
    """As setup.py finds it."""
    spec = importlib.util.spec_from_file_location("wim_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    found: str | None = setup.find_nvcc()
    return found


@dataclass(frozen=True)
class Built:
    library: Path
    log: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    nvcc, ninja = find_nvcc(), shutil.which("ninja", path=sysconfig.get_paths()["scripts"])
    for tool, found in {"nvcc": nvcc, "cmake": shutil.which("cmake"), "ninja": ninja}.items():
        if found is None:
            pytest.skip(f"no {tool} on this machine: the CUDA library is not compiled")
    import pybind11

    folder = tmp_path_factory.mktemp("cuda")
    configure = [
        "cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}",
        # No build type: the host code is not what is measured, and compiles faster so.
        "-DCMAKE_BUILD_TYPE=", "-DWIM_CUDA=ON", f"-DWIM_VERSION={__version__}",
        f"-DCMAKE_CUDA_COMPILER={nvcc}", "-DCMAKE_CUDA_ARCHITECTURES=80-real",
        "-DCMAKE_CUDA_FLAGS=-O3 -Xptxas=-v",
        f"-DWIM_TORCH_DIR={Path(torch.__file__).parent}", f"-DPython_EXECUTABLE={sys.executable}",
        f"-DPython_INCLUDE_DIR={sysconfig.get_paths()['include']}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    ]  # fmt: skip
    build = ["cmake", "--build", folder, "--target", "_ops_cuda", "--parallel", "2"]
    log = ""
    for command in (configure, build):
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        log += result.stdout + result.stderr
        assert result.returncode == 0, log
    return Built(folder / "_ops_cuda.so", log)


class TestCompiled:
    def test_no_spills_and_no_stack(self, built: Built) -> None:
        frames = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) b", built.log
        )
        kernels = re.findall(r"Compiling entry function '(\w+)'", built.log)
        # attention, combine and merging for three dtypes, appending for two widths, two more
        assert len(frames) >= len(set(kernels)) == 13
        assert set(frames) == {("0", "0", "0")}

    def test_no_warnings(self, built: Built) -> None:
        assert not [line for line in built.log.splitlines() if "warning" in line.lower()]

    def test_needs_torch_and_no_cuda_library(self, built: Built) -> None:
        readelf = shutil.which("readelf")
        if readelf is None:
            pytest.skip("no readelf")
        dynamic = subprocess.run([readelf, "-d", built.library], capture_output=True, text=True)
        needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic.stdout)
        assert {"libtorch.so", "libtorch_cpu.so"} <= set(needed)
        assert not [name for name in needed if "cuda" in name]
        assert "RUNPATH" not in dynamic.stdout
        assert "RPATH" not in dynamic.stdout
        symbols = subprocess.run([readelf, "-Ws", built.library], capture_output=True, text=True)
        assert re.search(r"WEAK\s.*UND aoti_torch_get_current_cuda_stream", symbols.stdout)


IN_ONE_PROCESS = """
import torch, wim_ext.ops as ops, wim_ext.op_errors as op_errors
torch.ops.load_library({library!r})
print("libcuda mapped:", "libcuda" in open("/proc/self/maps").read())
for name in {ops!r}:
    print(name, torch._C._dispatch_has_kernel_for_dispatch_key("wim_ext::" + name, "CUDA"))

cache, key, lse = torch.zeros(2, 4, 1, 8), torch.ones(1, 1, 8), torch.zeros(1, 1)
slots = torch.tensor([5])
ops.append_kv(key, key, cache, cache.clone(), slots)
print("on cpu:", int(cache.sum()), int(cache[1, 1].sum()))

def on_cuda(name, *args):  # past the dispatcher, straight to the CUDA library
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    try:
        op = getattr(torch.ops.wim_ext, name).default
        op_errors.call(lambda *a: op.redispatch(keys, *a), *args)
    except ValueError as error:
        print(name, error)

table, ends, length = (torch.tensor(x, dtype=torch.int32) for x in ([[0]], [0, 1], [1]))
on_cuda("append_kv", key, key, cache, cache.clone(), slots)
on_cuda("copy_pages", [cache], slots, slots)
on_cuda("merge_states", key, lse, key, lse, key.clone(), lse.clone())
on_cuda("paged_attention", key, cache, cache, table, ends, length, None, key.clone(), None,
        1.0, True, -1, -1, 0.0, None, None, None, None)
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
class TestBesideACpuTorch:
    @pytest.fixture(scope="class")
    @classmethod
    def said(cls, built: Built) -> list[str]:
        result = run_python(IN_ONE_PROCESS.format(library=str(built.library), ops=OPS))
        assert result.returncode == 0, result.stderr
        return result.stdout.splitlines()

    def test_loads_without_a_driver(self, said: list[str]) -> None:
        assert "libcuda mapped: False" in said
        assert {f"{name} True" for name in OPS} <= set(said)

    def test_cpu_tensors_still_go_to_the_cpu_kernels(self, said: list[str]) -> None:
        assert "on cpu: 8 8" in said

    @pytest.mark.parametrize(
        ("op", "named"),
        [
            ("append_kv", "k_cache"),
            ("copy_pages", "caches[0]"),
            ("merge_states", "out_a"),
            ("paged_attention", "query"),
        ],
    )
    def test_bc39_cuda_kernels_refuse_host_tensors_by_name(
        self, said: list[str], op: str, named: str
    ) -> None:
        """The checks come before any launch."""
        assert f"{op} {named} must be on a cuda device, found cpu" in said

    @pytest.mark.parametrize(
        ("cuda", "status"),
        [("None", "built, not loaded: torch .* has no CUDA"), ("'13.0'", "loaded")],
    )
    def test_the_loader_takes_it_where_torch_has_cuda(
        self, built: Built, tmp_path: Path, cuda: str, status: str
    ) -> None:
        package = tmp_path / "wim_ext"
        package.mkdir()
        for path in (*(ROOT / "wim_ext").glob("*.py"), *(ROOT / "wim_ext").glob("*.so")):
            shutil.copy2(path, package)
        shutil.copy2(built.library, package)
        code = f"""
import sys, torch; sys.path.insert(0, {str(tmp_path)!r}); torch.version.cuda = {cuda}
from wim_ext import _native; print(_native.__file__); print(_native.CUDA_STATUS)
"""
        result = run_python(code)
        assert result.returncode == 0, result.stderr
        where, said = result.stdout.strip().splitlines()
        assert where.startswith(str(tmp_path))
        assert re.fullmatch(status, said)


class NoKernel:
    """An op that the dispatcher finds no kernel for."""

    @property
    def default(self) -> object:
        return torch.ops.wim_ext.append_kv.default

    def __call__(self, *args: object) -> None:
        raise NotImplementedError("Could not run 'wim_ext::op' with arguments from the backend")


class TestWithoutTheLibrary:
    """What ops.py makes of the dispatcher's "could not run ... with arguments from ..."."""

    def test_tensors_of_another_device_are_named_with_the_reason(self) -> None:
        here, elsewhere = torch.zeros(1), torch.zeros(1, device="meta")
        for args in ([here, elsewhere], [[here, elsewhere], 3]):
            with pytest.raises(
                ValueError, match="has no kernels for tensors on meta; its CUDA"
            ) as e:
                op_errors.call(NoKernel(), *args)
            assert str(e.value).endswith(f"library is {_native.CUDA_STATUS}")

    def test_anything_else_stays_what_it_was(self) -> None:
        with pytest.raises(NotImplementedError, match="Could not run"):
            op_errors.call(NoKernel(), torch.zeros(1))
