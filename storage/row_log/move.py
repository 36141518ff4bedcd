"""Kernels of compaction: prove the rows of a segment, then move the live ones into another.

Moving a row copies its stored bytes, checksum included, and its epoch, and points the index at the copy - if the index
still points at the row: an entry says exactly which place it is of, so no id is read for that. A row that was replaced
or deleted in the meantime is left behind. Tombstones move as they are, unless nothing is left that they hide.

`verify_rows` reads every byte of the segment and may wait for the disk; it runs without the store's lock, on a
committed segment, which nobody changes. `move_rows` runs under the lock, a few thousand rows at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from storage.id_index import home_address, seek_place, set_entry
from storage.row_log.gather import DONE, SEGMENT_FULL, TOMBSTONE, row_address, write_names
from storage.row_log.hashing import is_row_of, mix
from storage.row_log.places import (
    COUNT,
    LIVE,
    has_flags,
    place_at,
    stored_epoch,
    stored_id,
    stored_table,
    stored_tombstone,
)
from storage.row_log.raw import copy_bytes, prefetch, uncounted

_0, _1, _LINE = np.uint64(0), np.uint64(1), np.uint64(64)
_AHEAD = 16
_TOMBSTONE_STEP = np.int64(1) << 32


@njit(nogil=True, cache=True)
def verify_rows(segments: Any, stride: Any, slot: Any, damaged: Any) -> Any:
    """damaged[row] = whether a row's bytes do not match its checksum; how many do not.

    Args:
        stride: uint64, stored bytes of a row.
        damaged: bool (rows of the segment,).
    """
    segments = uncounted(segments)
    count = 0
    for at in range(len(damaged)):
        place = place_at(slot, at)
        row = row_address(segments, place, stride)
        damaged[at] = not is_row_of(row, stride, np.uint32(stored_table(segments, place)), stored_id(segments, place))
        count += damaged[at]
    return count


@njit(inline="always")
def _hidden(hashes: Any, hash: Any) -> Any:
    """Position of a hash in a set of them (0 = empty, a power of two in size, never full), or of the gap for it."""
    mask = np.uint64(len(hashes) - 1)
    at = hash & mask
    while hashes[at] != _0 and hashes[at] != hash:
        at = (at + _1) & mask
    return at


@njit(inline="always")
def _hides_nothing(hashes: Any, needed: Any, hash: Any) -> Any:
    """Whether a tombstone is in the set and not needed."""
    nothing = False
    if len(hashes) > 0:
        entry = _hidden(hashes, hash)
        nothing = hashes[entry] != _0 and not needed[entry]
    return nothing


@njit(nogil=True, cache=True)
def move_rows(
    shards: Any,
    shift: Any,
    segments: Any,
    stride: Any,
    source: Any,
    start: Any,
    stop: Any,
    damaged: Any,
    target: Any,
    capacity: Any,
    epochs: Any,
    hashes: Any,
    needed: Any,
) -> Any:
    """Append the live rows and the tombstones of rows start, ..., stop - 1 of a segment to an open one.

    Args:
        source, target: slots.
        damaged: bool (rows of the source,): rows that stay where they are.
        capacity: rows that the open segment holds.
        epochs: int64 (capacity,), of the open segment's rows.
        hashes, needed: set of tombstones' hashes and which of them still hide something; tombstones that are in the
            set and hide nothing are dropped. Empty: all are kept.

    Returns:
        (row to go on at, DONE | SEGMENT_FULL).
    """
    shards, segments = uncounted(shards), uncounted(segments)
    count = segments[target, COUNT] & 0xFFFFFFFF
    last = len(damaged) - 1
    for at in range(start, stop):
        ahead = place_at(source, min(at + _AHEAD, last))
        hash_ahead = mix(np.uint32(stored_table(segments, ahead)), stored_id(segments, ahead))
        home = home_address(shards, shift, hash_ahead)
        prefetch(home)
        prefetch(home + _LINE)  # of a dead row the search ends at an empty entry
        place = place_at(source, at)
        table, id = np.uint32(stored_table(segments, place)), stored_id(segments, place)
        hash = mix(table, id)
        tombstone = stored_tombstone(segments, place)
        position = np.int64(-1)
        if tombstone:
            if _hides_nothing(hashes, needed, hash | _1):
                segments[source, COUNT] -= _TOMBSTONE_STEP
                continue
        else:
            position = seek_place(shards, shift, hash, place)
            if position < 0 or damaged[at]:
                continue
        if count == capacity:
            return at, SEGMENT_FULL
        here = np.uint64(count)
        row = row_address(segments, place_at(target, count), stride)
        copy_bytes(row, row_address(segments, place, stride), np.int64(stride))
        write_names(segments, target, capacity, here, table, id, TOMBSTONE if tombstone else 0)
        epochs[count] = stored_epoch(segments, place)
        if tombstone:
            segments[source, COUNT] -= _TOMBSTONE_STEP
            segments[target, COUNT] += 1 + _TOMBSTONE_STEP
        else:
            set_entry(shards, shift, hash, position, place_at(target, count))
            segments[source, LIVE] -= 1
            segments[target, LIVE] += 1
            segments[target, COUNT] += 1
        count += 1
    return stop, DONE


@njit(nogil=True, cache=True)
def count_tombstones(segments: Any, slot: Any) -> Any:
    """How many tombstones a committed segment holds, those included that were moved or dropped since."""
    count = 0
    if has_flags(segments, slot):
        for at in range(segments[slot, COUNT] & 0xFFFFFFFF):
            count += stored_tombstone(segments, place_at(slot, at))
    return count


@njit(nogil=True, cache=True)
def collect_tombstones(segments: Any, slot: Any, hashes: Any, epochs: Any) -> Any:
    """Put the tombstones of a segment into a set: their hashes, and of each the newest epoch."""
    for at in range(segments[slot, COUNT] & 0xFFFFFFFF):
        place = place_at(slot, at)
        if stored_tombstone(segments, place):
            hash = mix(np.uint32(stored_table(segments, place)), stored_id(segments, place)) | _1
            entry = _hidden(hashes, hash)
            hashes[entry] = hash
            epochs[entry] = max(epochs[entry], stored_epoch(segments, place))


@njit(nogil=True, cache=True)
def mark_needed(segments: Any, slot: Any, hashes: Any, epochs: Any, needed: Any) -> None:
    """Mark the tombstones of a set that hide a row of a segment. Ids that share a hash may mark one too many."""
    for at in range(segments[slot, COUNT] & 0xFFFFFFFF):
        place = place_at(slot, at)
        if not stored_tombstone(segments, place):
            hash = mix(np.uint32(stored_table(segments, place)), stored_id(segments, place)) | _1
            entry = _hidden(hashes, hash)
            if hashes[entry] != _0 and stored_epoch(segments, place) <= epochs[entry]:
                needed[entry] = True
