"""GGUF files, converted once to a folder that transformers reads in a moment.

transformers reads GGUF in pure Python, which takes some twenty seconds even for a small model. The
converted folder is written beside its final place and moved there in one step, so it is whole or
not there at all, and two processes that convert at once do not disturb each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import modeling_gguf_pytorch_utils

from wim_ext.errors import ModelNotSupported

__all__ = ["cache_dir", "converted", "quiet"]

_VERSION = 1  # of what a converted folder holds; counts up when that changes
_SEAL = "wim_ext.json"
_SAMPLE = 1 << 20
_ABANDONED_AFTER_S = 3600

# transformers changes global state while it loads (default device, initialisers, progress bars): a
# second load beside it gets weights on the meta device.
_one_at_a_time = threading.RLock()


def cache_dir() -> Path:
    """Where converted models are kept: WIM_CACHE_DIR, else the platform's user cache."""
    chosen = os.environ.get("WIM_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "wim_ext"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "wim_ext"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "wim_ext"


def converted(gguf: Path, report: Callable[[str], None]) -> Path:
    """The folder with the model and tokenizer of a GGUF file; made now where there is none.

    Args:
        gguf: the file.
        report: gets one line of text when a conversion starts.

    Raises:
        ModelNotSupported: transformers cannot read the file.
        OSError: the folder cannot be written; the text names WIM_CACHE_DIR.
    """
    folder = cache_dir() / "models" / f"{gguf.stem}-{_fingerprint(gguf)}"
    with _one_at_a_time:
        if not _is_whole(folder):
            _make(gguf, folder, report)
    return folder


def _make(gguf: Path, folder: Path, report: Callable[[str], None]) -> None:
    report(f"converting {gguf.name}; this happens once and takes about half a minute")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        work = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
        try:
            _convert(gguf, work)
            _put_in_place(work, folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise OSError(
            f"the converted model cannot be kept in {folder.parent} ({error}); "
            "set WIM_CACHE_DIR to a folder that can be written and has room"
        ) from error


def _fingerprint(gguf: Path) -> str:
    """Changes with the file and the form of the conversion; reads 2 MiB however large it is."""
    stat = gguf.stat()
    digest = hashlib.sha256(f"{_VERSION} {stat.st_size} {stat.st_mtime_ns}".encode())
    with gguf.open("rb") as file:
        digest.update(file.read(_SAMPLE))
        file.seek(max(0, stat.st_size - _SAMPLE))
        digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


def _convert(gguf: Path, folder: Path) -> None:
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    try:
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
            model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    except OSError:
        raise
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ModelNotSupported(
            f"{gguf} is no GGUF file that transformers reads: {error}"
        ) from error
    _forget_quantisation(model)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    for path in files:
        _to_disk(path)
    sizes = {path.name: path.stat().st_size for path in files}
    seal = folder / _SEAL
    seal.write_text(json.dumps({"version": _VERSION, "source": gguf.name, "files": sizes}))
    _to_disk(seal)


def _forget_quantisation(model: Any) -> None:
    """Lets the model be saved: reading GGUF has turned its weights into plain float32 tensors."""
    with suppress(AttributeError):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False


def _to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _is_whole(folder: Path) -> bool:
    """Whether every file is there in the size it was written in."""
    try:
        files = json.loads((folder / _SEAL).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def _put_in_place(work: Path, folder: Path) -> None:
    for _ in range(3):
        try:
            work.rename(folder)
        except OSError:
            if _is_whole(folder):  # another process was faster; its folder is as good
                return
            if not folder.exists():
                raise
            # A torn folder stands in the way; moved aside first, for a rename cannot be half done.
            aside = Path(tempfile.mkdtemp(prefix=".torn-", dir=folder.parent))
            with suppress(OSError):
                folder.rename(aside / folder.name)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            return
    raise OSError(f"{folder} cannot be replaced")


def _remove_abandoned(parent: Path) -> None:
    """Removes what conversions have left that were killed more than an hour ago."""
    for path in parent.glob(".converting-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers' progress bars and its advice about packed GGUF weights off the screen.

    Loads inside it take turns.
    """
    with _one_at_a_time, _bars_off():
        yield


@contextmanager
def _bars_off() -> Iterator[None]:
    logging: Any = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    gguf_reader: Any = modeling_gguf_pytorch_utils  # has a bar of its own
    tqdm = gguf_reader.tqdm
    try:
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        gguf_reader.tqdm = partial(tqdm, disable=True)
        yield
    finally:
        gguf_reader.tqdm = tqdm
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
