"""The set of ghosts against two ordered dictionaries, and the keys of rows."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from numba import njit
from numpy.typing import NDArray

from tiered_emb.cache.ghosts import (
    LENGTHS,
    add_ghost,
    drop_oldest_ghost,
    find_ghost,
    ghosts_bytes,
    key_of,
    make_ghosts,
    remove_ghost,
    resized_ghosts,
)
from tiered_emb.cache.queues import HEADS

# Few upper halves, so that many keys want the same bucket; few lower ones, so that many are there already.
KEYS = st.builds(
    lambda upper, lower: np.uint64(upper << 32 | lower),
    st.sampled_from([0, 1, 2**31, 2**32 - 2, 2**32 - 1]),
    st.one_of(st.integers(0, 7), st.sampled_from([2**32 - 2, 2**32 - 1])),
)


@njit
def find(ghosts, key):
    return find_ghost(ghosts, key)


@njit
def add(ghosts, key):
    add_ghost(ghosts, key)


@njit
def remove(ghosts, item):
    remove_ghost(ghosts, item)


@njit
def drop_oldest(ghosts, head):
    drop_oldest_ghost(ghosts, head)


@njit
def keys_of(tables, ids):
    return np.array([key_of(tables[i], ids[i]) for i in range(len(ids))])


class GhostsMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(0, 12))
    def make(self, capacity: int) -> None:
        self.ghosts, self.capacity = make_ghosts(capacity), capacity
        self.model: tuple[OrderedDict[int, None], OrderedDict[int, None]] = OrderedDict(), OrderedDict()

    @rule(keys=st.lists(KEYS, max_size=6))
    def add(self, keys: list[np.uint64]) -> None:
        for key in keys:
            own, other = self.model[int(key) & 1], self.model[1 - (int(key) & 1)]
            if int(key) in own or self.capacity == 0:
                continue
            if len(own) + len(other) == self.capacity:
                (own or other).popitem(last=False)
            own[int(key)] = None
            add(self.ghosts, key)

    @rule()
    def add_to_no_room(self) -> None:
        if self.capacity == 0:
            add(self.ghosts, np.uint64(6))

    @rule(keys=st.lists(KEYS, max_size=6))
    def remove(self, keys: list[np.uint64]) -> None:
        for key in keys:
            item = find(self.ghosts, key)
            assert (item >= 0) == (int(key) in self.model[int(key) & 1])
            if item >= 0:
                remove(self.ghosts, item)
                del self.model[int(key) & 1][int(key)]

    @rule(head=st.integers(0, 1))
    def drop_oldest(self, head: int) -> None:
        if self.model[head]:
            drop_oldest(self.ghosts, head)
            self.model[head].popitem(last=False)

    @rule(capacity=st.integers(0, 16))
    def resize(self, capacity: int) -> None:
        for head in (1, 0):
            while self.model[head] and sum(map(len, self.model)) > capacity:
                drop_oldest(self.ghosts, head)
                self.model[head].popitem(last=False)
        self.ghosts, self.capacity = resized_ghosts(self.ghosts, capacity), capacity

    @invariant()
    def the_lists_are_the_models(self) -> None:
        for head in (0, 1):
            keys, node = [], int(self.ghosts.links[2 * head + 1])
            while node >= HEADS:
                keys.append(int(self.ghosts.keys[node - HEADS]))
                assert find(self.ghosts, self.ghosts.keys[node - HEADS]) == node - HEADS
                node = int(self.ghosts.links[2 * node + 1])
            assert keys == list(self.model[head])
            assert self.ghosts.ledger[LENGTHS + head] == len(keys)
        assert np.count_nonzero(self.ghosts.buckets) == sum(map(len, self.model))


TestGhosts = GhostsMachine.TestCase
TestGhosts.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def test_a_single_list_keeps_its_newest() -> None:
    ghosts = make_ghosts(5)
    for key in range(0, 40, 2):
        add(ghosts, np.uint64(key))
    smaller, larger = resized_ghosts(ghosts, 2), resized_ghosts(ghosts, 9)
    assert [find(smaller, np.uint64(key)) >= 0 for key in (38, 36, 34)] == [True, True, False]
    assert [find(larger, np.uint64(key)) >= 0 for key in (38, 30, 28)] == [True, True, False]


def test_look_ups_stay_short_after_many_generations() -> None:
    """Deletion leaves no tombstone: the table holds no more words than ghosts after 500 times its size."""
    ghosts, keys = make_ghosts(100), keys_of(np.zeros(50_000, np.uint32), np.arange(50_000))
    for key in keys:
        add(ghosts, key)
    assert np.count_nonzero(ghosts.buckets) == 100
    assert all(find(ghosts, key) >= 0 for key in keys[-100:])
    assert all(find(ghosts, key) < 0 for key in keys[:1000])


@pytest.mark.parametrize("stride", [1, 8, 2**20, 2**32, -(2**44)])
def test_keys_of_regular_rows_are_distinct_and_of_the_first_list(stride: int) -> None:
    ids = np.tile(np.arange(20_000, dtype=np.int64) * stride, 20)
    tables: NDArray[np.uint32] = np.repeat(np.array([*range(10), *range(2**32 - 10, 2**32)], np.uint32), 20_000)
    keys = keys_of(tables, ids)
    assert len(np.unique(keys)) == len(keys)
    assert not (keys & np.uint64(1)).any()
    upper = np.unique(keys >> np.uint64(32))  # of n random ones n^2 / 2^33 are missing: 19
    assert len(keys) - len(upper) < 80


def test_row_0_of_table_0_is_a_ghost_as_any_other() -> None:
    ghosts, key = make_ghosts(2), keys_of(np.zeros(1, np.uint32), np.zeros(1, np.int64))[0]
    assert find(ghosts, key) < 0
    add(ghosts, key)
    assert find(ghosts, key) >= 0


@pytest.mark.parametrize("capacity", [0, 1, 7, 8, 1000, 12345])
def test_bytes_are_what_is_said(capacity: int) -> None:
    assert sum(array.nbytes for array in make_ghosts(capacity)) == ghosts_bytes(capacity)
