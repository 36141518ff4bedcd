"""Kernels of HeapStore: rows out of blocks, rows into them, rows away. They run without the GIL.

Blocks, places, hints and the free list are described in `storage.heap_store`. The kernels get the shards and the shift
of an `IdIndex`, the lines of a `SegmentTable`, and uint64 places; a hint is the place of (table, id), of another id, or
0. Where Python must make room they stop. Called under the store's lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from storage.id_index import LIMIT, USED, place_of, remove_entry, seek, set_entry
from storage.row_log.gather import prefetch_row, row_address, write_ids
from storage.row_log.hashing import mix
from storage.row_log.places import CODES, COUNT, IDS, row_of, slot_of, stored_id, stored_table
from storage.row_log.raw import copy_bytes, prefetch, store64

FREE, NEXT, END = range(3)  # of a ledger: first free place, next place never used, where the newest block ends

_ID_AHEAD, _ROW_AHEAD = 24, 12
_0, _4, _8 = (np.uint64(n) for n in (0, 4, 8))


@njit(inline="always")
def _ask_for_ids(segments: Any, places: Any, i: Any) -> None:
    """Prefetch the id and the table number stored at the i-th place, if there is one."""
    if i < len(places) and places[i] != _0:
        prefetch(np.uint64(segments[slot_of(places[i]), IDS]) + row_of(places[i]) * _8)
        prefetch(np.uint64(segments[slot_of(places[i]), CODES]) + row_of(places[i]) * _4)


@njit(inline="always")
def _ask_for_row(segments: Any, stride: Any, places: Any, i: Any) -> None:
    """Prefetch the row at the i-th place, if there is one."""
    if i < len(places) and places[i] != _0:
        prefetch_row(row_address(segments, places[i], stride), stride)


@njit(inline="always")
def _holds(segments: Any, place: Any, table: Any, id: Any) -> Any:
    """Whether the row at a place is that of (table, id)."""
    return place != _0 and stored_id(segments, place) == id and stored_table(segments, place) == np.uint64(table)


@njit(nogil=True, cache=True)
def read_rows(
    shards: Any,
    shift: Any,
    segments: Any,
    stride: Any,
    tables: Any,
    ids: Any,
    places: Any,
    out: Any,
    step: Any,
    found: Any,
) -> Any:
    """Copy the rows that are there and return their number; `places` are hints, as `find_places` gives them.

    Args:
        stride: uint64, bytes of a row.
        out, step: address of row 0 of the output and bytes from one to the next (uint64).
        found: bool (N,), set for every row.
    """
    hits = 0
    for i in range(len(ids)):
        _ask_for_ids(segments, places, i + _ID_AHEAD)
        _ask_for_row(segments, stride, places, i + _ROW_AHEAD)
        place = places[i]
        if place != _0 and not _holds(segments, place, tables[i], ids[i]):  # another id of the same tag
            hash = mix(tables[i], ids[i])
            position = seek(shards, shift, hash, segments, tables[i], ids[i])
            place = place_of(shards, shift, hash, position) if position >= 0 else _0
        found[i] = place != _0
        if place != _0:
            copy_bytes(out + np.uint64(i) * step, row_address(segments, place, stride), np.int64(stride))
            hits += 1
    return hits


@njit(inline="always")
def _take_place(segments: Any, ledger: Any) -> Any:
    """A place for a new row: a deleted row's, else the next of the newest block, which must have one."""
    place = np.uint64(ledger[FREE])
    if place != _0:
        ledger[FREE] = stored_id(segments, place)
    else:
        place = np.uint64(ledger[NEXT])
        ledger[NEXT] += 1
        segments[slot_of(place), COUNT] += 1
    return place


@njit(nogil=True, cache=True)
def write_rows(
    shards: Any,
    shift: Any,
    segments: Any,
    stride: Any,
    ledger: Any,
    tables: Any,
    ids: Any,
    places: Any,
    data: Any,
    step: Any,
    start: Any,
) -> Any:
    """Insert or overwrite rows start, start + 1, ... until Python must make room.

    Args:
        ledger: int64 (3,), see FREE, NEXT and END.
        places: hints, as `find_places` gives them.
        data, step: address of row 0 of the batch and bytes from one to the next (uint64).

    Returns:
        (next row of the batch, the full shard or -1 if it is a block that lacks).
    """
    for i in range(start, len(ids)):
        _ask_for_ids(segments, places, i + _ID_AHEAD)
        _ask_for_row(segments, stride, places, i + _ROW_AHEAD)
        place = places[i]
        if not _holds(segments, place, tables[i], ids[i]):
            hash = mix(tables[i], ids[i])
            position = seek(shards, shift, hash, segments, tables[i], ids[i])
            if position >= 0:
                place = place_of(shards, shift, hash, position)
            else:
                shard = np.int64(hash >> shift)
                if shards[shard, USED] >= shards[shard, LIMIT]:
                    return i, shard
                if ledger[FREE] == 0 and ledger[NEXT] == ledger[END]:
                    return i, -1
                place = _take_place(segments, ledger)
                write_ids(segments, slot_of(place), row_of(place), tables[i], ids[i])
                set_entry(shards, shift, hash, -1 - position, place)
                shards[shard, USED] += 1
        copy_bytes(row_address(segments, place, stride), data + np.uint64(i) * step, np.int64(stride))
    return len(ids), -1


@njit(nogil=True, cache=True)
def free_rows(shards: Any, shift: Any, segments: Any, ledger: Any, tables: Any, ids: Any, places: Any) -> Any:
    """Take ids out of the index and chain their places; the number of rows that were there."""
    gone = 0
    for i in range(len(ids)):
        _ask_for_ids(segments, places, i + _ID_AHEAD)
        hash = mix(tables[i], ids[i])
        position = seek(shards, shift, hash, segments, tables[i], ids[i])
        if position >= 0:
            place = place_of(shards, shift, hash, position)
            remove_entry(shards, shift, hash, position)
            store64(np.uint64(segments[slot_of(place), IDS]) + row_of(place) * _8, np.uint64(ledger[FREE]))
            ledger[FREE] = np.int64(place)
            gone += 1
    return gone
