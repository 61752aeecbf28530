"""wim_ext: branch off a long context, think, roll back."""

from wim_ext.errors import (
    CacheFull,
    ContextTooLong,
    DocumentFileError,
    ModelNotSupported,
    StaleSequenceError,
)

__version__ = "0.1.0"

__all__ = [
    "CacheFull",
    "ContextTooLong",
    "DocumentFileError",
    "ModelNotSupported",
    "StaleSequenceError",
    "__version__",
]
