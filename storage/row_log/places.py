"""Places: where a row lies, and the table of segments that turns a place into addresses.

A place is 40 bits: 24 bits of slot (which segment) and 16 bits of row within it. Slots are numbered from 1 and given
out again once their segment is gone; place 0 is nowhere. A `SegmentTable` has one line of 64 bytes a slot, so that
following a place costs one cache line before the row's own:

    ROWS    address of row 0            COUNT   rows | tombstones << 32
    IDS     address of the ids          LIVE    rows that the index points to
    CODES   address of the table codes  NUMBER  segment number; 0 = the slot is free
    WIDTHS  bytes of a table code | of an epoch << 8 | of flags << 16 | of an id (4, else 8) << 24 | tables << 32
                                        EPOCH   first epoch, to which stored epochs are added

While a segment is being filled its ids and table numbers lie in the write buffer (ids of 8 bytes; code width 4: the
numbers themselves); once it is committed all addresses point into LMDB's memory map, where a segment stays put as long
as it lives. Epochs and tombstones can be asked of committed segments only.

Owned by the store's lock: kernels read and change the lines only during a verb.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.errors import StoreFullError
from storage.row_log.raw import load8, load16, load32, load64

ROWS, IDS, CODES, WIDTHS, COUNT, LIVE, NUMBER, EPOCH = range(8)
ROW_BITS = 16
MAX_SEGMENT_ROWS = 1 << ROW_BITS
MAX_SLOTS = 1 << 24

_LINE_BYTES = 64 + 40  # and its slot in the list of free ones
_ROW_BITS, _ROW_MASK = np.uint64(ROW_BITS), np.uint64(MAX_SEGMENT_ROWS - 1)
_NARROW_BIT = np.uint64(26)  # the 4 in bits 24-31 of WIDTHS
_ALL_BITS = np.uint64((1 << 64) - 1)
_1, _2, _3, _4, _5, _8 = (np.uint64(n) for n in (1, 2, 3, 4, 5, 8))


@njit(inline="always")
def slot_of(place: Any) -> Any:
    """The slot of a place (uint64)."""
    return place >> _ROW_BITS


@njit(inline="always")
def row_of(place: Any) -> Any:
    """The row within its segment of a place (uint64)."""
    return place & _ROW_MASK


@njit(inline="always")
def place_at(slot: Any, row: Any) -> Any:
    """The place (uint64) of a row of a slot."""
    return (np.uint64(slot) << _ROW_BITS) | np.uint64(row)


@njit(inline="always")
def narrow_ids(widths: Any) -> Any:
    """1 (uint64) if a segment with these WIDTHS stores ids in 4 bytes, 0 if in 8."""
    return (np.uint64(widths) >> _NARROW_BIT) & _1


@njit(inline="always")
def id_address(segments: Any, place: Any) -> Any:
    """Where the id of a row is stored (uint64), to be prefetched or asked for."""
    slot = slot_of(place)
    return np.uint64(segments[slot, IDS]) + (row_of(place) << (_3 - narrow_ids(segments[slot, WIDTHS])))


@njit(inline="always")
def stored_id(segments: Any, place: Any) -> Any:
    """The id (int64) stored with a row.

    Reads 8 bytes whatever the width, for want of a branch: behind the last id a segment has its rows.
    """
    narrow = narrow_ids(segments[slot_of(place), WIDTHS])
    return np.int64(load64(id_address(segments, place)) & (_ALL_BITS >> (narrow << _5)))


@njit(inline="always")
def stored_table(segments: Any, place: Any) -> Any:
    """The table number (uint64) stored with a row."""
    slot = slot_of(place)
    row = row_of(place)
    codes = np.uint64(segments[slot, CODES])
    width = segments[slot, WIDTHS] & 255
    if width == 4:
        numbers = codes
        code = row
    else:
        numbers = codes - np.uint64(segments[slot, WIDTHS] >> 32) * _4
        code = np.uint64(0)
        if width == 1:
            code = load8(codes + row)
        elif width == 2:
            code = load16(codes + row * _2)
        tables = np.uint64(segments[slot, WIDTHS] >> 32)
        code = code if code < tables else np.uint64(0)  # of a damaged page: stay within the segment
    return load32(numbers + code * _4)


@njit(inline="always")
def stored_epoch(segments: Any, place: Any) -> Any:
    """The epoch (int64) of the last change of a row of a committed segment."""
    slot = slot_of(place)
    row = row_of(place)
    width = (segments[slot, WIDTHS] >> 8) & 255
    ids = np.uint64(segments[slot, COUNT] & 0xFFFFFFFF)
    epochs = np.uint64(segments[slot, IDS]) + (ids << (_3 - narrow_ids(segments[slot, WIDTHS])))
    more = np.uint64(0)
    if width == 1:
        more = load8(epochs + row)
    elif width == 2:
        more = load16(epochs + row * _2)
    elif width == 4:
        more = load32(epochs + row * _4)
    elif width == 8:
        more = load64(epochs + row * _8)
    return segments[slot, EPOCH] + np.int64(more)


@njit(inline="always")
def has_flags(segments: Any, slot: Any) -> Any:
    """Whether a committed segment may have tombstones."""
    return (segments[slot, WIDTHS] >> 16) & 255 != 0


@njit(inline="always")
def stored_tombstone(segments: Any, place: Any) -> Any:
    """Whether a row of a committed segment is a tombstone."""
    slot = slot_of(place)
    widths = segments[slot, WIDTHS]
    dead = False
    if (widths >> 16) & 255:
        count = segments[slot, COUNT] & 0xFFFFFFFF
        flags = np.uint64(segments[slot, CODES]) + np.uint64(count * (widths & 255))
        dead = load8(flags + row_of(place)) & _1 == _1
    return dead


class SegmentTable:
    """The lines of all segments of one group.

    Attributes:
        lines: int64 (slots, 8), see the module's docstring; line 0 is never used.
    """

    def __init__(self) -> None:
        self.lines: NDArray[np.int64] = np.zeros((8, 8), np.int64)
        self._free: list[int] = []
        self._used = 1
        self._retired = 0

    def __len__(self) -> int:
        """Slots in use."""
        return self._used - 1 - len(self._free) - self._retired

    def take(self) -> int:
        """A free slot with a cleared line.

        Raises:
            StoreFullError: 2^24 segments exist.
        """
        if self._free:
            return self._free.pop()
        if self._used == len(self.lines):
            self._grow()
        self._used += 1
        return self._used - 1

    def _grow(self) -> None:
        if self._used >= MAX_SLOTS:
            raise StoreFullError(f"{self._used} segments in one group: use larger segments (StoreConfig.segment_bytes)")
        lines = np.zeros((self._next_size(), 8), np.int64)
        lines[: self._used] = self.lines
        self.lines = lines

    def _next_size(self) -> int:
        return min(MAX_SLOTS, len(self.lines) + max(8, len(self.lines) // 2))

    def give_back(self, slot: int) -> None:
        """Free a slot whose segment is gone."""
        assert self.lines[slot].any(), f"slot {slot} was given back twice"
        self._retired -= not self.lines[slot, NUMBER]
        self.lines[slot] = 0
        self._free.append(slot)

    def retire(self, slot: int) -> None:
        """The segment is gone and the slot no longer in use, but may still be read: `give_back` frees it later."""
        self.lines[slot, NUMBER] = 0
        self._retired += 1

    def restore(self, slots: NDArray[np.int64], lines: NDArray[np.int64]) -> None:
        """Fill an unused table: `slots` (N,), all different and from 1 to MAX_SLOTS - 1, with `lines` (N, 8)."""
        self._used = 1 + int(slots.max(initial=0))
        self.lines = np.zeros((max(8, self._used), 8), np.int64)
        self.lines[slots] = lines
        self._free = np.setdiff1d(np.arange(1, self._used), slots).tolist()

    def slots(self) -> NDArray[np.int64]:
        """Slots in use, oldest segment first."""
        used = np.flatnonzero(self.lines[: self._used, NUMBER])
        return used[np.argsort(self.lines[used, NUMBER])]

    @property
    def memory_bytes(self) -> int:
        """Host memory held."""
        return len(self.lines) * _LINE_BYTES

    def memory_after(self, segments: int) -> int:
        """An upper bound of `memory_bytes` after `segments` more segments."""
        needed = self._used + max(0, segments - len(self._free))
        lines = len(self.lines) if needed <= len(self.lines) else needed + max(8, needed // 2)
        return lines * _LINE_BYTES
