"""What an LmdbStore finds when it opens, what it writes, and what it deletes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from storage import LmdbStore, RowIds, StoreConfig, StoreConfigError, StoreReadOnlyError, TableRef
from storage.row_log.places import COUNT, NUMBER
from storage.store import StoreStats
from storage.testing import check_equal, random_rows, read, schema_of

TINY = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, index_shards=16)


def open_store(path: Path, durability: str = "snapshot", config: StoreConfig = TINY, **more: bool) -> LmdbStore:
    return LmdbStore(path, durability=durability, config=config, **more)  # type: ignore[arg-type]


def die(store: LmdbStore) -> None:
    """End a store as a killed process would: nothing more is written, all locks go."""
    store.abandon()


def put(store: LmdbStore, table: TableRef, ids: NDArray[np.int64], seed: int) -> dict[tuple[int, int], bytes]:
    data = random_rows(np.random.default_rng(seed), len(ids), table)
    store.put(RowIds.of(table, ids), data)
    return {(table.number, id): row.tobytes() for id, row in zip(ids.tolist(), data, strict=True)}


class TestDurability:
    def test_snapshot_opens_at_the_last_flush(self, tmp_path: Path) -> None:
        store = open_store(tmp_path / "s")
        table = store.open_table("t", schema_of(8))
        rows = put(store, table, np.arange(3000), 1)
        store.flush(b"one")
        commits = store.stats().commits
        put(store, table, np.arange(1000, 5000), 2)
        store.delete(RowIds.of(table, np.arange(100)))
        assert store.stats().commits > commits + 10, "the test needs later segments on disk"
        die(store)
        with open_store(tmp_path / "s") as again:
            assert again.note == b"one"
            check_equal(again, table.group, rows)

    def test_what_was_discarded_never_comes_back(self, tmp_path: Path) -> None:
        store = open_store(tmp_path / "s")
        table = store.open_table("t", schema_of(8))
        rows = put(store, table, np.arange(500), 1)
        store.flush()
        put(store, table, np.arange(400, 5000), 2)
        die(store)
        with open_store(tmp_path / "s") as again:
            rows |= put(again, table, np.arange(10), 3)
        for durability in ("snapshot", "commit"):
            with open_store(tmp_path / "s", durability) as again:
                check_equal(again, table.group, rows)

    def test_numbers_of_discarded_segments_are_never_given_again(self, tmp_path: Path) -> None:
        """A reader that saw the discarded ones would take the new ones for them."""
        store = open_store(tmp_path / "s")
        table = store.open_table("t", schema_of(8))
        rows = put(store, table, np.arange(500), 1)
        store.flush(b"kept")
        put(store, table, np.arange(400, 5000), 2)
        with store._session.log.reading() as txn:
            last = store._session.log.numbers(txn)[-1]
        die(store)
        open_store(tmp_path / "s").close()
        with open_store(tmp_path / "s") as again:
            assert again.note == b"kept"
            rows |= put(again, table, np.array([7]), 3)
            assert again._session.groups[0].segments.lines[:, NUMBER].max() > last
            check_equal(again, table.group, rows)

    def test_a_store_that_never_flushed_is_empty_as_a_snapshot(self, tmp_path: Path) -> None:
        store = open_store(tmp_path / "s")
        table = store.open_table("t", schema_of(8))
        put(store, table, np.arange(5000), 1)
        die(store)
        with open_store(tmp_path / "s") as again:
            check_equal(again, table.group, {})

    def test_commit_keeps_every_committed_row(self, tmp_path: Path) -> None:
        store = open_store(tmp_path / "s", "commit")
        table = store.open_table("t", schema_of(8))
        rows = put(store, table, np.arange(3000), 1)
        buffered = {(table.number, int(id)) for id in _open_ids(store)}
        assert 0 < len(buffered) < 200
        die(store)
        with open_store(tmp_path / "s", "commit") as again:
            check_equal(again, table.group, {row: data for row, data in rows.items() if row not in buffered})
            assert again.note == b""
        with open_store(tmp_path / "s", "snapshot") as again:  # closing made a complete state of them
            assert again.stats().rows == 3000 - len(buffered)

    def test_rows_and_deletions_before_and_after_reopening(self, tmp_path: Path) -> None:
        rows: dict[tuple[int, int], bytes] = {}
        for step in range(6):
            with open_store(tmp_path / "s") as store:
                table = store.open_table("t", schema_of(8))
                check_equal(store, table.group, rows)
                rows |= put(store, table, np.arange(step * 100, step * 100 + 400), step)
                gone = np.arange(step * 150, step * 150 + 60)
                store.delete(RowIds.of(table, gone))
                rows = {row: data for row, data in rows.items() if row[1] not in gone}
        with open_store(tmp_path / "s") as store:
            check_equal(store, table.group, rows)

    def test_an_open_and_empty_segment_does_not_carry_rows_into_a_state(self, tmp_path: Path) -> None:
        store = open_store(tmp_path / "s")
        table = store.open_table("t", schema_of(8))
        store.delete(RowIds.of(table, np.arange(3)))  # begins a segment that gets no row
        rows = put(store, table, np.arange(0), 0)
        store.flush(b"x")
        put(store, table, np.arange(5000), 1)
        die(store)
        with open_store(tmp_path / "s") as again:
            check_equal(again, table.group, rows)


def _open_ids(store: LmdbStore) -> NDArray[np.int64]:
    """Ids whose rows no commit has reached."""
    group = store._session.groups[0]
    slots = [buffer.slot for buffer, _ in group.sealed] + ([group.open.slot] if group.open else [])
    counts = group.segments.lines[slots, COUNT] & 0xFFFFFFFF
    return np.arange(3000)[3000 - counts.sum() :]


class TestWhatIsWritten:
    def test_flushing_twice_writes_nothing_the_second_time(self, tmp_path: Path) -> None:
        with open_store(tmp_path / "s") as store:
            table = store.open_table("t", schema_of(8))
            put(store, table, np.arange(100), 1)
            store.flush(b"a")
            before = store.stats()
            store.flush()
            store.flush(b"a")
            store.delete(RowIds.of(table, np.array([12345])))
            store.flush()
            after = store.stats()
            assert (after.commits, after.bytes_written, after.disk_bytes) == (
                before.commits, before.bytes_written, before.disk_bytes,
            )  # fmt: skip
            store.flush(b"b")
            assert (store.stats().commits, store.stats().bytes_written) == (before.commits + 1, before.bytes_written)

    def test_bytes_written_stay_close_to_bytes_put(self, tmp_path: Path) -> None:
        with LmdbStore(tmp_path / "s", durability="snapshot") as store:
            table = store.open_table("t", schema_of(32))
            for step in range(4):
                put(store, table, np.arange(20_000), step)
            store.flush()
            assert store.stats().bytes_written / (80_000 * 128) < 1.14

    def test_dead_segments_go_and_disk_use_stays_bounded(self, tmp_path: Path) -> None:
        with open_store(tmp_path / "s") as store:
            table = store.open_table("t", schema_of(8))
            sizes: list[StoreStats] = []
            for step in range(40):
                rows = put(store, table, np.arange(2000), step)
                store.flush()
                sizes.append(store.stats())
            assert max(size.segments for size in sizes) <= 2 * sizes[0].segments + 2
            assert sizes[-1].disk_bytes <= 4 * sizes[0].disk_bytes
            assert sizes[-1].disk_bytes <= 1.1 * sizes[10].disk_bytes + (1 << 17), "only the records of commits grow"
            check_equal(store, table.group, rows)

    def test_a_state_keeps_the_segments_it_needs(self, tmp_path: Path) -> None:
        """Rows of the state are overwritten, and all of that committed, but not flushed."""
        store = open_store(tmp_path / "s")
        table = store.open_table("t", schema_of(8))
        put(store, table, np.arange(2000), 1)
        store.flush()
        rows = put(store, table, np.arange(2000), 2)
        store.flush()
        for step in range(3, 8):
            put(store, table, np.arange(2000), step)
        store.delete(RowIds.of(table, np.arange(2000)))
        die(store)
        with open_store(tmp_path / "s") as again:
            check_equal(again, table.group, rows)

    def test_tombstones_go_with_the_last_thing_that_they_hide(self, tmp_path: Path) -> None:
        with open_store(tmp_path / "s") as store:
            table = store.open_table("t", schema_of(8))
            kept = put(store, table, np.arange(1), 0)
            put(store, table, np.arange(1, 2000), 1)
            store.flush()
            store.delete(RowIds.of(table, np.arange(1, 2000)))
            store.flush()
            tombstones = _tombstones(store)
            assert tombstones == 1999, "the segment of row 0 holds older versions of some"
            put(store, table, np.arange(1), 2)
            kept = put(store, table, np.arange(1), 3)
            store.flush()
            store.flush(b"the commit after that deletes what was dead")
            assert _tombstones(store) == 0
        with open_store(tmp_path / "s") as store:
            check_equal(store, table.group, kept)

    def test_rows_wider_than_a_segment(self, tmp_path: Path) -> None:
        with open_store(tmp_path / "s") as store:
            table = store.open_table("t", schema_of(5000))
            rows = put(store, table, np.arange(7), 1)
            check_equal(store, table.group, rows)
        with open_store(tmp_path / "s") as store:
            check_equal(store, table.group, rows)

    def test_segments_never_move_while_they_live(self, tmp_path: Path) -> None:
        """Addresses are what they would be if they were asked for again, after many commits and deletions."""
        with open_store(tmp_path / "s") as store:
            table = store.open_table("t", schema_of(8))
            rng = np.random.default_rng(0)
            for step in range(200):
                put(store, table, rng.integers(0, 1500, int(rng.integers(1, 300))), step)
                if step % 3 == 0:
                    store.flush()
            store.flush()
            group, log = store._session.groups[0], store._session.log
            with store._session.lock, log.reading() as txn:
                for slot in set(group.segments.slots().tolist()) - group.slots_in_memory():
                    segment = log.segment(txn, int(group.segments.lines[slot, NUMBER]))
                    assert 0 < group.segments.lines[slot, 0] - segment.ctypes.data < len(segment)


def _tombstones(store: LmdbStore) -> int:
    return int((store._session.groups[0].segments.lines[:, COUNT] >> 32).sum())


class TestIds:
    def test_ids_that_share_tag_and_shard_never_give_each_others_rows(self, tmp_path: Path) -> None:
        """With two shards some of 60,000 ids must: the missing half stays missing, to the last id."""
        config = StoreConfig(index_shards=2)
        with open_store(tmp_path / "s", config=config) as store:
            table = store.open_table("t", schema_of(2))
            rows = put(store, table, np.arange(30_000), 1)
            assert read(store, RowIds.of(table, np.arange(30_000, 400_000)), 8) == [None] * 370_000
            check_equal(store, table.group, rows)

    def test_rows_of_tables_that_were_not_opened_are_refused(self, tmp_path: Path) -> None:
        with open_store(tmp_path / "s") as store:
            table = store.open_table("t", schema_of(2))
            rows = RowIds(0, np.array([table.number, 6], np.uint32), np.array([1, 2]))
            with pytest.raises(StoreConfigError, match="row 1 of the batch is of table number 6"):
                store.put(rows, np.zeros((2, 8), np.uint8))
            with pytest.raises(StoreConfigError, match="open the table first"):
                store.delete(rows)
            check_equal(store, table.group, {})

    def test_segments_of_one_group_hold_rows_of_many_tables(self, tmp_path: Path) -> None:
        with open_store(tmp_path / "s") as store:
            tables = [store.open_table(f"t{i}", schema_of(2)) for i in range(30)]
            rng = np.random.default_rng(1)
            numbers = np.array([table.number for table in tables], np.uint32)
            rows = RowIds(0, rng.choice(numbers, 5000), rng.integers(0, 300, 5000))
            store.put(rows, rng.integers(0, 256, (5000, 8), dtype=np.uint8))
            before = dict(
                zip(zip(rows.tables.tolist(), rows.ids.tolist(), strict=True), read(store, rows, 8), strict=True)
            )
        with open_store(tmp_path / "s") as store:
            check_equal(store, 0, before)  # type: ignore[arg-type]


def test_a_store_opened_for_reading_refuses_to_write(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        table = store.open_table("t", schema_of(2))
        rows = put(store, table, np.arange(9), 1)
    files = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir() if path.name != "lock.mdb"}
    with open_store(tmp_path / "s", read_only=True) as store:
        check_equal(store, table.group, rows)
        for verb in (lambda: put(store, table, np.arange(2), 2), lambda: store.flush(b"x")):
            with pytest.raises(StoreReadOnlyError, match="read_only=True"):
                verb()
        with pytest.raises(StoreReadOnlyError):
            store.delete(RowIds.of(table, np.arange(2)))
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir() if path.name != "lock.mdb"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"segment_bytes": 100},
        {"write_buffer_bytes": 0},
        {"map_size_bytes": 1.5},
        {"index_shards": 3},
        {"read_threads": 0},
    ],
)
def test_sizes_that_make_no_sense(wrong: dict[str, int]) -> None:
    with pytest.raises(StoreConfigError, match=next(iter(wrong))):
        StoreConfig(**wrong)


def test_segments_are_small_unless_there_would_be_very_many_or_rows_are_wide() -> None:
    config, kib = StoreConfig(write_buffer_bytes=1 << 25), 1 << 10
    stores = [config.filled_bytes(128, size) + 16 for size in (0, 16 << 30, 20 << 30, 40 << 30, 1 << 50)]
    assert stores == [256 * kib, 512 * kib, 512 * kib, 1024 * kib, 4096 * kib]
    rows = [StoreConfig().filled_bytes(row_bytes) + 16 for row_bytes in (8, 128, 516, 1000, 4096)]
    assert rows == [256 * kib, 256 * kib, 1024 * kib, 1792 * kib, 2048 * kib], "an eighth of the write buffer at most"
    assert StoreConfig(segment_bytes=1 << 13).filled_bytes(4096, 1 << 50) == (1 << 13) - 16
    assert StoreConfig(write_buffer_bytes=1 << 13).filled_bytes(8) == (1 << 12) - 16


def test_durability_is_one_of_two_words(tmp_path: Path) -> None:
    with pytest.raises(StoreConfigError, match="'commit' or 'snapshot'"):
        open_store(tmp_path / "s", "always")
    assert not (tmp_path / "s").exists()
