"""Export: a snapshot, or what changed since an older one, into a new directory.

Rows are read in the order of the log by a thread, block by block; the calling thread encodes them and writes. Two
blocks exist at a time. Files are written to `<path>.tmp`, fsynced, and the directory is renamed: a path that is there
is a whole export.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from storage.errors import StorageError, StoreConfigError, disk_error
from storage.export.ahead import ahead
from storage.export.columns import DELETED, ID, TABLE, Block, arrow, file_schema
from storage.export.manifest import DELTA, FULL, NAME, ExportFile, ExportManifest, FileChecksum, Progress
from storage.row_log.snapshots import Origin
from storage.snapshot import Snapshot, SnapshotView
from storage.store import RowBytes, RowIds
from storage.whole_files import sync_directory

if TYPE_CHECKING:
    from storage.lmdb_store import LmdbStore

COMPRESSIONS = ("auto", "zstd", "none")

_BLOCK_BYTES = 1 << 24
_ZSTD_LEVEL = 1
_GET_ROWS = 4096

_Piece = tuple[RowIds, RowBytes, Any]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export has written.

    Attributes:
        path: the directory.
        kind: "full" or "delta".
        snapshot, origin: what was exported.
        base, base_origin: what a delta follows, else None.
        rows, deletions: written.
        row_bytes: of the rows as put, deletions left out.
        file_bytes: of the files without the manifest.
    """

    path: str
    kind: str
    snapshot: str
    origin: str
    base: str | None
    base_origin: str | None
    rows: int
    deletions: int
    row_bytes: int
    file_bytes: int


def export(
    store: LmdbStore,
    path: str | os.PathLike[str],
    *,
    snapshot: str,
    since: str | None = None,
    compression: str = "auto",
    progress: Progress | None = None,
) -> ExportReport:
    """As `LmdbStore.export`."""
    arrow()
    if compression not in COMPRESSIONS:
        raise StoreConfigError(f"compression={compression!r}: expected one of {COMPRESSIONS}")
    target = Path(os.path.realpath(path))
    if os.path.lexists(path):
        raise StoreConfigError(f"{path} is there already: an export goes into a new directory, name another one")
    if since == snapshot:
        raise StoreConfigError(f"a delta from snapshot {snapshot!r} to itself: name an older one")
    try:
        with _new_directory(target) as directory:
            return _Export(store, snapshot, since, compression, progress or _silent, directory, str(target)).run()
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise disk_error(error, f"the export {path} could not be written: {error}") from error


def _silent(done: int, total: int) -> None:
    pass


@contextmanager
def _new_directory(target: Path) -> Iterator[Path]:
    """Where an export is written, given its name when it is whole and removed if that fails."""
    written = target.with_name(target.name + ".tmp")
    if os.path.lexists(written):
        _remove_left_over(written)
    written.mkdir()
    try:
        yield written
        sync_directory(written)
        os.rename(written, target)
        sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        raise


def _remove_left_over(written: Path) -> None:
    """What an export left that was killed; anything else is not ours to remove."""
    names = os.listdir(written) if written.is_dir() else ["no directory"]
    if foreign := sorted(name for name in names if name not in (NAME, NAME + ".tmp") and not name.endswith(".parquet")):
        raise StoreConfigError(
            f"{written}, where an export is written first, is there and holds {foreign[0]!r}: remove it"
        )
    shutil.rmtree(written)


def _named(store: LmdbStore, name: str) -> Snapshot:
    """A snapshot of a store. Raises StoreConfigError if there is none of that name."""
    there = {one.name: one for one in store.snapshots()}
    if name not in there:
        newest = ", ".join(map(repr, list(there)[-5:])) or "none"
        raise StoreConfigError(f"{store.path} has no snapshot {name!r}; the newest there are: {newest}")
    return there[name]


class _Export:
    """One run of `export`."""

    def __init__(
        self,
        store: LmdbStore,
        snapshot: str,
        since: str | None,
        compression: str,
        progress: Progress,
        directory: Path,
        path: str,
    ) -> None:
        self._store, self._since = store, since
        self._snapshot = _named(store, snapshot)
        self._base = None if since is None else _named(store, since)
        if since is not None:
            store.diff(since, snapshot)  # refuses one that is newer
        self._compression, self._progress, self._directory, self._path = compression, progress, directory, path
        self._done_bytes = self._row_bytes = 0
        self._tables = store.tables()
        self._schemas = {table.group: table.schema for table in self._tables}

    def run(self) -> ExportReport:
        """Write the files, then the manifest."""
        base, newer = self._base, self._snapshot
        files = tuple(self._files())
        manifest = ExportManifest(
            kind=FULL if base is None else DELTA,
            store=self._store.uuid,
            snapshot=newer.name,
            note=newer.note,
            time_s=newer.time_s,
            origin=Origin.parse(newer.origin),
            rows=newer.rows if base is not None else sum(file.rows for file in files),  # as written: exact
            live_bytes=newer.live_bytes,
            base=None if base is None else base.name,
            base_origin=None if base is None else Origin.parse(base.origin),
            groups=tuple(self._schemas[group] for group in sorted(self._schemas)),
            tables={table.name: table.group for table in self._tables},
            files=files,
        )
        manifest.save(self._directory)
        self._progress(self._done_bytes, self._done_bytes)
        return ExportReport(
            path=self._path,
            kind=manifest.kind,
            snapshot=manifest.snapshot,
            origin=newer.origin,
            base=manifest.base,
            base_origin=None if base is None else base.origin,
            rows=sum(file.rows for file in files),
            deletions=sum(file.deletions for file in files),
            row_bytes=self._row_bytes,
            file_bytes=manifest.file_bytes,
        )

    # ---- files

    def _files(self) -> Iterator[ExportFile]:
        writer: _FileWriter | None = None
        blocks = ahead(self._blocks())
        try:
            for group, block in blocks:
                if writer is None or writer.group != group:
                    if writer is not None:
                        yield writer.finish()
                    writer = _FileWriter(self._directory, group, block, self._compression)
                writer.write(block)
                self._count(block)
            if writer is not None:
                yield writer.finish()
        finally:
            blocks.close()
            if writer is not None:
                writer.abandon()

    def _count(self, block: Block) -> None:
        self._row_bytes += (block.rows - block.deletions) * block.schema.row_bytes
        self._done_bytes += block.bytes
        self._progress(self._done_bytes, max(self._done_bytes, self._snapshot.live_bytes))

    def _blocks(self) -> Iterator[tuple[int, Block]]:
        """All rows in blocks of one group, groups one after the other."""
        group, block = -1, None
        for rows, data, deleted in self._pieces():
            done = 0
            while done < len(rows):
                if block is None or rows.group != group or block.rows == block.capacity:
                    if block is not None:
                        yield group, block
                    group, block = rows.group, self._block(rows.group)
                part = slice(done, done + min(len(rows) - done, block.capacity - block.rows))
                gone = None if deleted is None else deleted[part]
                block.add(rows.tables[part], rows.ids[part], data[part], gone)
                done = part.stop
        if block is not None:
            yield group, block

    def _block(self, group: int) -> Block:
        schema = self._schemas[group]
        names = [table.name for table in self._tables if table.group == group]
        capacity = max(1, _BLOCK_BYTES // (schema.row_bytes + 12))
        return Block(schema, capacity, names, self._since is not None)

    def _pieces(self) -> Iterator[_Piece]:
        name = self._snapshot.name
        whole = self._store.all_rows(name) if self._since is None else None
        if whole is not None:
            for rows, data in whole:
                yield rows, data, None
            return
        with self._store.at(name) as view:
            yield from self._live_pieces(view) if self._since is None else self._changed_pieces(view)

    def _live_pieces(self, view: SnapshotView) -> Iterator[_Piece]:
        for group in sorted(self._schemas):
            for rows, data in view.scan(group):
                yield rows, data, None

    def _changed_pieces(self, view: SnapshotView) -> Iterator[_Piece]:
        for change in self._store.diff(self._since, self._snapshot.name):
            for start in range(0, len(change.rows), _GET_ROWS):
                part = slice(start, start + _GET_ROWS)
                rows = RowIds(change.rows.group, change.rows.tables[part], change.rows.ids[part])
                data = np.zeros((len(rows), self._schemas[rows.group].row_bytes), np.uint8)
                found = np.empty(len(rows), np.bool_)
                view.get(rows, data, found)
                assert (found == ~change.deleted[part]).all(), "a snapshot and what changed up to it do not agree"
                yield rows, data, change.deleted[part]


class _FileWriter:
    """One Parquet file: a row group for each block. The bytes go through a checksum on their way.

    Args:
        first: block of rows, by which it is decided what is compressed. It has to be written all the same.
        compression: one of `COMPRESSIONS`.
    """

    def __init__(self, directory: Path, group: int, first: Block, compression: str) -> None:
        _, parquet = arrow()
        self.group = group
        self._name = f"rows-{group}.parquet"
        self._rows = self._deletions = 0
        schema = file_schema(first.schema, first.delta)
        packed = _compressed(first, compression, schema.names)
        self._sink = _Sink(directory / self._name)
        self._writer = parquet.ParquetWriter(
            self._sink.file,
            schema,
            compression={name: "zstd" if name in packed else "none" for name in schema.names},
            compression_level=dict.fromkeys(packed, _ZSTD_LEVEL) or None,
            use_dictionary=[TABLE],
            write_statistics=[ID],
        )

    def write(self, block: Block) -> None:
        """Append a row group."""
        self._writer.write_table(block.to_arrow(), row_group_size=block.capacity)
        self._sink.take_in()
        self._rows += block.rows - block.deletions
        self._deletions += block.deletions

    def finish(self) -> ExportFile:
        """Close the file, durably."""
        self._writer.close()
        size, digest = self._sink.finish()
        return ExportFile(self._name, self.group, self._rows, self._deletions, size, digest)

    def abandon(self) -> None:
        """Let go of a file that is not wanted any more; after `finish` nothing."""
        with suppress(Exception):  # what went wrong first is what is told
            self._writer.close()
        self._sink.abandon()


def _compressed(first: Block, compression: str, names: list[str]) -> set[str]:
    """Columns of a file that zstd is used for; table and ids are small, so that only rows have to be asked about."""
    if compression == "none":
        return set()
    return set(names) if compression == "zstd" else {TABLE, ID, DELETED, *first.compressible()} & set(names)


class _Sink:
    """A file that Arrow writes from front to back, and its checksum.

    What was written is read once more, out of the page cache: Arrow would hand each page to Python as a copy.
    """

    def __init__(self, path: Path) -> None:
        pa, _ = arrow()
        self.file = pa.OSFile(str(path), "wb")
        self._reading = open(path, "rb", buffering=0)  # noqa: SIM115
        self._checksum, self._size, self._block = FileChecksum(), 0, bytearray(1 << 20)

    def take_in(self) -> None:
        """Have the checksum cover what was written so far, and the disk begin to write it."""
        start = self._size
        while n := self._reading.readinto(self._block):
            self._checksum.add(memoryview(self._block)[:n])
            self._size += n
        # as a side effect, and the only one on pages that are not written yet
        os.posix_fadvise(self._reading.fileno(), start, self._size - start, os.POSIX_FADV_DONTNEED)

    def abandon(self) -> None:
        """Close the file, as it is."""
        self.file.close()
        self._reading.close()

    def finish(self) -> tuple[int, str]:
        """Size and checksum of the file, which is durable."""
        self.file.close()
        self.take_in()
        os.fsync(self._reading.fileno())
        self._reading.close()
        return self._size, self._checksum.digest()
