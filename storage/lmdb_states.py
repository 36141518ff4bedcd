"""States of an `LmdbStore`, as verbs: kept by name, read, compared, gone back to; and begun, to be completed later.

What they are: `storage.snapshot`, `storage.row_log.begun`. The classes here are parts of `LmdbStore`, not used by
themselves; threads and processes are as there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

from storage.errors import StoreConfigError
from storage.row_log.group_rows import GroupRows
from storage.row_log.session import Session
from storage.row_log.snapshots import Origin, SnapshotRecord, check_name
from storage.row_log.write_buffer import WriteBuffer
from storage.row_log.writer import Writer
from storage.snapshot import Change, Snapshot, SnapshotView, all_rows, changes
from storage.store import RowBytes, RowIds, check_batch


class NamedStates:
    """Snapshots: complete states under names."""

    path: Path
    _session: Session
    _deletions: int

    def snapshot(
        self, name: str, note: bytes | None = None, *, keep_last: int | None = None, drop: Collection[str] = ()
    ) -> Snapshot:
        """Make everything put so far durable as one complete state, and keep it under a name.

        Args:
            name: 1 to 255 bytes of UTF-8, printable; of no other snapshot, unless that one is dropped.
            note: as `flush`.
            keep_last: drop the oldest snapshots beyond so many, this one included; None = keep all.
            drop: names of snapshots to let go in the same transaction; those that are not there are fine.

        Raises:
            StoreConfigError: the name is taken or no name, `keep_last` is below 1, `drop` is one name and not some, the
                note is too large.
            StoreFullError, StoreIOError, StoreReadOnlyError: as `put`; there is no such snapshot then.
        """
        return self._snapshot(check_name(name), note, keep_last, drop, None)

    def _snapshot(
        self, name: str, note: bytes | None, keep_last: int | None, drop: Collection[str], origin: Origin | None
    ) -> Snapshot:
        if keep_last is not None and keep_last < 1:
            raise StoreConfigError(f"keep_last={keep_last!r}: expected 1 or more, or None to keep all")
        if isinstance(drop, str):
            raise StoreConfigError(f"drop={drop!r}: expected names, as [{drop!r}]")
        with self._session.changing() as writer, self._session.lock:
            there = writer.snapshots
            if name in there and name not in drop:
                raise StoreConfigError(
                    f"{self.path} has a snapshot {name!r} already: drop it first, or name it in drop="
                )
            left = [one for one in there if one not in drop]
            extra = left[: max(0, len(left) + 1 - keep_last)] if keep_last is not None else []
            drops = [one for one in there if one in drop or one in extra]
            return Snapshot.of(writer.snapshot(name, note, drops, origin))

    def snapshots(self) -> list[Snapshot]:
        """All snapshots, oldest first."""
        with self._session.reading_log():
            return [Snapshot.of(record) for record in self._session.snapshots()]

    def drop_snapshot(self, name: str) -> None:
        """Let a snapshot go, durably; what only it held is deleted with the next complete state.

        Raises:
            StoreConfigError: there is none of that name.
            StoreFullError, StoreIOError, StoreReadOnlyError: as `put`; it is still there.
        """
        with self._session.changing() as writer, self._session.lock:
            self._session.snapshot(name)
            writer.drop_snapshots([name])

    def at(self, name: str) -> SnapshotView:
        """Read as of a snapshot; close what is returned. Takes about 12 bytes a row, and a second for 10 M rows.

        Raises:
            StoreConfigError: there is none of that name.
            CorruptSegmentError: its segments are damaged.
        """
        return SnapshotView(self._session, name)

    def all_rows(self, name: str) -> Iterator[tuple[RowIds, RowBytes]] | None:
        """Every row of a snapshot once, in blocks, without the index that `at` takes; None where that cannot be told.

        It can in the writing process and if no row of the snapshot's segments was replaced or deleted by then, as after
        an import, a bulk load or `compact`. The snapshot has to stay until the end.

        Raises:
            StoreConfigError: there is none of that name.
            CorruptRowError, CorruptSegmentError: rows are damaged.
        """
        with self._session.reading():
            record = self._session.snapshot(name)
        return all_rows(self._session, record)

    def diff(self, older: str | None, newer: str) -> Iterator[Change]:
        """Ids of the rows that differ between two snapshots, in blocks, each once; `older` None = an empty store.

        A row that was put again as it was differs; one that came and went in between does not.

        Raises:
            StoreConfigError: there is no such snapshot, or `older` is the newer one.
            CorruptSegmentError: segments are damaged.
            StoreChangedError: a snapshot was dropped before the first block was asked for; for who only reads, also
                later.
        """
        with self._session.reading_log():
            before = None if older is None else self._session.snapshot(older)
            after = self._session.snapshot(newer)
        if before is not None and before.state.number > after.state.number:
            raise StoreConfigError(f"snapshot {older!r} of {self.path} is newer than {newer!r}: exchange them")
        return self._changes(before, after)

    def _changes(self, before: SnapshotRecord | None, after: SnapshotRecord) -> Iterator[Change]:
        with self._session.holding([record for record in (before, after) if record is not None]):
            yield from changes(self._session, before, after)

    def rollback(self, name: str, *, drop_later: bool = False) -> None:
        """Go back to a snapshot: everything put or deleted since is gone, also what was never flushed. One transaction.

        Ends scans that are going on, as a put would.

        Args:
            drop_later: also drop the snapshots that are newer, whose rows would be gone.

        Raises:
            StoreConfigError: there is no such snapshot; there are newer ones, and `drop_later` is not set; or a view of
                a newer one is open.
            CorruptSegmentError: its segments are damaged. Nothing has changed.
            StoreFullError, StoreIOError, StoreReadOnlyError: as `put`.
        """
        with self._session.changing() as writer, self._session.lock:
            record = self._session.snapshot(name)
            later = [one.name for one in writer.snapshots.values() if one.state.number > record.state.number]
            if later and not drop_later:
                raise StoreConfigError(
                    f"{self.path} has snapshots newer than {name!r} ({', '.join(map(repr, later[:5]))}), which going "
                    "back would take: drop them, or set drop_later"
                )
            try:
                writer.rollback(name, later, self._session.end_scans)
            finally:
                self._deletions += 1  # afterwards, as `delete`

    def snapshot_of(self, name: str, note: bytes, origin: Origin | None, *, drop: Collection[str] = ()) -> Snapshot:
        """As `snapshot`, of rows that are another store's state: `origin` says of which; None = of none."""
        return self._snapshot(check_name(name), note, None, drop, origin)


class BegunStates:
    """`storage.store.BegunStore`."""

    path: Path
    _session: Session
    _deletions: int
    _rows_written: int

    def begin_state(self, rows: Mapping[int, int]) -> None:
        """See `BegunStore.begin_state`."""
        with self._session.changing() as writer, self._session.lock:
            writer.begin_state({self._session.group(group).group: count for group, count in rows.items()})

    def put_as_begun(self, rows: RowIds, data: RowBytes) -> None:
        """See `BegunStore.put_as_begun`."""
        with self._session.changing() as writer:
            begun, group = writer.committer.begun, self._session.group(rows.group)
            if begun is None:
                raise StoreConfigError(f"{self.path} has no state that was begun: begin_state() first")
            check_batch(rows, data, group.row_bytes)
            writer.committer.put_bytes += len(rows) * group.row_bytes
            before, stored = group.index.rows, rows.stored
            known = stored.rows if stored is not None and stored.deletions == self._deletions else None
            open_begun = partial(self._open_begun, writer)
            group.append(rows, data, open_begun, known, begun.epoch)
            with self._session.lock:
                begun.count(group, group.index.rows - before, rows, known)
            self._rows_written += len(rows)

    def _open_begun(self, writer: Writer, group: GroupRows) -> WriteBuffer:
        buffer = writer.open_begun(group)
        self._session.end_scans()
        return buffer

    def complete_state(
        self, note: bytes | None = None, *, snapshot: str | None = None, drop: Collection[str] = ()
    ) -> None:
        """See `BegunStore.complete_state`; `snapshot` keeps the state under a name, `drop` lets others go."""
        with self._session.changing() as writer, self._session.lock:
            if writer.committer.begun is None:
                raise StoreConfigError(f"{self.path} has no state that was begun: begin_state() first")
            there = writer.snapshots
            if snapshot is not None and check_name(snapshot) in there and snapshot not in drop:
                raise StoreConfigError(f"{self.path} has a snapshot {snapshot!r} already: name it in drop=")
            writer.complete_state(note, snapshot, [name for name in there if name in drop])

    def abandon_state(self) -> None:
        """See `BegunStore.abandon_state`."""
        with self._session.changing() as writer, self._session.lock:
            writer.committer.abandon()
