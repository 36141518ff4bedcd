"""GroupRows: the rows of one group - its index, its segment table and the segments not yet committed.

Rows become readable when they are appended, durable when the segment they are in is committed. A segment is first
`open` (being filled by puts) or `moving` (being filled by compaction), then `sealed` (its bytes final, still in
memory), then committed, when its line of the segment table is pointed into the memory map and its buffer let go. If a
commit fails, sealed segments simply stay.

Everything here is guarded by the store's lock, which `get`, `append` and `bury` take block by block, and hold only
while the index is read or changed: rows are copied out without it, except by a scan, which holds it for a block of
rows. Places stay good meanwhile since whoever reads holds a pin (`row_log.pins`), and a line of the segment table
changes by whole words, each of which leads to the same bytes. This class calls no LMDB and decides nothing about when
to commit: the writer hands it buffers, takes sealed segments and tells it where they were put.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.errors import CorruptRowError, StoreConfigError
from storage.id_index import IdIndex
from storage.row_log.gather import (
    DONE,
    EVER,
    SEGMENT_FULL,
    SHARD_FULL,
    append_rows,
    append_tombstones,
    find_known,
    find_places,
    gather,
    live_rows,
    match_ids,
    settle,
)
from storage.row_log.lock import StoreLock
from storage.row_log.pages import PageAdvisor, major_faults
from storage.row_log.places import (
    CODES,
    COUNT,
    EPOCH,
    IDS,
    MAX_SEGMENT_ROWS,
    NUMBER,
    ROWS,
    WIDTHS,
    SegmentTable,
    place_at,
    stored_id,
    stored_table,
)
from storage.row_log.raw import row_step, uncounted
from storage.row_log.read_threads import for_each_block
from storage.row_log.segment import HEADER_BYTES, SegmentHeader, is_whole_at, read_header_at, stride_of
from storage.row_log.space import bytes_in_use, bytes_of, idle_slots, marked
from storage.row_log.write_buffer import WriteBuffer
from storage.store import IdRange, Mask, RowBytes, RowIds

BLOCK_ROWS = 4096  # that a get looks up at once
_ASKED_ROWS, _PARTS_AHEAD = 256, 2  # of a block that is not in memory: what is asked for at once, and how far ahead
_WRITTEN_ROWS = 1024  # that a put works on at once, so that what it needs of index and ids stays in the second cache
_SCAN_ROWS = 4096
_ID_BYTES = np.uint64(8)


@njit(cache=True)
def who(segments: Any, place: Any) -> Any:
    """Table number and id stored with a row."""
    return np.int64(stored_table(segments, place)), stored_id(segments, place)


@njit(nogil=True, cache=True)
def _stored_rows(segments: Any, slot: Any, start: Any, tables: Any, ids: Any, places: Any) -> None:
    """Table numbers, ids and places of rows of a segment from row `start` on, as many as the outputs hold."""
    segments = uncounted(segments)
    for i in range(len(ids)):
        places[i] = place_at(slot, start + i)
        tables[i], ids[i] = stored_table(segments, places[i]), stored_id(segments, places[i])


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
        lock: the store's; None = one of its own.
        filled_bytes: size to which its segments are filled.

    Attributes:
        usual_bytes: the same, while no `bulk` fills larger ones.
        tables: the group's table numbers, sorted.
        stride: stored bytes of a row.
        seen_epoch: the last change that was replayed; of this group there is none before it that was not.
        open, moving, sealed: the segments being filled, and those whose bytes are final but not committed.
        begun: the segment that takes rows as of a state that was begun, while there is one (`row_log.begun`).
        expects_new: whether the rows that are put are new ones as a rule: stored ids are not asked for ahead.
        spare: buffers of committed segments, for the next ones.
        buffered_bytes: host memory of all buffers, also of those that a reader still holds.
        dying: slots that will be deleted.
        pinned: int64 (n,), slots of segments that snapshots hold, ascending: they stay, needed now or not.
        moved_from: slots of segments whose rows are in `moving`, and on disk in those segments alone.
    """

    def __init__(
        self,
        group: int,
        row_bytes: int,
        shards: int,
        where: str,
        lock: StoreLock | None = None,
        filled_bytes: int = 0,
    ) -> None:
        self.group = group
        self.filled_bytes = self.usual_bytes = filled_bytes
        self.expects_new = False
        self.row_bytes = row_bytes
        self.index = IdIndex(shards)
        self.segments = SegmentTable()
        self.seen_epoch = 0
        self.open: WriteBuffer | None = None
        self.moving: WriteBuffer | None = None
        self.begun: WriteBuffer | None = None
        self.spare: list[WriteBuffer] = []
        self.sealed: list[tuple[WriteBuffer, memoryview]] = []
        self.buffered_bytes = 0
        self.dying: set[int] = set()
        self.pinned: NDArray[np.int64] = np.zeros(0, np.int64)
        self.moved_from: set[int] = set()
        self.tables: NDArray[np.uint32] = np.zeros(0, np.uint32)
        self.stride = stride_of(row_bytes)
        self._stride = np.uint64(self.stride)
        self._where = where
        self.lock = lock or StoreLock()
        self._pages = PageAdvisor()

    def get(self, rows: RowIds, out: RowBytes, found: Mask, threads: int = 1) -> None:
        """As `Store.get`, in `threads` threads; the arguments have been checked. Requires: a pin, and not the lock."""
        tables, ids = np.ascontiguousarray(rows.tables), np.ascontiguousarray(rows.ids)
        places = np.empty(len(ids), np.uint64)

        def read_block(first: int, errors: Sequence[BaseException]) -> None:
            stop, faults = min(first + BLOCK_ROWS, len(ids)), major_faults()
            segments = self._find(tables[first:stop], ids[first:stop], places[first:stop])
            for part in self._asked_parts(segments, places, first, stop):
                self._copy(segments, tables[part], ids[part], places[part], out[part], found[part])
            self._pages.after_rows(faults)

        for_each_block(read_block, range(0, len(ids), BLOCK_ROWS), threads)

    @property
    def waits_for_disk(self) -> bool:
        """As `HintedStore.waits_for_disk`, of this group."""
        return self._pages.waits_for_disk

    def announce(self, rows: RowIds) -> None:
        """Ask for the pages of rows that will be got. Requires: a pin, and not the lock."""
        tables, ids = np.ascontiguousarray(rows.tables), np.ascontiguousarray(rows.ids)
        places = np.empty(len(ids), np.uint64)
        segments = self._find(tables, ids, places)
        if self._pages.pays(segments.lines, self._stride, places):
            self._pages.ask(segments.lines, ROWS, self._stride, places)

    def _asked_parts(
        self, segments: SegmentTable, places: NDArray[np.uint64], first: int, stop: int
    ) -> Iterator[slice]:
        """Rows `first` to `stop` in parts to be copied now: one, or many if pages have to be asked for. Then some parts
        are on their way meanwhile, and none so long before it is copied that its pages might be gone again."""
        if not self._pages.pays(segments.lines, self._stride, places[first:stop]):
            yield slice(first, stop)
            return
        asked: deque[slice] = deque()
        for at in range(first, stop, _ASKED_ROWS):
            part = slice(at, min(at + _ASKED_ROWS, stop))
            self._pages.ask(segments.lines, ROWS, self._stride, places[part])
            asked.append(part)
            if len(asked) > _PARTS_AHEAD:
                yield asked.popleft()
        yield from asked

    def _find(self, tables: NDArray[np.uint32], ids: NDArray[np.int64], places: NDArray[np.uint64]) -> SegmentTable:
        """Fill in places; the segment table that they refer to."""
        with self.lock:
            find_places(self.index.table, self.index.shift, tables, ids, places)
            return self.segments

    def _copy(
        self,
        segments: SegmentTable,
        tables: NDArray[np.uint32],
        ids: NDArray[np.int64],
        places: NDArray[np.uint64],
        out: RowBytes,
        found: Mask,
    ) -> None:
        """Copy the rows at places to `out`, or raise CorruptRowError."""
        address, step, width = np.uint64(out.ctypes.data), row_step(out), self.row_bytes
        suspects, _ = gather(segments.lines, self._stride, tables, ids, places, address, step, width, found)
        if not suspects:
            return
        with self.lock:
            if segments is not self.segments:  # a reader has started over meanwhile
                self._find(tables, ids, places)
            table, shift, lines = self.index.table, self.index.shift, self.segments.lines
            damaged = settle(table, shift, lines, self._stride, tables, ids, places, address, step, width, found)
            if damaged:
                self._raise_damaged(damaged)

    def _raise_damaged(self, place: np.uint64) -> None:
        table, id = who(self.segments.lines, place)
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

    def append(
        self,
        rows: RowIds,
        data: RowBytes,
        open_buffer: Callable[[GroupRows], WriteBuffer],
        known: Mask | None = None,
        until: int = EVER,
    ) -> None:
        """As `Store.put`; `open_buffer` gives the segment to fill, and may raise what a commit raises.

        Args:
            known: which rows are in the store for certain; None = nothing is known.
            until: as `append_rows`.
        """
        tables, ids = np.ascontiguousarray(rows.tables), np.ascontiguousarray(rows.ids)
        known = np.zeros(len(ids), np.bool_) if known is None else known
        self._check_tables(tables)
        for part in self._written_parts(tables, ids, known):
            with self.lock:
                self._append_block(tables[part], ids[part], known[part], data[part], open_buffer, until)
            self.lock.give_way()

    def _written_parts(self, tables: NDArray[np.uint32], ids: NDArray[np.int64], known: Mask) -> Iterator[slice]:
        """What is written under one hold of the lock each; the stored ids there are asked for some parts ahead, so that
        the disk reads many at a time. A change of the index will compare them, unless the rows are known."""
        for start in range(0, len(ids), BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, len(ids))
            if not (self.expects_new or known[start:stop].all()):
                self._ask_for_ids(tables[start:stop], ids[start:stop], known[start:stop])
            for first in range(start, stop, _WRITTEN_ROWS):
                yield slice(first, min(first + _WRITTEN_ROWS, stop))

    def _ask_for_ids(self, tables: NDArray[np.uint32], ids: NDArray[np.int64], known: Mask) -> None:
        with self.lock:
            places, matched = self._matched(tables, ids, known)
            places = places[~matched]
            if not self._pages.resident(self.segments.lines, IDS, _ID_BYTES, places):
                self._pages.ask(self.segments.lines, IDS, _ID_BYTES, places)

    def _matched(
        self, tables: NDArray[np.uint32], ids: NDArray[np.int64], known: Mask
    ) -> tuple[NDArray[np.uint64], Mask]:
        """Places where tags fit, and which are the rows' own without a look there. Requires: the lock."""
        places, matched = np.empty(len(ids), np.uint64), np.empty(len(ids), np.bool_)
        find_known(self.index.table, self.index.shift, tables, ids, known, places, matched)
        return places, matched

    def _append_block(
        self,
        tables: NDArray[np.uint32],
        ids: NDArray[np.int64],
        known: Mask,
        data: RowBytes,
        open_buffer: Callable[[GroupRows], WriteBuffer],
        until: int,
    ) -> None:
        places, matched = self._matched(tables, ids, known)
        match_ids(self.segments.lines, tables, ids, places, matched)
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
                matched,
                address,
                step,
                self.row_bytes,
                done,
                until,
            )
            self._make_room(status, shard)

    def bury(self, rows: RowIds, open_buffer: Callable[[GroupRows], WriteBuffer]) -> None:
        """As `Store.delete`."""
        tables, ids = np.ascontiguousarray(rows.tables), np.ascontiguousarray(rows.ids)
        self._check_tables(tables)
        for part in self._written_parts(tables, ids, np.zeros(len(ids), np.bool_)):
            with self.lock:
                self._bury_block(tables[part], ids[part], open_buffer)
            self.lock.give_way()

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

    def is_full(self, buffer: WriteBuffer) -> bool:
        """Whether a segment that is being filled takes no more rows."""
        return self._rows_in(buffer) == buffer.capacity

    def _rows_in(self, buffer: WriteBuffer) -> int:
        return int(self.segments.lines[buffer.slot, COUNT]) & 0xFFFFFFFF

    @property
    def open_rows(self) -> int:
        """Rows and tombstones that puts have left in segments being filled."""
        return sum(self._rows_in(buffer) for buffer in (self.open, self.begun) if buffer is not None)

    def _places(self, tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> NDArray[np.uint64]:
        """What `find_places` finds. Requires: the lock."""
        places = np.empty(len(ids), np.uint64)
        find_places(self.index.table, self.index.shift, tables, ids, places)
        return places

    def seal(self, store: bytes) -> None:
        """Finish the open segment, if it has rows; `store` is the store's uuid."""
        buffer, self.open = self.open, None
        self._finish(buffer, store)

    def seal_begun(self, store: bytes) -> None:
        """Finish the segment of a state that was begun, if it has rows."""
        buffer, self.begun = self.begun, None
        self._finish(buffer, store)

    def _finish(self, buffer: WriteBuffer | None, store: bytes) -> None:
        if buffer is None:
            return
        if self.segments.lines[buffer.slot, COUNT]:
            self.sealed.append((buffer, buffer.seal(self.segments, self.group, self.tables, store)))
        else:  # its number is older than the next state's, so later rows must not go into it
            self.segments.give_back(buffer.slot)
            self.spare.append(buffer)

    def seal_moving(self, store: bytes, take_number: Callable[[], int]) -> None:
        """Finish the segment that compaction fills, if it has rows; its number is newer than all it was filled from."""
        buffer, self.moving = self.moving, None
        self.moved_from.clear()
        if buffer is None:
            return
        if self.segments.lines[buffer.slot, COUNT]:
            buffer.renumber(self.segments, take_number())
            self.sealed.append((buffer, buffer.seal(self.segments, self.group, self.tables, store)))
        else:
            self.segments.give_back(buffer.slot)
            self.buffered_bytes -= buffer.bytes

    def drop_buffers(self) -> None:
        """Forget segments that are not committed; whoever asks gives their slots back."""
        gone = [buffer for buffer, _ in self.sealed] + self._filling
        self.buffered_bytes -= sum(buffer.bytes for buffer in gone)
        self.open = self.moving = self.begun = None
        self.sealed.clear()
        self.moved_from.clear()
        self.dying.clear()

    @property
    def moved_share(self) -> float:
        """The share of the group's bytes that segments take of which rows are being moved."""
        if not self.moved_from:
            return 0.0
        return self.bytes_of(self.moved_from) / max(1, self.bytes_in_use()[0])

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

    def forget(self) -> None:
        """Drop all rows and segments, to replay them from the start; who still reads has the old ones."""
        self.index = IdIndex(len(self.index.table))
        self.segments = SegmentTable()
        self.pinned = np.zeros(0, np.int64)
        self.seen_epoch = 0

    def live_block(self, slot: int, start: int, which: IdRange) -> tuple[int, tuple[RowIds, RowBytes] | None]:
        """Live rows of one segment from row `start` on: the row to go on at (-1 = none is left), and some rows.

        Raises:
            CorruptRowError, CorruptSegmentError: a row is damaged, or the stored ids are, since they were first read.
        """
        if start == 0 and slot not in self.slots_in_memory():
            self.check_ids(slot)
        tables, ids = np.empty(_SCAN_ROWS, np.uint32), np.empty(_SCAN_ROWS, np.int64)
        places = np.empty(_SCAN_ROWS, np.uint64)
        table, shift, lines = self.index.table, self.index.shift, self.segments.lines
        at, n = live_rows(table, shift, lines, slot, start, *which, tables, ids, places)
        at = -1 if at == int(lines[slot, COUNT]) & 0xFFFFFFFF else at
        if n == 0:
            return at, None
        out, found = np.empty((n, self.row_bytes), np.uint8), np.empty(n, np.bool_)
        self._pages.ask(lines, ROWS, self._stride, places[:n])
        self._copy(self.segments, tables[:n], ids[:n], places[:n], out, found)
        return at, (RowIds(self.group, tables[:n], ids[:n]), out)

    def stored_block(self, slot: int, start: int) -> tuple[RowIds, RowBytes]:
        """Some rows of a committed segment from row `start` on, live or not, none at its end; no index is needed.

        Raises:
            CorruptRowError: a row is damaged.
        """
        lines = self.segments.lines
        n = max(0, min(_SCAN_ROWS, (int(lines[slot, COUNT]) & 0xFFFFFFFF) - start))
        tables, ids, places = np.empty(n, np.uint32), np.empty(n, np.int64), np.empty(n, np.uint64)
        _stored_rows(lines, slot, start, tables, ids, places)
        out, found = np.empty((n, self.row_bytes), np.uint8), np.empty(n, np.bool_)
        self._pages.ask(lines, ROWS, self._stride, places)
        address, step = np.uint64(out.ctypes.data), row_step(out)
        if gather(lines, self._stride, tables, ids, places, address, step, self.row_bytes, found)[0]:
            self._raise_damaged(places[~found][0])
        return RowIds(self.group, tables, ids), out

    def dead_slots(self) -> list[int]:
        """Committed segments of which nothing is needed now: no live row, no tombstone that still hides an older row.

        That is for a state which comes with all sealed segments: rows may have been moved to them. Snapshots may hold
        some of them (`pinned`); what tombstones hide there is hidden still, and tombstones that are held are needed.
        """
        lines = self.segments.lines
        idle = np.empty(len(lines), np.int64)
        idle = idle[: idle_slots(lines, marked(lines, self.dying | self.moved_from | self.slots_in_memory()), idle)]
        idle = idle[np.argsort(lines[idle, NUMBER])]
        hiding = lines[idle, COUNT] >> 32 > 0
        dead, free_hiding = idle[~hiding], np.setdiff1d(idle[hiding], self.pinned)
        found: list[int] = dead.tolist()
        if len(free_hiding):
            oldest_first = free_hiding[np.argsort(lines[free_hiding, NUMBER])]
            found += self._without_older(oldest_first, np.setdiff1d(dead, self.pinned))
        return found

    def deletable_slots(self) -> list[int]:
        """Those of the dead ones that no snapshot holds."""
        dead = np.array(self.dead_slots(), np.int64)
        left: list[int] = dead[~np.isin(dead, self.pinned)].tolist()
        return left

    def needed_numbers(self) -> NDArray[np.int64]:
        """Numbers of the segments, ascending, that a state consists of which comes with all sealed segments."""
        lines, filling = self.segments.lines, [buffer.slot for buffer in self._filling]
        slots = np.setdiff1d(np.flatnonzero(lines[:, NUMBER]), [*self.dying, *self.dead_slots(), *filling])
        return np.sort(lines[slots, NUMBER])

    def pin(self, numbers: NDArray[np.int64]) -> None:
        """Have snapshots hold the segments that are among `numbers`, and no others."""
        self.pinned = np.flatnonzero(np.isin(self.segments.lines[:, NUMBER], numbers[numbers > 0]))

    def _without_older(self, hiding: NDArray[np.int64], dead: NDArray[np.int64]) -> list[int]:
        """Those segments of tombstones, oldest first, that began before the oldest row of all that are not dead."""
        lines, gone = self.segments.lines, 0
        others = np.setdiff1d(self.segments.slots(), dead)
        if self.moving is not None:  # what it holds is as old as what it was moved from, which is kept
            others = others[others != self.moving.slot]
        for slot in hiding:
            rest = others[~np.isin(others, hiding[: gone + 1])]
            if (lines[rest, EPOCH] <= lines[slot, NUMBER]).any():
                break  # what keeps this one keeps the newer ones
            gone += 1
        without: list[int] = hiding[:gone].tolist()
        return without

    def bytes_of(self, slots: Collection[int]) -> int:
        """About how many bytes of the file the segments in these slots take together; free slots take none."""
        return int(bytes_of(self.segments.lines, np.fromiter(slots, np.int64), self.stride))

    def bytes_in_use(self) -> tuple[int, int]:
        """About how many bytes of the file all segments take, and those of which something is needed."""
        total, needed = bytes_in_use(self.segments.lines, self.stride)
        return int(total), int(needed)

    def changed_since(self, epoch: int) -> bool:
        """Whether a row or tombstone was put after an epoch, whatever became of it. Requires: the lock."""
        if self.open_rows or any(not buffer.moved for buffer, _ in self.sealed):
            return True
        committed = [slot for slot in self.segments.slots().tolist() if slot not in self.slots_in_memory()]
        return any(self._last_epoch(slot) > epoch for slot in committed)

    def _last_epoch(self, slot: int) -> int:
        """Of a committed segment. Raises CorruptSegmentError."""
        line = self.segments.lines[slot]
        if not (line[WIDTHS] >> 8) & 255:  # all its rows have one epoch
            return int(line[EPOCH])
        return read_header_at(int(line[IDS]) - HEADER_BYTES, int(line[NUMBER]), self._where).last_epoch

    def slots_in_memory(self) -> set[int]:
        """Slots of segments that are not committed."""
        return {buffer.slot for buffer in self._filling} | {buffer.slot for buffer, _ in self.sealed}

    @property
    def _filling(self) -> list[WriteBuffer]:
        return [buffer for buffer in (self.open, self.moving, self.begun) if buffer is not None]

    def check_ids(self, slot: int) -> None:
        """Verify header and ids of a committed segment once more, before ids are believed that nothing else proves.

        Raises:
            CorruptSegmentError: they are damaged.
        """
        number, address = int(self.segments.lines[slot, NUMBER]), int(self.segments.lines[slot, IDS]) - HEADER_BYTES
        if not is_whole_at(address, number):
            read_header_at(address, number, self._where)

    @property
    def memory_bytes(self) -> int:
        """Host memory held: index, segment table, buffers."""
        return self.index.memory_bytes + self.segments.memory_bytes + self.buffered_bytes
