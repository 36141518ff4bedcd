"""HeapStore: the contract, any history beside MemoryStore, and what it promises of its memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import HeapStore, MemoryStore, RowIds, Store, TableRef
from storage.testing import StoreContract, contents, random_rows, read, schema_of

ROW_BYTES = 12
TABLES = ("a", "b", "c")


class TestHeapStore(StoreContract):
    def make_store(self, path: Path) -> Store:
        return HeapStore()


class TestHeapStoreWithTinyBlocks(StoreContract):
    """A block for nearly every row, parts of a few ids, scans that give a few rows at a time."""

    @pytest.fixture(autouse=True)
    def _tiny(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, size in (("_BLOCK_BYTES", 100), ("_PART_ROWS", 7), ("_SCAN_ROWS", 2), ("_SHARDS", 2)):
            monkeypatch.setattr(f"storage.heap_store.{name}", size)

    def make_store(self, path: Path) -> Store:
        return HeapStore()


ID = st.integers(-8, 8) | st.sampled_from([-(2**63), 2**63 - 1, 2**16, 2**16 + 1])
BATCH = st.lists(st.tuples(st.integers(0, len(TABLES) - 1), ID), max_size=40)
HISTORY = st.lists(st.tuples(st.sampled_from(["put", "put", "delete", "get"]), BATCH), max_size=25)


def _opened(store: Store) -> list[TableRef]:
    return [store.open_table(name, schema_of(ROW_BYTES // 4)) for name in TABLES]


@given(HISTORY, st.integers(0, 2**32))
def test_any_history_equals_memory_store(history: list[tuple[str, list[tuple[int, int]]]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    with HeapStore() as heap, MemoryStore() as plain:
        tables = _opened(heap)
        assert _opened(plain) == tables
        for verb, batch in history:
            numbers = np.array([tables[which].number for which, _ in batch], np.uint32)
            rows = RowIds(tables[0].group, numbers, np.array([id for _, id in batch], np.int64))
            if verb == "put":
                data = random_rows(rng, len(batch), tables[0])
                heap.put(rows, data)
                plain.put(rows, data)
            elif verb == "delete":
                heap.delete(rows)
                plain.delete(rows)
            else:
                assert read(heap, rows, ROW_BYTES) == read(plain, rows, ROW_BYTES)
        assert contents(heap, tables[0].group) == contents(plain, tables[0].group)
        for counter in ("rows", "rows_read", "rows_written", "bytes_read", "bytes_written", "live_bytes"):
            assert getattr(heap.stats(), counter) == getattr(plain.stats(), counter)


def test_places_of_deleted_rows_are_taken_again() -> None:
    with HeapStore() as store:
        table = store.open_table("t", schema_of(32))
        data = np.zeros((20_000, 128), np.uint8)
        store.put(RowIds.of(table, np.arange(20_000)), data)
        held = len(store._groups[0]._blocks)  # the index may grow by other ids; blocks may not
        for first in range(20_000, 100_000, 20_000):
            store.delete(RowIds.of(table, np.arange(first - 20_000, first)))
            assert store.stats().rows == 0
            store.put(RowIds.of(table, np.arange(first, first + 20_000)), data)
        assert len(store._groups[0]._blocks) == held


def test_growth_moves_no_row() -> None:
    with HeapStore() as store:
        table = store.open_table("t", schema_of(4))
        store.put(RowIds.of(table, np.arange(1000)), np.zeros((1000, 16), np.uint8))
        before = store._groups[0]._segments.lines[1].copy()
        store.put(RowIds.of(table, np.arange(200_000)), np.ones((200_000, 16), np.uint8))
        after = store._groups[0]._segments.lines
        assert after[1, :3].tolist() == before[:3].tolist()
        assert len(store._groups[0]._blocks) == 1 + 200_000 // store._groups[0]._block_rows


def test_ids_of_one_tag_are_told_apart() -> None:
    """Half a million ids in few shards: many missing ones meet an entry of their 24 bits."""
    rng = np.random.default_rng(0)
    with HeapStore() as store:
        table = store.open_table("t", schema_of(2))
        ids = rng.integers(-(2**63), 2**63 - 1, 500_000)
        store.put(RowIds.of(table, ids), ids.view(np.uint8).reshape(-1, 8))
        asked = np.concatenate([ids, rng.integers(-(2**63), 2**63 - 1, 500_000)])
        out, found = np.zeros((len(asked), 8), np.uint8), np.zeros(len(asked), np.bool_)
        store.get(RowIds.of(table, asked), out, found)
        assert (found == np.isin(asked, ids)).all()
        assert (out[found].reshape(-1).view(np.int64) == asked[found]).all()
        assert not out[~found].any()


def test_tables_of_one_id_and_one_tag_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One id under 40,000 table numbers in two shards: about a dozen pairs share all 25 bits that the index keeps."""
    monkeypatch.setattr("storage.heap_store._SHARDS", 2)
    with HeapStore() as store:
        group = store.open_table("t", schema_of(1)).group
        numbers = np.arange(40_000, dtype=np.uint32)
        rows = RowIds(group, numbers, np.full(40_000, 7))
        store.put(RowIds(group, numbers[::2], rows.ids[::2]), numbers[::2].copy().view(np.uint8).reshape(-1, 4))
        out, found = np.zeros((40_000, 4), np.uint8), np.zeros(40_000, np.bool_)
        store.get(rows, out, found)
        assert (found == (numbers % 2 == 0)).all()
        store.put(rows, numbers[::-1].copy().view(np.uint8).reshape(-1, 4))
        store.get(rows, out, found)
        assert found.all()
        assert (out.reshape(-1).view(np.uint32) == numbers[::-1]).all()


def test_bound_of_memory_holds_for_rows_of_any_group() -> None:
    rng = np.random.default_rng(1)
    with HeapStore() as store:
        tables = [store.open_table(f"t{width}", schema_of(width)) for width in (1, 64, 5000)]
        for count in (1, 60, 3000):
            bound = store.memory_after(count)
            for table, ids in zip(tables, np.array_split(rng.integers(-(2**63), 2**63 - 1, count), 3), strict=True):
                store.put(RowIds.of(table, ids), np.zeros((len(ids), table.schema.row_bytes), np.uint8))
            assert store.stats().memory_bytes <= bound


def test_closing_gives_the_rows_back() -> None:
    store = HeapStore()
    table = store.open_table("t", schema_of(4))
    store.put(RowIds.of(table, np.arange(10)), np.zeros((10, 16), np.uint8))
    assert store.stats().memory_bytes > 10 * 16
    store.close()
    assert (store.stats().rows, store.stats().memory_bytes, store.stats().rows_written) == (0, 0, 10)
