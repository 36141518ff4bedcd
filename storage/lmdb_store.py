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
from collections.abc import Callable, Iterator
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
from storage.interrupts import Uninterrupted
from storage.lmdb_exports import Exports
from storage.lmdb_states import BegunStates, NamedStates
from storage.row_log.config import StoreConfig
from storage.row_log.group_rows import GroupRows
from storage.row_log.places import NUMBER
from storage.row_log.read_ahead import ReadAhead
from storage.row_log.read_threads import usable_threads
from storage.row_log.session import Session
from storage.row_log.write_buffer import WriteBuffer
from storage.row_log.writer import Writer
from storage.schema import RowSchema
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


class LmdbStore(NamedStates, BegunStates, Exports):
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
