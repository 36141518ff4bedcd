"""What is known of rows that are put, and rows that are announced: neither changes which rows a store has."""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import CorruptRowError, LmdbStore, RowIds, StoreConfig, TableRef
from storage.id_index import tag_of
from storage.memory_store import MemoryStore
from storage.row_log import group_rows
from storage.row_log.gather import match_ids
from storage.row_log.group_rows import GroupRows
from storage.row_log.hashing import mix
from storage.row_log.lock import StoreLock
from storage.row_log.pages import PageAdvisor
from storage.row_log.places import IDS
from storage.row_log.read_ahead import ReadAhead
from storage.store import HintedStore, Stored
from storage.testing import schema_of

SIZES = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 15, index_shards=2, compact_bytes_per_s=0)


@cache
def ids_with_equal_tags(table: int, count: int = 1 << 16) -> tuple[int, int]:
    """Two ids that an index of two shards tells apart by the ids stored with their rows only."""
    seen: dict[tuple[int, int], int] = {}
    for id in range(count):
        hash = np.uint64(mix(np.uint32(table), np.int64(id)))
        key = int(hash >> np.uint64(63)), int(tag_of(hash))
        if key in seen:
            return seen[key], id
        seen[key] = id
    raise AssertionError("no two such ids; look among more of them")


def rows_of(table: TableRef, ids: list[int], known: list[bool] | None = None, deletions: int = 0) -> RowIds:
    stored = None if known is None else Stored(np.array(known, np.bool_), deletions)
    array = np.array(ids, np.int64)
    return RowIds(table.group, np.full(len(ids), table.number, np.uint32), array, stored)


def values(table: TableRef, *numbers: int) -> np.ndarray:
    return np.repeat(np.array(numbers, np.uint8), table.schema.row_bytes).reshape(len(numbers), -1)


def read(store: LmdbStore, table: TableRef, ids: list[int]) -> list[int | None]:
    out, found = np.zeros((len(ids), table.schema.row_bytes), np.uint8), np.zeros(len(ids), np.bool_)
    store.get(rows_of(table, ids), out, found)
    return [int(row[0]) if here else None for row, here in zip(out, found, strict=True)]


def test_lmdb_stores_are_hinted_and_others_need_not_be(tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "s") as store:
        assert isinstance(store, HintedStore)
    assert not isinstance(MemoryStore(), HintedStore)


@pytest.mark.parametrize("known", [True, False])
def test_rows_whose_tags_are_equal_stay_apart(tmp_path: Path, known: bool) -> None:
    with LmdbStore(tmp_path / "s", config=SIZES) as store:
        table = store.open_table("t", schema_of(8))
        one, other = ids_with_equal_tags(table.number)
        store.put(rows_of(table, [one, other]), values(table, 1, 2))
        store.flush()
        store.put(rows_of(table, [other], [known], store.deletions), values(table, 3))
        store.put(rows_of(table, [one], [known], store.deletions), values(table, 4))
        assert read(store, table, [one, other]) == [4, 3]
        assert store.stats().rows == 2


def test_what_was_known_before_a_delete_is_not_believed(tmp_path: Path) -> None:
    """Else the row of an id that is gone would take the place of another's that has its tag."""
    with LmdbStore(tmp_path / "s", config=SIZES) as store:
        table = store.open_table("t", schema_of(8))
        one, other = ids_with_equal_tags(table.number)
        store.put(rows_of(table, [one, other]), values(table, 1, 2))
        store.flush()
        before = store.deletions
        store.delete(rows_of(table, [one]))
        assert store.deletions != before
        store.put(rows_of(table, [one], [True], before), values(table, 3))
        assert read(store, table, [one, other]) == [3, 2]
        assert store.stats().rows == 2


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_histories_of_puts_with_what_is_known(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    with LmdbStore(tmp_path_factory.mktemp("h") / "s", config=SIZES) as store:
        table = store.open_table("t", schema_of(8))
        pair = ids_with_equal_tags(table.number)
        model: dict[int, int] = {}
        for step in range(data.draw(st.integers(1, 12))):
            ids = data.draw(st.lists(st.sampled_from([*pair, -1, 0, 1, 2, 3]), min_size=1, max_size=6))
            match data.draw(st.sampled_from(["put", "put", "delete", "flush"])):
                case "put":
                    known = [id in model and data.draw(st.booleans()) for id in ids]
                    store.put(rows_of(table, ids, known, store.deletions), values(table, *[step + 1] * len(ids)))
                    model |= dict.fromkeys(ids, step + 1)
                case "delete":
                    store.delete(rows_of(table, ids))
                    model = {id: value for id, value in model.items() if id not in ids}
                case _:
                    store.flush()
        wanted = [*pair, -1, 0, 1, 2, 3]
        assert read(store, table, wanted) == [model.get(id) for id in wanted]
        assert store.stats().rows == len(model)


def test_stored_ids_of_known_rows_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LmdbStore(tmp_path / "s", config=SIZES) as store:
        table = store.open_table("t", schema_of(8))
        ids = list(range(100))
        store.put(rows_of(table, ids), values(table, *ids))
        store.flush()
        looked: list[int] = []
        compared: list[int] = []

        def resident(self: PageAdvisor, segments: object, column: int, stride: object, places: np.ndarray) -> bool:
            if column == IDS:
                looked.append(len(places))
            return True

        def match(segments: object, tables: object, ids: object, places: object, matched: np.ndarray) -> None:
            compared.append(int((~matched).sum()))
            match_ids(segments, tables, ids, places, matched)

        monkeypatch.setattr(PageAdvisor, "resident", resident)
        monkeypatch.setattr(group_rows, "match_ids", match)
        store.put(rows_of(table, ids, [True] * 100, store.deletions), values(table, *ids))
        assert (looked, compared) == ([], [0])
        store.put(rows_of(table, ids, [True] * 99 + [False], store.deletions), values(table, *ids))
        assert (looked, compared) == ([1], [0, 1])


def test_what_is_known_is_of_each_row() -> None:
    with pytest.raises(ValueError, match="what is known of rows"):
        RowIds(0, np.zeros(3, np.uint32), np.zeros(3, np.int64), Stored(np.zeros(2, np.bool_), 0))


class _Asked:
    """Stands in for the store of a `ReadAhead`: notes what is asked for, once it may be."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.may, self.met = threading.Event(), threading.Event()
        self.may.set()

    def __call__(self, rows: RowIds) -> None:
        self.met.set()
        assert self.may.wait(60)
        self.ids += rows.ids.tolist()


def ended(ahead: ReadAhead) -> None:
    thread = ahead._thread
    if thread is not None:
        thread.join(60)
        assert not thread.is_alive()


def numbered(first: int, stop: int, group: int = 0) -> RowIds:
    return RowIds(group, np.zeros(stop - first, np.uint32), np.arange(first, stop))


def test_announced_rows_are_asked_for_in_order_and_the_thread_ends() -> None:
    asked = _Asked()
    ahead = ReadAhead(StoreLock(), asked)
    asked.may.clear()
    ahead.announce(numbered(0, 3000))
    ahead.announce(numbered(5000, 5003))
    asked.may.set()
    ended(ahead)
    assert asked.ids == [*range(3000), *range(5000, 5003)]
    assert ahead._thread is None
    ahead.announce(numbered(7, 9))
    ended(ahead)
    assert asked.ids[-2:] == [7, 8]


def test_a_get_has_the_disk_to_itself_and_takes_over_its_rows() -> None:
    asked, lock = _Asked(), StoreLock()
    ahead = ReadAhead(lock, asked)
    with ahead.giving_way(numbered(0, 1)):
        ahead.announce(numbered(0, 3000))
        ahead.announce(numbered(0, 3000, group=1))
        ahead.announce(numbered(8000, 8002))
        with ahead.giving_way(numbered(-5, 3001)):
            pass
        assert asked.ids == []
    ended(ahead)
    assert asked.ids == [*range(3000), 8000, 8001]


def test_too_many_batches_are_not_kept() -> None:
    asked = _Asked()
    ahead = ReadAhead(StoreLock(), asked)
    with ahead.giving_way(numbered(0, 1)):
        for first in range(0, 100, 10):
            ahead.announce(numbered(first, first + 10))
        assert len(ahead._left) == 4
    ended(ahead)
    assert asked.ids == list(range(40))


@pytest.mark.parametrize("error", [CorruptRowError(1, 2, "a test"), MemoryError()])
def test_an_error_ends_it_until_the_next_time_and_is_not_heard_of(error: Exception) -> None:
    calls = []

    def ask(rows: RowIds) -> None:
        calls.append(len(rows))
        raise error

    ahead = ReadAhead(StoreLock(), ask)
    for times in (1, 2):
        with ahead.giving_way(numbered(-1, 0)):
            ahead.announce(numbered(0, 3000))
            ahead.announce(numbered(0, 3000))
        ended(ahead)
        assert len(calls) == times
        assert ahead._thread is None and not ahead._left


def test_a_get_of_equal_ids_of_another_table_or_of_a_few_rows_takes_nothing_over() -> None:
    asked = _Asked()
    ahead = ReadAhead(StoreLock(), asked)
    with ahead.giving_way(numbered(-1, 0)):
        ahead.announce(numbered(0, 600))
        with ahead.giving_way(RowIds(0, np.ones(600, np.uint32), np.arange(600))), ahead.giving_way(numbered(500, 700)):
            pass
    ended(ahead)
    assert asked.ids == list(range(600))


def test_what_is_announced_is_copied() -> None:
    asked, rows = _Asked(), numbered(0, 600)
    ahead = ReadAhead(StoreLock(), asked)
    with ahead.giving_way(numbered(-1, 0)):
        ahead.announce(rows)
        rows.ids[:] = -7
    ended(ahead)
    assert asked.ids == list(range(600))


def test_a_thread_of_a_child_may_get(tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "s", config=SIZES) as store:
        table = store.open_table("t", schema_of(8))
        store.put(rows_of(table, [1]), values(table, 5))
        store.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                done: list[int | None] = []
                thread = threading.Thread(target=lambda: done.extend(read(store, table, [1])), daemon=True)
                thread.start()
                thread.join(20)
                code = 0 if done == [5] else 2
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0


def test_announcing_changes_nothing(tmp_path: Path) -> None:
    """Of rows that are there, missing, or of no group; before and after the store is closed, and in a child."""
    store = LmdbStore(tmp_path / "s", config=SIZES)
    table = store.open_table("t", schema_of(8))
    ids = list(range(2000))
    store.put(rows_of(table, ids), values(table, *[id % 251 for id in ids]))
    store.flush()
    before = store.stats()
    store.will_need(rows_of(table, [*ids, -5, 10**12]))
    store.will_need(rows_of(table, []))
    ended(store._read_ahead)
    store.will_need(RowIds(7, np.zeros(1, np.uint32), np.zeros(1, np.int64)))
    ended(store._read_ahead)
    assert store.stats() == before
    assert read(store, table, [5, 1999, -5]) == [5, 1999 % 251, None]
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            store.will_need(rows_of(table, ids))
            code = 0 if store._read_ahead._thread is None else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    store.close()
    store.will_need(rows_of(table, ids))
    ended(store._read_ahead)


def test_rows_that_were_announced_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageAdvisor, "resident", lambda *arguments: False)
    with LmdbStore(tmp_path / "s", config=SIZES) as store:
        table = store.open_table("t", schema_of(8))
        store.put(rows_of(table, [1, 2, 3]), values(table, 1, 2, 3))
        store.flush()
        group: GroupRows = store._session.groups[0]
        assert not store.waits_for_disk
        before = group._pages.batches_asked
        store.will_need(rows_of(table, [1, 2]))
        ended(store._read_ahead)
        assert group._pages.batches_asked == before + 1
        assert store.waits_for_disk
        monkeypatch.setattr(PageAdvisor, "resident", lambda *arguments: True)
        for _ in range(100):
            read(store, table, [1])
        assert not store.waits_for_disk
