"""Opening a log: segments are verified, adopted and replayed, and the index is what results.

Of each id the newest epoch wins and tombstones hide what is older, whatever the order of the segments, so a crash at
any point leaves nothing to repair: what was committed is there and nothing else. A state's rows are those with epochs
up to its own; later ones are passed over and reported, so that a store with durability "snapshot" can discard them.

A store that was closed left its index in a file (`row_log.index_file`), with which `open_log` spares the rest.
`replay_log` starts from nothing. It first counts the ids, about, and reserves room in the index: growing it shard by
shard would cost more than all the rest. `replay_segments` adds a few segments to what is there, for readers that
follow a writer. By then tombstones were buried, and one may have been deleted since, so nothing in the index tells a
row that is new from an old copy of a deleted one that compaction has moved. Epochs do: the rows of a group are first
written in segments that are committed in the order of their numbers, so a reader has seen every change up to the
greatest epoch it was shown (`GroupRows.seen_epoch`). A moved row up to that epoch is known to it, or was deleted. Only
segments of a state that was begun come later than their numbers say (`row_log.begun`); they are replayed like others,
before what was moved out of them, and a reader that has missed one which is gone starts over (`row_log.reader`).

Owned by the store's lock. After an error of `replay_log` groups are empty, after one of `replay_segments` as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptSegmentError
from storage.row_log.gather import SHARD_FULL
from storage.row_log.group_rows import GroupRows
from storage.row_log.index_file import Stamp, load_index
from storage.row_log.log import RowLog
from storage.row_log.manifest import INDEX_NAME
from storage.row_log.pages import ask_for_all
from storage.row_log.places import COUNT, LIVE
from storage.row_log.read_threads import for_each_block, usable_threads
from storage.row_log.replay import bury, distinct_ids, pick, replay
from storage.row_log.segment import HEADER_BYTES, SegmentHeader, are_whole, read_fronts, read_header

LAST_EPOCH = (1 << 63) - 1
_AHEAD = 32
_NOTHING_SEEN = -1


def open_log(
    log: RowLog, txn: Any, groups: list[GroupRows], last_epoch: int, store: bytes, where: Path
) -> tuple[list[int], bool]:
    """Fill groups: from the index file if the store was closed and nothing committed since, from the log otherwise.

    Args:
        where: the store's directory.

    Returns:
        As `replay_log`, and whether it was the file.
    """
    token, segments = log.closed_token(txn), log.segments(txn)
    if token is not None:
        stamp = Stamp(store, token, log.transaction(txn))
        if load_index(where / INDEX_NAME, groups, stamp, segments):
            return [], True
    return replay_log(segments, groups, last_epoch, store, str(where)), False


def replay_log(
    segments: dict[int, NDArray[np.uint8]], groups: list[GroupRows], last_epoch: int, store: bytes, where: str
) -> list[int]:
    """Fill groups with all segments of a read transaction; whatever they held is forgotten.

    Args:
        segments: as `RowLog.segments`.

    Returns:
        Numbers of segments that hold only rows with epochs above `last_epoch`.

    Raises:
        CorruptSegmentError: a segment is damaged, or is not of this store.
    """
    for group in groups:
        if len(group.segments):
            group.forget()
    later: list[int] = []
    try:
        for group, header, address in verified(segments, groups, store, where):
            if header.first_epoch > last_epoch:
                later.append(header.number)
            else:
                group.adopt(header, address)
                group.seen_epoch = max(group.seen_epoch, min(last_epoch, header.last_epoch))
    except BaseException:
        for group in groups:
            group.forget()
        raise
    try:
        for group in groups:
            fill_index(group, last_epoch)
    except BaseException:
        for group in groups:
            group.forget()
        raise
    return later


def fill_index(group: GroupRows, last_epoch: int) -> None:
    """Fill the index of a group, which is empty, from all segments that were adopted."""
    slots = group.segments.slots()
    group.index.reserve(distinct_ids(group.segments.lines, slots))
    replay_slots(group, slots, last_epoch)
    group.index.trim()


def replay_segments(
    log: RowLog, txn: Any, groups: list[GroupRows], numbers: list[int], last_epoch: int, store: bytes, where: str
) -> list[int]:
    """Add segments to groups that hold all that was committed before them, some of it perhaps deleted by now.

    Returns, raises: as `replay_log`.
    """
    segments = {number: log.segment(txn, number) for number in numbers}
    later: list[int] = []
    fresh: list[list[tuple[SegmentHeader, int]]] = [[] for _ in groups]
    for _, header, address in verified(segments, groups, store, where):
        if header.first_epoch > last_epoch:
            later.append(header.number)
        else:
            fresh[header.group].append((header, address))
    for group, found in zip(groups, fresh, strict=True):
        slots = np.array([group.adopt(header, address) for header, address in found], np.int64)
        replay_slots(group, slots, last_epoch, known_epoch=group.seen_epoch)
        seen = [min(last_epoch, header.last_epoch) for header, _ in found]
        group.seen_epoch = max([group.seen_epoch, *seen])
    return later


def replay_slots(
    group: GroupRows,
    slots: NDArray[np.int64],
    last_epoch: int,
    known_epoch: int = _NOTHING_SEEN,
    marks: NDArray[np.uint64] | None = None,
) -> None:
    """Take the rows of adopted segments into the index of their group, then bury their tombstones.

    Args:
        slots: (N,), in any order.
        last_epoch, known_epoch: as `storage.row_log.replay.replay`. Where something is known already, the segments in
            question were adopted some time ago, so their ids may be damaged by now: then checksums are asked too.
        marks: hashes (`storage.row_log.replay.mark`) of the ids in question; None = all.
    """
    picked = None if marks is None else _picked(group, slots, marks)
    take_rows(group, slots, last_epoch, known_epoch, picked)
    index, lines = group.index, group.segments.lines
    for slot in slots[lines[slots, COUNT] >> 32 > 0].tolist():
        bury(index.table, index.shift, lines, slot)


def take_rows(
    group: GroupRows,
    slots: NDArray[np.int64],
    last_epoch: int,
    known_epoch: int = _NOTHING_SEEN,
    picked: Mapping[int, NDArray[np.int64]] | None = None,
) -> None:
    """As `replay_slots`, with tombstones left in the index; `picked` are the rows in question by slot, None = all."""
    stride = None if known_epoch == _NOTHING_SEEN and picked is None else np.uint64(group.stride)
    index, lines = group.index, group.segments.lines
    parts = _parts_of(len(slots), len(index.table))
    part_bits = np.uint64((len(index.table) // parts).bit_length() - 1)
    live = np.zeros((parts, len(lines)), np.int64)

    def replay_part(part: int, errors: Sequence[BaseException]) -> None:
        for slot in slots.tolist() if picked is None else picked:
            if errors:
                return
            at, status = 0, SHARD_FULL
            while status == SHARD_FULL:
                at, status, shard = replay(
                    index.table,
                    index.shift,
                    lines,
                    stride,
                    slot,
                    last_epoch,
                    known_epoch,
                    at,
                    np.uint64(part),
                    part_bits,
                    None if picked is None else picked[slot],
                    live[part],
                )
                if status == SHARD_FULL:
                    index.grow(shard)

    for_each_block(replay_part, range(parts), parts)
    lines[:, LIVE] += live.sum(axis=0)


def _picked(group: GroupRows, slots: NDArray[np.int64], marks: NDArray[np.uint64]) -> dict[int, NDArray[np.int64]]:
    """Rows by slot whose ids' hashes were marked."""
    lines, found = group.segments.lines, {}

    def pick_some(first: int, errors: Sequence[BaseException]) -> None:
        for slot in slots[first : first + _AHEAD].tolist():
            if len(rows := pick(lines, slot, marks)):
                found[slot] = rows

    for_each_block(pick_some, range(0, len(slots), _AHEAD), usable_threads())
    return {slot: found[slot] for slot in slots.tolist() if slot in found}


def _parts_of(segments: int, shards: int) -> int:
    """Into how many parts the ids of so many segments are divided, for a thread each; a power of two."""
    if segments < _AHEAD:
        return 1
    return min(1 << (usable_threads().bit_length() - 1), shards)


def verified(
    segments: dict[int, NDArray[np.uint8]], groups: list[GroupRows], store: bytes, where: str
) -> Iterator[tuple[GroupRows, SegmentHeader, int]]:
    """Group, header and address of each segment, once its header and block of ids are found whole."""
    numbered = list(segments.items())
    for first in range(0, len(numbered), _AHEAD):
        some = numbered[first : first + _AHEAD]
        numbers = np.array([number for number, _ in some], np.int64)
        addresses, sizes = ask_for_ids([segment for _, segment in some])
        whole = np.zeros(len(some), np.bool_)
        are_whole(addresses, sizes, numbers, whole)
        for (number, segment), address, is_whole in zip(some, addresses.tolist(), whole.tolist(), strict=True):
            header = read_header(segment, number, where, is_whole)
            yield _group_of(header, groups, store, where), header, address


def ask_for_ids(segments: list[NDArray[np.uint8]]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Put the reads of all headers in flight, then those of all blocks of ids; nothing is verified yet.

    Returns:
        addresses and sizes of the segments.
    """
    addresses = np.array([segment.ctypes.data for segment in segments], np.uint64)
    sizes = np.array([len(segment) for segment in segments], np.int64)
    fronts = np.minimum(sizes, HEADER_BYTES)
    ask_for_all(addresses, fronts)
    read_fronts(addresses, sizes, fronts)
    ask_for_all(addresses, fronts)
    return addresses, sizes


def _group_of(header: SegmentHeader, groups: list[GroupRows], store: bytes, where: str) -> GroupRows:
    what = f"segment {header.number} of {where}"
    if header.store != store:
        raise CorruptSegmentError(f"{what} belongs to store {header.store.hex()}, not to {store.hex()}")
    if header.group >= len(groups) or groups[header.group].row_bytes != header.row_bytes:
        raise CorruptSegmentError(
            f"{what} holds rows of {header.row_bytes} bytes of group {header.group}: the manifest knows no such group"
        )
    return groups[header.group]
