"""MemoryStore: the Store protocol in its plainest form, the oracle of the contract tests.

A dict from (table, id) to a position and one growing array per group; nothing is shared with the row log, so that a
mistake would have to be made twice to go unseen. It loops over rows in Python: use it as a reference and for small
tables. Nothing survives the process.

Thread safety: one lock around each verb.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from storage.errors import StoreChangedError
from storage.schema import RowSchema
from storage.store import MAX_ID, MIN_ID, Mask, RowBytes, RowIds, check_batch, check_found
from storage.volatile import VolatileStore

_BLOCK_ROWS = 4096
_DICT_BYTES_PER_ROW = 320  # dict slot, tuple, two ints: measured at 280 with CPython 3.11


@dataclass
class _Group:
    schema: RowSchema
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    used: int = 0
    data: RowBytes = field(init=False)

    def __post_init__(self) -> None:
        self.data = np.zeros((0, self.schema.row_bytes), np.uint8)

    def place_of(self, row: tuple[int, int]) -> int:
        """The position of a row, made if there is none."""
        place = self.places.get(row)
        if place is None:
            place = self.free.pop() if self.free else self._append()
            self.places[row] = place
        return place

    def _append(self) -> int:
        if self.used == len(self.data):
            grown = np.zeros((max(16, 2 * len(self.data)), self.schema.row_bytes), np.uint8)
            grown[: len(self.data)] = self.data
            self.data = grown
        self.used += 1
        return self.used - 1

    @property
    def rows(self) -> int:
        return len(self.places)

    @property
    def memory_bytes(self) -> int:
        return self.data.nbytes + len(self.places) * _DICT_BYTES_PER_ROW


class MemoryStore(VolatileStore[_Group]):
    """A store in ordinary memory; see the module's docstring."""

    def _make_group(self, schema: RowSchema) -> _Group:
        return _Group(schema)

    def get(self, rows: RowIds, out: RowBytes, found: Mask) -> None:
        """See `Store.get`."""
        with self._lock:
            group = self._group(rows.group)
            check_batch(rows, out, group.schema.row_bytes, written=True)
            check_found(rows, found)
            for i, row in enumerate(zip(rows.tables.tolist(), rows.ids.tolist(), strict=True)):
                place = group.places.get(row)
                found[i] = place is not None
                if place is not None:
                    out[i] = group.data[place]
            hits = int(found.sum())
            self._count(rows_read=hits, bytes_read=hits * group.schema.row_bytes)

    def put(self, rows: RowIds, data: RowBytes) -> None:
        """See `Store.put`."""
        with self._lock:
            group = self._group(rows.group)
            check_batch(rows, data, group.schema.row_bytes)
            for row, content in zip(zip(rows.tables.tolist(), rows.ids.tolist(), strict=True), data, strict=True):
                place = group.place_of(row)
                group.data[place] = content
            self._version += len(rows) > 0
            self._count(rows_written=len(rows), bytes_written=data.nbytes)

    def delete(self, rows: RowIds) -> None:
        """See `Store.delete`."""
        with self._lock:
            group = self._group(rows.group)
            for row in zip(rows.tables.tolist(), rows.ids.tolist(), strict=True):
                place = group.places.pop(row, None)
                if place is not None:
                    group.free.append(place)
                    self._version += 1

    def scan(
        self, group: int, *, table: int | None = None, first_id: int = MIN_ID, last_id: int = MAX_ID
    ) -> Iterator[tuple[RowIds, RowBytes]]:
        """See `Store.scan`."""
        with self._lock:
            held = self._group(group)
            version = self._version
            places = held.places.items()
            live = [(row, at) for row, at in places if table in (None, row[0]) and first_id <= row[1] <= last_id]
        for first in range(0, len(live), _BLOCK_ROWS):
            block = live[first : first + _BLOCK_ROWS]
            with self._lock:
                self._check_open()
                if self._version != version:
                    raise StoreChangedError(f"rows were put or deleted during a scan of group {group}: scan again")
                data = held.data[[place for _, place in block]]
            tables = np.array([table for (table, _), _ in block], np.uint32)
            yield RowIds(group, tables, np.array([id for (_, id), _ in block], np.int64)), data

    def memory_after(self, inserts: int) -> int:
        """See `Store.memory_after`."""
        with self._lock:
            widest = max((group.schema.row_bytes for group in self._groups), default=0)
            doubled = sum(group.memory_bytes + group.data.nbytes for group in self._groups)
            return doubled + inserts * (2 * widest + _DICT_BYTES_PER_ROW) + 16 * widest * len(self._groups)
