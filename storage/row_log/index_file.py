"""The index as a file: written at a clean close, so that the next open need not read the ids of all segments.

The file is an image of the index and of the segment table of each group (`docs/formats.md`, "index"). It is worth
something only together with the data file that it was written beside: its `Stamp` names the store, a token that the
closing commit left in LMDB and that transaction. Nothing in it is needed: whatever is wrong with it - another stamp, a
flipped bit, a missing byte, segments that are not those of the data file - `load_index` says False and the caller
replays the log. So checksums cover every byte, and groups are changed only once all of the file has been believed.

What the entries mean depends on `mix` and on how shards are laid out (`storage.id_index`). A change there needs a new
version here. The file is read straight into the arrays of the index: there is no second copy in memory.

Owned by the store's lock. This module decides nothing about when an index is saved or tried.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from storage.errors import disk_error
from storage.id_index import MAX_SHARDS, USED, IdIndex
from storage.row_log.group_rows import GroupRows
from storage.row_log.hashing import checksum
from storage.row_log.places import CODES, COUNT, EPOCH, IDS, LIVE, MAX_SLOTS, NUMBER, ROWS, WIDTHS, SegmentTable
from storage.row_log.segment import HEADER_BYTES, stride_of
from storage.whole_files import sync_directory

_MAGIC, _VERSION = b"TEINDEX\0", 1
_HEADER = struct.Struct("<8sII16s16sQQQQQ")
_GROUP = struct.Struct("<IIQ")
_SLOT, _NUMBER, _ROWS, _CODES, _WIDTHS, _COUNT, _LIVE, _EPOCH = range(8)  # of a segment in the file
_AS_THEY_ARE = ((WIDTHS, _WIDTHS), (COUNT, _COUNT), (LIVE, _LIVE), (NUMBER, _NUMBER), (EPOCH, _EPOCH))
_STEPS, _USED, _CHECKSUM = range(3)  # of a shard in the file
_FEW_SHARDS = 2  # times fewer than a group of its size should have, and the index is made anew
_PAGE_BYTES = 1 << 16  # LMDB's largest: a segment of few rows is padded to a page

_Tables = list[tuple[NDArray[np.int64], NDArray[np.uint64]]]


@dataclass(frozen=True, slots=True)
class Stamp:
    """What ties an index to a data file: the store's uuid, the token of its closing commit (16 bytes each), and the
    number of that transaction."""

    store: bytes
    token: bytes
    transaction: int


def save_index(path: Path, groups: list[GroupRows], stamp: Stamp) -> None:
    """Write the index of groups of which every segment is committed; replaces the file at `path` as a whole.

    Raises:
        StoreFullError, StoreIOError: it could not be written. The log lacks nothing; the next open takes longer.
    """
    assert not any(group.open or group.sealed for group in groups), "rows that were not committed are in no file"
    tables = b"".join(_tables_of(group) for group in groups)
    entries = [group.index.entries(shard).data for group in groups for shard in range(len(group.index.table))]
    size = _HEADER.size + len(tables) + sum(part.nbytes for part in entries)
    head = _head(stamp, len(groups), size, tables)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(head + tables)
            for part in entries:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(error, f"the index {path} could not be written: {error}") from error


def load_index(path: Path, groups: list[GroupRows], stamp: Stamp, segments: dict[int, NDArray[np.uint8]]) -> bool:
    """Fill empty groups from a file; no page of a segment is touched.

    Args:
        segments: all that the data file holds, by number.

    Returns:
        Whether all of the file is as it was written, under this stamp, for exactly these segments. Otherwise groups
        are as they were.
    """
    try:
        with FileIO(path) as file:
            tables = _read_tables(file, groups, stamp)
            lines = None if tables is None else _lines_of(groups, tables, segments)
            if tables is None or lines is None:
                return False
            indexes = [_read_index(file, shards) for _, shards in tables]
    except OSError:
        return False
    loaded = [index for index in indexes if index is not None]
    if len(loaded) < len(groups):
        return False
    for group, index, table in zip(groups, loaded, lines, strict=True):
        group.index, group.segments = index, table
        group.seen_epoch = int(table.lines[:, NUMBER].max())
    return True


def _head(stamp: Stamp, groups: int, size: int, tables: bytes) -> bytes:
    """The header, whose checksum covers that of the tables, which cover those of the entries."""
    fields = (_MAGIC, _VERSION, groups, stamp.store, stamp.token, stamp.transaction, size, len(tables))
    body = _HEADER.pack(*fields, checksum(tables), 0)[:-8]
    return body + checksum(body).to_bytes(8, "little")


def _tables_of(group: GroupRows) -> bytes:
    """A group in the file: its numbers, its segments, its shards."""
    slots = group.segments.slots()
    lines, index = group.segments.lines[slots], group.index
    kept = np.zeros((len(slots), 8), np.int64)
    kept[:, _SLOT] = slots
    kept[:, _ROWS] = lines[:, ROWS] - lines[:, IDS] + HEADER_BYTES
    kept[:, _CODES] = lines[:, CODES] - lines[:, IDS] + HEADER_BYTES
    for column, stored in _AS_THEY_ARE:
        kept[:, stored] = lines[:, column]
    shards = np.zeros((len(index.table), 3), np.uint64)
    shards[:, _STEPS], shards[:, _USED] = index.steps, index.table[:, USED]
    shards[:, _CHECKSUM] = [checksum(index.entries(shard).view(np.uint8)) for shard in range(len(shards))]
    return _GROUP.pack(group.row_bytes, len(shards), len(slots)) + kept.tobytes() + shards.tobytes()


def _read_tables(file: FileIO, groups: list[GroupRows], stamp: Stamp) -> _Tables | None:
    """Segments and shards of each group, if the file has the stamp and they are those of these groups."""
    head = file.read(_HEADER.size)
    if head is None or len(head) < _HEADER.size:
        return None
    size, tables_bytes = _HEADER.unpack(head)[6:8]
    if size != os.fstat(file.fileno()).st_size or tables_bytes > size:
        return None
    tables = file.read(tables_bytes)
    if tables is None or head != _head(stamp, len(groups), size, tables):
        return None
    found = list(_split(tables, len(groups)))
    fits = all(
        row_bytes == group.row_bytes and _FEW_SHARDS * len(shards) >= len(group.index.table)
        for group, (row_bytes, _, shards) in zip(groups, found, strict=True)
    )
    return [(kept, shards) for _, kept, shards in found] if fits else None


def _split(tables: bytes, groups: int) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.uint64]]]:
    """Bytes of a row, segments (n, 8) and shards (S, 3) of each group."""
    at = 0
    for _ in range(groups):
        row_bytes, shards, segments = _GROUP.unpack_from(tables, at)
        at += _GROUP.size
        kept = np.frombuffer(tables, np.int64, 8 * segments, at).reshape(-1, 8)
        at += kept.nbytes
        table = np.frombuffer(tables, np.uint64, 3 * shards, at).reshape(-1, 3)
        at += table.nbytes
        yield row_bytes, kept, table


def _lines_of(
    groups: list[GroupRows], tables: _Tables, segments: dict[int, NDArray[np.uint8]]
) -> list[SegmentTable] | None:
    """The segment tables, if the file's segments are those of the data file, number by number and size by size."""
    numbers = np.concatenate([np.zeros(0, np.int64), *(kept[:, _NUMBER] for kept, _ in tables)])
    if sorted(numbers.tolist()) != sorted(segments):
        return None
    found = []
    for group, (kept, _) in zip(groups, tables, strict=True):
        own = [segments[number] for number in kept[:, _NUMBER].tolist()]
        sizes = np.array([len(segment) for segment in own], np.int64)
        least = kept[:, _ROWS] + (kept[:, _COUNT] & 0xFFFFFFFF) * stride_of(group.row_bytes)
        padded = (least < sizes) & (sizes < _PAGE_BYTES)
        slots = kept[:, _SLOT]
        if not ((sizes == least) | padded).all() or not _are_slots(slots):
            return None
        found.append(_table_of(kept, np.array([_address(segment) for segment in own], np.int64)))
    return found


def _are_slots(slots: NDArray[np.int64]) -> bool:
    """Whether these can be the slots of one table."""
    return len(np.unique(slots)) == len(slots) and bool(((slots > 0) & (slots < MAX_SLOTS)).all())


def _address(segment: NDArray[np.uint8]) -> int:
    address: int = segment.__array_interface__["data"][0]
    return address


def _table_of(kept: NDArray[np.int64], addresses: NDArray[np.int64]) -> SegmentTable:
    """A segment table out of the file, whose segments lie at addresses (n,)."""
    lines = np.zeros((len(kept), 8), np.int64)
    lines[:, ROWS], lines[:, CODES] = addresses + kept[:, _ROWS], addresses + kept[:, _CODES]
    lines[:, IDS] = addresses + HEADER_BYTES
    for column, stored in _AS_THEY_ARE:
        lines[:, column] = kept[:, stored]
    table = SegmentTable()
    table.restore(kept[:, _SLOT], lines)
    return table


def _read_index(file: FileIO, shards: NDArray[np.uint64]) -> IdIndex | None:
    """The index of a group, whose entries are next in the file; None if they are not those that were written."""
    if not 2 <= len(shards) <= MAX_SHARDS or len(shards) & (len(shards) - 1):
        return None
    index = IdIndex(len(shards))
    for shard, (steps, used, expected) in enumerate(shards.tolist()):
        entries = index.restore(shard, steps, used).view(np.uint8)
        if not _fill(file, entries) or checksum(entries) != expected:
            return None
    return index


def _fill(file: FileIO, target: NDArray[np.uint8]) -> bool:
    """Read as many bytes as `target` (N,) takes; False if the file ends before."""
    rest = target.data
    while len(rest):
        count = file.readinto(rest)
        if not count:
            return False
        rest = rest[count:]
    return True
