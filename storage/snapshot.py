"""Snapshots of an `LmdbStore`: a complete state under a name - to read, to compare with another, to go back to.

A snapshot costs a flush and 8 bytes a segment: rows are never changed in place, so keeping a state is to keep the
segments that it consists of. What later replaces its rows takes space beside them until the snapshot is dropped.

`SnapshotView` reads as of a snapshot. It needs an index of its own, about 12 bytes a row, filled when it is opened at
the speed at which a store opens (about 10 M rows a second); rows are read from the same memory map. In the writing
process its segments stay as long as it is open, also once the snapshot is dropped. In a process that reads, verbs raise
StoreChangedError from then on; a forked child opens the file for itself at its first verb.

`changes` compares two snapshots by epochs, in the newer one's segments: it reads ids of what changed, and of the older
one's segments if something was deleted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
from numba import njit
from numpy.typing import NDArray

from storage.errors import (
    SchemaMismatchError,
    StoreChangedError,
    StoreClosedError,
    StoreForkedError,
    StoreMissingError,
    StoreReadOnlyError,
)
from storage.id_index import seek_place
from storage.row_log.group_rows import GroupRows
from storage.row_log.hashing import mix
from storage.row_log.log import RowLog
from storage.row_log.places import COUNT, place_at, stored_epoch, stored_id, stored_table, stored_tombstone
from storage.row_log.raw import uncounted
from storage.row_log.read_threads import usable_threads
from storage.row_log.recovery import LAST_EPOCH, replay_log, replay_slots, take_rows, verified
from storage.row_log.replay import distinct_ids, mark
from storage.row_log.session import Session
from storage.row_log.snapshots import SnapshotRecord
from storage.schema import RowSchema
from storage.store import (
    MAX_ID,
    MIN_ID,
    Mask,
    RowBytes,
    RowIds,
    StoreStats,
    TableRef,
    check_batch,
    check_found,
)

__all__ = ["Change", "Snapshot", "SnapshotView", "changes"]

_BITS_A_ROW = 16


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A named snapshot, as a store tells of it.

    Attributes:
        name: of the snapshot.
        time_s: when it was made, in seconds of Unix time.
        rows, live_bytes: its rows, and their bytes without any overhead. One too few for each row that was given to a
            state after it was begun and put meanwhile, by who had asked for it before others deleted rows.
        segments: that hold them.
        note: of the state it keeps.
        origin: which state of which store its rows are, "uuid:number"; equal wherever it was copied to.
    """

    name: str
    time_s: float
    rows: int
    live_bytes: int
    segments: int
    note: bytes
    origin: str

    @classmethod
    def of(cls, record: SnapshotRecord) -> Snapshot:
        """What a record says."""
        return cls(
            record.name,
            record.time_us / 1e6,
            record.rows,
            record.live_bytes,
            len(record.segments),
            record.state.note,
            str(record.origin),
        )


@dataclass(frozen=True, slots=True)
class Change:
    """Rows that differ between two snapshots: put since the older one, or there at it and `deleted` since."""

    rows: RowIds
    deleted: Mask


class SnapshotView:
    """Rows as of a snapshot: the verbs of `storage.store.Store` that read. Any thread may call any of them.

    Made by `LmdbStore.at`. Close it, or use it as a context manager.

    Attributes:
        snapshot: what it reads.
    """

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        self._log: RowLog | None = None
        self._checked = -1  # transaction in which the snapshot was seen last
        self._groups: list[GroupRows] = []
        self._filling: dict[int, RLock] = {}  # by process: a child may be forked while a thread fills
        self._rows_read = self._bytes_read = 0
        self._closed = False
        self._record = self._hold(name)
        self.snapshot = Snapshot.of(self._record)
        try:
            with self._reading():
                pass
        except BaseException:
            self.close()
            raise

    def _hold(self, name: str) -> SnapshotRecord:
        """Find the snapshot and keep its segments, at one instant: another thread may drop it."""
        session = self._session
        with session.reading_log(), session.lock:
            record = session.snapshot(name)
            if session.writer is not None and not session.forked:
                session.writer.committer.view(record)
            return record

    def close(self) -> None:
        """Let go of the index and of what the snapshot holds; again does nothing."""
        session, closed = self._session, self._closed
        self._closed = True
        with session.lock:
            self._groups = []
            if not closed and session.writer is not None and not session.forked:
                session.writer.committer.end_view(self._record)

    # ---- verbs

    def open_table(self, name: str, schema: RowSchema) -> TableRef:
        """See `Store.open_table`; StoreMissingError for a table that is not there."""
        with self._reading():
            manifest = self._session.manifest
            if name not in manifest.tables:
                raise StoreMissingError(f"{self._session.path} has no table {name!r}, and a snapshot creates none")
            number, group = manifest.tables[name]
            if manifest.groups[group] != schema:
                raise SchemaMismatchError(
                    f"table {name!r} of {self._session.path} holds rows of {manifest.groups[group]}, not of {schema}"
                )
            return TableRef(name, group, number, schema)

    def tables(self) -> list[TableRef]:
        """All tables there are, by name; those that are younger than the snapshot have no rows in it."""
        with self._reading():
            manifest = self._session.manifest
            return [
                TableRef(name, group, number, manifest.groups[group])
                for name, (number, group) in sorted(manifest.tables.items())
                if group < len(self._groups)
            ]

    def get(self, rows: RowIds, out: RowBytes, found: Mask) -> None:
        """See `Store.get`."""
        with self._reading():
            group = self._group(rows.group)
            check_batch(rows, out, group.row_bytes, written=True)
            check_found(rows, found)
            group.get(rows, out, found, self._session.config.read_threads or usable_threads())
            hits = int(found.sum())
            with self._session.lock:
                self._rows_read += hits
                self._bytes_read += hits * group.stride

    def scan(
        self, group: int, *, table: int | None = None, first_id: int = MIN_ID, last_id: int = MAX_ID
    ) -> Iterator[tuple[RowIds, RowBytes]]:
        """See `Store.scan`. Nothing ends it but the end of the snapshot."""
        which = (-1 if table is None else table, first_id, last_id)
        with self._reading():
            slots = self._group(group).segments.slots().tolist()
        for slot in slots:
            at = 0
            while at >= 0:
                with self._reading():
                    rows = self._group(group)
                    with rows.lock:
                        at, block = rows.live_block(slot, at, which)
                if block is not None:
                    yield block

    @property
    def note(self) -> bytes:
        """The note of the state that the snapshot keeps."""
        return self._record.state.note

    def stats(self) -> StoreStats:
        """Counters since the view was opened, and sizes."""
        with self._reading():
            groups = self._groups
            return StoreStats(
                rows=sum(group.index.rows for group in groups),
                rows_read=self._rows_read,
                bytes_read=self._bytes_read,
                segments=sum(len(group.segments) for group in groups),
                live_bytes=sum(group.index.rows * group.row_bytes for group in groups),
                disk_bytes=self._session.log.disk_bytes,
                memory_bytes=sum(group.memory_bytes for group in groups),
            )

    def memory_after(self, inserts: int) -> int:
        """See `Store.memory_after`; nothing is inserted."""
        return self.stats().memory_bytes

    def put(self, rows: RowIds, data: RowBytes) -> NoReturn:
        """Raises StoreReadOnlyError."""
        self._refuse()

    def delete(self, rows: RowIds) -> NoReturn:
        """Raises StoreReadOnlyError."""
        self._refuse()

    def flush(self, note: bytes | None = None) -> None:
        """Nothing is unwritten here. Raises StoreReadOnlyError if there is a note to keep."""
        if note is not None:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise StoreReadOnlyError(f"snapshot {self._record.name!r} of {self._session.path} is as it was and stays so")

    def __enter__(self) -> SnapshotView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- what they need

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Around what reads: the index is there, and what it leads to stays."""
        session = self._session
        self._check_open()
        if session.forked and session.reader is None and not session.closed:
            session.follow_parent()
        with session.reading(follow=False):
            if session.reader is not None or self._log is not session.log:
                with self._filling.setdefault(os.getpid(), RLock()), session.log.reading() as txn:
                    self._check_there(txn)
                    self._fill(txn)
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"the view of snapshot {self._record.name!r} of {self._session.path} was closed")

    def _check_there(self, txn: Any) -> None:
        """For who only reads: the writer may have dropped the snapshot, and deleted its segments."""
        transaction = self._session.log.transaction(txn)
        if transaction != self._checked or self._log is not self._session.log:
            check_there(self._session, self._record, txn)
            self._checked = transaction

    def _fill(self, txn: Any) -> None:
        session, record = self._session, self._record
        if self._log is session.log:
            return
        groups = groups_of(session, record.rows)
        numbers = record.segments.tolist()
        segments = dict(zip(numbers, session.log.some_segments(txn, numbers), strict=True))
        replay_log(segments, groups, record.state.epoch, session.manifest.uuid.bytes, str(session.path))
        with session.lock:
            self._check_open()
            self._groups, self._log = groups, session.log

    def _group(self, number: int) -> GroupRows:
        with self._session.lock:
            self._check_open()
            if number >= len(self._groups):  # of a table that is younger than the view
                self._session.group(number)  # or of none, which this refuses
                self._groups += groups_of(self._session, 0)[len(self._groups) :]
        if number < 0:
            self._session.group(number)
        return self._groups[number]


def check_there(session: Session, record: SnapshotRecord, txn: Any) -> None:
    """For who only reads: a snapshot that is there in a transaction has its segments as long as that lasts.

    Raises:
        StoreChangedError: it was dropped. In the writing process segments stay as long as somebody holds them.
    """
    if session.reader is not None and session.log.snapshot(txn, record.name) != record:
        raise StoreChangedError(f"snapshot {record.name!r} of {session.path} was dropped while it was read")


def groups_of(session: Session, rows: int) -> list[GroupRows]:
    """Groups without rows for those of a store, to be filled with about so many rows together."""
    with session.lock:
        if session.reader is not None:
            session.refresh()
        manifest, shards = session.manifest, session.config.shards_for(rows)
    groups = [
        GroupRows(number, schema.row_bytes, shards, str(session.path)) for number, schema in enumerate(manifest.groups)
    ]
    for number, group in manifest.tables.values():
        groups[group].add_table(number)
    return groups


# ---- all rows of one, if no others lie between them


def all_rows(session: Session, record: SnapshotRecord) -> Iterator[tuple[RowIds, RowBytes]] | None:
    """Every row of a snapshot, in the order of the log, without an index: None if its segments hold other rows too.

    For who reads all of it, in the writing process, where segments stay where they are. As many rows in its segments
    as are live, and no tombstone: then each is live, and there once.

    Raises:
        CorruptSegmentError: ids are damaged.
    """
    if session.writer is None or session.forked:
        return None
    stored, groups = 0, groups_of(session, 0)
    with session.holding([record]):
        for group, header, address in _verified(session, record, groups):
            group.adopt(header, address)
            stored += header.rows
            if header.tombstones or header.last_epoch > record.state.epoch:
                return None
    return _stored_blocks(session, record, groups) if stored == record.rows else None


def _stored_blocks(
    session: Session, record: SnapshotRecord, groups: list[GroupRows]
) -> Iterator[tuple[RowIds, RowBytes]]:
    """Requires: the segments stay until this is begun, and the snapshot too."""
    with session.holding([record]):
        for group in groups:
            for slot in group.segments.slots().tolist():
                at = 0
                while True:
                    with session.reading():
                        rows, data = group.stored_block(slot, at)
                    if len(rows) == 0:
                        break
                    yield rows, data
                    at += len(rows)


# ---- what changed between two of them


@njit(nogil=True, cache=True)
def _changed(shards: Any, shift: Any, segments: Any, slot: Any, after: Any, tables: Any, ids: Any, deleted: Any) -> Any:
    """Write table numbers, ids and whether they are tombstones of the rows of a segment that the index leads to and
    that are newer than the epoch `after`; how many there are."""
    shards, segments = uncounted(shards), uncounted(segments)
    count = 0
    for at in range(segments[slot, COUNT] & 0xFFFFFFFF):
        place = place_at(slot, at)
        if stored_epoch(segments, place) > after:
            table, id = np.uint32(stored_table(segments, place)), stored_id(segments, place)
            if seek_place(shards, shift, mix(table, id), place) >= 0:
                tables[count], ids[count], deleted[count] = table, id, stored_tombstone(segments, place)
                count += 1
    return count


@njit(nogil=True, cache=True)
def _mark_all(tables: Any, ids: Any, marks: Any) -> None:
    for i in range(len(ids)):
        mark(marks, mix(tables[i], ids[i]))


def changes(session: Session, older: SnapshotRecord | None, newer: SnapshotRecord) -> Iterator[Change]:
    """What differs between two snapshots, in blocks, each id once; `older` None = a store without rows.

    Requires: the segments of both stay while this goes on.

    Raises:
        CorruptSegmentError: ids are damaged.
    """
    after, log = 0 if older is None else older.state.epoch, session.log
    groups = _newer_rows(session, newer, after)
    while groups:
        with session.reading(follow=False):  # not while somebody works on a block, who may close the store meanwhile
            if session.log is not log:
                raise StoreForkedError(f"{session.path} was forked while snapshots were compared: compare them again")
            blocks = _differing(session, older, groups.pop(0), after)
        yield from blocks


def _differing(session: Session, older: SnapshotRecord | None, group: GroupRows, after: int) -> list[Change]:
    """What differs in one group. Requires: a pin."""
    blocks = list(_changed_blocks(group, after))
    gone = RowIds(
        group.group,
        np.concatenate([np.zeros(0, np.uint32), *(block.rows.tables[block.deleted] for block in blocks)]),
        np.concatenate([np.zeros(0, np.int64), *(block.rows.ids[block.deleted] for block in blocks)]),
    )
    was_there = _were_there(session, older, gone)
    ends = np.cumsum([0, *(np.count_nonzero(block.deleted) for block in blocks)])
    for i, block in enumerate(blocks):
        left_out = block.deleted.copy()
        left_out[left_out] = ~was_there[ends[i] : ends[i + 1]]
        blocks[i] = _without(block, left_out)
    return [block for block in blocks if len(block.rows)]


def _without(block: Change, left_out: NDArray[np.bool_]) -> Change:
    """A block less some rows: those that came and went in between."""
    if not left_out.any():
        return block
    kept = ~left_out
    rows = RowIds(block.rows.group, block.rows.tables[kept], block.rows.ids[kept])
    return Change(rows, block.deleted[kept])


def _newer_rows(session: Session, newer: SnapshotRecord, after: int) -> list[GroupRows]:
    """Groups with the segments of a snapshot that have rows newer than an epoch, tombstones in the index."""
    groups = groups_of(session, newer.rows)
    for group, header, address in _verified(session, newer, groups):
        if header.last_epoch > after:
            group.adopt(header, address)
    for group in groups:
        slots = group.segments.slots()
        group.index.reserve(distinct_ids(group.segments.lines, slots))
        take_rows(group, slots, newer.state.epoch)
    return groups


def _verified(session: Session, record: SnapshotRecord, groups: list[GroupRows]) -> Iterator[Any]:
    with session.reading(follow=False), session.log.reading() as txn:
        check_there(session, record, txn)
        numbers = record.segments.tolist()
        segments = dict(zip(numbers, session.log.some_segments(txn, numbers), strict=True))
        yield from verified(segments, groups, session.manifest.uuid.bytes, str(session.path))


def _changed_blocks(group: GroupRows, after: int) -> Iterator[Change]:
    for slot in group.segments.slots().tolist():
        count = int(group.segments.lines[slot, COUNT]) & 0xFFFFFFFF
        tables, ids, deleted = np.empty(count, np.uint32), np.empty(count, np.int64), np.empty(count, np.bool_)
        index = group.index
        n = _changed(index.table, index.shift, group.segments.lines, slot, after, tables, ids, deleted)
        if n:
            yield Change(RowIds(group.group, tables[:n].copy(), ids[:n].copy()), deleted[:n].copy())


def _were_there(session: Session, record: SnapshotRecord | None, some: RowIds) -> NDArray[np.bool_]:
    """Which of some ids a snapshot has a row of."""
    if record is None or len(some) == 0:
        return np.zeros(len(some), np.bool_)
    marks = np.zeros(max(1 << 10, 1 << (_BITS_A_ROW * len(some) - 1).bit_length()) // 64, np.uint64)
    _mark_all(some.tables, some.ids, marks)
    groups = groups_of(session, len(some))
    for group, header, address in _verified(session, record, groups):
        if group.group == some.group:
            group.adopt(header, address)
    group = groups[some.group]
    replay_slots(group, group.segments.slots(), LAST_EPOCH, marks=marks)
    return group.index.find(group.segments.lines, some.tables, some.ids) > 0
