"""The checksum against its specification, and the two functions of an id."""

from __future__ import annotations

import numpy as np
import pytest
from numba import njit

from storage.row_log.hashing import checksum, mix, row_seed

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
