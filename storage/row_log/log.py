"""RowLog: segments, the state and records of commits in one LMDB environment. The only file that opens LMDB.

Three databases: `segments` (segment number, 8 bytes big endian -> segment), `states` (b"store" -> uuid, b"head" ->
`State`, b"closed" -> the token of a clean close, b"snapshot:" and a name -> `SnapshotRecord`) and `commits` (commit
number, 8 bytes big endian -> `CommitRecord`), which a store of earlier programs lacks until the next writer opens it.

Invariants:

- One commit is one transaction: some new segments, some dead ones deleted, perhaps a new state, snapshots that come or
  go, and the record of all that; all of it or nothing.
- A segment takes pages of its own (LMDB's overflow pages), so its address stays as long as it lives.
- Never `writemap` or `map_async`; `readahead=False`, since rows are read at random; every commit is synced. With
  durability "snapshot" the sync of LMDB's meta page is left to the next commit, except at a flush.
- LMDB knows of a reader through lock.mdb; one that may not write that keeps writers away (`row_log.owner`). Readers
  that were killed are forgotten at each commit.
- Nothing is read through LMDB before all its pages were checked (`row_log.lmdb_check`), and no run of pages is freed
  before its header was.
- Every error of LMDB becomes one of ours here.

Threads: one writes; any number may be inside `reading()` meanwhile, each with the transaction it got there. It knows
nothing of ids and of what rows hold.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptSegmentError, NotAStoreError, StorageError, StoreIOError, disk_error
from storage.row_log.commits import CommitRecord, Totals, commit_key, thinned, walk
from storage.row_log.early_writes import writing_early
from storage.row_log.lmdb_check import check_meta_pages, check_pages
from storage.row_log.lmdb_errors import has_no_room, has_readers, oldest_reader, translate
from storage.row_log.lmdb_pages import check_run, is_large, place_of_value
from storage.row_log.manifest import DATA_NAME, LOCK_NAME
from storage.row_log.owner import DataFileShare
from storage.row_log.raw import bytes_at
from storage.row_log.snapshots import KEY, SnapshotRecord, in_order, key_of
from storage.row_log.state import State

_CHECKS = 1000  # begun beside a live writer until one is not overtaken by two of its commits
_LOCK_BYTES = 8192
_TREE_BYTES = 1 << 18  # what a transaction writes beside its segments, at most about
_DATABASES = frozenset({b"segments", b"states"})
_ADDED_DATABASE = b"commits"  # a writer makes it in a store of earlier programs


@dataclass(frozen=True, slots=True)
class Commit:
    """What one transaction changes.

    Attributes:
        segments: new ones, by number.
        deletes: numbers of segments to delete.
        state: a new head.
        totals: what the record of this commit says; None = as the one before.
        token: 16 bytes that stay until the next commit and tell that nothing was committed since.
        went_back: whether the deleted segments are what came after a state, so that older rows count again.
        drops: names of snapshots that go, before those of `snapshots` come.
        snapshots: records to keep.
    """

    segments: tuple[tuple[int, memoryview], ...] = ()
    deletes: tuple[int, ...] = ()
    state: State | None = None
    totals: Totals | None = None
    token: bytes | None = None
    went_back: bool = False
    drops: tuple[str, ...] = ()
    snapshots: tuple[SnapshotRecord, ...] = ()


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
    """

    def __init__(
        self, directory: Path, map_size_bytes: int, *, read_only: bool, sync_meta: bool, create: bool = False
    ) -> None:
        self._where = str(directory)
        self._data = directory / DATA_NAME
        self._lock = directory / LOCK_NAME
        self._sync_meta = sync_meta
        self._read_only = read_only
        self._share: DataFileShare | None = None
        self._env: Any = None
        if self._may_lock():
            self._reserve_lock_file()
        elif read_only:
            self._share = DataFileShare(directory)
        if create:
            self._begin_again()
        with self._translated("opened", _TREE_BYTES):
            if self._data.exists() and self._data.stat().st_size:
                check_meta_pages(self._data)
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
            self._env.reader_check()  # readers that were killed keep their places in lock.mdb, of which there are few
            self._inode = self._data.stat().st_ino
            self.page_bytes: int = self._env.stat()["psize"]
            self._check_pages()
            self._segments, self._states = self._open_databases(create)
            self._commits: Any = None
            self.find_commits()
        except BaseException:
            self._env.close()
            raise

    def _begin_again(self) -> None:
        """Empty a data file whose creation was cut short by a full disk, which LMDB would call damaged."""
        if self._data.exists() and self._data.stat().st_size < 2 * mmap.PAGESIZE:
            os.truncate(self._data, 0)

    def _check_pages(self) -> None:
        """Check all pages of LMDB's own before any is read through it."""
        for _ in range(_CHECKS):
            with self.reading() as txn:
                if check_pages(self._data, self.transaction(txn)):
                    return
        raise StoreIOError(f"{self._data} could not be checked: {_CHECKS} times a commit came in between; try again")

    def _may_lock(self) -> bool:
        """Whether lock.mdb, in which readers register with LMDB, can be written."""
        return os.access(self._lock if self._lock.exists() else self._lock.parent, os.W_OK)

    def _reserve_lock_file(self) -> None:
        """Make lock.mdb with its blocks: LMDB maps it sparse, and on a full disk the first reader would be killed.

        Not if it exists: closing a file gives up the locks that LMDB may have on it in this process.
        """
        if self._lock.exists() and self._lock.stat().st_size >= _LOCK_BYTES:
            return
        with self._translated("opened"), open(os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, _LOCK_BYTES)

    def _open_databases(self, create: bool) -> tuple[Any, Any]:
        """Ours, in an environment that must hold no others if a store is to be created.

        Raises:
            NotAStoreError: data.mdb is somebody else's.
        """
        with self.reading() as txn:
            names = {bytes(name) for name in txn.cursor().iternext(keys=True, values=False)}
        if not (names <= _DATABASES | {_ADDED_DATABASE} if create else names >= _DATABASES):
            raise NotAStoreError(
                f"{self._data} is an LMDB environment with {len(names)} entries, and not of a store: "
                "expected a store, an empty directory or a new path"
            )
        with self._translated("opened", _TREE_BYTES):
            segments, states = (self._env.open_db(name, create=create) for name in sorted(_DATABASES))
        return segments, states

    def find_commits(self, create: bool = False) -> None:
        """Look for the database of commit records, which later transactions can read then; or make it."""
        if self._commits is None:
            with self._translated("opened", _TREE_BYTES), suppress(lmdb.NotFoundError):
                self._commits = self._env.open_db(_ADDED_DATABASE, create=create)

    def create(self, store: bytes) -> None:
        """Make a new log: the uuid, the empty state, no commit.

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
        self.find_commits(create=True)
        with self._translated("synced"):
            self._env.sync(True)  # also LMDB's meta page: the manifest that is written next says that all this is there

    def check_identity(self, store: bytes) -> None:
        """Refuse the data file of another store; a writer adds to ours what earlier programs did not have.

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
        self.find_commits(create=not self._read_only)

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """A read transaction; addresses of segments are good while it lasts, and for a writer as long as they live."""
        with self._translated("read"), self._begin_reading() as txn:
            yield txn

    def _begin_reading(self) -> Any:
        """LMDB has room for 126 readers, and those that were killed keep theirs until somebody looks."""
        try:
            return self._env.begin(buffers=True)
        except lmdb.ReadersFullError:
            self._env.reader_check()
            return self._env.begin(buffers=True)

    def state(self, txn: Any) -> State:
        """The last complete state."""
        record = txn.get(b"head", db=self._states)
        return State.unpack(None if record is None else bytes(record), self._where)

    def snapshots(self, txn: Any) -> list[SnapshotRecord]:
        """All named snapshots, oldest first."""
        return in_order(self.unpack_snapshot(*stored) for stored in self.snapshot_records(txn))

    def snapshot_records(self, txn: Any) -> Iterator[tuple[bytes, bytes]]:
        """Keys and records of all named snapshots, as stored."""
        cursor = txn.cursor(db=self._states)
        for key, record in cursor.iternext() if cursor.set_range(KEY) else ():
            if not bytes(key).startswith(KEY):
                return
            yield bytes(key), bytes(record)

    def unpack_snapshot(self, key: bytes, record: bytes) -> SnapshotRecord:
        """A named snapshot. Raises CorruptSegmentError."""
        return SnapshotRecord.unpack(self._name_of(key), record, self._where)

    def snapshot(self, txn: Any, name: str) -> SnapshotRecord | None:
        """The snapshot of a name, if there is one."""
        record = txn.get(key_of(name), db=self._states)
        return None if record is None else SnapshotRecord.unpack(name, bytes(record), self._where)

    def _name_of(self, key: bytes) -> str:
        try:
            return key[len(KEY) :].decode()
        except UnicodeDecodeError as error:
            raise CorruptSegmentError(f"{self._where} has a snapshot under the key {key!r}: it is damaged") from error

    def numbers(self, txn: Any) -> NDArray[np.int64]:
        """Numbers of all segments, ascending."""
        cursor = txn.cursor(db=self._segments)
        return np.array([self._number(key) for key in cursor.iternext(keys=True, values=False)], np.int64)

    def last_number(self, txn: Any) -> int:
        """The greatest number of a segment, 0 if there is none."""
        cursor = txn.cursor(db=self._segments)
        return self._number(cursor.key()) if cursor.last() else 0

    def _number(self, key: Any) -> int:
        """The number of a segment; raises CorruptSegmentError for one that no segment can have."""
        number = int.from_bytes(key, "big")
        if len(key) != 8 or not 0 < number < 1 << 63:
            raise CorruptSegmentError(
                f"{self._where} has a segment under the key {bytes(key).hex()}, which is no number of one: "
                "data.mdb is damaged: restore it from a copy"
            )
        return number

    def segments(self, txn: Any) -> dict[int, NDArray[np.uint8]]:
        """The bytes of every segment by number, ascending, in the memory map; no page of them is touched."""
        keys = txn.cursor(db=self._segments).iternext(keys=True, values=False)
        pages = self._env.info()["last_pgno"] + 1
        places = ((key, *place_of_value(key, self.page_bytes, pages)) for key in keys)
        return {self._number(key): bytes_at(address, size) for key, address, size in places}

    def segment(self, txn: Any, number: int) -> NDArray[np.uint8]:
        """The bytes of one segment, in the memory map."""
        return self.some_segments(txn, [number])[0]

    def some_segments(self, txn: Any, numbers: Sequence[int]) -> list[NDArray[np.uint8]]:
        """The bytes of each of these segments, in the memory map."""
        cursor, pages, found = txn.cursor(db=self._segments), self._env.info()["last_pgno"] + 1, []
        for number in numbers:
            if not cursor.set_key(commit_key(number)):
                raise CorruptSegmentError(f"segment {number} of {self._where} is gone: the data file is damaged")
            found.append(bytes_at(*place_of_value(cursor.key(), self.page_bytes, pages)))
        return found

    def segment_count(self, txn: Any) -> int:
        """How many segments there are, without looking at them."""
        return int(txn.stat(self._segments)["entries"])

    def last_commit(self, txn: Any) -> CommitRecord | None:
        """The record of the last commit; None if no commit left one."""
        if self._commits is None:
            return None
        cursor = txn.cursor(db=self._commits)
        if not cursor.last():
            return None
        return CommitRecord.unpack(bytes(cursor.value()), int.from_bytes(cursor.key(), "big"), self._where)

    def last_commit_number(self, txn: Any) -> int | None:
        """The number of the last commit, 0 if there was none; None if this log keeps no records of them."""
        if self._commits is None:
            return None
        cursor = txn.cursor(db=self._commits)
        return int.from_bytes(cursor.key(), "big") if cursor.last() else 0

    def commits_since(self, txn: Any, number: int) -> list[CommitRecord] | None:
        """Records of all commits after commit `number` (0 = the store's creation), oldest first.

        Returns:
            None if some of them are gone, or commit `number` is not one of this log: look at the whole log instead.
        """
        last = self.last_commit_number(txn)
        if last is None or number > last:
            return None
        if last > number and txn.get(commit_key(number + 1), db=self._commits) is None:
            return None
        records = list(walk(txn.cursor(db=self._commits), number + 1, self._where))
        return records if len(records) == last - number else None

    def history(self, txn: Any) -> list[CommitRecord]:
        """All records that are kept, oldest first; the older, the fewer."""
        return [] if self._commits is None else list(walk(txn.cursor(db=self._commits), 0, self._where))

    def closed_token(self, txn: Any) -> bytes | None:
        """The token of the last commit; None if it had none."""
        token = txn.get(b"closed", db=self._states)
        return None if token is None else bytes(token)

    def transaction(self, txn: Any) -> int:
        """The number of the LMDB transaction whose result `txn` reads."""
        return int(txn.id())

    def newest_transaction(self) -> int:
        """The number of the last transaction in the file, without LMDB, which a forked child may not use."""
        with open(self._data, "rb", buffering=0) as file:
            return max(int.from_bytes(os.pread(file.fileno(), 8, at + 144), "little") for at in (0, self.page_bytes))

    def oldest_reader(self) -> tuple[int, int]:
        """The reader in the middle of a verb that is furthest behind: its process, and by how many transactions.

        The pages that it may read are not used again before it is done. (0, 0) if no reader is behind.
        """
        return oldest_reader(self._env)

    def has_readers(self) -> bool:
        """Whether other processes have the store open for reading and are known to LMDB."""
        return has_readers(self._env)

    def commit(self, what: Commit, *, early: bool = False) -> None:
        """One transaction, synced. After an error nothing of it happened.

        Args:
            early: as `row_log.early_writes`.

        Raises:
            StoreFullError, StoreIOError, CorruptSegmentError: as the module's docstring says.
        """
        self._check_present()
        self._check_runs(what)
        self._env.reader_check()  # a reader killed in the middle of a verb would keep every page from here on
        needed = _TREE_BYTES + sum(len(segment) for _, segment in what.segments)
        needed += sum(8 * len(snapshot.segments) for snapshot in what.snapshots)
        begun = writing_early(self._data) if early else nullcontext()
        with begun, self._translated("written", needed), self._env.begin(write=True) as txn:
            for number, segment in what.segments:
                txn.put(number.to_bytes(8, "big"), segment, db=self._segments)
            for number in what.deletes:
                txn.delete(number.to_bytes(8, "big"), db=self._segments)
            if what.state is not None:
                txn.put(b"head", what.state.pack(), db=self._states)
            for name in what.drops:
                txn.delete(key_of(name), db=self._states)
            for snapshot in what.snapshots:
                txn.put(key_of(snapshot.name), snapshot.pack(), db=self._states)
            if what.token is not None:
                txn.put(b"closed", what.token, db=self._states)
            else:
                txn.delete(b"closed", db=self._states)
            self._record(txn, what)
        if (what.state or what.snapshots or what.drops) and not self._sync_meta:
            with self._translated("synced"):
                self._env.sync(True)

    def _check_runs(self, what: Commit) -> None:
        """LMDB frees the pages that the header in front of a value names, whichever they are."""
        names = [*what.drops, *(snapshot.name for snapshot in what.snapshots)]
        if not what.deletes and not names:
            return
        with self.reading() as txn:
            cursor, pages = txn.cursor(db=self._segments), self._env.info()["last_pgno"] + 1
            for number in what.deletes:
                if cursor.set_key(commit_key(number)):
                    check_run(cursor.key(), self.page_bytes, pages, f"segment {number}")
            cursor = txn.cursor(db=self._states)
            for name in names:
                if cursor.set_key(key_of(name)) and is_large(cursor.key(), cursor.value(), self.page_bytes):
                    check_run(cursor.key(), self.page_bytes, pages, f"the record of snapshot {name!r}")

    def _record(self, txn: Any, what: Commit) -> None:
        """Write what a commit changes into its record, and let go of the record whose turn it is."""
        last = self.last_commit(txn)
        number = 1 if last is None else last.number + 1
        totals = what.totals if what.totals is not None else Totals() if last is None else last.totals
        new = tuple(segment for segment, _ in what.segments)
        made_state, now = what.state is not None, time.time_ns() // 1000
        record = CommitRecord(number, now, new, what.deletes, made_state, what.went_back, totals)
        txn.put(commit_key(number), record.pack(), db=self._commits)
        if thinned(number) > 0:
            txn.delete(commit_key(thinned(number)), db=self._commits)

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
            no_room = has_no_room(self._data, needed)
            raise translate(error, message, self._env, no_room=no_room) from error
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise disk_error(error, f"{self._where} could not be {verb}: {error}") from error
