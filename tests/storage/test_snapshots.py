"""Named snapshots: any sequence of verbs against plain dicts, and each of the ways in which one could go wrong."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage import LmdbStore, RowIds, RowSchema, StoreConfig, StoreConfigError, TableRef
from storage.row_log import compaction
from storage.row_log.committer import Committer
from storage.row_log.places import COUNT, LIVE, NUMBER
from storage.schema import Column
from storage.snapshot import SnapshotView
from storage.testing import contents, named, read

SIZES: dict[str, Any] = {"segment_bytes": 1 << 13, "write_buffer_bytes": 1 << 14, "index_shards": 2}
CONFIG = StoreConfig(**SIZES, map_size_bytes=1 << 28)
STILL = StoreConfig(**SIZES, map_size_bytes=1 << 28, compact_bytes_per_s=0)
TABLES = [("a", 4), ("b", 4), ("c", 2000), ("d", 12), ("e", 4)]
IDS = st.integers(-4, 12) | st.sampled_from([-(2**63), 2**63 - 1, 2**31, 2**32])
SOME_IDS = st.builds(
    lambda few, first, more: [*few, *range(first, first + more)],
    st.lists(IDS, max_size=12),
    st.sampled_from([100, 130, 300]),
    st.sampled_from([0, 1, 30, 400]),
)
WHICH = st.integers(0, len(TABLES) - 1)
NAMES = st.sampled_from(["first", "second", "a/b", "dritt é ✓", "x" * 255])
SOME = st.lists(NAMES, max_size=2)

Key = tuple[int, int, int]  # group, table, id
All = dict[Key, bytes]


def lines_of(store: LmdbStore) -> list[list[tuple[int, int, int]]]:
    """Number, rows and live rows of every committed segment, of each group."""
    found = []
    for group in store._session.groups:
        slots = [slot for slot in group.segments.slots().tolist() if slot not in group.slots_in_memory()]
        lines = group.segments.lines[slots]
        found.append([(int(one[NUMBER]), int(one[COUNT]) & 0xFFFFFFFF, int(one[LIVE])) for one in lines])
    return found


def check_lines(store: LmdbStore) -> None:
    """What the segment table counts is what the index leads to."""
    with store._session.lock:
        _check_lines(store)


def _check_lines(store: LmdbStore) -> None:
    for group in store._session.groups:
        lines, live = group.segments.lines, 0
        for slot in group.segments.slots().tolist():
            live += int(lines[slot, LIVE])
            count = int(lines[slot, COUNT])
            assert 0 <= lines[slot, LIVE] <= count & 0xFFFFFFFF
            assert 0 <= count >> 32 <= count & 0xFFFFFFFF
        assert live == group.index.rows
        spare = [*group.spare, *(buffer for buffer, _ in group.sealed)]
        spare += [one for one in (group.open, group.moving) if one is not None]
        waiting = store._session.pins.waiting
        assert waiting or group.buffered_bytes == sum(buffer.bytes for buffer in spare)
        assert set(group.pinned.tolist()) <= set(np.flatnonzero(lines[:, NUMBER]).tolist())


@dataclass
class Kept:
    """What a snapshot must hold: rows, note, and of each row which change was its last; `made` orders them."""

    rows: All
    note: bytes
    changed: dict[Key, int]
    made: int = 0


def everything(store: LmdbStore | SnapshotView, groups: set[int]) -> All:
    found: All = {}
    for group in groups:
        found |= {(group, *row): data for row, data in contents(store, group).items()}  # type: ignore[arg-type]
    return found


class Snapshots(RuleBasedStateMachine):
    """An LmdbStore against dicts: rows now, rows of each snapshot, rows durable for certain."""

    durability: ClassVar[str]

    @initialize()
    def begin(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="snapshots"))
        self.patched = pytest.MonkeyPatch()  # so that small stores are compacted by themselves, tombstones too
        for name, least in (("_LEAST_SEGMENTS", 1), ("_LEAST_TOMBSTONES", 8), ("_GAPS", 0.0)):
            self.patched.setattr(compaction, name, least)
        goes_back = Committer.rollback

        def rollback(committer: Committer, *arguments: Any) -> None:
            goes_back(committer, *arguments)
            self._copy_files()  # in the thread that would compact next

        self.patched.setattr(Committer, "rollback", rollback)
        self.tables: list[TableRef] = []
        self.now = Kept({}, b"", {})
        self.flushed = Kept({}, b"", {})
        self.kept: dict[str, Kept] = {}
        self.views: list[tuple[SnapshotView, Kept, str]] = []
        self.calls = self.copies = 0
        self._open()

    def _open(self) -> None:
        self.store = LmdbStore(self.directory / "s", durability=self.durability, config=CONFIG)  # type: ignore[arg-type]
        for name, row_bytes in TABLES[: len(self.tables) or 3]:
            self._table(name, row_bytes)

    def _table(self, name: str, row_bytes: int) -> None:
        columns = [Column("w", "uint8", row_bytes)] if name != "e" else [Column("v", "uint8", row_bytes)]
        table = self.store.open_table(name, RowSchema(tuple(columns)))
        if table not in self.tables:
            self.tables.append(table)

    def _copy(self) -> Kept:
        self.copies += 1
        return Kept(dict(self.now.rows), self.now.note, dict(self.now.changed), self.copies)

    def _rows(self, which: int, ids: list[int]) -> tuple[RowIds, int]:
        table = self.tables[which % len(self.tables)]
        mates = [other.number for other in self.tables if other.group == table.group]
        return RowIds(table.group, np.resize(np.array(mates, np.uint32), len(ids)), np.array(ids, np.int64)), (
            table.schema.row_bytes
        )

    def _groups(self) -> set[int]:
        return {table.group for table in self.tables}

    @rule()
    def another_table(self) -> None:
        if len(self.tables) < len(TABLES):
            self._table(*TABLES[len(self.tables)])

    @rule(which=WHICH, ids=SOME_IDS)
    def put(self, which: int, ids: list[int]) -> None:
        rows, row_bytes = self._rows(which, ids)
        self.calls += 1
        data = np.random.default_rng(self.calls).integers(0, 256, (len(rows), row_bytes), dtype=np.uint8)
        bound = self.store.memory_after(len(rows))
        self.store.put(rows, data)
        assert self.store.stats().memory_bytes <= bound
        for row, content in zip(named(rows), data, strict=True):
            self.now.rows[(rows.group, *row)] = content.tobytes()
            self.now.changed[(rows.group, *row)] = self.calls

    @rule(which=WHICH, ids=SOME_IDS)
    def delete(self, which: int, ids: list[int]) -> None:
        rows, _ = self._rows(which, ids)
        self.calls += 1
        self.store.delete(rows)
        for row in named(rows):
            if self.now.rows.pop((rows.group, *row), None) is not None:
                self.now.changed[(rows.group, *row)] = self.calls

    @rule(note=st.none() | st.binary(max_size=5))
    def flush(self, note: bytes | None) -> None:
        self.store.flush(note)
        self._remember(note)

    def _remember(self, note: bytes | None) -> None:
        self.now.note = self.now.note if note is None else note
        self.flushed = self._copy()

    @rule()
    def compact(self) -> None:
        self.store.compact()
        self._remember(None)

    @rule(name=NAMES, note=st.none() | st.binary(max_size=5), keep_last=st.none() | st.integers(1, 4), drop=SOME)
    def snapshot(self, name: str, note: bytes | None, keep_last: int | None, drop: list[str]) -> None:
        if name in self.kept and name not in drop:
            drop = [*drop, name]
        made = self.store.snapshot(name, note, keep_last=keep_last, drop=drop)
        self._remember(note)
        self.kept = {other: kept for other, kept in self.kept.items() if other not in drop}
        self.kept[name] = self._copy()
        while keep_last is not None and len(self.kept) > keep_last:
            del self.kept[next(iter(self.kept))]
        assert (made.name, made.rows, made.note) == (name, len(self.now.rows), self.now.note)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.kept)))
        self.store.drop_snapshot(name)
        del self.kept[name]

    @precondition(lambda self: self.kept and len(self.views) < 4)
    @rule(data=st.data())
    def at(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.kept)))
        self.views.append((self.store.at(name), self.kept[name], name))

    @precondition(lambda self: self.views)
    @rule(which=st.integers(0, 3))
    def close_view(self, which: int) -> None:
        self.views.pop(which % len(self.views))[0].close()

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def diff(self, data: st.DataObject) -> None:
        names = list(self.kept)
        newer = data.draw(st.integers(0, len(names) - 1))
        older = data.draw(st.integers(-1, newer))
        after = self.kept[names[newer]]
        before = self.kept[names[older]] if older >= 0 else Kept({}, b"", {})
        found: dict[Key, bool] = {}
        for change in self.store.diff(names[older] if older >= 0 else None, names[newer]):
            for row, deleted in zip(named(change.rows), change.deleted.tolist(), strict=True):
                assert found.setdefault((change.rows.group, *row), deleted) is deleted
        changed = {key for key, when in after.changed.items() if when != before.changed.get(key)}
        assert found == {key: key not in after.rows for key in changed if key in after.rows or key in before.rows}

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), drop_later=st.booleans())
    def rollback(self, data: st.DataObject, drop_later: bool) -> None:
        names = list(self.kept)
        at = data.draw(st.integers(max(0, len(names) - 2), len(names) - 1))
        later = [kept for name, kept in self.kept.items() if name in names[at + 1 :]]
        last = self.kept[names[at]]
        viewed = self._viewed_later(last)
        try:
            self.store.rollback(names[at], drop_later=drop_later)
        except StoreConfigError:
            assert (later and not drop_later) or viewed
            return
        assert not (later and not drop_later) and not viewed
        self.kept = {name: self.kept[name] for name in names[: at + 1]}
        self.now = Kept(dict(last.rows), last.note, dict(last.changed))
        self.flushed = self._copy()
        check_lines(self.store)
        self._compare_with_a_copy()

    def _viewed_later(self, kept: Kept) -> bool:
        return any(one.made > kept.made for _, one, _ in self.views)

    def _copy_files(self) -> None:
        self.lines, copy = lines_of(self.store), self.directory / "copy"
        copy.mkdir()
        for name in ("manifest.json", "data.mdb"):
            shutil.copy(self.directory / "s" / name, copy)

    def _compare_with_a_copy(self) -> None:
        """Lines after a rollback, and those of a store opened anew from what is on disk."""
        stats, copy = self.store.stats(), self.directory / "copy"
        with LmdbStore(copy, durability=self.durability, config=STILL) as fresh:  # type: ignore[arg-type]
            there = fresh.stats()
            assert lines_of(fresh) == self.lines
            assert (there.rows, there.live_bytes) == (stats.rows, stats.live_bytes)
            assert [one.name for one in fresh.snapshots()] == [one.name for one in self.store.snapshots()]
        shutil.rmtree(copy)

    @rule()
    def reopen(self) -> None:
        self._close_views()
        self.store.close()
        self._remember(None)
        self._open()

    @rule()
    def die(self) -> None:
        """As a killed process would: of what came after the last state some may be there."""
        self._close_views()
        self.store.abandon()
        self._open()
        found = everything(self.store, self._groups())
        if self.durability == "snapshot":
            assert found == self.flushed.rows
        flushed, self.calls = self.flushed, self.calls + 1
        for key in self.now.rows.keys() | flushed.rows.keys() | found.keys():
            if found.get(key) == flushed.rows.get(key) and key in flushed.changed:
                self.now.changed[key] = flushed.changed[key]
            elif found.get(key) != self.now.rows.get(key):
                self.now.changed[key] = self.calls
        for key in list(self.now.changed):
            if key not in found and key not in flushed.rows:
                self.now.changed.pop(key)
                if key in flushed.changed:
                    self.now.changed[key] = flushed.changed[key]
        self.now.rows, self.now.note = found, flushed.note
        if self.durability == "commit":
            self._level()

    def _level(self) -> None:
        """Which of several versions counts as changed is not worth telling: all are written anew."""
        for table in self.tables:
            mine = [key for key in self.now.rows if key[:2] == (table.group, table.number)]
            if mine:
                self.calls += 1
                ids = np.array([id for _, _, id in mine], np.int64)
                rows = np.frombuffer(b"".join(self.now.rows[key] for key in mine), np.uint8)
                self.store.put(RowIds.of(table, ids), rows.reshape(len(mine), table.schema.row_bytes))
                self.now.changed |= dict.fromkeys(mine, self.calls)

    def _close_views(self) -> None:
        while self.views:
            self.views.pop()[0].close()

    @invariant()
    def all_is_as_it_was(self) -> None:
        assert self.store.note == self.now.note
        assert everything(self.store, self._groups()) == self.now.rows
        assert self.store.stats().rows == len(self.now.rows)
        there = self.store.snapshots()
        assert [(one.name, one.rows, one.note) for one in there] == [
            (name, len(kept.rows), kept.note) for name, kept in self.kept.items()
        ]
        for view, kept, name in self.views:
            assert (view.snapshot.name, view.note) == (name, kept.note)
            assert everything(view, self._groups()) == kept.rows
            for table in self.tables:
                mine = [key for key in self.now.rows if key[:2] == (table.group, table.number)]
                rows = RowIds.of(table, np.array([id for _, _, id in mine], np.int64))
                assert read(view, rows, table.schema.row_bytes) == [kept.rows.get(key) for key in mine]  # type: ignore[arg-type]

    def teardown(self) -> None:
        self._close_views()
        self.store.close()
        self.patched.undo()
        shutil.rmtree(self.directory)


class SnapshotHistories(Snapshots):
    durability = "snapshot"


class CommitHistories(Snapshots):
    durability = "commit"


class TestSnapshotHistories(SnapshotHistories.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=25, stateful_step_count=25)


class TestCommitHistories(CommitHistories.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=25, stateful_step_count=25)
