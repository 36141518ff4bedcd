"""Writing early: it is asked for in bulk, ends with the commit, and whatever it cannot do changes nothing."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from storage import Column, LmdbStore, RowIds, RowSchema, StoreConfig
from storage.row_log import early_writes
from storage.row_log.early_writes import writing_early
from storage.row_log.log import Commit, RowLog

SCHEMA = RowSchema((Column("weight", "float32", 32),))


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name == "tiered-emb writes"]


def test_the_disk_is_told_again_and_again_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, twice = [], threading.Event()

    def begin(file: int, first: int, count: int, what: int) -> int:
        told.append((first, count, what))
        if len(told) > 1:
            twice.set()
        return 0

    monkeypatch.setattr(early_writes, "_begin", begin)
    (tmp_path / "file").touch()
    with writing_early(tmp_path / "file"):
        assert twice.wait(60)
        assert threads()
    assert not threads()
    assert set(told) == {(0, 0, 2)}


def test_where_it_is_refused_it_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []

    def begin(*_: int) -> int:
        told.append(1)
        return -1

    monkeypatch.setattr(early_writes, "_begin", begin)
    (tmp_path / "file").touch()
    with writing_early(tmp_path / "file"):
        for thread in threading.enumerate():
            if thread.name == "tiered-emb writes":
                thread.join(60)
        assert not threads()
    assert told == [1]


def test_without_the_call_the_file_or_a_thread_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing_early(tmp_path / "nowhere"):
        pass
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _refused)
        with writing_early(tmp_path / "file"):
            assert not threads()
    monkeypatch.setattr(early_writes, "_begin", None)
    with writing_early(tmp_path / "file"):
        assert not threads()


def _refused(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_error_passes_and_the_thread_has_ended(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="of the commit"), writing_early(tmp_path / "file"):
        raise ValueError("of the commit")
    assert not threads()


def test_a_bulk_load_commits_what_is_sealed_at_once_and_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits: list[tuple[int, bool]] = []
    real = RowLog.commit

    def commit(log: RowLog, what: Commit, **how: Any) -> None:
        commits.append((len(what.segments), how.get("early", False)))
        real(log, what, **how)

    monkeypatch.setattr(RowLog, "commit", commit)
    rows = np.zeros((40_000, 128), np.uint8)
    with LmdbStore(tmp_path / "st", config=StoreConfig(write_buffer_bytes=1 << 25)) as store:
        table = store.open_table("t", SCHEMA)
        with store.bulk(table.group, len(rows)):
            store.put(RowIds.of(table, np.arange(len(rows))), rows)
            store.flush()
        assert all(early for segments, early in commits if segments)
        assert sum(segments for segments, _ in commits) == 2
        commits.clear()
        store.put(RowIds.of(table, np.arange(len(rows))), rows)
        store.flush()
        assert not any(early for _, early in commits)


def test_a_bulk_load_that_cannot_begin_leaves_nothing_of_it(tmp_path: Path) -> None:
    with LmdbStore(tmp_path / "st") as store:
        table = store.open_table("t", SCHEMA)
        with pytest.raises(MemoryError, match="say fewer at bulk"), store.bulk(table.group, 1 << 44):
            raise AssertionError("it has begun")
        group = store._session.groups[0]
        assert not group.expects_new
        assert group.filled_bytes == group.usual_bytes


@pytest.mark.parametrize("where", ["index.trim", "_finish"])
def test_ctrl_c_at_the_end_of_a_bulk_load_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (20_000, 128), dtype=np.uint8)
    with LmdbStore(tmp_path / "st") as store:
        table = store.open_table("t", SCHEMA)
        group = store._session.groups[0]
        owner, _, name = where.rpartition(".")
        of = getattr(group, owner) if owner else group
        real = getattr(of, name)

        def interrupted(*arguments: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            return real(*arguments)

        def load() -> None:
            with store.bulk(table.group, len(rows)):
                store.put(RowIds.of(table, np.arange(len(rows))), rows)
                monkeypatch.setattr(of, name, interrupted)

        with pytest.raises(KeyboardInterrupt):
            load()
        monkeypatch.undo()
        assert not group.expects_new
        assert group.filled_bytes == group.usual_bytes
    with LmdbStore(tmp_path / "st") as store:
        table = store.open_table("t", SCHEMA)
        out, found = np.zeros_like(rows), np.zeros(len(rows), np.bool_)
        store.get(RowIds.of(table, np.arange(len(rows))), out, found)
        assert found.all()
        assert np.array_equal(out, rows)
