"""VolatileStore: what the stores that live in memory share - tables, note, counters, closing. Nothing of rows.

A store of this kind says how the rows of a group are kept (`_make_group`) and implements the four verbs of rows. Here
a table is registered, a group found, and the lock kept under which each verb runs. Nothing survives closing.
"""

from __future__ import annotations

from dataclasses import replace
from threading import RLock
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from storage.errors import SchemaMismatchError, StoreClosedError, StoreConfigError
from storage.schema import RowSchema, table_number
from storage.store import StoreStats, TableRef


class GroupOfRows(Protocol):
    """The rows of one group: their schema, number, and the host memory they take."""

    @property
    def schema(self) -> RowSchema:
        """What a row is made of."""

    @property
    def rows(self) -> int:
        """Live rows."""

    @property
    def memory_bytes(self) -> int:
        """Host memory held for them."""


Group = TypeVar("Group", bound=GroupOfRows)


class VolatileStore(Generic[Group]):
    """See the module's docstring, and `storage.store.Store` for the verbs."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._tables: dict[str, TableRef] = {}
        self._groups: list[Group] = []
        self._note = b""
        self._stats = StoreStats()
        self._version = 0  # counts changes of rows, for scans
        self._closed = False

    def _make_group(self, schema: RowSchema) -> Group:
        """Where the rows of a new group will be."""
        raise NotImplementedError

    def open_table(self, name: str, schema: RowSchema) -> TableRef:
        """See `Store.open_table`."""
        with self._lock:
            self._check_open()
            table = self._tables.get(name)
            if table is None:
                table = self._create_table(name, schema)
            if table.schema != schema:
                raise SchemaMismatchError(f"table {name!r} holds rows of {table.schema}, not of {schema}")
            return table

    def _create_table(self, name: str, schema: RowSchema) -> TableRef:
        number = table_number(name)
        for other in self._tables.values():
            if other.number == number:
                raise SchemaMismatchError(f"tables {other.name!r} and {name!r} share the number {number}: rename one")
        schemas = [group.schema for group in self._groups]
        if schema not in schemas:
            self._groups.append(self._make_group(schema))
            schemas.append(schema)
        self._tables[name] = TableRef(name, schemas.index(schema), number, schema)
        return self._tables[name]

    def flush(self, note: bytes | None = None) -> None:
        """See `Store.flush`; there is nothing to make durable."""
        with self._lock:
            self._check_open()
            if note is not None:
                self._note = bytes(note)

    def close(self) -> None:
        """See `Store.close`; the rows are gone."""
        with self._lock:
            self._closed = True
            self._groups = []

    @property
    def note(self) -> bytes:
        """See `Store.note`."""
        return self._note

    def stats(self) -> StoreStats:
        """See `Store.stats`; of a closed store, its counters and no rows."""
        with self._lock:
            return replace(
                self._stats,
                rows=sum(group.rows for group in self._groups),
                live_bytes=sum(group.rows * group.schema.row_bytes for group in self._groups),
                memory_bytes=sum(group.memory_bytes for group in self._groups),
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _count(self, **more: int) -> None:
        self._stats = replace(self._stats, **{name: getattr(self._stats, name) + n for name, n in more.items()})

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError(f"this {type(self).__name__} was closed; its rows are gone")

    def _group(self, group: int) -> Group:
        self._check_open()
        if not 0 <= group < len(self._groups):
            raise StoreConfigError(f"group {group}: this store has {len(self._groups)} groups; open a table first")
        return self._groups[group]
