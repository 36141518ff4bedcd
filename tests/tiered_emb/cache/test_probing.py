"""The hash table below the Directory: it spreads ids, tells rows that share a tag apart, and is as good as new."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numba import njit
from numpy.typing import NDArray

from tiered_emb.cache import Directory, probing
from tiered_emb.cache.groups import GROUP
from tiered_emb.cache.probing import _SPREAD, bucket_count, tag_of

CAPACITY = 20_000


@njit
def tags_of(tables, ids):
    return np.array([tag_of(tables[i], ids[i]) for i in range(len(ids))])


@njit
def put(buckets, tag, slot):
    probing.put(buckets, np.uint64(tag), slot)


@njit
def take_out(buckets, tag, slot):
    return probing.take_out(buckets, np.uint64(tag), slot)


@njit
def probe(buckets, slot_ids, tag, id):
    return probing.probe(buckets, slot_ids, np.uint64(tag), id)


def distances(buckets: NDArray[np.uint64]) -> NDArray[np.int64]:
    """How many groups each row lives behind its home. All groups on the way must be full."""
    groups = len(buckets) // GROUP
    full = (buckets.reshape(groups, GROUP) != 0).all(axis=1)
    places = np.flatnonzero(buckets)
    homes = ((buckets[places] >> np.uint64(32)) * np.uint64(groups) >> np.uint64(32)).astype(np.int64)
    travelled = (places // GROUP - homes) % groups
    for step in range(int(travelled.max(initial=0))):
        assert full[(homes[travelled > step] + step) % groups].all(), "a row went past a group that is not full"
    return travelled


def rows_in_groups(buckets: NDArray[np.uint64]) -> list[int]:
    counts: list[int] = np.count_nonzero(buckets.reshape(-1, GROUP), axis=1).tolist()
    return counts


def filled(tags: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A new table of these rows."""
    buckets = np.zeros(bucket_count(len(tags)), np.uint64)
    for slot, tag in enumerate(tags):
        put(buckets, tag, slot)
    return buckets


def full(tables: NDArray[np.uint32], ids: NDArray[np.int64]) -> Directory:
    directory = Directory(len(ids))
    directory.admit(tables, ids, np.ones(len(ids), np.int32), np.empty(len(ids), np.int32))
    return directory


def check_spread(buckets: NDArray[np.uint64]) -> None:
    """Rows go past full groups as those with random tags do."""
    expected = distances(filled(np.random.default_rng(0).integers(0, 2**32, CAPACITY, np.uint64)))
    found = distances(buckets)
    assert len(found) == CAPACITY
    assert 0.01 < np.count_nonzero(expected) / CAPACITY < 0.03
    assert np.count_nonzero(found) < 1.4 * np.count_nonzero(expected)
    assert found.max() <= 10


@pytest.mark.parametrize("stride", [1, 3, 8, 64, 2**12, 2**20, 2**31, 2**32, 2**44, -(2**33) + 2**7])
def test_regular_ids_spread_like_random_ones(stride: int) -> None:
    ids = np.arange(CAPACITY, dtype=np.int64) * stride
    check_spread(full(np.zeros(CAPACITY, np.uint32), ids)._buckets)


def test_the_same_ids_in_many_tables_spread_too() -> None:
    tables = np.repeat(np.arange(CAPACITY // 500, dtype=np.uint32), 500)
    ids = np.tile(np.arange(500, dtype=np.int64), CAPACITY // 500)
    check_spread(full(tables, ids)._buckets)


def test_after_many_evictions_it_is_as_good_as_new() -> None:
    """No tombstone, and no row that went past a group stays there: what a group holds does not depend on the past."""
    n, generations = 2000, 200
    directory = Directory(n)
    tables, counts, slots = np.zeros(n, np.uint32), np.ones(n, np.int32), np.empty(n, np.int32)
    for first in range(0, generations * n, n):
        directory.admit(tables, np.arange(first, first + n), counts, slots)
    new = filled(tags_of(tables, np.arange((generations - 1) * n, generations * n)))
    assert rows_in_groups(directory._buckets) == rows_in_groups(new)
    assert distances(directory._buckets).sum() == distances(new).sum() > 0


@pytest.mark.parametrize("tag", [0, 1, 0x80000000, 0xFFFFFFFF])
def test_rows_of_one_tag_are_told_apart(tag: int) -> None:
    """A table number can be chosen for any id so that the tag comes out as wanted: 60 rows compete for one home."""
    random = np.random.default_rng(tag)
    ids = random.integers(-(2**63), 2**63 - 1, 120)
    plain = tags_of(np.zeros(len(ids), np.uint32), ids)
    inverse = pow(_SPREAD, -1, 2**32)
    tables = np.array([((int(t) ^ tag) * inverse) % 2**32 for t in plain], np.uint32)
    assert (tags_of(tables, ids) == tag).all()

    directory, slots = Directory(100), np.empty(60, np.int32)
    directory.admit(tables[:60], ids[:60], np.ones(60, np.int32), slots)
    assert np.unique(distances(directory._buckets)).tolist() == list(range(8))
    found = np.empty(120, np.int32)
    assert directory.find(tables, ids, found) == 60
    np.testing.assert_array_equal(found[:60], slots)
    assert (found[60:] == -1).all()

    directory.remove(slots[::2].copy())
    assert np.unique(distances(directory._buckets)).tolist() == list(range(4))
    assert directory.find(tables, ids, found) == 30
    np.testing.assert_array_equal(found[1:60:2], slots[1::2])
    assert (found[0:60:2] == -1).all()
    directory.admit(tables[60:90], ids[60:90], np.ones(30, np.int32), np.empty(30, np.int32))
    assert directory.find(tables, ids, found) == 60
    assert directory.occupied().tolist() == sorted(found[found >= 0].tolist())


def test_rows_overflow_around_the_ring_and_come_back() -> None:
    """Three groups: 10 rows of the last one and 11 of the first fill those two and overflow into the middle one."""
    buckets = np.zeros(3 * GROUP, np.uint64)
    last, first = 0xFFFFFFFF, 0
    for slot in range(10):
        put(buckets, last, slot)
    assert rows_in_groups(buckets) == [2, 0, 8]
    for slot in range(10, 21):
        put(buckets, first, slot)
    assert rows_in_groups(buckets) == [8, 5, 8]
    assert distances(buckets).sum() == 2 + 5

    slot_ids = np.arange(21) + 100
    assert [probe(buckets, slot_ids, last if slot < 10 else first, slot + 100) for slot in range(21)] == [*range(21)]
    for slot in range(3):  # of the last group: both of its rows come back, and two of the first's into their places
        assert take_out(buckets, last, slot)
        assert len(distances(buckets)) == 20 - slot
    assert rows_in_groups(buckets) == [8, 3, 7]
    assert distances(buckets).sum() == 3
    for slot in range(10, 14):
        assert take_out(buckets, first, slot)
    assert rows_in_groups(buckets) == [7, 0, 7]
    assert distances(buckets).sum() == 0
    assert not take_out(buckets, first, 10)
    assert probe(buckets, slot_ids, first, 110) == -1


@pytest.mark.parametrize(("rows", "words"), [(0, 8), (1, 8), (4, 8), (5, 16), (9, 16), (10, 24), (25_836, 43_928)])
def test_tables_are_whole_groups_with_an_empty_word_at_least(rows: int, words: int) -> None:
    assert bucket_count(rows) == words


class TableMachine(RuleBasedStateMachine):
    """A table of three groups, nearly full, against a dict of slot -> (tag, id)."""

    def __init__(self) -> None:
        super().__init__()
        self.buckets = np.zeros(3 * GROUP, np.uint64)
        self.slot_ids = np.zeros(len(self.buckets) - 1, np.int64)
        self.rows: dict[int, tuple[int, int]] = {}

    @rule(
        data=st.data(),
        count=st.integers(1, 8),
        tag=st.sampled_from([0, 1, 2**31, 2**32 - 1]) | st.integers(0, 2**32 - 1),
    )
    def enter(self, data: st.DataObject, count: int, tag: int) -> None:
        """Rows that share a tag."""
        for slot in [slot for slot in range(len(self.slot_ids)) if slot not in self.rows][:count]:
            id = data.draw(st.integers(0, 50).filter(lambda id: (tag, id) not in self.rows.values()))
            put(self.buckets, tag, slot)
            self.slot_ids[slot], self.rows[slot] = id, (tag, id)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 4))
    def leave(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.rows))):
            slot = data.draw(st.sampled_from(sorted(self.rows)))
            tag, _ = self.rows.pop(slot)
            assert take_out(self.buckets, tag, slot)
            before = self.buckets.copy()
            assert not take_out(self.buckets, tag, slot)
            assert (self.buckets == before).all()
            self.every_group_on_the_way_is_full()

    @rule(tag=st.sampled_from([0, 1, 2**31, 2**32 - 1]), id=st.integers(0, 50))
    def look_up(self, tag: int, id: int) -> None:
        slots = [slot for slot, row in self.rows.items() if row == (tag, id)]
        assert probe(self.buckets, self.slot_ids, tag, id) == (slots[0] if slots else -1)

    @invariant()
    def every_group_on_the_way_is_full(self) -> None:
        assert len(distances(self.buckets)) == len(self.rows)

    @invariant()
    def the_rows_are_the_models(self) -> None:
        words = sorted(tag << 32 | slot + 1 for slot, (tag, _) in self.rows.items())
        assert sorted(self.buckets[self.buckets != 0].tolist()) == words
        for slot, (tag, id) in self.rows.items():
            assert probe(self.buckets, self.slot_ids, tag, id) == slot


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
