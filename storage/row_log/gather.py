"""Kernels that move rows: out of segments, into the open segment, out of the index. They run without the GIL.

N ids of a batch. A stored row is 8 bytes of checksum, then its bytes, then zeros up to a multiple of 8 (`stride` in
all).

Reading happens in two passes over a block of ids, so that the pages of all its rows can be asked for before the first
is touched: `find_places` takes the first place whose tag fits, `gather` copies the rows whose checksums, keyed by
table and id, prove that they are whole and the right ones. What is left over, a false tag or damage, goes to
`settle`, which compares stored ids and tells the two apart. So the common row costs one line of the index and its own
bytes, and the block of ids stored in its segment is never touched.

Stored ids were verified when the store was opened, and may have been damaged since. So whoever is about to give an id a
new entry in the index asks the checksums too (`seek_row`): an id that is not recognised keeps its entry, and no look-up
ever finds an old version behind it.

Writing appends to the open segment and changes the index row by row, in the order of the batch. The kernels stop where
Python must act: at a full segment or a full shard. Called under the store's lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from storage.id_index import (
    ADDRESS,
    CAPACITY,
    LIMIT,
    PLACE_BITS,
    PLACE_MASK,
    TAG_BITS,
    USED,
    first_match,
    home_address,
    place_of,
    remove_entry,
    seek,
    set_entry,
    tag_of,
)
from storage.row_log.hashing import mix, row_seed, xxh64
from storage.row_log.places import (
    CODES,
    COUNT,
    IDS,
    LIVE,
    ROWS,
    place_at,
    row_of,
    slot_of,
    stored_epoch,
    stored_id,
    stored_table,
    stored_tombstone,
)
from storage.row_log.raw import copy_bytes, load64, prefetch, store8, store32, store64

DONE, SEGMENT_FULL, SHARD_FULL = range(3)
TOMBSTONE = 1

_0, _1, _4, _8, _64 = (np.uint64(n) for n in (0, 1, 4, 8, 64))
_INDEX_AHEAD, _ID_AHEAD, _ROW_AHEAD = 16, 8, 8
_PREFETCH_BYTES = 512  # of a row; the processor follows by itself after that
_TOMBSTONE_STEP = np.int64(1) << 32


@njit(inline="always")
def prefetch_row(address: Any, stride: Any) -> None:
    """Ask for the lines of a stored row of `stride` bytes."""
    line = address
    end = address + (stride if stride < _PREFETCH_BYTES else np.uint64(_PREFETCH_BYTES))
    while line < end:
        prefetch(line)
        line += _64
    prefetch(end - _1)


@njit(inline="always")
def row_address(segments: Any, place: Any, stride: Any) -> Any:
    """Where the row at a place is stored."""
    return np.uint64(segments[slot_of(place), ROWS]) + row_of(place) * stride


@njit
def _prove(shards: Any, shift: Any, hash: Any, segments: Any, stride: Any, table: Any, id: Any) -> Any:
    """As `seek`, by the checksums of the rows: where the entry of an id is whose stored id is damaged."""
    shard = hash >> shift
    base = np.uint64(shards[shard, ADDRESS])
    capacity = np.uint64(shards[shard, CAPACITY])
    tag = tag_of(hash)
    at = (tag * capacity) >> TAG_BITS
    while True:
        entry = load64(base + at * _8)
        if entry == _0:
            return -1 - np.int64(at)
        if entry >> PLACE_BITS == tag:
            row = row_address(segments, entry & PLACE_MASK, stride)
            if load64(row) == xxh64(row + _8, stride - _8, row_seed(table, id)):
                return np.int64(at)
        at += _1
        if at == capacity:
            at = _0


@njit(inline="always")
def seek_row(shards: Any, shift: Any, hash: Any, segments: Any, stride: Any, table: Any, id: Any, hint: Any) -> Any:
    """As `seek`, for ids in a file that may have been damaged since it was opened: no row gets a second entry.

    A stored id that was damaged is no match any more, and one of its row's two entries would lead to an old version.
    `hint` is what `find_places` gave: 0 if no row had the tag.
    """
    position = seek(shards, shift, hash, segments, table, id)
    if position < 0 and hint != _0:
        position = _prove(shards, shift, hash, segments, stride, table, id)
    return position


@njit(nogil=True, cache=True)
def find_places(shards: Any, shift: Any, tables: Any, ids: Any, places: Any) -> None:
    """places[i] = first place whose tag fits (tables[i], ids[i]), 0 if there is none."""
    n = len(ids)
    for i in range(n):
        if i + _INDEX_AHEAD < n:
            prefetch(home_address(shards, shift, mix(tables[i + _INDEX_AHEAD], ids[i + _INDEX_AHEAD])))
        places[i] = first_match(shards, shift, mix(tables[i], ids[i]))


@njit(nogil=True, cache=True)
def gather(
    segments: Any, stride: Any, tables: Any, ids: Any, places: Any, out: Any, out_step: Any, width: Any, found: Any
) -> Any:
    """Copy the rows that their checksums prove; the number of places that remain to be settled.

    Args:
        segments: lines of the group's segments.
        stride: uint64, stored bytes of a row.
        tables, ids, places: (N,), what `find_places` was given and gave.
        out, out_step: address of row 0 of the output and bytes from one to the next (uint64).
        width: int64, bytes to copy.
        found: bool (N,), set for every row; False where a place remains to be settled.
    """
    n = len(ids)
    suspects = 0
    for i in range(n):
        if i + _ROW_AHEAD < n and places[i + _ROW_AHEAD] != _0:
            prefetch_row(row_address(segments, places[i + _ROW_AHEAD], stride), stride)
        found[i] = False
        if places[i] != _0:
            row = row_address(segments, places[i], stride)
            if load64(row) == xxh64(row + _8, stride - _8, row_seed(tables[i], ids[i])):
                copy_bytes(out + np.uint64(i) * out_step, row + _8, width)
                found[i] = True
            else:
                suspects += 1
    return suspects


@njit(nogil=True, cache=True)
def settle(
    shards: Any,
    shift: Any,
    segments: Any,
    stride: Any,
    tables: Any,
    ids: Any,
    places: Any,
    out: Any,
    out_step: Any,
    width: Any,
    found: Any,
) -> Any:
    """Decide what `gather` left open: false tags are searched on, damage is returned.

    Returns:
        The place (uint64) of a damaged row, 0 if there is none: the row asked for, or one so damaged that neither its
        stored id nor its bytes can be believed.
    """
    for i in range(len(ids)):
        if found[i] or places[i] == _0:
            continue
        hash = mix(tables[i], ids[i])
        position = seek_row(shards, shift, hash, segments, stride, tables[i], ids[i], places[i])
        if position >= 0:
            place = place_of(shards, shift, hash, position)
            row = row_address(segments, place, stride)
            if load64(row) != xxh64(row + _8, stride - _8, row_seed(tables[i], ids[i])):
                return place
            copy_bytes(out + np.uint64(i) * out_step, row + _8, width)
            found[i] = True
        else:
            other = row_seed(np.uint32(stored_table(segments, places[i])), stored_id(segments, places[i]))
            row = row_address(segments, places[i], stride)
            if load64(row) != xxh64(row + _8, stride - _8, other):
                return places[i]
    return _0


@njit(inline="always")
def _ask_for_id(segments: Any, places: Any, i: Any) -> None:
    """Prefetch the stored id with which a row some way ahead will be compared."""
    if i + _ID_AHEAD < len(places) and places[i + _ID_AHEAD] != _0:
        place = places[i + _ID_AHEAD]
        prefetch(np.uint64(segments[slot_of(place), IDS]) + row_of(place) * _8)


@njit(inline="always")
def write_ids(segments: Any, slot: Any, row: Any, table: Any, id: Any) -> None:
    """Store a row's id and table number, the latter in the 4 bytes of a segment that is being filled."""
    store64(np.uint64(segments[slot, IDS]) + row * _8, np.uint64(id))
    store32(np.uint64(segments[slot, CODES]) + row * _4, np.uint64(table))


@njit(nogil=True, cache=True)
def append_rows(
    shards: Any,
    shift: Any,
    segments: Any,
    stride: Any,
    slot: Any,
    capacity: Any,
    tables: Any,
    ids: Any,
    places: Any,
    data: Any,
    data_step: Any,
    width: Any,
    start: Any,
) -> Any:
    """Append rows start, start + 1, ... to the open segment in `slot`, and point the index at them.

    Args:
        capacity: rows that the open segment holds.
        tables, ids, places: (N,), the batch, and what `find_places` gave for it: a hint of what to prefetch.
        data, data_step: address of row 0 of the batch and bytes from one to the next (uint64).
        width: int64, bytes of a row; those behind it, up to the stride, stay zero.

    Returns:
        (next row of the batch, DONE | SEGMENT_FULL | SHARD_FULL, the full shard).
    """
    count = segments[slot, COUNT] & 0xFFFFFFFF
    for i in range(start, len(ids)):
        _ask_for_id(segments, places, i)
        if count == capacity:
            return i, SEGMENT_FULL, 0
        hash = mix(tables[i], ids[i])
        position = seek_row(shards, shift, hash, segments, stride, tables[i], ids[i], places[i])
        shard = np.int64(hash >> shift)
        if position < 0 and shards[shard, USED] >= shards[shard, LIMIT]:
            return i, SHARD_FULL, shard
        here = np.uint64(count)
        row = np.uint64(segments[slot, ROWS]) + here * stride
        store64(row + stride - _8, _0)  # the padding; a row that needs none covers it
        copy_bytes(row + _8, data + np.uint64(i) * data_step, width)
        store64(row, xxh64(row + _8, stride - _8, row_seed(tables[i], ids[i])))
        write_ids(segments, slot, here, tables[i], ids[i])
        store8(np.uint64(segments[slot, CODES]) + np.uint64(capacity) * _4 + here, _0)
        if position < 0:
            position = -1 - position
            shards[shard, USED] += 1
        else:
            segments[slot_of(place_of(shards, shift, hash, position)), LIVE] -= 1
        set_entry(shards, shift, hash, position, place_at(slot, count))
        count += 1
        segments[slot, COUNT] += 1
        segments[slot, LIVE] += 1
    return len(ids), DONE, 0


@njit(nogil=True, cache=True)
def append_tombstones(
    shards: Any,
    shift: Any,
    segments: Any,
    stride: Any,
    slot: Any,
    capacity: Any,
    tables: Any,
    ids: Any,
    places: Any,
    start: Any,
) -> Any:
    """Write a tombstone for each id that has a row, and take it out of the index.

    Returns:
        (next row of the batch, DONE | SEGMENT_FULL).
    """
    count = segments[slot, COUNT] & 0xFFFFFFFF
    for i in range(start, len(ids)):
        _ask_for_id(segments, places, i)
        hash = mix(tables[i], ids[i])
        position = seek_row(shards, shift, hash, segments, stride, tables[i], ids[i], places[i])
        if position < 0:
            continue
        if count == capacity:
            return i, SEGMENT_FULL
        here = np.uint64(count)
        row = np.uint64(segments[slot, ROWS]) + here * stride
        for at in range(np.uint64(8), stride, np.uint64(8)):
            store64(row + np.uint64(at), _0)
        store64(row, xxh64(row + _8, stride - _8, row_seed(tables[i], ids[i])))
        write_ids(segments, slot, here, tables[i], ids[i])
        store8(np.uint64(segments[slot, CODES]) + np.uint64(capacity) * _4 + here, np.uint64(TOMBSTONE))
        segments[slot_of(place_of(shards, shift, hash, position)), LIVE] -= 1
        remove_entry(shards, shift, hash, position)
        count += 1
        segments[slot, COUNT] += 1 + _TOMBSTONE_STEP
    return len(ids), DONE


@njit(nogil=True, cache=True)
def live_rows(shards: Any, shift: Any, segments: Any, slot: Any, start: Any, tables: Any, ids: Any, places: Any) -> Any:
    """The live rows of a segment from row `start` on, at most as many as the outputs hold.

    Returns:
        (row to go on at, rows written to `tables`, `ids` and `places`).
    """
    count = segments[slot, COUNT] & 0xFFFFFFFF
    n = 0
    at = start
    while at < count and n < len(ids):
        place = place_at(slot, at)
        table, id = np.uint32(stored_table(segments, place)), stored_id(segments, place)
        hash = mix(table, id)
        position = seek(shards, shift, hash, segments, table, id)
        if position >= 0 and place_of(shards, shift, hash, position) == place:
            tables[n], ids[n], places[n] = table, id, place
            n += 1
        at += 1
    return at, n


@njit(nogil=True, cache=True)
def replay(shards: Any, shift: Any, segments: Any, stride: Any, slot: Any, last_epoch: Any, start: Any) -> Any:
    """Point the index at the rows and tombstones of a committed segment that are newer than what it points to.

    Of two versions the one with the newer epoch wins, within a segment the later one; rows with epochs above
    `last_epoch` are passed over. The order in which segments are replayed does not matter, since tombstones stay in
    the index until `bury` has seen all segments.

    Args:
        stride: uint64, stored bytes of a row; None if all ids that the index leads to were verified just now, for which
            Numba compiles a kernel of its own, faster by a quarter.

    Returns:
        (row to go on at, DONE | SHARD_FULL, the full shard).
    """
    count = segments[slot, COUNT] & 0xFFFFFFFF
    for at in range(start, count):
        if at + _INDEX_AHEAD < count:
            ahead = place_at(slot, at + _INDEX_AHEAD)
            hash = mix(np.uint32(stored_table(segments, ahead)), stored_id(segments, ahead))
            prefetch(home_address(shards, shift, hash))
        place = place_at(slot, at)
        epoch = stored_epoch(segments, place)
        if epoch > last_epoch:
            continue
        table, id = np.uint32(stored_table(segments, place)), stored_id(segments, place)
        hash = mix(table, id)
        if stride is None:
            position = seek(shards, shift, hash, segments, table, id)
        else:
            hint = first_match(shards, shift, hash)
            position = seek_row(shards, shift, hash, segments, stride, table, id, hint)
        shard = np.int64(hash >> shift)
        if position < 0:
            if shards[shard, USED] >= shards[shard, LIMIT]:
                return at, SHARD_FULL, shard
            position = -1 - position
            shards[shard, USED] += 1
        else:
            old = place_of(shards, shift, hash, position)
            if stored_epoch(segments, old) > epoch:
                continue
            segments[slot_of(old), LIVE] -= 1
        set_entry(shards, shift, hash, position, place)
        segments[slot, LIVE] += 1
    return count, DONE, 0


@njit(nogil=True, cache=True)
def bury(shards: Any, shift: Any, segments: Any, slot: Any) -> None:
    """Take the tombstones of a committed segment out of the index."""
    for at in range(segments[slot, COUNT] & 0xFFFFFFFF):
        place = place_at(slot, at)
        if stored_tombstone(segments, place):
            table, id = np.uint32(stored_table(segments, place)), stored_id(segments, place)
            hash = mix(table, id)
            position = seek(shards, shift, hash, segments, table, id)
            if position >= 0 and place_of(shards, shift, hash, position) == place:
                remove_entry(shards, shift, hash, position)
                segments[slot, LIVE] -= 1
