"""Replaying segments: from nothing, and by a reader that follows a writer which moves and deletes them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from storage import CorruptSegmentError, RowIds
from storage.id_index import IdIndex
from storage.row_log.group_rows import GroupRows
from storage.row_log.hashing import checksum
from storage.row_log.places import COUNT, LIVE, NUMBER
from storage.row_log.recovery import LAST_EPOCH, replay_log, replay_segments
from storage.row_log.replay import distinct_ids
from storage.row_log.segment import read_header
from storage.row_log.write_buffer import WriteBuffer

STORE, TABLE, ROW_BYTES = bytes(range(16)), 7, 8
IDS = 40


def group_of_rows(shards: int = 2) -> GroupRows:
    group = GroupRows(0, ROW_BYTES, shards, "a test")
    group.add_table(TABLE)
    return group


def row_ids(ids: Any) -> RowIds:
    return RowIds(0, np.full(len(ids), TABLE, np.uint32), np.asarray(ids, np.int64))


def epochs_as_rows(epochs: Any) -> NDArray[np.uint8]:
    return np.asarray(epochs, np.int64).reshape(-1, 1).view(np.uint8)


class Log:
    """Segments by number, as a writer commits them: a stand-in for RowLog. A row's bytes are its epoch.

    Deleted segments stay in memory, since an index that has not caught up still leads to them.
    """

    def __init__(self) -> None:
        self.group = group_of_rows()  # the writer's own, with all segments as they were filled
        self.alive: dict[int, NDArray[np.uint8]] = {}
        self.every: dict[int, NDArray[np.uint8]] = {}
        self.number = 0

    def segments(self, txn: object) -> dict[int, NDArray[np.uint8]]:
        return dict(sorted(self.alive.items()))

    def segment(self, txn: object, number: int) -> NDArray[np.uint8]:
        return self.alive[number]

    def write(self, puts: Any, deletes: Any = ()) -> int:
        """Commit a segment with rows and tombstones (of ids that have rows)."""
        self._begin(moved=False)
        self._append(puts, [self.number] * len(puts))
        self.group.bury(row_ids(deletes), lambda group: group.open)
        return self.commit(self.seal())

    def move(self, rows: dict[int, int]) -> tuple[int, NDArray[np.uint8]]:
        """A segment with copies of rows of these epochs, not committed yet."""
        kept, self.group = self.group, group_of_rows()  # copies of rows are no changes of rows
        self._begin(moved=True)
        self._append(list(rows), list(rows.values()))
        self.group.open.epochs[: len(rows)] = list(rows.values())
        sealed = self.seal()
        self.group = kept
        return sealed

    def _begin(self, moved: bool) -> None:
        self.number += 1
        self.group.open = WriteBuffer(ROW_BYTES, 1 << 14, 4096, moved)
        self.group.open.begin(self.group.segments, self.number)

    def _append(self, ids: Any, epochs: Any) -> None:
        self.group.append(row_ids(ids), epochs_as_rows(epochs), lambda group: group.open)

    def seal(self) -> tuple[int, NDArray[np.uint8]]:
        self.group.seal(STORE)
        buffer, image = self.group.sealed[-1]
        return buffer.number, np.frombuffer(image, np.uint8).copy()

    def commit(self, sealed: tuple[int, NDArray[np.uint8]]) -> int:
        number, segment = sealed
        self.alive[number] = self.every[number] = segment
        return number


def rows_of(group: GroupRows) -> dict[int, int]:
    """Epochs of the rows that a group finds."""
    out, found = np.zeros((IDS, ROW_BYTES), np.uint8), np.zeros(IDS, np.bool_)
    group.get(row_ids(np.arange(IDS)), out, found)
    epochs = out.view(np.int64)[:, 0]
    return {id: int(epochs[id]) for id in np.flatnonzero(found).tolist()}


def check_live(group: GroupRows) -> None:
    """LIVE of each segment is the number of entries that lead there."""
    places = group.index.find(group.segments.lines, row_ids(np.arange(IDS)).tables, np.arange(IDS))
    counts = np.bincount((places[places != 0] >> np.uint64(16)).astype(int), minlength=len(group.segments.lines))
    assert (counts == group.segments.lines[:, LIVE]).all()


def recovered(log: Log, last_epoch: int = LAST_EPOCH) -> GroupRows:
    group = group_of_rows()
    replay_log(log.segments(None), [group], last_epoch, STORE, "a test")
    return group


def follow(log: Log, group: GroupRows, last_epoch: int = LAST_EPOCH) -> bool:
    """What a reader does; whether it got by without starting over."""
    lines = group.segments.lines
    fresh = sorted(set(log.alive) - set(lines[:, NUMBER].tolist()))
    replay_segments(log, None, [group], fresh, last_epoch, STORE, "a test")
    lines, slots = group.segments.lines, group.segments.slots()
    gone = [slot for slot in slots.tolist() if int(lines[slot, NUMBER]) not in log.alive]
    if lines[gone, LIVE].any():
        replay_log(log.segments(None), [group], last_epoch, STORE, "a test")
        return False
    for slot in gone:
        group.segments.give_back(slot)
    return True


def test_the_newest_epoch_wins_whatever_the_order_of_segments() -> None:
    log = Log()
    log.write([1, 2, 3])
    log.write([2, 4], deletes=[3])
    log.commit(log.move({1: 1, 2: 1, 3: 1}))
    for order in ([1, 2, 3], [3, 2, 1], [2, 3, 1], [3, 1, 2]):
        log.alive = {number: log.every[number] for number in order}
        log.segments = lambda txn: log.alive
        group = recovered(log)
        assert rows_of(group) == {1: 1, 2: 2, 4: 2}
        check_live(group)


def test_rows_above_the_last_epoch_are_passed_over_and_reported() -> None:
    log = Log()
    log.write([1, 2])
    log.write([2, 3], deletes=[1])
    group = group_of_rows()
    assert replay_log(log.segments(None), [group], 1, STORE, "a test") == [2]
    assert rows_of(group) == {1: 1, 2: 1} and group.seen_epoch == 1
    assert replay_segments(log, None, [group], [2], 1, STORE, "a test") == [2]
    assert replay_segments(log, None, [group], [2], LAST_EPOCH, STORE, "a test") == []
    assert rows_of(group) == {2: 2, 3: 2} and group.seen_epoch == 2
    check_live(group)


def test_an_old_copy_of_a_deleted_row_does_not_come_back() -> None:
    """Its tombstone was buried and is gone; only a replay from nothing would need it, and has no need of it."""
    log = Log()
    log.write([1, 2])
    group = recovered(log)
    copy = log.move({1: 1, 2: 1})
    log.write([], deletes=[1])
    assert follow(log, group)
    log.commit(copy)
    assert follow(log, group)
    assert rows_of(group) == {2: 1}


def test_a_row_that_a_reader_meets_as_a_moved_copy_first_is_there() -> None:
    """The segment that it was put in came and went between two looks."""
    log = Log()
    log.write([1])
    group = recovered(log)
    log.write([2, 3])
    log.write([], deletes=[3])
    log.commit(log.move({2: 2, 3: 2}))
    del log.alive[2]
    assert follow(log, group)
    assert rows_of(group) == {1: 1, 2: 2}
    check_live(group)


def test_with_a_state_rows_between_two_states_count_although_they_were_moved() -> None:
    log = Log()
    log.write([1])
    group = recovered(log, last_epoch=1)
    log.write([2])
    assert follow(log, group, last_epoch=1) and rows_of(group) == {1: 1}
    log.commit(log.move({2: 2}))
    del log.alive[2]
    assert follow(log, group, last_epoch=3)
    assert rows_of(group) == {1: 1, 2: 2}


@pytest.mark.parametrize("seed", range(30))
def test_a_reader_that_looks_now_and_then_sees_what_a_replay_from_nothing_sees(seed: int) -> None:
    rng, log, reader, over = np.random.default_rng(seed), Log(), group_of_rows(), 0
    rows: dict[int, int] = {}
    pending: list[tuple[tuple[int, NDArray[np.uint8]], list[int]]] = []
    for _ in range(60):
        kind = rng.integers(4)
        if kind < 2 or not log.alive:
            puts = rng.choice(IDS, rng.integers(1, 6), replace=False).tolist()
            deletes = [id for id in rng.choice(IDS, 3, replace=False).tolist() if id in rows or id in puts]
            number = log.write(puts, deletes)
            rows.update(dict.fromkeys(puts, number))
            for id in deletes:
                del rows[id]
        elif kind == 2 and not pending:
            sources = rng.choice(sorted(log.alive), rng.integers(1, 4)).tolist()
            copies = {id: epoch for id, epoch in rows.items() if _holds(log.alive, sources, id, epoch)}
            if copies:
                pending.append((log.move(copies), sources))
        elif pending:
            moved, sources = pending.pop()
            log.commit(moved)
            _delete_dead(log, sources, rows)
        if rng.random() < 0.4:
            over += not follow(log, reader)
            assert rows_of(reader) == rows
            check_live(reader)
    assert rows_of(recovered(log)) == rows
    assert over < 10


def _holds(alive: dict[int, NDArray[np.uint8]], numbers: list[int], id: int, epoch: int) -> bool:
    """Whether one of these segments has a row's version."""
    for number in numbers:
        group = group_of_rows()
        with suppress(KeyError):
            log = Log()
            log.alive = {number: alive[number]}
            replay_log(log.segments(None), [group], LAST_EPOCH, STORE, "a test")
            if rows_of(group).get(id) == epoch:
                return True
    return False


def _delete_dead(log: Log, numbers: list[int], rows: dict[int, int]) -> None:
    """Delete the segments whose live rows have just been moved away, unless their tombstones still hide something."""
    whole = recovered(log)
    headers = {number: read_header(segment, number, "a test") for number, segment in log.alive.items()}
    for slot in whole.segments.slots().tolist():
        number, live = whole.segments.lines[slot, [NUMBER, LIVE]].tolist()
        others = [header.first_epoch for other, header in headers.items() if other != number]
        hides = headers[number].tombstones and not all(first > number for first in others)
        if number in numbers and not live and not hides:
            del log.alive[number], headers[number]


@pytest.mark.parametrize("what", ["store", "group", "bytes"])
def test_after_damage_nothing_is_left_half_done(what: str) -> None:
    log = Log()
    log.write([1, 2])
    group = recovered(log)
    log.write([2, 3])
    log.write([4])
    bad = log.alive[3].copy()
    bad[{"store": 96, "group": 16, "bytes": 130}[what]] ^= 1
    if what != "bytes":
        bad[120:128] = np.frombuffer(checksum(bad[:120]).to_bytes(8, "little"), np.uint8)
    log.alive[3] = bad
    with pytest.raises(CorruptSegmentError, match="segment 3 of a test"):
        replay_segments(log, None, [group], [2, 3], LAST_EPOCH, STORE, "a test")
    assert rows_of(group) == {1: 1, 2: 1} and len(group.segments) == 1 and group.seen_epoch == 1
    with pytest.raises(CorruptSegmentError, match="segment 3 of a test"):
        replay_log(log.segments(None), [group], LAST_EPOCH, STORE, "a test")
    assert rows_of(group) == {} and len(group.segments) == 0 and group.seen_epoch == 0


def many(rows: int, distinct: int) -> Log:
    """So many rows of so many ids, 500 a segment."""
    log, rng = Log(), np.random.default_rng(0)
    ids = np.concatenate([np.arange(distinct), rng.integers(0, distinct, rows - distinct)])
    rng.shuffle(ids)
    for first in range(0, rows, 500):
        log._begin(moved=False)
        part = ids[first : first + 500]
        log.group.append(
            RowIds(0, np.full(len(part), TABLE, np.uint32), part),
            np.zeros((len(part), ROW_BYTES), np.uint8),
            lambda group: group.open,
        )
        log.commit(log.seal())
    return log


def fill(log: Log, shards: int = 256) -> GroupRows:
    group = group_of_rows(shards)
    replay_log(log.segments(None), [group], LAST_EPOCH, STORE, "a test")
    return group


@pytest.mark.parametrize(("rows", "distinct"), [(1, 1), (3_000, 500), (150_000, 150_000), (200_000, 20_000)])
def test_ids_are_counted_to_about_a_percent(rows: int, distinct: int) -> None:
    log = many(rows, distinct)  # the group reads out of its segments
    group = fill(log)
    assert int(group.segments.lines[:, COUNT].sum()) == rows and group.index.rows == distinct
    count = distinct_ids(group.segments.lines, group.segments.slots())
    assert abs(count - distinct) <= 0.015 * distinct + 1
    assert count <= rows


def test_recovery_grows_few_shards_and_keeps_to_16_bytes_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    log, grown = many(150_000, 120_000), []
    monkeypatch.setattr(
        IdIndex, "grow", lambda self, shard, grow=IdIndex.grow: (grown.append(shard), grow(self, shard))
    )
    group = fill(log)
    assert len(grown) < 40, "of 256"
    assert group.index.rows == 120_000
    assert group.index.memory_bytes <= 15 * 120_000
