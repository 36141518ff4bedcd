"""Where segments lie, and when their pages are asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from storage import CorruptSegmentError, LmdbStore, RowIds, StoreConfig
from storage.row_log import pages
from storage.row_log.lmdb_pages import place_of_value
from storage.row_log.pages import PageAdvisor
from storage.testing import check_equal, random_rows, schema_of

TINY = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, index_shards=16)


@pytest.fixture
def store(tmp_path: Path) -> LmdbStore:
    store = LmdbStore(tmp_path / "s", config=TINY)
    table = store.open_table("t", schema_of(8))
    store.put(RowIds.of(table, np.arange(3000)), random_rows(np.random.default_rng(0), 3000, table))
    store.flush()
    return store


def test_segments_lie_where_lmdb_says(store: LmdbStore) -> None:
    log = store._session.log
    with store, log.reading() as txn:
        segments = log.segments(txn)
        assert list(segments) == log.numbers(txn).tolist() and len(segments) > 10
        for number, segment in segments.items():
            value = np.frombuffer(txn.get(number.to_bytes(8, "big"), db=log._segments), np.uint8)
            assert (segment.ctypes.data, len(segment)) == (value.ctypes.data, len(value))
            assert (log.segment(txn, number) == value).all()


def test_small_values_and_places_outside_the_file_are_refused(store: LmdbStore) -> None:
    log = store._session.log
    with store, log.reading() as txn:
        cursor = txn.cursor(db=log._states)
        assert cursor.first()
        with pytest.raises(CorruptSegmentError, match="no pages of its own"):
            place_of_value(cursor.key(), log.page_bytes, 1000)
        cursor = txn.cursor(db=log._segments)
        assert cursor.last()
        place_of_value(cursor.key(), log.page_bytes, 1000)
        with pytest.raises(CorruptSegmentError, match="damaged"):
            place_of_value(cursor.key(), log.page_bytes, 3)


def test_rows_in_memory_are_not_asked_for(store: LmdbStore) -> None:
    with store:
        rows = RowIds(0, np.full(3000, store._session.groups[0].tables[0], np.uint32), np.arange(3000))
        store.get(rows, np.zeros((3000, 32), np.uint8), np.zeros(3000, np.bool_))
        assert store._session.groups[0]._pages.batches_asked == 0


def test_rows_not_in_memory_are_asked_for_and_the_same(store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with store:
        expected = {
            (int(table), int(id)): row.tobytes()
            for rows, data in store.scan(0)
            for table, id, row in zip(rows.tables, rows.ids, data, strict=True)
        }
        monkeypatch.setattr(PageAdvisor, "resident", lambda *_: False)
        before = store._session.groups[0]._pages.batches_asked
        check_equal(store, 0, expected)
        assert store._session.groups[0]._pages.batches_asked > before
        rows = RowIds(0, np.full(2, store._session.groups[0].tables[0], np.uint32), np.array([5, 99_999]))
        store.put(rows, np.zeros((2, 32), np.uint8))
        check_equal(store, 0, expected | {(int(rows.tables[0]), id): bytes(32) for id in (5, 99_999)})


def test_page_faults_make_the_next_batches_ask(monkeypatch: pytest.MonkeyPatch, store: LmdbStore) -> None:
    faults = [0]
    monkeypatch.setattr(pages, "major_faults", lambda: faults[0])
    advisor, group = store._session.groups[0]._pages, store._session.groups[0]
    places = group.index.find(group.segments.lines, np.full(9, group.tables[0], np.uint32), np.arange(9))
    with store:
        for happened, asks in zip((0, 100, 0, 0, 0, 0, 0, 3, 0), (0, 0, 1, 1, 1, 1, 0, 0, 0), strict=True):
            before = pages.major_faults()
            assert advisor.pays(group.segments.lines, np.uint64(group.stride), places) == bool(asks)
            faults[0] += happened
            advisor.after_rows(before)
