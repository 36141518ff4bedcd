"""The Store under an engine: told apart from others, opened, and sized for the host budget."""

from __future__ import annotations

import os
from pathlib import Path

from storage.heap_store import HeapStore
from storage.lmdb_store import LmdbStore, StoreConfig
from storage.store import Store
from tiered_emb.config import TierConfig

_LEAST_BUFFER_BYTES = 1 << 14  # a Store's write buffer is a sixteenth of the host budget, within these
_MOST_BUFFER_BYTES = 1 << 24
_SEGMENT_BYTES = 1 << 19  # twice a Store's own: each costs the thread that puts some 0.1 ms when it is full
_LARGE_STORE_BYTES = 1 << 50  # of a Store whose segments are as large as they get
_AMPLE_BYTES = 1 << 36  # of a host budget from which on segments may be as large as suits the Store
BUFFER_SHARE = 13 / 8 / 16  # of the host budget, for the write buffer and compaction's
_LEAST_INDEX_BYTES = 1 << 11  # of a group in which no row was stored


def place_of(config: TierConfig) -> str | int | None:
    """What tells two engines' Stores apart; None = a Store of the module's own."""
    if config.store is None:
        return None
    return os.path.realpath(config.store) if isinstance(config.store, str | os.PathLike) else id(config.store)


def open_store(config: TierConfig) -> tuple[Store, bool]:
    """The configured Store, and whether it is ours to close."""
    if config.store is None:
        return HeapStore(), True
    if not isinstance(config.store, str | os.PathLike):
        return config.store, False
    buffer = max(_LEAST_BUFFER_BYTES, min(_MOST_BUFFER_BYTES, config.ddr_budget_bytes // 16))
    small = max(_LEAST_BUFFER_BYTES // 2, min(_SEGMENT_BYTES, buffer // 32))  # every group fills some of its own
    segment = None if config.ddr_budget_bytes >= _AMPLE_BYTES else small
    rate = 0 if buffer == _LEAST_BUFFER_BYTES else None  # a tiny budget has no room for compaction's buffers
    sizes = StoreConfig(segment_bytes=segment, write_buffer_bytes=buffer, compact_bytes_per_s=rate)
    return LmdbStore(Path(config.store), durability="snapshot", config=sizes), True


def buffer_bytes(store: Store) -> int:
    """What a Store of ours fills and commits, and compaction's, as far as a greater host budget makes that greater."""
    if not isinstance(store, LmdbStore) or store.config.write_buffer_bytes >= _MOST_BUFFER_BYTES:
        return 0
    size = store.config.write_buffer_bytes
    return size if store.config.compact_bytes_per_s == 0 else size * 13 // 8


def bytes_of_groups(store: Store, groups: int, new: int, widest_row_bytes: int) -> int:
    """What a Store of ours will take for ``new`` groups beside ``groups``: its write buffer, or segments of each group
    beyond it."""
    if not isinstance(store, LmdbStore):
        return 0
    sizes = store.config
    first = sizes.compact_bytes_per_s != 0 and not groups
    compaction = sizes.write_buffer_bytes * 5 // 8 if first else 0  # what it fills and commits
    segments = 3 * (groups + new) * sizes.filled_bytes(widest_row_bytes, _LARGE_STORE_BYTES) * 5 // 4
    return compaction + max(_LEAST_INDEX_BYTES * new, segments - store.memory_after(0))
