"""A trace as version 1 wrote it reads for ever, and is what docs/formats.md says, byte by byte.

`golden/trace-1.bin` was made once: requests of `ASKED`, sampled at a rate of a half with seed 7.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import zstandard

from storage.row_log.hashing import checksum
from tiered_emb.trace import read_trace, sampled

GOLDEN = Path(__file__).parent / "golden" / "trace-1.bin"
ADS, USERS = 1096944816, 662972472
ASKED = [
    [(ADS, 1), (ADS, 2), (ADS, 3), (5, -1), (5, 2**63 - 1)],
    [(9, id) for id in range(8)],
    [],
]
KEPT = [[(ADS, 3), (5, -1), (5, 2**63 - 1)], [(9, 5), (9, 6)], []]


def finalised(x: int) -> int:
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ x >> 33) * factor % 2**64
    return x ^ x >> 33


def kept(table: int, id: int, rate: float, seed: int) -> bool:
    start = finalised(seed ^ 0x9E3779B97F4A7C15)
    return finalised(id % 2**64 ^ table * 0xC2B2AE3D27D4EB4F % 2**64 ^ start) < rate * 2**64


def test_version_1_reads() -> None:
    trace = read_trace(GOLDEN)
    assert [list(zip(t.tolist(), i.tolist(), strict=True)) for t, i in trace.each_batch()] == KEPT
    assert trace.table_names == {ADS: "ads", USERS: "users"}
    assert (trace.rate, trace.seed) == (0.5, 7)


def test_the_sample_is_by_the_hash_that_is_written_down() -> None:
    assert [[pair for pair in batch if kept(*pair, 0.5, 7)] for batch in ASKED] == KEPT
    rng = np.random.default_rng(0)
    tables, ids = rng.integers(0, 2**32, 500).astype(np.uint32), rng.integers(-(2**63), 2**63 - 1, 500)
    expected = [kept(*pair, 0.3, 11) for pair in zip(tables.tolist(), ids.tolist(), strict=True)]
    assert sampled(tables, ids, 0.3, 11).tolist() == expected


def test_version_1_is_as_written_down() -> None:
    data = GOLDEN.read_bytes()
    assert struct.unpack("<8sIIdQQ", data[:40]) == (b"TETRACE\0", 1, 40, 0.5, 7, checksum(data[:32]))
    at, blocks = 40, []
    while at < len(data):
        magic, kind, number, requests, batches, packed_bytes, raw_bytes, packed_sum, own_sum = struct.unpack(
            "<4sIQQQQQQQ", data[at : at + 64]
        )
        assert (magic, number, own_sum) == (b"TEBK", len(blocks), checksum(data[at : at + 56]))
        packed = data[at + 64 : at + 64 + packed_bytes]
        assert packed_sum == checksum(packed)
        raw = zstandard.ZstdDecompressor().decompress(packed) if packed else b""
        assert len(raw) == raw_bytes
        blocks.append((kind, requests, batches, raw))
        at += 64 + packed_bytes
    tables = struct.pack("<3I", ADS, 5, 9)
    asked = struct.pack("<5q", *(id for batch in KEPT for _, id in batch))
    assert blocks == [
        (1, 0, 1, b"ads\0"),
        (1, 0, 1, b"users\0"),
        (2, 5, 3, asked + struct.pack("<3I", 2, 1, 0) + tables + struct.pack("<3I", 1, 2, 2)),
        (3, 5, 3, b""),
    ]
