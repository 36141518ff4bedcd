"""What the tiers did, counted by table.

A *hit* is a row (not a request) that a batch found in the tier, a *miss* one it did not: batches ask for each row once.
Counters are plain arrays written by the thread that plans; reading them from elsewhere gives a recent value.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.store import StoreStats

COUNTS = ("rows", "hits", "misses", "evictions", "write_backs")


@dataclass(frozen=True)
class TierStats:
    """One tier at one moment.

    Attributes:
        name: "hbm" or "ddr".
        capacity_rows: rows it has room for.
        rows: rows in it.
        capacity_bytes: its budget.
        bytes: what is charged to the budget now (for "ddr": slab, directories, index, staging and buffers).
        peak_bytes: the most that was ever charged.
        hits, misses, evictions, write_backs: rows, since the tier was made; a write-back is a changed row that left for
            the Store.
        by_table: table name -> its rows in the tier, their bytes, and the same four counts.
    """

    name: str
    capacity_rows: int
    rows: int
    capacity_bytes: int
    bytes: int
    peak_bytes: int
    hits: int
    misses: int
    evictions: int
    write_backs: int
    by_table: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the rows asked for that were in the tier; 0 before the first batch."""
        return self.hits / max(1, self.hits + self.misses)


@dataclass(frozen=True)
class EngineStats:
    """All tiers, top first, the Store below them, and by table the rows that were not updated (``on_nan="skip"``)."""

    tiers: list[TierStats]
    store: StoreStats
    skipped: dict[str, int] = field(default_factory=dict)


class RowCounters:
    """Rows counted by table ("rows": in the tier now): one int64 array a kind (``COUNTS``), one element a table."""

    def __init__(self) -> None:
        self.numbers: NDArray[np.uint32] = np.empty(0, np.uint32)
        self.counts: NDArray[np.int64] = np.zeros((len(COUNTS), 0), np.int64)

    def add_table(self, number: int) -> None:
        """Count this table too, from zero."""
        self.numbers = np.append(self.numbers, np.uint32(number))
        self.counts = np.pad(self.counts, ((0, 0), (0, 1)))

    def add(self, kind: str, tables: NDArray[np.uint32], sign: int = 1) -> None:
        """Count one row for each table number in ``tables``."""
        if len(tables):
            _count(tables, self.numbers, sign, self.counts[COUNTS.index(kind)])

    def total(self, kind: str) -> int:
        """Rows of this kind over all tables."""
        return int(self.counts[COUNTS.index(kind)].sum())

    def of(self, number: int, row_bytes: int) -> dict[str, int]:
        """The counts of one table."""
        column = self.counts[:, np.flatnonzero(self.numbers == number)[0]]
        counts = dict(zip(COUNTS, (int(count) for count in column), strict=True))
        return {**counts, "bytes": counts["rows"] * row_bytes}


@njit(nogil=True, cache=True)
def _count(tables, numbers, sign, counts):  # type: ignore[no-untyped-def]
    """Rows of a batch come table by table: the table is searched for only where it changes."""
    first = 0
    while first < len(tables):
        table, end = tables[first], first + 1
        while end < len(tables) and tables[end] == table:
            end += 1
        at = 0
        while numbers[at] != table:
            at += 1
        counts[at] += sign * (end - first)
        first = end
