"""Ctrl-C once, twice, and in the last phase; SIGTERM; handlers put back."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from wim_ext.interrupt import StopOnInterrupt


def test_first_asks_second_interrupts() -> None:
    with StopOnInterrupt() as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        assert stop.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nothing_to_stop_when_closing() -> None:
    with StopOnInterrupt() as stop:
        stop.closing = True
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert not stop.asked


def test_termination_unwinds() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopOnInterrupt(), pytest.raises(SystemExit) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_in_another_thread_nothing_changes() -> None:
    seen: list[object] = []

    def enter() -> None:
        with StopOnInterrupt() as stop:
            seen.extend((stop(), signal.getsignal(signal.SIGINT)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [False, signal.default_int_handler]


def test_a_background_job_keeps_ignoring_ctrl_c() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopOnInterrupt() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.asked
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
