"""Snapshots and other processes: readers that follow through snapshots and rollbacks, children that read views."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from storage import LmdbStore, RowIds, StorageError, StoreChangedError, StoreConfig, StoreConfigError, StoreForkedError
from storage.testing import Rows, contents, schema_of
from tests.storage.test_reader import check, follower, reading, writing
from tests.storage.test_snapshot_verbs import STILL, differing, put

TINY = StoreConfig(segment_bytes=1 << 13, write_buffer_bytes=1 << 14, index_shards=16)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with LmdbStore(tmp_path / "s", config=TINY) as store:
        store.open_table("t", schema_of(8))
    return tmp_path / "s"


class Model:
    """What a writer was told, and what each snapshot must be."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.kept: dict[str, dict[int, int]] = {}

    def as_bytes(self, name: str, table: int) -> Rows:
        return {(table, id): bytes([byte] * 32) for id, byte in self.kept[name].items()}


@pytest.mark.parametrize("durability", ["commit", "snapshot"])
@pytest.mark.parametrize("seed", range(3))
def test_a_reader_follows_through_snapshots_and_rollbacks(path: Path, durability: str, seed: int) -> None:
    rng, model = np.random.default_rng(seed), Model()
    with writing(path, durability) as writer, reading(path, durability) as store:
        table = store.open_table("t", schema_of(8)).number
        views = {}
        for step in range(60):
            first, count = (int(n) for n in rng.integers(1, 900, 2))
            writer.do(f"put(range({first}, {first + count}), {step}); delete(range({first}, {first + 20}))")
            model.rows |= dict.fromkeys(range(first, first + count), step)
            for id in range(first, first + 20):
                model.rows.pop(id, None)
            match int(rng.integers(5)):
                case 0 | 1:
                    writer.do(f"store.snapshot('s{step}', keep_last=4)")
                    model.kept[f"s{step}"] = dict(model.rows)
                    for name in list(model.kept)[:-4]:
                        del model.kept[name]
                case 2 if model.kept:
                    name = list(model.kept)[int(rng.integers(len(model.kept)))]
                    writer.do(f"store.rollback({name!r}, drop_later=True)")
                    model.rows = dict(model.kept[name])
                    while list(model.kept)[-1] != name:
                        del model.kept[list(model.kept)[-1]]
                case 3:
                    writer.do("store.compact()")
                case _:
                    writer.do("store.flush()")
            if rng.random() < 0.6:
                check(store, model.rows)
            assert [one.name for one in store.snapshots()] == list(model.kept)
            for name in list(model.kept):
                if name not in views and rng.random() < 0.4:
                    views[name] = store.at(name)
            for name, view in list(views.items()):
                if name in model.kept:
                    assert contents(view, 0) == model.as_bytes(name, table)  # type: ignore[arg-type]
                else:
                    with pytest.raises(StoreChangedError, match=f"snapshot '{name}' of .* was dropped"):
                        contents(view, 0)  # type: ignore[arg-type]
                    views.pop(name).close()
            if len(model.kept) > 1:
                older, *_, newer = model.kept
                was, now = model.kept[older], model.kept[newer]
                put_ids, deleted = differing(store, older, newer)
                assert deleted == was.keys() - now.keys()
                assert {id for id in now if was.get(id) != now[id]} <= put_ids <= now.keys()
        assert follower(store).starts > 1


def test_a_scan_of_a_view_ends_with_the_snapshot(path: Path) -> None:
    with writing(path) as writer, reading(path) as store:
        writer.do("put(range(3000), 1); store.snapshot('a')")
        view = store.at("a")
        scan = view.scan(0)
        next(scan)
        writer.do("put(range(3000), 2); store.compact()")
        next(scan)
        writer.do("store.drop_snapshot('a')")
        with pytest.raises(StoreChangedError):
            list(scan)
        with pytest.raises(StoreConfigError, match="no snapshot 'a'"):
            store.at("a")


def test_a_diff_stays_in_one_transaction_of_a_reader(path: Path) -> None:
    with writing(path) as writer, reading(path) as store:
        writer.do("put(range(3000), 1); store.snapshot('a'); put(range(5), 2); store.snapshot('b')")
        changes = store.diff("a", "b")
        first = next(changes)
        writer.do("[store.drop_snapshot(name) for name in 'ab']; flush(range(3000), 3); store.compact()")
        assert sum(len(one.rows) for one in [first, *changes]) == 5
        check(store, dict.fromkeys(range(3000), 3))


def test_a_snapshot_dropped_in_the_middle_of_a_readers_diff_is_no_damage(path: Path) -> None:
    """Of the second group the older snapshot's rows are still to be asked for, and their segments are gone."""
    with writing(path) as writer, reading(path) as store:
        writer.do("other = store.open_table('other', schema_of(3)); nine = RowIds.of(other, np.arange(9))")
        writer.do("put(range(5), 1); store.put(nine, np.ones((9, 12), np.uint8)); store.snapshot('a')")
        writer.do("put(range(5), 2); store.delete(nine); store.snapshot('b')")
        assert differing(store, "a", "b") == (set(range(5)), set(range(9)))
        changes = store.diff("a", "b")
        next(changes)
        writer.do("[store.drop_snapshot(name) for name in 'ab']; store.compact(); store.compact()")
        with pytest.raises(StoreChangedError, match="snapshot 'a'"):
            list(changes)
        assert set(contents(store, 0).values()) == {bytes([2] * 32)}


def in_child(work: Callable[[], None]) -> int:
    """Fork, work there, and return the child's pid; its exit code is 0 if nothing was raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: the store has a thread
        child = os.fork()
    if child:
        return child
    try:
        signal.alarm(60)
        work()
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ends_well(child: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestFork:
    def test_a_child_reads_a_snapshot_while_the_parent_trains_on(self, tmp_path: Path) -> None:
        """Case 28: what it reads is of one instant and does not change, whatever is committed meanwhile."""
        store = LmdbStore(tmp_path / "s", durability="snapshot", config=TINY)
        rows = put(store, range(2000), 1)
        store.snapshot("a", b"1")
        view = store.at("a")
        ready, go = os.pipe()

        def work() -> None:
            os.read(ready, 1)
            for _ in range(20):
                assert contents(view, 0) == rows  # type: ignore[arg-type]
            assert view.note == b"1"
            with store.at("a") as mine:
                assert contents(mine, 0) == rows  # type: ignore[arg-type]
            with pytest.raises(StoreForkedError):
                store.snapshot("b")
            with pytest.raises(StoreForkedError):
                store.rollback("a")
            view.close()

        child = in_child(work)
        for byte in range(2, 12):
            put(store, range(2000), byte)
            store.flush()
            if byte == 4:
                os.write(go, b"x")
        assert ends_well(child)
        assert contents(view, 0) == rows  # type: ignore[arg-type]
        view.close()
        store.close()

    def test_a_child_does_not_use_the_parents_environment(self, tmp_path: Path) -> None:
        """LMDB forbids it: the child's transaction would have the parent's place in the table of readers."""
        store = LmdbStore(tmp_path / "s", config=STILL)
        put(store, range(100), 1)
        store.snapshot("a")

        def work() -> None:
            inherited = store._session._log
            assert [one.name for one in store.snapshots()] == ["a"]
            assert differing(store, None, "a")[0] == set(range(100))
            assert store._session._log is not inherited

        assert ends_well(in_child(work))
        store.close()

    @pytest.mark.parametrize("read_only", [True, False])
    def test_a_child_in_the_middle_of_a_diff_lets_go_of_nothing(self, tmp_path: Path, read_only: bool) -> None:
        """What a reader's generator holds is a transaction of the parent."""
        with LmdbStore(tmp_path / "s", config=STILL) as made:
            other = made.open_table("other", schema_of(3))
            put(made, range(100), 1)
            made.put(RowIds.of(other, np.arange(9)), np.zeros((9, 12), np.uint8))
            made.snapshot("a")
        store = LmdbStore(tmp_path / "s", config=STILL, read_only=read_only)
        changes = store.diff(None, "a")
        next(changes)

        def close() -> None:
            changes.close()  # type: ignore[attr-defined]

        def go_on() -> None:
            with suppress(StorageError):
                store.snapshots()  # opens a log of its own
            with pytest.raises(StoreForkedError, match="compare them again"):
                list(changes)

        assert ends_well(in_child(close))
        if read_only:
            lines = [line.split() for line in store._session.log._env.readers().splitlines()[1:]]
            mine = [line[-1] for line in lines if line[0] == str(os.getpid())]
            assert any(transaction != "-" for transaction in mine), "the parent's transaction is open no more"
            assert sum(len(one.rows) for one in changes) == 100
        else:
            assert ends_well(in_child(go_on))
            assert sum(len(one.rows) for one in changes) == 100
        store.close()

    def test_a_child_of_a_process_that_fills_a_view_fills_its_own(self, tmp_path: Path) -> None:
        """The thread that holds the view's lock does not exist there."""
        store = LmdbStore(tmp_path / "s", config=STILL)
        rows = put(store, range(100), 1)
        store.snapshot("a")
        view = store.at("a")
        held, done = threading.Event(), threading.Event()
        filling = view._filling[os.getpid()]

        def hold() -> None:
            with filling:
                held.set()
                done.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()

        def work() -> None:
            assert contents(view, 0) == rows  # type: ignore[arg-type]

        child = in_child(work)
        assert ends_well(child)
        done.set()
        thread.join()
        view.close()
        store.close()
