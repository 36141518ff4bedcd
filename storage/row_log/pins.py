"""Pins: what readers may still touch is kept until they are done.

A verb that reads looks its places up under the store's lock and copies rows without it. Meanwhile a commit may move a
segment out of its write buffer, or a segment may die. Nothing that a place leads to is reused before every reader that
could have been given that place has left: each reader enters with the generation of that moment, what goes is retired
with it, and is released once no reader of that generation or an earlier one is left.

Who changes what no reader may see half changed has `quiet`: new readers wait at the door until it is done. Without
that, two threads that read all the time would keep it waiting for ever. A thread that is inside may enter again.

Guarded by the store's lock, like everything here; `release` functions run under it, in whichever thread leaves last.
It knows nothing of processes (LMDB's read transactions do).
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from storage.row_log.lock import StoreLock


class Pins:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._generation = 0
        self._readers: dict[int, int] = {}
        self._retired: deque[tuple[int, Callable[[], None]]] = deque()
        self._inside: Counter[int] = Counter()  # by thread
        self._quieted = 0

    @contextmanager
    def quiet(self, lock: StoreLock) -> Iterator[None]:
        """Wait until nobody reads, and keep it so until the block ends. Requires: the lock, once; no pin."""
        self._quieted += 1
        try:
            lock.wait_for(lambda: not self.held)
            yield
        finally:
            self._quieted -= 1
            lock.notify_all()

    @property
    def may_enter(self) -> bool:
        """Whether this thread may begin to read now."""
        return not self._quieted or threading.get_ident() in self._inside

    @property
    def held(self) -> bool:
        """Whether a reader is at work."""
        return bool(self._readers)

    @property
    def waiting(self) -> int:
        """How many retired things wait for readers."""
        return len(self._retired)

    def enter(self) -> int:
        """Begin to read; pass what is returned to `leave`, in the same thread."""
        self._inside[threading.get_ident()] += 1
        self._readers[self._generation] = self._readers.get(self._generation, 0) + 1
        return self._generation

    def leave(self, generation: int) -> None:
        """End reading; releases what waited for it."""
        thread = threading.get_ident()
        self._inside[thread] -= 1
        if self._inside[thread] <= 0:
            del self._inside[thread]
        self._readers[generation] -= 1
        if not self._readers[generation]:
            del self._readers[generation]
        oldest = min(self._readers, default=self._generation)
        while self._retired and self._retired[0][0] < oldest:
            self._retired.popleft()[1]()

    def retire(self, release: Callable[[], None]) -> None:
        """Call `release` once nobody reads that has entered before now; at once if nobody does."""
        if not self._readers:
            release()
            return
        self._retired.append((self._generation, release))
        self._generation += 1
