"""What verbs that write are told: of their own commits, of failures in the background, of what they interrupt."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

from storage import LmdbStore, RowIds, StoreConfig, StoreConfigError, StoreForkedError, StoreFullError, TableRef
from storage.row_log.committer import Committer, Wanted
from storage.row_log.compaction import Compactor
from storage.row_log.log import Commit, RowLog
from storage.row_log.places import COUNT
from storage.row_log.segment import SegmentHeader
from storage.row_log.writer import Writer
from storage.testing import contents, read, schema_of
from tests.storage.test_session import fork

CONFIG = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 15, index_shards=16, compact_bytes_per_s=0)


def made(path: Path, durability: str = "commit", config: StoreConfig = CONFIG) -> tuple[LmdbStore, TableRef]:
    """A store with garbage in it."""
    store = LmdbStore(path, durability=durability, config=config)  # type: ignore[arg-type]
    table = store.open_table("t", schema_of(8))
    for version in range(4):
        put(store, table, np.arange(version, 1500, version + 1), version)
        store.flush(b"one")
    return store, table


def put(store: LmdbStore, table: TableRef, ids: np.ndarray, version: int) -> None:
    store.put(RowIds.of(table, ids), np.full((len(ids), table.schema.row_bytes), version, np.uint8))


class FullOnce:
    """RowLog.commit that fails for want of room the first time; `meanwhile` runs during it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, meanwhile: Any = lambda: None) -> None:
        self.failed, real = 0, RowLog.commit

        def commit(log: RowLog, what: Commit, **how: bool) -> None:
            if not self.failed:
                self.failed = 1
                meanwhile()
                raise StoreFullError("full, once")
            real(log, what, **how)

        monkeypatch.setattr(RowLog, "commit", commit)


class StateUnderWay:
    """A state for an earlier flush is still under way when the next flush begins, and ends while that one waits."""

    def __init__(self, store: LmdbStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.flushed_again, self.returned = Event(), Event(), Event()
        self.states = self.calls = 0
        writer = store._session.writer
        assert writer is not None
        await_commit, write = writer._await_commit, Committer._write

        def slow_write(committer: Committer, batch: Any) -> None:
            self.states += batch.state is not None
            if self.states == 2:
                self.begun.set()
                with store._session.lock:
                    store._session.lock.notify_all()
                assert self.flushed_again.wait(30)
            elif self.states == 3:  # a flush that takes the second state for its own returns now
                self.returned.wait(0.5)
            write(committer, batch)

        def wait(done: Any) -> None:
            self.calls += 1
            if self.calls == 2:
                self.flushed_again.set()
            await_commit(done)
            if self.calls == 1:  # as by a call that was cut short: nobody waits for its state
                writer._wanted = Wanted(b"one")
                writer._maintenance.ask()
                assert store._session.lock.wait_for(self.begun.is_set, 30)

        monkeypatch.setattr(Committer, "_write", slow_write)
        monkeypatch.setattr(writer, "_await_commit", wait)


class TestFlush:
    def test_a_full_disk_that_has_room_again_before_the_flush_wakes_leaves_it_waiting_for_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, table = made(tmp_path / "s")
        put(store, table, np.arange(50), 9)
        work = Writer._work

        def two_rounds(writer: Writer) -> float | None:
            with store._session.lock:  # nobody wakes up between the two
                work(writer)
                return work(writer)

        FullOnce(monkeypatch)
        writer = store._session.writer
        assert writer is not None
        monkeypatch.setattr(writer._maintenance, "_work", partial(two_rounds, writer))
        flushing = Thread(target=store.flush, args=(b"two",), daemon=True)
        flushing.start()
        flushing.join(30)
        assert not flushing.is_alive(), "the flush waits for a state that nobody makes"
        assert store.note == b"two"
        store.close()

    @pytest.mark.parametrize("durability", ["commit", "snapshot"])
    def test_a_state_for_an_earlier_flush_acknowledges_no_later_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
    ) -> None:
        store = LmdbStore(tmp_path / "s", durability=durability, config=CONFIG)  # type: ignore[arg-type]
        table = store.open_table("t", schema_of(8))
        put(store, table, np.arange(50), 1)
        under_way = StateUnderWay(store, monkeypatch)
        store.flush(b"one")
        put(store, table, np.arange(50, 100), 2)
        store.flush(b"two")
        assert store.note == b"two"
        under_way.returned.set()
        store.abandon()  # as its death would
        with LmdbStore(tmp_path / "s", durability=durability, config=CONFIG) as store:  # type: ignore[arg-type]
            assert store.note == b"two"
            assert set(read(store, RowIds.of(table, np.arange(50, 100)), 32)) == {bytes([2] * 32)}

    def test_one_that_returns_has_made_its_state_although_others_asked_meanwhile(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A round that follows the one that failed must not make its error forgotten."""
        store, table = made(tmp_path / "s", "snapshot")
        put(store, table, np.arange(5000, 5020), 9)

        def ask() -> None:
            assert store._session.writer is not None
            with store._session.lock:
                store._session.writer._maintenance.ask()

        FullOnce(monkeypatch, ask)
        try:
            store.flush(b"two")
            told = True
        except StoreFullError:
            told = False
        store.abandon()
        with LmdbStore(tmp_path / "s", durability="snapshot", config=CONFIG) as store:
            rows = read(store, RowIds.of(table, np.arange(5000, 5020)), 32)
            assert (store.note == b"two") == (rows == [bytes([9]) * 32] * 20)
            assert store.note == b"two" or not told

    def test_after_no_room_the_next_one_writes_everything(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, table = made(tmp_path / "s", "snapshot")
        put(store, table, np.arange(5000, 5020), 9)
        FullOnce(monkeypatch)
        with pytest.raises(StoreFullError, match="full, once"):
            store.flush(b"two")
        assert store.note == b"one"
        store.flush(b"three")
        store.abandon()
        with LmdbStore(tmp_path / "s", durability="snapshot", config=CONFIG) as store:
            assert store.note == b"three"
            assert None not in read(store, RowIds.of(table, np.arange(5000, 5020)), 32)

    def test_compaction_without_room_is_not_a_flush_without_room(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, _ = made(tmp_path / "s", config=StoreConfig(1 << 13, 1 << 15, index_shards=16))

        def full(*_: object) -> None:
            raise StoreFullError("no room to move")

        monkeypatch.setattr(Compactor, "run", full)
        with store:
            store.flush(b"mine")
            assert store.note == b"mine"

    def test_a_store_dropped_after_no_room_leaves_no_lock(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store, table = made(tmp_path / "s")
        put(store, table, np.arange(10), 9)
        FullOnce(monkeypatch)
        with pytest.raises(StoreFullError):
            store.flush()
        del store
        sys.exc_info()
        gc.collect()
        LmdbStore(tmp_path / "s", config=CONFIG).close()


class TestCompact:
    def test_an_error_of_the_callers_progress_is_theirs_and_harms_nothing(self, tmp_path: Path) -> None:
        store, table = made(tmp_path / "s")

        def broken(done: int, total: int) -> None:
            raise BrokenPipeError("the bar is gone")

        with store:
            with pytest.raises(BrokenPipeError, match="the bar is gone"):
                store.compact(broken)
            put(store, table, np.arange(10), 9)
            store.compact()
            assert read(store, RowIds.of(table, np.arange(10)), 32) == [bytes([9]) * 32] * 10

    def test_scans_end_for_it(self, tmp_path: Path) -> None:
        """Also one that begins while it is at work, which would otherwise keep every row in its place."""
        store, table = made(tmp_path / "s")
        begun: list[Any] = []

        def scan(done: int, total: int) -> None:
            if not begun:
                begun.append(store.scan(table.group))
                next(begun[0])

        with store:
            expected, moved = contents(store, table.group), store.stats().rows_moved
            store.compact(scan)
            assert store.stats().rows_moved > moved
            assert contents(store, table.group) == expected


class TestFork:
    def test_in_the_middle_of_a_commit_the_child_finds_all_rows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It waits for the lock, so that no line of the segment table is half changed."""
        store, table = made(tmp_path / "s")
        publishing, real = Event(), SegmentHeader.widths.fget
        assert real is not None

        def widths(header: SegmentHeader) -> int:
            publishing.set()
            return int(real(header))

        with store:
            put(store, table, np.arange(1500), 7)
            monkeypatch.setattr(SegmentHeader, "widths", property(widths))
            thread = Thread(target=store.flush)
            thread.start()
            assert publishing.wait(30)
            child = fork()
            if child == 0:
                os._exit(0 if len(contents(store, table.group)) == 1500 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            thread.join()

    def test_a_scan_that_a_child_inherits_ends_there_without_harm(self, tmp_path: Path) -> None:
        store, table = made(tmp_path / "s")
        with store:
            scan = store.scan(table.group)
            next(scan)
            child = fork()
            if child == 0:
                code = 0
                try:
                    scan.close()
                    store.put(RowIds.of(table, np.arange(1)), np.zeros((1, 32), np.uint8))
                    code = 1
                except StoreForkedError:
                    pass
                except BaseException:
                    code = 2
                os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            scan.close()
            put(store, table, np.arange(10), 9)


def test_a_sweep_of_tombstones_keeps_to_the_budget(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "s", config=StoreConfig(1 << 14, 1 << 16, index_shards=16, compact_bytes_per_s=0))
    table = store.open_table("t", schema_of(8))
    put(store, table, np.arange(30_000), 1)
    store.flush()
    store.delete(RowIds.of(table, np.arange(0, 30_000, 3)))
    store.close()
    config = StoreConfig(1 << 14, 1 << 16, index_shards=16, compact_bytes_per_s=1, max_space_ratio=50.0)
    with LmdbStore(tmp_path / "s", config=config) as store:
        store.open_table("t", schema_of(8))
        for version in range(20):
            put(store, table, np.arange(5), version)
            store.flush()
        assert store.stats().bytes_moved <= 2 * config.filled_bytes(32)


class TestInterrupted:
    def test_a_compaction_that_scans_cut_short_again_and_again_brings_nothing_back(self, tmp_path: Path) -> None:
        """Tombstones that were moved before a scan began are not counted off once more by the next try."""
        config = StoreConfig(1 << 18, 1 << 20, index_shards=16, max_space_ratio=1.3)
        store = LmdbStore(tmp_path / "s", config=StoreConfig(1 << 18, 1 << 20, index_shards=16, compact_bytes_per_s=0))
        table = store.open_table("t", schema_of(1))
        put(store, table, np.arange(30_000), 1)
        store.flush()
        store.delete(RowIds.of(table, np.arange(4000)))
        put(store, table, np.arange(40_000, 44_000), 2)
        store.flush()
        put(store, table, np.arange(40_000, 44_000), 3)
        store.close()
        with LmdbStore(tmp_path / "s", config=config) as store:
            store.open_table("t", schema_of(1))
            lock, scans = store._session.lock, list[Any]()
            give_way = lock.give_way

            def interrupted() -> None:
                """As a scan of another thread that gets the lock just here."""
                if not scans:
                    scans.append(store.scan(table.group))
                    next(scans[0])
                give_way()

            lock.give_way = interrupted  # type: ignore[method-assign]
            for version in range(6):
                put(store, table, np.arange(20_000, 22_000), version)
                store.flush()
                for scan in scans:
                    scan.close()
                scans.clear()
            lock.give_way = give_way  # type: ignore[method-assign]
            lines = store._session.groups[0].segments.lines
            assert (lines[:, COUNT] >> 32 >= 0).all()
            store.abandon()
        with LmdbStore(tmp_path / "s", config=config) as store:
            assert set(read(store, RowIds.of(table, np.arange(4000)), 4)) == {None}

    def test_ctrl_c_at_any_moment_loses_nothing_that_was_acknowledged(self, tmp_path: Path) -> None:
        """And the store goes on: an interrupt waits for the end of the verb."""
        program = _INTERRUPTED.format(path=str(tmp_path / "s"))
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


_INTERRUPTED = """
import signal, threading, time
import numpy as np
from storage import LmdbStore, RowIds, StoreConfig
from storage.testing import schema_of
config = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 15, index_shards=16)
store = LmdbStore({path!r}, config=config)
table = store.open_table("t", schema_of(8))
acknowledged, interrupts, rng = {{}}, 0, np.random.default_rng(0)
arrived = threading.Event()
def interrupt():  # one at a time: a second one in the same verb would cut it short
    for _ in range(300):
        arrived.clear()
        time.sleep(0.001 + float(rng.exponential(0.002)))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        arrived.wait(60)
out, found = np.zeros((5000, 32), np.uint8), np.zeros(5000, bool)
everything = RowIds.of(table, np.arange(5000))
thread = threading.Thread(target=interrupt)
thread.start()
step = 0
while interrupts < 300:
    try:
        step += 1
        ids = rng.integers(0, 5000, 200)
        store.put(RowIds.of(table, ids), np.full((200, 32), step % 251, np.uint8))
        for id in ids.tolist():
            acknowledged[id] = step % 251
        if step % 7 == 0:
            store.flush()
    except KeyboardInterrupt:
        interrupts += 1
        for id in ids.tolist():
            acknowledged.pop(id, None)
        arrived.set()
thread.join()
store.get(everything, out, found)
for id, version in acknowledged.items():
    assert found[id], id
    assert (out[id] == out[id][0]).all()
store.close()
"""


def test_compacting_a_store_without_tables_does_nothing(tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "s", config=CONFIG) as store:
        store.compact()
        put(store, store.open_table("t", schema_of(8)), np.arange(5), 1)
        store.compact()


def test_a_note_that_is_too_large_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    store, table = made(tmp_path / "s")
    with store:
        put(store, table, np.arange(5), 9)
        with pytest.raises(StoreConfigError, match="65536"):
            store.flush(bytes(65537))
        store.flush(b"small")
        assert store.note == b"small"
        assert read(store, RowIds.of(table, np.arange(5)), 32) == [bytes([9]) * 32] * 5


def test_a_childs_row_is_never_missing_because_its_parent_has_reused_the_page(tmp_path: Path) -> None:
    """The page holds a whole row of another id then, which looks like a chance likeness of tags."""
    config = StoreConfig(segment_bytes=1 << 14, write_buffer_bytes=1 << 16, compact_bytes_per_s=0)
    with LmdbStore(tmp_path / "s", config=config) as store:
        table, rng = store.open_table("t", schema_of(100)), np.random.default_rng(0)
        for version in range(3):
            put_wide(store, table, rng.permutation(3000), version)
        ready, go = os.pipe()
        children = []
        for child in range(12):
            children.append(fork())
            if not children[-1]:
                os.read(ready, 1)
                found = read(store, RowIds.of(table, np.array([child * 7])), 400)
                os._exit(0 if found[0] is not None else 1)
        for version in range(3, 8):
            put_wide(store, table, rng.permutation(3000), version)
        os.write(go, b"x" * len(children))
        assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * len(children)


def put_wide(store: LmdbStore, table: TableRef, ids: np.ndarray, version: int) -> None:
    store.put(RowIds.of(table, ids), np.full((len(ids), 400), version, np.uint8))
    store.flush()


def test_a_budget_does_not_keep_compaction_from_coming_after_flushes(tmp_path: Path) -> None:
    """A flush waits for its commit, and compaction for nobody who has been served."""
    config = StoreConfig(1 << 14, 1 << 16, index_shards=16, compact_bytes_per_s=1 << 40)
    rng = np.random.default_rng(0)
    with LmdbStore(tmp_path / "s", config=config) as store:
        table = store.open_table("t", schema_of(32))
        store.put(RowIds.of(table, np.arange(20_000)), np.zeros((20_000, 128), np.uint8))
        for _ in range(150):
            store.put(RowIds.of(table, rng.integers(0, 20_000, 1000)), np.zeros((1000, 128), np.uint8))
            store.flush()
        assert store.stats().rows_moved > 0


def test_what_is_wanted_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that follow each other before who waits wakes up: a snapshot dropped twice ended the writer."""
    with LmdbStore(tmp_path / "s") as store:
        writer = store._session.writer
        assert writer is not None
        whole = writer._commit
        monkeypatch.setattr(writer, "_commit", lambda: (whole(), whole())[1])
        first = store.snapshot("a")
        again = store.snapshot("b", drop=["a"])
        assert int(again.origin.split(":")[1]) == int(first.origin.split(":")[1]) + 1
        store.drop_snapshot("b")
        assert store.snapshots() == []
        store.flush(b"still writes")
