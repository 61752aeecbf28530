"""`wim info`: every fact, on this machine and on broken or foreign ones."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from kit import run_python
from typer.testing import CliRunner

import wim_ext
from wim_ext import info
from wim_ext.cli import app

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def facts() -> dict[str, object]:
    done = CliRunner().invoke(app, ["info", "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_versions(facts: dict) -> None:
    versions = facts["versions"]
    assert versions["wim_ext"] == wim_ext.__version__
    assert versions["torch"] == torch.__version__
    assert re.match(r"3\.\d+\.\d+", versions["python"])
    assert re.match(r"GCC|clang", versions["compiler"])


def test_cpu(facts: dict) -> None:
    cpu = facts["cpu"]
    assert cpu["cores"] >= cpu["usable_cores"] >= 1
    assert cpu["torch_threads"] >= 1
    assert cpu["model"]
    if cpu["torch_capability"].startswith("AVX"):
        assert "avx2" in cpu["instruction_sets"]


def test_kernels(facts: dict) -> None:
    cpu = facts["kernels"]["cpu"]
    assert cpu["in_use"] in cpu["available"]
    assert set(cpu["available"]) <= set(cpu["built"])
    assert "portable" in cpu["available"]
    assert cpu["why"]
    assert facts["kernels"]["cuda"]


def test_devices_and_folders(facts: dict) -> None:
    assert facts["devices"][0] == {"name": "cpu"}
    assert len(facts["devices"]) == 1 + torch.cuda.device_count()
    assert facts["model_cache"].endswith("wim_ext") or facts["environment"]["WIM_CACHE_DIR"]


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIM_DEBUG", "1")
    monkeypatch.delenv("WIM_CPU_ISA", raising=False)
    found = info.collect()["environment"]
    assert found["WIM_DEBUG"] == "1"
    assert found["WIM_CPU_ISA"] is None


def test_every_variable_of_the_sources_is_listed() -> None:
    """One place lists them all: a variable read anywhere else is found here."""
    files = [ROOT / "setup.py", *(ROOT / "wim_ext").glob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    read = r"(?:environ(?:\.get\(|\[)|getenv\()\s*\"(WIM_\w+)\""
    used = {name for path in files for name in re.findall(read, path.read_text())}
    assert used, "the pattern finds nothing any more"
    assert used <= set(info.ENVIRONMENT)
    text = (ROOT / "docs" / "command.md").read_text()
    assert all(name in text for name in info.ENVIRONMENT)


def test_text(facts: dict) -> None:
    text = CliRunner().invoke(app, ["info"]).stdout
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}$", text, re.MULTILINE)
    assert f"cpu: in use: {facts['kernels']['cpu']['in_use']}" in text
    assert all(name in text for name in info.ENVIRONMENT)
    assert max(map(len, text.splitlines())) < 200


def test_a_broken_build_still_tells_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wim_ext.ops", None)
    monkeypatch.delattr(wim_ext, "ops", raising=False)
    facts = info.collect()
    assert facts["kernels"]["error"].startswith(("ImportError", "ModuleNotFoundError"))
    assert facts["cpu"]["cores"]
    assert "error" in info.render(facts)


def test_a_wrong_setting_is_told_among_the_rest() -> None:
    code = "from wim_ext import info; print(info.render(info.collect()))"
    done = run_python(code, env={"WIM_CPU_ISA": "sse9"})
    assert done.returncode == 0, done.stderr
    kernels = done.stdout.split("kernels\n")[1].split("devices\n")[0]
    assert "ValueError: WIM_CPU_ISA=sse9 is unknown; built in are: " in kernels
    assert "usable cores" in done.stdout


def test_without_a_library_there_is_no_compiler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wim_ext, "__file__", str(tmp_path / "__init__.py"))
    assert info._compiler() is None
    (tmp_path / "_ops_cpu.so").write_bytes(b"\0GCC: (Debian 12.2.0) 12.2.0\0clang version 17.0.6\0")
    assert info._compiler() == "clang version 17.0.6"
    (tmp_path / "_ops_cpu.so").write_bytes(b"no mark")
    assert info._compiler() is None


def test_packages_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise info.PackageNotFoundError(package)

    monkeypatch.setattr(info, "version", missing)
    assert info.versions()["torch"] is None
    assert "unknown" in info.render({"versions": info.versions()})


def test_cpu_flags_of_other_systems(tmp_path: Path) -> None:
    arm = tmp_path / "cpuinfo"
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n\nprocessor\t: 1\n")
    assert info._cpu_flags(arm)["flags"] == "fp asimd bf16"
    assert info._cpu_flags(tmp_path / "none") == {}


def test_devices_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, major, minor = "NVIDIA H200", 150_000_000_000, 9, 0

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    devices = info._devices()
    assert devices[1] == {
        "name": "cuda:0",
        "model": "NVIDIA H200",
        "memory_bytes": 150_000_000_000,
        "capability": "9.0",
    }
    assert "cuda:0, NVIDIA H200, 150000000000, 9.0" in info.render({"devices": devices})
