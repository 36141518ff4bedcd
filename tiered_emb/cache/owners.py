"""Owners: which table each slot's row is of, what a table keeps (floors) and what it may not exceed (quotas).

Tables with a floor or a quota are owners of their own, all others together are owner 0. A table at its quota makes room
for its new rows itself, whatever slots are free; a table at its floor gives none to others. Rows that are coming count
towards the floor, so a table at its floor can always exchange its own rows. Victims are searched in the policy's order
among the rows that may leave, so a table at its quota whose rows are few among many others costs a walk along the
order, once a batch.

Thread: the Directory's owner.

Shapes: N rows, T owners, S slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.memory import held_bytes, zeros
from tiered_emb.cache.arrays import resized
from tiered_emb.cache.verbs import ANYBODY, Guard

Positions: TypeAlias = NDArray[np.uint16]
_NOBODY = 0xFFFF  # owner of a slot without a row
MOST_SHARES = _NOBODY - 1  # tables with a floor or a quota
_NO_QUOTA = (1 << 63) - 1
_BYTES_PER_SLOT, _BYTES_PER_TABLE = 2, 4 + 4 * 8  # the number of a table; rows, pins, floor and quota
_NONE: Positions = np.empty(0, np.uint16)


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why rows cannot be in a tier together.

    Attributes:
        table: number of the table whose quota they exceed; None = the slots do not do.
        rows: slots that would be needed, with those that pins and floors keep; or rows of the table.
        limit: slots there are, or the table's quota.
    """

    table: int | None
    rows: int
    limit: int


class Owners:
    """See the module's docstring.

    Args:
        capacity_rows: slots.
        floors, quotas: rows by table number.

    Attributes:
        rows: int64 (T,), rows of each owner.
        pinned: int64 (T,), rows of each owner with a pin; kept by `tiered_emb.cache.probing`.
        of_slot: uint16 (S,), the owner of each slot.
        floor_rows: the sum of the floors.

    Raises ValueError for floors that leave no slot to others, and for quotas of no row or below their floors. A quota
    above the capacity is none as long as the capacity stays.
    """

    def __init__(self, capacity_rows: int, floors: Mapping[int, int], quotas: Mapping[int, int]) -> None:
        check_shares(capacity_rows, floors, quotas)
        named = sorted({*floors, *quotas})
        self._tables = np.array(named, np.uint32)
        self.rows = np.zeros(len(named) + 1, np.int64)
        self.pinned = np.zeros(len(named) + 1, np.int64)
        self.floor_rows = sum(floors.values())
        self._floors = np.array([0, *(floors.get(table, 0) for table in named)], np.int64)
        self._quotas = np.array([_NO_QUOTA, *(quotas.get(table, _NO_QUOTA) for table in named)], np.int64)
        self.of_slot: Positions = zeros(capacity_rows, np.uint16)
        self.of_slot[:] = _NOBODY

    def guard(self, pins: NDArray[np.uint16], only: int = ANYBODY) -> Guard:
        """Who may leave, of all rows or those of one owner."""
        return Guard(pins, self.of_slot, self.rows, self._floors, np.array([only], np.int64))

    def of(self, tables: NDArray[np.uint32]) -> Positions:
        """The owner of each row (N,)."""
        at = np.searchsorted(self._tables, tables)
        known = self._tables[np.minimum(at, len(self._tables) - 1)] == tables
        return np.where(known, at + 1, 0).astype(np.uint16)

    def excess(self, owners: Positions) -> NDArray[np.int64]:
        """How many of its rows each owner must give up for new ones (N,)."""
        coming = self._count(owners)
        excess: NDArray[np.int64] = np.maximum(0, self.rows + coming - self._quotas) * (coming > 0)
        return excess

    def shortage(self, new: Positions, kept: Positions = _NONE) -> Shortage | None:
        """Why `new` rows (N,) cannot be admitted while pinned rows and `kept` ones (M,) stay; None = they can.

        In the end an owner has all rows that stay, or as many of what it has and gets as its floor keeps, if that is
        more. Admitting in several steps needs no more.
        """
        coming = self._count(new)
        at_once = self.pinned + coming + self._count(kept)
        over = np.flatnonzero((at_once > self._quotas) & (coming > 0))
        if len(over):
            at = int(over[0])
            return Shortage(int(self._tables[at - 1]), int(at_once[at]), int(self._quotas[at]))
        needed = int(np.maximum(at_once, np.minimum(self._floors, self.rows + coming)).sum())
        return Shortage(None, needed, len(self.of_slot)) if needed > len(self.of_slot) else None

    def fitting(self, owners: Positions) -> NDArray[np.bool_]:
        """Which of new rows (N,) can be admitted together, later ones first."""
        fits = np.ones(len(owners), np.bool_)
        if self.shortage(owners) is not None:
            _fit(owners, self.rows, self.pinned, self._floors, self._quotas, len(self.of_slot), fits)
        return fits

    def lacking(self, owners: Positions) -> NDArray[np.bool_]:
        """Which of rows (N,) that left their owners' floors miss, later ones first."""
        missed = np.zeros(len(owners), np.bool_)
        for owner in np.flatnonzero(self.rows < self._floors).tolist():
            left = np.flatnonzero(owners == owner)
            missed[left[max(0, len(left) - int(self._floors[owner] - self.rows[owner])) :]] = True
        return missed

    def floors_in(self, owners: Positions) -> int:
        """How many of the rows (N,), distinct, floors would keep beside the pinned ones."""
        return int(np.minimum(np.maximum(0, self._floors - self.pinned), self._count(owners)).sum())

    def pinned_above_floors(self) -> int:
        """Pinned rows that no floor keeps."""
        return int(np.maximum(0, self.pinned - self._floors).sum())

    def most_at_once(self, table: int) -> int:
        """Most rows of a table that can be there together, whatever the others' floors keep."""
        owner = int(self.of(np.array([table], np.uint32))[0])
        others = self.floor_rows - int(self._floors[owner])
        return min(int(self._quotas[owner]), len(self.of_slot) - others)

    def expect(self, owners: Positions) -> None:
        """Rows (N,) are coming; they count from now on."""
        self.rows += self._count(owners)

    def enter(self, slots: NDArray[np.int32], owners: Positions, *, counted: bool = False) -> None:
        """Slots (N,) got rows; `counted` says that they were expected."""
        self.of_slot[slots] = owners
        if not counted:
            self.rows += self._count(owners)

    def leave(self, slots: NDArray[np.int32], *, counted: bool = False) -> None:
        """Slots (N,) lost their rows; `counted` says that the rows were taken off as they became victims."""
        if not counted:
            self.rows -= self._count(self.of_slot[slots])
        self.of_slot[slots] = _NOBODY

    def count_pins(self, pins: NDArray[np.uint16]) -> None:
        """Count the pinned rows anew, by the pins of every slot (S,)."""
        self.pinned[:] = self._count(self.of_slot[pins > 0])

    def resize(self, capacity_rows: int) -> None:
        """Slots at and above the new capacity lost their rows already."""
        before = len(self.of_slot)
        self.of_slot = resized(self.of_slot, capacity_rows)
        self.of_slot[before:] = _NOBODY

    def clear(self) -> None:
        """No slot has a row."""
        self.rows[:] = 0
        self.pinned[:] = 0
        self.of_slot[:] = _NOBODY

    def _count(self, owners: Positions) -> NDArray[np.int64]:
        return np.bincount(owners, minlength=len(self.rows))

    @property
    def memory_bytes(self) -> int:
        """Bytes held."""
        arrays = (self._tables, self.rows, self.pinned, self._floors, self._quotas, self.of_slot)
        return sum(one.nbytes for one in arrays)

    @staticmethod
    def bytes_for(capacity_rows: int, tables: int) -> int:
        """Most bytes held for so many tables with a floor or a quota; nothing for none."""
        return held_bytes(capacity_rows, _BYTES_PER_SLOT) + (tables + 1) * _BYTES_PER_TABLE if tables else 0


def check_shares(capacity_rows: int, floors: Mapping[int, int], quotas: Mapping[int, int]) -> None:
    """Raise ValueError for floors and quotas that cannot be kept by so many slots; see `Owners`."""
    if len({*floors, *quotas}) > MOST_SHARES:
        raise ValueError(f"{len({*floors, *quotas})} tables have a floor or a quota: {MOST_SHARES} may")
    for what, shares in (("floor", floors), ("quota", quotas)):
        for table, rows in shares.items():
            if rows < 1:
                raise _out_of_range(table, what, rows, capacity_rows)
    for table, rows in floors.items():
        if rows > quotas.get(table, rows):
            raise ValueError(f"table {table} keeps {rows} rows at least and {quotas[table]} at most: raise the quota")
    kept = sum(floors.values())
    if kept and kept >= capacity_rows:
        raise ValueError(
            f"floors of {kept} rows leave none of {capacity_rows} for others: lower them or enlarge the tier"
        )


def check_quotas(capacity_rows: int, quotas: Mapping[int, int]) -> None:
    """Raise ValueError for a quota that so many slots would never let a table reach."""
    for table, rows in quotas.items():
        if rows > capacity_rows:
            raise _out_of_range(table, "quota", rows, capacity_rows)


def _out_of_range(table: int, what: str, rows: int, capacity_rows: int) -> ValueError:
    return ValueError(
        f"table {table} has a {what} of {rows} rows in a tier of {capacity_rows}: expected 1 to {capacity_rows}"
    )


@njit(nogil=True, cache=True)
def _fit(owners, rows, pinned, floors, quotas, slots, fits):  # type: ignore[no-untyped-def]
    """Take rows from the last one on as long as `Owners.shortage` would find none."""
    coming = np.zeros(len(rows), np.int64)
    needed = np.maximum(pinned, np.minimum(floors, rows)).sum()
    for i in range(len(owners) - 1, -1, -1):
        owner = owners[i]
        new = coming[owner] + 1
        before = max(pinned[owner] + new - 1, min(floors[owner], rows[owner] + new - 1))
        more = max(pinned[owner] + new, min(floors[owner], rows[owner] + new)) - before
        fits[i] = pinned[owner] + new <= quotas[owner] and needed + more <= slots
        if fits[i]:
            coming[owner] = new
            needed += more
