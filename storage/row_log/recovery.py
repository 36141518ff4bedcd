"""Opening a log: segments are verified, adopted and replayed, and the index is what results.

Of each id the newest epoch wins and tombstones hide what is older, whatever the order of the segments, so a crash at
any point leaves nothing to repair: what was committed is there and nothing else. A state's rows are those with epochs
up to its own; later ones are passed over and reported, so that a store with durability "snapshot" can discard them.

The same function lets a reader follow a writer: segments already known are left alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptSegmentError
from storage.row_log.group_rows import GroupRows
from storage.row_log.log import RowLog
from storage.row_log.pages import ask_for
from storage.row_log.places import NUMBER
from storage.row_log.segment import HEADER_BYTES, SegmentHeader, read_header, rows_offset

LAST_EPOCH = (1 << 63) - 1
_AHEAD = 32


def replay_log(log: RowLog, txn: Any, groups: list[GroupRows], last_epoch: int, store: bytes, where: str) -> list[int]:
    """Bring groups up to date with all segments of a read transaction.

    Returns:
        Numbers of segments that hold only rows with epochs above `last_epoch`.

    Raises:
        CorruptSegmentError: a segment is damaged, or is not of this store.
    """
    known = {int(number) for group in groups for number in group.segments.lines[:, NUMBER]}
    fresh = [(number, segment) for number, segment in log.segments(txn).items() if number not in known]
    later: list[int] = []
    for i, (number, segment) in enumerate(fresh):
        if i % _AHEAD == 0:
            _ask_for_ids([segment for _, segment in fresh[i : i + _AHEAD]])
        header = read_header(segment, number, where)
        if header.first_epoch > last_epoch:
            later.append(number)
            continue
        group = _group_of(header, groups, store, where)
        group.replay(group.adopt(header, segment.ctypes.data), last_epoch, doubtful=len(known) > 0)
    for group in groups:
        group.bury_replayed()
    return later


def _ask_for_ids(segments: list[NDArray[np.uint8]]) -> None:
    """Put the reads of all headers in flight, then those of all blocks of ids; nothing is verified yet."""
    for segment in segments:
        ask_for(segment.ctypes.data, HEADER_BYTES)
    for segment in segments:
        ask_for(segment.ctypes.data, min(len(segment), max(HEADER_BYTES, rows_offset(segment))))


def _group_of(header: SegmentHeader, groups: list[GroupRows], store: bytes, where: str) -> GroupRows:
    what = f"segment {header.number} of {where}"
    if header.store != store:
        raise CorruptSegmentError(f"{what} belongs to store {header.store.hex()}, not to {store.hex()}")
    if header.group >= len(groups) or groups[header.group].row_bytes != header.row_bytes:
        raise CorruptSegmentError(
            f"{what} holds rows of {header.row_bytes} bytes of group {header.group}: the manifest knows no such group"
        )
    return groups[header.group]


def has_moved_rows(log: RowLog, txn: Any, numbers: list[int], where: str) -> bool:
    """Whether any of these segments holds rows that were first written in an earlier one."""
    headers = (read_header(log.segment(txn, number), number, where) for number in numbers)
    return any(header.first_epoch < header.number for header in headers)
