"""LmdbStore: the Store over a row log in LMDB, for rows that are more than memory holds and must survive.

Rows are appended to segments in memory and readable at once; full segments are committed together when the write
buffer is full, and all of them at a flush, which is one atomic complete state. Opening reads the ids of all segments
and rebuilds the index.

Which rows an open finds depends on `durability`:

- "commit": every row whose segment was committed (put is acknowledged; it is durable once committed, at the latest by
  flush).
- "snapshot": exactly the rows of the last flush. Segments committed since are discarded, so that rows evicted by a
  run that died are not mixed with older ones.

Dead segments are deleted one commit after the flush at which they were dead, so every complete state keeps what it
needs.

Threads: one lock around each verb; kernels run without the GIL. Processes: one writer (`row_log.owner`), any number
of readers (`read_only=True`), which follow the writer's commits. A forked child may read what there was at the fork,
and is refused to write.

Not here: compaction, named snapshots, codecs. What is on disk: docs/formats.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Literal
from uuid import uuid4
from weakref import WeakSet

from storage.errors import (
    CorruptionError,
    SchemaMismatchError,
    StorageError,
    StoreChangedError,
    StoreClosedError,
    StoreConfigError,
    StoreForkedError,
    StoreFullError,
    StoreMissingError,
    StoreReadOnlyError,
    disk_error,
)
from storage.row_log.config import StoreConfig
from storage.row_log.group_rows import GroupRows
from storage.row_log.log import RowLog
from storage.row_log.manifest import Manifest, holds_store, load_manifest, sync_directory
from storage.row_log.owner import Owner
from storage.row_log.reader import Reader
from storage.row_log.writer import Writer
from storage.schema import RowSchema, table_number
from storage.store import Mask, RowBytes, RowIds, StoreStats, TableRef, check_batch, check_found

__all__ = ["LmdbStore", "StoreConfig"]

Durability = Literal["commit", "snapshot"]

_OPEN_STORES: WeakSet[LmdbStore] = WeakSet()


class LmdbStore:
    """See the module's docstring, and `storage.store.Store` for the verbs.

    Args:
        path: a directory; created unless it exists or `read_only` is set.
        durability: which rows an open finds and what survives a power cut.
        config: sizes.
        read_only: open beside a writer, or alone, without the right to write.

    Raises:
        NotAStoreError, StoreMissingError, StoreLockedError, CorruptSegmentError, StoreConfigError, StoreFullError,
        StoreIOError:
            as `storage.errors` describes them. A store that should hold rows and does not never opens as an empty one.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        durability: Durability = "commit",
        config: StoreConfig | None = None,
        read_only: bool = False,
    ) -> None:
        if durability not in ("commit", "snapshot"):
            raise StoreConfigError(f"durability={durability!r}: expected 'commit' or 'snapshot'")
        if sys.byteorder != "little":
            raise StoreConfigError(
                "this machine is big endian: the row log's kernels read little-endian bytes in place"
            )
        self.path = Path(os.path.realpath(path))
        self.durability = durability
        self.config = config or StoreConfig()
        self.read_only = read_only
        self._lock = RLock()
        self._pid = os.getpid()
        self._closed = False
        self._version = self._rows_read = self._rows_written = self._bytes_read = 0
        self._groups: list[GroupRows] = []
        self._owner: Owner | None = None
        self._log: RowLog | None = None
        self._writer: Writer | None = None
        self._reader: Reader | None = None
        try:
            self._open()
        except BaseException as error:
            self._release()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise disk_error(error, f"{self.path} could not be opened: {error}") from error
            raise
        _OPEN_STORES.add(self)

    # ---- opening and closing

    def _open(self) -> None:
        exists = holds_store(self.path, self.read_only)
        if not self.read_only:
            self.path.mkdir(parents=True, exist_ok=True)
            self._owner = Owner(self.path)
            exists = holds_store(self.path, self.read_only)  # again, now that nobody else can create one
        self._manifest = load_manifest(self.path) if exists else Manifest(uuid4())
        self._open_log(create=not exists)
        self._add_groups()
        if self.read_only:
            self._start_reading()
        else:
            self._start_writing()

    def _open_log(self, create: bool) -> None:
        to_commit = self.durability == "commit"
        self._log = RowLog(
            self.path, self.config.map_size_bytes, read_only=self.read_only, sync_meta=to_commit, create=create
        )
        if self._owner is not None:
            self._owner.lock_data_file()
        if not create:
            self._log.check_identity(self._manifest.uuid.bytes)
            return
        self._log.create(self._manifest.uuid.bytes)
        sync_directory(self.path.parent)
        self._manifest.save(self.path)

    def _start_writing(self) -> None:
        log = self._opened_log()
        self._writer = Writer(log, self._groups, self.config, self._manifest.uuid.bytes, str(self.path))
        self._writer.recover(to_state=self.durability == "snapshot")
        if log.repaired:
            for group in range(len(self._groups)):
                for _ in self.scan(group):
                    pass

    def _start_reading(self) -> None:
        to_state = self.durability == "snapshot"
        self._reader = Reader(
            self._opened_log(), self._groups, self._refresh, to_state, self._manifest.uuid.bytes, str(self.path)
        )
        with self._reader.view():
            pass

    def _open_in_child(self) -> None:
        """LMDB's environment belongs to the process that opened it; a reader's fork opens one of its own."""
        self._pid = os.getpid()
        self._log, self._reader = None, None
        self._groups.clear()
        self._open_log(create=False)
        self._add_groups()
        self._start_reading()

    def close(self) -> None:
        """See `Store.close`."""
        with self._lock:
            if self._closed:
                return
            try:
                if self._writer is not None and os.getpid() == self._pid:
                    self._writer.close()
            except StoreFullError:
                raise  # still open: the rows are in memory, and are written once there is room
            except BaseException:
                self._release()
                raise
            self._release()

    def abandon(self) -> None:
        """Let go of everything without a flush: the store opens again as after the death of this process."""
        with self._lock:
            if not self._closed:
                self._release()

    def _release(self) -> None:
        """Let go of everything without a flush."""
        self._closed = True
        self._groups = []
        self._writer = self._reader = None
        if self._log is not None:
            self._log.close()
        if self._owner is not None:
            self._owner.close()
        self._log = self._owner = None

    # ---- tables

    def open_table(self, name: str, schema: RowSchema) -> TableRef:
        """See `Store.open_table`; a store open for reading raises StoreMissingError for a table that is not there."""
        with self._lock, self._view():
            if name not in self._manifest.tables and self.read_only:
                self._refresh()  # the writer may have created it and committed nothing since
            if name not in self._manifest.tables:
                self._create_table(name, schema)
            number, group = self._manifest.tables[name]
            stored = self._manifest.groups[group]
            if stored != schema:
                raise SchemaMismatchError(
                    f"table {name!r} of {self.path} holds rows of {stored}, not of {schema}: "
                    "use the stored dimension and optimizer, or another table name"
                )
            return TableRef(name, group, number, schema)

    def _create_table(self, name: str, schema: RowSchema) -> None:
        if self.read_only:
            raise StoreMissingError(f"{self.path} has no table {name!r}, and a store open for reading creates none")
        self._check_writable()
        number = table_number(name)
        taken = [other for other, (n, _) in self._manifest.tables.items() if n == number]
        if taken:
            raise SchemaMismatchError(f"tables {taken[0]!r} and {name!r} share the number {number}: rename one")
        changed = self._manifest.with_table(name, number, schema)
        try:
            changed.save(self.path)
        except OSError as error:
            raise disk_error(error, f"the manifest of {self.path} could not be written: {error}") from error
        self._manifest = changed
        self._add_groups()

    def _add_groups(self) -> None:
        """Have a GroupRows for every group of the manifest."""
        rows = self._opened_log().disk_bytes
        for group in range(len(self._groups), len(self._manifest.groups)):
            row_bytes = self._manifest.groups[group].row_bytes
            shards = self.config.shards_for(rows // row_bytes)
            self._groups.append(GroupRows(group, row_bytes, shards, str(self.path)))
        for number, group in self._manifest.tables.values():
            self._groups[group].add_table(number)

    def _refresh(self) -> None:
        """Take in tables that the writer has created."""
        self._manifest = load_manifest(self.path)
        self._add_groups()

    # ---- rows

    def get(self, rows: RowIds, out: RowBytes, found: Mask) -> None:
        """See `Store.get`."""
        with self._lock, self._view(), self._damage_or_fork():
            group = self._group(rows.group)
            check_batch(rows, out, group.row_bytes, written=True)
            check_found(rows, found)
            group.get(rows, out, found)
            hits = int(found.sum())
            self._rows_read += hits
            self._bytes_read += hits * group.stride

    def put(self, rows: RowIds, data: RowBytes) -> None:
        """See `Store.put`."""
        with self._lock:
            writer = self._check_writable()
            group = self._group(rows.group)
            check_batch(rows, data, group.row_bytes)
            self._version += len(rows) > 0
            group.append(rows, data, writer.open_buffer)
            self._rows_written += len(rows)

    def delete(self, rows: RowIds) -> None:
        """See `Store.delete`."""
        with self._lock:
            writer = self._check_writable()
            self._version += len(rows) > 0
            self._group(rows.group).bury(rows, writer.open_buffer)

    def scan(self, group: int) -> Iterator[tuple[RowIds, RowBytes]]:
        """See `Store.scan`; in the order of the log, which reads the disk in sequence."""
        with self._lock, self._view():
            rows, version = self._group(group), self._rows_version()
            slots = rows.segments.slots().tolist()
        for slot in slots:
            at = 0
            while at >= 0:
                with self._lock, self._view(), self._damage_or_fork():
                    if self._rows_version() != version:
                        raise StoreChangedError(f"rows of {self.path} were changed during a scan: scan again")
                    at, block = rows.live_block(slot, at)
                if block is not None:
                    yield block

    def flush(self, note: bytes | None = None) -> None:
        """See `Store.flush`."""
        with self._lock:
            self._check_writable().flush(note)

    # ---- what it is

    @property
    def note(self) -> bytes:
        """See `Store.note`."""
        with self._lock, self._view():
            return self._writer.state.note if self._writer else self._reader.state.note if self._reader else b""

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        with self._lock, self._view():
            return StoreStats(
                rows=sum(group.index.rows for group in self._groups),
                rows_read=self._rows_read,
                rows_written=self._rows_written,
                bytes_read=self._bytes_read,
                bytes_written=self._writer.bytes_written if self._writer else 0,
                segments=sum(len(group.segments) for group in self._groups),
                live_bytes=sum(group.index.rows * group.row_bytes for group in self._groups),
                disk_bytes=self._opened_log().disk_bytes,
                memory_bytes=self._memory_bytes(),
                commits=self._writer.commits if self._writer else 0,
            )

    def memory_after(self, inserts: int) -> int:
        """See `Store.memory_after`."""
        with self._lock:
            self._check_open()
            return self._writer.memory_after(inserts) if self._writer else self._memory_bytes()

    def _memory_bytes(self) -> int:
        return sum(group.memory_bytes + group.buffered_bytes for group in self._groups)

    def __enter__(self) -> LmdbStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- checks

    def _view(self) -> AbstractContextManager[None]:
        """What reading needs around it: nothing for the writer, a transaction for a reader."""
        self._check_open()
        if self._reader is None:
            return nullcontext()
        if os.getpid() != self._pid:
            self._open_in_child()
        assert self._reader is not None
        return self._reader.view()

    def _rows_version(self) -> int:
        return self._reader.version if self._reader is not None else self._version

    def _group(self, group: int) -> GroupRows:
        if not 0 <= group < len(self._groups):
            raise StoreConfigError(f"group {group}: {self.path} has {len(self._groups)} groups; open a table first")
        return self._groups[group]

    def _opened_log(self) -> RowLog:
        assert self._log is not None
        return self._log

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"{self.path} was closed")

    def _check_writable(self) -> Writer:
        self._check_open()
        if self._writer is None:
            raise StoreReadOnlyError(f"{self.path} was opened with read_only=True")
        if os.getpid() != self._pid:
            raise StoreForkedError(
                f"{self.path} was opened by process {self._pid}, of which this one ({os.getpid()}) is a fork: "
                "write there, or close it before forking"
            )
        return self._writer

    @contextmanager
    def _damage_or_fork(self) -> Iterator[None]:
        try:
            yield
        except CorruptionError as error:
            if os.getpid() == self._pid:
                raise
            raise StoreForkedError(
                f"{self.path} is no longer what it was when this process was forked ({error}): "
                "open the store here with read_only=True to follow the writer"
            ) from error


def _after_fork_in_child() -> None:
    """A lock may be held by a thread that this process does not have, and the owner's descriptors are the parent's."""
    for store in list(_OPEN_STORES):
        store._lock = RLock()
        if store._owner is not None:
            store._owner.let_go()


os.register_at_fork(after_in_child=_after_fork_in_child)
