"""Session: a store directory that is open - its manifest, locks, log and groups, and who writes to them or follows.

Opening goes: is there a store; the right to write (`row_log.owner`); the manifest; the log; then a writer recovers the
groups, or a reader catches up. Releasing goes the other way, once no verb reads any more.

A child forked from this process has neither its threads nor, by LMDB's rules, its environment. From a writer's session
it may read the memory it has inherited, and when the parent has reused the pages `open_in_child` makes a reader of it;
from a reader's session it gets a log of its own at the first verb. It never writes.

The lock guards everything in it and in the groups (`row_log.group_rows`); `writing` is taken before it, by verbs that
write, so that they take turns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import RLock
from uuid import uuid4
from weakref import WeakSet, finalize

from storage.errors import (
    SchemaMismatchError,
    StorageError,
    StoreChangedError,
    StoreClosedError,
    StoreConfigError,
    StoreForkedError,
    StoreMissingError,
    StoreReadOnlyError,
    disk_error,
)
from storage.interrupts import Uninterrupted
from storage.row_log.config import StoreConfig
from storage.row_log.group_rows import GroupRows
from storage.row_log.lock import StoreLock
from storage.row_log.log import RowLog
from storage.row_log.manifest import Manifest, holds_store, load_manifest
from storage.row_log.owner import Owner
from storage.row_log.parts import Parts
from storage.row_log.pins import Pins
from storage.row_log.reader import Reader
from storage.row_log.snapshots import SnapshotRecord
from storage.row_log.state import State
from storage.row_log.writer import Writer
from storage.schema import RowSchema, table_number
from storage.whole_files import sync_directory

_OPEN: WeakSet[Session] = WeakSet()


class Session:
    """See the module's docstring.

    Args:
        path: a directory; created unless it exists or `read_only` is set.
        config: sizes.
        to_state: whether the last complete state is what an open finds, and only a flush makes one.
        read_only: open without the right to write.

    Attributes:
        manifest, groups: what the store holds.
        lock, writing, pins: see the module's docstring.
        version: of the rows; a scan goes on as long as it stays.
        writer, reader: one of them, once it is open; in the child of a writer neither, or a reader.

    Raises:
        As `LmdbStore`.
    """

    def __init__(self, path: Path, config: StoreConfig, *, to_state: bool, read_only: bool) -> None:
        self.path = path
        self.config = config
        self.lock = StoreLock()
        self.writing = RLock()
        self.pins = Pins()
        self.groups: list[GroupRows] = []
        self.closed = False
        self.version = 0
        self.writer: Writer | None = None
        self.reader: Reader | None = None
        self._to_state = to_state
        self._read_only = read_only
        self._opener = self._pid = os.getpid()
        self._transaction_at_fork = -1
        self._log: RowLog | None = None
        self._owner: Owner | None = None
        self._dropped: finalize[..., Session] | None = None
        try:
            self._open()
        except BaseException as error:
            self.release()
            if isinstance(error, OSError) and not isinstance(error, StorageError):
                raise disk_error(error, f"{path} could not be opened: {error}") from error
            raise
        _OPEN.add(self)

    def _open(self) -> None:
        exists = holds_store(self.path, self._read_only)
        if not self._read_only:
            self.path.mkdir(parents=True, exist_ok=True)
            self._owner = Owner(self.path)
            exists = holds_store(self.path, self._read_only)  # again, now that nobody else can create one
        self.manifest = load_manifest(self.path) if exists else Manifest(uuid4())
        self._open_log(create=not exists)
        self._add_groups()
        if self._read_only:
            self._start_reading()
        else:
            self._start_writing()

    def _open_log(self, create: bool) -> None:
        read_only = self._read_only or self.forked
        self._log = RowLog(
            self.path, self.config.map_size_bytes, read_only=read_only, sync_meta=not self._to_state, create=create
        )
        if self._owner is not None and not read_only:
            self._owner.lock_data_file()
        if not create:
            self._log.check_identity(self.manifest.uuid.bytes)
            return
        self._log.create(self.manifest.uuid.bytes)
        sync_directory(self.path.parent)
        self.manifest.save(self.path)

    def _start_writing(self) -> None:
        self.writer = Writer(self._parts())
        self._dropped = finalize(self, self.writer.stop)  # for a store that is dropped without close()

    def _start_reading(self) -> None:
        self.reader = Reader(self._parts(), self.refresh)
        with self.reader.view():
            pass

    def _parts(self) -> Parts:
        store = self.manifest.uuid.bytes
        return Parts(self.log, self.groups, self.config, self.lock, self.pins, store, self.path, self._to_state)

    @property
    def log(self) -> RowLog:
        """The log. Requires: the session is not closed."""
        assert self._log is not None
        return self._log

    # ---- forks

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the store."""
        return os.getpid() != self._opener

    def open_in_child(self) -> None:
        """In a child: let go of what the parent has open, and open the store for reading. Requires: the lock."""
        self._pid = os.getpid()
        self.version += 1
        if self._log is not None:
            self._log.close()  # the parent keeps its own
        self._log = self.reader = self.writer = None
        self.groups.clear()
        self._open_log(create=False)
        self._add_groups()
        self._start_reading()

    def remember_transaction(self) -> None:
        """Before a fork: what a child goes by to tell whether its parent has committed since. Requires: the lock."""
        if self._log is not None and self.writer is not None:
            self._transaction_at_fork = self._log.newest_transaction()

    @property
    def is_overtaken(self) -> bool:
        """In a writer's child that reads what it has inherited: whether the parent has committed since the fork.

        Then it may have reused pages, and a place may lead to a whole row of another id.
        """
        if not self.forked or self.reader is not None or self._log is None:
            return False
        return self._log.newest_transaction() != self._transaction_at_fork

    def follow_parent(self) -> None:
        """In a child: make a reader of it, that follows the parent's commits."""
        with self.lock:
            if self.reader is None:
                self.lock.wait_for(lambda: not self.pins.held)
                self.open_in_child()

    def forget_threads(self) -> None:
        """In a child: the locks may be held by threads that it does not have, and the owner is the parent."""
        self.lock, self.writing, self.pins = StoreLock(), RLock(), Pins()
        if self._dropped is not None:
            self._dropped.detach()
        for group in self.groups:
            group.lock = self.lock
        if self._owner is not None:
            self._owner.let_go()

    # ---- verbs' needs

    @contextmanager
    def reading(self, follow: bool = True) -> Iterator[None]:
        """What reading needs around it: a pin, and for a reader a transaction, in which it has caught up if it is to
        `follow`."""
        with Uninterrupted(), ExitStack() as view:
            with self.lock:
                self.lock.wait_for(lambda: self.pins.may_enter)
                self.check_open()
                if self.reader is not None:
                    if os.getpid() != self._pid:
                        self.open_in_child()
                    view.enter_context(self.reader.view(follow))
                pin = self.pins.enter()
            try:
                yield
            finally:
                with self.lock:
                    self.pins.leave(pin)
                    self.lock.notify_all()

    @contextmanager
    def reading_log(self) -> Iterator[None]:
        """As `reading`, for who reads through LMDB: in a child that is a log of its own."""
        if self.forked and self.reader is None and not self.closed:
            self.follow_parent()
        with self.reading():
            yield

    @contextmanager
    def scanning(self) -> Iterator[int]:
        """Keep rows from moving: compaction waits, a reader stays at one commit; the version that is kept."""
        scan, process = object(), os.getpid()
        with self.reading(), self.lock:
            writer, reader = None if self.forked else self.writer, self.reader
            version = self.version
            if writer is not None:
                writer.hold(scan)
            if reader is not None:
                reader.hold()
        try:
            yield version
        finally:
            if os.getpid() == process:  # a child inherits scans and holds nothing with them
                with self.lock:
                    if writer is not None:
                        writer.end_scan(scan)
                    if reader is not None:
                        reader.let_go()

    @contextmanager
    def changing(self) -> Iterator[Writer]:
        """What writing needs around it: a turn, and no interrupt before it is done. Raises as `writable`.

        A second Ctrl-C does interrupt, for a disk that hangs; nothing is written after that.
        """
        with Uninterrupted(), self.writing:
            writer, breaks = self.writable(), Uninterrupted.breaks
            try:
                yield writer
            finally:
                if Uninterrupted.breaks != breaks:
                    writer.distrust()

    def end_scans(self) -> None:
        """Have all scans fail that go on: rows change. Requires: the lock."""
        self.version += 1
        if self.writer is not None:
            self.writer.compactor.holds.clear()

    def snapshots(self) -> list[SnapshotRecord]:
        """All named snapshots there are, oldest first. Requires: `reading_log`."""
        if self.writer is not None and not self.forked:
            with self.lock:
                return list(self.writer.snapshots.values())
        with self.log.reading() as txn:
            return self.log.snapshots(txn)

    def snapshot(self, name: str) -> SnapshotRecord:
        """A named snapshot. Requires: `reading_log`.

        Raises:
            StoreConfigError: there is none of that name.
        """
        found = self.snapshots()
        for record in found:
            if record.name == name:
                return record
        there = ", ".join(repr(record.name) for record in found[-5:]) or "none"
        raise StoreConfigError(f"{self.path} has no snapshot {name!r}; the newest there are: {there}")

    @contextmanager
    def holding(self, records: Sequence[SnapshotRecord]) -> Iterator[None]:
        """Keep the segments of snapshots: in a writer they stay, a reader stays in one transaction.

        Raises:
            StoreChangedError: in a writer, if one was dropped already.
        """
        process = os.getpid()
        with self.reading_log(), self.lock:
            writer, reader = None if self.forked else self.writer, self.reader
            if reader is None:
                self._check_kept(records)
            else:
                reader.hold()
            for record in records:
                if writer is not None:
                    writer.committer.view(record)
        try:
            yield
        finally:
            if os.getpid() == process:  # a child inherits what is held and holds nothing with it
                with self.lock:
                    if reader is not None:
                        reader.let_go()
                    for record in records:
                        if writer is not None:
                            writer.committer.end_view(record)

    def _check_kept(self, records: Sequence[SnapshotRecord]) -> None:
        there = self.snapshots()
        for record in records:
            if record not in there:
                raise StoreChangedError(f"snapshot {record.name!r} of {self.path} was dropped while it was read")

    @property
    def state(self) -> State:
        """The last complete state."""
        of = self.writer or self.reader
        assert of is not None
        return of.state

    def oldest_reader(self) -> tuple[int, int]:
        """As `RowLog.oldest_reader`; (0, 0) in a child, which knows of none."""
        return (0, 0) if self.forked else self.log.oldest_reader()

    def check_open(self) -> None:
        """Raises StoreClosedError after `release`."""
        if self.closed:
            raise StoreClosedError(f"{self.path} was closed")

    def writable(self) -> Writer:
        """The writer.

        Raises:
            StoreClosedError, StoreReadOnlyError, StoreForkedError: there is none for this process.
        """
        self.check_open()
        if self._read_only:
            raise StoreReadOnlyError(f"{self.path} was opened with read_only=True")
        if self.forked:
            raise StoreForkedError(
                f"{self.path} was opened by process {self._opener}, of which this one ({os.getpid()}) is a fork: "
                "write there, or close it before forking"
            )
        assert self.writer is not None
        return self.writer

    # ---- tables

    def create_table(self, name: str, schema: RowSchema) -> None:
        """Put a new table into the manifest. Raises as `Store.open_table`."""
        if self._read_only:
            raise StoreMissingError(f"{self.path} has no table {name!r}, and a store open for reading creates none")
        self.writable()
        number = table_number(name)
        taken = [other for other, (n, _) in self.manifest.tables.items() if n == number]
        if taken:
            raise SchemaMismatchError(f"tables {taken[0]!r} and {name!r} share the number {number}: rename one")
        changed = self.manifest.with_table(name, number, schema)
        try:
            changed.save(self.path)
        except OSError as error:
            raise disk_error(error, f"the manifest of {self.path} could not be written: {error}") from error
        self.manifest = changed
        self._add_groups()

    def refresh(self) -> None:
        """Take in tables that the writer has created."""
        self.manifest = load_manifest(self.path)
        self._add_groups()

    def group(self, number: int) -> GroupRows:
        """A group by its number.

        Raises:
            StoreConfigError: there is none.
        """
        if not 0 <= number < len(self.groups):
            raise StoreConfigError(f"group {number}: {self.path} has {len(self.groups)} groups; open a table first")
        return self.groups[number]

    def _add_groups(self) -> None:
        """Have a GroupRows for every group of the manifest."""
        size = self.log.disk_bytes
        for group in range(len(self.groups), len(self.manifest.groups)):
            row_bytes = self.manifest.groups[group].row_bytes
            shards, filled = self.config.shards_for(size // row_bytes), self.config.filled_bytes(row_bytes, size)
            self.groups.append(GroupRows(group, row_bytes, shards, str(self.path), self.lock, filled))
        for number, group in self.manifest.tables.values():
            self.groups[group].add_table(number)

    # ---- the end

    def release(self, *, flushed: bool = False) -> None:
        """Let go of everything without a flush, once nobody reads any more. Again it does nothing.

        Args:
            flushed: whether the writer was closed, so that its index may be kept.
        """
        if self._dropped is not None:
            self._dropped.detach()
        if self.writer is not None and not self.forked:
            self.writer.stop()
        with self.lock:
            self.closed = True
            try:
                self.lock.wait_for(lambda: not self.pins.held)
                if flushed and self.writer is not None:
                    self.writer.save_index()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        if self.reader is not None:
            self.reader.close()
        self.groups = []
        self.writer = self.reader = None
        if self._log is not None:
            self._log.close()
        if self._owner is not None:
            self._owner.close()
        self._log = self._owner = None


_forking = RLock()
_working_at_fork: list[RLock] = []  # of their writers
_LONGEST_ROUND_S = 10.0  # of maintenance; if it takes longer it may wait for who forks, and a child is the one to wait
_at_fork: list[Session] = []  # whose locks are held while the process forks, so that a child finds nothing half changed


def _before_fork() -> None:
    _forking.acquire()
    _at_fork[:] = sorted(_OPEN, key=id)
    for session in _at_fork:
        if session.writer is not None and session.writer.working.acquire(timeout=_LONGEST_ROUND_S):
            _working_at_fork.append(session.writer.working)
        session.lock.acquire()
        session.remember_transaction()


def _let_work() -> None:
    while _working_at_fork:
        _working_at_fork.pop().release()


def _after_fork_in_parent() -> None:
    _let_work()
    while _at_fork:
        _at_fork.pop().lock.release()
    _forking.release()


def _after_fork_in_child() -> None:
    _let_work()
    while _at_fork:
        _at_fork.pop().forget_threads()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
