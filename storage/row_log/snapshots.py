"""Named snapshots as bytes: a complete state under a name, and the segments that hold its rows.

A snapshot is the list of segments that were needed at its state. Segments never change, so that list is all that it
takes to read as of then, to go back there, or to tell what changed: of each id the newest row in those segments counts.
As long as the record exists none of them is deleted (`row_log.committer`); compaction may move rows out of them, which
leaves them as they were.

This module packs and unpacks; records live in LMDB's database `states` under `key_of(name)`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptSegmentError, StoreConfigError
from storage.row_log.hashing import checksum
from storage.row_log.state import State

MAX_NAME_BYTES = 255
KEY = b"snapshot:"

_MAGIC, _VERSION = b"TESNAPS\0", 1
_HEAD = struct.Struct("<8sIIqQQQQ16sQQ")


def check_name(name: str) -> str:
    """The name, if a snapshot may have it.

    Raises:
        StoreConfigError: it is empty, too long, or has characters that no line shows.
    """
    if not isinstance(name, str) or not name or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        raise StoreConfigError(
            f"a snapshot named {name!r}: expected 1 to {MAX_NAME_BYTES} bytes of characters that can be printed"
        )
    return name


def key_of(name: str) -> bytes:
    """Under which the record of a snapshot is kept."""
    return KEY + name.encode()


def in_order(records: Iterable[SnapshotRecord]) -> list[SnapshotRecord]:
    """The oldest first."""
    return sorted(records, key=lambda one: (one.state.number, one.time_us, one.name))


@dataclass(frozen=True, slots=True)
class Origin:
    """Which state of which store a snapshot holds: the same wherever it was copied to.

    Attributes:
        store: the store's uuid.
        state: number of the state, which that store never gives to another.
    """

    store: UUID
    state: int

    def __str__(self) -> str:
        return f"{self.store}:{self.state}"

    @classmethod
    def parse(cls, text: str) -> Origin:
        """What `str` gave. Raises ValueError."""
        store, _, state = text.partition(":")
        return cls(UUID(store), int(state))


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A snapshot as it is stored.

    Attributes:
        name: of the snapshot.
        state: the complete state it keeps, with its note.
        origin: of its rows; this store's, unless they were imported.
        time_us: when it was made, in microseconds of Unix time.
        rows: live rows.
        live_bytes: their bytes as put.
        segments: int64 (n,), numbers of the segments that hold them, ascending.
    """

    name: str
    state: State
    origin: Origin
    time_us: int
    rows: int
    live_bytes: int
    segments: NDArray[np.int64] = field(compare=False)

    def pack(self) -> bytes:
        """The record as stored."""
        state = self.state
        head = _HEAD.pack(
            _MAGIC,
            _VERSION,
            len(state.note),
            self.time_us,
            state.number,
            state.epoch,
            self.rows,
            self.live_bytes,
            self.origin.store.bytes,
            self.origin.state,
            len(self.segments),
        )
        body = head + self.segments.astype("<i8").tobytes() + state.note
        return body + checksum(body).to_bytes(8, "little")

    @classmethod
    def unpack(cls, name: str, record: bytes, where: str) -> SnapshotRecord:
        """Read and verify the record of a snapshot.

        Raises:
            CorruptSegmentError: it is damaged or of a newer version.
        """
        what = f"the record of snapshot {name!r} of {where}"
        if len(record) < _HEAD.size + 8 or int.from_bytes(record[-8:], "little") != checksum(record[:-8]):
            raise CorruptSegmentError(f"{what} is damaged: its checksum does not match")
        magic, version, note_bytes, time_us, number, epoch, *sizes, store, state, n = _HEAD.unpack_from(record)
        if magic != _MAGIC or version != _VERSION or len(record) != _HEAD.size + 8 * n + note_bytes + 8:
            raise CorruptSegmentError(
                f"{what} begins with {magic!r} and has version {version}: this program reads {_MAGIC!r} and {_VERSION}"
            )
        segments = np.frombuffer(record, "<i8", n, _HEAD.size).astype(np.int64)
        note = record[_HEAD.size + 8 * n : -8]
        origin = Origin(UUID(bytes=store), state)
        return cls(name, State(number, epoch, note), origin, time_us, sizes[0], sizes[1], segments)
