"""The Store protocol: rows at rest, found by (table number, id).

A store holds tables; tables of one schema form a group, and every verb works on a batch of rows of one group. A store
knows nothing of slots, tiers, batches or training. What each verb promises is stated here once and checked for every
implementation by `storage.testing.StoreContract`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from storage.schema import RowSchema

Tables: TypeAlias = NDArray[np.uint32]
Ids: TypeAlias = NDArray[np.int64]
RowBytes: TypeAlias = NDArray[np.uint8]
Mask: TypeAlias = NDArray[np.bool_]

IdRange: TypeAlias = tuple[int, int, int]  # a table number or -1 for all, the first id and the last
MIN_ID, MAX_ID = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class TableRef:
    """A table as a store knows it: `number` stands for it in `RowIds.tables`; tables of one group share a schema."""

    name: str
    group: int
    number: int
    schema: RowSchema


@dataclass(frozen=True, slots=True)
class Stored:
    """Which rows of a batch are known to be in the store, because it gave them or has taken them before.

    Of such a row a `HintedStore` need not read from the disk who it is that a put replaces.

    Attributes:
        rows: bool (N,).
        deletions: `HintedStore.deletions` before the first of these rows was got or put. A store that has deleted rows
            since then takes no notice. It is of the store that is asked: one that hands rows on to another says nothing
            of what that one has.
    """

    rows: Mask
    deletions: int


@dataclass(frozen=True, slots=True)
class RowIds:
    """The ids of N rows of one group.

    Attributes:
        group: the group, as in `TableRef.group`.
        tables: uint32 (N,), table numbers.
        ids: int64 (N,), any values; none is special.
        stored: what is known of them, for a put.

    Raises:
        ValueError: dtypes or shapes differ from the above.
    """

    group: int
    tables: Tables
    ids: Ids
    stored: Stored | None = None

    def __post_init__(self) -> None:
        if self.tables.dtype != np.uint32 or self.ids.dtype != np.int64:
            raise ValueError(f"row ids of dtypes {self.tables.dtype} and {self.ids.dtype}: expected uint32 and int64")
        if self.ids.ndim != 1 or self.tables.shape != self.ids.shape:
            raise ValueError(f"row ids of shapes {self.tables.shape} and {self.ids.shape}: expected (N,) twice")
        known = None if self.stored is None else self.stored.rows
        if known is not None and (known.dtype != np.bool_ or known.shape != self.ids.shape):
            raise ValueError(f"what is known of rows: {known.dtype} {known.shape}, expected bool ({len(self.ids)},)")

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, table: TableRef, ids: Ids) -> RowIds:
        """Ids that all belong to one table."""
        return cls(table.group, np.full(len(ids), table.number, np.uint32), ids)


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters of one open store, from its opening on, and sizes as of now.

    Attributes:
        rows: live rows.
        rows_read, rows_written: rows found by get, rows put (deletes are not counted).
        bytes_read: stored bytes of the rows found (row and checksum), whether the page cache had them or not.
        bytes_written: bytes of the segments committed.
        segments: segments that exist, uncommitted ones included.
        live_bytes: bytes of the live rows without any overhead.
        disk_bytes: bytes that the store occupies on disk.
        memory_bytes: anonymous host memory held (index, write buffers, tables of segments).
        commits: transactions that reached the disk.
        rows_moved, bytes_moved: rows that compaction has moved, and their stored bytes.
        oldest_reader, oldest_reader_commits: process that reads the oldest state of all readers, and how many commits
            it lags behind; 0 if none does. What was deleted since takes space until it is done.
    """

    rows: int = 0
    rows_read: int = 0
    rows_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    segments: int = 0
    live_bytes: int = 0
    disk_bytes: int = 0
    memory_bytes: int = 0
    commits: int = 0
    rows_moved: int = 0
    bytes_moved: int = 0
    oldest_reader: int = 0
    oldest_reader_commits: int = 0


class Store(Protocol):
    """Rows at rest. Any thread may call any verb.

    Verbs that write are atomic to each other. A get beside a put or a delete of another thread finds each row whole, as
    it was before or as it is after.
    """

    def open_table(self, name: str, schema: RowSchema) -> TableRef:
        """Open a table, or create it. Equal schemas give the same group.

        Raises:
            SchemaMismatchError: the table is stored with another schema, or its number is taken by another name.
        """

    def get(self, rows: RowIds, out: RowBytes, found: Mask) -> None:
        """Copy rows out.

        Args:
            rows: N ids of one group, duplicates allowed.
            out: uint8 (N, row_bytes), bytes of a row adjacent; rows of missing ids are left as they are.
            found: bool (N,), set for every row.

        Raises:
            CorruptRowError: a row is damaged. The contents of `out` and `found` are undefined then.
        """

    def put(self, rows: RowIds, data: RowBytes) -> None:
        """Insert or replace rows; they are found at once, and are durable after the next flush at the latest.

        The data is copied during the call; of an id that occurs twice the later wins. A store may write it later, and
        raise what went wrong in a later call.

        Args:
            rows: N ids of one group.
            data: uint8 (N, row_bytes), bytes of a row adjacent.

        Raises:
            StoreFullError: no room. Some of the rows may be in the store; put them all again once there is room.
            StoreIOError: the disk failed.
            StoreReadOnlyError: the store may not be written from here.
        """

    def delete(self, rows: RowIds) -> None:
        """Forget rows; missing ids are fine. Raises as `put`."""

    def scan(
        self, group: int, *, table: int | None = None, first_id: int = MIN_ID, last_id: int = MAX_ID
    ) -> Iterator[tuple[RowIds, RowBytes]]:
        """Every live row of a group once, in blocks, in no order that means anything.

        Args:
            table: a table number, for the rows of that table alone.
            first_id, last_id: only rows with ids from the one to the other, both included.

        Raises:
            StoreChangedError: rows were put or deleted since the scan began.
            CorruptRowError: a row is damaged.
        """

    def flush(self, note: bytes | None = None) -> None:
        """Make everything put so far durable as one complete state.

        Args:
            note: a few opaque bytes kept with the state (at most 64 KiB); None keeps the previous ones.

        Raises:
            StoreFullError, StoreIOError: the state is not complete; the previous one still is.
            StoreConfigError: the note is too large; nothing has changed.
        """

    def close(self) -> None:
        """Flush and let go of everything; again does nothing. After StoreFullError the store is still open."""

    @property
    def note(self) -> bytes:
        """The note of the last complete state, b"" if none was given."""

    def stats(self) -> StoreStats:
        """Counters and sizes."""

    def memory_after(self, inserts: int) -> int:
        """An upper bound of `stats().memory_bytes` after `inserts` rows, new or not, will have been put."""

    def __enter__(self) -> Store: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@runtime_checkable
class HintedStore(Protocol):
    """What a Store may offer beside its verbs to who reads rows, keeps them and puts them back. Nothing here changes
    which rows it has."""

    @property
    def deletions(self) -> int:
        """Changes with every delete: see `Stored`."""

    @property
    def waits_for_disk(self) -> bool:
        """Whether rows that were got or announced lately were not in memory, so that announcing more is of use."""

    def will_need(self, rows: RowIds) -> None:
        """Announce rows that will be got soon: the store begins to read them. Returns at once, with a copy of what it
        was given; says nothing of rows that are missing or damaged."""


@runtime_checkable
class BegunStore(Protocol):
    """What a Store may offer to who writes a complete state while rows are put that are no part of it."""

    def begin_state(self, rows: Mapping[int, int]) -> None:
        """Begin a complete state. It consists of what was put so far, and of what is given to it by `put_as_begun`.

        Until it is completed or abandoned no other one is made: flush, delete and what else would make one are refused.

        Args:
            rows: by group, how many will be given to it at most.

        Raises:
            StoreConfigError: one is begun already.
            StoreFullError, StoreIOError, StoreReadOnlyError: as `Store.put`.
        """

    def put_as_begun(self, rows: RowIds, data: RowBytes) -> None:
        """As `Store.put`, for rows as they were when the state was begun. What was put since of the same ids stays.

        Each id is given once at most. Of those that were put since, `rows.stored` tells which were in the store before:
        the count of the state's rows goes by it. Raises StoreConfigError if there is no such state, or too many rows
        for it.
        """

    def complete_state(
        self, note: bytes | None = None, *, snapshot: str | None = None, drop: Collection[str] = ()
    ) -> None:
        """Make the state durable that was begun. Raises as `Store.flush`; it can be tried again then.

        Args:
            note: as `Store.flush`.
            snapshot: a name to keep it under.
            drop: names of snapshots that go with the same commit.
        """

    def abandon_state(self) -> None:
        """Have it not begun. Rows that were given to it are in the store, where nothing newer was put."""


def check_batch(rows: RowIds, data: RowBytes, row_bytes: int, *, written: bool = False) -> None:
    """Refuse row bytes that do not fit their ids; `written` says that they are where rows will be copied to.

    Raises:
        ValueError: `data` is not uint8 (N, row_bytes) with the bytes of a row adjacent, or may not be written.
    """
    if data.dtype != np.uint8 or data.shape != (len(rows), row_bytes):
        raise ValueError(f"row bytes {data.dtype} {data.shape}: expected uint8 ({len(rows)}, {row_bytes})")
    if len(rows) and data.strides[1] != 1:
        raise ValueError(f"row bytes with strides {data.strides}: the bytes of a row must be adjacent")
    if written and not data.flags.writeable:
        raise ValueError("the array that rows are copied to is read-only: pass one that may be written")


def check_found(rows: RowIds, found: Mask) -> None:
    """Refuse a mask that does not fit its ids.

    Raises:
        ValueError: `found` is not bool (N,), contiguous and writable.
    """
    if found.dtype != np.bool_ or found.shape != (len(rows),):
        raise ValueError(f"found mask {found.dtype} {found.shape}: expected bool ({len(rows)},)")
    if not (found.flags.c_contiguous and found.flags.writeable):
        raise ValueError("found mask must be contiguous and writable")
