"""Reader: a store open for reading follows what the writer commits.

Every verb runs inside a short LMDB read transaction: first the index catches up with the segments that were committed
since the last verb, then rows are looked up and copied, then the transaction ends. So a reader sees whole commits
(with durability "snapshot", whole states), never loses an address under its hands, and pins no page between verbs.

Catching up replays new segments only. It starts over when that would not be enough: a segment with live rows is gone
(the writer went back to an earlier state), or a new one holds rows moved from elsewhere.

Owned by the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from storage.row_log.group_rows import GroupRows
from storage.row_log.log import RowLog
from storage.row_log.places import LIVE, NUMBER
from storage.row_log.recovery import LAST_EPOCH, has_moved_rows, replay_log
from storage.row_log.state import State


class Reader:
    """See the module's docstring.

    Args:
        log: the store's log.
        groups: the store's groups; `refresh` may append to it.
        refresh: rereads the manifest, called before segments are replayed.
        to_state: whether to stop at the last complete state.

    Attributes:
        state: the last complete state seen.
        version: changes whenever the rows may have.
    """

    def __init__(
        self,
        log: RowLog,
        groups: list[GroupRows],
        refresh: Callable[[], None],
        to_state: bool,
        store: bytes,
        where: str,
    ) -> None:
        self.state = State(0, 0, b"")
        self.version = 0
        self._log = log
        self._groups = groups
        self._refresh = refresh
        self._to_state = to_state
        self._store = store
        self._where = where
        self._seen = -1

    @contextmanager
    def view(self) -> Iterator[None]:
        """Catch up; rows may be read until the block ends."""
        with self._log.reading() as txn:
            if txn.id() != self._seen:
                self._follow(txn)
            yield

    def _follow(self, txn: Any) -> None:
        self._seen = -1
        self._refresh()
        self.version += 1
        self.state = self._log.state(txn)
        last = self.state.epoch if self._to_state else LAST_EPOCH
        self._drop_gone(txn)
        replay_log(self._log, txn, self._groups, last, self._store, self._where)
        self._seen = txn.id()

    def _drop_gone(self, txn: Any) -> None:
        """Forget segments that were deleted, or everything if their rows or moved ones make that necessary."""
        numbers = self._log.numbers(txn)
        known = np.concatenate([np.zeros(0, np.int64), *(g.segments.lines[:, NUMBER] for g in self._groups)])
        fresh = np.setdiff1d(numbers, known).tolist() if known.any() else []
        gone = [
            (group, int(slot))
            for group in self._groups
            for slot in group.segments.slots()
            if int(group.segments.lines[slot, NUMBER]) not in numbers
        ]
        live = any(group.segments.lines[slot, LIVE] for group, slot in gone)
        if live or has_moved_rows(self._log, txn, fresh, self._where):
            for group in self._groups:
                group.forget()
            return
        for group, slot in gone:
            group.segments.give_back(slot)
