"""LmdbStore: the Store over a row log in LMDB, for rows that are more than memory holds and must survive.

Rows are appended to segments in memory and readable at once; a thread of the store commits full segments together, and
all of them at a flush, which is one atomic complete state. The same thread moves what is live out of segments that are
mostly dead. Opening reads the ids of all segments and rebuilds the index.

Which rows an open finds depends on `durability`:

- "commit": every row whose segment was committed (put is acknowledged; it is durable once committed, at the latest by
  flush).
- "snapshot": exactly the rows of the last flush. Segments committed since are discarded, so that rows evicted by a
  run that died are not mixed with older ones.

Dead segments are deleted once a complete state no longer needs them, so every state keeps what it needs. With "commit"
the store makes such states by itself; opened as "snapshot" it then has the rows of the last of them.

Threads: any may call any verb. Verbs that write take turns; reading goes on beside them and holds the store's lock only
to look places up (`row_log.group_rows`). Of a batch put by another thread a get may see some rows and not yet others,
each of them whole. Kernels run without the GIL.

Processes: one writer (`row_log.owner`), any number of readers (`read_only=True`), which follow the writer's commits. A
child forked from a writer reads what there was at the fork, or, once the parent has reused the pages, what the parent
has committed; it is refused to write.

A complete state may be kept under a name (`snapshot`), read (`at`), compared (`diff`) and gone back to (`rollback`):
`storage.snapshot`.

Not here: codecs. What is on disk: docs/formats.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal
from uuid import UUID

from storage.errors import (
    CorruptionError,
    SchemaMismatchError,
    StoreChangedError,
    StoreConfigError,
    StoreForkedError,
    StoreFullError,
)
from storage.export import ExportReport, ImportReport, export, import_
from storage.interrupts import Uninterrupted
from storage.row_log.config import StoreConfig
from storage.row_log.group_rows import GroupRows
from storage.row_log.places import NUMBER
from storage.row_log.read_ahead import ReadAhead
from storage.row_log.read_threads import usable_threads
from storage.row_log.session import Session
from storage.row_log.snapshots import Origin, SnapshotRecord, check_name
from storage.row_log.write_buffer import WriteBuffer
from storage.row_log.writer import Writer
from storage.schema import RowSchema
from storage.snapshot import Change, Snapshot, SnapshotView, all_rows, changes
from storage.store import (
    MAX_ID,
    MIN_ID,
    IdRange,
    Mask,
    RowBytes,
    RowIds,
    StoreStats,
    TableRef,
    check_batch,
    check_found,
)

__all__ = ["LmdbStore", "StoreConfig"]

Durability = Literal["commit", "snapshot"]


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
        self.read_only = read_only
        to_state = durability == "snapshot"
        self._rows_read = self._rows_written = self._bytes_read = 0
        self._deletions = int.from_bytes(os.urandom(7), "little")  # no claim of an earlier opening fits
        self.config = config or StoreConfig()
        self._session = Session(self.path, self.config, to_state=to_state, read_only=read_only)
        self._read_ahead = ReadAhead(self._session.lock, partial(_ask, self._session))  # not of this: it would never go

    def close(self) -> None:
        """See `Store.close`."""
        session = self._session
        with Uninterrupted(), session.writing:
            if session.closed:
                return
            writes = session.writer is not None and not session.forked
            try:
                with session.lock:
                    if session.writer is not None and writes:
                        session.writer.close()
            except (StoreFullError, KeyboardInterrupt):
                raise  # still open: the rows are in memory, and are written by the next try
            except BaseException:
                session.release()
                raise
            session.release(flushed=writes)

    def abandon(self) -> None:
        """Let go of everything without a flush: the store opens again as after the death of this process."""
        with Uninterrupted(), self._session.writing:
            if not self._session.closed:
                self._session.release()

    # ---- tables

    def open_table(self, name: str, schema: RowSchema) -> TableRef:
        """See `Store.open_table`; a store open for reading raises StoreMissingError for a table that is not there."""
        session = self._session
        with Uninterrupted(), session.writing, session.lock, session.reading():
            if name not in session.manifest.tables and session.reader is not None:
                session.refresh()  # the writer may have created it and committed nothing since
            if name not in session.manifest.tables:
                session.create_table(name, schema)
            number, group = session.manifest.tables[name]
            stored = session.manifest.groups[group]
            if stored != schema:
                raise SchemaMismatchError(
                    f"table {name!r} of {self.path} holds rows of {stored}, not of {schema}: "
                    "use the stored dimension and optimizer, or another table name"
                )
            return TableRef(name, group, number, schema)

    def tables(self) -> list[TableRef]:
        """All tables there are, by name."""
        session = self._session
        with session.reading(), session.lock:
            if session.reader is not None:
                session.refresh()
            manifest = session.manifest
            return [
                TableRef(name, group, number, manifest.groups[group])
                for name, (number, group) in sorted(manifest.tables.items())
            ]

    # ---- rows

    def get(self, rows: RowIds, out: RowBytes, found: Mask) -> None:
        """See `Store.get`."""
        if self._session.forked:
            self._get_in_child(rows, out, found)
        else:
            self._get(rows, out, found)

    def _get_in_child(self, rows: RowIds, out: RowBytes, found: Mask) -> None:
        """From what was inherited; if the parent has committed, before or meanwhile, from what it has committed."""
        if not self._session.is_overtaken:
            try:
                self._get(rows, out, found)
            except CorruptionError:
                if not self._session.is_overtaken:
                    raise
            if not self._session.is_overtaken:
                return
        self._session.follow_parent()
        self._get(rows, out, found)

    def _get(self, rows: RowIds, out: RowBytes, found: Mask) -> None:
        with self._session.reading():
            group = self._session.group(rows.group)
            check_batch(rows, out, group.row_bytes, written=True)
            check_found(rows, found)
            with self._read_ahead.giving_way(rows):
                group.get(rows, out, found, self.config.read_threads or usable_threads())
            hits = int(found.sum())
            with self._session.lock:
                self._rows_read += hits
                self._bytes_read += hits * group.stride

    def put(self, rows: RowIds, data: RowBytes) -> None:
        """See `Store.put`."""
        with self._session.changing() as writer:
            group = self._session.group(rows.group)
            check_batch(rows, data, group.row_bytes)
            writer.committer.put_bytes += len(rows) * group.row_bytes  # before any of them is committed
            stored = rows.stored
            known = stored.rows if stored is not None and stored.deletions == self._deletions else None
            group.append(rows, data, partial(self._buffer, writer), known)
            self._rows_written += len(rows)

    def delete(self, rows: RowIds) -> None:
        """See `Store.delete`."""
        with self._session.changing() as writer:
            group = self._session.group(rows.group)
            if writer.committer.begun is not None:
                raise StoreConfigError(
                    f"{self.path} has begun a state that is not complete, into which a deleted row could come back: "
                    "complete_state() or abandon_state() first"
                )
            try:
                group.bury(rows, partial(self._buffer, writer))
            finally:
                self._deletions += 1  # afterwards: who has asked before may have been given any of the rows

    def _buffer(self, writer: Writer, group: GroupRows) -> WriteBuffer:
        """As `Writer.open_buffer`, for rows that change right after: scans that go on must not go on after that."""
        buffer = writer.open_buffer(group)
        self._session.end_scans()
        return buffer

    def scan(
        self, group: int, *, table: int | None = None, first_id: int = MIN_ID, last_id: int = MAX_ID
    ) -> Iterator[tuple[RowIds, RowBytes]]:
        """See `Store.scan`; in the order of the log, which reads the disk in sequence.

        Compaction waits for a scan, which waits for nobody: what would bring in work for it ends the scan.
        """
        which = (-1 if table is None else table, first_id, last_id)
        with self._session.scanning() as version:
            with self._session.reading(), self._session.lock:
                rows = self._session.group(group)
                slots = rows.segments.slots()
                numbers = rows.segments.lines[slots, NUMBER]
            for slot, number in zip(slots.tolist(), numbers.tolist(), strict=True):
                yield from self._scan_segment(rows, slot, number, version, which)

    def _scan_segment(
        self, rows: GroupRows, slot: int, number: int, version: int, which: IdRange
    ) -> Iterator[tuple[RowIds, RowBytes]]:
        at = 0
        while at >= 0:
            with self._session.reading(), self._session.lock, self._not_overtaken():
                if self._session.version != version:
                    raise StoreChangedError(f"rows of {self.path} were changed during a scan: scan again")
                if int(rows.segments.lines[slot, NUMBER]) != number:
                    return  # it was dead, and has been deleted
                at, block = rows.live_block(slot, at, which)
            if block is not None:
                yield block

    def flush(self, note: bytes | None = None) -> None:
        """See `Store.flush`."""
        with self._session.changing() as writer, self._session.lock:
            writer.flush(note)

    def compact(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Flush, move every live row that shares a segment with dead ones, and delete the segments; takes a while.

        Ends scans that are going on, as a put would.

        Args:
            progress: called now and then with bytes done and bytes in all, in another thread.

        Raises:
            StoreFullError, StoreIOError: as `put`.
        """
        with self._session.changing() as writer, self._session.lock:
            writer.compact(progress or (lambda done, total: None), self._session.end_scans)

    # ---- snapshots

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

    # ---- a state that is begun, and completed while puts go on

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

    # ---- exports

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        snapshot: str,
        since: str | None = None,
        compression: str = "auto",
        progress: Callable[[int, int], None] | None = None,
    ) -> ExportReport:
        """Write a snapshot, or what changed since an older one, as Parquet files and a manifest into a new directory.

        A reader may do this beside the writer. Takes an index of the snapshot, as `at`, and two blocks of 16 MiB.

        Args:
            path: of the directory; it appears when the export is whole.
            snapshot, since: names. With `since` the export is a delta: rows put and ids deleted after that one.
            compression: "auto" = zstd for columns that it makes an eighth smaller, "zstd" for all, or "none".
            progress: called now and then with bytes of rows done and in all; for a delta the latter is an upper bound.

        Raises:
            StoreConfigError: the path is there, there is no such snapshot, `since` is not older, pyarrow is missing.
            CorruptRowError, CorruptSegmentError: rows are damaged.
            StoreFullError, StoreIOError: the directory could not be written. Nothing is left of it.
        """
        return export(self, path, snapshot=snapshot, since=since, compression=compression, progress=progress)

    def import_(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        rollback: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> ImportReport:
        """Put an export into this store and make a snapshot of it, with the exported name, note and origin.

        All or nothing: what fails is taken back, except that tables may have been created. Other threads' verbs that
        write wait meanwhile; readers see rows come. A full export goes into tables without rows, a delta on top of a
        snapshot of its base's origin after which nothing was changed. If the store also has rows of other tables, the
        snapshot has an origin of its own and no delta follows it.

        Args:
            path: of the export.
            name: of the snapshot; None = as exported.
            rollback: go back first, to the base of a delta, or to where an import began that was cut off. What came
                after is lost, later snapshots included.
            progress: called now and then with bytes done and in all, verifying and putting in counted alike.

        Raises:
            ExportError: the path holds no export; or rows or schemas of the store, or its snapshots, do not fit it.
            CorruptExportError: a file is damaged. Nothing has changed.
            StoreConfigError: the name is taken or no name, pyarrow is missing.
            StoreFullError, StoreIOError, StoreReadOnlyError: as `put`.
        """
        return import_(path, self, name=name, rollback=rollback, progress=progress)

    def changed_since(self, name: str) -> bool:
        """Whether anything was put or deleted after a snapshot, undone since or not. For a writer.

        Raises:
            StoreConfigError: there is no such snapshot.
            StoreReadOnlyError: the store was opened for reading.
        """
        with self._session.changing(), self._session.lock:
            epoch = self._session.snapshot(name).state.epoch
            return any(group.changed_since(epoch) for group in self._session.groups)

    @contextmanager
    def exclusively(self) -> Iterator[None]:
        """Keep other threads' verbs that write waiting. Raises as `put` where nothing may be written."""
        with self._session.writing:
            self._session.writable()
            yield

    @contextmanager
    def bulk(self, group: int, rows: int) -> Iterator[None]:
        """Around puts of many rows that are new: room in the index at once, and larger segments unless the
        configuration names a size."""
        with self._session.changing() as writer, self._session.lock:
            filled = writer.begin_bulk(self._session.group(group), rows)
        try:
            yield
        finally:
            with self._session.writing, self._session.lock:
                if not self._session.closed:
                    writer.end_bulk(self._session.group(group), filled)

    def snapshot_of(self, name: str, note: bytes, origin: Origin | None, *, drop: Collection[str] = ()) -> Snapshot:
        """As `snapshot`, of rows that are another store's state: `origin` says of which; None = of none."""
        return self._snapshot(check_name(name), note, None, drop, origin)

    # ---- hints

    @property
    def deletions(self) -> int:
        """See `HintedStore.deletions`."""
        return self._deletions

    @property
    def waits_for_disk(self) -> bool:
        """See `HintedStore.waits_for_disk`."""
        return any(group.waits_for_disk for group in self._session.groups)

    def will_need(self, rows: RowIds) -> None:
        """See `HintedStore.will_need`; a thread of the store asks for their pages, batch after batch."""
        self._read_ahead.announce(rows)

    # ---- what it is

    @property
    def uuid(self) -> UUID:
        """The store's identity, from its creation on."""
        return self._session.manifest.uuid

    @property
    def note(self) -> bytes:
        """See `Store.note`."""
        with self._session.reading(), self._session.lock:
            return self._session.state.note

    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        session = self._session
        with session.reading(), session.lock:
            reader, lag = session.oldest_reader()
            return StoreStats(
                rows=sum(group.index.rows for group in session.groups),
                rows_read=self._rows_read,
                rows_written=self._rows_written,
                bytes_read=self._bytes_read,
                segments=sum(len(group.segments) for group in session.groups),
                live_bytes=sum(group.index.rows * group.row_bytes for group in session.groups),
                disk_bytes=session.log.disk_bytes,
                memory_bytes=self._memory_bytes(),
                oldest_reader=reader,
                oldest_reader_commits=lag,
                **(session.writer.counts() if session.writer else {}),
            )

    def memory_after(self, inserts: int) -> int:
        """See `Store.memory_after`."""
        session = self._session
        with session.lock:
            session.check_open()
            return session.writer.memory_after(inserts) if session.writer else self._memory_bytes()

    def _memory_bytes(self) -> int:
        return sum(group.memory_bytes + group.buffered_bytes for group in self._session.groups)

    def __enter__(self) -> LmdbStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- checks

    @contextmanager
    def _not_overtaken(self) -> Iterator[None]:
        """Around a block of a scan: in a child it fails if the parent has committed, before or meanwhile."""
        damage = None
        try:
            yield
        except CorruptionError as error:
            if not self._session.is_overtaken:
                raise
            damage = error
        if self._session.is_overtaken:
            raise StoreForkedError(
                f"{self.path} is no longer what it was when this process was forked: "
                "close it here and open it with read_only=True to follow the writer"
            ) from damage


def _ask(session: Session, rows: RowIds) -> None:
    """Have the disk begin to read rows that are announced."""
    with session.reading():
        session.group(rows.group).announce(rows)
