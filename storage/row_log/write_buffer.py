"""WriteBuffer: the segment being filled, in host memory, readable at once and sealed later.

Rows are written where they will stay in the finished segment; ids, table numbers and flags go to arrays beside it
until their packed size is known. Sealing then packs them right in front of the rows, so that no row moves and the
addresses in the segment table stay good until the commit replaces them.

A buffer for moved rows keeps an epoch for each, since theirs is older than the segment. Until it is sealed its line of
the segment table says that its first epoch is 0: no tombstone may go for want of older rows.

Owned by the store's lock; kernels write through the addresses in the segment table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage.row_log.hashing import checksum
from storage.row_log.places import CODES, COUNT, EPOCH, IDS, MAX_SEGMENT_ROWS, NUMBER, ROWS, WIDTHS, SegmentTable
from storage.row_log.segment import (
    HEADER_BYTES,
    RAW_ROWS,
    SegmentHeader,
    align8,
    bounds_of,
    pack_epochs,
    pack_ids,
    pack_tables,
    stride_of,
    version_of,
)

_ID_BYTES = 8 + 4 + 1  # id, table number, flags of a row while the segment is being filled
_EPOCH_BYTES = 8
_FILLING = 4 | 8 << 24  # WIDTHS meanwhile: table numbers of 4 bytes, ids of 8


def rows_that_fit(segment_bytes: int, row_bytes: int, moved: bool = False) -> int:
    """Rows of a segment of about `segment_bytes`, 1 at least.

    What they usually take: ids of 4 bytes and one table, epochs of 2 bytes. So full segments are of about one size, of
    moved rows or not, and one fits where another was. Wide ids make them larger by a few hundredths.
    """
    beside = 4 + 2 * moved
    fit = (segment_bytes - HEADER_BYTES - 8) // (beside + stride_of(row_bytes))
    return max(1, min(MAX_SEGMENT_ROWS, fit))


def buffer_bytes(segment_bytes: int, row_bytes: int, page_bytes: int, moved: bool = False) -> int:
    """Host memory of a WriteBuffer, its array headers included."""
    capacity = rows_that_fit(segment_bytes, row_bytes, moved)
    rows = max(capacity * stride_of(row_bytes), page_bytes)
    epochs = _EPOCH_BYTES * capacity * moved
    return _front_bytes(capacity, moved) + rows + align8(_ID_BYTES * capacity) + epochs + 384


def _front_bytes(capacity: int, moved: bool) -> int:
    """The most that header and block of ids take."""
    return HEADER_BYTES + align8((_ID_BYTES + _EPOCH_BYTES * moved) * capacity)


class WriteBuffer:
    """Memory for one segment at a time: `begin`, let kernels append, `seal`, and begin again once it was committed.

    Fresh memory costs a page fault every 28 rows of 128 bytes, more than the rows themselves, hence the reuse.

    Args:
        row_bytes, segment_bytes: bytes of a row and, about, of a segment.
        page_bytes: of LMDB. A sealed segment takes at least one page, so that it gets pages of its own and never moves.
        moved: whether it is for rows moved from other segments, which keep their epochs.

    Attributes:
        slot, number: of the segment being filled; the number is the epoch of all its rows, unless they are moved ones.
        capacity: rows it takes.
        moved: as above.
        epochs: int64 (capacity,), or (0,) if not `moved`: of each row, written by whoever appends moved rows.
        bytes: host memory held.
    """

    def __init__(self, row_bytes: int, segment_bytes: int, page_bytes: int, moved: bool = False) -> None:
        self.slot = self.number = 0
        self.moved = moved
        self.capacity = rows_that_fit(segment_bytes, row_bytes, moved)
        self.epochs: NDArray[np.int64] = np.empty(self.capacity if moved else 0, np.int64)
        self.bytes = buffer_bytes(segment_bytes, row_bytes, page_bytes, moved)
        self._row_bytes = row_bytes
        self._least_bytes = page_bytes - 16
        self._front = _front_bytes(self.capacity, moved)
        self._image = np.empty(self._front + max(self.capacity * stride_of(row_bytes), page_bytes), np.uint8)
        self._beside = np.empty(align8(_ID_BYTES * self.capacity), np.uint8)

    def begin(self, segments: SegmentTable, number: int) -> None:
        """Begin a segment in a slot of its own."""
        self.slot, self.number = segments.take(), number
        line = segments.lines[self.slot]
        line[ROWS] = self._image.ctypes.data + self._front
        line[IDS] = self._beside.ctypes.data
        line[CODES] = self._beside.ctypes.data + 8 * self.capacity
        line[WIDTHS], line[NUMBER], line[EPOCH] = _FILLING, number, 0 if self.moved else number

    def renumber(self, segments: SegmentTable, number: int) -> None:
        """Give the segment another number than it was begun with."""
        self.number = segments.lines[self.slot, NUMBER] = number

    def seal(self, segments: SegmentTable, group: int, known: NDArray[np.uint32], store: bytes) -> memoryview:
        """Finish the segment: its bytes as they will be stored. The buffer may still be read, not written.

        Args:
            known: the group's table numbers, sorted.
            store: the store's uuid, 16 bytes.
        """
        count = int(segments.lines[self.slot, COUNT])
        rows, tombstones, c = count & 0xFFFFFFFF, count >> 32, self.capacity
        ids, numbers = self._beside[: 8 * rows].view(np.int64), self._beside[8 * c : 12 * c].view(np.uint32)[:rows]
        first = last = self.number
        if self.moved:
            first, last = bounds_of(self.epochs[:rows])
        segments.lines[self.slot, EPOCH] = first
        packed_epochs = pack_epochs(self.epochs[:rows], first, last)
        dictionary, codes, code_bytes = pack_tables(numbers, known)
        flags = self._beside[12 * c : 12 * c + rows] if tombstones else self._beside[:0]
        packed_ids = pack_ids(ids)
        parts = [part.view(np.uint8) for part in (packed_ids, packed_epochs, dictionary, codes, flags) if len(part)]
        image, block = self._place(parts, rows)
        stride = stride_of(self._row_bytes)
        header = SegmentHeader(
            version=version_of(stride),
            header_bytes=HEADER_BYTES,
            group=group,
            rows=rows,
            tombstones=tombstones,
            row_bytes=self._row_bytes,
            stride=stride,
            tables=len(dictionary),
            code_bytes=code_bytes,
            epoch_bytes=packed_epochs.itemsize if len(packed_epochs) else 0,
            flag_bytes=1 if tombstones else 0,
            packing=RAW_ROWS,
            id_bytes=packed_ids.itemsize,
            number=self.number,
            first_epoch=first,
            last_epoch=last,
            ids_at=HEADER_BYTES,
            rows_at=HEADER_BYTES + len(block),
            size=len(image),
            store=store,
            ids_checksum=checksum(block, self.number),
        )
        image[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
        return image.data

    def _place(self, parts: list[NDArray[np.uint8]], rows: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Put the block of ids, of these parts, in front of the rows and zeros behind them: the segment, the block."""
        used, stored = sum(map(len, parts)), rows * stride_of(self._row_bytes)
        front = HEADER_BYTES + align8(used)
        image = self._image[self._front - front :][: max(front + stored, self._least_bytes)]
        block, at = image[HEADER_BYTES:front], 0
        for part in parts:
            block[at : at + len(part)] = part
            at += len(part)
        block[used:] = 0
        image[front + stored :] = 0
        return image, block
