"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from storage import HeapStore, LmdbStore
from storage.errors import StoreFullError
from tests.tiered_emb.test_checkpoint import Run, on_disk
from tiered_emb import CheckpointError, TierConfig, list_checkpoints
from tiered_emb.background import BackgroundState
from tiered_emb.checkpoint_files import Folder, Manifest


@pytest.mark.parametrize("hbm", [0, "16KiB"])
def test_it_holds_the_state_of_the_call(tmp_path: Path, hbm: int | str) -> None:
    one = Run(TierConfig(hbm, "512KiB", tmp_path / "rows"))
    one.steps(10)
    expected = {}
    for turn in range(3):
        pending = one.save(tmp_path / "ck", f"t{turn}", background=True)
        losses = one.steps(8)
        assert pending.wait().tag == f"t{turn}"
        expected[f"t{turn}"] = losses
    one.model.close()
    for tag in ("t2", "t0", "t1"):
        place = tmp_path / f"copy-{tag}"
        shutil.copytree(tmp_path, place, ignore=shutil.ignore_patterns("copy-*"))
        again = Run(TierConfig(hbm, "512KiB", place / "rows"))
        assert again.load(place / "ck", tag).tag == tag
        assert again.steps(8) == expected[tag]
        again.model.close()


def test_it_is_the_checkpoint_that_waiting_would_have_made(tmp_path: Path) -> None:
    states = []
    for background in (False, True):
        place = tmp_path / str(background)
        place.mkdir()
        one = Run(on_disk(place))
        one.steps(12)
        saved = one.save(place / "ck", background=background)
        one.steps(6)
        if background:
            saved.wait()
        one.load(place / "ck")
        states.append((one.state(), one.steps(5)))
        one.model.close()
    assert states[0] == states[1]


def test_the_next_verb_waits_for_it(tmp_path: Path) -> None:
    one = Run(on_disk(tmp_path))
    one.steps(5)
    for tag in ("a", "b"):
        one.save(tmp_path / "ck", tag, background=True)
    assert [found.tag for found in list_checkpoints(tmp_path / "ck")] == ["a", "b"]
    one.steps(3)
    one.save(tmp_path / "ck", "c", background=True, keep_last=1)
    assert one.load(tmp_path / "ck").tag == "c"
    one.save(tmp_path / "ck", "d", background=True)
    one.model.close()
    assert [found.tag for found in list_checkpoints(tmp_path / "ck")] == ["c", "d"]


def test_a_failure_is_told_once_and_the_checkpoint_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Run(on_disk(tmp_path))
    one.steps(5)
    one.save(tmp_path / "ck", "before")

    def refuse(*_: Any, **__: Any) -> None:
        raise StoreFullError("no room")

    for ask in ("wait", "save"):
        one.steps(3)
        with monkeypatch.context() as patch:
            patch.setattr(LmdbStore, "complete_state", refuse)
            pending = one.save(tmp_path / "ck", "lost", background=True)
            pending.join()
        if ask == "wait":
            with pytest.raises(StoreFullError, match="no room"):
                pending.wait()
        else:
            with pytest.raises(CheckpointError, match="no room"):
                one.save(tmp_path / "ck", "after")
    assert one.save(tmp_path / "ck", "after").tag == "after"
    assert [found.tag for found in list_checkpoints(tmp_path / "ck")] == ["before", "after"]
    state = one.state()
    one.steps(2)
    one.load(tmp_path / "ck")
    assert one.state() == state
    one.model.close()


@pytest.mark.parametrize("verb", ["close", "flush"])
def test_the_store_stays_until_the_files_are_whole(tmp_path: Path, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Run(on_disk(tmp_path))
    one.steps(5)
    one.save(tmp_path / "ck", "a")
    finish, waited = Folder.finish, []

    def finish_late(self: Folder, manifest: Manifest) -> None:
        thread = threading.Thread(target=one.model.close if verb == "close" else one.model.users.flush)
        thread.start()
        thread.join(0.2)
        waited.append((thread, thread.is_alive()))
        finish(self, manifest)

    monkeypatch.setattr(Folder, "finish", finish_late)
    dropped = one.save(tmp_path / "ck", "b", background=True, keep_last=1).wait().dropped
    waited[0][0].join()
    assert waited[0][1]
    assert dropped == ("a",)
    one.model.close()
    with LmdbStore(tmp_path / "rows") as store:
        assert [found.name.rpartition(":")[2] for found in store.snapshots()] == ["b"]


def test_without_a_thread_there_is_no_checkpoint_and_nothing_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Run(on_disk(tmp_path))
    one.steps(5)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            one.save(tmp_path / "ck", "a", background=True)
    one.save(tmp_path / "ck", "b", background=True).wait()
    one.model.close()
    assert [found.tag for found in list_checkpoints(tmp_path / "ck")] == ["b"]


def test_rows_in_memory_are_written_before_it_returns(tmp_path: Path) -> None:
    one = Run(TierConfig(0, "512KiB", HeapStore()))
    one.steps(5)
    pending = one.save(tmp_path / "ck", background=True)
    losses = one.steps(4)
    pending.wait()
    one.load(tmp_path / "ck")
    assert one.steps(4) == losses
    one.model.close()


def test_its_thread_ends_with_it(tmp_path: Path) -> None:
    one = Run(on_disk(tmp_path))
    one.steps(5)
    one.save(tmp_path / "ck", background=True).wait()
    assert not [thread for thread in threading.enumerate() if thread.name == "tiered-emb-checkpoint"]
    one.model.close()


@pytest.mark.parametrize("when", ["it begins", "its thread is made"])
def test_what_cuts_the_call_short_leaves_nothing_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """A Ctrl-C while rows are marked, or no memory for a thread: training goes on, and is flushed and saved as ever."""
    one = Run(on_disk(tmp_path))
    one.steps(5)
    begin, start = LmdbStore.begin_state, threading.Thread.start

    def interrupted(store: LmdbStore, rows: Any) -> None:
        begin(store, rows)
        os.kill(os.getpid(), signal.SIGINT)

    def refused(thread: threading.Thread) -> None:
        if thread.name == "tiered-emb-checkpoint":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(LmdbStore, "begin_state", interrupted if when == "it begins" else begin)
        patch.setattr(threading.Thread, "start", refused if when == "its thread is made" else start)
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            one.save(tmp_path / "ck", "a", background=True)
    one.steps(2)
    one.model.users.flush()
    one.save(tmp_path / "ck", "b")
    expected = one.state()
    one.steps(2)
    one.load(tmp_path / "ck", "b")
    assert one.state() == expected
    one.model.close()


def test_a_child_does_not_wait_for_what_its_parent_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Run(on_disk(tmp_path))
    one.steps(5)
    go_on, complete = threading.Event(), BackgroundState.make

    def later(state: BackgroundState, *arguments: Any) -> None:
        go_on.wait()
        complete(state, *arguments)

    monkeypatch.setattr(BackgroundState, "make", later)
    pending = one.save(tmp_path / "ck", "a", background=True)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        status = 1
        try:
            with one.model.users.engine.settled():
                pass
            found = list_checkpoints(tmp_path / "ck")
            try:
                pending.wait()
            except CheckpointError:
                status = 0 if not found else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    go_on.set()
    assert status == 0
    assert pending.wait().tag == "a"
    one.model.close()
