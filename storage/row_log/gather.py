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
    seek_place,
    set_entry,
    sole_match,
    tag_of,
)
from storage.row_log.hashing import has_long_checksum, is_row_of, mix, row_checksum
from storage.row_log.places import (
    CODES,
    COUNT,
    IDS,
    LIVE,
    ROWS,
    id_address,
    place_at,
    row_of,
    slot_of,
    stored_epoch,
    stored_id,
    stored_table,
)
from storage.row_log.raw import copy_bytes, load64, prefetch, prefetch_far, store8, store32, store64, uncounted

DONE, SEGMENT_FULL, SHARD_FULL = range(3)
TOMBSTONE = 1
EVER = (1 << 63) - 1

_0, _1, _4, _8, _64 = (np.uint64(n) for n in (0, 1, 4, 8, 64))
_INDEX_AHEAD, _ID_AHEAD, _ROW_AHEAD = 16, 16, 32
_TOUCHED_ROWS = 32
_PREFETCH_BYTES = 512  # of a row; the processor follows by itself after that
_TOMBSTONE_STEP = np.int64(1) << 32


@njit(inline="always")
def _lines_end(address: Any, stride: Any) -> Any:
    """Where the part of a stored row ends that is asked for ahead."""
    return address + (stride if stride < _PREFETCH_BYTES else np.uint64(_PREFETCH_BYTES))


@njit(inline="always")
def prefetch_row(address: Any, stride: Any) -> None:
    """Ask for the lines of a stored row of `stride` bytes."""
    line = address
    end = _lines_end(address, stride)
    while line < end:
        prefetch_far(line)
        line += _64
    prefetch_far(end - _1)


@njit(inline="always")
def touch_row(address: Any, stride: Any) -> Any:
    """Read a word of each line of a stored row; what they are is of no interest, but must be used."""
    line = address
    end = _lines_end(address, stride) - _8
    words = load64(end)
    while line < end:
        words ^= load64(line)
        line += _64
    return words


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
            if is_row_of(row, stride, table, id):
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


@njit
def _hashes(tables: Any, ids: Any) -> Any:
    hashes = np.empty(len(ids), np.uint64)
    for i in range(len(ids)):
        hashes[i] = mix(tables[i], ids[i])
    return hashes


@njit(nogil=True, cache=True)
def find_places(shards: Any, shift: Any, tables: Any, ids: Any, places: Any) -> None:
    """places[i] = first place whose tag fits (tables[i], ids[i]), 0 if there is none."""
    shards = uncounted(shards)
    n, hashes = len(ids), _hashes(tables, ids)
    for i in range(n):
        prefetch(home_address(shards, shift, hashes[min(i + _INDEX_AHEAD, n - 1)]))
        places[i] = first_match(shards, shift, hashes[i])


@njit(nogil=True, cache=True)
def gather(
    segments: Any, stride: Any, tables: Any, ids: Any, places: Any, out: Any, out_step: Any, width: Any, found: Any
) -> Any:
    """Copy the rows that their checksums prove.

    XXH64 is a long chain of steps, behind which the processor does not look ahead to the next row. So the lines of a
    few rows are read first, all at once, and their checksums computed then: a third faster. XXH3 needs no such help.

    Args:
        segments: lines of the group's segments.
        stride: uint64, stored bytes of a row.
        tables, ids, places: (N,), what `find_places` was given and gave.
        out, out_step: address of row 0 of the output and bytes from one to the next (uint64).
        width: int64, bytes to copy.
        found: bool (N,), set for every row; False where a place remains to be settled.

    Returns:
        (the number of places that remain to be settled, a number without meaning).
    """
    segments = uncounted(segments)
    n = len(ids)
    suspects = 0
    words = _0
    touched = not has_long_checksum(stride)
    for first in range(0, n, _TOUCHED_ROWS):
        stop = min(first + _TOUCHED_ROWS, n)
        for i in range(first, stop):
            prefetch_row(row_address(segments, places[min(i + _ROW_AHEAD, n - 1)], stride), stride)
            if touched and places[i] != _0:
                words ^= touch_row(row_address(segments, places[i], stride), stride)
        for i in range(first, stop):
            found[i] = False
            if places[i] != _0:
                row = row_address(segments, places[i], stride)
                if is_row_of(row, stride, tables[i], ids[i]):
                    copy_bytes(out + np.uint64(i) * out_step, row + _8, width)
                    found[i] = True
                else:
                    suspects += 1
    return suspects, words


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
            if not is_row_of(row, stride, tables[i], ids[i]):
                return place
            copy_bytes(out + np.uint64(i) * out_step, row + _8, width)
            found[i] = True
        else:
            row = row_address(segments, places[i], stride)
            table, id = np.uint32(stored_table(segments, places[i])), stored_id(segments, places[i])
            if not is_row_of(row, stride, table, id):
                return places[i]
    return _0


@njit(nogil=True, cache=True)
def find_known(shards: Any, shift: Any, tables: Any, ids: Any, known: Any, places: Any, matched: Any) -> None:
    """As `find_places`; matched[i] = whether row i, which is known[i] to be stored, lies there by the index alone."""
    shards = uncounted(shards)
    n, hashes = len(ids), _hashes(tables, ids)
    for i in range(n):
        ahead = home_address(shards, shift, hashes[min(i + _INDEX_AHEAD, n - 1)])
        prefetch(ahead)
        prefetch(ahead + _64)  # the search ends at an empty entry only
        places[i] = sole_match(shards, shift, hashes[i]) if known[i] else _0
        matched[i] = places[i] != _0
        if not matched[i]:
            places[i] = first_match(shards, shift, hashes[i])


@njit(nogil=True, cache=True)
def match_ids(segments: Any, tables: Any, ids: Any, places: Any, matched: Any) -> None:
    """matched[i] |= whether the id and table stored at places[i] are those of row i.

    Reading them here, with nothing to do in between, waits for many of them at once; `append_rows`, which computes a
    checksum a row, would wait for one after the other.
    """
    segments = uncounted(segments)
    n = len(ids)
    for i in range(n):
        ahead = min(i + _ID_AHEAD, n - 1)
        if not matched[ahead]:
            prefetch(id_address(segments, places[ahead]))
        if not matched[i] and places[i] != _0:
            matched[i] = stored_id(segments, places[i]) == ids[i] and stored_table(segments, places[i]) == tables[i]


@njit(inline="always")
def write_ids(segments: Any, slot: Any, row: Any, table: Any, id: Any) -> None:
    """Store a row's id and table number, the latter in the 4 bytes of a segment that is being filled."""
    store64(np.uint64(segments[slot, IDS]) + row * _8, np.uint64(id))
    store32(np.uint64(segments[slot, CODES]) + row * _4, np.uint64(table))


@njit(inline="always")
def write_names(segments: Any, slot: Any, capacity: Any, row: Any, table: Any, id: Any, flags: Any) -> None:
    """Store a row's id, table number and flags in a segment of `capacity` rows that is being filled."""
    write_ids(segments, slot, row, table, id)
    store8(np.uint64(segments[slot, CODES]) + np.uint64(capacity) * _4 + row, np.uint64(flags))


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
    matched: Any,
    data: Any,
    data_step: Any,
    width: Any,
    start: Any,
    until: Any,
) -> Any:
    """Append rows start, start + 1, ... to the open segment in `slot`, and point the index at them.

    Args:
        capacity: rows that the open segment holds.
        tables, ids: (N,), the batch.
        places, matched: (N,), what `find_known` and `match_ids` gave for it, before rows were changed.
        data, data_step: address of row 0 of the batch and bytes from one to the next (uint64).
        width: int64, bytes of a row; those behind it, up to the stride, stay zero.
        until: int64, an epoch: of an id that was changed after it the index leads to that change still. `EVER` for rows
            that are put now.

    Returns:
        (next row of the batch, DONE | SEGMENT_FULL | SHARD_FULL, the full shard).
    """
    shards, segments = uncounted(shards), uncounted(segments)
    count = segments[slot, COUNT] & 0xFFFFFFFF
    for i in range(start, len(ids)):
        if count == capacity:
            return i, SEGMENT_FULL, 0
        ahead = min(i + _INDEX_AHEAD, len(ids) - 1)
        prefetch(home_address(shards, shift, mix(tables[ahead], ids[ahead])))
        hash = mix(tables[i], ids[i])
        position = (
            seek_place(shards, shift, hash, places[i]) if matched[i] else np.int64(-1)
        )  # the entry, if it is still
        if position < 0:
            position = seek_row(shards, shift, hash, segments, stride, tables[i], ids[i], places[i])
        shard = np.int64(hash >> shift)
        if position < 0 and shards[shard, USED] >= shards[shard, LIMIT]:
            return i, SHARD_FULL, shard
        here = np.uint64(count)
        row = np.uint64(segments[slot, ROWS]) + here * stride
        store64(row + stride - _8, _0)  # the padding; a row that needs none covers it
        copy_bytes(row + _8, data + np.uint64(i) * data_step, width)
        store64(row, row_checksum(row, stride, tables[i], ids[i]))
        write_names(segments, slot, capacity, here, tables[i], ids[i], 0)
        segments[slot, COUNT] += 1
        count += 1
        if position < 0:
            position = -1 - position
            shards[shard, USED] += 1
        else:
            old = place_of(shards, shift, hash, position)
            if until != EVER and stored_epoch(segments, old) > until:
                continue
            segments[slot_of(old), LIVE] -= 1
        set_entry(shards, shift, hash, position, place_at(slot, count - 1))
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
    shards, segments = uncounted(shards), uncounted(segments)
    count = segments[slot, COUNT] & 0xFFFFFFFF
    for i in range(start, len(ids)):
        prefetch(id_address(segments, places[min(i + _ID_AHEAD, len(ids) - 1)]))
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
        store64(row, row_checksum(row, stride, tables[i], ids[i]))
        write_names(segments, slot, capacity, here, tables[i], ids[i], TOMBSTONE)
        segments[slot_of(place_of(shards, shift, hash, position)), LIVE] -= 1
        remove_entry(shards, shift, hash, position)
        count += 1
        segments[slot, COUNT] += 1 + _TOMBSTONE_STEP
    return len(ids), DONE


@njit(nogil=True, cache=True)
def live_rows(
    shards: Any,
    shift: Any,
    segments: Any,
    slot: Any,
    start: Any,
    which: Any,
    first: Any,
    last: Any,
    tables: Any,
    ids: Any,
    places: Any,
) -> Any:
    """The live rows of a segment from row `start` on, at most as many as the outputs hold.

    Args:
        which, first, last: a table number, or -1 for all tables; the first and the last id wanted.

    Returns:
        (row to go on at, rows written to `tables`, `ids` and `places`).
    """
    shards, segments = uncounted(shards), uncounted(segments)
    count = segments[slot, COUNT] & 0xFFFFFFFF
    n = 0
    at = start
    while at < count and n < len(ids):
        place = place_at(slot, at)
        table, id = np.uint32(stored_table(segments, place)), stored_id(segments, place)
        wanted = first <= id <= last and (which < 0 or which == table)
        if wanted and seek_place(shards, shift, mix(table, id), place) >= 0:
            tables[n], ids[n], places[n] = table, id, place
            n += 1
        at += 1
    return at, n
