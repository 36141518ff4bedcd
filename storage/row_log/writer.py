"""Writer: what the verbs that write need - a buffer to fill, and somebody to wait for.

Puts fill segments in memory and return. One thread (`row_log.maintenance`) commits what is sealed: when that is a
quarter of the write buffer, when a flush waits, when a put needs room (`row_log.committer`); between commits it
compacts (`row_log.compaction`). It alone writes to LMDB.

After StoreFullError everything stays in memory and the next commit tries again; whoever waits for a commit gets the
error. After any other failure the disk cannot be believed: the writer keeps the error and refuses every later write
until the store is reopened.

Everything is guarded by the store's lock; the thread takes it for what it shares with the verbs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from copy import copy
from dataclasses import dataclass
from threading import RLock

from storage.errors import CorruptionError, StorageError, StoreConfigError, StoreFullError, StoreIOError
from storage.memory import keep_freed
from storage.row_log.committer import Committer, Wanted
from storage.row_log.compaction import Compactor, FullCompaction, Progress
from storage.row_log.group_rows import GroupRows
from storage.row_log.maintenance import Maintenance
from storage.row_log.parts import Parts
from storage.row_log.snapshots import Origin, SnapshotRecord
from storage.row_log.state import State, check_note
from storage.row_log.write_buffer import WriteBuffer, buffer_bytes, rows_that_fit


@dataclass(slots=True)
class Rollback:
    """A way back to a snapshot, for which somebody waits: as `Committer.rollback`; `error` is what went wrong."""

    name: str
    drops: tuple[str, ...]
    end_scans: Callable[[], None]
    ended: bool = False
    error: Exception | None = None


_SLACK_COMMITS = 5  # pages of dead segments are used again about so many commits later


class Writer:
    """See the module's docstring.

    Args:
        parts: of the store, whose log is open for writing, and whose groups have no rows yet.

    Attributes:
        committer, compactor: what the thread does.
    """

    def __init__(self, parts: Parts) -> None:
        self.committer = Committer(parts)
        self.compactor = Compactor(parts, self.committer)
        self._of = parts
        self._failure: StorageError | None = None
        self._full: StoreFullError | None = None
        self._wanted: Wanted | None = None
        self._wanted_rollback: Rollback | None = None
        self._wanted_compaction: FullCompaction | None = None
        self._waiting = 0  # threads that wait for a commit
        self._begun = self._ended = 0  # commits that were tried
        self._made = 0  # the last of them that made what was wanted
        self._maintenance = Maintenance(parts.lock, self._work, f"tiered-emb store {parts.path}")
        keep_freed(parts.config.write_buffer_bytes // 2)  # LMDB's copy of what it commits
        self.committer.recover()
        self._ask_if_due()

    @property
    def working(self) -> RLock:
        """As `Maintenance.working`."""
        return self._maintenance.working

    @property
    def state(self) -> State:
        """The last complete state."""
        return self.committer.state

    # ---- in the threads that write; all of it requires the lock

    def open_buffer(self, group: GroupRows) -> WriteBuffer:
        """The segment of a group that takes the next row; waits for a commit if the write buffer is full.

        Raises:
            StoreFullError, StoreIOError: the commit failed; every row appended so far is still there.
        """
        if group.open is not None and not group.is_full(group.open):
            return group.open
        self._check()
        group.seal(self._of.store)
        group.open = self._next_buffer(group, self.committer.take_number)
        return group.open

    def open_begun(self, group: GroupRows) -> WriteBuffer:
        """The segment of a group that takes the next row of the state that was begun. As `open_buffer`."""
        begun = self.committer.begun
        assert begun is not None
        if group.begun is not None and not group.is_full(group.begun):
            return group.begun
        self._check()
        group.seal_begun(self._of.store)
        group.begun = self._next_buffer(group, begun.take_number)
        return group.begun

    def _next_buffer(self, group: GroupRows, take_number: Callable[[], int]) -> WriteBuffer:
        if self._enough_is_sealed():
            self._maintenance.ask()
        buffer = self._buffer_for(group)
        buffer.begin(group.segments, take_number())
        return buffer

    def _is_wanted(self) -> bool:
        """Whether there is something to commit, or somebody waits: then compaction comes later."""
        return self._waiting > 0 or self._enough_is_sealed()

    def _enough_is_sealed(self) -> bool:
        if any(group.expects_new and group.sealed for group in self._of.groups):
            return True
        sealed = sum(buffer.bytes for group in self._of.groups for buffer, _ in group.sealed)
        return 4 * sealed >= self._of.config.write_buffer_bytes

    def _buffer_for(self, group: GroupRows) -> WriteBuffer:
        """A buffer, within the limit: a spare one, a new one, or one that a commit sets free."""
        size = self._buffer_bytes(group)
        while not group.spare and self._buffered_bytes() + size > self._of.config.write_buffer_bytes // 2:
            for other in self._of.groups:
                self._drop_spare(other)
            if any(g.sealed for g in self._of.groups):
                before = self.committer.commits
                self._await_commit(lambda before=before: self.committer.commits > before)  # type: ignore[misc]
            elif self._of.pins.waiting:
                self._of.lock.wait()  # a reader holds buffers that were committed
            else:
                break  # every group needs one, whatever the limit
        if group.spare:
            return group.spare.pop()
        group.buffered_bytes += size
        return WriteBuffer(group.row_bytes, group.filled_bytes, self._of.log.page_bytes)

    def _buffered_bytes(self) -> int:
        """Host memory of buffers that puts fill or have filled."""
        moved = [buffer for group in self._of.groups for buffer, _ in group.sealed if buffer.moved]
        moved += [group.moving for group in self._of.groups if group.moving is not None]
        return sum(group.buffered_bytes for group in self._of.groups) - sum(buffer.bytes for buffer in moved)

    def _drop_spare(self, group: GroupRows) -> None:
        group.buffered_bytes -= sum(buffer.bytes for buffer in group.spare)
        group.spare.clear()

    def _await_commit(self, done: Callable[[], bool]) -> None:
        """Wait until commits have brought something about. Raises as `open_buffer`.

        What is raised is a copy: the error that is kept must not hold the frames of whoever it was raised in.
        """
        tried = self._begun + 1  # the first try that sees all that there is now
        self._waiting += 1
        try:
            self._maintenance.ask()
            while not done():
                failed = self._failure or (self._full if self._ended >= tried else None)
                if failed is not None:
                    raise copy(failed).with_traceback(None) from failed
                self._of.lock.wait()
        finally:
            self._waiting -= 1

    def flush(self, note: bytes | None) -> None:
        """Commit all rows as a complete state; nothing is written if nothing changed. Raises as `open_buffer`."""
        self._check_none_begun()
        kept = self.state.note if note is None else check_note(bytes(note))
        if not self.committer.uncovered and not self.unwritten and kept == self.state.note:
            return
        self._make(Wanted(kept))

    def _make(self, wanted: Wanted) -> None:
        """Have a commit made that brings about what is wanted, of all that there is now. Raises as `open_buffer`.

        Not any commit that comes will do: one may be under way for an earlier call, with its note and without the rows
        that were put since it began.
        """
        tried, self._wanted = self._begun + 1, wanted
        try:
            self._await_commit(lambda: self._made >= tried)
        finally:
            self._wanted = None

    # ---- many new rows

    def begin_bulk(self, group: GroupRows, rows: int) -> None:
        """See `LmdbStore.bulk`. Requires: the lock. Raises as `open_buffer`."""
        self._check()
        try:
            group.index.reserve(group.index.rows + rows)
        except (MemoryError, OSError, OverflowError) as error:
            group.index.trim()
            raise MemoryError(
                f"there is no memory for an index of {group.index.rows + rows:,} rows of {self._of.path} ({error}): "
                "say fewer at bulk()"
            ) from error
        self._fill_to(group, max(group.usual_bytes, self._of.config.bulk_bytes()))
        group.expects_new = True

    def end_bulk(self, group: GroupRows) -> None:
        """All is as it was before `begin_bulk`. Requires: the lock."""
        group.expects_new = False
        group.index.trim()
        self._fill_to(group, group.usual_bytes)

    def _fill_to(self, group: GroupRows, filled: int) -> None:
        if group.filled_bytes != filled:
            group.seal(self._of.store)
            self._drop_spare(group)
            group.filled_bytes = filled

    # ---- snapshots

    @property
    def snapshots(self) -> dict[str, SnapshotRecord]:
        """Named snapshots, oldest first."""
        return self.committer.snapshots

    def snapshot(
        self, name: str, note: bytes | None, drops: Collection[str], origin: Origin | None = None
    ) -> SnapshotRecord:
        """Make a complete state of all rows there are and keep it under a name; let others go.

        Raises as `open_buffer`.
        """
        self._check_none_begun()
        kept = self.state.note if note is None else check_note(bytes(note))
        self._make(Wanted(kept, name, origin, tuple(drops)))
        return self.snapshots[name]

    def begin_state(self, rows: Mapping[int, int]) -> None:
        """Begin a state: all that was put so far, and at most so many `rows` of each group given to it later."""
        self._check_none_begun()
        # at the least size that they will have, whatever `bulk` begins or ends meanwhile
        groups = [(self._of.groups[number], count) for number, count in rows.items()]
        self.committer.begin(sum(_segments_for(group, count, group.usual_bytes) for group, count in groups))

    def complete_state(self, note: bytes | None, name: str | None, drops: Collection[str]) -> None:
        """Make the state that was begun durable, keep it under a name, let snapshots go. Raises as `open_buffer`."""
        self._check()
        kept = self.state.note if note is None else check_note(bytes(note))
        self._make(Wanted(kept, name, None, tuple(drops), begun=True))

    def drop_snapshots(self, names: Collection[str]) -> None:
        """Let snapshots go; what only they held is deleted with the next state. Raises as `open_buffer`."""
        self._check()
        self._make(Wanted(drops=tuple(names)))

    def rollback(self, name: str, drops: Collection[str], end_scans: Callable[[], None]) -> None:
        """As `Committer.rollback`."""
        self._check_none_begun()
        work = self._wanted_rollback = Rollback(name, tuple(drops), end_scans)
        try:
            self._await_commit(lambda: work.ended)
        finally:
            self._wanted_rollback = None
        if work.error is not None:
            raise work.error

    def compact(self, progress: Progress, end_scans: Callable[[], None]) -> None:
        """Move every row that shares a segment with dead ones, and delete the segments.

        Beside reading processes dead segments are deleted by later commits.

        Args:
            end_scans: called under the lock before rows move.

        Raises:
            StoreFullError, StoreIOError: as `open_buffer`.
            Exception: whatever `progress` raises.
        """
        self.flush(None)
        work = self._wanted_compaction = FullCompaction(progress, end_scans)
        try:
            self._await_commit(lambda: work.ended)
        except BaseException:
            work.cancelled, self._wanted_compaction = True, None
            raise
        if work.error is not None:
            raise work.error
        for _ in range(2):  # what is dead at the first state is deleted by the second one at the latest
            self._make(Wanted(self.state.note))

    def hold(self, scan: object) -> None:
        """Move no rows until `end_scan`; segments have their last numbers from now on, by which a scan knows them."""
        self.compactor.holds.add(scan)
        for group in self._of.groups:
            group.seal_moving(self._of.store, self.committer.take_number)

    def end_scan(self, scan: object) -> None:
        """A scan is over, for which compaction may have waited."""
        self.compactor.holds.discard(scan)
        self._ask_if_due()

    def _ask_if_due(self) -> None:
        """Have compaction begin if nobody else would bring it about."""
        with self._of.lock:
            if self.compactor.is_due():
                self._maintenance.ask()

    def close(self) -> None:
        """Flush, unless the writer has failed; then say so if rows are lost by that. Raises as `open_buffer`."""
        self.compactor.holds.add(self)
        self.committer.abandon()
        try:
            for group in self._of.groups:
                group.seal(self._of.store)
            wanted = self._failure is None or self.unwritten  # moved rows are on disk where they were
            for group in self._of.groups:
                group.seal_moving(self._of.store, self.committer.take_number)
            if wanted:
                self.flush(None)
        except BaseException:
            self.compactor.holds.discard(self)
            raise

    def stop(self) -> None:
        """End the thread, without a flush. Requires: not the lock."""
        self._maintenance.stop()

    def save_index(self) -> None:
        """Leave the index in a file, for the next open. Requires: `close` and `stop` were called, nobody reads."""
        if self._failure is None:
            self.compactor.forget()
            self.committer.save_index()

    def distrust(self) -> None:
        """Write nothing more: a verb was cut short, and nobody knows where."""
        with self._of.lock:
            self._failure = StoreIOError("it was interrupted twice in the middle of a verb")

    def _check(self) -> None:
        if self._failure is not None:
            raise StoreIOError(
                f"{self._of.path} failed before ({self._failure}); what was committed until then is on disk: "
                "close the store, reopen it and put the rows again"
            ) from self._failure

    def _check_none_begun(self) -> None:
        """Refuse what makes a state while another one is begun."""
        self._check()
        if self.committer.begun is not None:
            raise StoreConfigError(
                f"{self._of.path} has begun a state that is not complete: complete_state() or abandon_state() first"
            )

    @property
    def unwritten(self) -> bool:
        """Whether rows exist that no commit has made durable."""
        return any(group.sealed or group.open_rows for group in self._of.groups)

    # ---- in the maintenance thread; takes the lock

    def _work(self) -> float | None:
        """One round: a commit if there is something to commit, then some compaction."""
        try:
            self._roll_back()
            full = self._commit()
            with self._of.lock:
                self._full, self._ended = full, self._begun
                self._of.lock.notify_all()
            return self._compact() if full is None else None
        except StoreFullError:
            return None  # of compaction, for which nobody waits: it goes on when something else has been committed
        except Exception as error:  # kept, and raised by the next verb that writes
            failure = error if isinstance(error, StorageError) else StoreIOError(str(error))
            if failure is not error:
                failure.__cause__ = error
            with self._of.lock:
                self._failure = failure
                self._of.lock.notify_all()
            return None

    def _commit(self) -> StoreFullError | None:
        """Commit what there is, and make the state that is wanted, if one is; the error if there is no room."""
        with self._of.lock:
            self._begun += 1
            wanted, failed = self._wanted, self._failure is not None
        if failed:
            return None
        try:
            self.committer.commit(wanted or Wanted())
        except StoreFullError as error:
            return error
        if wanted is not None:
            with self._of.lock:
                self._made = self._begun
                if self._wanted is wanted:  # once is enough, though a round may begin before who waits for it wakes up
                    self._wanted = None
        self.compactor.slack_bytes = _SLACK_COMMITS * self.committer.recent_bytes
        return None

    def _roll_back(self) -> None:
        """Go back to a snapshot, if somebody waits for that."""
        with self._of.lock:
            work, self._wanted_rollback = self._wanted_rollback, None
            if work is None or self._failure is not None:
                return
        try:
            self.committer.rollback(work.name, work.drops, work.end_scans)
            self.compactor.start_over()
        except Exception as error:
            work.error = error
            if not isinstance(error, StoreFullError | StoreConfigError | CorruptionError):  # then nothing has changed
                raise
        finally:
            with self._of.lock:
                work.ended = True
                self._of.lock.notify_all()

    def _compact(self) -> float | None:
        with self._of.lock:
            work, self._wanted_compaction = self._wanted_compaction, None
            if self._failure is not None:
                return None
        if work is not None:
            try:
                self.compactor.run_all(self.state.epoch, work)
            except StoreFullError as error:
                work.error = error
                raise
            finally:
                with self._of.lock:
                    work.ended = True
                    self._of.lock.notify_all()
        return self.compactor.run(self.state.epoch, self._is_wanted)

    # ---- sizes

    def counts(self) -> dict[str, int]:
        """What `StoreStats` counts of writing."""
        moved, committed = self.compactor, self.committer
        return {
            "commits": committed.commits,
            "bytes_written": committed.bytes_written,
            "rows_moved": moved.rows_moved,
            "bytes_moved": moved.bytes_moved,
        }

    def memory_after(self, inserts: int) -> int:
        """As `Store.memory_after`. Requires: the lock."""
        fixed = sum(g.index.memory_bytes + g.index.jump_bytes(inserts) for g in self._of.groups) + 16 * inserts
        lines = sum(g.segments.memory_after(_segments_for(g, inserts, g.filled_bytes)) for g in self._of.groups)
        each = 1 if self.committer.begun is None else 2  # segments that are being filled at once
        one_each = each * sum(self._buffer_bytes(group) for group in self._of.groups)
        buffers = 2 * max(one_each, self._of.config.write_buffer_bytes // 2)
        return fixed + lines + buffers + self.compactor.memory_bytes()

    def _buffer_bytes(self, group: GroupRows) -> int:
        return buffer_bytes(group.filled_bytes, group.row_bytes, self._of.log.page_bytes)


def _segments_for(group: GroupRows, rows: int, filled_bytes: int) -> int:
    """Segments of a size that rows of a group may take, one that is begun already included."""
    return -(-rows // rows_that_fit(filled_bytes, group.row_bytes)) + 1
