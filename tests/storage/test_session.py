"""An open store's life: the index over a clean close, forks, threads that read while others write and close."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pytest

from storage import LmdbStore, RowIds, StoreClosedError, StoreConfig, StoreForkedError, StoreIOError, TableRef
from storage.row_log import recovery
from storage.testing import Rows, check_equal, contents, named, random_rows, read, schema_of

CONFIG = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 15, index_shards=16)


def filled(path: Path, durability: str = "commit") -> tuple[TableRef, Rows]:
    """A store with updates and deletions behind it, closed."""
    with LmdbStore(path, durability=durability, config=CONFIG) as store:  # type: ignore[arg-type]
        table, rng, rows = store.open_table("t", schema_of(8)), np.random.default_rng(0), Rows()
        for _ in range(8):
            ids = RowIds.of(table, rng.integers(-500, 1500, 700))
            data = random_rows(rng, 700, table)
            store.put(ids, data)
            rows |= {row: content.tobytes() for row, content in zip(named(ids), data, strict=True)}
            gone = RowIds.of(table, rng.integers(-500, 1500, 30))
            store.delete(gone)
            rows = {row: content for row, content in rows.items() if row not in set(named(gone))}
            store.flush()
    return table, rows


def fork() -> int:
    """As os.fork; newer Pythons warn of it where there are threads, and a store that writes has one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the log was replayed from the start, one entry each time."""
    seen: list[str] = []
    real = recovery.replay_log

    def replay(log: object, *arguments: object) -> object:
        seen.append(str(arguments[-1]))
        return real(log, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery, "replay_log", replay)
    return seen


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
@pytest.mark.parametrize("read_only", [False, True])
class TestIndexOverAClose:
    def test_a_store_that_was_closed_opens_without_its_log(
        self, tmp_path: Path, replays: list[str], durability: str, read_only: bool
    ) -> None:
        table, rows = filled(tmp_path / "s", durability)
        replays.clear()
        for _ in range(3):  # and again: nothing was changed in between
            with LmdbStore(tmp_path / "s", durability=durability, config=CONFIG, read_only=read_only) as store:  # type: ignore[arg-type]
                check_equal(store, table.group, rows)
        assert not replays

    def test_one_that_was_not_is_replayed(
        self, tmp_path: Path, replays: list[str], durability: str, read_only: bool
    ) -> None:
        table, rows = filled(tmp_path / "s", durability)
        store = LmdbStore(tmp_path / "s", durability=durability, config=CONFIG)  # type: ignore[arg-type]
        store.open_table("t", schema_of(8))
        store.put(RowIds.of(table, np.array([7])), np.zeros((1, 32), np.uint8))
        store.flush()
        assert not (tmp_path / "s" / "index").exists(), "it is not that of the log any more"
        store.abandon()
        replays.clear()
        with LmdbStore(tmp_path / "s", durability=durability, config=CONFIG, read_only=read_only) as store:  # type: ignore[arg-type]
            check_equal(store, table.group, rows | {(table.number, 7): bytes(32)})
        assert len(replays) == 1

    def test_the_index_of_another_moment_is_not_believed(
        self, tmp_path: Path, replays: list[str], durability: str, read_only: bool
    ) -> None:
        """A data file put back from a copy, beside the index that was written later; and the other way round."""
        table, rows = filled(tmp_path / "s", durability)
        shutil.copytree(tmp_path / "s", tmp_path / "copy")
        with LmdbStore(tmp_path / "s", durability=durability, config=CONFIG) as store:  # type: ignore[arg-type]
            store.open_table("t", schema_of(8))
            store.put(RowIds.of(table, np.array([7])), np.zeros((1, 32), np.uint8))
        later = rows | {(table.number, 7): bytes(32)}
        for data, index, expected in (("copy", "s", rows), ("s", "copy", later)):
            mixed = tmp_path / f"{data} and {index}"
            shutil.copytree(tmp_path / data, mixed)
            shutil.copy(tmp_path / index / "index", mixed / "index")
            replays.clear()
            with LmdbStore(mixed, durability=durability, config=CONFIG, read_only=read_only) as store:  # type: ignore[arg-type]
                check_equal(store, table.group, expected)
            assert len(replays) == 1


def test_an_index_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StoreIOError("no")

    with monkeypatch.context() as patch:
        patch.setattr("storage.row_log.committer.save_index", fail)
        table, rows = filled(tmp_path / "s")
    assert not (tmp_path / "s" / "index").exists()
    with LmdbStore(tmp_path / "s", config=CONFIG) as store:
        check_equal(store, table.group, rows)


def test_rows_put_after_opening_from_the_index_replace_those_of_before(tmp_path: Path) -> None:
    table, rows = filled(tmp_path / "s")
    with LmdbStore(tmp_path / "s", config=CONFIG) as store:
        store.open_table("t", schema_of(8))
        ids = np.arange(-500, 1500, 3)
        store.put(RowIds.of(table, ids), np.ones((len(ids), 32), np.uint8))
        store.compact()
        rows |= {(table.number, int(id)): b"\1" * 32 for id in ids}
        check_equal(store, table.group, rows)
        store.abandon()
    with LmdbStore(tmp_path / "s", config=CONFIG) as store:
        check_equal(store, table.group, rows)


def test_a_reader_that_opened_with_the_index_follows(tmp_path: Path) -> None:
    _, rows = filled(tmp_path / "s")
    with LmdbStore(tmp_path / "s", config=CONFIG) as store:
        store.open_table("t", schema_of(8))
        child = fork()
        if child == 0:  # a reader needs a process of its own
            store.close()
            with LmdbStore(tmp_path / "s", config=CONFIG, read_only=True) as reader:
                same = contents(reader, 0) == rows
            os._exit(0 if same else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_fork_reads_while_its_parent_commits_and_compacts(tmp_path: Path) -> None:
    """Every row that it finds is whole and was put; what it wants to write is refused."""
    with LmdbStore(tmp_path / "s", config=CONFIG) as store:
        table = store.open_table("t", schema_of(8))
        ids = RowIds.of(table, np.arange(1000))
        store.put(ids, np.full((1000, 32), 1, np.uint8))
        store.flush()
        child = fork()
        if child == 0:
            code = 0
            for _ in range(50):
                rows = read(store, ids, 32)
                code |= any(row is None or len(set(row)) != 1 for row in rows)
            try:
                store.put(ids, np.zeros((1000, 32), np.uint8))
                code |= 2
            except StoreForkedError:
                pass
            os._exit(code)
        for step in range(2, 40):
            store.put(ids, np.full((1000, 32), step, np.uint8))
            store.flush()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert read(store, ids, 32) == [bytes([39]) * 32] * 1000


def test_closing_waits_for_those_who_read(tmp_path: Path) -> None:
    """Threads that read while the store is closed get rows or StoreClosedError, and no memory that is gone."""
    table, rows = filled(tmp_path / "s")
    ids = RowIds.of(table, np.arange(-500, 1500))
    expected = [rows.get(row) for row in named(ids)]
    for _ in range(10):
        store, barrier, wrong = LmdbStore(tmp_path / "s", config=CONFIG), Barrier(4), list[str]()
        store.open_table("t", schema_of(8))

        def look(store: LmdbStore = store, barrier: Barrier = barrier, wrong: list[str] = wrong) -> None:
            barrier.wait()
            try:
                while True:
                    if read(store, ids, 32) != expected:
                        wrong.append("other rows")
            except StoreClosedError:
                pass

        threads = [Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        barrier.wait()
        store.close()
        for thread in threads:
            thread.join()
        assert not wrong


def test_a_child_of_a_fork_in_mid_commit_reads_once_its_parent_has_committed_more(tmp_path: Path) -> None:
    """LMDB's binding once waited there for calls of the parent's thread, for ever."""
    config = StoreConfig(write_buffer_bytes=1 << 23)
    data = np.ones((60_000, 64), np.uint8)
    with LmdbStore(tmp_path / "st", config=config) as store:
        table = store.open_table("t", schema_of(16))
        for round in range(40):
            store.put(RowIds.of(table, np.arange(len(data)) + round * len(data)), data)
            start, go = os.pipe()
            child = fork()
            if not child:
                signal.alarm(60)
                os.read(start, 1)
                out, found = np.zeros((100, 64), np.uint8), np.zeros(100, np.bool_)
                store.get(RowIds.of(table, np.arange(100)), out, found)
                os._exit(0 if found.all() and out.all() else 1)
            store.flush()
            os.write(go, b"1")
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            os.close(start)
            os.close(go)
