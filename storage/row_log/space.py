"""What the segments of a group take and what moving them is worth: one pass over the segment table for each question.

A store of 1 GiB has 8,000 lines, and maintenance asks several times between two commits. As expressions of numpy these
questions took a seventh of its time.

Owned by the store's lock. Slots are those of `row_log.places`; nothing here changes a line.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numba import njit

from storage.row_log.places import COUNT, LIVE, NUMBER
from storage.row_log.segment import HEADER_BYTES

_BESIDE = HEADER_BYTES + 16  # and what LMDB puts in front
_ID_BYTES = 4
_PAGE = mmap.PAGESIZE
_WORTHWHILE = 0.95  # greatest share of a segment that may be needed for it to be moved


@njit(inline="always")
def _bytes_of(segments: Any, slot: Any, stride: Any) -> Any:
    rows = segments[slot, COUNT] & 0xFFFFFFFF
    pages = (_BESIDE + rows * (stride + _ID_BYTES) + _PAGE - 1) // _PAGE
    return pages * _PAGE if segments[slot, NUMBER] > 0 else 0


@njit(nogil=True, cache=True)
def bytes_of(segments: Any, slots: Any, stride: Any) -> Any:
    """About how many bytes of the file the segments in `slots` (int64) take together; a free slot takes 0."""
    total = 0
    for slot in slots:
        total += _bytes_of(segments, slot, stride)
    return total


@njit(nogil=True, cache=True)
def bytes_in_use(segments: Any, stride: Any) -> Any:
    """About how many bytes of the file all segments take, and those of them of which something is needed."""
    total = needed = 0
    for slot in range(len(segments)):
        size = _bytes_of(segments, slot, stride)
        total += size
        if segments[slot, LIVE] > 0 or segments[slot, COUNT] >> 32 > 0:
            needed += size
    return total, needed


@njit(nogil=True, cache=True)
def idle_slots(segments: Any, kept: Any, idle: Any) -> Any:
    """Write slots of segments without a live row into `idle`, but for those `kept` (bool, a slot each); how many."""
    count = 0
    for slot in range(len(segments)):
        if segments[slot, NUMBER] > 0 and segments[slot, LIVE] == 0 and not kept[slot]:
            idle[count] = slot
            count += 1
    return count


@njit(nogil=True, cache=True)
def candidates(segments: Any, kept: Any, epoch: Any, every: Any, slots: Any, scores: Any) -> Any:
    """Write slots of segments that may be moved, and what that is worth each; how many there are.

    Args:
        kept: bool, a slot each: segments that may not.
        epoch: of the last complete state, which covers those that may.
        every: have all that anything can be dropped from, however little.
    """
    count = 0
    for slot in range(len(segments)):
        rows, tombstones = segments[slot, COUNT] & 0xFFFFFFFF, segments[slot, COUNT] >> 32
        needed, number = segments[slot, LIVE] + tombstones, segments[slot, NUMBER]
        if kept[slot] or needed <= 0 or not 0 < number <= epoch:
            continue
        if (segments[slot, LIVE] < rows or tombstones > 0) if every else needed < _WORTHWHILE * rows:
            share = needed / max(rows, 1)
            slots[count], scores[count] = slot, (1 - share) * (epoch + 1 - number) / (1 + share)
            count += 1
    return count


def marked(segments: np.ndarray[Any, Any], slots: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """bool, a slot each: whether it is among `slots`, a collection of them."""
    marks = np.zeros(len(segments), np.bool_)
    marks[list(slots)] = True
    return marks
