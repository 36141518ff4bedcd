"""MemoryStore: the Store protocol in its plainest form, the oracle of the contract tests.

A dict from (table, id) to a position and one growing array per group; nothing is shared with the row log, so that a
mistake would have to be made twice to go unseen. It loops over rows in Python: use it as a reference and for small
tables. Nothing survives the process.

Thread safety: one lock around each verb.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from threading import RLock
from types import TracebackType

import numpy as np

from storage.errors import SchemaMismatchError, StoreChangedError, StoreClosedError, StoreConfigError
from storage.schema import RowSchema, table_number
from storage.store import Mask, RowBytes, RowIds, StoreStats, TableRef, check_batch, check_found

_BLOCK_ROWS = 4096
_DICT_BYTES_PER_ROW = 320  # dict slot, tuple, two ints: measured at 280 with CPython 3.11


@dataclass
class _Group:
    schema: RowSchema
    places: dict[tuple[int, int], int] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    used: int = 0
    rows: RowBytes = field(init=False)

    def __post_init__(self) -> None:
        self.rows = np.zeros((0, self.schema.row_bytes), np.uint8)

    def place_of(self, row: tuple[int, int]) -> int:
        """The position of a row, made if there is none."""
        place = self.places.get(row)
        if place is None:
            place = self.free.pop() if self.free else self._append()
            self.places[row] = place
        return place

    def _append(self) -> int:
        if self.used == len(self.rows):
            grown = np.zeros((max(16, 2 * len(self.rows)), self.schema.row_bytes), np.uint8)
            grown[: len(self.rows)] = self.rows
            self.rows = grown
        self.used += 1
        return self.used - 1

    @property
    def memory_bytes(self) -> int:
        return self.rows.nbytes + len(self.places) * _DICT_BYTES_PER_ROW


class MemoryStore:
    """A store in ordinary memory; see the module's docstring."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._tables: dict[str, TableRef] = {}
        self._groups: list[_Group] = []
        self._note = b""
        self._stats = StoreStats()
        self._version = 0
        self._closed = False

    def open_table(self, name: str, schema: RowSchema) -> TableRef:
        """See `Store.open_table`."""
        with self._lock:
            self._check_open()
            table = self._tables.get(name)
            if table is None:
                table = self._create_table(name, schema)
            if table.schema != schema:
                raise SchemaMismatchError(f"table {name!r} holds rows of {table.schema}, not of {schema}")
            return table

    def _create_table(self, name: str, schema: RowSchema) -> TableRef:
        number = table_number(name)
        for other in self._tables.values():
            if other.number == number:
                raise SchemaMismatchError(f"tables {other.name!r} and {name!r} share the number {number}: rename one")
        schemas = [group.schema for group in self._groups]
        if schema not in schemas:
            self._groups.append(_Group(schema))
            schemas.append(schema)
        self._tables[name] = TableRef(name, schemas.index(schema), number, schema)
        return self._tables[name]

    def get(self, rows: RowIds, out: RowBytes, found: Mask) -> None:
        """See `Store.get`."""
        with self._lock:
            group = self._group(rows.group)
            check_batch(rows, out, group.schema.row_bytes)
            check_found(rows, found)
            for i, row in enumerate(zip(rows.tables.tolist(), rows.ids.tolist(), strict=True)):
                place = group.places.get(row)
                found[i] = place is not None
                if place is not None:
                    out[i] = group.rows[place]
            hits = int(found.sum())
            self._count(rows_read=hits, bytes_read=hits * group.schema.row_bytes)

    def put(self, rows: RowIds, data: RowBytes) -> None:
        """See `Store.put`."""
        with self._lock:
            group = self._group(rows.group)
            check_batch(rows, data, group.schema.row_bytes)
            for row, content in zip(zip(rows.tables.tolist(), rows.ids.tolist(), strict=True), data, strict=True):
                place = group.place_of(row)
                group.rows[place] = content
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

    def scan(self, group: int) -> Iterator[tuple[RowIds, RowBytes]]:
        """See `Store.scan`."""
        with self._lock:
            held = self._group(group)
            version = self._version
            live = list(held.places.items())
        for first in range(0, len(live), _BLOCK_ROWS):
            block = live[first : first + _BLOCK_ROWS]
            with self._lock:
                self._check_open()
                if self._version != version:
                    raise StoreChangedError(f"rows were put or deleted during a scan of group {group}: scan again")
                data = held.rows[[place for _, place in block]]
            tables = np.array([table for (table, _), _ in block], np.uint32)
            yield RowIds(group, tables, np.array([id for (_, id), _ in block], np.int64)), data

    def flush(self, note: bytes | None = None) -> None:
        """See `Store.flush`; there is nothing to make durable."""
        with self._lock:
            self._check_open()
            if note is not None:
                self._note = bytes(note)

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            self._closed = True

    @property
    def note(self) -> bytes:
        """See `Store.note`."""
        return self._note

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        with self._lock:
            return replace(
                self._stats,
                rows=sum(len(group.places) for group in self._groups),
                live_bytes=sum(len(group.places) * group.schema.row_bytes for group in self._groups),
                memory_bytes=sum(group.memory_bytes for group in self._groups),
            )

    def memory_after(self, inserts: int) -> int:
        """See `Store.memory_after`."""
        with self._lock:
            widest = max((group.schema.row_bytes for group in self._groups), default=0)
            doubled = sum(group.memory_bytes + group.rows.nbytes for group in self._groups)
            return doubled + inserts * (2 * widest + _DICT_BYTES_PER_ROW) + 16 * widest * len(self._groups)

    def __enter__(self) -> MemoryStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("this MemoryStore was closed; its rows are gone")

    def _group(self, group: int) -> _Group:
        self._check_open()
        if not 0 <= group < len(self._groups):
            raise StoreConfigError(f"group {group}: this store has {len(self._groups)} groups; open a table first")
        return self._groups[group]
