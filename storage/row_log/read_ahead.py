"""ReadAhead: rows that are announced are asked for by a thread of its own, so that the disk never waits for the reader.

Asking for a page blocks once the disk has as many requests as it takes, so a batch takes about as long to be asked for
as to be read. Batches are asked for in the order in which they are announced, while no get reads: what is wanted now
comes first, and little is read so early that the page cache might have dropped it when its turn comes. A get takes over
what is left of its own rows. All goes part by part, each under a pin of its own: a close waits for one part. The thread
is there while something is left to ask for.

Guarded by the store's lock, which it does not hold while it asks. What is announced may be dropped at any time: nothing
here changes what is read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread

import numpy as np

from storage.row_log.lock import StoreLock
from storage.store import RowIds

_PART_ROWS = 512
_SAMPLE = 8
_MOST_BATCHES = 4  # that wait: whoever announces more than that is ahead of the disk anyway


class ReadAhead:
    """See the module's docstring.

    Args:
        lock: the store's.
        ask: has the disk begin to read some rows; raises what a get would, for a store that is closed for one.
    """

    def __init__(self, lock: StoreLock, ask: Callable[[RowIds], None]) -> None:
        self._lock = lock
        self._ask = ask
        self._left: deque[RowIds] = deque()
        self._gets = 0
        self._thread: Thread | None = None
        self._pid = os.getpid()

    def announce(self, rows: RowIds) -> None:
        """Have rows asked for, unless too many wait already, or this is a forked child, in which no thread does it."""
        if os.getpid() != self._pid or not len(rows):
            return
        with self._lock:
            if len(self._left) < _MOST_BATCHES:
                self._left.append(RowIds(rows.group, rows.tables.copy(), rows.ids.copy()))
            if self._thread is None:
                self._start()

    @contextmanager
    def giving_way(self, rows: RowIds) -> Iterator[None]:
        """Around a get, which has the disk to itself; what was announced and is among `rows` is done."""
        if os.getpid() != self._pid:  # the lock is the parent's
            yield
            return
        with self._lock:
            self._gets += 1
            if self._left:
                self._left = deque(one for one in self._left if not _covers(rows, one))
        try:
            yield
        finally:
            with self._lock:
                self._gets -= 1
                if self._left:
                    self._lock.notify_all()

    def _start(self) -> None:
        thread = Thread(target=self._work, name="tiered-emb-read-ahead", daemon=True)
        with suppress(RuntimeError):  # no thread to be had, at the end of the interpreter for one
            thread.start()
            self._thread = thread

    def _work(self) -> None:
        try:
            while (rows := self._next()) is not None:
                self._ask(rows)
        except Exception:  # which the gets that come meet too, or do not
            with self._lock:
                self._left.clear()
                self._thread = None

    def _next(self) -> RowIds | None:
        """The next part, once no get reads."""
        with self._lock:
            self._lock.wait_for(lambda: not self._gets)
            if not self._left:
                self._thread = None
                return None
            rows = self._left.popleft()
            if len(rows) > _PART_ROWS:
                self._left.appendleft(_part(rows, slice(_PART_ROWS, None)))
            return _part(rows, slice(_PART_ROWS))


def _covers(rows: RowIds, announced: RowIds) -> bool:
    """Whether a get of these rows reads what was announced, by a sample: neighbouring batches have rows in common."""
    sample = np.linspace(0, len(announced) - 1, min(_SAMPLE, len(announced)), dtype=np.intp)
    return rows.group == announced.group and all(
        bool(np.any((rows.ids == id) & (rows.tables == table)))
        for table, id in zip(announced.tables[sample], announced.ids[sample], strict=True)
    )


def _part(rows: RowIds, part: slice) -> RowIds:
    return RowIds(rows.group, rows.tables[part], rows.ids[part])
