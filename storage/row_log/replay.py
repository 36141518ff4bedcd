"""Kernels of opening: the rows of committed segments into the index, their tombstones out of it. Without the GIL.

The order in which segments are replayed does not matter: of two versions the newer epoch wins, within a segment the
later row, and tombstones stay in the index until `bury` has seen all segments. A row that was moved was the last thing
its segment said of the id, and a tombstone that was moved may not have been: of equal epochs, the row wins. Called
under the store's lock.

A row costs about 45 ns if its id is new, most of it the one cache line of the index that it goes to: all ids of a
segment are hashed first, and the lines asked for some rows ahead.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.id_index import LIMIT, USED, first_match, home_address, place_of, remove_entry, seek, set_entry
from storage.row_log.gather import DONE, SHARD_FULL, seek_row
from storage.row_log.hashing import mix
from storage.row_log.places import (
    COUNT,
    EPOCH,
    LIVE,
    NUMBER,
    WIDTHS,
    place_at,
    slot_of,
    stored_epoch,
    stored_id,
    stored_table,
    stored_tombstone,
)
from storage.row_log.raw import prefetch, uncounted

_INDEX_AHEAD = 16
_0, _1, _6, _48, _63 = (np.uint64(n) for n in (0, 1, 6, 48, 63))


@njit(inline="always")
def _hash_at(segments: Any, place: Any) -> Any:
    """The hash of the id and table stored at a place."""
    return mix(np.uint32(stored_table(segments, place)), stored_id(segments, place))


@njit(nogil=True, cache=True)
def _mark_ids(segments: Any, slots: Any, marks: Any, mask: Any) -> None:
    """Set the mark of each id whose hash has no bit of `mask` (uint64): one of 2^16, by its upper bits."""
    segments, marks = uncounted(segments), uncounted(marks)
    for slot in slots:
        for at in range(segments[slot, COUNT] & 0xFFFFFFFF):
            hash = _hash_at(segments, place_at(slot, at))
            if hash & mask == _0:
                marks[hash >> _48] = True


def distinct_ids(segments: NDArray[np.int64], slots: NDArray[np.int64]) -> int:
    """About how many ids committed segments hold between them, to a percent; never more than they have rows.

    Linear counting (Whang, Vander-Zanden and Taylor, 1990) of a share of the ids so small that half of the marks or
    more stay unset.
    """
    rows = int((segments[slots, COUNT] & 0xFFFFFFFF).sum())
    bits = max(0, (rows >> 16).bit_length() - 1)
    marks = np.zeros(1 << 16, np.bool_)
    _mark_ids(segments, slots, marks, np.uint64((1 << bits) - 1))
    unset = 1 - marks.sum() / len(marks)
    return rows if unset == 0 else min(rows, round(-len(marks) * math.log(unset) * (1 << bits)))


@njit(inline="always")
def mark(marks: Any, hash: Any) -> None:
    """Mark a hash in a set of bits (uint64 (n,), n a power of two), which many hashes share."""
    at = (hash >> _6) & np.uint64(len(marks) - 1)
    marks[at] |= _1 << (hash & _63)


@njit(nogil=True, cache=True)
def _pick(segments: Any, slot: Any, marks: Any, rows: Any) -> Any:
    """Write the rows of a segment whose hashes were marked, or share a bit with one; how many there are."""
    segments, marks = uncounted(segments), uncounted(marks)
    mask, n = np.uint64(len(marks) - 1), np.int64(0)
    for at in range(segments[slot, COUNT] & 0xFFFFFFFF):
        hash = _hash_at(segments, place_at(slot, at))
        rows[n] = at
        n += np.int64((marks[(hash >> _6) & mask] >> (hash & _63)) & _1)
    return n


def pick(segments: NDArray[np.int64], slot: int, marks: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Those rows of a segment, ascending, whose hashes were marked, and a few others."""
    rows = np.empty((int(segments[slot, COUNT]) & 0xFFFFFFFF) + 1, np.int64)
    return rows[: _pick(segments, slot, marks, rows)].copy()


@njit(nogil=True, cache=True)
def replay(
    shards: Any,
    shift: Any,
    segments: Any,
    stride: Any,
    slot: Any,
    last_epoch: Any,
    known_epoch: Any,
    start: Any,
    part: Any,
    part_bits: Any,
    picked: Any,
    live: Any,
) -> Any:
    """Point the index at the rows and tombstones of a committed segment that are newer than what it points to.

    Several threads may do so at once, each for the ids of some shards.

    Args:
        stride: uint64, stored bytes of a row; None if all ids that the index leads to were verified just now, for which
            Numba compiles a kernel of its own, faster by a quarter.
        last_epoch: rows with epochs above it are passed over.
        known_epoch: the index has seen all changes up to this epoch, and buried tombstones: a moved row of an epoch up
            to it is taken only if its id has an entry. It was deleted otherwise.
        start: row to begin at.
        picked: int64 (n,), the rows in question, ascending; None = all.
        part, part_bits: which ids: those of 2^part_bits neighbouring shards, the `part`-th so many (both uint64).
        live: int64 (slots,), by how much the live rows of each segment change.

    Returns:
        (row to go on at, DONE | SHARD_FULL, the full shard).
    """
    shards, segments = uncounted(shards), uncounted(segments)
    count = segments[slot, COUNT] & 0xFFFFFFFF
    number, epoch = segments[slot, NUMBER], segments[slot, EPOCH]
    one_epoch = (segments[slot, WIDTHS] >> 8) & 255 == 0
    hashes, rows = np.empty(count + 1, np.uint64), np.empty(count + 1, np.int64)
    n = 0
    if picked is None:
        for at in range(start, count):
            hashes[n] = _hash_at(segments, place_at(slot, at))
            rows[n] = at
            n += (hashes[n] >> shift) >> part_bits == part  # else the next row takes its place
    else:
        for at in picked:
            hashes[n] = _hash_at(segments, place_at(slot, at))
            rows[n] = at
            n += at >= start and (hashes[n] >> shift) >> part_bits == part
    for i in range(n):
        prefetch(home_address(shards, shift, hashes[min(i + _INDEX_AHEAD, n - 1)]))
        at = rows[i]
        place = place_at(slot, at)
        if not one_epoch:
            epoch = stored_epoch(segments, place)
        if epoch > last_epoch:
            continue
        table, id, hash = np.uint32(stored_table(segments, place)), stored_id(segments, place), hashes[i]
        if stride is None:
            position = seek(shards, shift, hash, segments, table, id)
        else:
            hint = first_match(shards, shift, hash)
            position = seek_row(shards, shift, hash, segments, stride, table, id, hint)
        if position < 0:
            shard = np.int64(hash >> shift)
            if epoch < number and epoch <= known_epoch:
                continue
            if shards[shard, USED] >= shards[shard, LIMIT]:
                return at, SHARD_FULL, shard
            position = -1 - position
            shards[shard, USED] += 1
        else:
            old = place_of(shards, shift, hash, position)
            epoch_of_old = stored_epoch(segments, old)
            if epoch_of_old > epoch or (epoch_of_old == epoch < number and stored_tombstone(segments, place)):
                continue
            live[slot_of(old)] -= 1
        set_entry(shards, shift, hash, position, place)
        live[slot] += 1
    return count, DONE, 0


@njit(nogil=True, cache=True)
def bury(shards: Any, shift: Any, segments: Any, slot: Any) -> None:
    """Take the tombstones of a committed segment out of the index."""
    shards, segments = uncounted(shards), uncounted(segments)
    for at in range(segments[slot, COUNT] & 0xFFFFFFFF):
        place = place_at(slot, at)
        if stored_tombstone(segments, place):
            table, id = np.uint32(stored_table(segments, place)), stored_id(segments, place)
            hash = mix(table, id)
            position = seek(shards, shift, hash, segments, table, id)
            if position >= 0 and place_of(shards, shift, hash, position) == place:
                remove_entry(shards, shift, hash, position)
                segments[slot, LIVE] -= 1
