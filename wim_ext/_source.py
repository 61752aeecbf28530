"""A digest of the C++ sources: tells whether a binary was built from the checkout it stands in."""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["source_digest"]

_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def source_digest(csrc: Path) -> str:
    """Sixteen hex digits over names and contents; setup.py builds the same into the library."""
    digest = hashlib.sha256()
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in _SUFFIXES):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(csrc).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]
