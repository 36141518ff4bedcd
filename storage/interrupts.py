"""Ctrl-C at moments at which it does no harm.

Python raises KeyboardInterrupt between any two bytecodes of the main thread. In the middle of moving rows that would
leave a slot that is promised to one row and holds another, and the next flush would store it. Where rows move or
change, an interrupt therefore waits for the end of the verb; a second one does not, so that a Store that hangs can
still be left. What it cut short cannot be trusted: it is counted, and modules that lived through it refuse to go on.

Other threads are never interrupted: there it does nothing. It costs two system calls, so it is for verbs, not for rows.
"""

from __future__ import annotations

import inspect
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Uninterrupted:
    """``with Uninterrupted():`` holds SIGINT back until the block has ended, one way or the other. May be nested.

    Attributes:
        breaks: how often in this process a second interrupt has cut a block short.
    """

    breaks = 0

    def __init__(self) -> None:
        self._handler: Any = None  # of SIGINT outside the block; None = nothing to hold back here
        self._held = False  # and not the frame that came with it, whose variables would live on

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and getattr(handler, "__func__", None) is not Uninterrupted._hold:  # else held already
            self._handler = handler
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._held:
                self._handler(signal.SIGINT, inspect.currentframe())

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            Uninterrupted.breaks += 1
            self._handler(number, frame)
        self._held = True
