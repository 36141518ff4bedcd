"""Committer: what one commit takes along - sealed segments, complete states, deletion of dead segments.

The order that keeps every promise (design, section 4): new segments are committed, then their addresses published. A
segment is dead at a complete state if that state needs nothing of it; it is deleted by the commit that makes the state
or by a later one, once no reader in this process can still be in it. A state therefore never lacks a segment, and
whatever transaction was the last one that reached the disk, opening finds that state. With durability "commit" the
committer makes a state of its own when dead segments wait for one; it keeps the note of the last flush.

A named snapshot keeps a state: the segments that were needed at it stay for as long as its record is there, or a view
of it is open (`GroupRows.pinned`). Going back to one deletes all other segments, in one transaction.

Numbers: segments are numbered as they are opened, those of moved rows as they are sealed, one counter a store. A row's
epoch is the number of the segment it was first written in, so epochs order all changes of a store; a state's epoch is
the last number given out.

`commit` runs in the maintenance thread alone. It takes the store's lock to collect what it commits and to publish it,
and not while the disk is at work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptSegmentError, StorageError, StoreConfigError, StoreFullError, StoreIOError
from storage.row_log.begun import Begun
from storage.row_log.commits import Totals
from storage.row_log.group_rows import GroupRows
from storage.row_log.index_file import Stamp, save_index
from storage.row_log.log import Commit
from storage.row_log.manifest import INDEX_NAME
from storage.row_log.parts import Parts
from storage.row_log.places import COUNT, NUMBER
from storage.row_log.recovery import LAST_EPOCH, open_log
from storage.row_log.segment import SegmentHeader, is_whole_at, read_header
from storage.row_log.snapshots import Origin, SnapshotRecord
from storage.row_log.state import State
from storage.row_log.undo import check_whole, go_back
from storage.row_log.write_buffer import WriteBuffer

_DEAD_BYTES = 4 << 20  # for which a store with durability "commit" makes a state of its own
_UNCOVERED_SHARE = 8  # and for how large a part of it that no state covers, so that compaction can move it
_MOVED_SHARE = 1 / 64  # of a group that may wait for a segment of moved rows to be full
_GRACE_S = 1.0  # for which readers find what is dead, unless it takes more than this share of the file
_GRACE_SHARE = 16


@dataclass(frozen=True, slots=True)
class Wanted:
    """What somebody waits for a commit to make.

    Attributes:
        note: of a complete state of all rows there are; None = no state.
        name: of a snapshot of that state; None = none.
        origin: of its rows, if another store's.
        drops: snapshots that go.
        begun: whether the state is the one that was begun, and not of all rows there are.
    """

    note: bytes | None = None
    name: str | None = None
    origin: Origin | None = None
    drops: tuple[str, ...] = ()
    begun: bool = False


_NOTHING_WANTED = Wanted()


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one commit takes along: sealed segments, dead ones, a state, a snapshot of it; and snapshots that go."""

    sealed: list[tuple[GroupRows, WriteBuffer, memoryview]]
    dead: list[tuple[GroupRows, int]]
    state: State | None
    totals: Totals
    snapshot: SnapshotRecord | None = None
    drops: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(len(image) for _, _, image in self.sealed)


@dataclass(frozen=True, slots=True)
class _Dead:
    """A segment that states from number `state` on do not need, and since when that is known."""

    state: int
    group: GroupRows
    slot: int
    since: float

    @property
    def bytes(self) -> int:
        return (int(self.group.segments.lines[self.slot, COUNT]) & 0xFFFFFFFF) * self.group.stride


class Committer:
    """See the module's docstring.

    Args:
        parts: of the store, whose log is open for writing.

    Attributes:
        state: the last complete state.
        snapshots: by name, oldest first.
        begun: the state that was begun and is not complete yet; until it is, no other one is made.
        uncovered: whether segments were committed that no state covers.
        commits, bytes_written: since the store was opened.
        put_bytes: of rows put since then; the store counts them.
        recent_bytes: of the largest commits, lately.
    """

    def __init__(self, parts: Parts) -> None:
        self._of = parts
        self.commits = self.bytes_written = self.put_bytes = self.recent_bytes = 0
        self._uncovered_bytes = 0
        self.uncovered = False
        self.begun: Begun | None = None
        self._dead: list[_Dead] = []
        self._highest = 0  # number of a segment committed since the store was opened
        self._viewed: list[SnapshotRecord] = []  # by views that are open
        self._indexed = False  # the index file is that of the log as it is
        with parts.log.reading() as txn:
            self.state = parts.log.state(txn)
            self.snapshots = {snapshot.name: snapshot for snapshot in parts.log.snapshots(txn)}
            self._next_number = max(self.state.epoch, parts.log.last_number(txn)) + 1
            last = parts.log.last_commit(txn)
        self._last_totals = Totals() if last is None else last.totals
        self._put_before = self._last_totals.put_bytes

    def recover(self) -> None:
        """Fill the groups' indexes; if only flushes make states, discard what came after the last one."""
        with self._of.log.reading() as txn:
            last = self.state.epoch if self._of.to_state else LAST_EPOCH
            later, self._indexed = open_log(self._of.log, txn, self._of.groups, last, self._of.store, self._of.path)
        self.uncovered = not self._of.to_state and self._next_number - 1 > self.state.epoch
        if later:  # the state covers their numbers from now on, so that no segment gets one of them again
            self.state = replace(self.state, epoch=self._next_number - 1)
            self._commit_changes(Commit(deletes=tuple(later), state=self.state, went_back=True))
        self._pin()

    def take_number(self) -> int:
        """A number for a segment that is begun. Requires: the lock."""
        number = self._next_number
        self._next_number += 1
        return number

    def commit(self, wanted: Wanted = _NOTHING_WANTED) -> None:
        """Make all sealed segments durable, then publish where they are.

        Args:
            wanted: beside that.

        Raises:
            StoreFullError: no room; call again once there is.
            StoreIOError, CorruptSegmentError: the disk cannot be believed any more.
        """
        with self._of.lock:
            batch = self._take_batch(wanted)
        if not (batch.sealed or batch.dead or batch.state or batch.drops):
            return
        try:
            self._write(batch)
        except StoreFullError:
            with suppress(StorageError):  # what goes wrong here comes again with the next commit
                self._delete_dead()
            raise

    def _write(self, batch: _Batch) -> None:
        segments = tuple((buffer.number, image) for _, buffer, image in batch.sealed)
        deletes = tuple(int(group.segments.lines[slot, NUMBER]) for group, slot in batch.dead)
        made = () if batch.snapshot is None else (batch.snapshot,)
        changes = Commit(segments, deletes, batch.state, batch.totals, drops=batch.drops, snapshots=made)
        self._commit_changes(changes)
        committed = self._read_back(batch)
        with self._of.lock:
            self._publish(batch, committed)

    def _delete_dead(self) -> None:
        """On a full disk: delete what the last state does not need, so that the next commit finds room in the file."""
        with self._of.lock:
            batch = _Batch([], self._deletable(self.state.number), None, self._totals([]))
        if batch.dead:
            self._write(batch)

    def _commit_changes(self, changes: Commit) -> None:
        if self._indexed:  # no longer; the commit takes its token away
            self._indexed = False
            (self._of.path / INDEX_NAME).unlink(missing_ok=True)
        self._of.log.commit(changes, early=any(group.expects_new for group in self._of.groups))

    def _take_batch(self, wanted: Wanted) -> _Batch:
        """What is sealed, and a state if one is wanted; all of it at one instant, so that the state lacks nothing."""
        note = wanted.note
        if note is None and self._needs_state():
            note = self.state.note
        state = None if note is None else self._begun_state(note) if wanted.begun else self._seal_state(note)
        if state is not None and not wanted.begun:
            self._retire_dead(state.number)
        dead = self._deletable(self.state.number if state is None else state.number)
        sealed = [(group, *one) for group in self._of.groups for one in group.sealed]
        snapshot = None
        if state is not None and wanted.name is not None:
            snapshot = self._snapshot(wanted.name, state, wanted.origin)
        return _Batch(sealed, dead, state, self._totals(sealed), snapshot, wanted.drops)

    def _snapshot(self, name: str, state: State, origin: Origin | None) -> SnapshotRecord:
        """The record of a state that is about to be committed."""
        groups, begun = self._of.groups, self.begun
        if begun is None:
            segments, rows = self._needed(), [group.index.rows for group in groups]
        else:
            segments, rows = begun.segments(groups), begun.rows
        live_bytes = sum(count * group.row_bytes for count, group in zip(rows, groups, strict=False))
        own = Origin(UUID(bytes=self._of.store), state.number)
        now = time.time_ns() // 1000
        return SnapshotRecord(name, state, origin or own, now, sum(rows), live_bytes, segments)

    def _needed(self) -> NDArray[np.int64]:
        """Numbers of the segments, ascending, of a state that comes with all that are sealed."""
        found = [np.zeros(0, np.int64), *(group.needed_numbers() for group in self._of.groups)]
        return np.sort(np.concatenate(found))

    def begin(self, segments: int) -> None:
        """Begin a state: all rows put so far, and those that will be given to it in at most so many segments.

        Requires: the lock, and no other state that was begun.
        """
        self._seal_all()
        number = self.state.number + 1
        self._retire_dead(number)
        first, self._next_number = self._next_number, self._next_number + max(1, segments)
        rows = [group.index.rows for group in self._of.groups]
        self.begun = Begun(number, first, self._next_number - 1, self._needed(), rows)

    def _begun_state(self, note: bytes) -> State:
        """The state that was begun. Its rows are sealed, for the commit that it comes with."""
        assert self.begun is not None
        for group in self._of.groups:
            group.seal_begun(self._of.store)
        return State(self.begun.number, self.begun.epoch, note)

    def abandon(self) -> None:
        """Have no state begun: rows that were given to it are rows like others. Requires: the lock."""
        self.begun = None
        for group in self._of.groups:
            group.seal_begun(self._of.store)

    def _pin(self) -> None:
        """Have all segments stay that a snapshot or a view of one holds. Requires: the lock."""
        numbers = self._held([*self.snapshots.values(), *self._viewed])
        for group in self._of.groups:
            group.pin(numbers)

    def _held(self, snapshots: Iterable[SnapshotRecord]) -> NDArray[np.int64]:
        """Numbers of the segments that snapshots hold between them, ascending."""
        return np.unique(np.concatenate([np.zeros(0, np.int64), *(one.segments for one in snapshots)]))

    def view(self, record: SnapshotRecord) -> None:
        """Have the segments of a snapshot stay until `end_view`, whatever becomes of it. Requires: the lock."""
        self._viewed.append(record)
        self._pin()

    def end_view(self, record: SnapshotRecord) -> None:
        """See `view`; as often as that was called. Requires: the lock."""
        at = next(at for at, one in enumerate(self._viewed) if one is record)  # others may view the same one
        del self._viewed[at]
        self._pin()

    def rollback(self, name: str, drops: Collection[str], end_scans: Callable[[], None]) -> None:
        """Go back to a snapshot: all else goes, put since then or not yet committed; `drops` are the later snapshots.

        Requires: nobody waits for anything else.

        Args:
            end_scans: called under the lock before anything changes.

        Raises:
            StoreConfigError: a view of a later snapshot is open.
            StoreFullError: no room; nothing has changed.
            StoreIOError, CorruptSegmentError: as `commit`.
        """
        with self._of.lock, self._of.pins.quiet(self._of.lock):
            record = self.snapshots[name]
            self._check_not_viewed(record.state.number)
            end_scans()
            stay = [one for one in self.snapshots.values() if one.name not in drops]
            kept = self._held([*stay, *self._viewed])
            others = self._others(record, kept)
            state = State(self.state.number + 1, self._next_number - 1, record.state.note)
            totals = self._totals_of(record, kept)
            self._commit_changes(Commit((), others, state, totals, went_back=True, drops=tuple(drops)))
            for group in self._of.groups:
                go_back(group, kept)
            for drop in drops:
                del self.snapshots[drop]
            self._dead.clear()
            self.state, self.uncovered, self._uncovered_bytes, self._last_totals = state, False, 0, totals
            self.commits += 1
            self._pin()

    def _totals_of(self, record: SnapshotRecord, kept: NDArray[np.int64]) -> Totals:
        """What the record of the way back to a snapshot says, of segments with these numbers."""
        slots = [np.flatnonzero(np.isin(group.segments.lines[:, NUMBER], kept)) for group in self._of.groups]
        size = sum(group.bytes_of(some.tolist()) for group, some in zip(self._of.groups, slots, strict=True))
        now = self._totals([])
        return replace(now, live_rows=record.rows, live_bytes=record.live_bytes, segment_bytes=size)

    def _check_not_viewed(self, state: int) -> None:
        """Here and not in the verb: a view may be opened while the verb waits for the thread."""
        for one in self._viewed:
            if one.state.number > state:
                raise StoreConfigError(f"a view of snapshot {one.name!r} of {self._of.path} is open: close it first")

    def _others(self, record: SnapshotRecord, kept: NDArray[np.int64]) -> tuple[int, ...]:
        """Numbers of the segments that are not kept. Those that are, are found whole, and none of `record` is missing.

        Raises:
            CorruptSegmentError: so it is not.
        """
        with self._of.log.reading() as txn:
            there = self._of.log.numbers(txn)
        missing = np.setdiff1d(record.segments, there)
        if len(missing):
            raise CorruptSegmentError(
                f"segment {missing[0]} of snapshot {record.name!r} of {self._of.path} is gone: the data file is damaged"
            )
        for group in self._of.groups:
            check_whole(group, kept)
        return tuple(np.setdiff1d(there, kept).tolist())

    def _deletable(self, number: int) -> list[tuple[GroupRows, int]]:
        """Dead segments that a commit at state `number` deletes.

        Processes that follow recognise rows by the ids that segments store, those of dead ones too, until they have
        taken in what replaced them. So beside readers the dead are kept for `_GRACE_S`, as far as space allows.
        """
        dead = [one for one in self._dead if one.state <= number]
        if self._of.log.has_readers():
            recent, room = time.monotonic() - _GRACE_S, self._of.log.disk_bytes // _GRACE_SHARE
            while dead and dead[-1].since > recent and dead[-1].bytes <= room:
                room -= dead.pop().bytes
        return [(one.group, one.slot) for one in dead]

    def _totals(self, sealed: list[tuple[GroupRows, WriteBuffer, memoryview]]) -> Totals:
        """What the record of a commit says that takes these segments along."""
        before, groups = self._last_totals, self._of.groups
        return Totals(
            put_bytes=self._put_before + self.put_bytes,
            written_bytes=before.written_bytes + sum(len(image) for _, _, image in sealed),
            moved_bytes=before.moved_bytes + sum(len(image) for _, buffer, image in sealed if buffer.moved),
            live_rows=sum(group.index.rows for group in groups),
            live_bytes=sum(group.index.rows * group.row_bytes for group in groups),
            segment_bytes=sum(group.bytes_in_use()[0] for group in groups),
            file_bytes=self._of.log.disk_bytes,
        )

    def _seal_state(self, note: bytes) -> State:
        """The state that all rows put so far make. They are sealed, for the commit that it comes with.

        Rows that are being moved are on disk where they were, and that is kept until the segment they go to is full:
        segments that are not leave holes of odd sizes, when they go, which none that is full fits into.
        """
        self._seal_all()
        return State(self.state.number + 1, self._next_number - 1, note)

    def _seal_all(self) -> None:
        for group in self._of.groups:
            group.seal(self._of.store)
            if group.moved_share > _MOVED_SHARE:
                group.seal_moving(self._of.store, self.take_number)

    def _needs_state(self) -> bool:
        """Whether dead segments, or live ones that should be compacted, wait for a state that no flush makes."""
        if self._of.to_state or self.begun is not None:
            return False
        if self._uncovered_bytes > _DEAD_BYTES:
            in_use = sum(group.bytes_in_use()[0] for group in self._of.groups)
            if self._uncovered_bytes * _UNCOVERED_SHARE > in_use:
                return True
        return sum(group.bytes_of(group.deletable_slots()) for group in self._of.groups) > _DEAD_BYTES

    def _retire_dead(self, number: int) -> None:
        """Have what no longer is needed at a state deleted, as soon as no reader can be in it."""
        for group in self._of.groups:
            for slot in group.deletable_slots():
                group.dying.add(slot)
                self._of.pins.retire(partial(self._bury, number, group, slot))

    def _bury(self, number: int, group: GroupRows, slot: int) -> None:
        self._dead.append(_Dead(number, group, slot, time.monotonic()))

    def _read_back(self, batch: _Batch) -> list[tuple[SegmentHeader, int]]:
        """Headers, verified, and addresses of the segments just committed."""
        numbers, where, committed = [buffer.number for _, buffer, _ in batch.sealed], str(self._of.path), []
        with self._of.log.reading() as txn:
            for number, segment in zip(numbers, self._of.log.some_segments(txn, numbers), strict=True):
                address = segment.ctypes.data
                header = read_header(segment, number, where, whole=is_whole_at(address, number))
                committed.append((header, address))
        return committed

    def _publish(self, batch: _Batch, committed: list[tuple[SegmentHeader, int]]) -> None:
        """Point committed segments into the memory map, let their buffers go, forget deleted ones."""
        for (group, buffer, _), (header, address) in zip(batch.sealed, committed, strict=True):
            group.adopt(header, address, buffer.slot)
            group.sealed.remove(next(one for one in group.sealed if one[0] is buffer))
            self._of.pins.retire(partial(self._let_go, group, buffer))
        for group, slot in batch.dead:
            group.dying.discard(slot)
            group.segments.give_back(slot)
        gone = {(id(group), slot) for group, slot in batch.dead}
        self._dead = [one for one in self._dead if (id(one.group), one.slot) not in gone]
        if batch.state is not None:
            self.state, self.begun = batch.state, None
        for name in batch.drops:
            del self.snapshots[name]
        if batch.snapshot is not None:
            self.snapshots[batch.snapshot.name] = batch.snapshot
        if batch.snapshot is not None or batch.drops:
            self._pin()
        highest = max((buffer.number for _, buffer, _ in batch.sealed), default=0)
        if batch.state is not None:  # one that was begun some time ago covers less than what was committed since
            highest = max(highest, self._highest)
        self._highest = max(highest, self._highest)
        self.uncovered = highest > self.state.epoch or (batch.state is None and self.uncovered)
        self._count(batch)

    def _let_go(self, group: GroupRows, buffer: WriteBuffer) -> None:
        """A buffer that nobody reads any more is a spare one, unless compaction filled it."""
        if buffer.moved:
            group.buffered_bytes -= buffer.bytes
        else:
            group.spare.append(buffer)
        self._of.lock.notify_all()

    def _count(self, batch: _Batch) -> None:
        self.commits += 1
        self.bytes_written += batch.bytes
        self._uncovered_bytes = 0 if batch.state is not None else self._uncovered_bytes + batch.bytes
        self.recent_bytes = max(batch.bytes, self.recent_bytes * 15 // 16)
        self._last_totals = batch.totals

    def save_index(self) -> None:
        """Leave the index in a file, for the next open. Requires: all is committed, and nobody reads or writes."""
        if self._indexed:
            return
        token = os.urandom(16)
        with suppress(StoreFullError, StoreIOError):  # the log has it all; the next open takes longer
            self._of.log.commit(Commit(token=token))
            with self._of.log.reading() as txn:
                stamp = Stamp(self._of.store, token, self._of.log.transaction(txn))
            save_index(self._of.path / INDEX_NAME, self._of.groups, stamp)
