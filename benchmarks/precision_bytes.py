"""Bytes of rows in bf16 beside the same rows in fp32, for `benchmarks.precision`: what moves, and what goes to disk.

A table without optimizer state (SGD) is trained over all of its ids, and then once more.
"""

from __future__ import annotations

from pathlib import Path

import torch

from storage.store import StoreStats
from tiered_emb import SGD, TierConfig, TieredEmbeddingBag

_TABLE = "bytes"
_BATCH = 500
_BESIDE_BYTES = 1 << 20  # what moving a batch takes
_INDEX_BYTES = 64  # of a store on disk, a row, with its buffers; rounded up


def moved_bytes(rows: int, dim: int, precision: str) -> int:
    """Bytes of rows that a store in memory took and gave, under a tier that may have a tenth of them: every row leaves
    for the store, comes back from it and leaves again."""
    room = max(_BATCH, rows // 10)
    budget = _BESIDE_BYTES + 2 * _tier_bytes(room + _BATCH, dim)
    stats = _train(rows, dim, precision, TierConfig(ddr_bytes=budget, max_rows={_TABLE: room}))
    return stats.bytes_read + stats.bytes_written


def disk_bytes(rows: int, dim: int, precision: str, place: Path) -> int:
    """Bytes of the segments that an `LmdbStore` at `place` wrote, each row once, with ids, checksums and padding."""
    budget = (32 << 20) + _tier_bytes(rows, dim) + rows * _INDEX_BYTES
    return _train(rows, dim, precision, TierConfig(ddr_bytes=budget * 2, store=place)).bytes_written


def _tier_bytes(rows: int, dim: int) -> int:
    return rows * (4 * dim + 64)


def _train(rows: int, dim: int, precision: str, tiers: TierConfig) -> StoreStats:
    """What the store has counted when all rows are at rest."""
    with TieredEmbeddingBag(
        rows, dim, tiers=tiers, optimizer=SGD(0.1), seed=0, name=_TABLE, precision=precision
    ) as bag:
        for first in [*range(0, rows, _BATCH)] * 2:
            ids = torch.arange(first, min(rows, first + _BATCH))
            bag(ids, torch.arange(len(ids))).sum().backward()
        bag.flush()
        return bag.stats().store
