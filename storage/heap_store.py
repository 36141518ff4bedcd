"""HeapStore: rows in host memory, found and copied by kernels. What a module trains on when it names no store.

Rows lie in blocks of about 1 MiB, and a block never moves and never goes: growth adds a block and copies no row. A put
to an id that is there overwrites the row in place; a deleted row leaves a place that the next new id takes, so memory
follows the most rows that there ever were.

    block     rows, from a cache line's start | ids, 8 bytes each | table numbers, 4 bytes each
    free      place -> place -> ... -> 0       threaded through the ids of deleted rows
    index     (table, id) -> place             `storage.id_index`, about 11 bytes a row

So a row costs about 24 bytes beside its own. The index is the one of the row log, and a block has a line in the
`SegmentTable` just as a segment has; what differs is that a row here may change, and therefore has no checksum. The
index keeps 24 bits of an id's hash and proves nothing by them: whatever it leads to is compared with the stored id and
table. It grows a shard at a time and from its own entries: no id is read back, no row touched, and a call pays for no
shard but those that it fills.

Every verb works in two passes over some thousand ids. The first looks up places, so the second knows far enough ahead
which ids and rows it will touch to have their cache lines asked for. What was found in the first pass is a hint: the
batch itself may have added the id since. A place is never moved, so a hint that compares equal is right.

Memory: how many rows a HeapStore holds is the user's choice, so the budgets of tiers leave it out. `stats()` says what
is held all the same, and `memory_after` bounds it. Deleting gives nothing back to the system; closing does.

Threads: one lock around each verb; kernels run without the GIL. Not here: anything that survives the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from storage.errors import StoreChangedError
from storage.heap_kernels import END, NEXT, free_rows, read_rows, write_rows
from storage.id_index import IdIndex
from storage.row_log.gather import find_places, live_rows
from storage.row_log.places import CODES, COUNT, IDS, MAX_SEGMENT_ROWS, NUMBER, ROWS, WIDTHS, SegmentTable
from storage.row_log.raw import row_step
from storage.schema import RowSchema
from storage.store import MAX_ID, MIN_ID, IdRange, Mask, RowBytes, RowIds, check_batch, check_found
from storage.volatile import VolatileStore

Places: TypeAlias = NDArray[np.uint64]

_SHARDS = 128
_BLOCK_BYTES = 1 << 20
_PART_ROWS = 4096  # of a batch at a time: what one pass brought into the cache is still there in the next
_SCAN_ROWS = 4096
_ID_BYTES, _TABLE_BYTES, _LINE_BYTES = 8, 4, 64
_ARRAY_OVERHEAD = 128  # a numpy array's object and its allocation


class _Group:
    """The rows of one group; the arguments of its verbs have been checked."""

    def __init__(self, schema: RowSchema) -> None:
        self.schema = schema
        self._stride = np.uint64(schema.row_bytes)
        self._index = IdIndex(_SHARDS)
        self._segments = SegmentTable()
        self._blocks: list[RowBytes] = []
        self._ledger: NDArray[np.int64] = np.zeros(3, np.int64)
        side_bytes = _ID_BYTES + _TABLE_BYTES
        self._block_rows = max(1, min(MAX_SEGMENT_ROWS, _BLOCK_BYTES // (schema.row_bytes + side_bytes)))
        self._ids_at = -(-self._block_rows * schema.row_bytes // _ID_BYTES) * _ID_BYTES
        self._block_bytes = _LINE_BYTES + self._ids_at + self._block_rows * side_bytes

    @property
    def rows(self) -> int:
        return self._index.rows

    @property
    def memory_bytes(self) -> int:
        blocks = len(self._blocks) * (self._block_bytes + _ARRAY_OVERHEAD)
        return blocks + self._index.memory_bytes + self._segments.memory_bytes

    def memory_after(self, inserts: int) -> int:
        """As `Store.memory_after`, of this group alone and without the `bytes_a_row` of each insert."""
        blocks = len(self._blocks) + 1  # the newest may be full
        lines = self._segments.memory_after(-(-inserts // self._block_rows))
        index = self._index.memory_bytes + self._index.jump_bytes(inserts)
        return blocks * (self._block_bytes + _ARRAY_OVERHEAD) + lines + index

    @property
    def bytes_a_row(self) -> int:
        """The most that a new row costs, its share of a block and of the index's growth."""
        return -(-(self._block_bytes + _ARRAY_OVERHEAD) // self._block_rows) + 16

    def get(self, rows: RowIds, out: RowBytes, found: Mask) -> int:
        """As `Store.get`; the number of rows found."""
        return sum(self._read(ids, places, out[part], found[part]) for part, ids, places in self._parts(rows))

    def _read(self, rows: RowIds, places: Places, out: RowBytes, found: Mask) -> int:
        table, shift, lines = self._index.table, self._index.shift, self._segments.lines
        address, step = np.uint64(out.ctypes.data), row_step(out)
        return int(read_rows(table, shift, lines, self._stride, rows.tables, rows.ids, places, address, step, found))

    def put(self, rows: RowIds, data: RowBytes) -> None:
        """As `Store.put`."""
        for part, ids, places in self._parts(rows):
            self._write(ids, places, data[part])

    def _write(self, rows: RowIds, places: Places, data: RowBytes) -> None:
        address, step = np.uint64(data.ctypes.data), row_step(data)
        done = 0
        while done < len(rows):
            done, shard = write_rows(
                self._index.table,
                self._index.shift,
                self._segments.lines,
                self._stride,
                self._ledger,
                rows.tables,
                rows.ids,
                places,
                address,
                step,
                done,
            )
            if shard >= 0:
                self._index.grow(shard)
            elif done < len(rows):
                self._add_block()

    def delete(self, rows: RowIds) -> int:
        """As `Store.delete`; the number of rows that were there."""
        table, shift, lines = self._index.table, self._index.shift, self._segments.lines
        return sum(
            int(free_rows(table, shift, lines, self._ledger, ids.tables, ids.ids, places))
            for _, ids, places in self._parts(rows)
        )

    def _parts(self, rows: RowIds) -> Iterator[tuple[slice, RowIds, Places]]:
        """Part by part of a batch: where it is, its ids, and the places that the index gives for them."""
        tables, ids = np.ascontiguousarray(rows.tables), np.ascontiguousarray(rows.ids)
        for first in range(0, len(rows), _PART_ROWS):
            part = slice(first, first + _PART_ROWS)
            places = np.empty(len(ids[part]), np.uint64)
            find_places(self._index.table, self._index.shift, tables[part], ids[part], places)
            yield part, RowIds(rows.group, tables[part], ids[part]), places

    def _add_block(self) -> None:
        block = np.empty(self._block_bytes, np.uint8)
        slot = self._segments.take()
        self._blocks.append(block)
        line, address = self._segments.lines[slot], block.ctypes.data
        line[ROWS] = address + -address % _LINE_BYTES
        line[IDS] = line[ROWS] + self._ids_at
        line[CODES] = line[IDS] + _ID_BYTES * self._block_rows
        line[WIDTHS], line[NUMBER] = _TABLE_BYTES, len(self._blocks)
        self._ledger[NEXT] = slot * MAX_SEGMENT_ROWS
        self._ledger[END] = self._ledger[NEXT] + self._block_rows

    def slots(self) -> NDArray[np.int64]:
        """The blocks, as `live_block` wants them."""
        return self._segments.slots()

    def live_block(self, group: int, slot: int, start: int, which: IdRange) -> tuple[int, RowIds, RowBytes]:
        """Live rows of a block from row `start` on: the row to go on at (-1 = none is left), their ids, and they."""
        tables, ids = np.empty(_SCAN_ROWS, np.uint32), np.empty(_SCAN_ROWS, np.int64)
        places = np.empty(_SCAN_ROWS, np.uint64)
        lines = self._segments.lines
        at, n = live_rows(self._index.table, self._index.shift, lines, slot, start, *which, tables, ids, places)
        rows, data = RowIds(group, tables[:n], ids[:n]), np.empty((n, self.schema.row_bytes), np.uint8)
        self._read(rows, places[:n], data, np.empty(n, np.bool_))
        return -1 if at == lines[slot, COUNT] else int(at), rows, data


class HeapStore(VolatileStore[_Group]):
    """A store in host memory; see the module's docstring, and `storage.store.Store` for the verbs."""

    def _make_group(self, schema: RowSchema) -> _Group:
        return _Group(schema)

    def get(self, rows: RowIds, out: RowBytes, found: Mask) -> None:
        """See `Store.get`."""
        with self._lock:
            group = self._group(rows.group)
            check_batch(rows, out, group.schema.row_bytes, written=True)
            check_found(rows, found)
            hits = group.get(rows, out, found)
            self._count(rows_read=hits, bytes_read=hits * group.schema.row_bytes)

    def put(self, rows: RowIds, data: RowBytes) -> None:
        """See `Store.put`; without memory for more rows it raises MemoryError, and some of them may be in the store."""
        with self._lock:
            group = self._group(rows.group)
            check_batch(rows, data, group.schema.row_bytes)
            self._version += len(rows) > 0
            group.put(rows, data)
            self._count(rows_written=len(rows), bytes_written=data.nbytes)

    def delete(self, rows: RowIds) -> None:
        """See `Store.delete`."""
        with self._lock:
            self._version += self._group(rows.group).delete(rows)

    def scan(
        self, group: int, *, table: int | None = None, first_id: int = MIN_ID, last_id: int = MAX_ID
    ) -> Iterator[tuple[RowIds, RowBytes]]:
        """See `Store.scan`."""
        which = (-1 if table is None else table, first_id, last_id)
        with self._lock:
            held, version = self._group(group), self._version
            slots = held.slots().tolist()
        for slot in slots:
            at = 0
            while at >= 0:
                with self._lock:
                    self._check_open()
                    if self._version != version:
                        raise StoreChangedError(f"rows were put or deleted during a scan of group {group}: scan again")
                    at, rows, data = held.live_block(group, slot, at, which)
                if len(rows):
                    yield rows, data

    def memory_after(self, inserts: int) -> int:
        """See `Store.memory_after`."""
        with self._lock:
            rows = inserts * max((group.bytes_a_row for group in self._groups), default=0)
            return rows + sum(group.memory_after(inserts) for group in self._groups)
