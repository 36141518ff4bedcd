"""GroupRows: the rows of one group - its index, its segment table and the segments not yet committed.

Rows become readable when they are appended, durable when the segment they are in is committed. A segment is first
`open` (being filled), then `sealed` (its bytes final, still in memory), then committed, when its line of the segment
table is pointed into the memory map and its buffer let go. If a commit fails, sealed segments simply stay.

Owned by the store's lock. This class calls no LMDB and decides nothing about when to commit: the store hands it
buffers, takes sealed segments and tells it where they were put.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.errors import CorruptRowError, StoreConfigError
from storage.id_index import IdIndex
from storage.row_log.gather import (
    DONE,
    SEGMENT_FULL,
    SHARD_FULL,
    append_rows,
    append_tombstones,
    bury,
    find_places,
    gather,
    live_rows,
    replay,
    settle,
)
from storage.row_log.lmdb_pages import bytes_at
from storage.row_log.pages import PageAdvisor
from storage.row_log.places import (
    CODES,
    COUNT,
    EPOCH,
    IDS,
    LIVE,
    MAX_SEGMENT_ROWS,
    NUMBER,
    ROWS,
    WIDTHS,
    SegmentTable,
    stored_id,
    stored_table,
)
from storage.row_log.raw import row_step
from storage.row_log.segment import HEADER_BYTES, SegmentHeader, read_header, segment_size, stride_of
from storage.row_log.write_buffer import WriteBuffer
from storage.store import Mask, RowBytes, RowIds

BLOCK_ROWS = 8192
_SCAN_ROWS = 4096
_ID_BYTES = np.uint64(8)


@njit(cache=True)
def _who(segments: Any, place: Any) -> Any:
    """Table number and id stored with a row."""
    return np.int64(stored_table(segments, place)), stored_id(segments, place)


@njit(nogil=True, cache=True)
def _first_unknown(tables: NDArray[np.uint32], known: NDArray[np.uint32]) -> int:
    """Position of the first table number that is not among the known (sorted) ones, len(tables) if all are."""
    for i in range(len(tables)):
        if i == 0 or tables[i] != tables[i - 1]:
            at = np.searchsorted(known, tables[i])
            if at == len(known) or known[at] != tables[i]:
                return i
    return len(tables)


class GroupRows:
    """See the module's docstring.

    Args:
        group: its number.
        row_bytes: bytes of a row as put.
        shards: of the index.
        where: the store's path, for messages.

    Attributes:
        tables: the group's table numbers, sorted.
        stride: stored bytes of a row.
        open, sealed: the segment being filled, and those whose bytes are final but not committed.
        spare: buffers of committed segments, for the next ones.
    """

    def __init__(self, group: int, row_bytes: int, shards: int, where: str) -> None:
        self.group = group
        self.row_bytes = row_bytes
        self.index = IdIndex(shards)
        self.segments = SegmentTable()
        self.open: WriteBuffer | None = None
        self.spare: list[WriteBuffer] = []
        self.sealed: list[tuple[WriteBuffer, memoryview]] = []
        self.tables: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.stride = stride_of(row_bytes)
        self._stride = np.uint64(self.stride)
        self._where = where
        self._pages = PageAdvisor()

    def get(self, rows: RowIds, out: RowBytes, found: Mask) -> None:
        """As `Store.get`; the arguments have been checked."""
        tables, ids = np.ascontiguousarray(rows.tables), np.ascontiguousarray(rows.ids)
        places = np.empty(min(len(ids), BLOCK_ROWS), np.uint64)
        for first in range(0, len(ids), BLOCK_ROWS):
            part = slice(first, first + BLOCK_ROWS)
            block = places[: len(ids[part])]
            find_places(self.index.table, self.index.shift, tables[part], ids[part], block)
            self._pages.before_rows(self.segments.lines, self._stride, block)
            self._copy(tables[part], ids[part], block, out[part], found[part])
            self._pages.after_rows()

    def _copy(
        self,
        tables: NDArray[np.uint32],
        ids: NDArray[np.int64],
        places: NDArray[np.uint64],
        out: RowBytes,
        found: Mask,
    ) -> None:
        """Copy the rows at places to `out`, or raise CorruptRowError."""
        lines, address, step = self.segments.lines, np.uint64(out.ctypes.data), row_step(out)
        if not gather(lines, self._stride, tables, ids, places, address, step, self.row_bytes, found):
            return
        table, shift = self.index.table, self.index.shift
        damaged = settle(table, shift, lines, self._stride, tables, ids, places, address, step, self.row_bytes, found)
        if damaged:
            self._raise_damaged(damaged)

    def _raise_damaged(self, place: np.uint64) -> None:
        table, id = _who(self.segments.lines, place)
        number, row = self.segments.lines[int(place) // MAX_SEGMENT_ROWS, NUMBER], int(place) % MAX_SEGMENT_ROWS
        raise CorruptRowError(table, id, f"row {row} of segment {number} of {self._where}")

    def add_table(self, number: int) -> None:
        """Allow rows of a table."""
        self.tables = np.union1d(self.tables, np.array([number], np.uint32))

    def _check_tables(self, tables: NDArray[np.uint32]) -> None:
        at = _first_unknown(tables, self.tables)
        if at < len(tables):
            raise StoreConfigError(
                f"row {at} of the batch is of table number {tables[at]}, which group {self.group} of {self._where} "
                "does not hold: open the table first, and pass the group of its TableRef"
            )

    def append(self, rows: RowIds, data: RowBytes, open_buffer: Callable[[GroupRows], WriteBuffer]) -> None:
        """As `Store.put`; `open_buffer` gives the segment to fill, and may raise what a commit raises."""
        tables, ids = np.ascontiguousarray(rows.tables), np.ascontiguousarray(rows.ids)
        self._check_tables(tables)
        for first in range(0, len(ids), BLOCK_ROWS):
            part = slice(first, first + BLOCK_ROWS)
            self._append_block(tables[part], ids[part], data[part], open_buffer)

    def _append_block(
        self,
        tables: NDArray[np.uint32],
        ids: NDArray[np.int64],
        data: RowBytes,
        open_buffer: Callable[[GroupRows], WriteBuffer],
    ) -> None:
        places = self._places(tables, ids)
        address, step = np.uint64(data.ctypes.data), row_step(data)
        done = 0
        while done < len(ids):
            buffer = open_buffer(self)
            done, status, shard = append_rows(
                self.index.table,
                self.index.shift,
                self.segments.lines,
                self._stride,
                buffer.slot,
                buffer.capacity,
                tables,
                ids,
                places,
                address,
                step,
                self.row_bytes,
                done,
            )
            self._make_room(status, shard)

    def bury(self, rows: RowIds, open_buffer: Callable[[GroupRows], WriteBuffer]) -> None:
        """As `Store.delete`."""
        tables, ids = np.ascontiguousarray(rows.tables), np.ascontiguousarray(rows.ids)
        self._check_tables(tables)
        for first in range(0, len(ids), BLOCK_ROWS):
            part = slice(first, first + BLOCK_ROWS)
            self._bury_block(tables[part], ids[part], open_buffer)

    def _bury_block(
        self, tables: NDArray[np.uint32], ids: NDArray[np.int64], open_buffer: Callable[[GroupRows], WriteBuffer]
    ) -> None:
        places = self._places(tables, ids)
        done = 0
        while done < len(ids):
            buffer = open_buffer(self)
            table, shift, lines = self.index.table, self.index.shift, self.segments.lines
            done, status = append_tombstones(
                table, shift, lines, self._stride, buffer.slot, buffer.capacity, tables, ids, places, done
            )
            self._make_room(status, 0)

    def _make_room(self, status: int, shard: int) -> None:
        """Do what a kernel stopped for; a full open segment is replaced by the next `open_buffer`."""
        if status == SHARD_FULL:
            self.index.grow(shard)
        assert status in (DONE, SEGMENT_FULL, SHARD_FULL)

    @property
    def open_is_full(self) -> bool:
        """Whether the open segment takes no more rows."""
        return self.open is not None and self.open_rows == self.open.capacity

    @property
    def open_rows(self) -> int:
        """Rows and tombstones in the open segment."""
        return 0 if self.open is None else int(self.segments.lines[self.open.slot, COUNT]) & 0xFFFFFFFF

    def _places(self, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        """What `find_places` finds, with the stored ids there in memory: a change of the index will compare them."""
        places = np.empty(len(ids), np.uint64)
        find_places(self.index.table, self.index.shift, tables, ids, places)
        if not self._pages.resident(self.segments.lines, IDS, _ID_BYTES, places):
            self._pages.ask(self.segments.lines, IDS, _ID_BYTES, places)
        return places

    def seal(self, store: bytes) -> None:
        """Finish the open segment, if it has rows; `store` is the store's uuid."""
        if self.open is None:
            return
        if not self.open_rows:  # its number is older than the next state's, so later rows must not go into it
            self.segments.give_back(self.open.slot)
            self.spare.append(self.open)
            self.open = None
            return
        self.sealed.append((self.open, self.open.seal(self.segments, self.group, self.tables, store)))
        self.open = None

    def adopt(self, header: SegmentHeader, address: int, slot: int | None = None) -> int:
        """Point a slot (a new one, or the one it was filled in) at a committed segment; the slot."""
        slot = self.segments.take() if slot is None else slot
        line = self.segments.lines[slot]
        line[ROWS], line[IDS], line[CODES] = (
            address + header.rows_at,
            address + header.ids_at,
            address + header.codes_at,
        )
        line[WIDTHS], line[NUMBER], line[EPOCH] = header.widths, header.number, header.first_epoch
        line[COUNT] = header.rows | header.tombstones << 32
        return slot

    def replay(self, slot: int, last_epoch: int, *, doubtful: bool) -> None:
        """Take the rows of an adopted segment into the index; `bury_replayed` ends a series of these.

        Args:
            doubtful: whether other segments were adopted some time ago, so that their ids may be damaged by now.
        """
        at, status, stride = 0, SHARD_FULL, self._stride if doubtful else None
        while status == SHARD_FULL:
            table, shift, lines = self.index.table, self.index.shift, self.segments.lines
            at, status, shard = replay(table, shift, lines, stride, slot, last_epoch, at)
            self._make_room(status, shard)

    def forget(self) -> None:
        """Drop all rows and segments, to replay them from the start."""
        self.index = IdIndex(len(self.index.table))
        self.segments = SegmentTable()

    def bury_replayed(self) -> None:
        """Take tombstones out of the index once all segments were replayed."""
        for slot in self.segments.slots():
            if self.segments.lines[slot, COUNT] >> 32:
                bury(self.index.table, self.index.shift, self.segments.lines, slot)

    def live_block(self, slot: int, start: int) -> tuple[int, tuple[RowIds, RowBytes] | None]:
        """Live rows of one segment from row `start` on: the row to go on at (-1 = none is left), and some rows.

        Raises:
            CorruptRowError, CorruptSegmentError: a row is damaged, or the stored ids are, since they were first read.
        """
        if start == 0 and slot not in self._slots_in_memory():
            self._check_ids(slot)
        tables, ids = np.empty(_SCAN_ROWS, np.uint32), np.empty(_SCAN_ROWS, np.int64)
        places = np.empty(_SCAN_ROWS, np.uint64)
        at, n = live_rows(self.index.table, self.index.shift, self.segments.lines, slot, start, tables, ids, places)
        at = -1 if at == int(self.segments.lines[slot, COUNT]) & 0xFFFFFFFF else at
        if n == 0:
            return at, None
        out, found = np.empty((n, self.row_bytes), np.uint8), np.empty(n, np.bool_)
        self._pages.ask(self.segments.lines, ROWS, self._stride, places[:n])
        self._copy(tables[:n], ids[:n], places[:n], out, found)
        return at, (RowIds(self.group, tables[:n], ids[:n]), out)

    def dead_slots(self) -> list[int]:
        """Committed segments of which nothing is needed: no live row, no tombstone that still hides an older row."""
        lines, slots = self.segments.lines, self.segments.slots()
        idle = self._slots_in_memory()
        no_row = [int(slot) for slot in slots if lines[slot, LIVE] == 0 and int(slot) not in idle]
        dead = [slot for slot in no_row if lines[slot, COUNT] >> 32 == 0]
        for slot in no_row:  # oldest first: one that goes lets the next one go
            gone = np.isin(slots, [*dead, slot])
            if slot not in dead and (lines[slots[~gone], EPOCH] > lines[slot, NUMBER]).all():
                dead.append(slot)
        return dead

    def _slots_in_memory(self) -> set[int]:
        """Slots of segments that are not committed."""
        return {buffer.slot for buffer, _ in self.sealed} | ({self.open.slot} if self.open else set())

    def _check_ids(self, slot: int) -> None:
        """Verify header and ids of a committed segment once more, before ids are believed that nothing else proves."""
        number, address = int(self.segments.lines[slot, NUMBER]), int(self.segments.lines[slot, IDS]) - HEADER_BYTES
        read_header(bytes_at(address, segment_size(bytes_at(address, HEADER_BYTES))), number, self._where)

    @property
    def buffered_bytes(self) -> int:
        """Host memory of buffers, spare ones included."""
        held = [buffer for buffer, _ in self.sealed] + self.spare + ([self.open] if self.open else [])
        return sum(buffer.bytes for buffer in held)

    @property
    def memory_bytes(self) -> int:
        """Host memory held: index, segment table, buffers."""
        return self.index.memory_bytes + self.segments.memory_bytes + self.buffered_bytes
