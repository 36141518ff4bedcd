"""The stores that are compared: ours, one LMDB record a row, and RocksDB, all on the same ids and the same bytes.

What a side needs of a batch besides the rows (keys as the library wants them, in the order that suits it) is made by
`prepare`, outside the clock. Reading ends with the bytes of all rows back to back in one object; an update ends when
the rows would survive a power cut. Each side has the fastest settings that were found for it and that a user would run
with. On the machine of `benchmarks/results`, for rows of 128 and 516 bytes:

**py-lmdb, a record a row** (`lmdb_rows`): integer keys, loads and updates sorted by id (an update in random order takes
longer), no read-ahead, one transaction and one sync a batch, as ours. Of its ways to read many rows, a plain `get` in
a list comprehension is the fastest (`Cursor.getmulti` takes twice as long), and rows of both widths arrive faster as
`bytes` than as buffers; the time with `buffers=True` is a figure too.

**rocksdict** (`rocksdict`): raw mode, a multi-get of the list of keys, no compression, reads through the memory map
with a hash index in each block, which is faster than a block cache that holds everything. The plain table format would
be faster still, but proves no checksum. Loaded in sorted order and compacted into one level before anything is read.
Updates: a write batch in sorted order (half the time of a random one), the write-ahead log synced after each. Its
flushes and compactions run in the background. Where single updates are compared they are waited for outside the clock,
and ours does not compact: neither side pays for its garbage there. Where upkeep counts both do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import lmdb
import numpy as np
from numpy.typing import NDArray

from benchmarks.store_internals import store_config
from storage import Column, LmdbStore, RowIds, RowSchema, TableRef

OURS, LMDB_ROWS, ROCKSDICT = "ours", "lmdb_rows", "rocksdict"
Data = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Batch:
    """N distinct ids or not, and the keys that stand for them in each library.

    Attributes:
        ids: int64 (N,).
        native: 8 bytes each in the machine's order, for LMDB's integer keys.
        big_endian: 8 bytes each, for RocksDB, whose order is that of bytes.
    """

    ids: NDArray[np.int64]
    native: list[bytes]
    big_endian: list[bytes]

    @classmethod
    def of(cls, ids: NDArray[np.int64]) -> Batch:
        return cls(ids, ids.view("V8").tolist(), ids.astype(">i8").view("V8").tolist())


class Side(Protocol):
    """One store with rows of one width; batches of updates are sorted by id."""

    def load(self, batch: Batch, data: Data) -> None:
        """Write rows for the first time, in ascending order from call to call; need not be durable yet."""

    def loaded(self) -> None:
        """Called after the last `load`: make everything durable, and as good to read as it gets."""

    def read(self, batch: Batch) -> bytes | memoryview:
        """The rows of a batch back to back."""

    def update(self, batch: Batch, data: Data) -> None:
        """Replace rows, durably."""

    def settle(self) -> None:
        """Wait for work in the background."""

    def close(self) -> None: ...


class Ours:
    """LmdbStore through its public verbs."""

    def __init__(self, directory: Path, row_bytes: int, *, compacting: bool = False) -> None:
        self.path = directory / OURS
        self.store = LmdbStore(self.path, config=store_config(compacting=compacting))
        self.table = open_rows(self.store, row_bytes)
        self._row_bytes = row_bytes
        self._out = np.empty((0, row_bytes), np.uint8)
        self._found = np.empty(0, np.bool_)

    def load(self, batch: Batch, data: Data) -> None:
        self.put(batch.ids, data)

    def put(self, ids: NDArray[np.int64], data: Data) -> None:
        """Rows that are not committed at once."""
        self.store.put(RowIds.of(self.table, ids), data)

    def loaded(self) -> None:
        self.store.flush()

    def read(self, batch: Batch) -> memoryview:
        if len(self._out) != len(batch.ids):  # the caller's array, used again as a tier's staging is
            self._out = np.empty((len(batch.ids), self._row_bytes), np.uint8)
            self._found = np.empty(len(batch.ids), np.bool_)
        self.store.get(RowIds.of(self.table, batch.ids), self._out, self._found)
        return self._out.data

    def update(self, batch: Batch, data: Data) -> None:
        self.put(batch.ids, data)
        self.store.flush()

    def settle(self) -> None:
        moved = -1
        while moved != self.store.stats().rows_moved:
            moved = self.store.stats().rows_moved
            time.sleep(0.02)

    def close(self) -> None:
        self.store.close()


class LmdbRows:
    """A record a row in one LMDB database."""

    def __init__(self, directory: Path, row_bytes: int) -> None:
        path = str(directory / LMDB_ROWS)
        self._env = lmdb.open(path, map_size=1 << 40, max_dbs=1, readahead=False)
        self._rows = self._env.open_db(b"rows", integerkey=True)
        self._row_bytes = row_bytes

    def load(self, batch: Batch, data: Data) -> None:
        self._put(batch, data, append=True)

    def _put(self, batch: Batch, data: Data, append: bool) -> None:
        with self._env.begin(write=True, db=self._rows) as txn:
            txn.cursor().putmulti(_pairs(batch.native, data, self._row_bytes), append=append)

    def loaded(self) -> None:
        self._env.sync(True)

    def read(self, batch: Batch) -> bytes:
        return self.read_as(batch, buffers=False)

    def read_as(self, batch: Batch, buffers: bool) -> bytes:
        """`read`, with rows as `bytes` or as buffers until they are joined."""
        begin: Any = self._env.begin
        with begin(db=self._rows, buffers=buffers) as txn:
            get = txn.get
            return b"".join([get(key) for key in batch.native])

    def update(self, batch: Batch, data: Data) -> None:
        self._put(batch, data, append=False)

    def settle(self) -> None:
        """It has no background."""

    def close(self) -> None:
        self._env.close()


class RocksRows:
    """RocksDB through rocksdict. Raises ImportError where it is missing."""

    def __init__(self, directory: Path, row_bytes: int) -> None:
        import rocksdict as rocks

        options = rocks.Options(raw_mode=True)
        options.set_compression_type(rocks.DBCompressionType.none())
        options.set_max_background_jobs(2)
        options.set_allow_mmap_reads(True)
        blocks = rocks.BlockBasedOptions()
        blocks.set_data_block_index_type(rocks.DataBlockIndexType.binary_and_hash())
        options.set_block_based_table_factory(blocks)
        self._db: Any = rocks.Rdict(str(directory / ROCKSDICT), options=options)
        self._batch: Any = rocks.WriteBatch
        self._synced: Any = rocks.WriteOptions()
        self._synced.sync = True
        self._unsynced: Any = rocks.WriteOptions()
        self._row_bytes = row_bytes

    def load(self, batch: Batch, data: Data) -> None:
        self._write(batch, data, self._unsynced)

    def _write(self, batch: Batch, data: Data, options: Any) -> None:
        writes = self._batch(raw_mode=True)
        put, raw, width = writes.put, data.tobytes(), self._row_bytes
        for i, key in enumerate(batch.big_endian):
            put(key, raw[i * width : i * width + width])
        self._db.write(writes, options)

    def loaded(self) -> None:
        self._db.flush()
        self._db.compact_range(None, None)
        self.settle()

    def read(self, batch: Batch) -> bytes:
        return b"".join(self._db.get(batch.big_endian))

    def update(self, batch: Batch, data: Data) -> None:
        self._write(batch, data, self._synced)

    def settle(self) -> None:
        """Wait until nothing is flushed or compacted and nothing is due."""
        due = ("num-running-flushes", "num-running-compactions", "mem-table-flush-pending", "compaction-pending")
        while any(self._db.property_int_value(f"rocksdb.{name}") for name in due):
            time.sleep(0.01)

    def close(self) -> None:
        self._db.close()


def open_rows(store: LmdbStore, row_bytes: int) -> TableRef:
    """The table that all rows are in."""
    return store.open_table("rows", RowSchema((Column("weight", "uint8", row_bytes),)))


def _pairs(keys: list[bytes], data: Data, row_bytes: int) -> list[tuple[bytes, memoryview]]:
    rows = data.data.cast("B")
    return [(key, rows[i * row_bytes : i * row_bytes + row_bytes]) for i, key in enumerate(keys)]
