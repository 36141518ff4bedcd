"""Ctrl-C at a step boundary: the first one asks, the second one interrupts at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Interrupted(Exception):
    """Ctrl-C ended a run between two steps; nothing was on its way between tiers."""


class StopSignal:
    """While entered, SIGINT does not raise KeyboardInterrupt in the middle of a step, where rows are on their way
    between tiers: it ends the loop that :meth:`watch` runs. A second SIGINT does raise it. Outside the main thread
    nothing changes."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def watch(self, steps: Iterable[T]) -> Iterator[T]:
        """``steps``, until Ctrl-C was pressed; then Interrupted."""
        for step in steps:
            if self.requested:
                raise Interrupted
            yield step

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
