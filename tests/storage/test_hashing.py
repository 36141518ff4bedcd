"""The checksums against their specification, and the two functions of an id."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from storage.row_log.hashing import checksum, mix, row_checksum, row_seed
from storage.row_log.xxh3 import LONG_BYTES, xxh3

_MASK = (1 << 64) - 1
_P = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)


@njit
def _mix(tables, ids, out):
    for i in range(len(ids)):
        out[i] = mix(tables[i], ids[i])


@njit
def _row_seed(tables, ids, out):
    for i in range(len(ids)):
        out[i] = row_seed(tables[i], ids[i])


def _rotate(x: int, r: int) -> int:
    return ((x << r) | (x >> (64 - r))) & _MASK


def _round(lane: int, word: int) -> int:
    return _rotate((lane + word * _P[1]) & _MASK, 31) * _P[0] & _MASK


def xxh64(data: bytes, seed: int) -> int:
    """XXH64 after its specification, for whole words."""
    words = np.frombuffer(data, "<u8").tolist()
    whole = len(words) // 4 * 4
    if whole:
        lanes = [(seed + _P[0] + _P[1]) & _MASK, (seed + _P[1]) & _MASK, seed, (seed - _P[0]) & _MASK]
        for i in range(whole):
            lanes[i % 4] = _round(lanes[i % 4], words[i])
        h = sum(_rotate(lane, r) for lane, r in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            h = ((h ^ _round(0, lane)) * _P[0] + _P[3]) & _MASK
    else:
        h = (seed + _P[4]) & _MASK
    h = (h + len(data)) & _MASK
    for word in words[whole:]:
        h = (_rotate(h ^ _round(0, word), 27) * _P[0] + _P[3]) & _MASK
    h = (h ^ h >> 33) * _P[1] & _MASK
    h = (h ^ h >> 29) * _P[2] & _MASK
    return h ^ h >> 32


_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _fold(a: int, b: int) -> int:
    return (a * b & _MASK) ^ (a * b >> 64)


def xxh3_after_its_specification(data: bytes, seed: int) -> int:
    """XXH3 of more than 240 bytes, a word at a time."""
    signed = [(_word(_SECRET, at) + (-seed if at % 16 else seed)) & _MASK for at in range(0, 192, 8)]
    secret = b"".join(word.to_bytes(8, "little") for word in signed)
    lanes = [0xC2B2AE3D, *_P[:4], 0x85EBCA77, _P[4], 0x9E3779B1]

    def take_in(stripe: bytes, key_at: int) -> None:
        for i in range(8):
            word = _word(stripe, 8 * i)
            keyed = word ^ _word(secret, key_at + 8 * i)
            lanes[i ^ 1] = (lanes[i ^ 1] + word) & _MASK
            lanes[i] = (lanes[i] + (keyed & 0xFFFFFFFF) * (keyed >> 32)) & _MASK

    for number in range((len(data) - 1) // 64):
        take_in(data[64 * number : 64 * number + 64], number % 16 * 8)
        if number % 16 == 15:
            for i in range(8):
                lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ _word(secret, 128 + 8 * i)) * 0x9E3779B1 & _MASK
    take_in(data[-64:], 121)
    h = len(data) * _P[0]
    for i in range(0, 8, 2):
        h += _fold(lanes[i] ^ _word(secret, 11 + 8 * i), lanes[i + 1] ^ _word(secret, 19 + 8 * i))
    h &= _MASK
    h = (h ^ h >> 37) * 0x165667919E3779F9 & _MASK
    return h ^ h >> 32


def _xxh3(data: bytes, seed: int) -> int:
    array = np.frombuffer(data, np.uint8)
    return int(xxh3(np.uint64(array.ctypes.data), np.uint64(len(array)), np.uint64(seed)))


@pytest.mark.parametrize(
    ("count", "seed", "answer"),
    [
        (241, 0, 0x541B19226F0052E8),
        (248, 1, 0x1F94DBD950D51D16),
        (520, 0, 0xED1131E5A2BD265D),
        (1024, _MASK, 0x428A2D3487FA15D2),
        (1025, 5, 0x16F9DCE9045DCC3E),
        (2000, 0x9E3779B97F4A7C15, 0x321D6AD0730F397C),
    ],
)
def test_xxh3_gives_the_answers_of_the_reference_implementation(count: int, seed: int, answer: int) -> None:
    data = bytes(i * 7 % 256 for i in range(count))
    assert _xxh3(data, seed) == answer == xxh3_after_its_specification(data, seed)


@pytest.mark.parametrize("count", [*range(LONG_BYTES, 700, 13), 1023, 1024, 1025, 2047, 2048, 2049, 5000])
def test_xxh3_is_what_its_specification_says(count: int) -> None:
    random = np.random.default_rng(count)
    data, seed = random.bytes(count), int(random.integers(0, 1 << 63)) * 2 + 1
    assert _xxh3(data, seed) == xxh3_after_its_specification(data, seed)


def test_every_flipped_bit_of_a_wide_row_changes_its_checksum() -> None:
    data = np.random.default_rng(0).bytes(528)
    whole = _xxh3(data, 3)
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert _xxh3(bytes(flipped), 3) != whole


@njit
def _row_checksum(row, stride, table, id):
    return row_checksum(row, stride, table, id)


@pytest.mark.parametrize("stride", [8, 16, 128, 240, 248, 256, 264, 528, 4104])
def test_rows_of_more_than_240_bytes_have_xxh3(stride: int) -> None:
    row = np.random.default_rng(stride).integers(0, 256, stride, dtype=np.uint8)
    data, seed = row[8:].tobytes(), (-5 * _P[2] + 77 * _P[4]) & _MASK
    expected = xxh3_after_its_specification(data, seed) if stride - 8 > 240 else xxh64(data, seed)
    got = _row_checksum(np.uint64(row.ctypes.data), np.uint64(stride), np.uint32(77), np.int64(-5))
    assert int(got) == expected


def test_known_answers() -> None:
    assert checksum(b"") == 0xEF46DB3751D8E999  # of the reference implementation
    assert checksum(b"", 1) == 0xD5AFBA1336A3BE4B


@pytest.mark.parametrize("words", [1, 2, 3, 4, 5, 7, 8, 16, 17, 33, 130])
def test_checksum_is_xxh64(words: int) -> None:
    data = np.random.default_rng(words).bytes(8 * words)
    for seed in (0, 1, _MASK):
        assert checksum(data, seed) == xxh64(data, seed)


def test_bytes_are_padded_with_zeros_to_whole_words() -> None:
    assert checksum(b"abc") == checksum(b"abc\0\0\0\0\0") != checksum(b"abc\0\0\0\0\0\0\0\0\0\0\0\0\0")


def test_every_flipped_bit_changes_the_checksum() -> None:
    data = np.random.default_rng(0).integers(0, 256, 136, dtype=np.uint8)
    whole = checksum(data)
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert checksum(data) != whole
        data[bit // 8] ^= 1 << bit % 8


def test_ids_of_a_table_have_different_seeds_and_hashes() -> None:
    ids = np.concatenate([np.arange(-(2**15), 2**15), np.arange(2**15) << 40])
    tables, out = np.full(len(ids), 77, np.uint32), np.zeros(len(ids), np.uint64)
    for function in (_mix, _row_seed):
        function(tables, ids, out)
        assert len(np.unique(out)) == len(np.unique(ids))


def test_hashes_of_regular_ids_spread_evenly() -> None:
    ids = np.arange(1 << 16) << 20
    out = np.zeros(len(ids), np.uint64)
    _mix(np.zeros(len(ids), np.uint32), ids, out)
    for shift in (16, 24, 40, 56):  # tag bits and shard bits
        buckets = np.bincount((out >> np.uint64(shift) & np.uint64(255)).astype(int), minlength=256)
        assert abs(buckets - 256).max() < 6 * 16  # six standard deviations
