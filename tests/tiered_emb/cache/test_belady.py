"""Belady: against golden miss ratios, a slow model, and all there is to choose from on small traces."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiered_emb import ConfigError, TierConfig, TieredEmbeddingBag
from tiered_emb.cache import Directory
from tiered_emb.cache.belady import Belady, next_uses
from tiered_emb.sim.curves import replay_batches
from tiered_emb.sim.requests import Requests

NEVER = 1 << 60


def requests_of(ids: list[int] | NDArray[np.int64], bounds: list[int] | None = None) -> Requests:
    return Requests.of(0, np.asarray(ids, np.int64), None if bounds is None else np.array(bounds, np.int64))


def directory_of(requests: Requests, capacity: int) -> Directory:
    return Directory(capacity, Belady(capacity, requests.next_use))


def missed(requests: Requests, capacity: int) -> list[bool]:
    out = np.empty(len(requests), np.bool_)
    count = directory_of(requests, capacity).replay(requests.tables, requests.ids, out)
    assert count == out.sum()
    return out.tolist()


def slow_misses(ids: list[int], capacity: int) -> int:
    """Farthest next request first, looked up anew at every miss."""
    resident: set[int] = set()
    misses = 0
    for i, id in enumerate(ids):
        if id not in resident:
            misses += 1
            if len(resident) == capacity:
                later = {row: next((j for j in range(i + 1, len(ids)) if ids[j] == row), NEVER) for row in resident}
                resident.remove(max(resident, key=lambda row: later[row]))
            resident.add(id)
    return misses


def least_misses(batches: list[set[int]], capacity: int) -> int:
    """The fewest misses of any choice of victims, where a batch's rows are all there at once."""
    states = {frozenset[int](): 0}
    for batch in batches:
        following: dict[frozenset[int], int] = {}
        for resident, misses in states.items():
            others = resident - batch
            for kept in combinations(sorted(others), min(len(others), capacity - len(batch))):
                after = frozenset(batch).union(kept)
                cost = misses + len(batch - resident)
                following[after] = min(cost, following.get(after, NEVER))
        states = following
    return min(states.values())


def test_next_uses() -> None:
    out = np.empty(6, np.int64)
    next_uses(np.array([0, 1, 0, 2, 1, 0], np.int32), 3, out)
    assert out.tolist() == [2, 4, 5, -1, -1, -1]


@pytest.mark.parametrize(("capacity", "expected"), [(1, 9), (2, 7), (3, 5), (4, 5), (5, 5)])
def test_an_example_by_hand(capacity: int, expected: int) -> None:
    assert sum(missed(requests_of([1, 2, 3, 4, 1, 2, 5, 1, 2]), capacity)) == expected


@given(st.lists(st.integers(-3, 9), min_size=1, max_size=150), st.integers(1, 8))
def test_misses_are_those_of_a_slow_model(ids: list[int], capacity: int) -> None:
    assert sum(missed(requests_of(ids), capacity)) == slow_misses(ids, capacity)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=14), st.integers(1, 4))
def test_no_choice_of_victims_has_fewer_misses(ids: list[int], capacity: int) -> None:
    assert sum(missed(requests_of(ids), capacity)) == least_misses([{id} for id in ids], capacity)


@given(
    st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), min_size=1, max_size=8),
    st.integers(0, 3),
)
def test_no_choice_of_victims_has_fewer_misses_in_batches(batches: list[list[int]], spare: int) -> None:
    ids = [id for batch in batches for id in batch]
    bounds = np.cumsum([0, *map(len, batches)]).tolist()
    unique = requests_of(ids, bounds).batches
    capacity = unique.largest + spare
    policy = Belady(capacity, unique.unique.next_use)
    misses = replay_batches(unique, Directory(capacity, policy), policy)
    assert misses == least_misses([set(batch) for batch in batches], capacity)


def test_a_long_trace_with_a_tree_of_several_levels() -> None:
    ids = (np.random.default_rng(0).zipf(1.1, 30_000) % 4000).astype(np.int64)
    requests = requests_of(ids)
    before = None
    for capacity in (1, 63, 64, 65, 700, 4000):
        misses = sum(missed(requests, capacity))
        lru = Directory(capacity, "lru").replay(requests.tables, requests.ids, np.empty(len(ids), np.bool_))
        assert misses <= lru
        assert before is None or misses <= before
        before = misses
    assert before == requests.distinct


def test_miss_ratios_are_the_golden_ones(require_shared: Callable[[str], Path]) -> None:
    spec = importlib.util.spec_from_file_location("shared_traces", require_shared("traces/load.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ids = np.asarray(module.load("web12"), np.int64)
    requests = requests_of(ids)
    with open(require_shared("traces/golden.csv"), newline="") as file:
        golden = [row for row in csv.DictReader(file) if (row["trace"], row["policy"]) == ("web12", "Belady")]
    assert len(golden) == 4
    for row in golden:
        assert f"{np.mean(missed(requests, int(row['cache_objects']))):.6f}" == row["miss_ratio"]


def test_what_is_removed_is_no_victim_and_slots_may_become_fewer_and_more() -> None:
    requests = requests_of([1, 2, 3, 4, 4, 3, 2, 5, 6, 7, 3, 2])
    directory = directory_of(requests, 6)
    directory.replay(requests.tables[:4], requests.ids[:4], np.empty(4, np.bool_))  # 1: never, 2: 6, 3: 5, 4: 4
    slots = np.empty(1, np.int32)
    directory.find(requests.tables[:1], requests.ids[:1], slots)
    directory.remove(slots)
    assert directory.resize(4).ids.tolist() == []
    directory.replay(requests.tables[4:7], requests.ids[4:7], np.empty(3, np.bool_))  # 4: never, 3: 10, 2: 11
    out = np.empty(3, np.bool_)
    assert directory.replay(requests.tables[7:10], requests.ids[7:10], out) == 3  # 5 takes the free slot, 6 and 7 one
    assert {2, 3} < set(directory.slot_ids[directory.occupied()].tolist())  # of those never asked for again
    assert directory.replay(requests.tables[10:], requests.ids[10:], np.empty(2, np.bool_)) == 0


def test_a_pinned_row_stays_however_late_it_is_due() -> None:
    requests = requests_of([1, 2, 3, 2, 3])
    directory = directory_of(requests, 2)
    one, slots = np.ones(1, np.int32), np.empty(1, np.int32)
    for i in (0, 1):
        directory.admit(requests.tables[i : i + 1], requests.ids[i : i + 1], one, slots)
        if i == 0:
            directory.pin(slots.copy())  # 1 is never asked for again
    assert directory.admit(requests.tables[2:3], requests.ids[2:3], one, slots).victim_ids.tolist() == [2]


def test_saved_and_loaded_it_goes_on_with_the_same_misses() -> None:
    ids = (np.random.default_rng(1).zipf(1.2, 4000) % 300).astype(np.int64)
    requests, whole = requests_of(ids), np.empty(4000, np.bool_)
    directory_of(requests, 40).replay(requests.tables, requests.ids, whole)
    first, second = directory_of(requests, 40), directory_of(requests, 40)
    out = np.empty(4000, np.bool_)
    first.replay(requests.tables[:1500], requests.ids[:1500], out[:1500])
    second.load(first.save())
    second.replay(requests.tables[1500:], requests.ids[1500:], out[1500:])
    np.testing.assert_array_equal(out, whole)
    second.clear()
    second.replay(requests.tables, requests.ids, out)
    np.testing.assert_array_equal(out, whole)


def test_requests_after_the_last_one_known_are_refused() -> None:
    requests = requests_of([1, 2, 1])
    directory = directory_of(requests, 2)
    directory.replay(requests.tables, requests.ids, np.empty(3, np.bool_))
    for id in (1, 9):
        with pytest.raises(ValueError, match="knows the future of 3 requests"):
            directory.replay(np.zeros(1, np.uint32), np.array([id]), np.empty(1, np.bool_))


def test_no_tier_offers_it_and_the_reason_is_said() -> None:
    reason = r"expected one of .*lru.* \(belady must know every request to come"
    with pytest.raises(ValueError, match=reason):
        Directory(10, "belady")
    with pytest.raises(ConfigError, match=reason):
        TieredEmbeddingBag(10, 4, tiers=TierConfig(policy="belady"))


def test_a_policy_of_another_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="a policy of 3 slots cannot order a Directory of 4"):
        Directory(4, Belady(3, np.array([-1])))


def test_batches_may_come_in_any_order_inside() -> None:
    unique = requests_of([1, 2, 3, 2, 4, 1, 3, 4], [0, 2, 4, 6, 8]).batches
    assert [unique.unique.ids[a:b].tolist() for a, b in pairwise(unique.ends.tolist())] == [
        [1, 2],
        [3, 2],
        [4, 1],
        [3, 4],
    ]
    policy = Belady(3, unique.unique.next_use)
    assert replay_batches(unique, Directory(3, policy), policy) == least_misses([{1, 2}, {3, 2}, {4, 1}, {3, 4}], 3)
