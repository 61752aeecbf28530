"""setup.py's decisions and the loader's error texts: what a person with a broken install sees."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from wim_ext import __version__
from wim_ext._source import source_digest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "wim_ext"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """setup.py as a module (it calls setup() only as a script)."""
    spec = importlib.util.spec_from_file_location("wim_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.smoke
def test_the_package_and_its_build_say_the_same_version() -> None:
    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_finds_the_installed_torch(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WIM_TORCH_DIR", raising=False)
    assert build.find_torch() == Path(torch.__file__).parent


def test_torch_dir_wins_and_must_be_a_torch(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    headers = tmp_path / "include" / "torch" / "csrc" / "stable"
    monkeypatch.setenv("WIM_TORCH_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match=r"holds no torch >= 2\.10 \(no stable ABI headers\)"):
        build.find_torch()
    headers.mkdir(parents=True)
    assert build.find_torch() == tmp_path


def test_without_torch_the_text_says_what_to_run(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WIM_TORCH_DIR", raising=False)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    paths = {"purelib": str(tmp_path), "platlib": str(tmp_path)}
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: paths)
    with pytest.raises(SystemExit, match=r"(?s)none was found.*pip install torch==.*WIM_TORCH_DIR"):
        build.find_torch()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda: Optional[str] = None\n", False),
        ("cuda = None\n", False),
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", True),
        ("hip: Optional[str] = '6.0'\n", False),
    ],
)
def test_reads_cuda_from_torchs_version_file(
    build: ModuleType, tmp_path: Path, text: str, expected: bool
) -> None:
    (tmp_path / "version.py").write_text(text)
    assert build.torch_has_cuda(tmp_path) is expected


class TestSourceDigest:
    @pytest.fixture
    def csrc(self, tmp_path: Path) -> Path:
        (tmp_path / "cpu").mkdir()
        (tmp_path / "plan.h").write_text("int a;")
        (tmp_path / "cpu" / "gemm.h").write_text("int b;")
        return tmp_path

    def test_the_build_and_the_loader_agree(self, build: ModuleType) -> None:
        assert build.source_digest() == source_digest(ROOT / "csrc")

    def test_contents_count(self, csrc: Path) -> None:
        before = source_digest(csrc)
        (csrc / "cpu" / "gemm.h").write_text("int c;")
        assert source_digest(csrc) != before

    def test_names_count(self, csrc: Path) -> None:
        before = source_digest(csrc)
        (csrc / "cpu" / "gemm.h").rename(csrc / "cpu" / "pack.h")
        assert source_digest(csrc) != before

    def test_other_files_do_not(self, csrc: Path) -> None:
        before = source_digest(csrc)
        (csrc / "notes.txt").write_text("no source")
        assert source_digest(csrc) == before


class TestCudaChoice:
    """WIM_CUDA = auto | on | off, against a source tree with CUDA files and a nvcc or not."""

    @pytest.fixture
    def tree(self, build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        (tmp_path / "csrc" / "cuda").mkdir(parents=True)
        (tmp_path / "csrc" / "cuda" / "op.cu").touch()
        (tmp_path / "version.py").write_text("cuda = None\n")
        monkeypatch.setattr(build, "ROOT", tmp_path)
        monkeypatch.setattr(build, "find_nvcc", lambda: "/toolkit/bin/nvcc")
        monkeypatch.delenv("WIM_CUDA", raising=False)
        return tmp_path

    def test_auto_leaves_it_out_for_a_cpu_torch(self, build: ModuleType, tree: Path) -> None:
        assert build.cuda_compiler(tree) is None

    def test_auto_builds_it_for_a_cuda_torch(self, build: ModuleType, tree: Path) -> None:
        (tree / "version.py").write_text("cuda = '13.0'\n")
        assert build.cuda_compiler(tree) == "/toolkit/bin/nvcc"

    def test_on_builds_it_even_for_a_cpu_torch(
        self, build: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WIM_CUDA", "on")
        assert build.cuda_compiler(tree) == "/toolkit/bin/nvcc"

    def test_on_without_nvcc_is_an_error(
        self, build: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WIM_CUDA", "on")
        monkeypatch.setattr(build, "find_nvcc", lambda: None)
        with pytest.raises(SystemExit, match="WIM_CUDA=on, but no nvcc was found"):
            build.cuda_compiler(tree)

    def test_off_wins_over_a_cuda_torch(
        self, build: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tree / "version.py").write_text("cuda = '13.0'\n")
        monkeypatch.setenv("WIM_CUDA", "off")
        assert build.cuda_compiler(tree) is None

    def test_other_words_are_refused(
        self, build: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WIM_CUDA", "yes")
        with pytest.raises(SystemExit, match="WIM_CUDA='yes': allowed are auto, on, off"):
            build.cuda_compiler(tree)

    def test_auto_says_what_it_decided(
        self, build: ModuleType, tree: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        build.cuda_compiler(tree)
        assert "CUDA library left out (WIM_CUDA=auto)" in capsys.readouterr().out


# An editable install would find the modules that a test took out of its copy of the package.
WITHOUT_EDITABLE_FINDER = (
    "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f).lower()]\n"
)


def run_import(package_root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EDITABLE_FINDER + "import wim_ext._native"],
        cwd=package_root,
        env={"PYTHONPATH": str(package_root), "PATH": "/usr/bin:/bin", "HOME": str(package_root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def copied_package(tmp_path: Path) -> Path:
    """The package's Python files and binaries, copied to where a test may break them."""
    target = tmp_path / "wim_ext"
    target.mkdir()
    for path in PACKAGE.iterdir():
        if path.suffix in {".py", ".so"}:
            shutil.copy2(path, target)
    return tmp_path


class TestLoader:
    def test_a_good_copy_loads(self, copied_package: Path) -> None:
        result = run_import(copied_package)
        assert result.returncode == 0, result.stderr

    def test_missing_module(self, copied_package: Path) -> None:
        for path in (copied_package / "wim_ext").glob("_C*"):
            path.unlink()
        error = run_import(copied_package).stderr
        assert "native module _C cannot be loaded" in error
        assert "built here: none" in error
        assert "pip install --no-build-isolation -e ." in error

    def test_module_of_another_python(self, copied_package: Path) -> None:
        for path in (copied_package / "wim_ext").glob("_C*"):
            path.rename(path.with_name("_C.cpython-399-x86_64-linux-gnu.so"))
        error = run_import(copied_package).stderr
        assert "built here: _C.cpython-399-x86_64-linux-gnu.so" in error

    def test_missing_op_library(self, copied_package: Path) -> None:
        (copied_package / "wim_ext" / "_ops_cpu.so").unlink()
        error = run_import(copied_package).stderr
        assert "_ops_cpu.so is missing" in error

    def test_source_folder_that_hides_an_installed_package(self, copied_package: Path) -> None:
        (copied_package / "csrc").mkdir()
        for path in (copied_package / "wim_ext").glob("_C.*so"):
            path.unlink()
        error = run_import(copied_package).stderr
        assert "is a source folder, which hides an installed wim_ext: run Python from" in error

    def test_sources_changed_since_the_build(self, copied_package: Path) -> None:
        shutil.copytree(ROOT / "csrc", copied_package / "csrc")
        assert run_import(copied_package).returncode == 0
        with (copied_package / "csrc" / "plan.h").open("a") as header:
            header.write("// one more line\n")
        error = run_import(copied_package).stderr
        assert "libraries were built before the last change in" in error
        assert "pip install --no-build-isolation -e ." in error

    def test_op_library_that_is_none(self, copied_package: Path) -> None:
        path = copied_package / "wim_ext" / "_ops_cpu.so"
        path.write_bytes(b"not a shared library")
        error = run_import(copied_package).stderr
        assert "_ops_cpu.so does not load into torch" in error
        assert "it needs torch >= 2.10" in error

    def test_other_version(self, copied_package: Path) -> None:
        path = copied_package / "wim_ext" / "__init__.py"
        path.write_text(path.read_text().replace('__version__ = "', '__version__ = "9.'))
        error = run_import(copied_package).stderr
        assert "_C was built from version" in error
        assert "the Python files are 9." in error
