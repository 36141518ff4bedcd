"""Snapshots, verb by verb: what each refuses, what it costs, and what may happen beside it or in the middle of it."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from storage import (
    CorruptSegmentError,
    LmdbStore,
    RowIds,
    StoreChangedError,
    StoreClosedError,
    StoreConfig,
    StoreConfigError,
    StoreFullError,
    StoreIOError,
    StoreMissingError,
    StoreReadOnlyError,
    TableRef,
)
from storage.row_log.log import Commit, RowLog
from storage.row_log.snapshots import key_of
from storage.row_log.writer import Writer
from storage.testing import Rows, check_equal, contents, named, read, schema_of
from tests.storage.test_snapshots import check_lines, lines_of

TINY = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, index_shards=16)
STILL = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, index_shards=16, compact_bytes_per_s=0)
DURABILITIES = pytest.mark.parametrize("durability", ["commit", "snapshot"])


def put(store: LmdbStore, ids: Any, byte: int) -> Rows:
    """Rows of table "t" of which every byte is that one."""
    table, ids = store.open_table("t", schema_of(8)), np.array(ids)
    store.put(RowIds.of(table, ids), np.full((len(ids), 32), byte, np.uint8))
    return {(table.number, int(id)): bytes([byte]) * 32 for id in ids}


def delete(store: LmdbStore, ids: Any) -> None:
    store.delete(RowIds.of(store.open_table("t", schema_of(8)), np.array(ids)))


def differing(store: LmdbStore, older: str | None, newer: str) -> tuple[set[int], set[int]]:
    """Ids that were put and ids that were deleted."""
    sets: tuple[set[int], set[int]] = (set(), set())
    for change in store.diff(older, newer):
        for (_, id), deleted in zip(named(change.rows), change.deleted.tolist(), strict=True):
            sets[deleted].add(id)
    return sets


@pytest.fixture(params=["commit", "snapshot"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LmdbStore]:
    store = LmdbStore(tmp_path / "s", durability=request.param, config=STILL)
    yield store
    store.abandon()


def reopened(store: LmdbStore) -> LmdbStore:
    store.abandon()
    return LmdbStore(store.path, durability=store.durability, config=store.config)


class TestNames:
    @pytest.mark.parametrize("name", ["", "a\nb", "a\0", "x" * 256, "é" * 128, "\ud800", 7, None, "a\tb", "\x7f"])
    def test_that_no_snapshot_may_have(self, store: LmdbStore, name: Any) -> None:
        with pytest.raises(StoreConfigError, match="1 to 255 bytes of characters that can be printed"):
            store.snapshot(name)
        assert store.snapshots() == []

    @pytest.mark.parametrize("name", ["/", "..", " ", "snapshot:x", "x" * 255, "é" * 127, "日本 ✓", "head", "[bold]"])
    def test_of_any_script(self, store: LmdbStore, name: str) -> None:
        rows = put(store, range(50), 1)
        store.snapshot(name, b"n")
        put(store, range(50), 2)
        with reopened(store) as again:
            assert [one.name for one in again.snapshots()] == [name]
            with again.at(name) as view:
                check_equal(view, 0, rows)  # type: ignore[arg-type]
            again.rollback(name)
            check_equal(again, 0, rows)

    def test_that_is_taken_or_unknown(self, store: LmdbStore) -> None:
        store.snapshot("a")
        with pytest.raises(StoreConfigError, match="has a snapshot 'a' already"):
            store.snapshot("a")
        for verb in (store.at, store.drop_snapshot, store.rollback, lambda name: store.diff(None, name)):
            with pytest.raises(StoreConfigError, match="has no snapshot 'b'; the newest there are: 'a'"):
                verb("b")

    def test_one_name_is_not_some_names(self, store: LmdbStore) -> None:
        """Each of its letters would be one."""
        store.snapshot("a")
        with pytest.raises(StoreConfigError, match="expected names"):
            store.snapshot("b", drop="a")
        assert [one.name for one in store.snapshots()] == ["a"]

    @pytest.mark.parametrize("keep_last", [0, -1])
    def test_keeping_less_than_one(self, store: LmdbStore, keep_last: int) -> None:
        with pytest.raises(StoreConfigError, match="keep_last"):
            store.snapshot("a", keep_last=keep_last)

    def test_diff_wants_the_older_one_first(self, store: LmdbStore) -> None:
        store.snapshot("a")
        store.snapshot("b")
        with pytest.raises(StoreConfigError, match="is newer than"):
            store.diff("b", "a")
        assert differing(store, "a", "b") == differing(store, "a", "a") == (set(), set())

    def test_who_only_reads_makes_none(self, store: LmdbStore) -> None:
        rows = put(store, range(100), 1)
        store.snapshot("a", b"note")
        put(store, range(100), 2)
        store.close()
        with LmdbStore(store.path, durability=store.durability, read_only=True) as reader:
            for verb in (reader.snapshot, reader.drop_snapshot, reader.rollback):
                with pytest.raises(StoreReadOnlyError):
                    verb("a")
            with reader.at("a") as view:
                check_equal(view, 0, rows)  # type: ignore[arg-type]
                assert view.note == b"note"


class TestViews:
    def test_two_of_one_snapshot_hold_it_each_for_itself(self, store: LmdbStore) -> None:
        rows = put(store, range(2000), 1)
        store.snapshot("a")
        one, other = store.at("a"), store.at("a")
        one.close()
        one.close()
        store.drop_snapshot("a")
        for byte in range(2, 6):
            put(store, range(2000), byte)
            store.compact()
        check_equal(other, 0, rows)  # type: ignore[arg-type]
        other.close()

    def test_a_table_that_is_younger_has_no_rows(self, store: LmdbStore) -> None:
        put(store, range(10), 1)
        store.snapshot("a")
        with store.at("a") as view:
            table = store.open_table("young", schema_of(3))
            ids = RowIds.of(table, np.arange(10))
            store.put(ids, np.ones((10, 12), np.uint8))
            assert view.open_table("young", schema_of(3)) == table
            assert read(view, ids, 12) == [None] * 10  # type: ignore[arg-type]
            assert list(view.scan(table.group)) == []
            with pytest.raises(StoreConfigError, match="group 7"):
                next(view.scan(7))

    def test_it_is_not_written_to(self, store: LmdbStore) -> None:
        put(store, range(10), 1)
        store.snapshot("a", b"1")
        with store.at("a") as view:
            table = view.open_table("t", schema_of(8))
            rows = RowIds.of(table, np.arange(1))
            for verb in (
                lambda: view.put(rows, np.zeros((1, 32), np.uint8)),
                lambda: view.delete(rows),
                lambda: view.flush(b"2"),
            ):
                with pytest.raises(StoreReadOnlyError, match="is as it was"):
                    verb()
            view.flush()
            with pytest.raises(StoreMissingError):
                view.open_table("none", schema_of(8))
            assert view.stats().rows == 10
        with pytest.raises(StoreClosedError, match="was closed"):
            read(view, rows, 32)  # type: ignore[arg-type]

    def test_of_a_store_that_was_closed(self, store: LmdbStore) -> None:
        put(store, range(3000), 1)
        store.snapshot("a")
        view = store.at("a")
        scan = view.scan(0)
        next(scan)
        store.close()
        with pytest.raises(StoreClosedError):
            list(scan)
        view.close()

    def test_a_scan_goes_on_over_everything_but_the_end(self, store: LmdbStore) -> None:
        rows = put(store, range(4000), 1)
        store.snapshot("a")
        view = store.at("a")
        scan, seen = view.scan(0), {}
        for block, data in scan:
            seen |= dict(zip(named(block), map(bytes, data), strict=True))
            put(store, range(4000), 2)
            store.compact()
        assert seen == rows
        view.close()


class TestDiff:
    def test_a_snapshot_dropped_before_the_first_block_is_an_error_of_its_own(self, store: LmdbStore) -> None:
        put(store, range(500), 1)
        store.snapshot("a")
        changes = store.diff(None, "a")
        store.drop_snapshot("a")
        put(store, range(500), 2)
        store.compact()
        with pytest.raises(StoreChangedError, match=r"snapshot 'a' of .* was dropped"):
            list(changes)

    def test_dropping_a_snapshot_in_the_middle_harms_nothing(self, store: LmdbStore) -> None:
        other = store.open_table("other", schema_of(3))
        put(store, range(500), 1)
        store.put(RowIds.of(other, np.arange(9)), np.zeros((9, 12), np.uint8))
        store.snapshot("a")
        changes = store.diff(None, "a")
        first = next(changes)
        store.drop_snapshot("a")
        put(store, range(500), 2)
        store.compact()
        assert sum(len(one.rows) for one in [first, *changes]) == 509

    def test_closing_the_store_in_the_middle_ends_it(self, store: LmdbStore) -> None:
        """Two groups; the second one's segments are in a memory map that is gone by then."""
        other = store.open_table("other", schema_of(3))
        put(store, range(5), 1)
        store.put(RowIds.of(other, np.arange(9)), np.zeros((9, 12), np.uint8))
        store.snapshot("a")
        changes = store.diff(None, "a")
        next(changes)
        store.close()
        with pytest.raises(StoreClosedError):
            list(changes)

    def test_what_came_and_went_in_between_is_not_told(self, store: LmdbStore) -> None:
        put(store, range(10), 1)
        store.snapshot("a")
        put(store, range(8, 20), 2)
        delete(store, range(9, 15))
        delete(store, range(2))
        store.snapshot("b")
        assert differing(store, "a", "b") == ({8, *range(15, 20)}, {0, 1, 9})
        assert differing(store, None, "b") == ({*range(2, 9), *range(15, 20)}, set())


class TestRollback:
    def test_to_the_state_that_is_the_head(self, store: LmdbStore) -> None:
        rows = put(store, range(1000), 1)
        store.snapshot("a", b"1")
        for _ in range(3):
            store.rollback("a")
            check_equal(store, 0, rows)
            check_lines(store)
        put(store, range(5), 3)
        store.rollback("a")
        with reopened(store) as again:
            check_equal(again, 0, rows)
            assert again.note == b"1"

    @pytest.mark.parametrize("clean", [True, False])
    def test_right_after_opening(self, store: LmdbStore, clean: bool) -> None:
        rows = put(store, range(1000), 1)
        store.snapshot("a")
        put(store, range(900), 2)
        delete(store, range(300, 990))
        store.flush()
        store.compact()
        if clean:
            store.close()
        with reopened(store) as again:
            again.rollback("a")
            check_equal(again, 0, rows)
            check_lines(again)
            again.close()
        with reopened(store) as again:
            check_equal(again, 0, rows)

    def test_to_an_empty_store_and_on_from_there(self, store: LmdbStore) -> None:
        store.snapshot("empty")
        put(store, range(3000), 1)
        store.rollback("empty")
        check_equal(store, 0, {})
        group = store._session.groups[0]
        assert len(group.segments) == 0
        assert group.buffered_bytes == sum(buffer.bytes for buffer in group.spare)
        rows = put(store, range(20), 2)
        store.flush()
        with reopened(store) as again:
            check_equal(again, 0, rows)

    def test_its_commit_tells_what_is_there_afterwards(self, store: LmdbStore) -> None:
        put(store, range(1000), 1)
        store.snapshot("a")
        put(store, range(500, 4000), 2)
        store.flush()
        store.rollback("a")
        with store._session.log.reading() as txn:
            record = store._session.log.last_commit(txn)
        assert record is not None and record.went_back and record.made_state
        totals = record.totals
        assert (totals.live_rows, totals.live_bytes) == (1000, 32_000)
        assert totals.segment_bytes == store._session.groups[0].bytes_in_use()[0]

    def test_a_hint_from_before_it_is_void(self, store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever asked while it went on may have been given a row that is gone now."""
        put(store, range(10), 1)
        store.snapshot("a")
        asked, goes_back = [], Writer.rollback
        monkeypatch.setattr(
            Writer, "rollback", lambda self, *args: (asked.append(store.deletions), goes_back(self, *args))
        )
        store.rollback("a")
        assert store.deletions not in asked

    def test_a_scan_begun_while_it_waits_for_its_turn_ends(
        self, store: LmdbStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(store, range(3000), 1)
        store.snapshot("a")
        put(store, range(1, 3000, 2), 2)
        store.flush()
        scans, goes_back = [], Writer.rollback

        def begin_a_scan(self: Writer, *args: Any) -> None:
            scans.append(store.scan(0))
            next(scans[0])
            goes_back(self, *args)

        monkeypatch.setattr(Writer, "rollback", begin_a_scan)
        store.rollback("a")
        with pytest.raises(StoreChangedError):
            list(scans[0])

    def test_a_view_of_a_later_one_opened_while_it_waits_for_its_turn_stops_it(
        self, store: LmdbStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(store, range(100), 1)
        store.snapshot("a")
        rows = put(store, range(50, 150), 2)
        store.snapshot("b")
        views, goes_back = [], Writer.rollback

        def look(self: Writer, *args: Any) -> None:
            views.append(store.at("b"))
            goes_back(self, *args)

        monkeypatch.setattr(Writer, "rollback", look)
        with pytest.raises(StoreConfigError, match=r"a view of snapshot 'b' of .* is open"):
            store.rollback("a", drop_later=True)
        monkeypatch.undo()
        assert contents(store, 0).items() >= rows.items()
        assert [one.name for one in store.snapshots()] == ["a", "b"]
        views[0].close()
        store.rollback("a", drop_later=True)
        assert len(contents(store, 0)) == 100

    def test_later_snapshots_are_not_dropped_unasked(self, store: LmdbStore) -> None:
        rows = put(store, range(100), 1)
        for name in "abc":
            store.snapshot(name)
        with pytest.raises(StoreConfigError, match=r"newer than 'a' \('b', 'c'\)"):
            store.rollback("a")
        store.rollback("a", drop_later=True)
        check_equal(store, 0, rows)
        assert [one.name for one in store.snapshots()] == ["a"]

    def test_a_deleted_row_of_an_older_snapshot_stays_deleted(self, store: LmdbStore) -> None:
        """The older one's segments stay beside, with the row that was deleted since."""
        put(store, range(300), 1)
        store.snapshot("with")
        delete(store, range(100))
        store.snapshot("without")
        for byte in (2, 3):
            put(store, range(100), byte)
            store.compact()
        store.rollback("without")
        assert {id for _, id in contents(store, 0)} == set(range(100, 300))
        store.compact()
        with reopened(store) as again:
            assert {id for _, id in contents(again, 0)} == set(range(100, 300))
            again.drop_snapshot("with")
            again.compact()
            again.close()
        with reopened(store) as again:
            assert {id for _, id in contents(again, 0)} == set(range(100, 300))
            assert len(list(again.at("without").scan(0))) > 0

    def test_a_segment_that_is_missing_changes_nothing(self, store: LmdbStore) -> None:
        """One that only the snapshot needs, so that nobody else misses it."""
        put(store, range(1000), 1)
        store.snapshot("a")
        rows = put(store, range(1000), 2)
        store.close()
        with lmdb.open(str(store.path), max_dbs=4) as env, env.begin(write=True) as txn:
            txn.delete((1).to_bytes(8, "big"), db=env.open_db(b"segments", txn=txn))
        with reopened(store) as again:
            for verb in (again.at, again.rollback):
                with pytest.raises(CorruptSegmentError, match=r"segment 1 of .* is gone"):
                    verb("a")
            check_equal(again, 0, rows)
            put(again, [1], 3)
            again.flush()

    def test_a_damaged_segment_changes_nothing(self, store: LmdbStore) -> None:
        put(store, range(1000), 1)
        store.snapshot("a")
        rows = put(store, range(1000), 2)
        store.flush()
        data = bytearray((store.path / "data.mdb").read_bytes())
        with open(store.path / "data.mdb", "r+b") as file:
            file.seek(data.index(b"TEROWSEG") + 130)  # among the ids of the first segment
            file.write(b"\xff")
        with pytest.raises(CorruptSegmentError, match="damaged block of ids"):
            store.rollback("a")
        assert read(store, _some(store, list(range(1000))), 32) == list(rows.values())
        put(store, [1], 3)
        store.flush()

    def test_busy_readers_do_not_keep_it_waiting(self, store: LmdbStore) -> None:
        """Two threads that read all the time: one of them always holds a pin."""
        rows = put(store, range(2000), 1)
        table = store.open_table("t", schema_of(8))
        store.snapshot("a")
        put(store, range(2000), 2)
        stop, wrong, looks = threading.Event(), [], []
        wanted = RowIds.of(table, np.arange(2000))

        def look() -> None:
            while not stop.is_set():
                seen = set(read(store, wanted, 32))
                looks.append(1)
                if not seen <= {bytes([1]) * 32, bytes([2]) * 32}:
                    wrong.append(seen)

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                store.rollback("a")
                check_equal(store, 0, rows)
                put(store, range(2000), 2)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert looks and not wrong

    def test_threads_that_put_and_get_beside_snapshots(self, tmp_path: Path) -> None:
        """Each row of a thread only ever grows between two rollbacks; views hold what was there at one instant."""
        store = LmdbStore(tmp_path / "s", config=TINY)
        table = store.open_table("t", schema_of(8))
        stop, errors = threading.Event(), []

        def work(first: int) -> None:
            ids, byte = RowIds.of(table, np.arange(first, first + 400)), 0
            try:
                while not stop.is_set():
                    byte = (byte + 1) % 250
                    store.put(ids, np.full((400, 32), byte, np.uint8))
                    read(store, ids, 32)
                    if byte % 50 == 0:
                        store.delete(ids)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1000)]
        for thread in threads:
            thread.start()
        try:
            for step in range(40):
                store.snapshot(f"s{step}", keep_last=3)
                with store.at(f"s{step}") as view:
                    seen = contents(view, 0)  # type: ignore[arg-type]
                    assert len(seen) == view.snapshot.rows == view.stats().rows
                    assert contents(view, 0) == seen  # type: ignore[arg-type]
                if step % 4 == 3:
                    store.rollback(f"s{step - 1}", drop_later=True)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not errors
        check_lines(store)
        rows = contents(store, 0)
        store.close()
        with LmdbStore(tmp_path / "s") as again:
            check_equal(again, 0, rows)


class TestTrouble:
    def test_what_somebody_waits_for_is_made_once(self, store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """A second round of the thread may begin before whoever waits has woken up."""
        put(store, range(10), 1)
        store.snapshot("a")
        commits = store.stats().commits
        monkeypatch.setattr(Writer, "_compact", lambda self: self._commit())
        store.snapshot("b", drop=["a"])
        store.drop_snapshot("b")
        monkeypatch.undo()
        assert store.stats().commits == commits + 2
        put(store, range(10), 2)
        store.flush()

    def test_a_snapshot_that_finds_no_room_does_not_exist(
        self, store: LmdbStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = put(store, range(100), 1)
        store.snapshot("a", b"1")
        rows = first | put(store, range(50), 2)
        commits = RowLog.commit

        def full(self: RowLog, what: Commit, **how: bool) -> None:
            raise StoreFullError("no room")

        monkeypatch.setattr(RowLog, "commit", full)
        for verb in (
            lambda: store.snapshot("b", b"2", drop=["a"]),
            lambda: store.drop_snapshot("a"),
            lambda: store.rollback("a"),
        ):
            with pytest.raises(StoreFullError):
                verb()
            assert [one.name for one in store.snapshots()] == ["a"]
            assert store.note == b"1"
            check_equal(store, 0, rows)
        monkeypatch.setattr(RowLog, "commit", commits)
        rows |= put(store, range(90, 120), 3)
        store.snapshot("b", b"2")
        assert differing(store, "a", "b") == ({*range(50), *range(90, 120)}, set())
        store.rollback("a", drop_later=True)
        check_equal(store, 0, first)

    def test_after_a_disk_failed_nothing_is_believed(self, store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = put(store, range(100), 1)
        store.snapshot("a", b"1")
        put(store, range(50), 2)

        def failing(self: RowLog, what: Commit, **how: bool) -> None:
            raise StoreIOError("the disk is on fire")

        monkeypatch.setattr(RowLog, "commit", failing)
        with pytest.raises(StoreIOError, match="on fire"):
            store.rollback("a")
        monkeypatch.undo()
        for verb in (lambda: store.snapshot("b"), lambda: store.drop_snapshot("a"), lambda: store.rollback("a")):
            with pytest.raises(StoreIOError, match="failed before"):
                verb()
        with reopened(store) as again:
            again.rollback("a")
            check_equal(again, 0, rows)

    def test_on_a_full_disk_nothing_changes(self, tmp_path: Path) -> None:
        """RLIMIT_FSIZE is this process's own, and only files that grow feel it."""
        small = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, map_size_bytes=1 << 28)
        store = LmdbStore(tmp_path / "s", durability="snapshot", config=small)
        put(store, range(2000), 1)
        store.snapshot("a", b"1")
        rows = put(store, range(100), 2)
        store.flush()
        put(store, range(200), 3)
        size, before = (tmp_path / "s" / "data.mdb").stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
        held = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        full = 0
        try:
            for n in range(100):
                try:
                    store.snapshot(f"s{n}")
                except StoreFullError:
                    full += 1
                    break
                put(store, range(200 * n, 200 * n + 200), 3)
            there = [one.name for one in store.snapshots()]
            seen = contents(store, 0)
            assert full
            assert there == ["a", *(f"s{n}" for n in range(len(there) - 1))]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, held)
        assert contents(store, 0) == seen
        store.rollback("a", drop_later=True)
        assert set(contents(store, 0).values()) == {bytes([1]) * 32}
        store.close()
        assert rows

    @pytest.mark.parametrize("verb", ["snapshot", "drop", "rollback", "at", "diff"])
    def test_ctrl_c_waits_for_the_end_of_a_verb(self, tmp_path: Path, verb: str, monkeypatch: Any) -> None:
        store = LmdbStore(tmp_path / "s", config=STILL)
        first = put(store, range(500), 1)
        store.snapshot("a")
        rows = first | put(store, range(400), 2)
        verbs: dict[str, Callable[[], Any]] = {
            "snapshot": lambda: store.snapshot("b"),
            "drop": lambda: store.drop_snapshot("a"),
            "rollback": lambda: store.rollback("a"),
            "at": lambda: store.at("a"),
            "diff": lambda: list(store.diff(None, "a")),
        }
        looks = RowLog.reading

        def interrupted(self: RowLog) -> Any:
            if threading.current_thread() is threading.main_thread() or verb in ("snapshot", "drop", "rollback"):
                monkeypatch.setattr(RowLog, "reading", looks)
                os.kill(os.getpid(), signal.SIGINT)
            return looks(self)

        monkeypatch.setattr(RowLog, "reading", interrupted)
        with pytest.raises(KeyboardInterrupt):
            verbs[verb]()
        assert [one.name for one in store.snapshots()] == {"snapshot": ["a", "b"], "drop": []}.get(verb, ["a"])
        check_equal(store, 0, first if verb == "rollback" else rows)
        put(store, range(10), 5)
        store.close()


class TestSpace:
    @DURABILITIES
    def test_it_does_not_grow_under_a_chain_of_snapshots(self, tmp_path: Path, durability: str) -> None:
        """200 of them, two kept, every row rewritten again and again."""
        store = LmdbStore(tmp_path / "s", durability=durability, config=TINY)  # type: ignore[arg-type]
        rng, sizes, used = np.random.default_rng(0), [], []
        for step in range(200 if durability == "snapshot" else 60):
            put(store, np.unique(rng.integers(0, 3000, 1500)), step)
            store.snapshot(f"s{step}", keep_last=2)
            sizes.append(store.stats().disk_bytes)
            used.append(store._session.groups[0].bytes_in_use()[0])
        assert max(used[30:]) <= 1.2 * max(used[10:30]), "segments that nobody holds stay"
        assert max(sizes) <= 2.6 * max(used)
        store.close()

    @DURABILITIES
    def test_once_all_are_dropped_it_is_as_if_there_had_been_none(self, tmp_path: Path, durability: str) -> None:
        segments = []
        for snapshots in (False, True):
            store = LmdbStore(tmp_path / str(snapshots), durability=durability, config=STILL)  # type: ignore[arg-type]
            for step in range(12):
                put(store, range(step * 100, step * 100 + 2000), step)
                delete(store, range(step * 100, step * 100 + 30))
                store.snapshot(f"s{step}") if snapshots else store.flush()
            for one in store.snapshots():
                store.drop_snapshot(one.name)
            store.compact()
            store.compact()
            segments.append((lines_of(store)[0], store._session.groups[0].bytes_in_use()))
            store.close()
        assert [rows for _, rows, _ in segments[0][0]] == [rows for _, rows, _ in segments[1][0]]
        assert segments[0][1] == segments[1][1]

    def test_a_thousand_snapshots(self, tmp_path: Path) -> None:
        """Records of some hundred segments are larger than a page of LMDB; opening checks its pages."""
        store = LmdbStore(tmp_path / "s", durability="snapshot", config=STILL)
        rows = put(store, range(52_000), 1)
        for n in range(1000):
            rows |= put(store, [n], n % 250)
            store.snapshot(f"snapshot {n}")
        assert store.snapshots()[500].segments > 260
        store.close()
        with LmdbStore(tmp_path / "s", durability="snapshot", config=STILL) as again:
            assert [one.name for one in again.snapshots()] == [f"snapshot {n}" for n in range(1000)]
            with again.at("snapshot 700") as view:
                assert read(view, _some(again, [0, 700, 701]), 32) == [  # type: ignore[arg-type]
                    bytes([byte]) * 32 for byte in (0, 700 % 250, 1)
                ]
            assert differing(again, "snapshot 10", "snapshot 990") == (set(range(11, 991)), set())
            again.snapshot("last", keep_last=3)
            again.rollback("snapshot 998", drop_later=True)
            assert len(again.snapshots()) == 1
            again.compact()
            rows |= {key: bytes([1]) * 32 for key in rows if key[1] == 999}
            check_equal(again, 0, rows)
        with LmdbStore(tmp_path / "s", durability="snapshot", config=STILL) as again:
            check_equal(again, 0, rows)


def _some(store: LmdbStore, ids: list[int]) -> RowIds:
    table: TableRef = store.open_table("t", schema_of(8))
    return RowIds.of(table, np.array(ids))


class TestDamage:
    @pytest.mark.parametrize("segments", [1, 400])
    def test_every_bit_of_a_record_counts(self, tmp_path: Path, segments: int) -> None:
        """In a page among others, and on pages of its own; by name, whoever opens it."""
        with LmdbStore(tmp_path / "s", durability="snapshot", config=STILL) as store:
            for step in range(segments):
                put(store, [step], 1)
                store.flush()
            store.snapshot("the name")
            record = next(iter(store._session.writer.snapshots.values())).pack()  # type: ignore[union-attr]
        whole = (tmp_path / "s" / "data.mdb").read_bytes()
        places = [found.start() for found in re.finditer(re.escape(record), whole)]
        bits = range(8 * len(record)) if segments == 1 else np.random.default_rng(0).integers(8 * len(record), size=60)
        for bit in bits:
            data = bytearray(whole)
            for at in places:  # pages that LMDB has copied since hold it too
                data[at + int(bit) // 8] ^= 1 << int(bit) % 8
            (tmp_path / "s" / "data.mdb").write_bytes(data)
            with pytest.raises(CorruptSegmentError, match="snapshot 'the name'"):
                LmdbStore(tmp_path / "s", durability="snapshot")
            if bit % 8 == 0:
                with (
                    LmdbStore(tmp_path / "s", durability="snapshot", read_only=True) as reader,
                    pytest.raises(CorruptSegmentError, match="snapshot 'the name'"),
                ):
                    reader.at("the name")

    def test_a_name_that_is_none(self, tmp_path: Path) -> None:
        with LmdbStore(tmp_path / "s") as store:
            put(store, [1], 1)
            store.snapshot("a")
        with lmdb.open(str(tmp_path / "s"), max_dbs=4) as env, env.begin(write=True) as txn:
            states = env.open_db(b"states", txn=txn)
            txn.put(key_of("a") + b"\xff", txn.get(key_of("a"), db=states), db=states)
        with pytest.raises(CorruptSegmentError, match="snapshot under the key"):
            LmdbStore(tmp_path / "s")
