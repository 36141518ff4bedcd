"""StoreLock: the lock of an open store, which who holds it often can give up to those who wait.

A thread that lets a lock go and takes it again at once leaves nothing to others: they are woken, and find it taken.
Compaction and large puts take the store's lock block after block; between blocks they give way, so that a get waits for
a block and not for a batch.
"""

from __future__ import annotations

import time
from threading import Condition, RLock

_LONG_ENOUGH_S = 1e-4  # for a thread to wake up and take the lock


class StoreLock(Condition):
    """A condition over a lock that its owner may take again; `give_way` lets others in."""

    def __init__(self) -> None:
        super().__init__(RLock())
        self._entering: list[None] = []  # one for each thread that wants to come in; append and pop are atomic

    def __enter__(self) -> bool:
        self._entering.append(None)
        try:
            return super().__enter__()
        finally:
            self._entering.pop()

    def give_way(self) -> None:
        """Let others in if any wait. Requires: not the lock."""
        if self._entering:
            time.sleep(_LONG_ENOUGH_S)
