"""Ctrl-C, SIGTERM and SIGUSR1 as a wish that training grants at its next safe point.

Open MPI's mpiexec passes SIGUSR1 on to its ranks and waits for them; after Ctrl-C it kills them in a quarter of a second.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = tuple(s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGUSR1"))  # Windows lacks the last


class Interruption:
    """Turns the first of these signals into a flag and the second into the end of the process, inside its block.

    Off the main thread, where Python delivers no signals, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(130)
        self.asked = True

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
