"""Signals that end a command: Ctrl-C, a closed terminal (SIGHUP), and what `kill` and job schedulers send (SIGTERM).

All of them raise a KeyboardInterrupt, so that temporary files and locks are removed in one way.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

CLEANUP = 5.0  # seconds in which further signals are ignored: schedulers send several, and removing files takes time


class Stopped(KeyboardInterrupt):
    """An interrupt by the signal with this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise a Stopped on each of the signals while the block lasts; ignored signals (`nohup`) stay ignored."""
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    wanted = [getattr(signal, name) for name in names if hasattr(signal, name)]
    last = -CLEANUP

    def stop(number: int, _: FrameType | None) -> None:
        nonlocal last
        if time.monotonic() - last >= CLEANUP:
            last = time.monotonic()
            raise Stopped(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in wanted}
        before = {number: old for number, old in before.items() if old not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, stop)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
