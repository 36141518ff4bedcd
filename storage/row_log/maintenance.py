"""Maintenance: the one thread of a writing store, which commits and compacts.

Other threads ask for work; what they wait for is the writer's business (`row_log.writer`).

The thread starts with the first request, holds nothing of the store object (so that a dropped store goes away), and is
a daemon: a process may end in the middle of a commit, which is what commits are for. It does not exist in a forked
child, where nobody may write.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition, RLock, Thread, current_thread


class Maintenance:
    """See the module's docstring.

    Args:
        lock: the store's lock.
        work: one round; called without the lock, raises nothing. Returns after how many seconds it wants to be called
            again although nobody asks; None = not at all.
        name: of the thread.

    Attributes:
        working: held during a round, and taken before the store's lock. Who forks takes it: where a child closes the
            environment that it has inherited, LMDB's binding waits for calls that were under way at the fork, in a
            thread that the child does not have.
    """

    def __init__(self, lock: Condition, work: Callable[[], float | None], name: str) -> None:
        self._lock = lock
        self._work = work
        self._name = name
        self._thread: Thread | None = None
        self._asked = self._stopping = False
        self.working = RLock()

    def ask(self) -> None:
        """Have a round begin soon. Requires: the lock."""
        self._asked = True
        if self._thread is None:
            self._thread = Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._lock.notify_all()

    def stop(self) -> None:
        """End the thread after the round in progress. Requires: not the lock."""
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        if self._thread is not None and self._thread is not current_thread():
            self._thread.join()

    def _run(self) -> None:
        pause: float | None = None
        while self._begin(pause):
            with self.working:
                pause = self._work()

    def _begin(self, pause: float | None) -> bool:
        """Wait until there is a reason for a round; False to end."""
        with self._lock:
            if not self._asked and not self._stopping:
                self._lock.wait_for(lambda: self._asked or self._stopping, pause)
            self._asked = False
            return not self._stopping
