"""The two functions of (table, id) that the row log rests on, and the checksums of its bytes.

`mix` spreads ids over the index. `row_seed` keys a row's checksum: equal bytes under another id have another
checksum, so one comparison proves that a row is whole and that it is the one asked for. The two are unrelated, so
that ids which meet in the index do not meet in the checksum too. `row_seed` and `xxh64` are part of the byte format;
`mix` lives in memory and in the saved index, whose version must change with it.

The checksum is XXH64 (Yann Collet, https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md) over whole 8-byte
words: rows are padded with zeros to a multiple of 8 bytes. Damage within one word is always found, since every step
is a bijection of the word; other damage with odds of 2^64 to 1. Rows of more than 240 bytes have XXH3
(`row_log.xxh3`), which is made for vector instructions: a get of rows of 516 bytes takes four fifths of the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.row_log.raw import load64
from storage.row_log.xxh3 import LONG_BYTES, PRIMES, xxh3

_P1, _P2, _P3, _P4, _P5 = (np.uint64(prime) for prime in PRIMES)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE, _BITS = np.uint64(1), np.uint64(64)
_R1, _R7, _R12, _R18, _R27, _R31 = (np.uint64(r) for r in (1, 7, 12, 18, 27, 31))
_S27, _S29, _S30, _S32, _S33 = (np.uint64(s) for s in (27, 29, 30, 32, 33))
_8, _16, _24, _32 = (np.uint64(n) for n in (8, 16, 24, 32))


@njit(inline="always")
def mix(table: Any, id: Any) -> Any:
    """64 well-spread bits of a uint32 table number and an int64 id (the finalizer of splitmix64)."""
    x = np.uint64(id) ^ ((np.uint64(table) + _ONE) * _GOLDEN)
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _R31)


@njit(inline="always")
def row_seed(table: Any, id: Any) -> Any:
    """The seed of a row's checksum."""
    return np.uint64(id) * _P3 + np.uint64(table) * _P5


@njit(inline="always")
def rotate(x: Any, r: Any) -> Any:
    """Bits of x turned left by r."""
    return (x << r) | (x >> (_BITS - r))


@njit(inline="always")
def step(lane: Any, word: Any) -> Any:
    """One round of XXH64."""
    return rotate(lane + word * _P2, _R31) * _P1


@njit(inline="always")
def xxh64(address: Any, count: Any, seed: Any) -> Any:
    """XXH64 of `count` (uint64, a multiple of 8) bytes at `address` (uint64)."""
    p = address
    end = address + count
    if count >= _32:
        a, b, c, d = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while p + _32 <= end:
            a = step(a, load64(p))
            b = step(b, load64(p + _8))
            c = step(c, load64(p + _16))
            d = step(d, load64(p + _24))
            p += _32
        h = rotate(a, _R1) + rotate(b, _R7) + rotate(c, _R12) + rotate(d, _R18)
        zero = np.uint64(0)
        h = (h ^ step(zero, a)) * _P1 + _P4
        h = (h ^ step(zero, b)) * _P1 + _P4
        h = (h ^ step(zero, c)) * _P1 + _P4
        h = (h ^ step(zero, d)) * _P1 + _P4
    else:
        h = seed + _P5
    h += count
    while p < end:
        h = rotate(h ^ step(np.uint64(0), load64(p)), _R27) * _P1 + _P4
        p += _8
    h = (h ^ (h >> _S33)) * _P2
    h = (h ^ (h >> _S29)) * _P3
    return h ^ (h >> _S32)


@njit(inline="always")
def row_checksum(row: Any, stride: Any, table: Any, id: Any) -> Any:
    """The checksum of the row of an id that is stored in `stride` (uint64) bytes at `row` (uint64)."""
    count, seed = stride - _8, row_seed(table, id)
    return xxh3(row + _8, count, seed) if has_long_checksum(stride) else xxh64(row + _8, count, seed)


@njit(inline="always")
def is_row_of(row: Any, stride: Any, table: Any, id: Any) -> Any:
    """Whether what is stored at `row` is the row of an id, and whole."""
    return load64(row) == row_checksum(row, stride, table, id)


@njit(inline="always")
def has_long_checksum(stride: Any) -> Any:
    """Whether rows of `stride` (uint64) stored bytes have XXH3."""
    return stride - _8 >= np.uint64(LONG_BYTES)


@njit(nogil=True, cache=True)
def _checksum(address: Any, count: Any, seed: Any) -> Any:
    return xxh64(address, count, seed)


def _whole_words(data: bytes | memoryview | NDArray[np.uint8]) -> NDArray[np.uint8]:
    array = np.frombuffer(data, np.uint8)
    return np.concatenate([array, np.zeros(-len(array) % 8, np.uint8)]) if len(array) % 8 else array


def checksum(data: bytes | memoryview | NDArray[np.uint8], seed: int = 0) -> int:
    """XXH64 of bytes, padded with zeros to a multiple of 8."""
    array = _whole_words(data)
    return int(_checksum(np.uint64(array.ctypes.data), np.uint64(len(array)), np.uint64(seed)))


@njit(nogil=True, cache=True)
def _long_checksum(address: Any, count: Any) -> Any:
    return xxh3(address, count, np.uint64(0)) if count >= np.uint64(LONG_BYTES) else xxh64(address, count, np.uint64(0))


def long_checksum(data: bytes | memoryview | NDArray[np.uint8]) -> int:
    """XXH3 of bytes, padded with zeros to a multiple of 8; XXH64 of them if these are 240 or fewer."""
    array = _whole_words(data)
    return int(_long_checksum(np.uint64(array.ctypes.data), np.uint64(len(array))))


def hex_checksum(data: bytes) -> str:
    """The same, as the 16 hexadecimal digits of a manifest."""
    return f"{checksum(data):016x}"
