"""Going back to a snapshot in memory: the index is what it was, without reading everything anew.

What changed since are the ids of the segments that go. Their entries leave the index, and the hashes of their ids mark
bits; then of the segments that stay those rows are replayed whose hashes have marked bits. Where an unmarked id shares
a bit it is replayed too, which changes nothing. So it costs a pass over the stored ids that stay, at memory's speed,
and work for the rows that changed.

Owned by the store's lock, with no reader at work. Nothing here writes to the disk.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.id_index import remove_entry, seek_place
from storage.row_log.group_rows import GroupRows
from storage.row_log.hashing import mix
from storage.row_log.move import count_tombstones
from storage.row_log.places import COUNT, NUMBER, place_at, stored_id, stored_table
from storage.row_log.raw import uncounted
from storage.row_log.recovery import LAST_EPOCH, replay_slots
from storage.row_log.replay import mark

_BITS_A_ROW = 16
_LEAST_BITS = 1 << 10


def check_whole(group: GroupRows, numbers: NDArray[np.int64]) -> None:
    """Verify headers and ids of a group's segments among `numbers` once more, before they are replayed.

    Raises:
        CorruptSegmentError: one is damaged.
    """
    for slot in np.flatnonzero(np.isin(group.segments.lines[:, NUMBER], numbers[numbers > 0])).tolist():
        group.check_ids(slot)


@njit(nogil=True, cache=True)
def _leave(shards: Any, shift: Any, segments: Any, slot: Any, marks: Any) -> None:
    """Take the rows of a segment out of the index, and mark their ids and those of its tombstones."""
    shards, segments, marks = uncounted(shards), uncounted(segments), uncounted(marks)
    for at in range(segments[slot, COUNT] & 0xFFFFFFFF):
        place = place_at(slot, at)
        hash = mix(np.uint32(stored_table(segments, place)), stored_id(segments, place))
        position = seek_place(shards, shift, hash, place)
        if position >= 0:
            remove_entry(shards, shift, hash, position)
        mark(marks, hash)


def go_back(group: GroupRows, kept: NDArray[np.int64]) -> None:
    """Have a group hold the rows of its segments among the numbers `kept`, and of no others.

    Requires: those are committed and whole, and nothing newer than them among them hides anything that counts.
    """
    lines = group.segments.lines
    there = group.segments.slots()  # by number, as opening does: of two copies of a row the later one counts
    stay = np.isin(lines[there, NUMBER], kept)
    staying, leaving = there[stay], there[~stay]
    rows = int((lines[leaving, COUNT] & 0xFFFFFFFF).sum())
    marks = np.zeros(max(_LEAST_BITS, 1 << (_BITS_A_ROW * rows - 1).bit_length() if rows else 0) // 64, np.uint64)
    for slot in leaving.tolist():
        _leave(group.index.table, group.index.shift, lines, slot, marks)
    group.drop_buffers()
    for slot in leaving.tolist():
        group.segments.give_back(slot)
    for slot in staying.tolist():
        lines[slot, COUNT] = (lines[slot, COUNT] & 0xFFFFFFFF) | int(count_tombstones(lines, slot)) << 32
    replay_slots(group, staying, LAST_EPOCH, marks=marks)
    group.index.trim()
