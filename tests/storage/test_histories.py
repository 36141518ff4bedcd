"""Histories: any sequence of verbs, flushes, reopenings and deaths of an LmdbStore, against MemoryStore."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage import LmdbStore, MemoryStore, RowIds, RowSchema, StoreConfig, TableRef
from storage.schema import Column
from storage.testing import Rows, contents, named, read

CONFIG = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, map_size_bytes=1 << 28, index_shards=2)
ROW_BYTES = (4, 5, 12, 4000, 30_000)  # rows of the last are larger than a segment
TABLES = [(f"t{i}", ROW_BYTES[i % len(ROW_BYTES)]) for i in range(7)]
IDS = st.integers(-4, 12) | st.sampled_from([-(2**63), 2**63 - 1, 2**31, 2**32, -(2**32)])
SOME_IDS = st.builds(lambda few, more: [*few, *range(100, 100 + more)], st.lists(IDS, max_size=20), st.integers(0, 40))
WHICH = st.integers(0, len(TABLES) - 1)
opened = precondition(lambda self: self.tables)


class Histories(RuleBasedStateMachine):
    """An LmdbStore and a MemoryStore do the same, until the former dies and the latter is told what was left."""

    durability: ClassVar[str]

    @initialize()
    def open_both(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="histories"))
        self.plain = MemoryStore()
        self.tables: list[TableRef] = []
        self.flushed: dict[int, Rows] = {}
        self.since: dict[tuple[int, int, int], set[bytes | None]] = {}  # what rows have been since the last flush
        self.note = b""
        self.calls = 0
        self._open()

    def _open(self) -> None:
        self.store = LmdbStore(self.directory / "s", durability=self.durability, config=CONFIG)  # type: ignore[arg-type]

    def _rows(self, which: int, ids: list[int]) -> tuple[RowIds, int]:
        """Ids of all tables of one group in turn, and the bytes of their rows."""
        table = self.tables[which % len(self.tables)]
        mates = [other.number for other in self.tables if other.group == table.group]
        numbers = np.resize(np.array(mates, np.uint32), len(ids))
        return RowIds(table.group, numbers, np.array(ids, np.int64)), table.schema.row_bytes

    def _groups(self) -> set[int]:
        return {table.group for table in self.tables}

    @rule(which=WHICH)
    def open_table(self, which: int) -> None:
        name, row_bytes = TABLES[which]
        schema = RowSchema((Column("weight", "uint8", row_bytes),))
        table = self.store.open_table(name, schema)
        assert table == self.plain.open_table(name, schema)
        if table not in self.tables:
            self.tables.append(table)

    @opened
    @rule(which=WHICH, ids=SOME_IDS)
    def put(self, which: int, ids: list[int]) -> None:
        rows, row_bytes = self._rows(which, ids)
        self.calls += 1
        data = np.random.default_rng(self.calls).integers(0, 256, (len(rows), row_bytes), dtype=np.uint8)
        bound = self.store.memory_after(len(rows))
        self.store.put(rows, data)
        assert self.store.stats().memory_bytes <= bound
        self.plain.put(rows, data)
        for row, content in zip(named(rows), data, strict=True):
            self.since.setdefault((rows.group, *row), {None}).add(content.tobytes())

    @opened
    @rule(which=WHICH, ids=SOME_IDS)
    def delete(self, which: int, ids: list[int]) -> None:
        rows, _ = self._rows(which, ids)
        self.store.delete(rows)
        self.plain.delete(rows)
        for row in named(rows):
            self.since.setdefault((rows.group, *row), set()).add(None)

    @opened
    @rule(which=WHICH, ids=SOME_IDS)
    def get(self, which: int, ids: list[int]) -> None:
        rows, row_bytes = self._rows(which, ids)
        assert read(self.store, rows, row_bytes) == read(self.plain, rows, row_bytes)

    @rule(note=st.none() | st.binary(max_size=5))
    def flush(self, note: bytes | None) -> None:
        self.store.flush(note)
        self.note = self.note if note is None else note
        self._remember()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self._remember()
        self._open()

    def _remember(self) -> None:
        """What there is now is durable."""
        self.flushed = {group: contents(self.plain, group) for group in self._groups()}
        self.since = {(group, *row): {data} for group, rows in self.flushed.items() for row, data in rows.items()}

    @rule()
    def die(self) -> None:
        """As a killed process would: nothing more is written."""
        self.store.abandon()
        self._open()
        found = {group: contents(self.store, group) for group in self._groups()}
        if self.durability == "snapshot":
            assert found == {group: self.flushed.get(group, {}) for group in found}
        for (group, *row), versions in self.since.items():
            assert found[group].get(tuple(row)) in versions
        for group, rows in found.items():
            self._set_plain(group, rows)
        self.since = {(group, *row): {data} for group, rows in found.items() for row, data in rows.items()}

    def _set_plain(self, group: int, rows: Rows) -> None:
        for block, _ in list(self.plain.scan(group)):
            self.plain.delete(block)
        for (table, id), data in rows.items():
            row = RowIds(group, np.array([table], np.uint32), np.array([id]))
            self.plain.put(row, np.frombuffer(data, np.uint8)[None])

    @invariant()
    def both_hold_the_same(self) -> None:
        assert self.store.note == self.note
        for group in self._groups():
            assert contents(self.store, group) == contents(self.plain, group)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.directory)


class SnapshotHistories(Histories):
    durability = "snapshot"


class CommitHistories(Histories):
    durability = "commit"


class TestSnapshot(SnapshotHistories.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=25, stateful_step_count=25)


class TestCommit(CommitHistories.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=25, stateful_step_count=25)
