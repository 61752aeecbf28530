"""wim_ext: branch off a long context, think, roll back.

The public names below are imported when first used, so that `import wim_ext` and `wim --help` cost
nothing, and the ops and the cache do not need transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "append_kv": "ops",
    "copy_pages": "ops",
    "merge_states": "ops",
    "paged_attention": "ops",
    "plan_attention": "ops",
    "PagedKVCache": "cache",
    "Sequence": "sequence",
    "PagedModel": "model",
    "open_model": "model",
    "WritingInTheMargins": "margins",
    "Document": "document",
    "CacheFull": "errors",
    "ContextTooLong": "errors",
    "DocumentFileError": "errors",
    "ModelNotFound": "errors",
    "ModelNotSupported": "errors",
    "StaleSequenceError": "errors",
}

if TYPE_CHECKING:
    from wim_ext.cache import PagedKVCache
    from wim_ext.document import Document
    from wim_ext.errors import (
        CacheFull,
        ContextTooLong,
        DocumentFileError,
        ModelNotFound,
        ModelNotSupported,
        StaleSequenceError,
    )
    from wim_ext.margins import WritingInTheMargins
    from wim_ext.model import PagedModel, open_model
    from wim_ext.ops import (
        append_kv,
        copy_pages,
        merge_states,
        paged_attention,
        plan_attention,
    )
    from wim_ext.sequence import Sequence

__all__ = [
    "CacheFull",
    "ContextTooLong",
    "Document",
    "DocumentFileError",
    "ModelNotFound",
    "ModelNotSupported",
    "PagedKVCache",
    "PagedModel",
    "Sequence",
    "StaleSequenceError",
    "WritingInTheMargins",
    "__version__",
    "append_kv",
    "copy_pages",
    "merge_states",
    "open_model",
    "paged_attention",
    "plan_attention",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'wim_ext' has no attribute {name!r}")
    value = getattr(import_module(f"wim_ext.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
