"""Owners: which table each slot's row is of, what a table keeps (floors) and what it may not exceed (quotas).

Tables with a floor or a quota are owners of their own, all others together are owner 0. A table at its quota makes room
for its new rows itself, whatever slots are free; a table at its floor gives none to others. Victims are searched in the
policy's order among the rows that may leave, so a table at its quota whose rows are few among many others costs a walk
along the order, once a batch.

Thread: the Directory's owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.memory import zeros
from tiered_emb.cache.arrays import resized
from tiered_emb.cache.verbs import ANYBODY, Guard

Positions: TypeAlias = NDArray[np.uint16]
_NOBODY = 0xFFFF  # owner of a slot without a row
_MOST_OWNERS = _NOBODY
_NO_QUOTA = (1 << 63) - 1
BYTES_PER_SLOT = 2


class Owners:
    """See the module's docstring.

    Args:
        capacity_rows: slots.
        floors, quotas: rows by table number.

    Attributes:
        rows: int64 (T,), rows of each owner.

    Raises ValueError for floors that leave no slot to others, and for quotas above the capacity or below their floors.
    """

    def __init__(self, capacity_rows: int, floors: Mapping[int, int], quotas: Mapping[int, int]) -> None:
        named = sorted({*floors, *quotas})
        check_shares(capacity_rows, floors, quotas)
        self._tables = np.array(named, np.uint32)
        self.rows = np.zeros(len(named) + 1, np.int64)
        self._floors = np.array([0, *(floors.get(table, 0) for table in named)], np.int64)
        self._quotas = np.array([_NO_QUOTA, *(quotas.get(table, _NO_QUOTA) for table in named)], np.int64)
        self._of_slot: Positions = zeros(capacity_rows, np.uint16)
        self._of_slot[:] = _NOBODY

    def guard(self, pins: NDArray[np.uint16], only: int = ANYBODY) -> Guard:
        """Who may leave, of all rows or those of one owner."""
        return Guard(pins, self._of_slot, self.rows, self._floors, np.array([only], np.int64))

    def of(self, tables: NDArray[np.uint32]) -> Positions:
        """The owner of each row (N,)."""
        at = np.searchsorted(self._tables, tables)
        known = self._tables[np.minimum(at, len(self._tables) - 1)] == tables
        return np.where(known, at + 1, 0).astype(np.uint16)

    def excess(self, owners: Positions) -> NDArray[np.int64]:
        """How many of its rows each owner must give up for new ones (N,)."""
        coming = np.bincount(owners, minlength=len(self.rows))
        excess: NDArray[np.int64] = np.maximum(0, self.rows + coming - self._quotas) * (coming > 0)
        return excess

    def check_room(self, excess: NDArray[np.int64], others: int, pins: NDArray[np.uint16], pinned: int) -> None:
        """Raise ValueError unless owners can give up `excess` (T,) and all of them together `others` beyond that."""
        if not self._has_room(excess, others, self.rows - pinned, pinned):
            unpinned = np.zeros(len(self.rows), np.int64)
            _count_unpinned(self._of_slot, pins, unpinned)
            if not self._has_room(excess, others, unpinned, 0):
                raise ValueError(
                    f"{int(excess.sum()) + others} rows would have to leave, and pins and floors let none of them go: "
                    "use smaller batches, lower floors or a larger tier"
                )

    def _has_room(self, excess: NDArray[np.int64], others: int, unpinned: NDArray[np.int64], pinned: int) -> bool:
        left = np.minimum(self.rows - self._floors, unpinned + pinned) - excess
        own = bool((excess <= np.maximum(0, unpinned)).all())
        return own and int(np.maximum(0, left).sum()) - pinned >= others

    def enter(self, slots: NDArray[np.int32], owners: Positions) -> None:
        """Slots (N,) got rows."""
        self._of_slot[slots] = owners
        self.rows += np.bincount(owners, minlength=len(self.rows))

    def leave(self, slots: NDArray[np.int32], *, counted: bool = False) -> None:
        """Slots (N,) lost their rows; `counted` says that the rows were taken off as they became victims."""
        if not counted:
            self.rows -= np.bincount(self._of_slot[slots], minlength=len(self.rows))
        self._of_slot[slots] = _NOBODY

    def resize(self, capacity_rows: int, slot_count: int) -> None:
        """Slots at and above the new capacity lost their rows already."""
        self._of_slot = resized(self._of_slot, capacity_rows)
        self._of_slot[slot_count:] = _NOBODY

    def clear(self) -> None:
        """No slot has a row."""
        self.rows[:] = 0
        self._of_slot[:] = _NOBODY

    @property
    def memory_bytes(self) -> int:
        """Bytes held."""
        return sum(one.nbytes for one in (self._tables, self.rows, self._floors, self._quotas, self._of_slot))


def check_shares(capacity_rows: int, floors: Mapping[int, int], quotas: Mapping[int, int]) -> None:
    """Raise ValueError for floors and quotas that cannot be kept by so many slots; see `Owners`."""
    if len({*floors, *quotas}) >= _MOST_OWNERS:
        raise ValueError(f"{len({*floors, *quotas})} tables have a floor or a quota: {_MOST_OWNERS - 1} may")
    for what, shares in (("floor", floors), ("quota", quotas)):
        for table, rows in shares.items():
            if not 1 <= rows <= capacity_rows:
                raise ValueError(
                    f"table {table} has a {what} of {rows} rows in a tier of {capacity_rows}: "
                    f"expected 1 to {capacity_rows}"
                )
    for table, rows in floors.items():
        if rows > quotas.get(table, rows):
            raise ValueError(f"table {table} keeps {rows} rows at least and {quotas[table]} at most: raise the quota")
    kept = sum(floors.values())
    if kept and kept >= capacity_rows:
        raise ValueError(
            f"floors of {kept} rows leave none of {capacity_rows} for others: lower them or enlarge the tier"
        )


@njit(nogil=True, cache=True)
def _count_unpinned(of_slot, pins, unpinned):  # type: ignore[no-untyped-def]
    for slot in range(len(of_slot)):
        if of_slot[slot] != _NOBODY and pins[slot] == 0:
            unpinned[of_slot[slot]] += 1
