"""A folder with a tiny random model and tokenizer whose context is long enough for real prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_gguf


def make(folder: Path, context: int = 8192) -> str:
    """Writes the model of tiny_gguf with a context of `context` tokens into `folder`."""
    from wim_ext.loading import load

    tiny_gguf.write(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WIM_CACHE_DIR", str(folder / "cache"))
        loaded = load(folder / "tiny.gguf", dtype="float32", on_progress=lambda text: None)
    loaded.model.config.max_position_embeddings = context
    loaded.model.save_pretrained(folder / "model")
    loaded.tokenizer.save_pretrained(folder / "model")
    return str(folder / "model")
