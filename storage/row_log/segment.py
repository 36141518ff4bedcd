"""A segment as bytes: header, block of ids, rows. `docs/formats.md` describes every one of them.

This module packs and unpacks; it opens no file and knows no store. All numbers are little endian. A segment is
immutable once it is sealed.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.errors import CorruptSegmentError
from storage.row_log.hashing import checksum, has_long_checksum, xxh64
from storage.row_log.raw import bytes_at, load64

MAGIC = b"TEROWSEG"
_LARGEST = 1 << 40  # bytes; what a header says beyond that is foreign bytes
_VERSIONS = (1, 2, 3)  # 1 had no id_bytes: it wrote 0 there, and ids of 8 bytes; 3 is for rows with XXH3
HEADER_BYTES = 128
CHECKSUM_BYTES = 8
_NUMBER, _IDS_AT, _ROWS_AT, _SIZE, _IDS_CHECKSUM = (np.uint64(n) for n in (48, 72, 80, 88, 112))  # header fields
_8 = np.uint64(8)
RAW_ROWS = 0  # how rows are packed; codecs take the numbers from 1 on

_HEADER = struct.Struct("<8sIIIIIIIIBBBBIQQQQQQ16sQQ")
assert _HEADER.size == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The numbers at the head of a segment, in the order of their bytes (the magic comes before, a checksum after).

    Attributes:
        group, rows, tombstones: of which group; rows of both kinds; how many are tombstones.
        row_bytes, stride: bytes of a row as put; stored, with checksum and padding.
        tables: table numbers in the dictionary, 0 if the codes are the numbers themselves.
        code_bytes, epoch_bytes, flag_bytes: widths of a row's table code, epoch (less first_epoch) and flags; 0 = none.
        packing: how rows are packed; only RAW_ROWS exists.
        id_bytes: width of an id: 4 if all are from 0 to 2^32 - 1, else 8; 0 is 8 too.
        number: the segment's number in the store, under which LMDB has it.
        first_epoch, last_epoch: least and greatest epoch of its rows.
        ids_at, rows_at, size: where the ids and the rows begin, and the bytes of the whole segment.
        store: the store's uuid.
        ids_checksum: of bytes ids_at to rows_at.
    """

    version: int
    header_bytes: int
    group: int
    rows: int
    tombstones: int
    row_bytes: int
    stride: int
    tables: int
    code_bytes: int
    epoch_bytes: int
    flag_bytes: int
    packing: int
    id_bytes: int
    number: int
    first_epoch: int
    last_epoch: int
    ids_at: int
    rows_at: int
    size: int
    store: bytes
    ids_checksum: int

    def pack(self) -> bytes:
        """The 128 bytes of the header."""
        body = _HEADER.pack(MAGIC, *_fields(self), 0)[:-8]
        return body + checksum(body).to_bytes(8, "little")

    @property
    def epochs_at(self) -> int:
        """Where the epochs begin."""
        return self.ids_at + (self.id_bytes or 8) * self.rows

    @property
    def codes_at(self) -> int:
        """Where the table codes begin; the dictionary lies before them."""
        return self.epochs_at + self.epoch_bytes * self.rows + 4 * self.tables

    @property
    def ids_end(self) -> int:
        """Where the block of ids ends, padding aside."""
        return self.codes_at + (self.code_bytes + self.flag_bytes) * self.rows

    @property
    def widths(self) -> int:
        """The WIDTHS column of `storage.row_log.places`."""
        ids = self.id_bytes or 8
        return self.code_bytes | self.epoch_bytes << 8 | self.flag_bytes << 16 | ids << 24 | self.tables << 32


_fields = attrgetter(*SegmentHeader.__slots__)


def stride_of(row_bytes: int) -> int:
    """Stored bytes of a row: its checksum, its bytes, zeros up to a multiple of 8."""
    return CHECKSUM_BYTES + align8(row_bytes)


@cache
def version_of(stride: int) -> int:
    """The version of new segments of such rows."""
    return 3 if has_long_checksum(np.uint64(stride)) else 2


def align8(count: int) -> int:
    """The next multiple of 8."""
    return -(-count // 8) * 8


@njit(nogil=True, cache=True)
def read_fronts(addresses: Any, sizes: Any, fronts: Any) -> None:
    """fronts[i] = what a header says of the bytes of its header and block of ids, unverified; `sizes[i]` at most."""
    for i in range(len(addresses)):
        fronts[i] = min(sizes[i], HEADER_BYTES)
        if sizes[i] >= HEADER_BYTES:
            rows_at = load64(addresses[i] + _ROWS_AT)
            fronts[i] = max(HEADER_BYTES, np.int64(min(np.uint64(sizes[i]), rows_at)))


@njit(inline="always")
def _is_whole(header: Any, size: Any, number: Any) -> Any:
    whole, body = False, np.uint64(HEADER_BYTES - CHECKSUM_BYTES)
    if size >= np.uint64(HEADER_BYTES) and load64(header + body) == xxh64(header, body, np.uint64(0)):
        begin, end = load64(header + _IDS_AT), load64(header + _ROWS_AT)
        if begin <= end <= size and (end - begin) % _8 == 0:
            whole = xxh64(header + begin, end - begin, np.uint64(number)) == load64(header + _IDS_CHECKSUM)
    return whole


@njit(nogil=True, cache=True)
def are_whole(addresses: Any, sizes: Any, numbers: Any, whole: Any) -> None:
    """whole[i] = whether header and block of ids of a segment have the checksums that `read_header` asks for.

    For many segments in one call. Nothing outside of the `sizes[i]` bytes at `addresses[i]` is read.
    """
    for i in range(len(addresses)):
        whole[i] = _is_whole(addresses[i], np.uint64(sizes[i]), numbers[i])


@njit(nogil=True, cache=True)
def _is_whole_at(header: Any, number: Any) -> Any:
    size = min(load64(header + _SIZE), np.uint64(_LARGEST))
    return load64(header + _NUMBER) == np.uint64(number) and _is_whole(header, size, number)


def is_whole_at(address: int, number: int) -> bool:
    """Whether a segment that was whole once still is: what `read_header_at` looks at, but for the names in messages."""
    return bool(_is_whole_at(np.uint64(address), number))


def read_header(segment: NDArray[np.uint8], number: int, where: str, whole: bool = False) -> SegmentHeader:
    """Read and verify a header and the block of ids behind it; rows verify themselves when they are read.

    Args:
        segment: the bytes of the whole value.
        number: the number under which it is stored.
        where: names the store in messages.
        whole: what `are_whole` has found; False = not asked.

    Raises:
        CorruptSegmentError: what was seen is not what was written, or was written by a newer version.
    """
    what = f"segment {number} of {where}"
    if len(segment) < HEADER_BYTES:
        raise CorruptSegmentError(f"{what} has {len(segment)} bytes: expected a header of {HEADER_BYTES} at least")
    raw = segment[:HEADER_BYTES].tobytes()
    magic, *numbers, stored = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise CorruptSegmentError(f"{what} begins with {magic!r}: expected {MAGIC!r}")
    if not whole and stored != checksum(raw[:-8]):
        raise CorruptSegmentError(f"{what} has a damaged header: its checksum does not match")
    header = SegmentHeader(*numbers)
    _check_header(header, len(segment), number, what)
    if not whole and header.ids_checksum != checksum(segment[header.ids_at : header.rows_at], header.number):
        raise CorruptSegmentError(f"{what} has a damaged block of ids: its checksum does not match")
    return header


def read_header_at(address: int, number: int, where: str) -> SegmentHeader:
    """As `read_header`, of a segment that was whole once and whose size is what its header says, if that can be."""
    size = int.from_bytes(bytes_at(address, HEADER_BYTES)[88:96].tobytes(), "little")
    if size >= _LARGEST:
        raise CorruptSegmentError(f"segment {number} of {where} has a damaged header: it says {size} bytes")
    return read_header(bytes_at(address, size), number, where)


def _check_header(header: SegmentHeader, size: int, number: int, what: str) -> None:
    """Refuse a whole header that does not describe this value or that this version cannot read."""
    if header.version not in _VERSIONS or header.packing != RAW_ROWS:
        raise CorruptSegmentError(
            f"{what} has version {header.version} and row packing {header.packing}: "
            f"this program reads versions up to {_VERSIONS[-1]} and packing {RAW_ROWS}"
        )
    if (header.version == 3) != (version_of(header.stride) == 3):
        raise CorruptSegmentError(
            f"{what} has version {header.version} and rows of {header.row_bytes} bytes, whose checksums it has of "
            "another kind than this program: read it with the program that wrote it, and put the rows into a new store"
        )
    if header.number != number or header.size != size:
        raise CorruptSegmentError(
            f"{what} has {size} bytes and says it is segment {header.number} of {header.size} bytes: "
            "it is another segment, or cut short"
        )
    fits = (
        header.ids_at == HEADER_BYTES
        and header.id_bytes in ((0,) if header.version == 1 else (0, 4, 8))
        and header.stride == stride_of(header.row_bytes)
        and header.ids_end <= header.rows_at
        and header.rows_at + header.rows * header.stride <= size
    )
    if not fits:
        raise CorruptSegmentError(f"{what}: {header.rows} rows do not fit the offsets in its header")


def pack_ids(ids: NDArray[np.int64]) -> NDArray[np.uint32] | NDArray[np.int64]:
    """Ids (N,), N at least 1, in 4 bytes each if all of them fit, else as they are."""
    least, most = bounds_of(ids)
    return ids.astype(np.uint32) if least >= 0 and most < 1 << 32 else ids


def pack_epochs(epochs: NDArray[np.int64], least: int, most: int) -> NDArray[np.unsignedinteger]:
    """Epochs (N,), N at least 1, less the least of them, in as few bytes each as they take: 0 (N = 0), 1, 2, 4 or 8."""
    if least == most:
        return np.zeros(0, np.uint8)
    return (epochs - least).astype(np.min_scalar_type(most - least))


@njit(nogil=True, cache=True)
def _bounds(numbers: Any) -> Any:
    least = most = numbers[0]
    for number in numbers:
        least, most = min(least, number), max(most, number)
    return least, most


def bounds_of(numbers: NDArray[np.int64]) -> tuple[int, int]:
    """The least and the greatest of numbers (N,), N at least 1."""
    least, most = _bounds(numbers)
    return int(least), int(most)


def pack_tables(
    numbers: NDArray[np.uint32], known: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], NDArray[np.uint8], int]:
    """The shortest coding of table numbers (N,), all of them in `known` (sorted).

    Returns:
        dictionary (D,), bytes of the codes, bytes of one code.
    """
    rows = len(numbers)
    if rows == 0 or (numbers == numbers[0]).all():
        return numbers[:1].copy(), np.zeros(0, np.uint8), 0
    codes = np.searchsorted(known, numbers)
    used = np.flatnonzero(np.bincount(codes, minlength=len(known)))
    width = 1 if len(used) <= 256 else 2
    if len(used) > 65536 or 4 * len(used) + width * rows >= 4 * rows:
        return np.zeros(0, np.uint32), numbers.view(np.uint8), 4
    recode = np.zeros(len(known), f"<u{width}")
    recode[used] = np.arange(len(used))
    return known[used], recode[codes].view(np.uint8), width
