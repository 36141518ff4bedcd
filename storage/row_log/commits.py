"""Commit records: what each transaction changed, kept so that readers can follow and tools can draw a store's life.

One record a commit, numbered from 1 on, written in the transaction that it describes. A reader that saw commit n
takes in commits n + 1, n + 2, ... and looks at no other segment. Totals count from the store's creation on, so that
the difference of two records is what happened between them.

Kept are the last 256 records, and of older ones fewer the older they are: of those more than 256 commits back every
2nd, of those more than 512 back every 4th, and so on. That takes one deletion a commit (`thinned`), and a store of a
million commits has about 1,800 records.

This module packs, unpacks and walks records; transactions are `storage.row_log.log`'s. It knows nothing of segments
but their numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from storage.errors import CorruptSegmentError
from storage.row_log.hashing import checksum

KEPT_COMMITS = 256

_MAGIC, _VERSION = b"TECOMMIT", 1
_HEAD = struct.Struct("<8sIIQqII7Q")
_MADE_STATE, _WENT_BACK = 1, 2


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over a store's life, and its sizes at the time of a commit.

    Attributes:
        put_bytes: of rows put, as put.
        written_bytes: of segments committed, moved rows included.
        moved_bytes: of segments that compaction wrote.
        live_rows, live_bytes: rows, and their bytes as put.
        segment_bytes: of all segments.
        file_bytes: that the data file occupies.
    """

    put_bytes: int = 0
    written_bytes: int = 0
    moved_bytes: int = 0
    live_rows: int = 0
    live_bytes: int = 0
    segment_bytes: int = 0
    file_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """One commit of a store.

    Attributes:
        number: from 1 on, without gaps.
        time_us: when, in microseconds of Unix time.
        new, deleted: numbers of the segments that it added and deleted.
        made_state: whether it completed a state.
        went_back: whether it deleted what came after the last state, so that older rows count again.
        totals: after it.
    """

    number: int
    time_us: int
    new: tuple[int, ...]
    deleted: tuple[int, ...]
    made_state: bool
    went_back: bool
    totals: Totals

    def pack(self) -> bytes:
        """The record as stored."""
        head = _HEAD.pack(
            _MAGIC,
            _VERSION,
            _MADE_STATE * self.made_state | _WENT_BACK * self.went_back,
            self.number,
            self.time_us,
            len(self.new),
            len(self.deleted),
            *astuple(self.totals),
        )
        body = head + np.array([*self.new, *self.deleted], "<u8").tobytes()
        return body + checksum(body).to_bytes(8, "little")

    @classmethod
    def unpack(cls, record: bytes, number: int, where: str) -> CommitRecord:
        """Read and verify the record of commit `number`.

        Raises:
            CorruptSegmentError: it is damaged, another commit's or of a newer version.
        """
        what = f"the record of commit {number} of {where}"
        if len(record) < _HEAD.size + 8 or int.from_bytes(record[-8:], "little") != checksum(record[:-8]):
            raise CorruptSegmentError(f"{what} is damaged: its checksum does not match")
        magic, version, flags, seen, time_us, new, deleted, *totals = _HEAD.unpack_from(record)
        if magic != _MAGIC or version != _VERSION:
            raise CorruptSegmentError(
                f"{what} begins with {magic!r} and has version {version}: this program reads {_MAGIC!r} and {_VERSION}"
            )
        if seen != number or len(record) != _HEAD.size + 8 * (new + deleted) + 8:
            raise CorruptSegmentError(
                f"{what} has {len(record)} bytes and says that it is of commit {seen}, of {new} new segments and "
                f"{deleted} deleted ones: it is another record, or cut short"
            )
        numbers = np.frombuffer(record, "<u8", new + deleted, _HEAD.size).tolist()
        made_state, went_back = bool(flags & _MADE_STATE), bool(flags & _WENT_BACK)
        return cls(number, time_us, tuple(numbers[:new]), tuple(numbers[new:]), made_state, went_back, Totals(*totals))


def commit_key(number: int) -> bytes:
    """The key of a commit's record: big endian, so that LMDB's order is by number."""
    return number.to_bytes(8, "big")


def thinned(number: int) -> int:
    """The commit whose record goes when commit `number` is made; 0 or less if there is none yet.

    A record goes at the age of 256 commits times the greatest power of two that divides its number.
    """
    return number - KEPT_COMMITS * (number & -number)


def walk(cursor: Any, number: int, where: str) -> Iterator[CommitRecord]:
    """Records from commit `number` on, in order; `cursor` is one of a read transaction over the database `commits`."""
    if cursor.set_range(commit_key(number)):
        for key, record in cursor.iternext():
            yield CommitRecord.unpack(bytes(record), int.from_bytes(key, "big"), where)
