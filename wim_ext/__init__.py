"""wim_ext: branch off a long context, think, roll back."""

from wim_ext._native import VERSION as __version__
from wim_ext.errors import (
    CacheFull,
    ContextTooLong,
    DocumentFileError,
    ModelNotSupported,
    StaleSequenceError,
)

__all__ = [
    "CacheFull",
    "ContextTooLong",
    "DocumentFileError",
    "ModelNotSupported",
    "StaleSequenceError",
    "__version__",
]
