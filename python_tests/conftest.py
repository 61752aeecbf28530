"""Shared fixtures. What compares numbers lives in kit.py, what lists cases in cases.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

# Nothing in the tests may wait for a network: an unknown hub name fails at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell lets background jobs ignore Ctrl-C; the tests, and the commands that they start, must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny models are faster, and timings steadier, without a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The embedded default model in float32, loaded once a session (a LoadedModel)."""
    from wim_ext.loading import load

    return load(dtype="float32")
