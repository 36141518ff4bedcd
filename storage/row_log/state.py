"""A complete state: what a flush promised. One record in LMDB, replaced in the same transaction as its last segments.

The state consists of every row with an epoch up to `epoch`. A store with durability "snapshot" opens at it; the note
is the caller's own (an optimizer's step, a loader's position) and can never differ from the rows it was written with.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from storage.errors import CorruptSegmentError, StoreConfigError
from storage.row_log.hashing import checksum

MAX_NOTE_BYTES = 1 << 16

_MAGIC, _VERSION = b"TESTATE\0", 1
_HEAD = struct.Struct("<8sIIQQQ")


def check_note(note: bytes) -> bytes:
    """The note, if it may be kept.

    Raises:
        StoreConfigError: it is too large.
    """
    if len(note) > MAX_NOTE_BYTES:
        raise StoreConfigError(f"a note of {len(note)} bytes: at most {MAX_NOTE_BYTES} are kept with a state")
    return note


@dataclass(frozen=True, slots=True)
class State:
    """State `number` of a store (0 = empty, as created) with the rows up to `epoch`, and its note."""

    number: int
    epoch: int
    note: bytes

    def __post_init__(self) -> None:
        check_note(self.note)

    def pack(self) -> bytes:
        """The record as stored."""
        body = _HEAD.pack(_MAGIC, _VERSION, len(self.note), self.number, self.epoch, 0) + self.note
        return body + checksum(body).to_bytes(8, "little")

    @classmethod
    def unpack(cls, record: bytes | None, where: str) -> State:
        """Read and verify a record.

        Raises:
            CorruptSegmentError: it is missing, damaged or of a newer version.
        """
        if record is None or len(record) < _HEAD.size + 8:
            raise CorruptSegmentError(f"the state record of {where} is missing or cut short")
        magic, version, note_bytes, number, epoch, _ = _HEAD.unpack_from(record)
        if magic != _MAGIC or int.from_bytes(record[-8:], "little") != checksum(record[:-8]):
            raise CorruptSegmentError(f"the state record of {where} is damaged: its checksum does not match")
        if version != _VERSION or len(record) != _HEAD.size + note_bytes + 8:
            raise CorruptSegmentError(
                f"the state record of {where} has version {version}: this program reads {_VERSION}"
            )
        return cls(number, epoch, record[_HEAD.size : -8])
