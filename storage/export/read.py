"""Import: an export into a store, all of it or nothing.

Every file is read once and its checksum compared before anything changes. Then the state of the store is kept as
snapshot `GUARD`, rows and deletions go in, and one transaction makes the exported snapshot and lets the guard go. What
fails in between goes back to the guard. After a crash the guard is still there: with durability "snapshot" the next
open finds the store as it was, with "commit" it may find some of the rows, and the next import says so.

The snapshot gets the exported origin, so that a delta that follows it finds its base here as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from storage.errors import CorruptExportError, ExportError, StorageError, StoreConfigError, disk_error
from storage.export.ahead import ahead
from storage.export.columns import Part, arrow, rows_of
from storage.export.manifest import DELTA, FULL, ExportFile, ExportManifest, Progress, load_export, verify_files
from storage.interrupts import Uninterrupted
from storage.row_log.snapshots import check_name
from storage.snapshot import Snapshot
from storage.store import Mask, RowBytes, RowIds, TableRef

if TYPE_CHECKING:
    from storage.lmdb_store import LmdbStore

GUARD = "before an import"

_PART_ROWS, _PART_BYTES = 16_384, 1 << 21
_PARTS_AHEAD = 8  # what is put while the next row group is decoded


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import has brought.

    Attributes:
        path: the export.
        kind: "full" or "delta".
        snapshot, origin: what was made of it here.
        rows, deletions: applied.
        row_bytes: of the rows as put.
        file_bytes: read.
    """

    path: str
    kind: str
    snapshot: str
    origin: str
    rows: int
    deletions: int
    row_bytes: int
    file_bytes: int


def import_(
    path: str | os.PathLike[str],
    store: LmdbStore,
    *,
    name: str | None = None,
    rollback: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """As `LmdbStore.import_`."""
    arrow()
    try:
        manifest = load_export(path)
        work = _Import(Path(path), manifest, store, check_name(name or manifest.snapshot), progress)
        with store.exclusively():
            work.check(rollback)
            verify_files(work.path, manifest, work.verified, store.config.read_threads)
            return work.run(rollback)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise disk_error(error, f"the export {path} could not be read: {error}") from error


class _Import:
    """One run of `import_`. Requires: nobody else writes meanwhile."""

    def __init__(
        self, path: Path, manifest: ExportManifest, store: LmdbStore, name: str, progress: Progress | None
    ) -> None:
        self.path = path
        self._manifest, self._store, self._name = manifest, store, name
        self._progress = progress or (lambda done, total: None)
        self._refs: dict[str, TableRef] = {}
        self._row_bytes = 0
        self._alone = True  # whether the store will hold what the export's snapshot holds and nothing else
        self._back: str | None = None  # the snapshot to go back to first

    def verified(self, done: int, total: int) -> None:
        """Progress of the first reading: half of the whole."""
        self._progress(done, 2 * total)

    # ---- before anything changes

    def check(self, rollback: bool) -> None:
        """Refuse what does not fit. Raises as `LmdbStore.import_`."""
        there = self._store.snapshots()
        self._check_tables()
        self._check_guard(there, rollback)
        if self._manifest.kind == DELTA:
            self._check_base(there, rollback)
        elif self._back is None:
            self._check_empty()
        kept = there if self._back is None else there[: [one.name for one in there].index(self._back) + 1]
        if self._name == GUARD:
            raise StoreConfigError(f"the name {GUARD!r} is kept for what imports need: import under another one")
        if self._name in [one.name for one in kept]:
            raise StoreConfigError(
                f"{self._store.path} has a snapshot {self._name!r} already: drop it first, or import under another name"
            )

    def _check_tables(self) -> None:
        stored = {table.name: table.schema for table in self._store.tables()}
        for name, group in self._manifest.tables.items():
            schema = self._manifest.groups[group]
            if name in stored and stored[name] != schema:
                raise ExportError(
                    f"table {name!r} of {self._store.path} holds rows of {stored[name]}, but the export {self.path} "
                    f"has rows of {schema}: import into a store without that table"
                )

    def _check_guard(self, there: list[Snapshot], rollback: bool) -> None:
        """An import that was cut off leaves its guard; if nothing came after it, nothing has happened."""
        if GUARD not in [one.name for one in there]:
            return
        if rollback:
            self._back = GUARD
        elif self._store.changed_since(GUARD):
            raise ExportError(
                f"an import into {self._store.path} was cut off. Its rows, and whatever was put after it began, go if "
                f"you go back first (rollback), or by hand to snapshot {GUARD!r}; to keep all of it, drop that snapshot"
            )

    def _check_base(self, there: list[Snapshot], rollback: bool) -> None:
        base, seen = self._manifest.base_origin, {one.origin: one for one in there if one.name != GUARD}
        found = seen.get(str(base))
        what = f"{self.path} is what changed from snapshot {self._manifest.base!r} ({base}) on"
        if found is None:
            newest = ", ".join(f"{one.name!r} ({one.origin})" for one in list(seen.values())[-3:]) or "none"
            raise ExportError(
                f"{what}, which {self._store.path} does not have: import that first. Its newest snapshots: {newest}"
            )
        if rollback:
            self._back = found.name
        elif self._store.changed_since(found.name):
            raise ExportError(
                f"{what}, and {self._store.path} was changed after its snapshot {found.name!r}: go back to that "
                "(rollback), which loses what came after, or import the delta into a store that still is at it"
            )

    def _check_empty(self) -> None:
        refs = [table for table in self._store.tables() if table.name in self._manifest.tables]
        self._alone = self._store.stats().rows == 0
        for ref in refs if not self._alone else []:
            if next(self._store.scan(ref.group, table=ref.number), None) is not None:
                raise ExportError(
                    f"table {ref.name!r} of {self._store.path} has rows: {self.path} is a full export and goes into a "
                    "store whose tables of these names have none"
                )

    # ---- all or nothing

    def run(self, rollback: bool) -> ImportReport:
        """Put the rows in, and make the snapshot. Raises as `LmdbStore.import_`."""
        if self._back is not None:
            self._store.rollback(self._back, drop_later=True)
            if self._manifest.kind == FULL:
                self._check_empty()
        try:
            self._store.snapshot(GUARD, drop=[GUARD])
            for name, number in self._manifest.tables.items():
                self._refs[name] = self._store.open_table(name, self._manifest.groups[number])
            for file in self._manifest.files:
                self._apply(file)
            self._progress(self._total, self._total)
            return self._finish()
        except BaseException as error:
            self._undo(error)
            raise

    def _finish(self) -> ImportReport:
        manifest = self._manifest
        # a delta's manifest has the count of its snapshot, which need not be exact (`Snapshot.rows`)
        if self._alone and manifest.kind == FULL and self._store.stats().rows != manifest.rows:
            raise CorruptExportError(
                f"{self.path} gives {self._store.stats().rows:,} rows: its snapshot has {manifest.rows:,}"
            )
        origin = manifest.origin if self._alone else None
        made = self._store.snapshot_of(self._name, manifest.note, origin, drop=[GUARD])
        return ImportReport(
            path=str(self.path),
            kind=manifest.kind,
            snapshot=made.name,
            origin=made.origin,
            rows=sum(file.rows for file in manifest.files),
            deletions=sum(file.deletions for file in manifest.files),
            row_bytes=self._row_bytes,
            file_bytes=manifest.file_bytes,
        )

    def _undo(self, error: BaseException) -> None:
        """Go back to where the store was. If the disk does not let us, the guard stays for who reopens the store."""
        try:
            with Uninterrupted():
                names = [one.name for one in self._store.snapshots()]
                if GUARD in names:
                    self._store.rollback(GUARD)
                    self._store.drop_snapshot(GUARD)
                elif self._name in names:
                    error.add_note(f"by then all was imported: {self._store.path} has its snapshot {self._name!r}")
        except StorageError as second:
            error.add_note(
                f"the rows imported so far could not be taken back ({second}): reopen {self._store.path} and go back "
                f"to its snapshot {GUARD!r}"
            )

    # ---- rows

    def _apply(self, file: ExportFile) -> None:
        refs = {name: ref for name, ref in self._refs.items() if self._manifest.tables[name] == file.group}
        if not refs:
            raise CorruptExportError(f"{self.path / file.name} has rows of no table that its manifest names")
        group, before, seen = next(iter(refs.values())).group, self._done(file), 0
        new = self._store.bulk(group, file.rows) if self._manifest.kind == FULL else nullcontext()
        with new, closing(ahead(self._parts_of(file, refs), _PARTS_AHEAD)) as parts:
            for (tables, ids, data, deleted), share in parts:
                seen += len(ids)
                self._apply_part(RowIds(group, tables, ids), data, deleted)
                self._progress(self._manifest.file_bytes + before + int(share * file.bytes), self._total)
        if seen != file.rows + file.deletions:
            raise CorruptExportError(
                f"{self.path / file.name} has {seen:,} rows: expected {file.rows + file.deletions:,}"
            )

    @property
    def _total(self) -> int:
        return 2 * self._manifest.file_bytes

    def _done(self, file: ExportFile) -> int:
        """Bytes of the files before this one."""
        files = self._manifest.files
        return sum(one.bytes for one in files[: files.index(file)])

    def _parts_of(self, file: ExportFile, refs: dict[str, TableRef]) -> Iterator[tuple[Part, float]]:
        """The rows of a file in small parts, each with the share of the file that is done before it."""
        pa, parquet = arrow()
        where, schema = str(self.path / file.name), self._manifest.groups[file.group]
        most = max(1, min(_PART_ROWS, _PART_BYTES // schema.row_bytes))
        numbers = {name: ref.number for name, ref in refs.items()}
        try:
            with parquet.ParquetFile(where, memory_map=False) as opened:  # mapped bytes that go would kill the process
                for at in range(opened.num_row_groups):
                    table = opened.read_row_group(at, use_threads=False)
                    for part in rows_of(table, schema, numbers, where, most):
                        yield part, at / opened.num_row_groups
                    del table
        except (pa.ArrowInvalid, OSError) as error:
            if os.path.exists(where) and os.stat(where).st_size < file.bytes:
                raise CorruptExportError(f"{where} was cut short while it was imported; copy it once more") from error
            if isinstance(error, pa.ArrowInvalid):
                raise CorruptExportError(f"{where} is no Parquet file: {error}") from error
            raise

    def _apply_part(self, rows: RowIds, data: RowBytes, deleted: Mask | None) -> None:
        if deleted is not None and deleted.any():
            self._store.delete(RowIds(rows.group, rows.tables[deleted], rows.ids[deleted]))
            rows, data = RowIds(rows.group, rows.tables[~deleted], rows.ids[~deleted]), data[~deleted]
        self._store.put(rows, data)
        self._row_bytes += data.size
