"""Every store of ours against the contract."""

from __future__ import annotations

from pathlib import Path

from storage import LmdbStore, MemoryStore, Store, StoreConfig
from storage.testing import StoreContract


class TestMemoryStore(StoreContract):
    def make_store(self, path: Path) -> Store:
        return MemoryStore()


class TestLmdbStore(StoreContract):
    def make_store(self, path: Path) -> Store:
        return LmdbStore(path)

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, LmdbStore)
        store.close()
        return LmdbStore(store.path)


class TestLmdbStoreWithTinyBuffers(StoreContract):
    """Many small segments, a commit for nearly every one, a map that is not sparse."""

    config = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, map_size_bytes=1 << 26, index_shards=2)

    def make_store(self, path: Path) -> Store:
        return LmdbStore(path, durability="snapshot", config=self.config)

    def reopen(self, store: Store) -> Store:
        assert isinstance(store, LmdbStore)
        store.close()
        return LmdbStore(store.path, durability="snapshot", config=self.config)
