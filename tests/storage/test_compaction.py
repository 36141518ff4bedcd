"""Compaction: space stays within its bounds, every row keeps its newest version, nothing deleted comes back."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

from storage import CorruptRowError, LmdbStore, RowIds, StoreChangedError, StoreConfig, TableRef
from storage.row_log import committer, compaction
from storage.row_log.places import COUNT, LIVE, MAX_SEGMENT_ROWS, NUMBER, ROWS
from storage.testing import Rows, check_equal, contents, read, schema_of
from tests.storage.test_lmdb_faults import file_offset

SMALL = {"segment_bytes": 1 << 14, "write_buffer_bytes": 1 << 16, "index_shards": 16}
OFF = StoreConfig(**SMALL, compact_bytes_per_s=0)  # type: ignore[arg-type]
ON = StoreConfig(**SMALL)  # type: ignore[arg-type]


def put(store: LmdbStore, table: TableRef, ids: np.ndarray, version: int) -> Rows:
    """Rows of which every byte is the version."""
    store.put(RowIds.of(table, ids), np.full((len(ids), table.schema.row_bytes), version % 251, np.uint8))
    return {(table.number, int(id)): bytes([version % 251]) * table.schema.row_bytes for id in ids}


def half_dead(path: Path, durability: str = "commit") -> tuple[LmdbStore, TableRef, Rows]:
    """A store of which every segment is about half dead, which does not compact by itself."""
    store = LmdbStore(path, durability=durability, config=OFF)  # type: ignore[arg-type]
    table = store.open_table("t", schema_of(8))
    rows = put(store, table, np.arange(6000), 1)
    store.flush()
    rows |= put(store, table, np.arange(0, 6000, 2), 2)
    store.flush()
    return store, table, rows


class TestSpace:
    @pytest.mark.parametrize("durability", ["commit", "snapshot"])
    def test_it_stays_within_the_ratio_under_random_updates(self, tmp_path: Path, durability: str) -> None:
        rng = np.random.default_rng(0)
        with LmdbStore(tmp_path / "s", durability=durability, config=ON) as store:  # type: ignore[arg-type]
            table = store.open_table("t", schema_of(32))
            rows = put(store, table, np.arange(20_000), 0)
            for step in range(1, 120):
                rows |= put(store, table, rng.integers(0, 20_000, 1000), step)
                store.flush()
            stats = store.stats()
            assert stats.disk_bytes <= 2.6 * stats.live_bytes, "2 and what a few commits need, in a store this small"
            assert 0 < stats.rows_moved < stats.rows_written
            check_equal(store, table.group, rows)
        with LmdbStore(tmp_path / "s", durability=durability, config=ON) as store:  # type: ignore[arg-type]
            check_equal(store, table.group, rows)

    def test_a_larger_ratio_moves_less(self, tmp_path: Path) -> None:
        moved = []
        for ratio in (1.6, 3.0):
            rng = np.random.default_rng(0)
            with LmdbStore(tmp_path / str(ratio), config=StoreConfig(**SMALL, max_space_ratio=ratio)) as store:  # type: ignore[arg-type]
                table = store.open_table("t", schema_of(32))
                for step in range(150):
                    put(store, table, rng.integers(0, 10_000, 1000), step)
                    store.flush()
                moved.append(store.stats().rows_moved)
        assert moved[1] < moved[0]

    def test_a_store_that_is_never_flushed_does_not_grow_for_ever(self, tmp_path: Path) -> None:
        """With durability "commit" it makes states of its own, without touching the note."""
        config = StoreConfig(segment_bytes=1 << 17, write_buffer_bytes=1 << 20)
        store = LmdbStore(tmp_path / "s", config=config)
        table = store.open_table("t", schema_of(32))
        rows = put(store, table, np.arange(40_000), 0)
        store.flush(b"the note")
        for step in range(1, 30):
            rows |= put(store, table, np.arange(40_000), step)
        assert store.stats().disk_bytes < 6 * store.stats().live_bytes, "30 times would be without"
        assert store.note == b"the note"
        store.abandon()
        with LmdbStore(tmp_path / "s", durability="snapshot", config=config) as store:
            assert store.note == b"the note"
            assert contents(store, 0).keys() == rows.keys(), "each state is whole"

    def test_a_store_that_was_never_flushed_is_compacted_too(self, tmp_path: Path) -> None:
        """A segment must be covered by a state to be moved, and none was made while every segment had a live row."""
        config = StoreConfig(segment_bytes=1 << 15, write_buffer_bytes=1 << 18)
        with LmdbStore(tmp_path / "s", config=config) as store:
            table, rows = store.open_table("t", schema_of(32)), {}
            for step in range(60):
                ids = np.arange(5000)
                ids[::50] = 10_000 + step * 100 + np.arange(100)  # which stay as they are
                rows |= put(store, table, ids, step)
            stats = store.stats()
            assert stats.rows_moved > 0
            assert stats.disk_bytes < 12 * stats.live_bytes, "27 times what is live was put"
            check_equal(store, table.group, rows)
        with LmdbStore(tmp_path / "s", config=config) as store:
            check_equal(store, table.group, rows)

    def test_off_means_off(self, tmp_path: Path) -> None:
        store, table, rows = half_dead(tmp_path / "s")
        with store:
            for step in range(3, 20):
                rows |= put(store, table, np.arange(0, 6000, 3), step)
                store.flush()
            assert store.stats().rows_moved == 0
            check_equal(store, table.group, rows)

    def test_a_budget_of_bandwidth_is_kept(self, tmp_path: Path) -> None:
        """What is due is far more than it may move in any time that this test can take."""
        store, _, _ = half_dead(tmp_path / "s")
        store.close()
        config = StoreConfig(**SMALL, compact_bytes_per_s=1, max_space_ratio=1.3)  # type: ignore[arg-type]
        with LmdbStore(tmp_path / "s", config=config) as store:
            table = store.open_table("t", schema_of(8))
            for step in range(3, 40):
                put(store, table, np.arange(0, 6000, 5), step)
                store.flush()
            segment = config.filled_bytes(32)
            for _ in range(1000):  # it lets puts go first
                if store.stats().bytes_moved:
                    break
                time.sleep(0.01)
            assert 0 < store.stats().bytes_moved <= 2 * segment, "one segment at a time, and then it must wait"


class TestCompact:
    def test_everything_dead_goes(self, tmp_path: Path) -> None:
        store, table, rows = half_dead(tmp_path / "s")
        with store:
            done: list[tuple[int, int]] = []
            before = store.stats()
            store.compact(lambda *progress: done.append(progress))
            assert done and done[-1][0] == done[-1][1] > 0
            after = store.stats()
            assert after.segments < 0.75 * before.segments
            lines = store._session.groups[0].segments.lines
            assert (lines[:, LIVE] == lines[:, COUNT])[lines[:, NUMBER] > 0].all()
            check_equal(store, table.group, rows)
        with LmdbStore(tmp_path / "s", read_only=True) as store:
            check_equal(store, table.group, rows)

    def test_again_moves_nothing(self, tmp_path: Path) -> None:
        store, _, _ = half_dead(tmp_path / "s")
        with store:
            store.compact()
            moved = store.stats().rows_moved
            store.compact()
            assert store.stats().rows_moved == moved > 0

    @pytest.mark.parametrize("durability", ["commit", "snapshot"])
    def test_deleted_rows_stay_deleted_and_tombstones_go(self, tmp_path: Path, durability: str) -> None:
        store, table, rows = half_dead(tmp_path / "s", durability)
        gone = np.arange(1, 6000, 3)
        with store:
            store.delete(RowIds.of(table, gone))
            rows = {row: data for row, data in rows.items() if row[1] not in set(gone.tolist())}
            store.compact()
            check_equal(store, table.group, rows)
            store.compact()  # nothing is left that they hide
            assert (store._session.groups[0].segments.lines[:, COUNT] >> 32).sum() == 0
            check_equal(store, table.group, rows)
        with LmdbStore(tmp_path / "s", durability=durability, config=OFF) as store:  # type: ignore[arg-type]
            check_equal(store, table.group, rows)

    def test_a_row_deleted_and_put_again_in_one_segment_survives_the_moves_of_both(self, tmp_path: Path) -> None:
        """Its tombstone and the row have one epoch, and may be moved to different segments, the tombstone later."""
        store = LmdbStore(tmp_path / "s", config=OFF)
        table = store.open_table("t", schema_of(8))
        put(store, table, np.arange(2000), 1)
        for step in range(2, 6):
            store.delete(RowIds.of(table, np.arange(100)))
            rows = put(store, table, np.arange(2000), step)
            store.compact()
            rows |= put(store, table, np.arange(100, 2000, 2), step + 1)
            store.compact()
            check_equal(store, table.group, rows)
            store.abandon()
            store = LmdbStore(tmp_path / "s", config=OFF)
            store.open_table("t", schema_of(8))
            check_equal(store, table.group, rows)
        store.close()

    def test_many_tombstones_are_swept_in_the_background(self, tmp_path: Path) -> None:
        """Ids that come and go for ever leave nothing behind, although a cold segment never goes."""
        with LmdbStore(tmp_path / "s", config=ON) as store:
            table = store.open_table("t", schema_of(8))
            rows = put(store, table, np.arange(-3000, 0), 1)
            store.flush()
            for step in range(60):
                fleeting = np.arange(step * 1000, step * 1000 + 1000)
                put(store, table, fleeting, 2)
                store.delete(RowIds.of(table, fleeting))
                store.flush()
            tombstones = int((store._session.groups[0].segments.lines[:, COUNT] >> 32).sum())
            assert tombstones < 20_000, "of 60,000 deletions"
            check_equal(store, table.group, rows)
        with LmdbStore(tmp_path / "s", config=ON) as store:
            check_equal(store, table.group, rows)


class TestBesideOthers:
    def test_a_put_of_a_row_that_is_being_moved_wins(self, tmp_path: Path) -> None:
        """And a delete. While everything is moved again and again, nothing is ever missing or old."""
        store, table, rows = half_dead(tmp_path / "s")
        stop, wrong = Event(), list[str]()

        def compact() -> None:
            while not stop.is_set():
                store.compact()

        def look() -> None:
            ids = np.arange(0, 6000, 7)
            while not stop.is_set():
                for id, row in zip(ids.tolist(), read(store, RowIds.of(table, ids), 32), strict=True):
                    if id % 2 and row is None:
                        wrong.append(f"{id} was missing")
                    if row is not None and len(set(row)) != 1:
                        wrong.append(f"{id} was torn")

        with store:
            threads = [Thread(target=compact), Thread(target=look)]
            for thread in threads:
                thread.start()
            rng = np.random.default_rng(0)
            for step in range(3, 40):
                ids = rng.integers(0, 6000, 200)
                rows |= put(store, table, ids, step)
                even = np.unique(ids[ids % 2 == 0])[:20]
                store.delete(RowIds.of(table, even))
                rows = {row: data for row, data in rows.items() if row[1] not in set(even.tolist())}
                some = [(table.number, int(id)) for id in ids]
                seen = read(store, RowIds.of(table, ids), 32)
                assert seen == [rows.get(row) for row in some]
            stop.set()
            for thread in threads:
                thread.join()
            assert not wrong
            check_equal(store, table.group, rows)
        with LmdbStore(tmp_path / "s") as store:
            check_equal(store, table.group, rows)

    def test_a_scan_sees_every_row_once_although_there_is_something_to_move(self, tmp_path: Path) -> None:
        store, _, rows = half_dead(tmp_path / "s")
        store.close()
        config = StoreConfig(**SMALL, max_space_ratio=1.21)  # type: ignore[arg-type]
        with LmdbStore(tmp_path / "s", config=config) as store:
            table = store.open_table("t", schema_of(8))
            for step in range(3, 10):
                rows |= put(store, table, np.arange(0, 6000, 4), step)
                check_equal(store, table.group, rows)

    def test_a_damaged_row_stays_under_its_id(self, tmp_path: Path) -> None:
        store, table, _ = half_dead(tmp_path / "s")
        with store:
            group, one = store._session.groups[0], RowIds.of(table, np.array([1]))
            slot, row = divmod(int(group.index.find(group.segments.lines, one.tables, one.ids)[0]), MAX_SEGMENT_ROWS)
            at = file_offset(int(group.segments.lines[slot, ROWS])) + row * group.stride + 20
            with open(tmp_path / "s" / "data.mdb", "r+b", buffering=0) as file:
                os.pwrite(file.fileno(), b"\xff", at)
            store.compact()
            with pytest.raises(CorruptRowError, match="id 1 "):
                read(store, one, 32)
            others = RowIds.of(table, np.arange(2, 6000))
            assert None not in read(store, others, 32)

    def test_the_memory_that_it_takes_is_within_the_bound(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        with LmdbStore(tmp_path / "s", config=ON) as store:
            table = store.open_table("t", schema_of(32))
            for step in range(60):
                bound = store.memory_after(1000)
                put(store, table, rng.integers(0, 10_000, 1000), step)
                assert store.stats().memory_bytes <= bound
                store.flush()
            assert store.stats().rows_moved


def test_a_store_that_is_dropped_ends_its_thread(tmp_path: Path) -> None:

    store = LmdbStore(tmp_path / "s", config=ON)
    put(store, store.open_table("t", schema_of(8)), np.arange(10), 1)
    store.flush()
    name = f"tiered-emb store {store.path}"
    assert name in {thread.name for thread in threading.enumerate()}
    del store
    gc.collect()
    assert name not in {thread.name for thread in threading.enumerate()}


def test_a_segment_lives_until_the_one_that_its_rows_went_to_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state does not wait for moved rows, and must not delete what they were moved from either."""
    monkeypatch.setattr(committer, "_MOVED_SHARE", 1)  # the store is too small for that by itself
    store, table, rows = half_dead(tmp_path / "s")
    group, compactor = store._session.groups[0], store._session.writer.compactor  # type: ignore[union-attr]
    victim = compactor._victims(store._session.state.epoch, 1)[0]
    compactor._move(victim)
    assert group.moving is not None, "its rows do not fill a segment"
    assert group.segments.lines[victim.slot, LIVE] == 0
    for version in range(3, 6):
        rows |= put(store, table, np.arange(100), version)
        store.flush()
    assert group.moving is not None
    assert victim.is_there
    check_equal(store, table.group, rows)
    store.abandon()
    with LmdbStore(tmp_path / "s", config=OFF) as store:
        check_equal(store, table.group, rows)
        store.compact()
        check_equal(store, table.group, rows)


def test_a_segment_of_moved_rows_is_numbered_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all it was filled from is older, also what was put after it was begun."""
    monkeypatch.setattr(committer, "_MOVED_SHARE", 1)
    store, table, _ = half_dead(tmp_path / "s")
    group, compactor = store._session.groups[0], store._session.writer.compactor  # type: ignore[union-attr]
    compactor._move(compactor._victims(store._session.state.epoch, 1)[0])
    put(store, table, np.arange(3000), 3)
    put(store, table, np.arange(1, 3000, 2), 4)
    store.flush()
    newest = max(compactor._victims(store._session.state.epoch, 1000), key=lambda victim: victim.number)
    assert group.moving is not None and newest.number > group.moving.number
    compactor._move(newest)
    store.close()
    with LmdbStore(tmp_path / "s", config=OFF) as store:
        lines = store._session.groups[0].segments.lines
        assert newest.number < lines[:, NUMBER].max()


def test_little_waits_for_moved_rows_to_fill_a_segment(tmp_path: Path) -> None:
    """In a small store a state takes along what is being moved, so that what it was moved from goes."""
    store, table, _ = half_dead(tmp_path / "s")
    group, compactor = store._session.groups[0], store._session.writer.compactor  # type: ignore[union-attr]
    victim = compactor._victims(store._session.state.epoch, 1)[0]
    compactor._move(victim)
    for version in range(2):
        put(store, table, np.arange(10), version)
        store.flush()
    assert group.moving is None
    assert not victim.is_there
    store.close()


def test_a_scan_finds_rows_whose_segment_is_sealed_meanwhile(tmp_path: Path) -> None:
    """The segment gets its number then, and the scan knows segments by their numbers."""
    store, table, rows = half_dead(tmp_path / "s")
    compactor = store._session.writer.compactor  # type: ignore[union-attr]
    compactor._move(compactor._victims(store._session.state.epoch, 1)[0])
    scan = store.scan(table.group)
    found = [next(scan)]
    store.flush(b"a state, with which little waits for the segment to be full")
    found += scan
    assert sum(len(some) for some, _ in found) == len(rows)
    store.close()


def test_a_put_between_the_hold_of_a_scan_and_its_first_look_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its hold rows would move from segments it has not seen to one that it does not know."""
    store, table, _ = half_dead(tmp_path / "s")
    session = store._session
    group, compactor = session.groups[0], session.writer.compactor  # type: ignore[union-attr]
    scanning = session.scanning

    @contextmanager
    def overtaken() -> Iterator[int]:
        with scanning() as version:
            put(store, table, np.arange(7000, 7010), 3)
            for victim in compactor._victims(session.state.epoch, 3):
                compactor._move(victim)
            group.seal_moving(compactor._of.store, compactor._committer.take_number)
            yield version

    monkeypatch.setattr(session, "scanning", overtaken)
    with pytest.raises(StoreChangedError):
        list(store.scan(table.group))
    store.close()


def test_tombstones_go_although_rows_are_being_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "_MOVED_SHARE", 1)
    store = LmdbStore(tmp_path / "s", config=OFF)
    table = store.open_table("t", schema_of(8))
    put(store, table, np.arange(5000), 1)
    store.flush()
    store.delete(RowIds.of(table, np.arange(5000)))
    store.flush()
    kept = put(store, table, np.arange(6000, 8000), 2)
    store.flush()
    put(store, table, np.arange(6000, 7990), 3)
    store.flush()
    compactor = store._session.writer.compactor  # type: ignore[union-attr]
    group = store._session.groups[0]
    compactor._move(compactor._victims(store._session.state.epoch, 1)[0])
    assert group.moving is not None
    for note in (b"1", b"2", b"3"):
        store.flush(note)
    lines = group.segments.lines
    assert group.moving is not None
    assert (lines[:, COUNT] >> 32).sum() == 0
    assert store.stats().rows == len(kept)
    store.close()


def half_deleted(path: Path) -> LmdbStore:
    """A store of which a segment has tombstones, live rows and dead ones, and which does not compact by itself."""
    store = LmdbStore(path, config=OFF)
    table = store.open_table("t", schema_of(8))
    put(store, table, np.arange(1000), 1)
    store.flush()
    put(store, table, np.arange(2000, 2300), 1)
    store.delete(RowIds.of(table, np.arange(200)))
    store.flush()
    put(store, table, np.arange(2000, 2100), 2)
    store.flush()
    return store


def tombstones_of(store: LmdbStore) -> list[int]:
    """How many each segment has."""
    lines = store._session.groups[0].segments.lines
    counts: list[int] = (lines[lines[:, NUMBER] > 0, COUNT] >> 32).tolist()
    return counts


def test_a_segment_that_a_close_left_half_way_is_moved_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tombstones were taken off twice, and a segment with less than none of them never went."""
    store = half_deleted(tmp_path / "s")
    monkeypatch.setattr(compaction, "_BLOCK_ROWS", 400)
    compactor = store._session.writer.compactor  # type: ignore[union-attr]
    victims = compactor._victims(store._session.state.epoch, 8, every=True)
    victim = next(one for one in victims if one.has_tombstones)
    with store._session.lock:
        none = np.zeros(0, np.uint64), np.zeros(0, np.bool_)
        reached = compactor._move_block(victim, 0, np.zeros(500, np.bool_), *none)
        compactor._reached[victim.group.group, victim.number] = reached
    assert 0 < reached < 500 and victim.has_tombstones
    store.close()

    with LmdbStore(tmp_path / "s", config=OFF) as store:
        assert sum(tombstones_of(store)) >= 200
        compactor = store._session.writer.compactor  # type: ignore[union-attr]
        for victim in compactor._victims(store._session.state.epoch, 8, every=True):
            compactor._move(victim)
        assert min(tombstones_of(store)) == 0
        store.compact()
        assert sum(tombstones_of(store)) == 0


def test_a_segment_that_was_moved_since_it_was_chosen_is_not_moved_again(tmp_path: Path) -> None:
    """As when compaction moves what a sweep of tombstones has chosen, between two of its steps."""
    with half_deleted(tmp_path / "s") as store:
        compactor = store._session.writer.compactor  # type: ignore[union-attr]
        victims = compactor._victims(store._session.state.epoch, 8, every=True)
        for victim in victims * 2:
            compactor._move(victim)
        assert min(tombstones_of(store)) == 0 and sum(tombstones_of(store)) == 200
