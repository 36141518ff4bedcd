"""WriteBuffer: the segment being filled, in host memory, readable at once and sealed later.

Rows are written where they will stay in the finished segment; ids, table numbers and flags go to arrays beside it
until their packed size is known. Sealing then packs them right in front of the rows, so that no row moves and the
addresses in the segment table stay good until the commit replaces them.

Owned by the store's lock; the kernels of `gather.py` write through the addresses in the segment table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from storage.row_log.hashing import checksum
from storage.row_log.places import CODES, COUNT, EPOCH, IDS, MAX_SEGMENT_ROWS, NUMBER, ROWS, WIDTHS, SegmentTable
from storage.row_log.segment import (
    HEADER_BYTES,
    RAW_ROWS,
    VERSION,
    SegmentHeader,
    align8,
    pack_tables,
    stride_of,
)

_ID_BYTES = 8 + 4 + 1  # id, table number, flags of a row while the segment is being filled


def rows_that_fit(segment_bytes: int, row_bytes: int) -> int:
    """Rows of a segment of about `segment_bytes`, 1 at least."""
    fit = (segment_bytes - HEADER_BYTES - 8) // (_ID_BYTES + stride_of(row_bytes))
    return max(1, min(MAX_SEGMENT_ROWS, fit))


def buffer_bytes(segment_bytes: int, row_bytes: int, page_bytes: int) -> int:
    """Host memory of a WriteBuffer, its array headers included."""
    capacity = rows_that_fit(segment_bytes, row_bytes)
    front = HEADER_BYTES + align8(_ID_BYTES * capacity)
    return front + max(capacity * stride_of(row_bytes), page_bytes) + align8(_ID_BYTES * capacity) + 256


class WriteBuffer:
    """Memory for one segment at a time: `begin`, let kernels append, `seal`, and begin again once it was committed.

    Fresh memory costs a page fault every 28 rows of 128 bytes, more than the rows themselves, hence the reuse.

    Args:
        row_bytes, segment_bytes: bytes of a row and, about, of a segment.
        page_bytes: of LMDB. A sealed segment takes at least one page, so that it gets pages of its own and never moves.

    Attributes:
        slot, number: of the segment being filled; the number is the epoch of all its rows.
        capacity: rows it takes.
        bytes: host memory held.
    """

    def __init__(self, row_bytes: int, segment_bytes: int, page_bytes: int) -> None:
        self.slot = self.number = 0
        self.capacity = rows_that_fit(segment_bytes, row_bytes)
        self.bytes = buffer_bytes(segment_bytes, row_bytes, page_bytes)
        self._row_bytes = row_bytes
        self._least_bytes = page_bytes - 16
        self._front = HEADER_BYTES + align8(_ID_BYTES * self.capacity)
        self._image = np.empty(self._front + max(self.capacity * stride_of(row_bytes), page_bytes), np.uint8)
        self._beside = np.empty(align8(_ID_BYTES * self.capacity), np.uint8)

    def begin(self, segments: SegmentTable, number: int) -> None:
        """Begin a segment in a slot of its own."""
        self.slot, self.number = segments.take(), number
        line = segments.lines[self.slot]
        line[ROWS] = self._image.ctypes.data + self._front
        line[IDS] = self._beside.ctypes.data
        line[CODES] = self._beside.ctypes.data + 8 * self.capacity
        line[WIDTHS], line[NUMBER], line[EPOCH] = 4, number, number

    def seal(self, segments: SegmentTable, group: int, known: NDArray[np.uint32], store: bytes) -> memoryview:
        """Finish the segment: its bytes as they will be stored. The buffer may still be read, not written.

        Args:
            known: the group's table numbers, sorted.
            store: the store's uuid, 16 bytes.
        """
        rows, tombstones = (
            int(segments.lines[self.slot, COUNT]) & 0xFFFFFFFF,
            int(segments.lines[self.slot, COUNT]) >> 32,
        )
        c = self.capacity
        ids = self._beside[: 8 * rows]
        numbers = self._beside[8 * c : 12 * c].view(np.uint32)[:rows]
        flags = self._beside[12 * c : 12 * c + rows] if tombstones else self._beside[:0]
        dictionary, codes, code_bytes = pack_tables(numbers, known)
        block = np.concatenate([ids, dictionary.view(np.uint8), codes, flags])
        block = np.concatenate([block, np.zeros(-len(block) % 8, np.uint8)])
        stride = stride_of(self._row_bytes)
        front = HEADER_BYTES + len(block)
        size = max(front + rows * stride, self._least_bytes)
        header = SegmentHeader(
            version=VERSION,
            header_bytes=HEADER_BYTES,
            group=group,
            rows=rows,
            tombstones=tombstones,
            row_bytes=self._row_bytes,
            stride=stride,
            tables=len(dictionary),
            code_bytes=code_bytes,
            epoch_bytes=0,
            flag_bytes=1 if tombstones else 0,
            packing=RAW_ROWS,
            reserved=0,
            number=self.number,
            first_epoch=self.number,
            last_epoch=self.number,
            ids_at=HEADER_BYTES,
            rows_at=front,
            size=size,
            store=store,
            ids_checksum=checksum(block, self.number),
        )
        image = self._image[self._front - front :][:size]
        image[:HEADER_BYTES] = np.frombuffer(header.pack(), np.uint8)
        image[HEADER_BYTES:front] = block
        image[front + rows * stride :] = 0
        return image.data
