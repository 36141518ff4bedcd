"""A state written beside training: rows and optimizer state as they were at its boundary, whatever happened since."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from storage.errors import StoreFullError
from storage.lmdb_store import LmdbStore, StoreConfig
from storage.store import RowIds
from tiered_emb import Adam, TierConfig, TieredEmbeddingBag, prefetch
from tiered_emb.background import BackgroundState

IDS = 3000
WIDTH = 4 * 3


class Training:
    """A bag over a store of small segments, trained on ids of which some are hot."""

    def __init__(self, path: Path, hbm_rows: int = 0, ddr_bytes: int = 1 << 18, lookahead: int = 2) -> None:
        config = StoreConfig(segment_bytes=8192, write_buffer_bytes=1 << 16)
        self.store = LmdbStore(path, durability="snapshot", config=config)
        tiers = TierConfig(hbm_bytes=hbm_rows * WIDTH * 4, ddr_bytes=ddr_bytes, store=self.store)
        rule = Adam(lr=0.05)
        self.bag = TieredEmbeddingBag(IDS, 4, mode="sum", name="t", tiers=tiers, optimizer=rule, seed=3, device="cpu")
        self.engine = self.bag._engine
        self.group, self.ref = self.bag._opened["t"]
        self._rng = np.random.default_rng(11)
        self._lookahead = lookahead

    def batches(self, count: int) -> list[torch.Tensor]:
        return [torch.from_numpy(np.minimum(self._rng.zipf(1.2, (12, 3)), IDS) - 1) for _ in range(count)]

    def train(self, steps: int) -> None:
        for batch in prefetch(self.batches(steps), self.bag, lookahead=self._lookahead):
            out = self.bag(batch)
            (out * out).sum().backward()

    def rows(self) -> NDArray[np.float32]:
        """Whole rows of all ids (IDS, W), wherever they are."""
        ids = np.arange(IDS, dtype=np.int64)
        with self.engine.road:
            return self.group.read_rows(np.full(IDS, self.ref.number, np.uint32), ids)

    def begun(self) -> BackgroundState:
        state = self.engine.begin_state()
        assert state is not None
        return state

    def stored(self, name: str) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        out, found = np.empty((IDS, WIDTH), np.float32), np.empty(IDS, np.bool_)
        with self.store.at(name) as view:
            view.get(RowIds.of(self.ref, np.arange(IDS, dtype=np.int64)), out.view(np.uint8), found)
            assert view.stats().rows == found.sum()
        return out, found

    def close(self) -> None:
        self.bag.close()
        self.store.close()


def in_background(state: BackgroundState, name: str) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            state.complete(name)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def check(training: Training, name: str, then: NDArray[np.float32], fresh: NDArray[np.float32]) -> None:
    """The snapshot has each row as it was; one that it has not got was never trained."""
    rows, found = training.stored(name)
    assert np.array_equal(rows[found], then[found])
    assert np.array_equal(then[~found], fresh[~found])


@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize(("hbm_rows", "ddr_bytes"), [(0, 1 << 18), (150, 1 << 18), (0, 1 << 20), (0, 140_000)])
def test_it_has_rows_as_they_were_while_training_goes_on(
    tmp_path: Path, hbm_rows: int, ddr_bytes: int, lookahead: int
) -> None:
    training = Training(tmp_path / "st", hbm_rows, ddr_bytes, lookahead)
    try:
        fresh = training.rows()
        training.train(30)
        kept: dict[str, NDArray[np.float32]] = {}
        for round in range(6):
            kept[f"s{round}"] = training.rows()
            thread, errors = in_background(training.begun(), f"s{round}")
            training.train(15)
            thread.join()
            assert not errors
            assert training.group.moves.saving is None
            for name, then in kept.items():
                check(training, name, then, fresh)
        assert training.bag.stats().tiers[-1].peak_bytes <= max(ddr_bytes, 1)
        now = training.rows()
    finally:
        training.close()
    store = LmdbStore(tmp_path / "st")
    with store:
        out, found = np.empty((IDS, WIDTH), np.float32), np.empty(IDS, np.bool_)
        store.get(RowIds.of(training.ref, np.arange(IDS, dtype=np.int64)), out.view(np.uint8), found)
        assert np.array_equal(out[found], now[found])


def test_each_way_of_a_row_into_the_state(tmp_path: Path) -> None:
    """Nobody cleans: rows that change or leave get there by themselves, the rest when it is completed."""
    training = Training(tmp_path / "st", ddr_bytes=1 << 18)
    try:
        fresh = training.rows()
        training.train(30)
        then = training.rows()
        state = training.begun()
        training.train(60)
        training.bag.set_rows(torch.arange(5), torch.full((5, 4), 7.0))
        training.bag.set_rows(torch.arange(IDS - 5, IDS), torch.full((5, 4), 8.0))
        state.complete("s")
        check(training, "s", then, fresh)
        assert np.array_equal(training.rows()[:5, :4], np.full((5, 4), 7, np.float32))
    finally:
        training.close()


def test_rows_that_get_other_slots_of_a_lowered_tier_are_marked_there(tmp_path: Path) -> None:
    training = Training(tmp_path / "st")
    try:
        fresh = training.rows()
        training.train(60)
        then = training.rows()
        state = training.begun()
        with training.engine.road:
            group, tier = training.group, training.group.top
            group.release_dropped()
            gone = tier.shrink(tier.directory.rows - 30)  # of which floors would keep these
            assert len(gone.ids) and gone.unsaved.all()
            assert group.moves.bring_back(tier, gone) is None
            tier.discard()
        training.train(3)
        state.complete("s")
        check(training, "s", then, fresh)
    finally:
        training.close()


def test_a_row_that_was_cleaned_is_not_written_again(tmp_path: Path) -> None:
    training = Training(tmp_path / "st", ddr_bytes=1 << 20)
    try:
        training.train(30)
        training.begun().complete("a")
        written = training.store.stats().rows_written
        training.begun().complete("b")
        training.bag.flush()
        assert training.store.stats().rows_written == written > 0
    finally:
        training.close()


@pytest.mark.parametrize("at", ["give", "complete"])
def test_a_failure_loses_the_state_and_no_row(tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path / "st", ddr_bytes=1 << 18)
    try:
        training.train(30)

        def refuse(*_: Any, **__: Any) -> None:
            raise StoreFullError("no room")

        state = training.begun()
        with monkeypatch.context() as patch:
            patch.setattr(LmdbStore, "put_as_begun" if at == "give" else "complete_state", refuse)
            thread, errors = in_background(state, "s")
            training.train(20)
            thread.join()
        assert [str(error) for error in errors] == ["no room"]
        now = training.rows()
        assert not training.store.snapshots()
        training.bag.flush()
        assert np.array_equal(training.rows(), now)
        training.begun().complete("later")
        check(training, "later", now, training.rows())
    finally:
        training.close()


def test_a_flush_and_a_close_wait_for_it(tmp_path: Path) -> None:
    training = Training(tmp_path / "st")
    training.train(30)
    then = training.rows()
    thread, errors = in_background(training.begun(), "s")
    training.bag.flush()
    assert [one.name for one in training.store.snapshots()] == ["s"]
    thread.join()
    thread, errors = in_background(training.begun(), "t")
    training.bag.close()
    thread.join()
    assert not errors
    with training.store.at("t") as view:
        out, found = np.empty((IDS, WIDTH), np.float32), np.empty(IDS, np.bool_)
        view.get(RowIds.of(training.ref, np.arange(IDS, dtype=np.int64)), out.view(np.uint8), found)
        assert np.array_equal(out[found], then[found])
    training.store.close()


class _Begun:
    """A state that another thread has begun, and when it is waited for, another one."""

    def __init__(self, waited: list[str], name: str, then: Any = None) -> None:
        self._waited, self._name, self._then = waited, name, then

    def wait(self) -> None:
        self._waited.append(self._name)
        if self._then is not None:
            self._then()


def test_who_waits_for_a_state_waits_for_the_one_that_was_begun_meanwhile(tmp_path: Path) -> None:
    """Else rows are handed over that are marked still, and the state that lacks them says it is complete."""
    training = Training(tmp_path / "st")
    try:
        waited: list[str] = []
        second = _Begun(waited, "second")
        first = _Begun(waited, "first", lambda: setattr(training.engine, "_state", second))
        training.engine._state = first  # type: ignore[assignment]
        training.bag.flush()
        assert waited == ["first", "second"]
        assert training.engine._state is None
    finally:
        training.close()


def test_a_state_that_could_not_be_begun_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path / "st")
    try:
        training.train(10)

        def refuse(*_: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr("tiered_emb.background.Saving.__init__", refuse)
            with pytest.raises(MemoryError):
                training.engine.begin_state()
        training.bag.flush()
        training.begun().complete("s")
    finally:
        training.close()


def test_a_module_that_is_dropped_leaves_the_state_to_the_others(tmp_path: Path) -> None:
    training = Training(tmp_path / "st")
    try:
        fresh = training.rows()
        training.train(30)
        other = TieredEmbeddingBag(IDS, 4, mode="sum", name="u", tiers=training.engine.config, device="cpu")
        assert other._engine is training.engine
        then, state = training.rows(), training.begun()
        del other
        gc.collect()
        assert "u" not in training.engine.tables
        state.complete("s")
        check(training, "s", then, fresh)
    finally:
        training.close()


def test_a_child_waits_for_no_state_of_its_parent(tmp_path: Path) -> None:
    training = Training(tmp_path / "st")
    try:
        training.train(10)
        state = training.begun()
        training.engine.forget_threads()  # as a fork does in the child
        assert training.engine._state is None
        assert training.group.moves.saving is None
        state.abandon()
    finally:
        training.close()


def test_a_small_buffer_only_costs_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiered_emb.background._KEPT_SHARE", 1 << 30)
    training = Training(tmp_path / "st", ddr_bytes=1 << 18)
    try:
        fresh = training.rows()
        training.train(30)
        then = training.rows()
        state = training.begun()
        training.train(20)
        state.complete("s")
        check(training, "s", then, fresh)
    finally:
        training.close()


def test_a_store_that_cannot_says_so() -> None:
    with TieredEmbeddingBag(10, 4, mode="sum", name="t", tiers=TierConfig()) as bag:
        assert bag._engine.begin_state() is None


def test_marks_are_listed_from_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy counts marks, then lists them; one that goes in between, as a trainer's may, leaves a slot of garbage."""
    training = Training(tmp_path / "st")
    try:
        training.train(10)
        marks = [tier.unsaved for tier in training.group.tiers] + [tier.dirty for tier in training.group.tiers]
        listed, lists = [], np.flatnonzero

        def watched(array: NDArray[Any]) -> NDArray[np.intp]:
            listed.append(any(np.shares_memory(array, one) for one in marks))
            return lists(array)

        monkeypatch.setattr(np, "flatnonzero", watched)
        training.begun().complete("s")
        training.train(5)
        training.bag.flush()
        assert listed
        assert not any(listed)
    finally:
        training.close()
