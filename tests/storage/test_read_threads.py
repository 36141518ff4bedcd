"""Several threads for one get: all of it is read once, the first error is raised, and one thread is enough."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from storage import CorruptRowError, LmdbStore, RowIds, StoreConfig
from storage.row_log import read_threads, recovery
from storage.row_log.group_rows import BLOCK_ROWS
from storage.row_log.places import LIVE, NUMBER
from storage.row_log.read_threads import for_each_block, usable_threads
from storage.testing import check_equal, schema_of

ROWS = 5 * BLOCK_ROWS + 17


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_each_block_is_worked_on_once_by_so_many_threads_at_most(threads: int) -> None:
    met, seen = threading.Barrier(min(threads, 5)), []
    ids = set()

    def work(start: int, errors: Sequence[BaseException]) -> None:
        ids.add(threading.get_ident())
        if start < 10 * min(threads, 5):
            met.wait(10)  # fails unless all of them come
        seen.append(start)

    for_each_block(work, range(0, 50, 10), threads)
    assert sorted(seen) == [0, 10, 20, 30, 40]
    assert len(ids) == min(threads, 5)


def test_an_error_ends_it_and_is_raised_when_no_thread_works_any_more() -> None:
    running = set()

    def work(start: int, errors: Sequence[BaseException]) -> None:
        running.add(start)
        if start == 3:
            raise CorruptRowError(1, 2, "a test")
        running.discard(start)

    with pytest.raises(CorruptRowError):
        for_each_block(work, range(1000), 4)
    assert running == {3}


class _Interrupting(threading.Event):
    """Once, the main thread is interrupted on its way into or out of the wait."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 1

    def wait(self, timeout: float | None = None) -> bool:
        if self.left and threading.current_thread() is threading.main_thread():
            self.left = 0
            raise KeyboardInterrupt
        return super().wait(timeout)

    def is_set(self) -> bool:
        if self.left and threading.current_thread() is threading.main_thread():
            self.left = 0
            raise KeyboardInterrupt
        return super().is_set()


def test_an_interrupt_beside_the_wait_is_kept_for_later(monkeypatch: pytest.MonkeyPatch) -> None:
    main, begun, done = threading.get_ident(), threading.Event(), threading.Event()
    monkeypatch.setattr(read_threads, "Event", _Interrupting)

    def work(start: int, errors: Sequence[BaseException]) -> None:
        if threading.get_ident() == main:
            begun.wait(10)
            return
        begun.set()
        time.sleep(0.2)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        for_each_block(work, range(2), 2)
    assert done.is_set()


@pytest.mark.parametrize("when", ["starting", "waiting"])
def test_an_interrupt_is_raised_when_no_thread_works_any_more(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Whoever asked lets go of what the helper reads."""
    main, begin, running, done = threading.get_ident(), threading.Thread.start, threading.Event(), threading.Event()

    def interrupted(self: threading.Thread) -> None:
        begin(self)
        running.wait(10)
        raise KeyboardInterrupt

    def work(start: int, errors: Sequence[BaseException]) -> None:
        if threading.get_ident() == main:
            running.wait(10)
            return
        running.set()
        time.sleep(0.1)
        if when == "waiting":
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.1)
        done.set()

    if when == "starting":
        monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        for_each_block(work, range(2), 2)
    assert done.is_set()


def test_what_failed_holds_nothing_until_the_next_collection() -> None:
    class Kept:
        pass

    kept = Kept()
    gone = weakref.ref(kept)

    def work(start: int, errors: Sequence[BaseException], kept: Kept = kept) -> None:
        raise CorruptRowError(1, 2, "a test")

    gc.disable()
    try:
        with pytest.raises(CorruptRowError):
            for_each_block(work, range(3), 2)
        del work, kept
        assert gone() is None
    finally:
        gc.enable()


def test_without_threads_to_be_had_the_caller_reads_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", none_left)
    seen: list[int] = []
    for_each_block(lambda start, errors: seen.append(start), range(9), 3)
    assert seen == list(range(9))


def test_the_default_is_a_thread_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, threads in ((1, 1), (3, 3), (64, read_threads.MOST_THREADS)):
        usable_threads.cache_clear()
        monkeypatch.setattr(read_threads.os, "sched_getaffinity", lambda pid, count=processors: set(range(count)))
        assert usable_threads() == threads
    usable_threads.cache_clear()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_get_gives_the_same_rows_with_any_number_of_threads(tmp_path: Path, threads: int) -> None:
    with LmdbStore(tmp_path / "s", config=StoreConfig(read_threads=threads)) as store:
        table = store.open_table("t", schema_of(2))
        data = np.arange(8 * ROWS, dtype=np.uint64).view(np.uint8).reshape(ROWS, -1)[:, : table.schema.row_bytes]
        store.put(RowIds.of(table, np.arange(ROWS)), data)
        ids = np.random.default_rng(0).integers(0, 2 * ROWS, ROWS)
        out, found = np.zeros_like(data), np.zeros(ROWS, np.bool_)
        store.get(RowIds.of(table, ids), out, found)
        assert (found == (ids < ROWS)).all()
        assert (out[found] == data[ids[found]]).all()
        assert not out[~found].any()


@pytest.mark.parametrize("threads", [1, 4])
def test_opening_gives_the_same_rows_with_any_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    config = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 15, index_shards=16, compact_bytes_per_s=0)
    store = LmdbStore(tmp_path / "s", config=config)
    table = store.open_table("t", schema_of(8))
    rng, rows = np.random.default_rng(0), {}
    for version in range(40):
        ids = rng.integers(0, 4000, 500)
        store.put(RowIds.of(table, ids), np.full((500, 32), version, np.uint8))
        rows |= {(table.number, id): bytes([version]) * 32 for id in ids.tolist()}
        gone = rng.integers(0, 4000, 50)
        store.delete(RowIds.of(table, gone))
        for id in gone.tolist():
            rows.pop((table.number, id), None)
    store.flush()
    live = _live(store)
    assert store.stats().segments > 64, "few are replayed by one thread"
    store.abandon()
    monkeypatch.setattr(recovery, "usable_threads", lambda: threads)
    with LmdbStore(tmp_path / "s", config=config) as store:
        check_equal(store, table.group, rows)
        assert _live(store) == live


def _live(store: LmdbStore) -> dict[int, int]:
    """Live rows by number of the segment."""
    lines = store._session.groups[0].segments.lines
    return {int(line[NUMBER]): int(line[LIVE]) for line in lines if line[NUMBER]}
