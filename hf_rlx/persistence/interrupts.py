"""SIGTERM and Ctrl-C as requests: training saves at the next safe point and stops; a second signal stops at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(SystemExit):
    """Training stopped because of a signal, after saving; the exit code is the shell's 128 + signal.

    Args:
        signum: of the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.signum = signum


class Interrupts:
    """Context manager: inside it signals set `requested`. Outside the main thread, where Python delivers none, it
    does nothing."""

    def __init__(self) -> None:
        self.requested: int | None = None
        self._owner = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        self.requested, self._owner = None, os.getpid()
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._release()
        self.requested = None

    def check(self) -> None:
        """A safe point.

        Raises:
            TrainingInterrupted: a signal has come.
        """
        if self.requested is not None:
            raise TrainingInterrupted(self.requested)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:  # a child that was forked while training: not its business
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.requested is None:
            self.requested = number
            return
        self._release()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _release(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            # None: the handler was not installed by Python, which cannot put it back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
