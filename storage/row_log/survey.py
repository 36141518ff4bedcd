"""Survey: a store looked at from outside, beside its writer if there is one, and going on after damage.

`storage.verify` and `storage.describe` stand on it. Opening reads the manifest, LMDB's own pages and the headers and
blocks of ids of all segments, as opening a store does, and fills an index, so that it is known which rows are live.
What `LmdbStore` would refuse is noted as `Damage` instead and left out: a segment that cannot be read, a manifest
(then groups are made of what segments say of themselves, and tables have numbers and no names). Only a data file that
LMDB cannot be let loose on ends the survey: then `log` is None.

Read transactions are short, so that the writer's file does not grow meanwhile: one for the ids, and one for each
batch of segments whose rows are read. Segments that the writer deletes in between are passed over, and what it
commits after the survey began is not part of it.

Owned by one thread. It writes nothing, except that LMDB registers a reader in lock.mdb.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from storage.errors import CorruptionError, NotAStoreError
from storage.row_log.commits import CommitRecord
from storage.row_log.config import StoreConfig
from storage.row_log.group_rows import GroupRows
from storage.row_log.log import RowLog
from storage.row_log.manifest import DATA_NAME, NAME, Manifest, holds_store, load_manifest
from storage.row_log.places import LIVE
from storage.row_log.recovery import LAST_EPOCH, ask_for_ids, fill_index
from storage.row_log.segment import SegmentHeader, read_header
from storage.row_log.snapshots import KEY, SnapshotRecord, in_order
from storage.row_log.state import State

_AHEAD = 32
_BATCH_BYTES = 1 << 30  # of segments read within one transaction


@dataclass(frozen=True, slots=True)
class Damage:
    """Something in a store that is not what was written.

    Attributes:
        file: of the store's directory.
        message: what was seen, in one line.
        segment: its number, where it is one segment's.
        table, id: the row, where it is one row's; a table without a name is `number N`.
        live: whether a look-up of that row would read these bytes; older versions and deleted rows are not live.
        snapshot: the name of a snapshot, where it is one's record, or a segment that it lacks.
    """

    file: str
    message: str
    segment: int | None = None
    table: str | None = None
    id: int | None = None
    live: bool | None = None
    snapshot: str | None = None


@dataclass(frozen=True, slots=True)
class SurveyedSegment:
    """A segment whose header and ids are whole, and its slot in the segment table of its group."""

    header: SegmentHeader
    group: GroupRows
    slot: int

    @property
    def live(self) -> int:
        """Live rows in it."""
        return int(self.group.segments.lines[self.slot, LIVE])


class Survey:
    """See the module's docstring. Close it, or use it as a context manager.

    Args:
        path: a store's directory.

    Attributes:
        manifest: None if it is damaged.
        log: None if the data file cannot be read.
        state: the last complete state; None if its record is damaged.
        snapshots: those whose records could be read, oldest first.
        history: records of the commits that the log still has, oldest first.
        groups: by number.
        segments: those that could be read, by number.
        damages: what was found so far.

    Raises:
        StoreMissingError, NotAStoreError: there is no store at the path.
        StoreLockedError: this process has the store open, or lock.mdb may not be written and there is a writer.
    """

    def __init__(self, path: Path) -> None:
        holds_store(path, read_only=True)
        self.path = path
        self.damages: list[Damage] = []
        self.groups: dict[int, GroupRows] = {}
        self.segments: dict[int, SurveyedSegment] = {}
        self.state: State | None = None
        self.snapshots: list[SnapshotRecord] = []
        self.history: list[CommitRecord] = []
        self.log: RowLog | None = None
        self.manifest = self._load_manifest()
        self._names = {number: name for name, (number, _) in self._tables().items()}
        try:
            self.log = self._open_log()
            if self.log is not None:
                self._take_in(self.log)
        except BaseException:
            self.close()
            raise

    def _load_manifest(self) -> Manifest | None:
        try:
            return load_manifest(self.path)
        except (CorruptionError, NotAStoreError) as error:
            self.damages.append(Damage(NAME, str(error)))
            return None

    def _open_log(self) -> RowLog | None:
        log = None
        try:
            log = RowLog(self.path, StoreConfig().map_size_bytes, read_only=True, sync_meta=True)
            if self.manifest is not None:
                log.check_identity(self.manifest.uuid.bytes)
        except (CorruptionError, NotAStoreError) as error:
            if log is not None:
                log.close()
            if self.manifest is None:  # neither file is a store's
                raise NotAStoreError(f"{self.damages[0].message}; {error}") from error
            self.damages.append(Damage(DATA_NAME, str(error)))
            return None
        return log

    def _take_in(self, log: RowLog) -> None:
        """Read the state, the snapshots and the ids of all segments."""
        with log.reading() as txn:
            with self._noted():
                self.state = log.state(txn)
            with self._noted():
                self.history = log.history(txn)
            found: list[tuple[int, NDArray[np.uint8]]] = []
            with self._noted():
                found = list(log.segments(txn).items())
            for i, (number, segment) in enumerate(found):
                if i % _AHEAD == 0:
                    ask_for_ids([ahead for _, ahead in found[i : i + _AHEAD]])
                self._adopt(number, segment)
            self._take_snapshots(log, txn, np.array([number for number, _ in found], np.int64))
            self._fill_indexes()

    def _take_snapshots(self, log: RowLog, txn: Any, there: NDArray[np.int64]) -> None:
        """Read the records of snapshots, and note those of which a segment is not `there`."""
        for key, record in log.snapshot_records(txn):
            try:
                self.snapshots.append(log.unpack_snapshot(key, record))
            except CorruptionError as error:
                name = key[len(KEY) :].decode(errors="replace")
                self.damages.append(Damage(DATA_NAME, str(error), snapshot=name))
        self.snapshots = in_order(self.snapshots)
        for snapshot in self.snapshots:
            missing = np.setdiff1d(snapshot.segments, there)
            if len(missing):
                message = f"snapshot {snapshot.name!r} of {self.path} lacks {len(missing)} segments, {missing[0]} first"
                self.damages.append(Damage(DATA_NAME, message, snapshot=snapshot.name))

    def holders_of(self, number: int) -> list[str]:
        """Names of the snapshots that hold a segment."""
        return [one.name for one in self.snapshots if number in one.segments]

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Have damage noted, not raised."""
        try:
            yield
        except CorruptionError as error:
            self.damages.append(Damage(DATA_NAME, str(error)))

    def _fill_indexes(self) -> None:
        for group in self.groups.values():
            fill_index(group, LAST_EPOCH)

    def _adopt(self, number: int, segment: NDArray[np.uint8]) -> None:
        try:
            header = read_header(segment, number, str(self.path))
            group = self._group_of(header)
        except CorruptionError as error:
            self.damages.append(Damage(DATA_NAME, str(error), number))
            return
        self.segments[number] = SurveyedSegment(header, group, group.adopt(header, segment.ctypes.data))

    def _group_of(self, header: SegmentHeader) -> GroupRows:
        known = self.manifest
        if known is not None and (header.store != known.uuid.bytes or header.group >= len(known.groups)):
            raise CorruptionError(
                f"segment {header.number} of {self.path} is of store {header.store.hex()} and group {header.group}, "
                f"which {NAME} does not know"
            )
        if header.group not in self.groups:
            shards = StoreConfig().shards_for((self.path / DATA_NAME).stat().st_size // header.row_bytes)
            self.groups[header.group] = GroupRows(header.group, header.row_bytes, shards, str(self.path))
        group = self.groups[header.group]
        if group.row_bytes != header.row_bytes:
            raise CorruptionError(
                f"segment {header.number} of {self.path} has rows of {header.row_bytes} bytes, others of its group "
                f"have {group.row_bytes}"
            )
        return group

    def _tables(self) -> dict[str, tuple[int, int]]:
        return {} if self.manifest is None else self.manifest.tables

    def table_name(self, number: int) -> str:
        """The name of a table, `number N` if it has none that is known."""
        return self._names.get(number, f"number {number}")

    def tables_of(self, group: int) -> NDArray[np.uint32]:
        """Numbers of the tables of a group, sorted; none if the manifest is damaged."""
        return np.array(sorted(number for number, of in self._tables().values() if of == group), np.uint32)

    def reading(self) -> Iterator[list[tuple[SurveyedSegment, NDArray[np.uint8]]]]:
        """Readable segments and their bytes in batches, oldest first; the bytes are good until the next batch."""
        if self.log is None:
            return
        left = deque(sorted(self.segments))
        while left:
            with self.log.reading() as txn:
                there = self.log.segments(txn)
                batch, size = [], 0
                while left and size < _BATCH_BYTES:
                    number = left.popleft()
                    if number in there:
                        batch.append((self.segments[number], there[number]))
                        size += len(there[number])
                yield batch

    def close(self) -> None:
        """Let go of the data file."""
        if self.log is not None:
            self.log.close()
        self.log = None

    def __enter__(self) -> Survey:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
