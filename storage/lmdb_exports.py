"""Exports and imports, as verbs of an `LmdbStore`, and what bulk loads need. What they are: `storage.export`.

A part of `LmdbStore`, not used by itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, cast

from storage.errors import StoreClosedError, StoreForkedError
from storage.export import ExportReport, ImportReport, export, import_
from storage.row_log.session import Session

if TYPE_CHECKING:
    from storage.lmdb_store import LmdbStore


class Exports:
    """See the module's docstring."""

    _session: Session

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
        return export(
            cast("LmdbStore", self), path, snapshot=snapshot, since=since, compression=compression, progress=progress
        )

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
        return import_(path, cast("LmdbStore", self), name=name, rollback=rollback, progress=progress)

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
        """Around puts of many rows that are new: room in the index at once, larger segments unless the configuration
        names a size, and commits without a pause.

        Raises:
            MemoryError: an index of so many rows more does not fit. Nothing has begun.
        """
        begun = False
        try:
            with self._session.changing() as writer, self._session.lock:
                writer.begin_bulk(self._session.group(group), rows)
                begun = True
            yield
        finally:
            if begun:
                with suppress(StoreClosedError, StoreForkedError), self._session.changing(), self._session.lock:
                    writer.end_bulk(self._session.group(group))
