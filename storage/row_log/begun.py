"""A state that was begun: the rows put until then, and others as they were then, given to it while puts go on.

That is how a checkpoint is written beside training. Rows that were changed but not put when the state was begun come
later, in segments of their own, which take numbers that were set aside for them: so their epochs are lower than those
of everything put since. Whatever was put of the same id since then wins - in the index, when the store is opened, and
for who follows it - by the rule that the newest epoch counts; and what was put since is no part of the state. Numbers
that are not used stay unused.

Until the state is complete no other one is made, so nothing that it needs is deleted. If it is never completed, rows
given to it are rows like others, older than all that was put since.

Owned by the store's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.errors import StoreConfigError
from storage.row_log.group_rows import GroupRows
from storage.row_log.places import NUMBER, ROW_BITS
from storage.store import Mask, RowIds


@dataclass(slots=True)
class Begun:
    """See the module's docstring.

    Attributes:
        number: of the state.
        first, epoch: the first and the last number set aside; the latter is the state's epoch.
        needed: int64 (n,), numbers of the segments that it consisted of when it was begun.
        rows: live rows of each group that there was then, those given since included.
    """

    number: int
    first: int
    epoch: int
    needed: NDArray[np.int64]
    rows: list[int]
    _taken: int = 0

    def take_number(self) -> int:
        """A number for a segment of its rows.

        Raises:
            StoreConfigError: there is none left.
        """
        if self.first + self._taken > self.epoch:
            raise StoreConfigError(
                f"a state that was begun was given more rows than its {self.epoch - self.first + 1} segments hold: "
                "say how many at begin_state"
            )
        self._taken += 1
        return self.first + self._taken - 1

    def segments(self, groups: Sequence[GroupRows]) -> NDArray[np.int64]:
        """Numbers, ascending, of the segments that the state consists of. Requires: all its rows are sealed."""
        numbers = np.concatenate([np.zeros(0, np.int64), *(group.segments.lines[:, NUMBER] for group in groups)])
        given = numbers[(numbers >= self.first) & (numbers <= self.epoch)]
        return np.union1d(self.needed, given)

    def count(self, group: GroupRows, inserted: int, rows: RowIds, known: Mask | None) -> None:
        """Count rows that were given to it just now, `inserted` of which the index had not got.

        Of those that were put since it was begun nobody remembers whether they had a row before, but who gives them.

        Requires: the lock.
        """
        if known is not None and not known.all():
            places = group.index.find(
                group.segments.lines, np.ascontiguousarray(rows.tables), np.ascontiguousarray(rows.ids)
            )
            superseded = group.segments.lines[(places >> np.uint64(ROW_BITS)).astype(np.int64), NUMBER] > self.epoch
            inserted += int((superseded & ~known).sum())
        self.rows[group.group] += inserted
