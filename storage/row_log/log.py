"""RowLog: segments and the state record as values of one LMDB environment. The only file that calls LMDB.

Two databases: `segments` (segment number, 8 bytes big endian -> segment) and `states` (b"store" -> uuid, b"head" ->
`State`).

Invariants:

- One commit is one transaction: some new segments, some dead ones deleted, perhaps a new state; all of it or nothing.
- A segment takes pages of its own (LMDB's overflow pages), so its address stays as long as it lives.
- Never `writemap` or `map_async`; `readahead=False`, since rows are read at random; every commit is synced. With
  durability "snapshot" the sync of LMDB's meta page is left to the next commit, except at a flush.
- LMDB knows of a reader through lock.mdb; one that may not write that keeps writers away (`row_log.owner`). Readers
  that were killed are forgotten at each commit.
- Every error of LMDB becomes one of ours here.

Not thread safe; the store's lock guards it. It knows nothing of ids and of what rows hold.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EIO
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from storage.errors import (
    NO_ROOM,
    CorruptSegmentError,
    NotAStoreError,
    StorageError,
    StoreFullError,
    StoreIOError,
    StoreLockedError,
    disk_error,
)
from storage.row_log.lmdb_pages import bytes_at, place_of_value
from storage.row_log.manifest import DATA_NAME, LOCK_NAME
from storage.row_log.owner import DataFileShare
from storage.row_log.state import State

_LOOSE_PAGES = 16  # pages at the end of the file that LMDB may have counted and never written
_LOCK_BYTES = 8192
_TREE_BYTES = 1 << 18  # what a transaction writes beside its segments, at most about
_DATABASES = frozenset({b"segments", b"states"})
_FULL_TEXTS = tuple(os.strerror(code) for code in NO_ROOM)
_DAMAGED = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)


@dataclass(frozen=True, slots=True)
class Commit:
    """What one transaction changes: segments by number, numbers of segments to delete, a new head."""

    segments: tuple[tuple[int, memoryview], ...] = ()
    deletes: tuple[int, ...] = ()
    state: State | None = None


class RowLog:
    """The LMDB environment of a store.

    Args:
        directory: exists; data.mdb in it exists too unless `create` is set.
        map_size_bytes: address space for the data file, its greatest size.
        read_only: open for reading.
        sync_meta: whether a commit also syncs LMDB's meta page.
        create: whether the directory has no manifest, so that there is no store yet; `create` makes one.

    Attributes:
        page_bytes: size of LMDB's pages.
        repaired: the file ended before its last pages, which may or may not have held anything: verify all rows.
    """

    def __init__(
        self, directory: Path, map_size_bytes: int, *, read_only: bool, sync_meta: bool, create: bool = False
    ) -> None:
        self._where = str(directory)
        self._data = directory / DATA_NAME
        self._lock = directory / LOCK_NAME
        self._sync_meta = sync_meta
        self._share: DataFileShare | None = None
        if self._may_lock():
            self._reserve_lock_file()
        elif read_only:
            self._share = DataFileShare(directory)
        if create:
            self._begin_again()
        with self._translated("opened", _TREE_BYTES):
            self._env = lmdb.open(
                str(directory),
                map_size=map_size_bytes,
                max_dbs=4,
                readonly=read_only,
                readahead=False,
                metasync=sync_meta,
                lib_version=0,
                lock=self._share is None,
            )
        try:
            self._inode = self._data.stat().st_ino
            self.page_bytes: int = self._env.stat()["psize"]
            self._check_meta_pages()
            self.repaired = self._check_length(read_only)
            self._segments, self._states = self._open_databases(create)
        except BaseException:
            self._env.close()
            raise

    def _begin_again(self) -> None:
        """Empty a data file whose creation was cut short by a full disk, which LMDB would call damaged."""
        if self._data.exists() and self._data.stat().st_size < 2 * mmap.PAGESIZE:
            os.truncate(self._data, 0)

    def _check_meta_pages(self) -> None:
        """Refuse a file whose newest transaction LMDB would mistake for an older one, with the rows of long ago.

        LMDB has two meta pages, writes transaction N into page N % 2, believes the greater number and proves nothing.
        """
        with open(self._data, "rb") as file:
            pages = file.read(2 * self.page_bytes)
        even, odd = (int.from_bytes(pages[at + 144 : at + 152], "little") for at in (0, self.page_bytes))
        whole = even % 2 == 0 and odd % 2 == 1 and abs(even - odd) == 1
        if not whole and (even or odd):  # both are 0 in a new file
            raise CorruptSegmentError(
                f"{self._data} has meta pages of transactions {even} and {odd}, and not of one and the next: "
                "the file is damaged, restore it from a copy"
            )

    def _check_length(self, read_only: bool) -> bool:
        """Refuse a data file that was cut short: touching a page behind its end would kill the process."""
        size, needed = self._data.stat().st_size, (self._env.info()["last_pgno"] + 1) * self.page_bytes
        if size >= needed:
            return False
        loose = size % self.page_bytes == 0 and needed - size <= _LOOSE_PAGES * self.page_bytes
        if not loose or read_only:
            raise CorruptSegmentError(
                f"{self._data} has {size} bytes, {needed - size} fewer than it was written with: it was cut short; "
                "restore it from a copy"
            )
        os.truncate(self._data, needed)
        return True

    def _may_lock(self) -> bool:
        """Whether lock.mdb, in which readers register with LMDB, can be written."""
        return os.access(self._lock if self._lock.exists() else self._lock.parent, os.W_OK)

    def _reserve_lock_file(self) -> None:
        """Make lock.mdb with its blocks: LMDB maps it sparse, and on a full disk the first reader would be killed.

        Not if it exists: closing a file gives up the locks that LMDB may have on it in this process.
        """
        if self._lock.exists() and self._lock.stat().st_size >= _LOCK_BYTES:
            return
        with self._translated("opened"), open(self._lock, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, _LOCK_BYTES)

    def _open_databases(self, create: bool) -> tuple[Any, Any]:
        """Ours, in an environment that must hold no others if a store is to be created.

        Raises:
            NotAStoreError: data.mdb is somebody else's.
        """
        with self.reading() as txn:
            names = {bytes(name) for name in txn.cursor().iternext(keys=True, values=False)}
        if not (names <= _DATABASES if create else names >= _DATABASES):
            raise NotAStoreError(
                f"{self._data} is an LMDB environment with {len(names)} entries, and not of a store: "
                "expected a store, an empty directory or a new path"
            )
        with self._translated("opened", _TREE_BYTES):
            segments, states = (self._env.open_db(name, create=create) for name in sorted(_DATABASES))
        return segments, states

    def create(self, store: bytes) -> None:
        """Make a new log: the uuid and the empty state.

        Raises:
            NotAStoreError: segments exist already; they belong to a store that lost its manifest.
        """
        with self._translated("written", _TREE_BYTES), self._env.begin(write=True) as txn:
            count = txn.stat(self._segments)["entries"]
            if count:
                raise NotAStoreError(
                    f"{self._where} has no manifest.json but its data.mdb holds {count} segments: "
                    "restore the manifest, or remove the directory if its rows are not wanted"
                )
            txn.put(b"store", store, db=self._states)
            txn.put(b"head", State(0, 0, b"").pack(), db=self._states)

    def check_identity(self, store: bytes) -> None:
        """Refuse the data file of another store.

        Raises:
            NotAStoreError: the uuid in data.mdb is not the manifest's.
        """
        with self.reading() as txn:
            seen = txn.get(b"store", db=self._states)
        if seen is None or bytes(seen) != store:
            other = bytes(seen).hex() if seen is not None else "none"
            raise NotAStoreError(
                f"{self._data} belongs to store {other}, the manifest to {store.hex()}: they do not fit"
            )

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """A read transaction; addresses of segments are good while it lasts, and for a writer as long as they live."""
        with self._translated("read"), self._env.begin(buffers=True) as txn:
            yield txn

    def state(self, txn: Any) -> State:
        """The last complete state."""
        record = txn.get(b"head", db=self._states)
        return State.unpack(None if record is None else bytes(record), self._where)

    def numbers(self, txn: Any) -> NDArray[np.int64]:
        """Numbers of all segments, ascending."""
        cursor = txn.cursor(db=self._segments)
        joined = b"".join([bytes(number) for number in cursor.iternext(keys=True, values=False)])
        return np.frombuffer(joined, ">u8").astype(np.int64)

    def segments(self, txn: Any) -> dict[int, NDArray[np.uint8]]:
        """The bytes of every segment by number, ascending, in the memory map; no page of them is touched."""
        keys = txn.cursor(db=self._segments).iternext(keys=True, values=False)
        pages = self._env.info()["last_pgno"] + 1
        places = ((key, *place_of_value(key, self.page_bytes, pages)) for key in keys)
        return {int.from_bytes(key, "big"): bytes_at(address, size) for key, address, size in places}

    def segment(self, txn: Any, number: int) -> NDArray[np.uint8]:
        """The bytes of one segment, in the memory map."""
        cursor = txn.cursor(db=self._segments)
        if not cursor.set_key(int(number).to_bytes(8, "big")):
            raise CorruptSegmentError(f"segment {number} of {self._where} is gone: the data file is damaged")
        return bytes_at(*place_of_value(cursor.key(), self.page_bytes, self._env.info()["last_pgno"] + 1))

    def commit(self, what: Commit) -> None:
        """One transaction, synced. After an error nothing of it happened.

        Raises:
            StoreFullError, StoreIOError, CorruptSegmentError: as the module's docstring says.
        """
        self._check_present()
        self._env.reader_check()  # a reader killed in the middle of a verb would keep every page from here on
        needed = _TREE_BYTES + sum(len(segment) for _, segment in what.segments)
        with self._translated("written", needed), self._env.begin(write=True) as txn:
            for number, segment in what.segments:
                txn.put(number.to_bytes(8, "big"), segment, db=self._segments)
            for number in what.deletes:
                txn.delete(number.to_bytes(8, "big"), db=self._segments)
            if what.state is not None:
                txn.put(b"head", what.state.pack(), db=self._states)
        if what.state is not None and not self._sync_meta:
            with self._translated("synced"):
                self._env.sync(True)

    def _check_present(self) -> None:
        """A file removed or replaced under the store takes commits without complaint, and loses them."""
        if not self._data.exists() or self._data.stat().st_ino != self._inode:
            what = "replaced" if self._data.exists() else "removed"
            raise StoreIOError(f"{self._data} was {what} while the store was open: what was put since is not durable")

    @property
    def disk_bytes(self) -> int:
        """Bytes that the data file occupies, 0 if it is gone."""
        try:
            return self._data.stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        """Close the environment; every address into it is void."""
        self._env.close()
        if self._share is not None:
            self._share.close()

    @contextmanager
    def _translated(self, verb: str, needed: int = 0) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            message = f"{self._where} could not be {verb}: {error}"
            if os.strerror(EIO) in str(error) and self._has_no_room(needed):
                raise StoreFullError(f"{message}; free space on its disk") from error
            raise _translate(error, message) from error
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise disk_error(error, f"{self._where} could not be {verb}: {error}") from error

    def _has_no_room(self, needed: int) -> bool:
        """Whether so many bytes more do not fit: LMDB reports a write that was cut short by that as an I/O error."""
        disk = os.statvfs(self._data.parent)
        largest = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        size = self._data.stat().st_size if self._data.exists() else 0
        return disk.f_bavail * disk.f_frsize < needed or (largest != resource.RLIM_INFINITY and size + needed > largest)


def _translate(error: lmdb.Error, message: str) -> StorageError:
    text = str(error)
    if isinstance(error, lmdb.MapFullError):
        return StoreFullError(f"{message}; raise StoreConfig.map_size_bytes")
    if isinstance(error, lmdb.DiskError) or any(full in text for full in _FULL_TEXTS):
        return StoreFullError(f"{message}; free space on its disk")
    if isinstance(error, _DAMAGED):
        return CorruptSegmentError(f"{message}; the data file is damaged, restore it from a copy")
    if "already open in this process" in text:
        return StoreLockedError(f"{message}; use the store object that has it")
    return StoreIOError(message)
