"""A state that was begun: what was put until then, and what is given to it, beside puts that are no part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.errors import StoreConfigError
from storage.lmdb_store import LmdbStore, StoreConfig
from storage.schema import Column, RowSchema
from storage.snapshot import SnapshotView
from storage.store import BegunStore, RowIds, Stored, TableRef

SCHEMA = RowSchema((Column("weight", "float32", 3),))
SMALL = StoreConfig(segment_bytes=8192, write_buffer_bytes=1 << 16)

Rows = dict[int, float]


def opened(path: Path, durability: str = "snapshot") -> tuple[LmdbStore, TableRef]:
    store = LmdbStore(path, durability=durability, config=SMALL)  # type: ignore[arg-type]
    return store, store.open_table("t", SCHEMA)


def batch(table: TableRef, ids: list[int], stored: Stored | None = None) -> RowIds:
    rows = RowIds.of(table, np.array(ids, np.int64))
    return RowIds(rows.group, rows.tables, rows.ids, stored)


def data(values: list[float]) -> np.ndarray:
    return np.repeat(np.array(values, np.float32), 3).reshape(-1, 3).view(np.uint8)


def put(store: LmdbStore, table: TableRef, rows: Rows) -> None:
    store.put(batch(table, list(rows)), data(list(rows.values())))


def give(store: LmdbStore, table: TableRef, rows: Rows) -> None:
    store.put_as_begun(batch(table, list(rows)), data(list(rows.values())))


def held(store: LmdbStore | SnapshotView) -> Rows:
    found: Rows = {}
    for rows, block in store.scan(0):
        for id, value in zip(rows.ids.tolist(), block.view(np.float32)[:, 0].tolist(), strict=True):
            assert id not in found
            found[id] = value
    return found


def test_what_it_offers(tmp_path: Path) -> None:
    store, _ = opened(tmp_path / "st")
    with store:
        assert isinstance(store, BegunStore)


@pytest.mark.parametrize("durability", ["snapshot", "commit"])
def test_the_state_has_rows_as_they_were_and_the_store_those_put_since(tmp_path: Path, durability: str) -> None:
    store, table = opened(tmp_path / "st", durability)
    with store:
        put(store, table, dict.fromkeys(range(1000), 1.0))
        store.begin_state({table.group: 600})
        put(store, table, dict.fromkeys([*range(0, 900, 3), 5000, 2000], 9.0))
        give(store, table, dict.fromkeys(range(500), 2.0))
        give(store, table, {2000: 2.5, 2001: 2.75})
        put(store, table, dict.fromkeys(range(0, 900, 9), 8.0))
        store.complete_state(b"note", snapshot="s")
        then = dict.fromkeys(range(1000), 1.0) | dict.fromkeys(range(500), 2.0) | {2000: 2.5, 2001: 2.75}
        now = then | dict.fromkeys([*range(0, 900, 3), 5000, 2000], 9.0) | dict.fromkeys(range(0, 900, 9), 8.0)
        with store.at("s") as view:
            assert held(view) == then
            assert view.note == b"note"
        assert held(store) == now
        if durability == "commit":
            store.flush()
        store.abandon()
    store, table = opened(tmp_path / "st", durability)
    with store:
        assert held(store) == (then if durability == "snapshot" else now)
        assert store.note == b"note"
        with store.at("s") as view:
            assert held(view) == then


def test_a_snapshot_counts_the_rows_that_it_has(tmp_path: Path) -> None:
    store, table = opened(tmp_path / "st")
    with store:
        put(store, table, dict.fromkeys(range(100), 1.0))
        store.begin_state({table.group: 300})
        put(store, table, dict.fromkeys(range(50, 250), 9.0))
        known = Stored(np.arange(0, 300) < 100, store.deletions)
        store.put_as_begun(batch(table, list(range(300)), known), data([2.0] * 300))
        store.complete_state(snapshot="s")
        assert store.snapshots()[0].rows == 300
        with store.at("s") as view:
            assert view.stats().rows == 300
            assert held(view) == dict.fromkeys(range(300), 2.0)


def test_it_is_gone_with_a_crash_and_with_a_close_its_rows_are_rows_like_others(tmp_path: Path) -> None:
    for crash in (True, False):
        path = tmp_path / str(crash)
        store, table = opened(path)
        put(store, table, {1: 1.0, 2: 1.0})
        store.flush(b"before")
        store.begin_state({table.group: 3})
        put(store, table, {1: 9.0})
        give(store, table, {1: 2.0, 2: 2.0, 3: 2.0})
        if crash:
            store.abandon()
        else:
            store.close()
        store, table = opened(path)
        with store:
            assert held(store) == ({1: 1.0, 2: 1.0} if crash else {1: 9.0, 2: 2.0, 3: 2.0})


def test_abandoned_it_leaves_its_rows_where_nothing_newer_was_put(tmp_path: Path) -> None:
    store, table = opened(tmp_path / "st")
    with store:
        put(store, table, {1: 1.0})
        store.begin_state({table.group: 2})
        put(store, table, {1: 9.0})
        give(store, table, {1: 2.0, 2: 2.0})
        store.abandon_state()
        assert held(store) == {1: 9.0, 2: 2.0}
        store.flush()
        store.delete(batch(table, [1]))
        assert held(store) == {2: 2.0}


def test_a_flush_after_it_covers_what_was_committed_before_it_was_complete(tmp_path: Path) -> None:
    config = StoreConfig(write_buffer_bytes=1 << 22)
    store = LmdbStore(tmp_path / "st", durability="snapshot", config=config)
    table = store.open_table("t", SCHEMA)
    with store:
        put(store, table, {1: 1.0})
        store.snapshot("before")
        store.begin_state({table.group: 1})
        with store.bulk(table.group, 100):  # at whose end its segments are sealed
            put(store, table, dict.fromkeys(range(100, 200), 9.0))
        store.drop_snapshot("before")  # commits them
        give(store, table, {1: 2.0})
        store.complete_state()
        store.flush()
        store.abandon()
    store = LmdbStore(tmp_path / "st", durability="snapshot", config=config)
    with store:
        assert held(store) == {1: 2.0} | dict.fromkeys(range(100, 200), 9.0)


def test_segments_that_become_smaller_meanwhile_have_their_numbers(tmp_path: Path) -> None:
    store = LmdbStore(tmp_path / "st", config=StoreConfig(write_buffer_bytes=1 << 25))
    table = store.open_table("t", SCHEMA)
    rows = dict.fromkeys(range(200000), 1.0)
    with store:
        with store.bulk(table.group, 100):
            store.begin_state({table.group: len(rows)})
            give(store, table, {0: 1.0})
        give(store, table, rows)
        store.complete_state(snapshot="s")
        with store.at("s") as view:
            assert view.stats().rows == len(rows)


def test_a_store_that_makes_states_by_itself_makes_none_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.row_log.committer._DEAD_BYTES", 1 << 14)
    store, table = opened(tmp_path / "st", "commit")
    then = dict.fromkeys(range(2000), 1.0)
    with store:
        put(store, table, then)
        store.begin_state({table.group: 1})
        for value in range(2, 12):
            put(store, table, dict.fromkeys(then, float(value)))
        give(store, table, {0: 1.5})
        store.complete_state(snapshot="s")
        with store.at("s") as view:
            assert held(view) == then | {0: 1.5}
        assert held(store) == dict.fromkeys(then, 11.0)


REFUSED: dict[str, Callable[[LmdbStore, TableRef], object]] = {
    "begin": lambda store, table: store.begin_state({table.group: 1}),
    "flush": lambda store, table: store.flush(),
    "snapshot": lambda store, table: store.snapshot("s"),
    "rollback": lambda store, table: store.rollback("before"),
    "compact": lambda store, table: store.compact(),
    "delete": lambda store, table: store.delete(batch(table, [1])),
}


@pytest.mark.parametrize("verb", REFUSED)
def test_no_other_state_is_made_until_it_is_complete(tmp_path: Path, verb: str) -> None:
    store, table = opened(tmp_path / "st")
    with store:
        put(store, table, {1: 1.0})
        store.snapshot("before")
        store.begin_state({table.group: 1})
        with pytest.raises(StoreConfigError, match="abandon_state"):
            REFUSED[verb](store, table)
        give(store, table, {1: 2.0})
        store.complete_state()
        if verb == "begin":
            store.begin_state({table.group: 1})
            store.abandon_state()
        else:
            REFUSED[verb](store, table)


def test_nothing_is_given_to_a_state_that_was_not_begun_and_no_more_than_was_said(tmp_path: Path) -> None:
    store, table = opened(tmp_path / "st")
    with store:
        with pytest.raises(StoreConfigError, match="begin_state"):
            give(store, table, {1: 1.0})
        with pytest.raises(StoreConfigError, match="begin_state"):
            store.complete_state()
        store.begin_state({table.group: 1})
        with pytest.raises(StoreConfigError, match="say how many"):
            give(store, table, dict.fromkeys(range(5000), 1.0))
        store.abandon_state()


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """While the list says so, no transaction finds room."""
    import lmdb

    from storage.row_log import log

    state = [False]
    commit = log.RowLog.commit

    def maybe(self: log.RowLog, what: log.Commit, **how: bool) -> None:
        if state[0]:
            with self._translated("written", 1 << 40):
                raise lmdb.MapFullError("full")
        commit(self, what, **how)

    monkeypatch.setattr(log.RowLog, "commit", maybe)
    return state


def test_a_full_disk_leaves_it_begun(tmp_path: Path, full: list[bool]) -> None:
    from storage.errors import StoreFullError

    store, table = opened(tmp_path / "st")
    with store:
        put(store, table, {1: 1.0})
        store.begin_state({table.group: 1})
        put(store, table, {2: 9.0})
        give(store, table, {1: 2.0})
        full[0] = True
        with pytest.raises(StoreFullError):
            store.complete_state(snapshot="s")
        full[0] = False
        store.complete_state(snapshot="s")
        with store.at("s") as view:
            assert held(view) == {1: 2.0}


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "begin", "give", "complete", "abandon", "flush", "compact", "drop", "reopen"]),
            st.integers(0, 40),
            st.integers(1, 120),
        ),
        min_size=5,
        max_size=60,
    ),
    st.sampled_from(["snapshot", "commit"]),
)
def test_any_history(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]], durability: str
) -> None:
    path = tmp_path_factory.mktemp("begun") / "st"
    store, table = opened(path, durability)
    now: Rows = {}
    durable: Rows = {}
    then: Rows | None = None
    late: Rows = {}
    kept: dict[str, Rows] = {}
    value = 0.0
    try:
        for number, (verb, first, count) in enumerate(steps):
            value += 1
            rows = dict.fromkeys(range(first, first + count), value)
            if verb == "put":
                put(store, table, rows)
                now |= rows
                late |= rows
            elif verb == "begin" and then is None:
                store.begin_state({table.group: 300})
                then, late, given = dict(now), {}, set()
            elif verb == "give" and then is not None:
                rows = {id: value for id in rows if id not in given}
                give(store, table, rows)
                given |= set(rows)
                then |= rows
                now |= {id: value for id, value in rows.items() if id not in late}
            elif verb == "complete" and then is not None:
                store.complete_state(snapshot=f"s{number}")
                kept[f"s{number}"] = durable = then
                then = None
            elif verb == "abandon" and then is not None:
                store.abandon_state()
                then = None
            elif verb in ("flush", "compact") and then is None:
                store.flush() if verb == "flush" else store.compact()
                durable = dict(now)
            elif verb == "drop" and kept:
                name = next(iter(kept))
                store.drop_snapshot(name)
                del kept[name]
            elif verb == "reopen":
                if number % 2:
                    store.abandon()
                    if durability == "snapshot":
                        now = dict(durable)
                    else:
                        store, table = opened(path, durability)
                        found = held(store)
                        assert all(found[id] in (durable.get(id), now[id]) or id in late for id in found)
                        assert durable.keys() <= found.keys()
                        now, then = found, None
                        continue
                else:
                    store.close()
                    durable = dict(now)
                store, table = opened(path, durability)
                then = None
            assert held(store) == now
            for name, rows in kept.items():
                with store.at(name) as view:
                    assert held(view) == rows
    finally:
        store.close()
